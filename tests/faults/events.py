"""Events of a command: files below a folder that it opens, renames, removes or syncs, and messages that it sends.

A fault can happen at each event. Most events are audit events of Python, which also cover its C code.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hub_stand_in import redirect_client
from memlens.cli import main

Fault = Callable[[int, str], object]  # called with the number of an event and the event, like "rename index/a.parquet"
_DESCRIPTOR = {"os.rename": 2, "os.remove": 1, "os.rmdir": 1, "os.mkdir": 2}  # the argument that holds the dir_fd
_fsync, _send = os.fsync, socket.socket.send
_current: Events | None = None


class Events:
    """Lists the events inside a `with` block and calls `fault` at each."""

    def __init__(self, folder: Path, fault: Fault | None = None) -> None:
        self.folder, self.fault = folder, fault
        self.log: list[str] = []

    def __enter__(self) -> Events:
        global _current
        _install_hooks()
        _current = self
        return self

    def __exit__(self, *_: object) -> None:
        global _current
        _current = None

    def add(self, kind: str, path: Path) -> None:
        global _current
        if not path.is_relative_to(self.folder):
            return
        self.log.append(f"{kind} {path.relative_to(self.folder)}")
        _current = None  # the actions of a fault are not events
        try:
            if self.fault is not None:
                self.fault(len(self.log) - 1, self.log[-1])
        finally:
            _current = self


@cache
def _install_hooks() -> None:
    sys.addaudithook(_audit)
    os.fsync, socket.socket.send = _sync, _send_message  # type: ignore[method-assign]


def _audit(name: str, arguments: tuple[Any, ...]) -> None:
    if _current is None or not (name == "open" or name in _DESCRIPTOR) or isinstance(arguments[0], int):
        return
    is_read = name == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR)
    descriptor = -1 if name == "open" else arguments[_DESCRIPTOR[name]]
    folder = Path.cwd() if descriptor < 0 else Path(f"/proc/self/fd/{descriptor}").readlink()
    _current.add("read" if is_read else name.removeprefix("os."), folder / os.fsdecode(arguments[0]))


def _sync(descriptor: int) -> None:
    if _current is not None:
        _current.add("sync", Path(f"/proc/self/fd/{descriptor}").readlink())
    _fsync(descriptor)


def _send_message(connection: socket.socket, *arguments: Any) -> int:
    if _current is not None and connection.family == socket.AF_INET:
        _current.add("send", _current.folder)
    return _send(connection, *arguments)


def run_until_killed(words: list[str], folder: Path, number: int, hub: str) -> None:
    """Run a command as the first process of a session with the Hub at this address, and kill it at an event."""

    def kill(event_number: int, _event: str) -> None:
        if event_number == number:
            os.kill(os.getpid(), signal.SIGKILL)

    os.setsid()
    redirect_client(hub, folder / "home", pytest.MonkeyPatch())
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    with Events(folder, kill):
        sys.exit(main(words))
