"""Exceptions of memlens.

    MemlensError            an error that the user can fix; the command line prints one line and exits with code 2
    ├── ModelError          the model cannot be found, read or decomposed into memories
    │   ├── ModelNotFound   no model has this name or path
    │   └── UnsupportedModel  the model loads, but the decomposition of its feed-forward blocks cannot be verified
    ├── CorpusError         the corpus cannot be found, read or split into sentences
    ├── IndexFolderError    the index folder is missing, incomplete, damaged or not an index
    ├── FilesError          a file cannot be read or written, is damaged, or its folder is locked by another process
    ├── HubError            the Hub cannot be reached, rejects a request, or has no complete index under this name
    ├── OutputError         the output path contains something that must not be replaced
    ├── SettingError        an option has an invalid value
    ├── WorkerError         too many worker processes or nodes were lost
    │   └── RayAgentError   a Ray agent that this process depends on has exited
    ├── BusyError           the queue of the workbench is full
    └── UnknownName         a memory, layer, token or experiment does not exist

Each message is one line that names the input, states the problem, and says what to do.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class MemlensError(Exception):
    """An error that the user can fix.

    Example:
        >>> try:
        ...     memlens.open_index("no-such-folder")
        ... except memlens.MemlensError as error:
        ...     print(type(error).__name__)
        IndexFolderError
    """


class ModelError(MemlensError):
    """The model cannot be found, read or decomposed into memories."""


class ModelNotFound(ModelError):  # noqa: N818 - reads as a sentence
    """No model has this name or path."""


class UnsupportedModel(ModelError):  # noqa: N818
    """The model loads, but the decomposition of its feed-forward blocks cannot be verified."""


class CorpusError(MemlensError):
    """The corpus cannot be found, read or split into sentences."""


class IndexFolderError(MemlensError):
    """The index folder is missing, incomplete, damaged or not an index."""


class FilesError(MemlensError):
    """A file cannot be read or written, is damaged, or its folder is locked by another process."""


class HubError(MemlensError):
    """The Hub cannot be reached, rejects a request, or has no complete index under this name."""


class OutputError(MemlensError):
    """The output path contains something that must not be replaced."""


class SettingError(MemlensError):
    """An option has an invalid value."""


class WorkerError(MemlensError):
    """Too many worker processes or nodes were lost."""


class RayAgentError(WorkerError):
    """A Ray agent that this process depends on has exited. Ray will soon terminate this process."""


class BusyError(MemlensError):
    """The queue of the workbench is full."""


class UnknownName(MemlensError):  # noqa: N818
    """A memory, layer, token or experiment does not exist."""


@contextmanager
def needing(extra: str, what: str, kind: type[MemlensError] = SettingError) -> Iterator[None]:
    """Wrap the import of an optional package. If it is missing, raise an error that names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "memlens").split(".")[0] == "memlens":
            raise
        raise kind(f'{what} needs the package {error.name}: pip install "memlens[{extra}]"') from error
