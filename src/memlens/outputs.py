"""One rule for every file or folder that a person names as output: nothing of theirs is overwritten.

inside an index or a model folder           always refused
a device, a FIFO, a socket, a link          always refused: they would be replaced, not written to
a file or folder that memlens made before   replaced
any other file                              refused, unless --force
"""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

from memlens.errors import OutputError

_HEAD = 4096  # bytes that tell a file's kind
_KINDS = (
    (stat.S_ISLNK, "a link"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
FOLDER_MARK = "made-by-memlens.txt"


def refuse_output(path: Path, is_ours: Callable[[bytes], bool], *, force: bool = False) -> None:
    """Refuse to write a file where it would replace something of a person's; `is_ours` sees the file's beginning."""
    _refuse_place(path)
    if path.is_dir():
        raise OutputError(f"{path} is a folder; name a file")
    if not path.exists() or force:
        return
    with path.open("rb") as handle:
        if not is_ours(handle.read(_HEAD)):
            raise OutputError(f"{path} was not made by memlens; name another file, or replace it with --force")


def prepare_output_folder(folder: Path, *, force: bool = False) -> None:
    """Make a folder for files of memlens' own making, or refuse one that holds something else."""
    _refuse_place(folder)
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder} is a file; name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / FOLDER_MARK).is_file() and not force:
        raise OutputError(f"{folder} holds files that memlens did not make; name another folder, or say --force")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FOLDER_MARK).write_text("memlens made the files in this folder and will replace them.\n")
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror or error}; name another folder") from error


def _refuse_place(path: Path) -> None:
    if "\0" in str(path):
        raise OutputError("a file name cannot hold a NUL character; name another file")
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        mode = 0
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}; name another file") from error
    for is_kind, words in _KINDS:
        if is_kind(mode):
            raise OutputError(f"{path} is {words}, which would be replaced; name a file, or leave -o out to print")
    for folder in path.absolute().parents:
        kind = valuable_folder(folder)
        if kind:
            raise OutputError(f"{path} lies inside {folder}, which is {kind}; name a place outside of it")


def valuable_folder(folder: Path) -> str:
    """In words, what a folder is that no output may go into: an index, an unfinished scan or a model; else empty."""
    if (folder / "manifest.json").is_file() and (folder / "triggers.parquet").is_file():
        return "an index"
    if (folder / "partial" / "plan.json").is_file():
        return "an unfinished scan"
    weights = any(next(folder.glob(f"*{ending}"), None) for ending in (".safetensors", ".bin", ".pt"))
    if weights and ((folder / "config.json").is_file() or (folder / "dict.txt").is_file()):
        return "a model"
    return ""
