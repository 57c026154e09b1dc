"""values.parquet and keys.parquet: the tokens that each value promotes and that each key matches.

1. p(v) is the softmax of the lens scores of a value (see models/lens.py). Undertrained tokens (see tokens.py) are not
   listed by default, but they count in p, entropy, argmax and ranks. The coherence of a list shows whether the list has
   a clearer theme than the list of a random direction (see coherence.py).
2. The score of token e with key k is e . centered(gain * k) for a LayerNorm before the block, e . (gain * k) for an
   RMSNorm, and e . k without a norm. This score is the response of the key to the embedding of the token alone, without
   bias, position and attention. In a gated block, k is the gate's weight vector.
3. Values are compared with the tokens that follow the top triggers. The target of a memory is -1 if its top-1 trigger
   ends a sentence or if the memory has no trigger. Such memories are left out of comparisons.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from memlens.errors import ModelError, SettingError
from memlens.index.reader import Index
from memlens.models.experts import ExpertGroup
from memlens.models.groups import MemoryLayer
from memlens.models.lens import at_least_float32
from memlens.models.memory_model import MemoryModel
from memlens.pool import Pool, SerialPool
from memlens.progress import Progress, no_progress
from memlens.vocab.coherence import coherence, list_similarities, random_similarities
from memlens.vocab.kernels import count_above, count_scores, find_ends, read_softmax, score_blocks, thread_pool
from memlens.vocab.tokens import TOKENS_SCHEMA, token_tables, trained_tokens


@dataclass(frozen=True, eq=False)
class NextTokens:
    """The next tokens of the top triggers of one layer's memories."""

    layer: int
    tokens: NDArray[np.int32]  # [memories, triggers]: next tokens, -1 for none
    filled: NDArray[np.int64]  # [memories]: number of top triggers

    def among(self, tokens: NDArray[np.int64], vocabulary: int) -> "NextTokens":
        """Replace each token by its index in `tokens`, or by -1 if `tokens` does not contain it."""
        places = np.full(vocabulary + 1, -1, np.int32)  # the last entry is for token -1
        places[tokens] = np.arange(len(tokens))
        return NextTokens(self.layer, places[self.tokens], self.filled)

    @property
    def targets(self) -> NDArray[np.int32]:
        """The token after the top-1 trigger, or -1. [memories]"""
        return self.tokens[:, 0]

    @cached_property
    def shuffled_targets(self) -> NDArray[np.int32]:
        """The target of the next memory that has one, as a chance level; -1 if a memory has no target. [memories]"""
        shuffled = self.targets.copy()
        with_target = np.flatnonzero(shuffled >= 0)
        shuffled[with_target] = shuffled[np.roll(with_target, -1)]
        return shuffled


def read_next_tokens(index: Index, layer: int) -> NextTokens:
    """Return the next tokens of all memories of a scanned layer."""
    memories = index.memories(layer)
    rows = index.table(
        "triggers",
        columns=["memory", "rank", "next_token"],
        filters=[("layer", "=", layer), ("end", "=", "top")],
    )
    memory, rank = (rows.column(name).to_numpy() for name in ("memory", "rank"))
    following: NDArray[Any] = rows.column("next_token").fill_null(-1).to_numpy()
    tokens = np.full((memories, max(int(rank.max(initial=0)) + 1, 1)), -1, np.int32)
    tokens[memory, rank] = following
    return NextTokens(layer, tokens, np.bincount(memory, minlength=memories))


_MEMORIES_PER_GROUP = 1024
_RAW_PRESETS = ("paper", "released")

_INTEGERS, _NUMBERS = pa.list_(pa.int32()), pa.list_(pa.float32())
VALUES_SCHEMA = pa.schema(
    [
        ("layer", pa.int32()),
        ("memory", pa.int32()),
        ("max_p", pa.float32()),
        ("entropy", pa.float32()),  # entropy in nats
        ("norm", pa.float32()),  # length of the value in the checkpoint
        ("argmax", pa.int32()),
        ("target", pa.int32()),  # the token after the top-1 trigger; null if there is none
        ("target_rank", pa.int32()),  # 1 + the number of tokens with a higher score than the target
        ("shuffled_rank", pa.int32()),  # rank of another memory's target, as a chance level
        ("tokens", _INTEGERS),
        ("p", _NUMBERS),
        ("bottom_tokens", _INTEGERS),
        ("bottom_p", _NUMBERS),
        ("trigger_p", _NUMBERS),  # p of the token after each top trigger, by rank; null without a next token
        ("histogram", _INTEGERS),  # number of tokens by score, in bins of equal width from lowest to highest
        ("coherence", pa.float32()),  # share of random directions whose top tokens are less similar
    ]
)
KEYS_SCHEMA = pa.schema([("layer", pa.int32()), ("memory", pa.int32()), ("tokens", _INTEGERS), ("scores", _NUMBERS)])
ROUTERS_SCHEMA = pa.schema([("layer", pa.int32()), ("expert", pa.int32()), ("tokens", _INTEGERS), ("scores", _NUMBERS)])


def compute_values(
    index: Index,
    model: MemoryModel | str | None = None,
    *,
    top: int = 50,
    reading: str | None = None,
    vocabulary: str = "all",
    untrained: bool = False,
    progress: Progress = no_progress,
    make_pool: Callable[[MemoryModel], Pool] = SerialPool,
) -> None:
    """Write values.parquet, keys.parquet and tokens.parquet for every scanned layer.

    Args:
        index: The index to write to.
        model: The scanned model or its location. Default: the location of the scan.
        top: Number of tokens to list at each end.
        reading: "folded" or "raw". Default: "raw" for an index made with a preset of the paper, otherwise the default
            of the model.
        vocabulary: "all", or "trained" to leave undertrained tokens out of lists, p and targets.
        untrained: List undertrained tokens. Always True for an index made with a preset of the paper.
        progress: Called with the number of completed memories.
        make_pool: Makes the pool that maps over layers. Every pool gives the same bytes if the number of threads is the
            same.

    Raises:
        SettingError: An option is not valid.
        ModelError: The model is not the scanned model, or a value has scores that are not finite.
    """
    if top < 1:
        raise SettingError(f"--top is {top}; it must be 1 or more")
    for table in ("triggers", "corpus", "vocabulary"):
        index.path(table)  # raises an error if the table is missing, before anything is written
    model = index.load_model(model)
    reading = model.lens.checked_reading(default_reading(index) if reading is None else reading)
    untrained = untrained or index.manifest.settings.preset in _RAW_PRESETS
    trained = None if untrained and vocabulary == "all" else trained_tokens(index, model)
    kept = trained if vocabulary == "trained" else None
    listed = None if trained is None or not 0 < len(trained) < model.vocabulary else trained
    count = model.vocabulary if listed is None else len(listed)
    notes: dict[str, Any] = {"top": min(top, count), "reading": reading, "threads": torch.get_num_threads()}
    notes |= {} if kept is None else {"vocabulary": vocabulary, "tokens": len(kept)}
    notes |= {} if listed is None else {"listed": len(listed)}
    notes |= {"untrained": True} if untrained else {}
    notes["from"] = {"triggers": index.manifest.sha256("triggers")}
    pool = make_pool(model)
    values = VALUES_SCHEMA, value_tables(index, model, top, reading, progress, pool=pool, kept=kept, listed=listed)
    index.write({"values": values}, lambda: {"values": notes})
    tables = {"tokens": (TOKENS_SCHEMA, token_tables(index, model))}
    tables |= {"keys": (KEYS_SCHEMA, key_tables(index, model, top, progress, pool=pool))}
    if any(model.layers[layer].is_mixture for layer in index.layers):
        tables["routers"] = ROUTERS_SCHEMA, router_tables(index, model, top)
    index.write(tables, dict)


def values_are_made(
    index: Index,
    model: MemoryModel,
    *,
    top: int = 50,
    reading: str | None = None,
    vocabulary: str = "all",
    untrained: bool = False,
) -> bool:
    """Return True if the index holds intact tables with these settings."""
    reading = model.lens.checked_reading(default_reading(index) if reading is None else reading)
    note = index.manifest.values
    untrained = untrained or index.manifest.settings.preset in _RAW_PRESETS
    settings = note.top, note.reading, note.vocabulary, note.untrained
    if settings != (min(top, note.listed or model.vocabulary), reading, vocabulary, untrained):
        return False
    if not all(index.is_whole(table) for table in ("values", "keys", "tokens")):
        return False
    # keys are written after values, so after an interruption the index may hold the keys of an earlier call
    keys = index.sql("SELECT len(tokens) AS count FROM {keys} LIMIT 1")
    return [row["count"] for row in keys] == [min(top, len(model.lens.input_embedding))]


def default_reading(index: Index) -> str | None:
    """Return "raw" for an index made with a preset of the paper, otherwise None for the model's default."""
    return "raw" if index.manifest.settings.preset in _RAW_PRESETS else None


def value_tables(
    index: Index,
    model: MemoryModel,
    top: int,
    reading: str,
    progress: Progress = no_progress,
    layers: Sequence[int] | None = None,
    pool: Pool | None = None,
    kept: NDArray[np.int64] | None = None,
    listed: NDArray[np.int64] | None = None,
) -> Iterator[pa.Table]:
    """Yield the rows of values.parquet, for some layers or all.

    `kept` are the tokens that the softmax includes, and `listed` are the tokens that lists may contain. None means all
    tokens.
    """
    layers = index.layers if layers is None else layers
    listed = kept if listed is None else listed
    null = random_similarities(model, layers, reading, listed)
    items: Iterator[ValuesOfLayer | KeysOfLayer] = (
        ValuesOfLayer(read_next_tokens(index, layer), top, reading, null[layer], kept, listed) for layer in layers
    )
    count = MemoryCount("values", sum(index.memories(layer) for layer in layers), progress)
    return _layer_tables(items, model, count, pool)


def key_tables(
    index: Index,
    model: MemoryModel,
    top: int,
    progress: Progress = no_progress,
    layers: Sequence[int] | None = None,
    pool: Pool | None = None,
) -> Iterator[pa.Table]:
    """Yield the rows of keys.parquet, for some layers or all."""
    layers = index.layers if layers is None else layers
    items: Iterator[ValuesOfLayer | KeysOfLayer] = (KeysOfLayer(layer, top) for layer in layers)
    count = MemoryCount("keys", sum(index.memories(layer) for layer in layers), progress)
    return _layer_tables(items, model, count, pool)


class MemoryCount:
    """A counter of completed memories that reports the progress of a stage."""

    def __init__(self, stage: str, total: int, progress: Progress = no_progress) -> None:
        self.stage, self.total, self.progress, self.done = stage, total, progress, 0
        progress(stage, 0, total)

    def __call__(self, more: int) -> None:
        self.done += more
        self.progress(self.stage, self.done, self.total)


def _layer_tables(
    items: "Iterator[ValuesOfLayer | KeysOfLayer]",
    model: MemoryModel,
    count: MemoryCount,
    pool: Pool | None,
) -> Iterator[pa.Table]:
    if pool is None or isinstance(pool, SerialPool):  # progress can be reported after every block
        for item in items:
            yield from item.tables(model, count)
        return
    for tables in pool.map(_run_layer, items):
        count(sum(table.num_rows for table in tables))
        yield from tables


def _run_layer(model: MemoryModel, item: "ValuesOfLayer | KeysOfLayer") -> list[pa.Table]:
    return list(item.tables(model, lambda more: None))


@dataclass(frozen=True)
class ValuesOfLayer:
    """The work on the values of one layer, which can be pickled and run on any worker with the model."""

    following: NextTokens
    top: int
    reading: str
    null: NDArray[np.float64]  # sorted similarities of random directions
    kept: NDArray[np.int64] | None = None  # tokens that the softmax includes, ascending; None for all
    listed: NDArray[np.int64] | None = None  # tokens that lists may contain, ascending; None for all

    def tables(self, model: MemoryModel, count: Callable[[int], None]) -> Iterator[pa.Table]:
        layer = self.following.layer
        parts: list[dict[str, NDArray[Any]]] = []
        values, kept = model.layers[layer].values, self.kept
        following = self.following if kept is None else self.following.among(kept, model.vocabulary)
        listed = self.listed if kept is None else None  # with `kept`, lists may contain all kept tokens
        k = min(self.top, *(len(tokens) for tokens in (kept, listed) if tokens is not None), model.vocabulary)

        def score(block: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
            return model.lens.value_scores(block, layer, self.reading, place)

        with thread_pool() as pool:
            for rows, scores in score_blocks(values, score, model.vocabulary):
                kept_scores = scores if kept is None else scores.take(kept, 1)
                parts.append(_read_block(kept_scores, following, rows, k, pool, listed))
                rows_done = len(scores)
                del scores, kept_scores  # otherwise, two blocks are in RAM while the next block is computed
                count(rows_done)
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        columns["norm"] = at_least_float32(values).norm(dim=1).cpu().numpy()
        _refuse_not_finite(columns, layer, model)
        if kept is not None:  # convert places in `kept` to tokens
            columns |= {name: kept[columns[name]] for name in ("argmax", "tokens", "bottom_tokens")}
            tokens = np.where(following.tokens >= 0, self.following.tokens, -1)
            following = NextTokens(layer, tokens, following.filled)
        similarities = list_similarities(model.lens.embedding.cpu().numpy(), columns["tokens"])
        columns["coherence"] = np.where(columns["norm"] > 0, coherence(similarities, self.null), 0)
        yield from _value_rows(layer, columns, following)


def _read_block(
    scores: NDArray[np.float32],
    following: NextTokens,
    rows: slice,
    k: int,
    pool: Any,
    listed: NDArray[np.int64] | None,
) -> dict[str, NDArray[Any]]:
    """Return the columns of values.parquet for one block of values."""
    targets, next_tokens = following.targets[rows], following.tokens[rows]
    ends = find_ends(scores, k if listed is None else 1, pool)
    lists = ends if listed is None else find_ends(scores.take(listed, 1), k, pool)
    softmax = read_softmax(scores, ends, targets, pool)
    trigger_scores = np.take_along_axis(scores, np.maximum(next_tokens, 0).astype(np.int64), axis=1)
    return {
        "entropy": softmax.entropy,
        "target_rank": softmax.above + 1,
        "shuffled_rank": count_above(scores, following.shuffled_targets[rows], pool) + 1,
        "max_p": softmax.p(ends.top_scores[:, :1])[:, 0],
        "argmax": ends.top[:, 0],
        "tokens": lists.top if listed is None else listed[lists.top],
        "p": softmax.p(lists.top_scores),
        "bottom_tokens": lists.bottom if listed is None else listed[lists.bottom],
        "bottom_p": softmax.p(lists.bottom_scores),
        "trigger_p": softmax.p(trigger_scores),
        "histogram": count_scores(scores, ends, pool),
    }


def _refuse_not_finite(columns: dict[str, NDArray[Any]], layer: int, model: MemoryModel) -> None:
    damaged = ~(np.isfinite(columns["entropy"]) & np.isfinite(columns["norm"]))
    if damaged.any():
        name = model.names.name(layer, int(np.flatnonzero(damaged)[0]))
        raise ModelError(
            f"the value of memory {name} has scores that are NaN or infinite; "
            "the weights are damaged, or the dtype is too small: use --dtype float32"
        )


def _value_rows(layer: int, columns: dict[str, NDArray[Any]], following: NextTokens) -> Iterator[pa.Table]:
    for part in _groups(len(following.targets)):
        rows = {name: column[part] for name, column in columns.items()}
        targets = following.targets[part]
        table = {
            "layer": np.full(len(targets), layer),
            "memory": np.arange(part.start, part.stop),
            "max_p": rows["max_p"],
            "entropy": rows["entropy"],
            "norm": rows["norm"],
            "argmax": rows["argmax"],
            "target": pa.array(targets, pa.int32(), mask=targets < 0),
            "target_rank": pa.array(rows["target_rank"], pa.int32(), mask=targets < 0),
            "shuffled_rank": pa.array(rows["shuffled_rank"], pa.int32(), mask=targets < 0),
            "coherence": rows["coherence"],
            "trigger_p": _ragged(rows["trigger_p"], following.tokens[part] < 0, following.filled[part]),
        }
        for name in ("tokens", "p", "bottom_tokens", "bottom_p", "histogram"):
            table[name] = _lists(rows[name])
        yield pa.table({field.name: _cast(table[field.name], field.type) for field in VALUES_SCHEMA}, VALUES_SCHEMA)


@dataclass(frozen=True)
class KeysOfLayer:
    """The work on the keys of one layer, which can be pickled and run on any worker with the model."""

    layer: int
    top: int

    def tables(self, model: MemoryModel, count: Callable[[int], None]) -> Iterator[pa.Table]:
        embedding = model.lens.input_embedding  # [tokens, d]
        k = min(self.top, len(embedding))
        keys = folded_keys(model.layers[self.layer])
        parts = []

        def score(block: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
            return torch.matmul(block, embedding.T, out=place)

        with thread_pool() as pool:
            for _rows, scores in score_blocks(keys, score, len(embedding)):
                parts.append(find_ends(scores, k, pool)[:2])
                rows_done = len(scores)
                del scores
                count(rows_done)
        tokens, best = (np.concatenate(column) for column in zip(*parts, strict=True))
        for part in _groups(len(tokens)):
            head = {"layer": np.full(part.stop - part.start, self.layer), "memory": np.arange(part.start, part.stop)}
            yield pa.table(head | {"tokens": _lists(tokens[part]), "scores": _lists(best[part])}, KEYS_SCHEMA)


def router_tables(index: Index, model: MemoryModel, top: int) -> Iterator[pa.Table]:
    """Yield the rows of routers.parquet: the tokens that match each expert's row of the router, scored like keys."""
    embedding = model.lens.input_embedding  # [tokens, d]
    for layer in index.layers:
        groups = [group for group in model.layers[layer].groups if isinstance(group, ExpertGroup) and group.router]
        if not groups:
            continue
        rows = torch.stack([group.router.weight.detach()[group.expert] for group in groups])
        scores = (through_norm(rows, model.layers[layer]) @ embedding.T).to("cpu", torch.float32)
        best = scores.topk(min(top, len(embedding)), dim=1)
        head = {"layer": np.full(len(groups), layer), "expert": [group.expert for group in groups]}
        columns = {"tokens": _lists(best.indices.numpy()), "scores": _lists(best.values.numpy())}
        yield pa.table(head | columns, ROUTERS_SCHEMA)


def folded_keys(memories: MemoryLayer) -> torch.Tensor:
    """Return the keys with the linear part of the norm before the block folded in, [memories, d]."""
    return through_norm(memories.keys, memories)


def through_norm(keys: torch.Tensor, memories: MemoryLayer) -> torch.Tensor:
    """Return keys as directions of the stream: norm(stream) . key = stream . result, up to the scale of the norm."""
    keys = at_least_float32(keys)
    norm = memories.input_norm
    if norm is None:
        return keys
    keys = keys if norm.gain is None else keys * norm.gain
    # centering the stream is equivalent to centering the key
    return keys - keys.mean(-1, keepdim=True) if norm.centers else keys


def _groups(memories: int) -> Iterator[slice]:
    for first in range(0, memories, _MEMORIES_PER_GROUP):
        yield slice(first, min(first + _MEMORIES_PER_GROUP, memories))


def _cast(column: Any, kind: pa.DataType) -> Any:
    return column if isinstance(column, pa.Array) else pa.array(column).cast(kind)


def _lists(rows: NDArray[Any]) -> pa.Array:
    """Return an array [rows, k] as a list column."""
    kind = pa.int32() if rows.dtype.kind == "i" else pa.float32()
    offsets = np.arange(0, rows.size + 1, rows.shape[1], dtype=np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(rows.reshape(-1)).cast(kind))


def _ragged(rows: NDArray[Any], missing: NDArray[np.bool_], lengths: NDArray[np.int64]) -> pa.Array:
    """Return the first `lengths` entries of each row as a list column, with nulls where `missing`."""
    kept = np.arange(rows.shape[1])[None, :] < lengths[:, None]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(rows[kept].astype(np.float32), pa.float32(), mask=missing[kept]))
