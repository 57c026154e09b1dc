"""Run commands of memlens in forks of one warm process, with a fault at a chosen event of each.

An event is a call that writes, syncs, renames or removes a file below a folder, or that sends something to a server.
With `counts="looks"`, reading a file or its status is an event as well. With `counts="calls"`, an event is a call of a
function of memlens instead. At event number `at` a command is killed, gets a signal or an error of the system, or is
stopped while other steps run. Forks are cheap because the first process has imported and compiled everything.
"""
# ruff: noqa: PTH100, PTH115, PTH118

from __future__ import annotations

import builtins
import errno
import faulthandler
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import memlens
from full_disk import files_no_larger_than
from memlens.files import HashedFile

SHORT = "SHORT"  # no file can grow beyond `at` bytes
PERSISTENT = ("EROFS",)  # errors that every event has from number `at` on
LONGEST = 300  # seconds after which a command that hangs prints where, and ends
PATIENCE = 60.0  # seconds for processes of a command to end after it; orphans are those that live longer than 5
SOURCES = str(Path(memlens.__file__).parent)


@dataclass(frozen=True)
class Outcome:
    """The end of a command. The code is minus the signal that killed it. lingering: seconds until its processes end."""

    code: int
    events: list[str]
    out: str
    err: str
    lingering: float


class Events:
    """Counts the events of this process and causes the fault at one of them."""

    def __init__(self, folder: str, at: int | None, fault: str, log: int, counts: str) -> None:
        self.folder, self.at, self.fault, self.log, self.counts = os.path.realpath(folder), at, fault, log, counts
        self.count = 0

    def happen(self, kind: str, target: Any = None) -> None:
        path = "" if target is None else self.path_of(target)
        if target is not None and not path.startswith(self.folder):
            return
        self.count += 1
        is_now = self.at is not None and self.count - 1 == self.at
        if is_now and self.fault.startswith("SIG"):
            os.kill(os.getpid(), signal.Signals[self.fault])
        elif is_now or (self.fault in PERSISTENT and self.count > (self.at or 0)):
            raise OSError(number := getattr(errno, self.fault), os.strerror(number), path)
        if target is not None:
            os.write(self.log, f"{kind} {os.path.relpath(path, self.folder)}\n".encode())

    @staticmethod
    def path_of(target: Any) -> str:
        if isinstance(target, int):
            return os.readlink(f"/proc/self/fd/{target}")
        return os.path.abspath(os.fsdecode(target))

    def install(self) -> None:
        if self.counts == "calls":

            def profile(frame: Any, event: str, _argument: Any) -> None:
                if event == "call" and frame.f_code.co_filename.startswith(SOURCES):
                    self.happen("call")

            sys.setprofile(profile)
            return
        for name in ("replace", "rename", "unlink", "remove", "mkdir", "rmdir", "fsync", "truncate", "link"):
            self.wrap(os, name)
        for name in ("stat", "listdir", "scandir") if self.counts == "looks" else ():
            self.wrap(os, name)
        opened, send = io.open, socket.socket.send

        def open_(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if not isinstance(file, int) and (self.counts == "looks" or set(mode) & set("wax+")):
                self.happen("write" if set(mode) & set("wax+") else "read", file)
            return opened(file, mode, *arguments, **options)

        def send_(connection: socket.socket, content: Any, *arguments: Any) -> int:
            if connection.family == socket.AF_INET:
                self.happen("send", os.path.join(self.folder, "server"))
            return send(connection, content, *arguments)

        self.wrap_tables()
        io.open = builtins.open = open_
        socket.socket.send = send_  # type: ignore[method-assign]

    def wrap_tables(self) -> None:
        """Count opening and writing of tables, whose file does not use open()."""
        opened, write = HashedFile.__init__, HashedFile.write

        def init(table: Any, path: Any, *arguments: Any) -> None:
            self.happen("write", path)
            opened(table, path, *arguments)

        def write_(table: Any, content: Any) -> int:
            self.happen("write", table.fileno())
            return write(table, content)

        HashedFile.__init__ = init  # type: ignore[method-assign]
        HashedFile.write = write_  # type: ignore[method-assign]

    def wrap(self, module: Any, name: str) -> None:
        call: Callable[..., Any] = getattr(module, name)

        def wrapped(target: Any = ".", *arguments: Any, **options: Any) -> Any:
            place = options.get("dir_fd")  # shutil.rmtree works relative to an open folder
            if place is not None:
                self.happen(name, os.path.join(os.readlink(f"/proc/self/fd/{place}"), target))
            elif not (isinstance(target, int) and name in ("stat", "scandir", "listdir")):
                self.happen(name, target)
            return call(target, *arguments, **options)

        setattr(module, name, wrapped)


def answer(folder: str, *addresses: str) -> int:
    """Print the workbench's answers as lines of JSON: status and text. POST:ADDRESS:JSON sends something."""
    from fastapi.testclient import TestClient

    from memlens.web.app import create_app
    from memlens.web.workbench import Workbench

    app = create_app(Workbench(folder))
    with TestClient(app, "http://127.0.0.1:8000", raise_server_exceptions=False) as client:
        for address in addresses:
            kind, _, rest = address.partition(":")
            place, _, content = rest.partition(":")
            ran = client.post(place, json=json.loads(content)) if kind == "POST" else client.get(address)
            print(json.dumps([ran.status_code, ran.text]))
    return 0


def run_command(arguments: Sequence[str], out: int, err: int) -> int:
    """Run a command in this process with its output in these files. Returns the exit code."""
    from memlens.cli import main
    from memlens.errors import MemlensError

    os.dup2(out, 1)
    os.dup2(err, 2)
    faulthandler.dump_traceback_later(LONGEST, exit=True, file=err)
    try:
        return answer(*arguments[1:]) if arguments[0] == "answer" else main(list(arguments))
    except MemlensError as error:  # raised before the server answers; the command line prints it itself
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
        sys.setprofile(None)
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()
        sys.stderr.flush()


def run_forked(
    arguments: Sequence[str],
    folder: str,
    at: int | None = None,
    fault: str = "SIGKILL",
    counts: str = "writes",
    meanwhile: Sequence[Sequence[str]] = (),
) -> Outcome:
    """Run one command in a fork. If it is stopped, run the steps `meanwhile` before it continues."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, tempfile.TemporaryFile() as log:
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            code = 70
            try:
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_DFL)
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                with files_no_larger_than(at or 0) if fault == SHORT else nullcontext():
                    events = Events(folder, at, fault, log.fileno(), counts)
                    if fault != SHORT:
                        events.install()
                    code = run_command(arguments, out.fileno(), err.fileno())
                    if counts == "calls":
                        os.write(log.fileno(), b"call\n" * events.count)
            finally:
                os._exit(code)
        while os.WIFSTOPPED(status := os.waitpid(child, os.WUNTRACED)[1]):
            for kind, *rest in meanwhile:
                if kind == "memlens":
                    run_forked(rest, "/nonexistent")
                elif kind == "remove":
                    Path(rest[0]).unlink(missing_ok=True)
                else:
                    swap(Path(rest[0]), Path(rest[1]))
            os.kill(child, signal.SIGCONT)
        lingering = wait_for_group(child)
        return Outcome(os.waitstatus_to_exitcode(status), text(log).splitlines(), text(out), text(err), lingering)


def swap(one: Path, other: Path) -> None:
    away = one.with_name(f"{one.name}-away")
    one.rename(away)
    other.rename(one)
    away.rename(other)


def wait_for_group(group: int) -> float:
    """Return the seconds until every process of a group has ended. Those that remain are killed."""
    began = time.monotonic()
    while any(is_in_group(stat, group) for stat in Path("/proc").glob("[0-9]*/stat")):
        if time.monotonic() - began > PATIENCE:
            os.killpg(group, signal.SIGKILL)
        time.sleep(0.02)
    return time.monotonic() - began


def is_in_group(stat: Path, group: int) -> bool:
    try:
        state, _, found = stat.read_text().rpartition(")")[2].split()[:3]
    except OSError:
        return False
    return int(found) == group and state != "Z"


def text(file: Any) -> str:
    file.seek(0)
    return str(file.read().decode(errors="replace"))


def serve() -> None:
    """Warm up with the commands of the first line, then answer requests, one per line."""
    import torch

    from memlens.cli import main

    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for line in sys.stdin:
        request = json.loads(line)
        is_warm_up = isinstance(request, list)
        ran = [main(arguments) for arguments in request] if is_warm_up else asdict(run_forked(**request))
        print(json.dumps(ran), file=answers, flush=True)


class Nursery:
    """The warm process, seen from outside."""

    def __init__(self, *warm_up: Sequence[Any]) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        codes = self.request([[str(part) for part in arguments] for arguments in warm_up])
        assert set(codes) <= {0}, "the commands of the warm-up failed"

    def request(self, content: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(content, default=str) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def run(self, arguments: Sequence[Any], folder: Path, **options: Any) -> Outcome:
        """Run `memlens ARGUMENTS`. Events are those below `folder`; the options are those of run_forked."""
        return Outcome(**self.request({"arguments": [str(part) for part in arguments], "folder": folder, **options}))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


if __name__ == "__main__":
    serve()
