"""Which batches of the plan are done, and the pieces that are left to do.

A piece is a short run of consecutive batches of one window. Where pieces begin and end depends on the batch plan only,
never on who works on them, so that any split of the work can be continued by any other. This module knows numbers
only: no model, no text, no file.

ScanState: everything a scan has learned so far, and which part of the corpus it has learned it from.

States of disjoint parts merge in any order to the same state. Work counts as done batch by batch, so that a scan can
stop between any two batches. This module knows nothing of files; it gives and takes plain arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memlens.errors import IndexFolderError, SettingError
from memlens.models.memory_model import MemoryModel
from memlens.scanner.layer import LayerScan
from memlens.scanner.settings import ScanSettings

PIECE = 2  # batches: a corpus of a few windows still splits evenly over a handful of workers


class Piece(NamedTuple):
    """Batches [first, stop) of a window's plan."""

    window: int
    first: int
    stop: int

    @property
    def key(self) -> tuple[int, int]:
        """The same for a piece and for what is left of it."""
        return self.window, self.first // PIECE


class Done:
    """A set of batches, kept as runs, so that it stays small however long the corpus is."""

    def __init__(self) -> None:
        self._runs: dict[int, list[tuple[int, int]]] = {}  # window -> disjoint runs [first, stop), ascending

    def add(self, window: int, first: int, stop: int) -> None:
        """Note batches as done; one that is done already is refused."""
        if stop <= first:
            return
        joined: list[tuple[int, int]] = []
        for a, b in sorted([*self._runs.get(window, []), (first, stop)]):
            if joined and a < joined[-1][1]:
                raise IndexFolderError(
                    f"batch {a} of window {window} of the corpus is in two of the parts; give each part once"
                )
            if joined and a == joined[-1][1]:
                joined[-1] = (joined[-1][0], b)
            else:
                joined.append((a, b))
        self._runs[window] = joined

    def merge(self, other: Done) -> None:
        for window, runs in other._runs.items():
            for first, stop in runs:
                self.add(window, first, stop)

    def left_of(self, piece: Piece) -> list[Piece]:
        """What of a piece is not done."""
        left, first = [], piece.first
        for a, b in self._runs.get(piece.window, []):
            if b <= first or a >= piece.stop:
                continue
            if a > first:
                left.append(Piece(piece.window, first, a))
            first = b
        if first < piece.stop:
            left.append(Piece(piece.window, first, piece.stop))
        return left

    def is_all_of(self, batches: Sequence[int] | NDArray[np.integer[Any]]) -> bool:
        """Is every batch of every window done? `batches` says how many each window has."""
        return all(not self.left_of(Piece(w, 0, int(count))) for w, count in enumerate(batches))

    def array(self) -> NDArray[np.int64]:
        """[runs, 3]: window, first, stop; the same for equal sets."""
        rows = [(window, a, b) for window in sorted(self._runs) for a, b in self._runs[window]]
        return np.array(rows, np.int64).reshape(-1, 3)

    @classmethod
    def from_array(cls, rows: NDArray[np.int64]) -> Done:
        done = cls()
        for window, first, stop in rows.reshape(-1, 3).tolist():
            done.add(window, first, stop)
        return done

    def __len__(self) -> int:
        return sum(b - a for runs in self._runs.values() for a, b in runs)


def all_pieces(batches: Sequence[int] | NDArray[np.integer[Any]]) -> Iterator[Piece]:
    """The pieces of a plan in its order; `batches` says how many each window has."""
    for window, count in enumerate(batches):
        for first in range(0, int(count), PIECE):
            yield Piece(window, first, min(first + PIECE, int(count)))


def pieces_left(
    batches: Sequence[int] | NDArray[np.integer[Any]], done: Done, share: Share | None = None
) -> Iterator[Piece]:
    """The pieces of a plan, or of a share of it, that are not done; of half done ones the rest."""
    for number, piece in enumerate(all_pieces(batches)):
        if share is None or share.has(number):
            yield from done.left_of(piece)


class Share(NamedTuple):
    """Part `number` (from 1) of `of` equal parts of a scan: every so manyth piece."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Share:
        """`3/16`: the third of sixteen."""
        number, slash, of = text.strip().partition("/")
        if not slash or not all(n.isascii() and n.isdecimal() and len(n) < 7 for n in (number, of)):
            raise SettingError(f"--shard is '{text}'; write it like 3/16: the third of sixteen parts")
        if not 1 <= int(number) <= int(of):
            raise SettingError(f"--shard is '{text}'; the first number must be 1 to {of}")
        return cls(int(number), int(of))

    def has(self, piece: int) -> bool:
        return piece % self.of == self.number - 1

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


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
