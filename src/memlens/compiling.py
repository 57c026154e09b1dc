"""Compiled functions, the cache folder for their machine code, and a sort for use in compiled functions.

numba recompiles a function if its own file changes, but not if another file changes whose compiled functions it calls.
The name of the cache folder therefore contains a hash of all memlens files with compiled functions:
$NUMBA_CACHE_DIR/memlens-HASH if that variable is set, otherwise ~/.cache/memlens/numba/HASH. If the home folder is not
writable, a folder in the system's temporary folder is used.

A process that finds no cached machine code compiles the functions itself. The driver of a scan compiles them before it
starts workers (`memlens.scanner.kernels.warm_up`), so that the workers only load the machine code.
"""

import hashlib
import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache, wraps
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from numba import config, njit
from numba.extending import overload, register_jitable


def compiled(function: Callable[..., Any]) -> Any:
    """Decorate a function to be compiled when Python calls it, once per combination of argument types.

    Machine code is loaded from the cache folder if possible. Compiled functions release the GIL. An array's dtype and
    memory layout are part of its type, so always pass the same dtype in C order. Use `compiled_part` for helpers that
    only compiled functions call.
    """
    before = config.CACHE_DIR
    config.CACHE_DIR = str(cache_folder() or before)
    try:
        loop = njit(cache=True, nogil=True)(function)
    except RuntimeError:  # numba cannot write to any cache folder
        loop = njit(nogil=True)(function)
    finally:
        config.CACHE_DIR = before

    @wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            return loop(*arguments)
        except (EOFError, UnpicklingError, OSError):  # the cache file is damaged, or the disk is full
            for file in Path(loop.stats.cache_path).glob("*.nb[ci]"):
                with suppress(OSError):
                    file.unlink()
            return loop(*arguments)

    overload(call, strict=False)(lambda *arguments: function)  # allow calls from other compiled functions
    return call


# Decorator for a function that only compiled functions call. It is compiled into its callers, without a separate cache
# file or Python wrapper, which halves the compile time. If Python calls the function, it runs as plain Python.
compiled_part = register_jitable


@cache
def cache_folder() -> Path | None:
    """Return the cache folder for this version of the compiled functions, or None if no folder is writable."""
    sources = [path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py"))]
    version = hashlib.sha256(b"".join(source for source in sources if b"memlens.compiling import" in source))
    name = version.hexdigest()[:16]
    if "NUMBA_CACHE_DIR" in os.environ:
        return _make_private(Path(os.environ["NUMBA_CACHE_DIR"], f"memlens-{name}"))
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    temporary = Path(tempfile.gettempdir(), f"memlens-{os.getuid()}")
    with suppress(RuntimeError):  # Path.home() fails if the user has no home folder
        root = root if root.is_absolute() else Path.home() / ".cache"
        if folder := _make_private(root / "memlens" / "numba" / name):
            return folder
    return _make_private(temporary) and _make_private(temporary / name)


def _make_private(folder: Path) -> Path | None:
    """Create a folder that only this user can write to. Returns None if that is impossible.

    Cache files are pickles, so anyone who can write them could run code in this process.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.lstat()
    except OSError:
        return None
    is_private = facts.st_uid == os.geteuid() and stat.S_ISDIR(facts.st_mode) and not facts.st_mode & 0o022
    return folder if is_private and os.access(folder, os.W_OK) else None


# Shellsort with Ciura's gaps sorts a few hundred numbers nearly as fast as numba's quicksort, and it compiles in 0.1 s
# instead of 6 s.
_GAPS = (1_577_003, 700_890, 311_507, 138_447, 61_532, 27_347, 12_154, 5_402, 2_401, 701, 301, 132, 57, 23, 10, 4, 1)


@compiled_part
def sort_(keys: Any, count: int) -> None:
    """Sort the first `count` keys in ascending order."""
    for gap in _GAPS:
        for i in range(gap, count):
            key, place = keys[i], i
            while place >= gap and keys[place - gap] > key:
                keys[place] = keys[place - gap]
                place -= gap
            keys[place] = key


@compiled_part
def sort_with_(keys: Any, others: Any, count: int) -> None:
    """Sort the first `count` keys in ascending order, and reorder `others` in the same way."""
    for gap in _GAPS:
        for i in range(gap, count):
            key, other, place = keys[i], others[i], i
            while place >= gap and keys[place - gap] > key:
                keys[place], others[place] = keys[place - gap], others[place - gap]
                place -= gap
            keys[place], others[place] = key, other
