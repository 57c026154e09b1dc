"""One rule for every file or folder that a person names as output: nothing of theirs is overwritten.

inside an index or a model folder           always refused
a device, a FIFO, a socket, a link          always refused: they would be replaced, not written to
a file or folder that memlens made before   replaced, and so is an empty file
any other file                              refused, unless --force

The folder of an index itself, which `scan -o` names, has rules of its own in index/staging.py; here it is only kept out
of other indexes and of models.
"""

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
    refuse_place(path)
    refuse_content(path, is_ours, force=force)


def refuse_content(path: Path, is_ours: Callable[[bytes], bool], *, force: bool = False) -> None:
    """The same where the place is known to be right, as that of an index's own report."""
    _refuse_kind(path)
    if path.is_dir():
        raise OutputError(f"{path} is a folder; name a file")
    beside = path.with_name(path.name + ".part")  # what files.replacing writes first: a browser may load a file there
    _refuse_kind(beside)
    for one in (path, beside):
        if one.is_file() and not force and (head := _head(one)) and not is_ours(head):
            raise OutputError(f"{one} was not made by memlens; name another file, or replace it with --force")


def refuse_place(path: Path) -> None:
    """Refuse what lies inside an index or a model, and anything but a file or a folder."""
    _refuse_kind(path)
    refuse_inside_others(path)


def refuse_inside_others(path: Path) -> None:
    """Refuse a path inside an index or a model, by whatever links and dots it is named."""
    refuse_nul(path)
    try:
        resolved = path.resolve()
    except (OSError, RuntimeError) as error:  # links that lead to each other
        raise OutputError(f"cannot write {path}: its links lead nowhere; name another place") from error
    for folder in resolved.parents:
        kind = valuable_folder(folder)
        if kind:
            raise OutputError(f"{path} lies inside {folder}, which is {kind}; name a place outside of it")


def refuse_nul(path: Path) -> None:
    if "\0" in str(path):
        raise OutputError("a file name cannot hold a NUL character; name another file")


def prepare_output_folder(folder: Path, *, force: bool = False) -> None:
    """Make a folder for files of memlens' own making, or refuse one that holds something else."""
    refuse_place(folder)
    if kind := valuable_folder(folder):
        raise OutputError(f"{folder} is {kind}; name another folder")
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder} is a file; name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / FOLDER_MARK).is_file() and not force:
        raise OutputError(f"{folder} holds files that memlens did not make; name another folder, or say --force")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FOLDER_MARK).write_text("memlens made the files in this folder and will replace them.\n")
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror or error}; name another folder") from error


def _refuse_kind(path: Path) -> None:
    refuse_nul(path)
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        mode = 0
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}; name another file") from error
    for is_kind, words in _KINDS:
        if is_kind(mode):
            raise OutputError(f"{path} is {words}, which would be replaced; name a file, or leave -o out to print")


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as handle:
            return handle.read(_HEAD)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}; name another file") from error


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
