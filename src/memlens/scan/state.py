"""ScanState: everything a scan has learned so far, and which part of the corpus it has learned it from.

States of disjoint parts merge in any order to the same state. Work counts as done batch by batch, so that a scan can
stop between any two batches. This module knows nothing of files; it gives and takes plain arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memlens.errors import IndexFolderError
from memlens.models.memory_model import MemoryModel
from memlens.scan.done import Done
from memlens.scan.layer import LayerScan
from memlens.scan.settings import ScanSettings


class LayerShape(NamedTuple):
    """All that must be known of a layer to hold what a scan learns of it."""

    memories: int
    bottom: bool  # are the most negative triggers kept, too?


def shapes_of(model: MemoryModel, layers: Sequence[int], settings: ScanSettings) -> dict[int, LayerShape]:
    """The shapes of these layers of a model under these settings."""
    shapes = {}
    for layer in layers:
        block = model.layers[layer]
        bottom = block.signed if settings.bottom == "auto" else settings.bottom == "yes"
        shapes[layer] = LayerShape(block.memories, bottom)
    return shapes


class ScanState:
    """The layers of a scan with what has been done."""

    def __init__(self, layers: dict[int, LayerScan]) -> None:
        self.layers = layers
        self.done = Done()
        self.prefixes = 0
        self.tokens = 0  # fed, BOS not counted

    @classmethod
    def start(cls, model: MemoryModel, layers: Sequence[int], settings: ScanSettings) -> ScanState:
        """An empty state for these layers of the model."""
        return cls.empty(shapes_of(model, layers, settings), settings)

    @classmethod
    def empty(cls, shapes: Mapping[int, LayerShape], settings: ScanSettings) -> ScanState:
        """An empty state for layers of these shapes; needs no model."""
        return cls({layer: LayerScan(layer, *shape, settings) for layer, shape in shapes.items()})

    def merge(self, other: ScanState) -> None:
        """Take in the state of another part of the corpus; refused, and nothing changed, where the two overlap."""
        if self.layers.keys() != other.layers.keys():
            raise IndexFolderError("the parts are of different layers; scan all parts with the same --layers")
        done = Done.from_array(self.done.array())
        done.merge(other.done)
        for layer, scan in self.layers.items():
            scan.merge(other.layers[layer])
        self.done = done
        self.prefixes += other.prefixes
        self.tokens += other.tokens

    def arrays(self) -> dict[str, NDArray[Any]]:
        counts = np.array([self.prefixes, self.tokens], np.int64)
        saved: dict[str, NDArray[Any]] = {"done": self.done.array(), "counts": counts}
        for layer, scan in self.layers.items():
            saved |= {f"{layer}.{name}": array for name, array in scan.arrays().items()}
        return saved

    def restore_(self, saved: Mapping[str, NDArray[Any]]) -> None:
        """Continue from saved arrays; damaged or foreign ones are refused."""
        try:
            for scan in self.layers.values():
                restore_layer_(scan, saved)
            self.done = Done.from_array(saved["done"])
            self.prefixes, self.tokens = (int(x) for x in saved["counts"])
        except (KeyError, ValueError) as error:
            raise IndexFolderError(
                "the saved state of the interrupted scan does not fit this scan; start over with --fresh"
            ) from error


def restore_layer_(scan: LayerScan, saved: Mapping[str, NDArray[Any]]) -> None:
    """One layer from the arrays of a whole state; no other layer's are looked at."""
    scan.restore_({name: saved[f"{scan.layer}.{name}"] for name in scan.arrays()})


def layers_in(names: Sequence[str]) -> set[int]:
    """The layers that a state with arrays of these names holds."""
    return {int(layer) for layer, dot, _ in (name.partition(".") for name in names) if dot and layer.isdecimal()}
