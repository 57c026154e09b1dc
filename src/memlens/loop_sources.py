"""The files and constants that a compiled function is made from, so that a change of any of them is noticed.

numba keeps what it has compiled together with the time and size of the function's own file. Functions that it calls,
classes of named tuples and constants become part of it as well, and may stand in other files.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from pickle import UnpicklingError
from types import FunctionType, ModuleType
from typing import Any

LOOPS = set[Callable[..., Any]]()  # all functions that are compiled, as they are in Python
_stamped = set[Callable[..., Any]]()


def stamp_(compiled: Any) -> None:
    """Have numba keep a compiled function, and take what it has kept, as one of the sources that there are now.

    To be called when also what stands below the function in its file is known.
    """
    file: Any = getattr(compiled._cache, "_cache_file", None)
    if compiled.py_func not in _stamped:
        _stamped.add(compiled.py_func)
        if hasattr(file, "_source_stamp"):  # numba's own, which may have another name some day
            file._source_stamp = (file._source_stamp, *sources_of(compiled.py_func))


def is_kept(compiled: Any) -> bool:
    """Has numba kept a compiled function as its sources are now? True also where nobody can tell."""
    load: Any = getattr(getattr(getattr(compiled, "_cache", None), "_cache_file", None), "_load_index", None)
    if load is None:  # NUMBA_DISABLE_JIT, no folder that can be written to, or another numba
        return True
    stamp_(compiled)
    try:
        return bool(load())
    except (OSError, AttributeError, ImportError, EOFError, UnpicklingError):
        return False


def sources_of(function: Callable[..., Any]) -> tuple[Any, ...]:
    """Times and sizes of the files, and the constants, of a function and of all that it calls."""
    files, constants = set[Path](), dict[str, bytes]()
    left: list[Any] = [function]
    seen = set[Any]()
    while left:
        part = left.pop()
        if part in seen:
            continue
        seen.add(part)
        files.add(Path(getattr(sys.modules[part.__module__], "__file__", None) or ""))
        for name, value in _used_by(part):
            if _is_part(value):
                left.append(value)
            elif isinstance(value, (int, float, complex, str, tuple)):
                constants[f"{part.__module__}.{name}"] = repr(value).encode()
            elif hasattr(type(value), "tobytes"):  # numbers and arrays of numpy
                constants[f"{part.__module__}.{name}"] = value.tobytes()
    stats = [(str(file), file.stat()) for file in sorted(files) if file.is_file()]
    return tuple((file, stat.st_mtime_ns, stat.st_size) for file, stat in stats), tuple(sorted(constants.items()))


def _is_part(value: Any) -> bool:
    if isinstance(value, FunctionType):
        return value in LOOPS
    return isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields")


def _used_by(part: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a function uses of its module, by name, and the types annotated in it or in a named tuple."""
    known = vars(sys.modules[part.__module__])
    names = part.__code__.co_names if isinstance(part, FunctionType) else ()
    for name in names:
        value = known.get(name)
        yield name, getattr(value, "py_func", value)
        if isinstance(value, ModuleType):  # then another one of the names is that of what it uses of the module
            for inner in names:
                attribute = vars(value).get(inner)
                yield f"{name}.{inner}", getattr(attribute, "py_func", attribute)
    for name, kind in part.__annotations__.items():
        yield name, known.get(kind) if isinstance(kind, str) else kind
