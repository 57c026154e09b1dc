"""What runs on a node of a Ray cluster: the same worker as everywhere, asked by calls; and the merging of two states.

Plain Python that does not know ray: on_ray makes actors and tasks of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from memlens import __version__
from memlens.errors import MemlensError, WorkerError
from memlens.scan.done import Piece
from memlens.scan.recipe import ModelRecipe
from memlens.scan.scanner import WindowSentence
from memlens.scan.settings import ScanSettings
from memlens.scan.state import LayerShape, ScanState
from memlens.scan.work import Worker

Arrays = dict[str, NDArray[Any]]


class RayOrder(NamedTuple):
    """What all workers of a scan are told at first."""

    settings: ScanSettings
    layers: tuple[int, ...]
    versions: tuple[str, str]

    @classmethod
    def make(cls, settings: ScanSettings, layers: tuple[int, ...]) -> RayOrder:
        return cls(settings, layers, _versions())


def _versions() -> tuple[str, str]:
    return __version__, torch.__version__


class PackedWindow(NamedTuple):
    """The sentences of a window as a few arrays, which travel cheaply."""

    ids: NDArray[np.int64]
    tokens: NDArray[np.int32]  # all, one sentence after another
    edges: NDArray[np.int64]  # [sentences + 1]
    fresh_from: NDArray[np.int32]


def pack_window(window: Sequence[WindowSentence]) -> PackedWindow:
    edges = np.concatenate([[0], np.cumsum([len(sentence.tokens) for sentence in window])]).astype(np.int64)
    tokens = np.concatenate([sentence.tokens for sentence in window]).astype(np.int32)
    ids = np.array([sentence.id for sentence in window], np.int64)
    return PackedWindow(ids, tokens, edges, np.array([sentence.fresh_from for sentence in window], np.int32))


def unpack_window(packed: PackedWindow) -> list[WindowSentence]:
    tokens, edges = packed.tokens.astype(np.int64), packed.edges.tolist()
    numbers = zip(packed.ids.tolist(), packed.fresh_from.tolist(), strict=True)
    return [WindowSentence(id_, tokens[edges[i] : edges[i + 1]], fresh) for i, (id_, fresh) in enumerate(numbers)]


class RayWorker:
    """A worker that is asked by calls, one after another."""

    def __init__(self, order: RayOrder) -> None:
        self.order = order
        self.worker: Worker | None = None

    def start(self, recipe: ModelRecipe) -> bool:
        """Load the model; False if this node does not have it."""
        if self.order.versions != _versions():
            theirs, ours = ("memlens {} with torch {}".format(*v) for v in (_versions(), self.order.versions))
            raise WorkerError(f"a Ray node has {theirs}, the driver {ours}; results would differ: install the same")
        torch.set_num_threads(self.order.settings.threads)
        try:
            model = recipe.load()
        except MemlensError:
            if recipe.copy:
                raise
            return False
        self.worker = Worker(model, self.order.settings, self.order.layers)
        return True

    def scan(self, piece: Piece, window: PackedWindow) -> int:
        """Do a piece; how many tokens were fed comes back."""
        assert self.worker is not None, "start comes first"
        before = self.worker.state.tokens
        self.worker.scan(piece, lambda number: unpack_window(window), lambda batch: None)
        return self.worker.state.tokens - before

    def hand_over(self) -> Arrays:
        """What was found since the last time."""
        assert self.worker is not None, "start comes first"
        return self.worker.take_state().arrays()


def merge_states(order: RayOrder, shapes: Mapping[int, LayerShape], one: Arrays, other: Arrays) -> Arrays:
    """Two disjoint states as one; needs no model."""
    states = []
    for arrays in (one, other):
        state = ScanState.empty(shapes, order.settings)
        state.restore_(arrays)
        states.append(state)
    states[0].merge(states[1])
    return states[0].arrays()
