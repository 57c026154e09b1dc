"""The exceptions that memlens raises on purpose.

    MemlensError            something a person can mend; the command line prints it as one line and exits with 2
    ├── ModelError          the model cannot be found, read or seen as memories
    │   ├── ModelNotFound   nothing by that name or at that path
    │   └── UnsupportedModel  it loads, but its feed-forward blocks are not memories that memlens can prove
    ├── CorpusError         the text cannot be found, read or cut into sentences
    ├── IndexFolderError    the index folder is missing, incomplete, damaged, or belongs to something else
    ├── FilesError          a file cannot be read or written, is damaged, or another process writes to its folder
    ├── HubError            the Hub cannot be reached, refuses, or holds something that is not a whole index
    ├── OutputError         a file or folder to write to holds something that must not be replaced
    ├── SettingError        an option has a value that cannot work
    ├── WorkerError         worker processes or nodes were lost too often
    ├── BusyError           the workbench computes for others and enough are waiting already
    └── UnknownName         a memory, layer, token or experiment that does not exist

A message states what was given, what is wrong with it, and what to do. It is one line.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class MemlensError(Exception):
    """Something a person can mend."""


class ModelError(MemlensError):
    """The model cannot be found, read or seen as memories."""


class ModelNotFound(ModelError):  # noqa: N818 - reads as a sentence
    """Nothing by that name or at that path."""


class UnsupportedModel(ModelError):  # noqa: N818
    """The model loads, but its feed-forward blocks cannot be proven to be memories."""


class CorpusError(MemlensError):
    """The text cannot be found, read or cut into sentences."""


class IndexFolderError(MemlensError):
    """The index folder is missing, incomplete, damaged, or belongs to something else."""


class FilesError(MemlensError):
    """A file cannot be read or written, is damaged, or another process writes to its folder."""


class HubError(MemlensError):
    """The Hub cannot be reached, refuses something, or holds something that is not a whole index."""


class OutputError(MemlensError):
    """A file or folder to write to is a place where something of a person's would be lost."""


class SettingError(MemlensError):
    """An option has a value that cannot work."""


class WorkerError(MemlensError):
    """Worker processes or nodes were lost too often."""


class BusyError(MemlensError):
    """The workbench computes for others, and as many are waiting as may wait."""


class UnknownName(MemlensError):  # noqa: N818
    """A memory, layer, token or experiment that does not exist."""


@contextmanager
def needing(extra: str, what: str, kind: type[MemlensError] = SettingError) -> Iterator[None]:
    """Wrap the import of a package that only some commands need: a missing one is a line that names the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "memlens").split(".")[0] == "memlens":
            raise
        raise kind(f'{what} needs the package {error.name}: pip install "memlens[{extra}]"') from error
