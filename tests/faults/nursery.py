"""Runs commands of memlens in forks of one warm process, with a fault at a chosen file-system event of each.

An event is a call that opens a file for writing, syncs, renames, removes or makes a folder, or sending to a
server; for races also a moment before or after a look at a file. A fork
counts its events; at event number `at` it is killed, gets an error of the system or a signal. One that is stopped goes
on when others have done what `meanwhile` says. With SHORT, no file can grow beyond a size. Each line on stdin is a
request as JSON, each line on stdout its outcome. Only forks have their calls replaced, so that requests do not see each
other. `ask FOLDER ADDRESS...` is no verb but the workbench's answers.
"""
# ruff: noqa: PTH100, PTH115, PTH118

from __future__ import annotations

import builtins
import errno
import faulthandler
import io
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

KILL, SHORT = "kill", "short"  # SHORT: no file can grow beyond `at` bytes
ASKING = (signal.SIGINT, signal.SIGTERM)
LONGEST = 300  # seconds; a command that hangs says where and ends
EVERYTHING = os.environ.get("MEMLENS_FAULTS") == "all"  # `make faults`


def places(count: int, sample: int, seed: int) -> list[int]:
    """All numbers below `count` with `make faults`, otherwise a seeded sample of them."""
    if EVERYTHING or count <= sample:
        return list(range(count))
    return sorted(random.Random(seed).sample(range(count), sample))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of an index but its locks."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.endswith("lock")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@dataclass(frozen=True)
class Outcome:
    """The end of a command: its exit code (minus the signal that killed it), its events in order, what it printed."""

    code: int
    events: list[str]
    out: str
    err: str


class Events:
    """Counts the file-system events of this process below `folder`, and lets the fault happen at one of them."""

    def __init__(self, folder: str, at: int | None, fault: str, log: int, looks: bool = False) -> None:
        self.folder, self.at, self.fault, self.log = os.path.realpath(folder), at, fault, log
        self.looks = looks
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

        def wrap_look(name: str) -> None:
            call: Callable[..., Any] = getattr(os, name)

            def wrapped(target: Any = ".", *arguments: Any, **options: Any) -> Any:
                if isinstance(target, int) or options.get("dir_fd") is not None:
                    return call(target, *arguments, **options)
                path = os.path.abspath(os.fspath(target))  # realpath would look at files itself
                self.happen(f"before {name}", path)
                try:
                    return call(target, *arguments, **options)
                finally:
                    self.happen(f"after {name}", path)

            setattr(os, name, wrapped)

        for name in ("replace", "rename", "unlink", "remove", "mkdir", "rmdir", "fsync", "truncate", "link"):
            wrap(os, name, name)
        opened = io.open

        def open_(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if not isinstance(file, int) and (self.looks or set(mode) & set("wax+")):
                self.happen("write" if set(mode) & set("wax+") else "read", file)
            return opened(file, mode, *arguments, **options)

        io.open = open_
        builtins.open = open_
        send = socket.socket.send

        def send_(self_: socket.socket, content: Any, *arguments: Any) -> int:
            if self_.family == socket.AF_INET:
                try:
                    self.happen("send", os.path.join(self.folder, "to-others"))
                except OSError:
                    self_.shutdown(socket.SHUT_RDWR)  # a connection that fails is gone
                    raise
            return send(self_, content, *arguments)

        socket.socket.send = send_  # type: ignore[method-assign]
        for name in ("stat", "listdir", "scandir") if self.looks else ():
            wrap_look(name)


def disturb(kind: str, *arguments: str) -> None:
    """Change files as somebody else would while a command is stopped; those that are not there are left alone."""
    path = Path(arguments[0])
    if kind == "memlens":
        run_one(arguments, "/nonexistent")
    elif not path.exists():
        return
    elif kind == "swap":
        away = path.with_name(path.name + "-away")
        path.rename(away)
        Path(arguments[1]).rename(path)
        away.rename(arguments[1])
    else:
        raise ValueError(kind)


def ask(folder: str, *addresses: str) -> int:
    """The workbench's answers as lines of JSON: status and text. POST:ADDRESS:JSON sends something."""
    from fastapi.testclient import TestClient

    from memlens.web.app import create_app
    from memlens.web.workbench import Workbench

    app = create_app(Workbench(folder))
    with TestClient(app, "http://127.0.0.1:8000", raise_server_exceptions=False) as client:
        for address in addresses:
            if address.startswith("POST:"):
                _, place, content = address.split(":", 2)
                answer = client.post(place, json=json.loads(content))
            else:
                answer = client.get(address)
            print(json.dumps([answer.status_code, answer.text]))
    return 0


def run_one(
    arguments: Sequence[str],
    folder: str,
    at: int | None = None,
    fault: str = KILL,
    delay: float | None = None,
    looks: bool = False,
    meanwhile: Sequence[Sequence[str]] = (),
) -> Outcome:
    """Run one command in a fork; with a delay, the fault is a signal from outside after so many seconds."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, tempfile.TemporaryFile() as log:
        signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)  # until the fork is ready to hear them
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            if fault == SHORT and at is not None:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                sys.dont_write_bytecode = True  # half a compiled module would be kept for all later commands
                resource.setrlimit(resource.RLIMIT_FSIZE, (at, resource.RLIM_INFINITY))
            elif delay is None:
                Events(folder, at, fault, log.fileno(), looks).install()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            code = 70
            try:
                code = command(arguments, out.fileno(), err.fileno())
            except KeyboardInterrupt:  # before or after memlens: as Python itself ends
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGINT)
            finally:  # a fork never goes on as what it was forked from
                os._exit(code)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)
        if delay is not None:
            time.sleep(delay)
            os.kill(child, signal.Signals[fault])
        while os.WIFSTOPPED(status := os.waitpid(child, os.WUNTRACED)[1]):
            for step in meanwhile:
                disturb(*step)
            os.kill(child, signal.SIGCONT)
        return Outcome(os.waitstatus_to_exitcode(status), text(log).splitlines(), text(out), text(err))


def command(arguments: Sequence[str], out: int, err: int) -> int:
    """Run a command in this process, its output to these files; the exit code."""
    from memlens.cli import main
    from memlens.errors import MemlensError

    os.dup2(out, 1)
    os.dup2(err, 2)
    faulthandler.dump_traceback_later(LONGEST, exit=True, file=err)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)
        return ask(*arguments[1:]) if arguments[0] == "ask" else main(list(arguments))
    except MemlensError as error:  # of `ask` before the server answers; verbs say it themselves
        print(f"memlens: {error}", file=sys.stderr)
        return 2
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    except KeyboardInterrupt:
        raise
    except BaseException:
        traceback.print_exc()
        return 70
    finally:
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()
        sys.stderr.flush()


def text(file: Any) -> str:
    file.seek(0)
    return str(file.read().decode(errors="replace"))


def run_steps(steps: Sequence[Sequence[str]]) -> list[Outcome | None]:
    """Commands and changes of files in turn, all in one fork, which costs less; None for a change."""
    with tempfile.TemporaryFile() as answers:
        child = os.fork()
        if child == 0:
            for kind, *arguments in steps:
                told = None
                if kind == "memlens":
                    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
                        code = command(arguments, out.fileno(), err.fileno())
                        told = asdict(Outcome(code, [], text(out), text(err)))
                elif kind == "flip":
                    flip(Path(arguments[0]), int(arguments[1]), int(arguments[2]))
                else:
                    shutil.copyfile(*arguments)
                os.write(answers.fileno(), json.dumps(told).encode() + b"\n")
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found = [json.loads(line) for line in text(answers).splitlines()]
    whole = [None if one is None else Outcome(**one) for one in found]
    return [*whole, *[Outcome(code, [], "", "the process has ended")] * (len(steps) - len(whole))]


def flip(path: Path, place: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


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
        request = json.loads(line)
        if "steps" in request:
            told: Any = [None if outcome is None else asdict(outcome) for outcome in run_steps(request["steps"])]
        else:
            told = asdict(run_one(**request))
        print(json.dumps(told), file=answers, flush=True)


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
        **more: Any,
    ) -> Outcome:
        """Run `memlens ARGUMENTS`; the fault happens at event number `at` below `folder` or after a delay, or never."""
        given = [str(argument) for argument in arguments]
        self.send({"arguments": given, "folder": str(folder), "at": at, "fault": fault, "delay": delay, **more})
        assert self.process.stdout is not None
        return Outcome(**json.loads(self.process.stdout.readline()))

    def steps(self, *steps: Sequence[Any]) -> list[Outcome]:
        """Steps in turn in one process: ("memlens", ARGUMENTS...), ("flip", FILE, BYTE, BIT), ("copy", FROM, TO)."""
        self.send({"steps": [[str(part) for part in step] for step in steps]})
        assert self.process.stdout is not None
        return [Outcome(**one) for one in json.loads(self.process.stdout.readline()) if one is not None]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


if __name__ == "__main__":
    serve()
