"""One pass over sampled prefixes, from which all experiments of section 5 are read.

    experiments/prefixes.parquet        one row per prefix: where it is, its text, its target, the final token
    experiments/prefix-layers.parquet   one row per prefix and layer: tops of r, y and o, active memories, contributions

Sentences are fed up to their last sampled position, in batches; states come out in chunks of one size, as many as one
block of unembedding takes. The two tables are kept in the index and used again as long as sample, seed, corpus and
values are the same.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from memlens.corpus.sentences import corpus_fingerprint, cut_batches
from memlens.experiments.experiment import SAMPLE
from memlens.experiments.layer_look import TRIED, Columns, LayerLook, Unembedding, ValueReading, rows_at_once
from memlens.experiments.prefixes import (
    LAYERS_SCHEMA,
    PREFIXES_SCHEMA,
    Prefixes,
    join_columns,
    layer_table,
    prefix_table,
    sample_prefixes,
    sample_validation,
    stop_targets,
)
from memlens.index.format import EXPERIMENTS
from memlens.index.reader import Index
from memlens.models.decompose import PositionStates, record_positions
from memlens.models.memory_model import MemoryModel
from memlens.parallel import Progress, no_progress
from memlens.pool import Pool, SerialPool
from memlens.settings import CorpusSettings
from memlens.vocab.kernels import thread_pool
from memlens.vocab.tokens import tokens_read

PREFIXES, LAYERS = f"{EXPERIMENTS}/prefixes", f"{EXPERIMENTS}/prefix-layers"
_BATCH_TOKENS = 2048
_CHUNK_BYTES = 256 << 20  # states and coefficients of one chunk; a smaller chunk is taken where a model is large


def chunk_rows(model: MemoryModel, rows: int) -> int:
    """The number of prefixes in a chunk: `rows`, or as many as fit the memory."""
    a_prefix = sum(4 * (3 * model.width + block.memories) for block in model.layers)
    return max(1, min(rows, _CHUNK_BYTES // a_prefix))


def run_chunks(
    model: MemoryModel, prefixes: Prefixes, layers: set[int], rows: int
) -> Iterator[tuple[NDArray[np.int64], PositionStates]]:
    """Yield the prefixes of each chunk and the states at them; all chunks but the last have the same size."""
    waiting: list[PositionStates] = []
    numbers = np.zeros(0, np.int64)
    for planned in _forward_passes(prefixes):
        waiting.append(_run(model, planned, layers))
        numbers = np.concatenate([numbers, planned.numbers])
        if len(numbers) < rows:
            continue
        joined = PositionStates.join(waiting)
        whole = len(numbers) - len(numbers) % rows
        for first in range(0, whole, rows):
            yield numbers[first : first + rows], joined[first : first + rows]
        waiting, numbers = [joined[whole:].copy()], numbers[whole:]
        del joined
    if len(numbers):
        yield numbers, PositionStates.join(waiting)


def run_chunk(
    model: MemoryModel, prefixes: Prefixes, layers: set[int], rows: int, number: int
) -> tuple[NDArray[np.int64], PositionStates]:
    """Chunk `number` of those that run_chunks gives, by itself: only the batches that it lies in are run."""
    first, last, done = number * rows, (number + 1) * rows, 0
    numbers, positions = [], []
    for planned in _forward_passes(prefixes):
        begin, done = done, done + len(planned.numbers)
        if done > first and begin < last:
            part = slice(max(first - begin, 0), min(last, done) - begin)
            numbers.append(planned.numbers[part])
            positions.append(_run(model, planned, layers)[part])
    return np.concatenate(numbers), PositionStates.join(positions)


@dataclass(frozen=True)
class _ForwardPass:
    """One forward pass: its prefixes, and their places in its flattened tokens [batch, pos]."""

    numbers: NDArray[np.int64]
    places: list[int]
    tokens: NDArray[np.int64]


def _run(model: MemoryModel, planned: _ForwardPass, layers: set[int]) -> PositionStates:
    return record_positions(model, torch.from_numpy(planned.tokens), torch.tensor(planned.places), layers)


def _forward_passes(prefixes: Prefixes) -> Iterator[_ForwardPass]:
    """The forward passes in their order; sentences end at their last sampled position."""
    ends = np.full(len(prefixes.sentences), -1, np.int64)
    np.maximum.at(ends, prefixes.rows, prefixes.positions)
    fed = [(row, sentence.tokens[: ends[row] + 1]) for row, sentence in enumerate(prefixes.sentences)]
    of_sentence: list[list[int]] = [[] for _ in fed]
    for number, row in enumerate(prefixes.rows.tolist()):
        of_sentence[row].append(number)
    shift = 0 if prefixes.bos is None else 1
    for batch in cut_batches(fed, _BATCH_TOKENS, prefixes.bos):
        numbers, places = [], []
        for line, row in enumerate(batch.sentences.tolist()):
            for number in of_sentence[row]:
                numbers.append(number)
                places.append(line * batch.tokens.shape[1] + shift + int(prefixes.positions[number]))
        yield _ForwardPass(np.array(numbers, np.int64), places, batch.tokens)


@dataclass(frozen=True, eq=False)
class Aggregate:
    """The tables of one pass, by prefix and by layer and prefix, and where the prefixes came from."""

    index: Index
    prefixes: pa.Table
    layers: pa.Table
    last_layer: int  # of the model, whether it was scanned or not
    notes: Mapping[str, Any]

    @property
    def vocabulary(self) -> list[str]:
        """The text of every token."""
        return self.index.vocabulary

    @property
    def memories(self) -> dict[int, int]:
        """layer -> how many"""
        return {layer: self.index.memories(layer) for layer in self.index.layers}

    def by_layer(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Layer by layer its columns [prefixes] as arrays, lists as lists."""
        for layer in self.index.layers:
            rows = self.layers.filter(pc.equal(self.layers.column("layer"), layer))
            yield layer, {name: _plain(rows.column(name)) for name in rows.column_names}

    def column(self, name: str) -> Any:
        """One column of the table of prefixes."""
        return _plain(self.prefixes.column(name))


def aggregate(
    index: Index,
    model: MemoryModel,
    *,
    sample: int = SAMPLE,
    seed: int = 0,
    validation: CorpusSettings | None = None,
    stop_words: str = "en",
    progress: Progress = no_progress,
    pool: Pool | None = None,
) -> Aggregate:
    """The pass over a random sample, from the index where this very one was made before.

    `pool` works on chunks of prefixes; None is this process. The bytes are the same on every pool.
    """
    index.path("values")  # says which command is missing
    wanted = {
        "sample": sample,
        "seed": seed,
        "validation": None if validation is None else corpus_fingerprint(validation),
        "stop_words": stop_words,
        "values": index.manifest.sha256("values"),
        # of values and y; a pass that read y otherwise has no such note
        "reading": index.manifest.values.reading or None,
    }
    noted = dict(index.manifest.prefix_pass.content)
    if index.is_whole(PREFIXES) and index.is_whole(LAYERS) and {name: noted.get(name) for name in wanted} == wanted:
        return Aggregate(index, index.table(PREFIXES), index.table(LAYERS), len(model.layers) - 1, noted)
    index.check_model(model)
    prefixes = (
        sample_prefixes(index, sample, seed)
        if validation is None
        else sample_validation(index, model, validation, sample, seed)
    )
    stops = stop_targets(index, prefixes, stop_words)
    sampled = look_at_prefixes(index, model, prefixes, stops, progress, pool)
    notes: dict[str, Any] = {**wanted, "prefixes": len(prefixes), "origin": prefixes.origin}
    notes["threads"] = torch.get_num_threads()
    if validation is not None:
        given = {name: getattr(validation, name) for name in ("unit", "column")}
        notes["validation_corpus"] = {"sources": [*validation.sources], **given}
    tables = {PREFIXES: (PREFIXES_SCHEMA, [sampled.prefixes]), LAYERS: (LAYERS_SCHEMA, [sampled.layers])}
    index.write(tables, lambda: {"aggregate": notes})
    return Aggregate(index, sampled.prefixes, sampled.layers, sampled.last_layer, notes)


def look_at_prefixes(
    index: Index,
    model: MemoryModel,
    prefixes: Prefixes,
    stops: list[bool | None] | None = None,
    progress: Progress = no_progress,
    pool: Pool | None = None,
) -> Aggregate:
    """The pass over any prefixes, with the values of the index; nothing is written."""
    whole, layers = run_pass(model, prefixes, _promoted_tokens(index), progress, pool, value_reading(index))
    return Aggregate(
        index,
        prefix_table(prefixes, stops, whole),
        pa.concat_tables(layer_table(layer, columns) for layer, columns in layers.items()),
        len(model.layers) - 1,
        {"prefixes": len(prefixes), "origin": prefixes.origin},
    )


def run_pass(
    model: MemoryModel,
    prefixes: Prefixes,
    promoted: Mapping[int, NDArray[np.int32]],  # layer -> [memories], the top token of each value
    progress: Progress = no_progress,
    pool: Pool | None = None,
    values: ValueReading | None = None,
) -> tuple[Columns, dict[int, Columns]]:
    """The pass itself: columns with an entry per prefix, and the same for each layer."""
    whole: list[Columns] = []
    layers: dict[int, list[Columns]] = {layer: [] for layer in promoted}
    order: list[NDArray[np.int64]] = []
    done = 0
    progress("prefixes", 0, len(prefixes))
    for numbers, of_prefix, of_layers in _looks(model, prefixes, promoted, pool, values):
        whole.append(of_prefix)
        for layer, columns in of_layers.items():
            layers[layer].append(columns)
        order.append(numbers)
        done += len(numbers)
        progress("prefixes", done, len(prefixes))
    back = np.argsort(np.concatenate(order))  # from the order of batches to that of the sample
    return join_columns(whole, back), {layer: join_columns(parts, back) for layer, parts in layers.items()}


_Look = tuple[NDArray[np.int64], Columns, dict[int, Columns]]  # which prefixes, by prefix, by layer and prefix


def _looks(
    model: MemoryModel,
    prefixes: Prefixes,
    promoted: Mapping[int, NDArray[np.int32]],
    pool: Pool | None,
    values: ValueReading | None,
) -> Iterator[_Look]:
    """Yield the readings of the prefixes, chunk by chunk."""
    if pool is not None and not isinstance(pool, SerialPool):
        work = ChunkWork(prefixes, dict(promoted), values)
        yield from pool.map(work, range(work.chunks(model)))
        return
    with torch.inference_mode(), thread_pool() as threads:
        unembedding = Unembedding(model.lens, threads, torch.get_num_threads(), values)
        look = LayerLook(model, promoted, unembedding)
        for numbers, positions in run_chunks(model, prefixes, set(promoted), chunk_rows(model, unembedding.rows)):
            yield numbers, *look.look(positions)


class ChunkWork:
    """The pass over one chunk of prefixes by itself, wherever the model is. Can be pickled."""

    def __init__(
        self, prefixes: Prefixes, promoted: dict[int, NDArray[np.int32]], values: ValueReading | None = None
    ) -> None:
        self.prefixes, self.promoted, self.values = prefixes, promoted, values
        self._look: LayerLook | None = None  # made once per worker

    def chunks(self, model: MemoryModel) -> int:
        return -(-len(self.prefixes) // self._rows(model))

    def __call__(self, model: MemoryModel, number: int) -> _Look:
        rows, layers = self._rows(model), set(self.promoted)
        with torch.inference_mode(), thread_pool() as pool:
            if self._look is None:
                unembedding = Unembedding(model.lens, None, torch.get_num_threads(), self.values)
                self._look = LayerLook(model, self.promoted, unembedding)
                # Whether sums stand for scores is tried on the first states, which must be the same for every worker.
                self._look.look(run_chunk(model, self.prefixes, layers, min(rows, TRIED), 0)[1])
            self._look.unembedding.use_pool(pool)
            numbers, positions = run_chunk(model, self.prefixes, layers, rows, number)
            return numbers, *self._look.look(positions)

    def _rows(self, model: MemoryModel) -> int:
        return chunk_rows(model, rows_at_once(model.lens))


def value_reading(index: Index) -> ValueReading:
    """The reading with which the values table of an index was made."""
    return ValueReading(index.manifest.values.reading or None, tokens_read(index))


def _promoted_tokens(index: Index) -> dict[int, NDArray[np.int32]]:
    """layer -> [memories]: the top token of each value, as the values table has it."""
    table = index.table("values", ["layer", "memory", "argmax"]).sort_by(
        [("layer", "ascending"), ("memory", "ascending")]
    )
    layer, argmax = table.column("layer").to_numpy(), table.column("argmax").to_numpy()
    return {number: argmax[layer == number] for number in index.layers}


def _plain(column: pa.ChunkedArray) -> Any:
    if column.null_count or pa.types.is_nested(column.type) or pa.types.is_string(column.type):
        return column.to_pylist()
    return column.to_numpy()
