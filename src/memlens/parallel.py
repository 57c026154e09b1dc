"""Compiled loops, torch and its threads, a map over items, and progress of long work."""

import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from typing import Any, Protocol, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


def compiled(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """The function as machine code, made when it is first called with arguments of new types.

    `@compiled`, or with options of numba's, `@compiled(inline="always")`.
    """
    if function is None:
        return partial(compiled, **options)
    from numba import njit

    try:
        return njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:  # neither the package's folder nor the home folder can be written to
        return njit(nogil=True, **options)(function)


class Mapper(Protocol):
    """Applies a function of the model and an item to many items, in this process or on a cluster.

    The function and the items can be pickled, and an answer depends on nothing else, so that it is the same wherever it
    is computed. Answers come in the order of the items; few are in memory at a time.
    """

    def map(self, work: Callable[[Any, Item], Answer], items: Iterable[Item]) -> Iterator[Answer]: ...


class SerialMapper:
    """One item after another in this process, with the model that is loaded already."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def map(self, work: Callable[[Any, Item], Answer], items: Iterable[Item]) -> Iterator[Answer]:
        for item in items:
            yield work(self.model, item)


class Progress(Protocol):
    """Called with how far a stage is; `total` is None while nobody can know."""

    def __call__(self, stage: str, done: int, total: int | None) -> None: ...


def no_progress(stage: str, done: int, total: int | None) -> None:
    """For callers who do not look."""


def rest_idle_threads() -> None:
    """Let torch's threads sleep while they wait; to be called before torch is imported. Numbers do not change.

    By default a thread spins for some milliseconds after every matrix product, which takes the cores from other
    programs. 10,000 turns are about 50 microseconds: enough to be there for the next product of the same layer.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def import_torch() -> None:
    """Import torch and transformers with the garbage collector paused: what is imported stays, and is a lot."""
    if "torch" in sys.modules:
        return
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        for library in ("torch", "transformers.modeling_utils"):
            import_module(library)
    finally:
        if is_collecting:
            gc.enable()
    gc.freeze()  # later collections need not look at the libraries' objects
