"""Random prefixes, the stop words that follow them, and the schemas of the tables of the prefix pass.

A sample consists of the prefixes with the lowest hashes of seed, sentence and position. A sample is uniform over all
prefixes, without replacement, and contains every smaller sample with the same seed. Drawing it takes the same memory
for texts of any length. A prefix is the beginning of a sentence up to a position, after BOS if the model uses it.
Position -1 is BOS alone, which is never drawn.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from memlens.errors import CorpusError, SettingError
from memlens.experiments.experiment import SAMPLE, kind_columns, schema
from memlens.index.format import EXPERIMENTS
from memlens.index.reader import Index
from memlens.settings import WINDOW, CorpusSettings

if TYPE_CHECKING:
    from memlens.corpus.sentences import Sentence
    from memlens.models.memory_model import MemoryModel

PREFIXES, LAYERS = f"{EXPERIMENTS}/prefixes", f"{EXPERIMENTS}/prefix-layers"  # tables of the prefix pass
PREFIXES_SCHEMA = schema(
    "prefix:int32 sentence:int64 position:int32 text:string",  # position -1 is BOS alone
    "target:int32 stop_word:bool",  # the next token (null at the end of a sentence), and whether it is a stop word
    "final_token:int32 logit logit_embedding logit_constant",  # top(o_L); its logit before soft-capping; its parts
    "above_mean embedding constant",  # the logit minus the mean of all logits; two parts of this difference
)
LAYERS_SCHEMA = schema(
    "layer:int32 prefix:int32",
    "residual_token:int32 ffn_token:int32 output_token:int32",  # top(r), top(y), top(o)
    "p_final rank_final:int32",  # softmax(r E)[final token], and its rank: 1 + tokens with a strictly higher score
    "active:int32 effective",  # number of memories with m > 0, and participation ratio of |m| ||v||
    # whether top(y) is the top token of any value of the layer, and of any value with m > 0
    "promoted:bool promoted_active:bool",
    "ffn_logit attention_logit ffn_above attention_above",  # contributions to the final logit, and to logit minus mean
    # per kind of memory, in a mixture of experts: share with m > 0 of the memories that the prefix reaches, and
    # contribution to logit minus mean
    *kind_columns("active", "given"),
    "top1 top10 top100",  # contributions of the strongest memories to logit minus mean
    "vetoes:[int32] veto_pushes:[float32]",  # for a composition: memories that lowered the logit of top(r) most
    "pushers:[int32] pushes:[float32]",  # in the last layer: memories that raised top(o) most relative to top(r)
    # cosine of the output embeddings of top(r) and top(o); of top(r) and the top(o) of another change, as a baseline
    "cosine:float32 cosine_shuffled:float32",
)

FREQUENT = "frequent"
_MOST_FREQUENT = 100
_JOINS = "'’_"
_WORD = re.compile(r"\w+(?:['’]\w+)*")

_ENGLISH = """
a an the this that these those such each every either neither both all any some no none another other others same own
i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his himself she her hers herself
it its itself they them their theirs themselves one oneself who whom whose which what whatever whoever
am is are was were be been being do does did done doing have has had having can could may might must shall should will
would ought need
and or but nor so yet if then else than because since although though while whereas unless until whether as
of in on at by for from to into onto upon with within without about above across after against along among around before
behind below beneath beside besides between beyond during except inside near off out outside over past per through
throughout toward towards under up down via
not only also too very just even still again ever never always often once here there where when why how now more most
less least much many few little several enough rather quite almost already however therefore thus hence further
don't doesn't didn't isn't aren't wasn't weren't hasn't haven't hadn't can't couldn't won't wouldn't shouldn't it's
i'm i've i'll you're we're they're that's there's let's he's she's s t d ll m re ve
"""
STOP_LISTS = {"en": frozenset(_ENGLISH.split())}

_SALT = 0x5EC7105  # added to the seed, so that this sample differs from that of the scan


@dataclass(frozen=True, eq=False)
class SampledSentence:
    """A sentence with at least one sampled prefix. `text` is None if only the tokens are known."""

    id: int
    tokens: NDArray[np.int64]
    text: str | None = None
    ends: Sequence[int] = ()  # end of each token, as an offset into `text`


@dataclass(frozen=True, eq=False)
class Prefixes:
    """A sample of n prefixes, ordered by sentence and position."""

    sentences: Sequence[SampledSentence]
    rows: NDArray[np.int64]  # [n]: indexes into `sentences`
    positions: NDArray[np.int64]  # [n]: position of the last token; -1 for BOS alone
    bos: int | None  # BOS token that the model reads first, or None
    origin: str  # description of the sample

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def targets(self) -> NDArray[np.int64]:
        """The next token of each prefix, -1 at the end of a sentence. [n]"""
        return np.array([self._target(row, at) for row, at in self._places()], np.int64)

    @property
    def texts(self) -> list[str | None]:
        """The text of each prefix. [n]"""
        return [self._text(row, at) for row, at in self._places()]

    @classmethod
    def given(
        cls,
        sentences: Sequence[Sequence[int]],
        positions: Sequence[int],
        bos: int | None,
        origin: str = "given prefixes",
    ) -> Prefixes:
        """Return one prefix of each sentence, up to the given position."""
        if len(sentences) != len(positions):
            raise SettingError(f"{len(sentences)} sentences but {len(positions)} positions; give one position for each")
        if not len(sentences):
            raise SettingError("no prefixes were given; give at least one")
        for number, (tokens, position) in enumerate(zip(sentences, positions, strict=True)):
            first = 0 if bos is None else -1
            if not first <= position < len(tokens):
                raise SettingError(
                    f"position {position} of sentence {number} does not exist; it has {first} to {len(tokens) - 1}"
                )
        sampled = [SampledSentence(i, np.asarray(tokens, np.int64)) for i, tokens in enumerate(sentences)]
        return cls(sampled, np.arange(len(sampled)), np.asarray(positions, np.int64), bos, origin)

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
    """Draw random prefixes of the scanned corpus."""
    draw = _PrefixDraw(count, seed)
    for batch in pq.ParquetFile(index.path("corpus")).iter_batches(WINDOW, columns=["sentence", "tokens"]):
        draw.offer(batch.column("sentence").to_numpy(), np.diff(batch.column("tokens").offsets.to_numpy()))
    numbers = np.unique(draw.sentences).tolist()
    rows = index.sentences(numbers)
    sentences = [
        SampledSentence(i, np.asarray(rows[i]["tokens"], np.int64), rows[i]["text"], rows[i]["ends"]) for i in numbers
    ]
    origin = f"{len(draw.sentences):,} random prefixes of the scanned corpus, seed {seed}"
    return draw.prefixes(sentences, index.manifest.model.bos, origin)


def sample_validation(
    index: Index, model: MemoryModel, corpus: CorpusSettings, count: int = SAMPLE, seed: int = 0
) -> Prefixes:
    """Draw random prefixes of another corpus, which is split into sentences with the settings of the scan."""
    bos = index.manifest.model.bos
    draw = _PrefixDraw(count, seed)
    by_id: dict[int, Sentence] = {}
    for window in _windows(_tokenized(index, model, corpus, bos)):
        draw.offer(
            np.array([sentence.id for sentence in window], np.int64),
            np.array([len(sentence.tokens) for sentence in window], np.int64),
        )
        drawn = set(draw.sentences.tolist())
        by_id = {i: sentence for i, sentence in by_id.items() if i in drawn}
        by_id |= {sentence.id: sentence for sentence in window if sentence.id in drawn}
    if not by_id:
        raise CorpusError(f"{_names(corpus)} contains no tokens; check --validation")
    highest = max(max(sentence.tokens) for sentence in by_id.values())
    if highest >= model.vocabulary:
        raise SettingError(
            f"the tokenizer produced token {highest}, but {model.name} has only {model.vocabulary} tokens; "
            "use the tokenizer of this model"
        )
    sentences = [
        SampledSentence(i, np.asarray(by_id[i].tokens, np.int64), by_id[i].text, by_id[i].ends) for i in sorted(by_id)
    ]
    origin = f"{len(draw.sentences):,} random prefixes of {_names(corpus)}, seed {seed}"
    return draw.prefixes(sentences, bos, origin)


class _PrefixDraw:
    """Selects the prefixes with the lowest hashes from blocks of sentences."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed
        self.hashes = np.zeros(0, np.uint64)
        self.sentences = np.zeros(0, np.int64)
        self.positions = np.zeros(0, np.int64)

    def offer(self, sentences: NDArray[np.int64], lengths: NDArray[np.integer[Any]]) -> None:
        """Add all prefixes of sentences [n] with lengths [n] as candidates."""
        from memlens.scanner.kernels import prefix_hashes

        ids = np.repeat(sentences, lengths)
        positions = np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        hashes = prefix_hashes(self.seed + _SALT, ids, positions.astype(np.int32))
        if len(self.hashes) == self.count:  # a full sample: first drop the many candidates with higher hashes
            below = np.flatnonzero(hashes <= self.hashes.max())
            hashes, ids, positions = hashes[below], ids[below], positions[below]
        hashes = np.concatenate([self.hashes, hashes])
        ids, positions = np.concatenate([self.sentences, ids]), np.concatenate([self.positions, positions])
        best = np.lexsort((positions, ids, hashes))[: self.count]
        self.hashes, self.sentences, self.positions = hashes[best], ids[best], positions[best]

    def prefixes(self, sentences: list[SampledSentence], bos: int | None, origin: str) -> Prefixes:
        order = np.lexsort((self.positions, self.sentences))
        rows = np.searchsorted([sentence.id for sentence in sentences], self.sentences[order])
        return Prefixes(sentences, rows, self.positions[order], bos, origin)


def _tokenized(index: Index, model: MemoryModel, corpus: CorpusSettings, bos: int | None) -> Iterator[Sentence]:
    from memlens.corpus.sentences import read_units, tokenize_units

    room = None if model.context is None else model.context - (bos is not None)
    limits = [limit for limit in (room, index.manifest.settings.max_length) if limit is not None]
    return tokenize_units(
        read_units(corpus),
        model.tokenizer.encode,
        max_length=min(limits, default=None),
        block=corpus.block,
    )


def _windows(sentences: Iterable[Sentence]) -> Iterator[list[Sentence]]:
    stream = iter(sentences)
    while window := list(islice(stream, WINDOW)):
        yield window


def _names(corpus: CorpusSettings) -> str:
    return "the corpus " + ", ".join(corpus.sources)


def check_stop_words(words: str) -> None:
    """Raise SettingError unless `words` is "frequent" or a language with a list of stop words."""
    if words != FREQUENT and words not in STOP_LISTS:
        raise SettingError(f"there is no list of stop words for '{words}'; use {', '.join(STOP_LISTS)} or {FREQUENT}")


def stop_targets(index: Index, prefixes: Prefixes, words: str = "en") -> list[bool | None]:
    """Return whether the target of each prefix is a stop word, or None at the end of a sentence.

    A token may be a piece of a word, so the whole word is compared with the list if the text is known. With "frequent",
    the most frequent tokens of the scanned corpus count as stop words, which serves languages without a list.
    """
    check_stop_words(words)
    targets = prefixes.targets.tolist()
    if words == FREQUENT:
        frequent = frequent_tokens(index)
        return [None if target < 0 else target in frequent for target in targets]
    is_stop: list[bool | None] = []
    for target, row, position in zip(targets, prefixes.rows.tolist(), prefixes.positions.tolist(), strict=True):
        if target < 0:
            is_stop.append(None)
            continue
        word = word_at(prefixes.sentences[row], position + 1) or index.vocabulary[target].strip()
        is_stop.append(word.lower().replace("’", "'") in STOP_LISTS[words])
    return is_stop


def frequent_tokens(index: Index) -> Collection[int]:
    """Return the most frequent tokens of the scanned corpus. Ties go to the lower ids."""
    rows = index.sql(
        "SELECT token FROM (SELECT unnest(tokens) AS token FROM {corpus}) GROUP BY token "
        "ORDER BY count(*) DESC, token LIMIT $1",
        [_MOST_FREQUENT],
    )
    return {row["token"] for row in rows}


def word_at(sentence: SampledSentence, position: int) -> str | None:
    """Return the whole word that contains a token, or None if the text is unknown or the token is not in a word."""
    if sentence.text is None:
        return None
    begin = sentence.ends[position - 1] if position else 0
    piece = sentence.text[begin : sentence.ends[position]]
    begin += len(piece) - len(piece.lstrip())
    first = begin
    while first > 0 and (sentence.text[first - 1].isalnum() or sentence.text[first - 1] in _JOINS):
        first -= 1
    for match in _WORD.finditer(sentence.text, first):
        if match.end() > begin:
            return match[0] if match.start() <= begin else None
    return None
