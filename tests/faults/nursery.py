"""Runs commands of memlens in forks of one warm process, with a fault at a chosen file-system event of each.

An event is a call that opens a file for writing, syncs, renames, removes or makes a folder. A fork counts its events;
at event number `at` it is killed, gets an error of the system, or receives a signal. Each line on stdin is a request as
JSON, each line on stdout its outcome. Only forks have their calls replaced, so that requests do not see each other.
"""
# ruff: noqa: PTH115, PTH118

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

KILL = "kill"


def places(count: int, sample: int, seed: int) -> list[int]:
    """All numbers below `count` with `make faults`, otherwise a seeded sample of them."""
    if os.environ.get("MEMLENS_FAULTS") == "all" or count <= sample:
        return list(range(count))
    return sorted(random.Random(seed).sample(range(count), sample))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of an index but its locks."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.endswith("lock")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@dataclass(frozen=True)
class Outcome:
    """How a command ended: its exit code (minus the signal that killed it), its events in order, what it printed."""

    code: int
    events: list[str]
    out: str
    err: str


class Events:
    """Counts the file-system events of this process below `folder`, and lets the fault happen at one of them."""

    def __init__(self, folder: str, at: int | None, fault: str, log: int) -> None:
        self.folder, self.at, self.fault, self.log = os.path.realpath(folder), at, fault, log
        self.count = 0

    def happen(self, kind: str, target: Any) -> None:
        path = self.path_of(target)
        if not path.startswith(self.folder):
            return
        if self.count == self.at:
            if self.fault == KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.fault.startswith("SIG"):
                os.kill(os.getpid(), signal.Signals[self.fault])
            else:
                self.count += 1
                raise OSError(number := getattr(errno, self.fault), os.strerror(number), path)
        self.count += 1
        os.write(self.log, f"{kind} {os.path.relpath(path, self.folder)}\n".encode())

    @staticmethod
    def path_of(target: Any) -> str:
        if isinstance(target, int):
            return os.readlink(f"/proc/self/fd/{target}")
        return os.path.realpath(os.fspath(target)) if not isinstance(target, bytes) else os.fsdecode(target)

    def install(self) -> None:
        """Replace the calls of os and io that change a file system."""

        def wrap(module: Any, name: str, kind: str) -> None:
            call: Callable[..., Any] = getattr(module, name)

            def wrapped(target: Any, *arguments: Any, **options: Any) -> Any:
                if options.get("dir_fd") is None:  # shutil.rmtree works relative to an open folder
                    self.happen(kind, target)
                else:
                    self.happen(kind, os.path.join(os.readlink(f"/proc/self/fd/{options['dir_fd']}"), target))
                return call(target, *arguments, **options)

            setattr(module, name, wrapped)

        for name in ("replace", "rename", "unlink", "remove", "mkdir", "rmdir", "fsync", "truncate", "link"):
            wrap(os, name, name)
        opened = io.open

        def open_(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if not isinstance(file, int) and set(mode) & set("wax+"):
                self.happen("write", file)
            return opened(file, mode, *arguments, **options)

        io.open = open_
        builtins.open = open_


def run_one(arguments: Sequence[str], folder: str, at: int | None, fault: str, delay: float | None = None) -> Outcome:
    """Run one command in a fork; with a delay, the fault is a signal from outside after so many seconds."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, tempfile.TemporaryFile() as log:
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            code = 70
            try:
                from memlens.cli import main

                if delay is None:
                    Events(folder, at, fault, log.fileno()).install()
                signal.signal(signal.SIGINT, signal.default_int_handler)
                code = main(list(arguments))
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else 1
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        if delay is not None:
            time.sleep(delay)
            os.kill(child, signal.Signals[fault])
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

        def text(file: Any) -> str:
            file.seek(0)
            return str(file.read().decode(errors="replace"))

        return Outcome(code, text(log).splitlines(), text(out), text(err))


def serve() -> None:
    """Warm up (imports, compiled loops) with the commands of the first line, then answer requests."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    from memlens.cli import main

    requests = sys.stdin
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for arguments in json.loads(requests.readline()):
        code = main(arguments)
        assert code == 0, (arguments, code)
    print("ready", file=answers, flush=True)
    for line in requests:
        print(json.dumps(asdict(run_one(**json.loads(line)))), file=answers, flush=True)


class Nursery:
    """The warm process, from outside: `run` gives the outcome of one command with one fault."""

    def __init__(self, warm_up: Sequence[Sequence[str]]) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.send([list(map(str, arguments)) for arguments in warm_up])
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == "ready", "the commands of the warm-up failed"

    def send(self, content: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(content) + "\n")
        self.process.stdin.flush()

    def run(
        self,
        arguments: Sequence[Any],
        folder: Path,
        at: int | None = None,
        fault: str = KILL,
        delay: float | None = None,
    ) -> Outcome:
        """Run `memlens ARGUMENTS`; the fault happens at event number `at` below `folder` or after a delay, or never."""
        given = [str(argument) for argument in arguments]
        self.send({"arguments": given, "folder": str(folder), "at": at, "fault": fault, "delay": delay})
        assert self.process.stdout is not None
        return Outcome(**json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


if __name__ == "__main__":
    serve()
