"""From the sources a person names to the list of files to read, in an order that never varies.

A folder is walked recursively, names sorted by code point. Files of other kinds and hidden ones (a leading dot) in a
folder are passed over; a file that is named itself must be of a known kind. Links are followed, except a link to a
folder that is already being walked. This module knows nothing of what is in a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from unicodedata import category

from memlens.corpus.settings import BUNDLED
from memlens.errors import CorpusError

KINDS = (".txt", ".jsonl", ".parquet")
COMPRESSIONS = (".gz", ".zst")
_READABLE = ".txt, .jsonl or .parquet, each also .gz or .zst"

_UNPRINTABLE = ("Cc", "Cs", "Zl", "Zp")  # control characters, half surrogate pairs, line and paragraph separators


@dataclass(frozen=True)
class SourceFile:
    """One file to read: where it is, what it is called in the index, how it is written."""

    path: Path
    name: str  # relative to the folder that was given, with "/", so that it is the same on every machine
    kind: str  # one of KINDS
    compression: str  # one of COMPRESSIONS or ""

    @property
    def shown(self) -> str:
        """The path as it stands in an error message."""
        return printable(str(self.path))


def printable(text: str) -> str:
    """The text on one line and valid UTF-8, whatever bytes a file system or a library put in it."""
    return "".join("\ufffd" if category(character) in _UNPRINTABLE else character for character in text)


def list_files(source: str) -> Iterator[SourceFile]:
    """The files of one source that is not on the Hub."""
    root = Path(str(files("memlens"))) / "bundled" / "corpus" if source == BUNDLED else Path(source)
    try:
        if root.is_dir():
            yield from _list_folder(root)
        elif not root.exists():
            raise CorpusError(f"corpus '{printable(source)}' does not exist; check the path")
        else:
            yield _known_file(root)
    except OSError as problem:
        # what cannot be opened later is reported by the reader; here it is a folder that cannot be listed
        place = printable(str(problem.filename or source))
        raise CorpusError(f"'{place}' cannot be read: {problem.strerror}; check the path and its permissions") from None


def _list_folder(root: Path) -> Iterator[SourceFile]:
    found = False
    for path, name in _walk(root, "", (root.resolve(),)):
        written = _how_written(path)
        if written:
            found = True
            yield SourceFile(path, printable(name), *written)
    if not found:
        raise CorpusError(f"folder '{printable(str(root))}' holds no file memlens can read; it reads {_READABLE}")


def _walk(folder: Path, prefix: str, being_walked: tuple[Path, ...]) -> Iterator[tuple[Path, str]]:
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            target = path.resolve()
            if target not in being_walked:
                yield from _walk(path, f"{prefix}{path.name}/", (*being_walked, target))
        else:
            yield path, prefix + path.name


def _known_file(path: Path) -> SourceFile:
    written = _how_written(path)
    if not written:
        raise CorpusError(f"'{printable(str(path))}' is of an unknown kind; memlens reads {_READABLE}")
    return SourceFile(path, printable(path.name), *written)


def _how_written(path: Path) -> tuple[str, str] | None:
    name = path.name.lower()
    compression = next((ending for ending in COMPRESSIONS if name.endswith(ending)), "")
    name = name.removesuffix(compression)
    kind = next((ending for ending in KINDS if name.endswith(ending)), None)
    return (kind, compression) if kind else None
