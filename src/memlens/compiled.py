"""How hot loops are compiled: by numba, without the interpreter's lock, kept on disk where a disk lets us.

This module knows nothing of what is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(function: Callable[..., Any]) -> Any:
    """The function as machine code, made when it is first called with arguments of new types."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # neither the package's folder nor the home folder can be written to
        return njit(nogil=True)(function)
