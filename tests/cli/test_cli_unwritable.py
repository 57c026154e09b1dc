"""Folders and disks that cannot be written to: one line that says so, exit code 2, an index stays as it is.

What is wrong with the words of a command is in bad_inputs.txt.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cli_helpers import Run, checksums, is_refused

from full_disk import files_no_larger_than


def test_a_read_only_folder_is_refused(run: Run, models: dict[str, Path], text: Path, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked").chmod(0o555)
    with _as_ordinary_user():
        ran = run("scan", models["plain"], text, "-o", tmp_path / "locked" / "index")
    assert is_refused(ran, "not permitted", "-o")


def test_a_read_only_index_can_be_read_but_not_replaced(
    run: Run, models: dict[str, Path], plain: Path, text: Path
) -> None:
    before = checksums(plain)
    (plain / ".lock").chmod(0o444)
    plain.chmod(0o555)
    with _as_ordinary_user():
        shown = run("show", plain, "L0N0")
        replaced = run("scan", models["plain"], text, "-o", plain, "--fresh", "--threads", 1)
    plain.chmod(0o755)
    assert shown.code == 0
    assert is_refused(replaced, "not permitted")
    assert checksums(plain) == before


def test_a_full_disk_is_named(run: Run, models: dict[str, Path], text: Path, tmp_path: Path) -> None:
    with files_no_larger_than(600):
        ran = run("scan", models["plain"], text, "-o", tmp_path / "out", "--threads", 1)
    assert is_refused(ran, "cannot write")


_DAC_OVERRIDE, _CAPABILITY_VERSION = 1, 0x20080522


@contextmanager
def _as_ordinary_user() -> Iterator[None]:
    """Root may write anywhere; within, this thread may not (Linux: without the capability to pass over modes)."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    data = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, data) == 0
    kept = data[0]
    data[0] = kept & ~(1 << _DAC_OVERRIDE)
    assert libc.capset(header, data) == 0  # giving up a capability is always allowed
    try:
        yield
    finally:
        data[0] = kept
        libc.capset(header, data)
