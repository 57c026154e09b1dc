"""One pass over sampled prefixes, from which all experiments of section 5 are computed.

    experiments/prefixes.parquet        one row per prefix: position, text, target, final token
    experiments/prefix-layers.parquet   one row per prefix and layer: top tokens of r, y and o, active memories, logits

 1. Draw prefixes (prefixes.sample_prefixes, or sample_validation for another corpus).
 2. Plan forward passes: each sentence is run up to its last sampled position, in batches of similar length.
 3. Run the passes and collect the states at the sampled positions in chunks of equal size (PrefixReader.states).
 4. Read each chunk layer by layer (LayerReader): top tokens of r, y and o, the probability of the final token in r,
    active memories, and contributions to the final logit.
 5. Restore the order of the sample and write the two tables.

r and o are read through the model's lens. y is read with the same reading as the values table. Ties go to the lower
token id. The tables are reused as long as sample, seed, corpus and values stay the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from memlens.corpus.sentences import corpus_fingerprint, cut_batches
from memlens.errors import IndexFolderError, ModelError
from memlens.experiments.experiment import SAMPLE, kind_columns, read_table
from memlens.experiments.prefixes import (
    LAYERS,
    LAYERS_SCHEMA,
    PREFIXES,
    PREFIXES_SCHEMA,
    Prefixes,
    sample_prefixes,
    sample_validation,
    stop_targets,
)
from memlens.index.reader import Index
from memlens.models.decompose import LayerUse, LogitDecomposition, PositionStates, record_positions
from memlens.models.lens import Lens, to_float64
from memlens.models.memory_model import MemoryModel
from memlens.pool import Pool, SerialPool
from memlens.progress import Progress, no_progress
from memlens.settings import CorpusSettings
from memlens.vocab.kernels import Ends, read_softmax, thread_pool
from memlens.vocab.tokens import tokens_read

Columns = dict[str, Any]  # name -> array [n], or list [n] of lists, with None for an empty list

TOP_MEMORIES = (1, 10, 100)  # numbers of strongest memories whose contributions are added up
LISTED = 10  # number of memories to list for a composition
_BATCH_TOKENS = 2048
_CHUNK_BYTES = 256 << 20  # limit for the states and coefficients of a chunk; decides the chunk size of large models
_BLOCK_BYTES = 64 << 20  # size of a chunk's scores: smaller matrix products are slower, larger ones exceed the cache
_LEAST_ROWS, _MOST_ROWS = 128, 1024


@dataclass(frozen=True, eq=False)
class PrefixTables:
    """The two tables of a pass, and notes on the source of the prefixes."""

    index: Index
    prefixes: pa.Table
    layers: pa.Table
    last_layer: int  # last layer of the model, scanned or not
    notes: Mapping[str, Any]

    def by_layer(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield each layer with its columns [prefixes].

        Columns are arrays, or lists if they hold texts, lists or nulls.
        """
        for layer in self.index.layers:
            rows = self.layers.filter(pc.equal(self.layers.column("layer"), layer))
            yield layer, {name: _plain(rows.column(name)) for name in rows.column_names}

    def column(self, name: str) -> Any:
        """Return one column of the table of prefixes."""
        return _plain(self.prefixes.column(name))


def _plain(column: pa.ChunkedArray) -> Any:
    if column.null_count or pa.types.is_nested(column.type) or pa.types.is_string(column.type):
        return column.to_pylist()
    return column.to_numpy()


def read_prefixes(
    index: Index,
    model: MemoryModel,
    *,
    sample: int = SAMPLE,
    seed: int = 0,
    validation: CorpusSettings | None = None,
    stop_words: str = "en",
    progress: Progress = no_progress,
    pool: Pool | None = None,
) -> PrefixTables:
    """Return the tables of the pass over a random sample. Run the pass if the index does not hold them.

    `pool` runs the chunks of prefixes. If it is None, this process runs them. Every pool gives the same bytes.
    """
    index.path("values")  # raises an error that names the command to run if the table is missing
    settings = {
        "sample": sample,
        "seed": seed,
        "validation": None if validation is None else corpus_fingerprint(validation),
        "stop_words": stop_words,
        "values": index.manifest.sha256("values"),
        "reading": index.manifest.values.reading or None,
    }
    note = dict(index.manifest.prefix_pass.content)
    if {name: note.get(name) for name in settings} == settings:
        with suppress(IndexFolderError):  # damaged tables, and tables with other columns, are computed again
            prefixes = read_table(index, PREFIXES, PREFIXES_SCHEMA)
            layers = read_table(index, LAYERS, LAYERS_SCHEMA)
            if prefixes is not None and layers is not None:
                return PrefixTables(index, prefixes, layers, len(model.layers) - 1, note)
    tables = run_prefixes(index, model, sample, seed, validation, stop_words, progress, pool)
    note = {**settings, **tables.notes, "threads": torch.get_num_threads()}
    if validation is not None:
        options = {name: getattr(validation, name) for name in ("unit", "column")}
        note["validation_corpus"] = {"sources": [*validation.sources], **options}
    files = {PREFIXES: (PREFIXES_SCHEMA, [tables.prefixes]), LAYERS: (LAYERS_SCHEMA, [tables.layers])}
    index.write(files, lambda: {"aggregate": note})
    return PrefixTables(index, tables.prefixes, tables.layers, tables.last_layer, note)


def run_prefixes(
    index: Index,
    model: MemoryModel,
    sample: int,
    seed: int,
    validation: CorpusSettings | None = None,
    stop_words: str = "en",
    progress: Progress = no_progress,
    pool: Pool | None = None,
) -> PrefixTables:
    """Run the pass over a random sample without writing anything."""
    index.check_model(model)
    prefixes = (
        sample_prefixes(index, sample, seed)
        if validation is None
        else sample_validation(index, model, validation, sample, seed)
    )
    return read_given_prefixes(index, model, prefixes, stop_targets(index, prefixes, stop_words), progress, pool)


def read_given_prefixes(
    index: Index,
    model: MemoryModel,
    prefixes: Prefixes,
    stops: list[bool | None] | None = None,
    progress: Progress = no_progress,
    pool: Pool | None = None,
) -> PrefixTables:
    """Run the pass over the given prefixes with the values of the index. Nothing is written."""
    values = index.table("values", ["layer", "memory", "argmax"]).sort_by(
        [("layer", "ascending"), ("memory", "ascending")]
    )
    layer, argmax = values.column("layer").to_numpy(), values.column("argmax").to_numpy()
    promoted = {number: argmax[layer == number] for number in index.layers}
    of_prefixes, of_layers = run_pass(model, prefixes, promoted, progress, pool, value_reading(index))
    targets = prefixes.targets
    of_prefixes |= {
        "prefix": np.arange(len(prefixes)),
        "sentence": np.array([prefixes.sentences[row].id for row in prefixes.rows]),
        "position": prefixes.positions,
        "text": prefixes.texts,
        "target": pa.array(targets, pa.int32(), mask=targets < 0),
        "stop_word": [None] * len(prefixes) if stops is None else stops,
    }
    tables = []
    for number, columns in of_layers.items():
        places = {"layer": np.full(len(prefixes), number), "prefix": np.arange(len(prefixes))}
        tables.append(_table(places | columns, LAYERS_SCHEMA))
    return PrefixTables(
        index,
        _table(of_prefixes, PREFIXES_SCHEMA),
        pa.concat_tables(tables),
        len(model.layers) - 1,
        {"prefixes": len(prefixes), "origin": prefixes.origin},
    )


def _table(columns: Columns, schema: pa.Schema) -> pa.Table:
    def typed(column: Any, kind: pa.DataType) -> pa.Array:
        return column if isinstance(column, pa.Array) else pa.array(column, kind)

    return pa.table({field.name: typed(columns[field.name], field.type) for field in schema}, schema)


class ValueReading(NamedTuple):
    """The reading with which the values of an index were computed. y is read in the same way."""

    reading: str | None = None  # None for the model's default
    kept: NDArray[np.int64] | None = None  # ids of the tokens that the softmax includes, ascending; None for all


def value_reading(index: Index) -> ValueReading:
    """Return the reading of the values table of an index."""
    return ValueReading(index.manifest.values.reading or None, tokens_read(index))


def run_pass(
    model: MemoryModel,
    prefixes: Prefixes,
    promoted: Mapping[int, NDArray[np.int32]],  # layer -> [memories], the top token of each value
    progress: Progress = no_progress,
    pool: Pool | None = None,
    values: ValueReading | None = None,
) -> tuple[Columns, dict[int, Columns]]:
    """Run the pass. Returns the columns that describe prefixes, and {layer: columns}, all with one entry per prefix."""
    reader = PrefixReader(prefixes, dict(promoted), values)
    chunks = range(reader.chunks(model))
    results = (pool or SerialPool(model)).map(reader, chunks)
    of_prefixes: list[Columns] = []
    of_layers: dict[int, list[Columns]] = {layer: [] for layer in promoted}
    order: list[NDArray[np.int64]] = []
    done = 0
    progress("prefixes", 0, len(prefixes))
    for numbers, whole, layers in results:
        of_prefixes.append(whole)
        for layer, columns in layers.items():
            of_layers[layer].append(columns)
        order.append(numbers)
        done += len(numbers)
        progress("prefixes", done, len(prefixes))
    back = np.argsort(np.concatenate(order))  # restores the order of the sample
    return _join(of_prefixes, back), {layer: _join(parts, back) for layer, parts in of_layers.items()}


def _join(parts: list[Columns], order: NDArray[np.int64]) -> Columns:
    """Concatenate the columns of all chunks in the given order."""
    joined: Columns = {}
    for name, first in parts[0].items():
        if isinstance(first, list):
            entries = [entry for part in parts for entry in part[name]]
            joined[name] = [entries[i] for i in order]
        else:
            joined[name] = np.concatenate([part[name] for part in parts])[order]
    return joined


class _ForwardPass(NamedTuple):
    """The tokens [batch, pos] of one forward pass, its prefixes, and their places in the flattened tokens."""

    numbers: NDArray[np.int64]
    places: list[int]
    tokens: NDArray[np.int64]


def _plan_forward_passes(prefixes: Prefixes) -> Iterator[_ForwardPass]:
    """Yield the forward passes in order. Each sentence ends at its last sampled position."""
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


def chunk_rows(model: MemoryModel) -> int:
    """Return the number of prefixes in a chunk. The sizes of scores and states limit this number."""
    bytes_per_prefix = sum(4 * (3 * model.width + block.memories) for block in model.layers)
    rows = min(max(_BLOCK_BYTES // (4 * model.lens.vocabulary), _LEAST_ROWS), _MOST_ROWS)
    return max(1, min(rows, _CHUNK_BYTES // bytes_per_prefix))


class PrefixReader:
    """Reads one chunk of prefixes, in this process or on a worker. Can be pickled before its first call."""

    def __init__(
        self, prefixes: Prefixes, promoted: dict[int, NDArray[np.int32]], values: ValueReading | None = None
    ) -> None:
        self.prefixes, self.promoted, self.values = prefixes, promoted, values
        self._layers: LayerReader | None = None  # created by the first call on each worker
        self._last_pass: tuple[int, PositionStates] | None = None  # the next chunk may also need this pass

    def chunks(self, model: MemoryModel) -> int:
        """Return the number of chunks."""
        return -(-len(self.prefixes) // chunk_rows(model))

    def __call__(self, model: MemoryModel, chunk: int) -> tuple[NDArray[np.int64], Columns, dict[int, Columns]]:
        """Return the numbers of the chunk's prefixes, their columns, and {layer: their columns in this layer}."""
        with torch.inference_mode(), thread_pool() as threads:
            if self._layers is None:
                self._layers = LayerReader(model, self.promoted, Unembedding(model.lens, self.values))
            numbers, states = self.states(model, chunk)
            return numbers, *self._layers.read(states, threads)

    def states(self, model: MemoryModel, chunk: int) -> tuple[NDArray[np.int64], PositionStates]:
        """Run the forward passes that the chunk needs. Returns the numbers and the states of the chunk's prefixes."""
        rows = chunk_rows(model)
        first, last, done = chunk * rows, (chunk + 1) * rows, 0
        numbers, states = [], []
        for place, planned in enumerate(_plan_forward_passes(self.prefixes)):
            begin, done = done, done + len(planned.numbers)
            if done > first and begin < last:
                part = slice(max(first - begin, 0), min(last, done) - begin)
                numbers.append(planned.numbers[part])
                states.append(self._run(model, place, planned)[part])
        return np.concatenate(numbers), PositionStates.join(states)

    def _run(self, model: MemoryModel, place: int, planned: _ForwardPass) -> PositionStates:
        if self._last_pass is None or self._last_pass[0] != place:
            tokens, places = torch.from_numpy(planned.tokens), torch.tensor(planned.places)
            self._last_pass = place, record_positions(model, tokens, places, set(self.promoted))
        return self._last_pass[1]


class Unembedding:
    """Reads top tokens and probabilities from states [n, d] through a lens, and y with the reading of the values."""

    def __init__(self, lens: Lens, values: ValueReading | None = None) -> None:
        self._lens = lens
        self._reading = lens.checked_reading(values.reading if values else None)
        self._kept = values.kept if values else None

    def top(self, states: Tensor) -> NDArray[np.int32]:
        """Return the token with the highest score for each state."""
        return _highest(self._scores(states))

    def layer(
        self,
        layer: int,
        r: Tensor,
        y: Tensor,
        o: Tensor,
        final: NDArray[np.int32],
        is_last: bool,
        threads: ThreadPoolExecutor | None = None,
    ) -> Columns:
        """Return the top tokens of r, y and o, and the probability and rank of the final token [n] in r.

        In the last layer, top(o) is the final token and is not computed again.
        """
        scores = self._scores(r)
        residual = _highest(scores)
        # soft-capping preserves the order of the scores, so the top tokens stay the same
        capped = self._lens.capped(scores).numpy()
        rows = np.arange(len(capped))
        empty = np.empty((len(capped), 0), np.int32), np.empty((len(capped), 0), np.float32)
        ends = Ends(residual[:, None], capped[rows, residual][:, None], *empty)
        softmax = read_softmax(capped, ends, final, threads)
        columns = {
            "residual_token": residual,
            "p_final": softmax.p(capped[rows, final][:, None])[:, 0],
            "rank_final": softmax.above + 1,
        }
        scores = self._lens.addition_scores(y, layer, self._reading).to("cpu", torch.float32).contiguous()
        if self._kept is None:
            columns["ffn_token"] = _highest(scores)
        else:
            kept_scores = scores.index_select(1, torch.from_numpy(self._kept))
            columns["ffn_token"] = self._kept[_highest(kept_scores)].astype(np.int32)
        columns["output_token"] = final if is_last else self.top(o)
        return columns

    def _scores(self, states: Tensor) -> Tensor:
        """Return logits before soft-capping, [n, vocabulary] float32."""
        return self._lens.state_logits(states).to("cpu", torch.float32).contiguous()


def _highest(scores: Tensor) -> NDArray[np.int32]:
    """Return the token with the highest score in each row. Ties go to the lowest token."""
    array = scores.numpy()
    tokens: NDArray[np.int32] = array.argmax(1).astype(np.int32)
    if not np.isfinite(array[np.arange(len(array)), tokens]).all():
        raise ModelError(
            "a state has scores that are NaN or infinite; the dtype is too small for this model, so use float32"
        )
    return tokens


class LayerReader:
    """Reads states at sampled positions, layer by layer."""

    def __init__(
        self,
        model: MemoryModel,
        promoted: Mapping[int, NDArray[np.int32]],  # layer -> [memories], the top token of each value
        unembedding: Unembedding,
    ) -> None:
        self.model, self.promoted, self.unembedding = model, promoted, unembedding
        self.decomposition = LogitDecomposition(model)
        self.last = len(model.layers) - 1
        self.is_mixture = any(layer.is_mixture for layer in model.layers)
        self.norms = {layer: model.layers[layer].lengths() for layer in promoted}
        # by layer, [vocabulary]: whether the token is the top token of any value
        self.promotes = {layer: np.zeros(model.vocabulary, bool) for layer in promoted}
        for layer, tokens in promoted.items():
            self.promotes[layer][tokens] = True

    def read(
        self, positions: PositionStates, threads: ThreadPoolExecutor | None = None
    ) -> tuple[Columns, dict[int, Columns]]:
        """Return the columns that describe prefixes, and {layer: columns}, all with one entry per prefix."""
        final = self.unembedding.top(positions.o[self.last])
        tokens = self._tensor(final)
        logits = self.decomposition.logit_parts(positions, tokens)
        relative = self.decomposition.logit_parts(positions, tokens, relative=True)
        whole = {
            "final_token": final,
            "logit": _numbers(logits.logit),
            "logit_embedding": _numbers(logits.embedding),
            "logit_constant": _numbers(logits.constant),
            "above_mean": _numbers(relative.logit),
            "embedding": _numbers(relative.embedding),
            "constant": _numbers(relative.constant),
        }
        direction = self.decomposition.direction(tokens, positions.o[self.last], relative=True)
        layers = {}
        for layer in self.promoted:
            r, y, o = positions.r[layer], positions.y[layer], positions.o[layer]
            columns = self.unembedding.layer(layer, r, y, o, final, layer == self.last, threads)
            columns |= self._count_memories(layer, positions.coefficients[layer], columns["ffn_token"])
            columns |= {
                "ffn_logit": _numbers(logits.ffn[layer]),
                "attention_logit": _numbers(logits.attention[layer]),
                "ffn_above": _numbers(relative.ffn[layer]),
                "attention_above": _numbers(relative.attention[layer]),
            }
            columns |= self._add_contributions(layer, positions.used(layer), direction)
            columns |= self._list_memories(layer, positions, columns)
            layers[layer] = columns
        return whole, layers

    def _count_memories(self, layer: int, coefficients: Tensor, ffn: NDArray[np.int32]) -> Columns:
        """Return the numbers of active and effective memories, and whether top(y) is the top token of a value."""
        sizes = coefficients.abs() * self.norms[layer]
        total, length = to_float64(sizes.sum(1)), to_float64(torch.linalg.vector_norm(sizes, dim=1))
        effective = (total / length.clamp_min(torch.finfo(torch.float32).tiny)).square()  # 0 if all coefficients are 0
        active = coefficients > 0  # [n, memories]
        is_promoted = self.promotes[layer][ffn]
        is_promoted_by_active = np.zeros(len(ffn), bool)
        for row in np.flatnonzero(is_promoted):
            promoters = np.flatnonzero(self.promoted[layer] == ffn[row])
            is_promoted_by_active[row] = bool(active[row, self._tensor(promoters)].any())
        return {
            "active": active.sum(1).cpu().numpy(),
            "effective": _numbers(effective),
            "promoted": is_promoted,
            "promoted_active": is_promoted_by_active,
        }

    def _add_contributions(self, layer: int, used: LayerUse, direction: Tensor) -> Columns:
        """Return columns with the summed contributions of memories to the final logit minus the mean of all logits.

        Three columns sum the 1, 10 and 100 largest contributions, where a negative contribution counts as 0. In a
        mixture of experts, each kind of memory has two more columns: the sum of its contributions, and the share with
        m > 0 among the memories that a prefix reaches.
        """
        added = self.decomposition.memories(layer, used, direction)  # [n, memories]
        most = min(TOP_MEMORIES[-1], added.shape[1])
        running = to_float64(added.topk(most, dim=1).values.clamp_min(0)).cumsum(1)
        columns: Columns = {f"top{count}": _numbers(running[:, min(count, most) - 1]) for count in TOP_MEMORIES}
        columns |= {name: [None] * len(added) for name in kind_columns("active", "given")}
        groups = self.model.layers[layer].groups
        for kind in {group.kind for group in groups} if self.is_mixture else ():
            places = [place for place, group in enumerate(groups) if group.kind == kind]
            span = slice(groups[places[0]].start, groups[places[-1]].columns.stop)
            sizes = torch.tensor([groups[place].size for place in places], device=added.device)
            reached = ((used.weights[:, places] != 0) * sizes).sum(1).clamp_min(1)
            columns[f"{kind}_active"] = _numbers((used.coefficients[:, span] > 0).sum(1) / reached)
            columns[f"{kind}_given"] = _numbers(to_float64(added[:, span]).sum(1))
        return columns

    def _list_memories(self, layer: int, positions: PositionStates, columns: Columns) -> Columns:
        """Return columns that list vetoing memories, for prefixes where r, y and o have three different top tokens.

        A veto lowers the logit of the residual's token relative to the mean of all tokens. In the last layer, also list
        the memories that raise the output's token relative to the residual's. Both effects are measured at the scale of
        the final norm for this layer's output.
        """
        output, residual, ffn = columns["output_token"], columns["residual_token"], columns["ffn_token"]
        rows = np.flatnonzero((output != residual) & (output != ffn) & (residual != ffn))
        listed: Columns = {
            name: [None] * len(output)
            for name in ("vetoes", "veto_pushes", "pushers", "pushes", "cosine", "cosine_shuffled")
        }
        if not len(rows):
            return listed
        where = self._tensor(rows)
        states, used = positions.o[layer][where], positions.used(layer).at(where)
        before, after = self._tensor(residual[rows]), self._tensor(output[rows])
        down = self.decomposition.direction(before, states, relative=True)
        _list_strongest_(listed, ("vetoes", "veto_pushes"), rows, self.decomposition.memories(layer, used, down), -1)
        if layer == self.last:
            up = self.decomposition.direction(after, states) - self.decomposition.direction(before, states)
            _list_strongest_(listed, ("pushers", "pushes"), rows, self.decomposition.memories(layer, used, up), 1)
            # the chance level pairs the token before a change with the token after another change of the chunk
            for name, others in (("cosine", after), ("cosine_shuffled", after.roll(-1))):
                for row, cosine in zip(rows, self.decomposition.cosine(before, others).tolist(), strict=True):
                    listed[name][row] = cosine
        return listed

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self.model.device)


def _list_strongest_(
    listed: Columns, names: tuple[str, str], rows: NDArray[np.int64], added: Tensor, sign: int
) -> None:
    """Fill two columns with the memories of the largest contributions of one sign, and with these contributions."""
    amounts, memories = (added * sign).topk(min(LISTED, added.shape[1]), dim=1)
    for row, amount, memory in zip(rows, amounts.tolist(), memories.tolist(), strict=True):
        pushes = [(i, sign * x) for i, x in zip(memory, amount, strict=True) if x > 0]
        listed[names[0]][row] = [i for i, _ in pushes]
        listed[names[1]][row] = [x for _, x in pushes]


def _numbers(tensor: Tensor) -> NDArray[np.float64]:
    return to_float64(tensor).cpu().numpy()
