"""ScanState: everything a scan has learned so far, and which part of the corpus it has learned it from.

States of disjoint parts merge in any order to the same state. A window counts as done batch by batch, so that a scan
can stop between any two batches. This module knows nothing of files; it gives and takes plain arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlens.errors import IndexFolderError
from memlens.models.memory_model import MemoryModel
from memlens.scan.layer import LayerScan
from memlens.scan.settings import ScanSettings


class ScanState:
    """The layers of a scan with what has been done."""

    def __init__(self, layers: dict[int, LayerScan]) -> None:
        self.layers = layers
        self.done: dict[int, int] = {}  # window -> batches finished, the first ones of its plan
        self.prefixes = 0
        self.tokens = 0  # fed, BOS not counted

    @classmethod
    def start(cls, model: MemoryModel, layers: Sequence[int], settings: ScanSettings) -> ScanState:
        """An empty state for these layers of the model."""
        scans = {}
        for layer in layers:
            block = model.layers[layer]
            bottom = block.signed if settings.bottom == "auto" else settings.bottom == "yes"
            scans[layer] = LayerScan(layer, block.memories, bottom, settings)
        return cls(scans)

    def merge(self, other: ScanState) -> None:
        """Take in the state of another part of the corpus."""
        both = sorted(self.done.keys() & other.done.keys())
        if both:
            raise IndexFolderError(f"window {both[0]} of the corpus is in two of the parts; give each part once")
        for layer, scan in self.layers.items():
            scan.merge(other.layers[layer])
        self.done |= other.done
        self.prefixes += other.prefixes
        self.tokens += other.tokens

    def arrays(self) -> dict[str, NDArray[Any]]:
        done = np.array(sorted(self.done.items()), np.int64).reshape(-1, 2)
        saved: dict[str, NDArray[Any]] = {"done": done, "counts": np.array([self.prefixes, self.tokens], np.int64)}
        for layer, scan in self.layers.items():
            saved |= {f"{layer}.{name}": array for name, array in scan.arrays().items()}
        return saved

    def restore_(self, saved: dict[str, NDArray[Any]]) -> None:
        """Continue from saved arrays; damaged or foreign ones are refused."""
        try:
            for layer, scan in self.layers.items():
                prefix = f"{layer}."
                scan.restore_({k.removeprefix(prefix): v for k, v in saved.items() if k.startswith(prefix)})
            self.done = {int(window): int(batches) for window, batches in saved["done"]}
            self.prefixes, self.tokens = (int(x) for x in saved["counts"])
        except (KeyError, ValueError) as error:
            raise IndexFolderError(
                "the saved state of the interrupted scan does not fit this scan; start over with --fresh"
            ) from error
