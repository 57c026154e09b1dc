"""The state of a scan: statistics and triggers of every layer, the batches they come from, and the parts saved on disk.

The order in which states of disjoint batches are merged does not change the result. A part is a saved state in
partial/parts. Parts record the progress: a batch that a part contains is not scanned again.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memlens.errors import IndexFolderError, SettingError
from memlens.files import explain_os_errors, replacing
from memlens.models.memory_model import MemoryModel
from memlens.scanner.layer import LayerScan
from memlens.settings import ScanSettings

BATCHES_PER_RANGE = 2  # small, so that a few shards divide a short corpus evenly


class BatchRange(NamedTuple):
    """Batches [first, stop) of a window."""

    window: int
    first: int
    stop: int


class DoneBatches:
    """A set of batches, stored as runs of consecutive batches, so that it stays small for a long corpus."""

    def __init__(self) -> None:
        self._runs: dict[int, list[tuple[int, int]]] = {}  # window -> disjoint runs [first, stop), ascending

    def add(self, window: int, first: int, stop: int) -> None:
        """Add batches. Raises IndexFolderError if one of them is already in the set."""
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

    def merge(self, other: DoneBatches) -> None:
        """Add the batches of another set, which must be disjoint."""
        for window, runs in other._runs.items():
            for first, stop in runs:
                self.add(window, first, stop)

    def remaining(self, batches: BatchRange) -> list[BatchRange]:
        """Return the parts of a range that are not in the set."""
        remaining, first = [], batches.first
        for a, b in self._runs.get(batches.window, []):
            if b <= first or a >= batches.stop:
                continue
            if a > first:
                remaining.append(BatchRange(batches.window, first, a))
            first = b
        if first < batches.stop:
            remaining.append(BatchRange(batches.window, first, batches.stop))
        return remaining

    def contains_all(self, counts: Sequence[int] | NDArray[np.integer[Any]]) -> bool:
        """Return True if the set contains every batch of a plan. `counts` holds the number of batches per window."""
        return all(not self.remaining(BatchRange(w, 0, int(count))) for w, count in enumerate(counts))

    def array(self) -> NDArray[np.int64]:
        """Return the runs as [runs, 3]: window, first, stop. Equal sets have equal arrays."""
        rows = [(window, a, b) for window in sorted(self._runs) for a, b in self._runs[window]]
        return np.array(rows, np.int64).reshape(-1, 3)

    @classmethod
    def from_array(cls, rows: NDArray[np.int64]) -> DoneBatches:
        done = cls()
        for window, first, stop in rows.reshape(-1, 3).tolist():
            done.add(window, first, stop)
        return done

    def __len__(self) -> int:
        return sum(b - a for runs in self._runs.values() for a, b in runs)


def all_ranges(counts: Sequence[int] | NDArray[np.integer[Any]]) -> Iterator[BatchRange]:
    """Yield the ranges of a plan in order. `counts` holds the number of batches per window."""
    for window, count in enumerate(counts):
        for first in range(0, int(count), BATCHES_PER_RANGE):
            yield BatchRange(window, first, min(first + BATCHES_PER_RANGE, int(count)))


def remaining_ranges(
    counts: Sequence[int] | NDArray[np.integer[Any]], done: DoneBatches, shard: ShardNumber | None = None
) -> Iterator[BatchRange]:
    """Yield the ranges of a plan, or of one shard of the plan, that are not in `done`."""
    for number, batches in enumerate(all_ranges(counts)):
        if shard is None or number % shard.of == shard.number - 1:
            yield from done.remaining(batches)


class ShardNumber(NamedTuple):
    """The number of a shard, from 1, and the number of shards. Shard k of n scans every n-th range of batches."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> ShardNumber:
        """Parse a text like 3/16, the third of sixteen shards. Raises SettingError for any other text."""
        number, slash, of = text.strip().partition("/")
        if not slash or not all(n.isascii() and n.isdecimal() and len(n) < 7 for n in (number, of)):
            raise SettingError(f"--shard is '{text}'; write it like 3/16: the third of sixteen shards")
        if not 1 <= int(number) <= int(of):
            raise SettingError(f"--shard is '{text}'; the first number must be 1 to {of}")
        return cls(int(number), int(of))

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


class LayerShape(NamedTuple):
    """The sizes of a layer's scan state."""

    memories: int
    bottom: bool  # True if bottom triggers are collected
    experts: int = 0  # number of experts behind a router; they own the last `experts * size` memories
    size: int = 0
    gated: bool = False  # True if sign quadrants are collected


def shapes_of(model: MemoryModel, layers: Sequence[int], settings: ScanSettings) -> dict[int, LayerShape]:
    """Return the shapes of these layers of a model for a scan with these settings."""
    shapes = {}
    for layer in layers:
        block = model.layers[layer]
        bottom = block.signed if settings.bottom == "auto" else settings.bottom == "yes"
        routed = [group.size for group in block.groups if group.kind == "routed"]
        shapes[layer] = LayerShape(block.memories, bottom, len(routed), max(routed, default=0), block.gated)
    return shapes


class ScanState:
    """The state of every layer of a scan, and the batches that it includes."""

    def __init__(self, layers: dict[int, LayerScan]) -> None:
        self.layers = layers
        self.done = DoneBatches()
        self.prefixes = 0
        self.tokens = 0  # number of tokens fed to the model, without BOS

    @classmethod
    def start(cls, model: MemoryModel, layers: Sequence[int], settings: ScanSettings) -> ScanState:
        """Return an empty state for these layers of a model."""
        return cls.empty(shapes_of(model, layers, settings), settings)

    @classmethod
    def empty(cls, shapes: Mapping[int, LayerShape], settings: ScanSettings) -> ScanState:
        """Return an empty state for layers of these shapes. Needs no model."""
        return cls({layer: LayerScan(layer, *shape, settings=settings) for layer, shape in shapes.items()})

    def merge(self, other: ScanState) -> None:
        """Add the state of a scan of other batches.

        Raises IndexFolderError and changes nothing if the two states overlap.
        """
        done = DoneBatches.from_array(self.done.array())
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
        """Replace the state with saved arrays. Raises IndexFolderError if the arrays do not match the state."""
        try:
            for scan in self.layers.values():
                restore_layer_(scan, saved)
            self.done = DoneBatches.from_array(saved["done"])
            self.prefixes, self.tokens = (int(x) for x in saved["counts"])
        except (KeyError, ValueError) as error:
            raise IndexFolderError(
                "the saved state of the interrupted scan does not fit this scan; start over with --fresh"
            ) from error


def restore_layer_(scan: LayerScan, saved: Mapping[str, NDArray[Any]]) -> None:
    """Restore one layer from the arrays of a state."""
    scan.restore_({name: saved[f"{scan.layer}.{name}"] for name in scan.arrays()})


class PartFolder:
    """The folder with the parts of a scan. Only the driver writes to the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()

    def save(self, name: str, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Write or replace a part. If writing fails, the old part stays."""
        with explain_os_errors(self.folder):
            self.folder.mkdir(exist_ok=True)
        with replacing(self.path(name)) as beside, beside.open("wb") as handle:
            np.savez(handle, allow_pickle=False, **arrays)

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.npz"

    def names(self) -> list[str]:
        return sorted(path.stem for path in self.folder.glob("*.npz"))

    def layers_in(self, name: str) -> set[int]:
        """Return the layers that a part contains."""
        with _open_part(self.path(name)) as saved:
            pairs = [array_name.partition(".") for array_name in saved.files]
        return {int(layer) for layer, dot, _ in pairs if dot and layer.isdecimal()}

    def open(self, layers: Sequence[int]) -> tuple[str, dict[str, NDArray[Any]] | None]:
        """Return the name and the arrays of the part with these layers, or a new name and None if no part has them."""
        for name in self.names():
            if self.layers_in(name) == set(layers):
                return name, read_part(self.path(name))
        return secrets.token_hex(8), None

    def check(self) -> None:
        """Remove temporary files of a killed scan. Raises IndexFolderError if a part is damaged."""
        for temporary in self.folder.glob("*.npz.part"):
            temporary.unlink()
        for name in self.names():  # a damaged part should fail now and not after hours of work
            with _open_part(self.path(name)) as saved:
                for array_name in saved.files:  # one array at a time, because a part may be large
                    saved[array_name]  # numpy compares the checksum


@contextmanager
def _open_part(path: Path) -> Iterator[Any]:
    try:
        with np.load(path, allow_pickle=False) as saved:
            yield saved
    except IndexFolderError:
        raise
    except Exception as error:  # a damaged archive can raise many types of exceptions
        raise IndexFolderError(
            f"{path} is damaged; remove this one file to have its part done again, or start over with --fresh"
        ) from error


def read_part(path: Path, names: Sequence[str] | None = None) -> dict[str, NDArray[Any]]:
    """Return all arrays of a part, or those with the given names."""
    with _open_part(path) as saved:
        return {name: saved[name] for name in (saved.files if names is None else names)}
