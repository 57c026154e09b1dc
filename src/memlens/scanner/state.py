"""The state of a scan: what is known of every layer, which batches it comes from, and its parts on disk.

States of disjoint batches merge in any order to the same state. A part is the saved state of one worker, in
partial/parts; what a part holds is never done again, so the parts together say what is done, whoever continues. Where
ranges of batches begin and end depends on the plan only, never on who works on them.
"""

from __future__ import annotations

import secrets
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memlens.errors import IndexFolderError, SettingError
from memlens.files import attached, explain_os_errors, is_free, replacing
from memlens.models.memory_model import MemoryModel
from memlens.scanner.layer import LayerScan
from memlens.settings import ScanSettings

BATCHES_PER_RANGE = 2  # so few that a corpus of a few windows is shared evenly by a handful of workers


class BatchRange(NamedTuple):
    """Batches [first, stop) of a window; what a worker is given at a time."""

    window: int
    first: int
    stop: int

    @property
    def key(self) -> tuple[int, int]:
        """The same for a range and for what is left of it."""
        return self.window, self.first // BATCHES_PER_RANGE


class DoneBatches:
    """A set of batches, held as runs, so that it stays small however long the corpus is."""

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

    def merge(self, other: DoneBatches) -> None:
        for window, runs in other._runs.items():
            for first, stop in runs:
                self.add(window, first, stop)

    def left_of(self, batches: BatchRange) -> list[BatchRange]:
        """The part of a range that is not done."""
        left, first = [], batches.first
        for a, b in self._runs.get(batches.window, []):
            if b <= first or a >= batches.stop:
                continue
            if a > first:
                left.append(BatchRange(batches.window, first, a))
            first = b
        if first < batches.stop:
            left.append(BatchRange(batches.window, first, batches.stop))
        return left

    def is_all_of(self, counts: Sequence[int] | NDArray[np.integer[Any]]) -> bool:
        """Is every batch of every window done? `counts` says how many each window has."""
        return all(not self.left_of(BatchRange(w, 0, int(count))) for w, count in enumerate(counts))

    def array(self) -> NDArray[np.int64]:
        """[runs, 3]: window, first, stop; the same for equal sets."""
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
    """The plan in its order; `counts` says how many batches each window has."""
    for window, count in enumerate(counts):
        yield from ranges_of(window, int(count))


def ranges_of(window: int, count: int) -> Iterator[BatchRange]:
    """The ranges of a window of so many batches."""
    for first in range(0, count, BATCHES_PER_RANGE):
        yield BatchRange(window, first, min(first + BATCHES_PER_RANGE, count))


def ranges_left(
    counts: Sequence[int] | NDArray[np.integer[Any]], done: DoneBatches, shard: ShardNumber | None = None
) -> Iterator[BatchRange]:
    """The ranges of a plan, or of one shard of it, that are not done."""
    for number, batches in enumerate(all_ranges(counts)):
        if shard is None or shard.has(number):
            yield from done.left_of(batches)


class ShardNumber(NamedTuple):
    """Shard `number` (from 1) of `of`: every `of`-th range of batches."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> ShardNumber:
        """`3/16`: the third of sixteen."""
        number, slash, of = text.strip().partition("/")
        if not slash or not all(n.isascii() and n.isdecimal() and len(n) < 7 for n in (number, of)):
            raise SettingError(f"--shard is '{text}'; write it like 3/16: the third of sixteen shards")
        if not 1 <= int(number) <= int(of):
            raise SettingError(f"--shard is '{text}'; the first number must be 1 to {of}")
        return cls(int(number), int(of))

    def has(self, number: int) -> bool:
        return number % self.of == self.number - 1

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


class LayerShape(NamedTuple):
    """All that must be known of a layer to hold what a scan learns of it."""

    memories: int
    bottom: bool  # are the most negative triggers kept, too?
    experts: int = 0  # behind a router: the last `experts * size` memories are theirs
    size: int = 0
    gated: bool = False  # are sign quadrants kept?


def shapes_of(model: MemoryModel, layers: Sequence[int], settings: ScanSettings) -> dict[int, LayerShape]:
    """The shapes of these layers of a model under these settings."""
    shapes = {}
    for layer in layers:
        block = model.layers[layer]
        bottom = block.signed if settings.bottom == "auto" else settings.bottom == "yes"
        routed = [group.size for group in block.groups if group.kind == "routed"]
        shapes[layer] = LayerShape(block.memories, bottom, len(routed), max(routed, default=0), block.gated)
    return shapes


class ScanState:
    """The layers of a scan with what has been done."""

    def __init__(self, layers: dict[int, LayerScan]) -> None:
        self.layers = layers
        self.done = DoneBatches()
        self.prefixes = 0
        self.tokens = 0  # fed, BOS not counted

    @classmethod
    def start(cls, model: MemoryModel, layers: Sequence[int], settings: ScanSettings) -> ScanState:
        """An empty state for these layers of the model."""
        return cls.empty(shapes_of(model, layers, settings), settings)

    @classmethod
    def empty(cls, shapes: Mapping[int, LayerShape], settings: ScanSettings) -> ScanState:
        """An empty state for layers of these shapes; needs no model."""
        return cls({layer: LayerScan(layer, *shape, settings=settings) for layer, shape in shapes.items()})

    def merge(self, other: ScanState) -> None:
        """Take in the state of other batches; refused, and nothing changed, where the two overlap."""
        if self.layers.keys() != other.layers.keys():
            raise IndexFolderError("the parts are of different layers; scan all parts with the same --layers")
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
        """Continue from saved arrays; damaged or foreign ones are refused."""
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
    """One layer from the arrays of a whole state; no other layer's are looked at."""
    scan.restore_({name: saved[f"{scan.layer}.{name}"] for name in scan.arrays()})


def layers_in(names: Sequence[str]) -> set[int]:
    """The layers that a state with arrays of these names holds."""
    return {int(layer) for layer, dot, _ in (name.partition(".") for name in names) if dot and layer.isdecimal()}


_REPLACES = "replaces"
_MANY = 16  # parts; more are joined before work goes on
WORKERS = ".workers"  # locked by worker processes, so that no scan begins beside those of a killed one


class PartFolder:
    """The parts of a scan; can be sent to another process.

    Of two parts of which one says that it replaces the other only the first counts, so that parts can be joined and a
    kill in between changes nothing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()

    def new_name(self) -> str:
        return secrets.token_hex(8)

    def save(self, name: str, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put a state in the place of what that part was before; whole, or an error and the old one stays."""
        with explain_os_errors(self.folder):
            self.folder.mkdir(exist_ok=True)
        with replacing(self.path(name)) as beside, beside.open("wb") as handle:
            np.savez(handle, allow_pickle=False, **arrays)

    def done_in(self, name: str) -> DoneBatches:
        """The content of a part; empty if there is none of that name."""
        path = self.path(name)
        return DoneBatches.from_array(read_part(path, ["done"])["done"]) if path.is_file() else DoneBatches()

    def writing(self) -> AbstractContextManager[None]:
        """Within, no other scan of this index begins, even if the driver dies."""
        return attached(self.folder.parent.parent / WORKERS)

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.npz"

    def names(self) -> list[str]:
        return sorted(path.stem for path in self.folder.glob("*.npz"))

    def tidy(self, shapes: Mapping[int, LayerShape], settings: ScanSettings) -> None:
        """Remove what a killed scan has left, refuse damage, join parts where there are many. For the driver only."""
        for left in self.folder.glob("*.npz.part"):
            left.unlink()
        for name in self.names():
            _refuse_damage(self.path(name))
        replaced = [old for name in self.names() for old in read_part(self.path(name), [_REPLACES])[_REPLACES].tolist()]
        for name in replaced:
            self.path(name).unlink(missing_ok=True)
        if len(self.names()) > _MANY:
            self._join(shapes, settings)

    def _join(self, shapes: Mapping[int, LayerShape], settings: ScanSettings) -> None:
        """Parts of the same layers become one."""
        by_layers: dict[tuple[int, ...], list[str]] = {}
        for name in self.names():
            by_layers.setdefault(tuple(sorted(self.layers_in(name))), []).append(name)
        for layers, names in by_layers.items():
            joined = ScanState.empty({layer: shapes[layer] for layer in layers if layer in shapes}, settings)
            for name in names:
                part = ScanState.empty({layer: shapes[layer] for layer in joined.layers}, settings)
                part.restore_(read_part(self.path(name)))
                joined.merge(part)
            self.save(self.new_name(), {**joined.arrays(), _REPLACES: np.array(names)})
            for name in names:
                self.path(name).unlink()

    def layers_in(self, name: str) -> set[int]:
        with _open_part(self.path(name)) as saved:
            return layers_in(saved.files)


@contextmanager
def _open_part(path: Path) -> Iterator[Any]:
    try:
        with np.load(path, allow_pickle=False) as saved:
            yield saved
    except IndexFolderError:
        raise
    except Exception as error:  # a damaged archive fails in many ways, none of which is ours to tell apart
        raise _damaged(path) from error


def read_part(path: Path, names: Sequence[str] | None = None) -> dict[str, NDArray[Any]]:
    """The arrays of a part, or those named; a part that replaces none has an empty list of these."""
    with _open_part(path) as saved:
        wanted = saved.files if names is None else names
        none = {_REPLACES: np.array([], str)}
        return {name: none[name] if name in none and name not in saved.files else saved[name] for name in wanted}


def _refuse_damage(path: Path) -> None:
    """Every part has checksums inside; better to look at them now than after hours of work."""
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except Exception as error:
        raise _damaged(path) from error
    if broken is not None:
        raise _damaged(path)


def _damaged(path: Path) -> IndexFolderError:
    return IndexFolderError(
        f"{path} is damaged; remove this one file to have its part done again, or start over with --fresh"
    )


def wait_for_orphans(folder: Path, seconds: float = 60.0) -> None:
    """Wait until no worker of a driver that was killed writes into the index folder; they end by themselves, soon."""
    deadline = time.monotonic() + seconds
    while not is_free(folder / WORKERS):
        if time.monotonic() >= deadline:
            raise IndexFolderError(
                f"worker processes of an earlier scan still write to {folder}; end them and run the same command again"
            )
        time.sleep(0.05)
