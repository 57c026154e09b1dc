"""The two tables of the pass over sampled prefixes: their columns, and how the parts of a pass become one table.

Knows columns; what the numbers are is layer_look's business, where the tables lie aggregate's.

Which prefixes the experiments of section 5 look at, drawn at random or given one by one.

A draw is uniform over all prefixes of all sentences, without replacement: the prefixes with the lowest hashes of seed,
sentence and position. So it depends on nothing but these, memory stays bounded however long the text is, and a larger
sample contains every smaller one. A prefix is BOS (where it is fed) and the tokens up to its position; position -1 is
BOS alone, which is never drawn but may be given. This module runs no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from memlens.corpus.sentences import Sentence, corpus_fingerprint, read_units, tokenize_units
from memlens.corpus.settings import CorpusSettings
from memlens.errors import CorpusError, SettingError
from memlens.experiments.layer_look import Columns
from memlens.index.reader import Index
from memlens.scanner.sample import prefix_hashes
from memlens.scanner.settings import WINDOW

if TYPE_CHECKING:
    from memlens.models.memory_model import MemoryModel

PREFIXES_SCHEMA = pa.schema(
    [
        ("prefix", pa.int32()),
        ("sentence", pa.int64()),
        ("position", pa.int32()),  # -1 is BOS alone
        ("text", pa.string()),  # null where only tokens were given
        ("target", pa.int32()),  # the token that really follows; null at the end of a sentence
        ("stop_word", pa.bool_()),  # is the target one?
        ("final_token", pa.int32()),  # top(o_L), what the model predicts
        ("logit", pa.float64()),  # of the final token, before soft-capping
        ("logit_embedding", pa.float64()),  # what the embedding put into it
        ("logit_constant", pa.float64()),  # what biases after the last layer put into it
        ("above_mean", pa.float64()),  # the logit less the mean of all logits
        ("embedding", pa.float64()),  # what the embedding put into that
        ("constant", pa.float64()),
    ]
)
LAYERS_SCHEMA = pa.schema(
    [
        ("layer", pa.int32()),
        ("prefix", pa.int32()),
        ("residual_token", pa.int32()),  # top(r)
        ("ffn_token", pa.int32()),  # top(y)
        ("output_token", pa.int32()),  # top(o)
        ("p_final", pa.float64()),  # softmax(r E)[final token]
        ("rank_final", pa.int32()),  # 1 + tokens that r scores strictly higher than the final one
        ("active", pa.int32()),  # memories with m > 0
        ("effective", pa.float64()),  # participation ratio of |m| ||v||
        ("promoted", pa.bool_()),  # is top(y) the top of any value of the layer?
        ("promoted_active", pa.bool_()),  # of any whose m > 0?
        ("ffn_logit", pa.float64()),  # what went into the final token's logit
        ("attention_logit", pa.float64()),
        ("ffn_above", pa.float64()),  # the same beside the mean of all logits
        ("attention_above", pa.float64()),
        ("top1", pa.float64()),  # what the strongest memories gave, beside the mean
        ("top10", pa.float64()),
        ("top100", pa.float64()),
        ("vetoes", pa.list_(pa.int32())),  # where o is a composition: memories that took most from top(r)
        ("veto_pushes", pa.list_(pa.float32())),
        ("pushers", pa.list_(pa.int32())),  # the same in the last layer: memories that gave most to top(o) over top(r)
        ("pushes", pa.list_(pa.float32())),
        ("cosine", pa.float32()),  # of the two tokens' output embeddings
    ]
)


def prefix_table(prefixes: Prefixes, stops: list[bool | None] | None, columns: Columns) -> pa.Table:
    targets = prefixes.targets
    own = {
        "prefix": np.arange(len(prefixes)),
        "sentence": np.array([prefixes.sentences[row].id for row in prefixes.rows]),
        "position": prefixes.positions,
        "text": prefixes.texts,
        "target": pa.array(targets, pa.int32(), mask=targets < 0),
        "stop_word": [None] * len(prefixes) if stops is None else stops,
    }
    return _table(own | columns, PREFIXES_SCHEMA)


def layer_table(layer: int, columns: Columns) -> pa.Table:
    count = len(columns["active"])
    return _table({"layer": np.full(count, layer), "prefix": np.arange(count)} | columns, LAYERS_SCHEMA)


def _table(columns: Columns, schema: pa.Schema) -> pa.Table:
    def typed(column: Any, kind: pa.DataType) -> pa.Array:
        return column if isinstance(column, pa.Array) else pa.array(column, kind)

    return pa.table({field.name: typed(columns[field.name], field.type) for field in schema}, schema)


def joined(parts: list[Columns], order: NDArray[np.int64]) -> Columns:
    whole: Columns = {}
    for name, first in parts[0].items():
        if isinstance(first, list):
            entries = [entry for part in parts for entry in part[name]]
            whole[name] = [entries[i] for i in order]
        else:
            whole[name] = np.concatenate([part[name] for part in parts])[order]
    return whole


SAMPLE = 4000
_SALT = 0x5EC7105  # so that the scan's own sample of the same seed is another one


@dataclass(frozen=True, eq=False)
class SampledSentence:
    """A sentence with at least one prefix in the sample; without a text where only tokens were given."""

    id: int
    tokens: NDArray[np.int64]
    text: str | None = None
    ends: Sequence[int] = ()  # for each token the offset in `text` where it ends


@dataclass(frozen=True, eq=False)
class Prefixes:
    """n prefixes, by sentence, then position."""

    sentences: Sequence[SampledSentence]
    rows: NDArray[np.int64]  # [n] which of `sentences`
    positions: NDArray[np.int64]  # [n]
    bos: int | None  # what is fed before every sentence
    origin: str  # where they came from, in words
    notes: dict[str, Any] = field(default_factory=dict)  # the same for machines; equal notes mean equal prefixes

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def targets(self) -> NDArray[np.int64]:
        """[n]: the token that really follows; -1 where the sentence ends."""
        return np.array([self._target(row, at) for row, at in self._places()], np.int64)

    @property
    def texts(self) -> list[str | None]:
        """[n]: each prefix as text."""
        return [self._text(row, at) for row, at in self._places()]

    @classmethod
    def given(
        cls,
        sentences: Sequence[Sequence[int]],
        positions: Sequence[int],
        bos: int | None,
        origin: str = "given prefixes",
    ) -> Prefixes:
        """One prefix of each sentence of tokens, at the position given."""
        if len(sentences) != len(positions):
            raise SettingError(f"{len(sentences)} sentences but {len(positions)} positions; give one for each")
        if not len(sentences):
            raise SettingError("no prefixes were given; give at least one")
        for number, (tokens, position) in enumerate(zip(sentences, positions, strict=True)):
            first = 0 if bos is None else -1
            if not first <= position < len(tokens):
                raise SettingError(
                    f"position {position} of sentence {number} does not exist; it has {first} to {len(tokens) - 1}"
                )
        held = [SampledSentence(i, np.asarray(tokens, np.int64)) for i, tokens in enumerate(sentences)]
        return cls(held, np.arange(len(held)), np.asarray(positions, np.int64), bos, origin)

    def _places(self) -> Iterator[tuple[int, int]]:
        return zip(self.rows.tolist(), self.positions.tolist(), strict=True)

    def _target(self, row: int, position: int) -> int:
        tokens = self.sentences[row].tokens
        return int(tokens[position + 1]) if position + 1 < len(tokens) else -1

    def _text(self, row: int, position: int) -> str | None:
        sentence = self.sentences[row]
        if sentence.text is None:
            return None
        return sentence.text[: sentence.ends[position]] if position >= 0 else ""


def sample_prefixes(index: Index, count: int = SAMPLE, seed: int = 0) -> Prefixes:
    """Random prefixes of the corpus that was scanned."""
    draw = _Draw(count, seed)
    for rows in pq.ParquetFile(index.path("corpus")).iter_batches(WINDOW, columns=["sentence", "tokens"]):
        draw.offer(rows.column("sentence").to_numpy(), np.diff(rows.column("tokens").offsets.to_numpy()))
    wanted = np.unique(draw.sentences)
    found = index.sentences(wanted.tolist())
    sentences = [
        SampledSentence(i, np.asarray(found[i]["tokens"], np.int64), found[i]["text"], found[i]["ends"])
        for i in wanted.tolist()
    ]
    origin = f"{len(draw.sentences):,} random prefixes of the scanned corpus, seed {seed}"
    notes = {"sample": count, "seed": seed, "validation": None}
    return draw.prefixes(sentences, index.manifest.model.bos, origin, notes)


def sample_validation(
    index: Index, model: MemoryModel, corpus: CorpusSettings, count: int = SAMPLE, seed: int = 0
) -> Prefixes:
    """Random prefixes of another corpus, cut and fed as the scanned one was."""
    bos = index.manifest.model.bos
    draw = _Draw(count, seed)
    kept: dict[int, Sentence] = {}
    for window in _windows(_tokenized(index, model, corpus, bos)):
        draw.offer(
            np.array([sentence.id for sentence in window], np.int64),
            np.array([len(sentence.tokens) for sentence in window], np.int64),
        )
        drawn = set(draw.sentences.tolist())
        kept = {i: sentence for i, sentence in kept.items() if i in drawn}
        kept |= {sentence.id: sentence for sentence in window if sentence.id in drawn}
    if not kept:
        raise CorpusError(f"{_names(corpus)} holds no text: not one token was found; check --validation")
    highest = max(max(sentence.tokens) for sentence in kept.values())
    if highest >= model.vocabulary:
        raise SettingError(
            f"the tokenizer gives token {highest}, but {model.name} has only {model.vocabulary}; "
            "use the tokenizer that belongs to the model"
        )
    sentences = [
        SampledSentence(i, np.asarray(kept[i].tokens, np.int64), kept[i].text, kept[i].ends) for i in sorted(kept)
    ]
    origin = f"{len(draw.sentences):,} random prefixes of {_names(corpus)}, seed {seed}"
    return draw.prefixes(
        sentences, bos, origin, {"sample": count, "seed": seed, "validation": corpus_fingerprint(corpus)}
    )


class _Draw:
    """The prefixes with the lowest hashes among those that were offered."""

    def __init__(self, count: int, seed: int) -> None:
        if count < 1:
            raise SettingError(f"--sample is {count}; it must be 1 or more")
        self.count, self.seed = count, seed
        self.hashes = np.zeros(0, np.uint64)
        self.sentences = np.zeros(0, np.int64)
        self.positions = np.zeros(0, np.int64)

    def offer(self, sentences: NDArray[np.int64], lengths: NDArray[np.integer[Any]]) -> None:
        """All prefixes of sentences [n] with so many tokens each [n]."""
        ids = np.repeat(sentences, lengths)
        positions = np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        hashes = prefix_hashes(self.seed + _SALT, ids, positions)
        if len(self.hashes) == self.count:  # most windows of a long text have next to nothing below the bar
            below = np.flatnonzero(hashes <= self.hashes.max())
            hashes, ids, positions = hashes[below], ids[below], positions[below]
        hashes = np.concatenate([self.hashes, hashes])
        ids, positions = np.concatenate([self.sentences, ids]), np.concatenate([self.positions, positions])
        best = np.lexsort((positions, ids, hashes))[: self.count]
        self.hashes, self.sentences, self.positions = hashes[best], ids[best], positions[best]

    def prefixes(
        self, sentences: list[SampledSentence], bos: int | None, origin: str, notes: dict[str, Any]
    ) -> Prefixes:
        order = np.lexsort((self.positions, self.sentences))
        rows = np.searchsorted([sentence.id for sentence in sentences], self.sentences[order])
        return Prefixes(sentences, rows, self.positions[order], bos, origin, notes)


def _tokenized(index: Index, model: MemoryModel, corpus: CorpusSettings, bos: int | None) -> Iterator[Sentence]:
    room = None if model.context is None else model.context - (bos is not None)
    limits = [limit for limit in (room, index.manifest.settings.max_length) if limit is not None]
    return tokenize_units(
        read_units(corpus),
        model.tokenizer.encode,
        max_length=min(limits, default=None),
        max_tokens=None,
        block=corpus.block,
    )


def _windows(sentences: Iterable[Sentence]) -> Iterator[list[Sentence]]:
    stream = iter(sentences)
    while window := list(islice(stream, WINDOW)):
        yield window


def _names(corpus: CorpusSettings) -> str:
    return "the corpus " + ", ".join(corpus.sources)
