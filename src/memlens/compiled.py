"""How hot loops are compiled: by numba, without the interpreter's lock, kept on disk where a disk lets us.

This module knows nothing of what is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from numba import njit


def compiled(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """The function as machine code, made when it is first called with arguments of new types.

    `@compiled`, or with options of numba's, `@compiled(inline="always")`.
    """
    if function is None:
        return partial(compiled, **options)
    try:
        return njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:  # neither the package's folder nor the home folder can be written to
        return njit(nogil=True, **options)(function)
