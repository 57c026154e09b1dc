"""Processes of this machine as /proc lists them."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from waiting import wait_until


class Process(NamedTuple):
    """A process that has not ended."""

    number: int
    parent: int
    session: int
    command: str


def list_processes() -> list[Process]:
    """Return all processes that have not ended."""
    processes = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            state, parent, _, session = status.read_text().rpartition(")")[2].split()[:4]
            command = status.with_name("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if state not in "ZX":
                processes.append(Process(int(status.parent.name), int(parent), int(session), command))
    return processes


def list_descendants(number: int) -> list[Process]:
    """Return the children of a process, their children, and so on."""
    processes, ancestors, descendants = list_processes(), {number}, []
    while children := [one for one in processes if one.parent in ancestors]:
        ancestors = {child.number for child in children}
        descendants += children
    return descendants


def list_workers(number: int) -> list[int]:
    """Return the numbers of the worker processes of a process."""
    return [one.number for one in list_processes() if one.parent == number and "popen_loky" in one.command]


def wait_until_ended(numbers: Iterable[int]) -> None:
    """Return when none of these processes is alive."""
    numbers = set(numbers)
    wait_until(lambda: not any(one.number in numbers for one in list_processes()), f"processes {numbers} end")
