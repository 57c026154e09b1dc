"""The parts of a scan under way: one file for each worker that has ever worked on it, in partial/parts.

Parts are disjoint: each worker rewrites its own part only, and what a part holds is never done again. So the set of
parts is the whole truth about what is done, whoever continues. Of two parts of which one says that it replaces the
other, only the first counts, so that parts can be joined and a kill in between changes nothing.
"""

from __future__ import annotations

import secrets
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlens.errors import IndexFolderError
from memlens.files import attached, explain_os_errors, is_free, replacing
from memlens.index.layout import WORKERS
from memlens.scanner.layer import LayerScan
from memlens.scanner.settings import ScanSettings
from memlens.scanner.state import Done, LayerShape, ScanState, layers_in, restore_layer_

_REPLACES = "replaces"
_MANY = 16  # parts; more are joined before work goes on


class PartFolder:
    """Keeps the parts of a scan; can be sent to another process."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the index folder's partial/parts."""
        self.folder = folder.absolute()

    def new_name(self) -> str:
        return secrets.token_hex(8)

    def keep(self, name: str, arrays: Mapping[str, NDArray[Any]]) -> None:
        with explain_os_errors(self.folder):
            self.folder.mkdir(exist_ok=True)
        with replacing(self.path(name)) as beside, beside.open("wb") as handle:
            np.savez(handle, allow_pickle=False, **arrays)

    def done_in(self, name: str) -> Done:
        return Done.from_array(_read(self.path(name), ["done"])["done"]) if self.path(name).is_file() else Done()

    @contextmanager
    def writing(self) -> Iterator[None]:
        with attached(self.folder.parent.parent / WORKERS):
            yield

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
        replaced = [old for name in self.names() for old in _read(self.path(name), [_REPLACES])[_REPLACES].tolist()]
        for name in replaced:
            self.path(name).unlink(missing_ok=True)
        if len(self.names()) > _MANY:
            self._join(shapes, settings)

    def _join(self, shapes: Mapping[int, LayerShape], settings: ScanSettings) -> None:
        """Parts of the same layers become one."""
        groups: dict[tuple[int, ...], list[str]] = {}
        for name in self.names():
            groups.setdefault(tuple(sorted(self.layers_in(name))), []).append(name)
        for layers, names in groups.items():
            joined = ScanState.empty({layer: shapes[layer] for layer in layers if layer in shapes}, settings)
            for name in names:
                part = ScanState.empty({layer: shapes[layer] for layer in joined.layers}, settings)
                part.restore_(_read(self.path(name)))
                joined.merge(part)
            self.keep(self.new_name(), {**joined.arrays(), _REPLACES: np.array(names)})
            for name in names:
                self.path(name).unlink()

    def layers_in(self, name: str) -> set[int]:
        with _opened(self.path(name)) as saved:
            return layers_in(saved.files)


class JoinedParts:
    """What all parts together hold, layer by layer, so that one layer at a time is in memory."""

    def __init__(self, folders: Sequence[PartFolder], shapes: Mapping[int, LayerShape], settings: ScanSettings) -> None:
        self.shapes, self.settings = shapes, settings
        self._paths: dict[int, list[Path]] = {layer: [] for layer in shapes}
        self._done = {layer: Done() for layer in shapes}
        self._counts = {layer: np.zeros(2, np.int64) for layer in shapes}
        for folder in folders:
            for name in folder.names():
                saved = _read(folder.path(name), ["done", "counts"])
                for layer in folder.layers_in(name) & shapes.keys():
                    self._paths[layer].append(folder.path(name))
                    self._done[layer].merge(Done.from_array(saved["done"]))
                    self._counts[layer] += saved["counts"]

    def done(self, layer: int) -> Done:
        return self._done[layer]

    @property
    def prefixes(self) -> int:
        return int(next(iter(self._counts.values()))[0])

    @property
    def tokens(self) -> int:
        """Fed so far, on the average of the layers."""
        return sum(int(counts[1]) for counts in self._counts.values()) // len(self._counts)

    @property
    def layers(self) -> Iterator[LayerScan]:
        """In order, each made when it is asked for."""
        for layer in sorted(self.shapes):
            yield self._layer(layer)

    def _layer(self, layer: int) -> LayerScan:
        joined = LayerScan(layer, *self.shapes[layer], self.settings)
        for path in self._paths[layer]:
            part = LayerScan(layer, *self.shapes[layer], self.settings)
            names = [f"{layer}.{name}" for name in part.arrays()]
            try:
                restore_layer_(part, _read(path, names))
            except (KeyError, ValueError) as error:
                raise IndexFolderError(f"{path} does not fit this scan; start over with --fresh") from error
            joined.merge(part)
        return joined

    def groups(self) -> list[tuple[int, ...]]:
        """Layers of which the same is done, together."""
        groups: dict[bytes, list[int]] = {}
        for layer in sorted(self.shapes):
            groups.setdefault(self._done[layer].array().tobytes(), []).append(layer)
        return [tuple(layers) for layers in groups.values()]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with np.load(path, allow_pickle=False) as saved:
            yield saved
    except IndexFolderError:
        raise
    except Exception as error:  # a damaged archive fails in many ways, none of which is ours to tell apart
        raise damaged(path) from error


def _read(path: Path, names: Sequence[str] | None = None) -> dict[str, NDArray[Any]]:
    """The arrays of a part, or those named; a part that replaces none has an empty list of these."""
    with _opened(path) as saved:
        wanted = saved.files if names is None else names
        return {name: np.array([], str) if name == _REPLACES and name not in saved.files else saved[name]
                for name in wanted}  # fmt: skip


def _refuse_damage(path: Path) -> None:
    """Every part has checksums inside; better to look at them now than after hours of work."""
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except Exception as error:
        raise damaged(path) from error
    if broken is not None:
        raise damaged(path)


def damaged(path: Path) -> IndexFolderError:
    return IndexFolderError(
        f"{path} is damaged; remove this one file to have its part done again, or start over with --fresh"
    )


def wait_for_orphans(folder: Path, seconds: float = 60.0) -> None:
    """Until no worker of a driver that was killed writes into the index folder; they end by themselves, soon."""
    deadline = time.monotonic() + seconds
    while not is_free(folder / WORKERS):
        if time.monotonic() >= deadline:
            raise IndexFolderError(
                f"worker processes of an earlier scan still write to {folder}; end them and run the same command again"
            )
        time.sleep(0.05)
