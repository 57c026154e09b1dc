"""Writing the tables of a finished scan: triggers, statistics, ordinary prefixes, vocabulary.

Rows are ordered by layer and memory, so that a reader finds a memory in one row group.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from memlens.corpus.store import CorpusStore
from memlens.errors import IndexFolderError
from memlens.files import FileFacts, write_table
from memlens.index.format import (
    COUNTS,
    COUNTS_SCHEMA,
    EXPERTS,
    EXPERTS_SCHEMA,
    MEMORIES,
    MEMORIES_SCHEMA,
    ORDINARY,
    ORDINARY_SCHEMA,
    QUADRANT_SIGNS,
    QUADRANTS,
    QUADRANTS_SCHEMA,
    ROUTING,
    ROUTING_SCHEMA,
    TRIGGERS,
    TRIGGERS_SCHEMA,
    VOCABULARY,
    VOCABULARY_SCHEMA,
)
from memlens.models.tokenizer import Tokenizer
from memlens.scanner.kernels import EXAMPLES, UNIT, Routing
from memlens.scanner.layer import LayerScan
from memlens.scanner.state import DoneBatches, LayerShape, PartFolder, read_part, restore_layer_
from memlens.settings import ScanSettings

_MEMORIES_PER_ROW_GROUP = 1024
_ORDINARY_KEPT = 5


class JoinedParts:
    """All parts of a scan, merged one layer at a time to bound memory."""

    def __init__(self, folders: Sequence[PartFolder], shapes: Mapping[int, LayerShape], settings: ScanSettings) -> None:
        self.shapes, self.settings = shapes, settings
        self._paths: dict[int, list[Path]] = {layer: [] for layer in shapes}
        self._done = {layer: DoneBatches() for layer in shapes}
        self._counts = {layer: np.zeros(2, np.int64) for layer in shapes}
        for folder in folders:
            for name in folder.names():
                saved = read_part(folder.path(name), ["done", "counts"])
                for layer in folder.layers_in(name) & shapes.keys():
                    self._paths[layer].append(folder.path(name))
                    self._done[layer].merge(DoneBatches.from_array(saved["done"]))
                    self._counts[layer] += saved["counts"]

    def done(self, layer: int) -> DoneBatches:
        return self._done[layer]

    @property
    def is_mixture(self) -> bool:
        return any(shape.experts for shape in self.shapes.values())

    @property
    def is_gated(self) -> bool:
        return any(shape.gated for shape in self.shapes.values())

    @property
    def prefixes(self) -> int:
        return int(next(iter(self._counts.values()))[0])

    @property
    def tokens(self) -> int:
        """The number of tokens scanned so far, averaged over layers."""
        return sum(int(counts[1]) for counts in self._counts.values()) // len(self._counts)

    @property
    def layers(self) -> Iterator[LayerScan]:
        """The layers in order, each merged on demand."""
        for layer in sorted(self.shapes):
            yield self._layer(layer)

    def _layer(self, layer: int) -> LayerScan:
        joined = LayerScan(layer, *self.shapes[layer], settings=self.settings)
        for path in self._paths[layer]:
            part = LayerScan(layer, *self.shapes[layer], settings=self.settings)
            names = [f"{layer}.{name}" for name in part.arrays()]
            try:
                restore_layer_(part, read_part(path, names))
            except (KeyError, ValueError) as error:
                raise IndexFolderError(f"{path} does not fit this scan; start over with --fresh") from error
            joined.merge(part)
        return joined

    def layers_alike(self) -> list[tuple[int, ...]]:
        """Return the layers in groups. All layers of a group have scanned the same batches."""
        alike: dict[bytes, list[int]] = {}
        for layer in sorted(self.shapes):
            alike.setdefault(self._done[layer].array().tobytes(), []).append(layer)
        return [tuple(layers) for layers in alike.values()]


def write_scan_tables(folder: Path, scanned: JoinedParts, store: CorpusStore) -> dict[str, FileFacts]:
    """Write the tables of a scan with one layer at a time in memory."""
    statistics = (_statistics(scan, scanned.prefixes) for scan in scanned.layers)
    facts = {
        TRIGGERS: write_table(folder / TRIGGERS, TRIGGERS_SCHEMA, _triggers(scanned.layers, store)),
        ORDINARY: write_table(folder / ORDINARY, ORDINARY_SCHEMA, _ordinary(scanned.layers, store)),
        MEMORIES: write_table(folder / MEMORIES, MEMORIES_SCHEMA, statistics),
    }
    facts[COUNTS] = write_table(folder / COUNTS, COUNTS_SCHEMA, (_counts(scan) for scan in scanned.layers))
    if scanned.is_gated:
        facts[QUADRANTS] = write_table(folder / QUADRANTS, QUADRANTS_SCHEMA, _quadrants(scanned.layers, store))
    if scanned.is_mixture:
        routed = [(scan.layer, scan.routing) for scan in scanned.layers if scan.routing is not None]
        experts = (_experts(*layer, scanned.prefixes) for layer in routed)
        facts[EXPERTS] = write_table(folder / EXPERTS, EXPERTS_SCHEMA, experts)
        facts[ROUTING] = write_table(folder / ROUTING, ROUTING_SCHEMA, (_routing(*layer, store) for layer in routed))
    return facts


def write_vocabulary(folder: Path, tokenizer: Tokenizer, size: int) -> FileFacts:
    """Write the text of every row of the output embedding. Rows without a token in the tokenizer have an empty text."""
    texts = [tokenizer.token_text(token) if token < tokenizer.size else "" for token in range(size)]
    table = pa.table({"token": range(size), "text": texts}, VOCABULARY_SCHEMA)
    return write_table(folder / VOCABULARY, VOCABULARY_SCHEMA, iter([table]))


def is_dead(scan: LayerScan) -> NDArray[np.bool_]:
    """Return whether each memory is dead, [memories]. A dead memory was reached by prefixes but has no trigger."""
    dead: NDArray[np.bool_] = (scan.triggers.top_lists.filled == 0) & (prefixes_seen(scan, 1) > 0)
    return dead & (scan.triggers.bottom_lists.filled == 0) if scan.triggers.keeps_bottom else dead


def prefixes_seen(scan: LayerScan, prefixes: int) -> NDArray[np.int64]:
    """Return the number of prefixes that reached each memory, [memories]. Only routed prefixes reach an expert."""
    seen = np.full(len(scan.totals.total), prefixes, np.int64)
    if scan.routing is not None:
        routed = np.repeat(scan.routing.chosen, scan.size)
        seen[len(seen) - len(routed) :] = routed
    return seen


def _triggers(layers: Iterable[LayerScan], store: CorpusStore) -> Iterator[pa.Table]:
    for scan in layers:
        ends = scan.triggers.result()
        memories = len(scan.totals.total)
        for first in range(0, memories, _MEMORIES_PER_ROW_GROUP):
            chunk = range(first, min(first + _MEMORIES_PER_ROW_GROUP, memories))
            yield _trigger_rows(scan.layer, chunk, ends, store)


def _trigger_rows(layer: int, chunk: range, ends: dict[str, Any], store: CorpusStore) -> pa.Table:
    parts = []
    for number, lists in enumerate(ends.values()):
        part = slice(chunk.start, chunk.stop)
        places = np.arange(lists.coefficients.shape[1])[None, :] < lists.filled[part, None]  # [memories, top]
        memory, rank = np.nonzero(places)
        columns = [lists.coefficients[part], lists.sentences[part], lists.positions[part]]
        parts.append((memory + chunk.start, np.full(len(memory), number), rank, *(c[places] for c in columns)))
    memory, end_number, rank, coefficients, sentences, positions = (
        np.concatenate(column) for column in zip(*parts, strict=True)
    )
    order = np.lexsort((rank, end_number, memory))
    names = np.array(list(ends))
    head = {
        "layer": np.full(len(order), layer),
        "memory": memory[order],
        "end": names[end_number[order]],
        "rank": rank[order],
    }
    return pa.table(
        head | _prefix_columns(coefficients[order], sentences[order], positions[order], store), TRIGGERS_SCHEMA
    )


def _prefix_columns(
    coefficients: NDArray[Any], sentences: NDArray[Any], positions: NDArray[Any], store: CorpusStore
) -> dict[str, Any]:
    following = store.next_tokens(sentences, positions)
    return {
        "coefficient": coefficients,
        "sentence": sentences,
        "position": positions,
        "next_token": pa.array(following, pa.int32(), mask=following < 0),
    }


def _ordinary(layers: Iterable[LayerScan], store: CorpusStore) -> Iterator[pa.Table]:
    """Yield, for each memory, the first few sampled prefixes that are not triggers."""
    for scan in layers:
        examples = scan.sample.examples
        top = scan.triggers.result()["top"]
        drawn = examples.hashes != np.uint64(2**64 - 1)  # [memories, EXAMPLES]
        for place in range(EXAMPLES):
            same = (top.sentences == examples.sentences[:, place, None]) & (
                top.positions == examples.positions[:, place, None]
            )
            same &= np.arange(same.shape[1])[None, :] < top.filled[:, None]
            drawn[:, place] &= ~same.any(1)
        drawn &= np.cumsum(drawn, axis=1) <= _ORDINARY_KEPT
        memory, _ = np.nonzero(drawn)
        rank = (np.cumsum(drawn, axis=1) - 1)[drawn]
        columns = _prefix_columns(
            examples.coefficients[drawn], examples.sentences[drawn], examples.positions[drawn], store
        )
        head = {"layer": np.full(len(memory), scan.layer), "memory": memory, "rank": rank}
        yield pa.table(head | columns, ORDINARY_SCHEMA)


def _statistics(scan: LayerScan, prefixes: int) -> pa.Table:
    memories, seen = len(scan.totals.total), prefixes_seen(scan, prefixes)
    each = np.maximum(seen, 1)  # avoids division by 0; without prefixes, all sums are 0
    return pa.table(
        {
            "layer": np.full(memories, scan.layer),
            "memory": np.arange(memories),
            # adding 0 turns -0 into 0, because the sign of a zero would depend on the order of merging
            "max": np.where(seen > 0, scan.totals.highest, 0) + 0,
            "min": np.where(seen > 0, scan.totals.lowest, 0) + 0,
            "mean": scan.totals.total * UNIT / each,
            "frequency": scan.totals.fired.sum(1) / each,
            "dead": is_dead(scan),
            "histogram": list(scan.sample.counts),
        },
        MEMORIES_SCHEMA,
    )


def _counts(scan: LayerScan) -> pa.Table:
    memories = len(scan.totals.total)
    signs = scan.quadrants
    quadrants = [None] * memories if signs is None else list(np.take_along_axis(signs.counts, signs.order(), 1))
    return pa.table(
        {
            "layer": np.full(memories, scan.layer),
            "memory": np.arange(memories),
            "fired": list(scan.totals.fired),
            "prefixes": list(scan.by_memory(scan.reach.prefixes)),
            "sentences": list(scan.by_memory(scan.reach.sentences)),
            "quadrants": quadrants,
        },
        COUNTS_SCHEMA,
    )


def _quadrants(layers: Iterable[LayerScan], store: CorpusStore) -> Iterator[pa.Table]:
    """Yield the top prefixes of every quadrant, sorted by memory, quadrant and rank."""
    for scan in layers:
        if scan.quadrants is None:
            continue
        lists, order = scan.quadrants.lists, scan.quadrants.order()
        rows = (4 * np.arange(len(order))[:, None] + order).ravel()  # rows of the lists, sorted by memory and quadrant
        places = np.arange(lists.keys.shape[1])[None, :] < lists.filled[rows, None]  # [4 * memories, KEPT]
        number, rank = np.nonzero(places)
        scores, sentences, positions = (
            column[rows][places] for column in (lists.scores(), lists.sentences(), lists.positions)
        )
        signs = 1 - 2 * (rows[number] % 2).astype(np.float32)
        head = {
            "layer": np.full(len(number), scan.layer),
            "memory": number // 4,
            "quadrant": np.array(QUADRANT_SIGNS)[number % 4],
            "rank": rank,
        }
        yield pa.table(head | _prefix_columns(signs * scores, sentences, positions, store), QUADRANTS_SCHEMA)


def _experts(layer: int, routing: Routing, prefixes: int) -> pa.Table:
    chosen = routing.chosen
    weight = routing.weight * UNIT / np.maximum(chosen, 1)
    columns = {
        "layer": np.full(len(chosen), layer),
        "expert": np.arange(len(chosen)),
        "chosen": chosen,
        "share": chosen / prefixes,
        "weight": pa.array(weight, pa.float64(), mask=chosen == 0),
    }
    return pa.table(columns, EXPERTS_SCHEMA)


def _routing(layer: int, routing: Routing, store: CorpusStore) -> pa.Table:
    """Return the prefixes that are routed to each expert, sorted by expert, list and rank."""
    parts = []
    for which, lists in enumerate((routing.heaviest, routing.drawn)):
        places = np.arange(lists.keys.shape[1])[None, :] < lists.filled[:, None]  # [experts, places]
        expert, rank = np.nonzero(places)
        scores, sentences, positions = lists.scores()[places], lists.sentences()[places], lists.positions[places]
        parts.append((expert, np.full(len(expert), which), rank, scores, sentences, positions))
    expert, number, rank, weight, sentence, position = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((rank, number, expert))
    columns = _prefix_columns(weight[order], sentence[order], position[order], store)
    columns["weight"] = pa.array(columns.pop("coefficient"), pa.float32(), mask=number[order] == 1)
    head = {
        "layer": np.full(len(order), layer),
        "expert": expert[order],
        "list": np.array(["heaviest", "drawn"])[number[order]],
        "rank": rank[order],
    }
    return pa.table(head | columns, ROUTING_SCHEMA)
