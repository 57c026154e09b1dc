"""Which prefixes the experiments of section 5 look at, drawn at random or given one by one.

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
import pyarrow.parquet as pq
from numpy.typing import NDArray

from memlens.corpus import CorpusSettings, Sentence, corpus_fingerprint, read_units, tokenize_units
from memlens.errors import CorpusError, SettingError
from memlens.index.reader import Index
from memlens.scan.sample import prefix_hashes
from memlens.scan.settings import WINDOW

if TYPE_CHECKING:
    from memlens.models.memory_model import MemoryModel

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
    return draw.prefixes(sentences, index.manifest["model"]["bos"], origin, notes)


def sample_validation(
    index: Index, model: MemoryModel, corpus: CorpusSettings, count: int = SAMPLE, seed: int = 0
) -> Prefixes:
    """Random prefixes of another corpus, cut and fed as the scanned one was."""
    bos = index.manifest["model"]["bos"]
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
    limits = [limit for limit in (room, index.manifest["plan"]["settings"].get("max_length")) if limit is not None]
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
