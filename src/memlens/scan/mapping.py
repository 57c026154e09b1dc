"""The same work on many items, here or elsewhere: what sections 4 and 5 need of an executor.

Work is a function of the model and an item; it and the items can be pickled, and an answer depends on nothing else, so
that it is the same wherever it was computed. Answers come in the order of the items. Knows nothing of what is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

from memlens.models.memory_model import MemoryModel

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Mapper(Protocol):
    """Where items are worked on."""

    def map(self, work: Callable[[MemoryModel, Item], Answer], items: Iterable[Item]) -> Iterator[Answer]:
        """The answers, in the order of the items; few are in memory at a time."""


class Here:
    """One after another in this process, with the model that is loaded already."""

    def __init__(self, model: MemoryModel) -> None:
        self.model = model

    def map(self, work: Callable[[MemoryModel, Item], Answer], items: Iterable[Item]) -> Iterator[Answer]:
        for item in items:
            yield work(self.model, item)
