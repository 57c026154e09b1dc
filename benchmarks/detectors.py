"""Patterns as detectors: do the patterns of a memory select the prefixes of other text on which it is active?

1. Take all prefixes of some sentences that were not scanned, from another index of the same model (`other`).
2. A prefix has a wording if it has the wording's feature (features). A topic has a share of random prefixes. The
   prefixes that have the topic are this share of prefixes with the smallest distance to the mean word vector of its
   triggers. Subjects by states are treated in the same way, with the model's final states, but a prefix that ends
   inside a word never has such a subject. Patterns of next tokens are left out, because the next token is not part of
   a prefix.
3. The detector's score of a prefix is the largest confidence of the patterns that the prefix has, or 0.
4. Run the model and read the memory's coefficient on every prefix. The memory is strongly active on the STRONG share
   of prefixes with the largest positive coefficients.
5. Precision, recall and F1 compare the prefixes that have any pattern with those on which the memory is strongly
   active. The AUROC compares the scores of the latter with those of all other prefixes. The correlation is Pearson's,
   between score and coefficient.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memlens.corpus.sentences import cut_batches
from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.pattern.features import LONGEST, number_features, read_key, shared_keys
from memlens.pattern.score import whole_vectors
from memlens.pattern.shallow import token_classes
from memlens.pattern.states import EndStates, read_states
from memlens.pattern.topics import VectorWords, word_vectors
from memlens.pattern.words import NEXT, Words, read_prefix_words
from memlens.stats import roc_area

if TYPE_CHECKING:
    from memlens.models.groups import CoefficientBlock
    from memlens.models.memory_model import MemoryModel

STRONG = 0.01
_BATCH = 4096  # tokens per batch
_TOPIC, _SUBJECT = "topic:", "subject:"  # beginnings of the names of these patterns


class Places(NamedTuple):
    """Prefixes, given by their sentences [prefixes] and positions [prefixes]."""

    sentences: NDArray[np.int64]
    positions: NDArray[np.int64]


class DetectorScores(NamedTuple):
    """Scores of one memory's patterns. A ratio is 0 if its denominator is 0. An undefined AUROC is None."""

    precision: float
    recall: float
    f1: float
    auroc: float | None
    correlation: float


def score_detector(scores: NDArray[Any], coefficients: NDArray[Any]) -> DetectorScores:
    """Score a detector from its scores and the memory's coefficients at the same prefixes, both [prefixes]."""
    count = max(round(STRONG * len(coefficients)), 1)
    bar = np.partition(coefficients, -count)[-count]
    strong, detected = (coefficients >= bar) & (coefficients > 0), scores > 0
    hits = int((strong & detected).sum())
    precision, recall = hits / max(int(detected.sum()), 1), hits / max(int(strong.sum()), 1)
    f1 = 2 * hits / max(int(strong.sum() + detected.sum()), 1)
    spread = float(np.std(scores) * np.std(coefficients, dtype=np.float64))
    products = (scores - np.mean(scores)) * (coefficients - np.mean(coefficients, dtype=np.float64))
    correlation = float(np.mean(products)) / spread if spread else 0.0
    return DetectorScores(precision, recall, f1, roc_area(scores[strong], scores[~strong]), correlation)


def all_prefixes(index: Index, tokens: int) -> Places:
    """Return all prefixes of the first sentences with at least `tokens` tokens in total."""
    lengths = index.arrays("SELECT sentence, len(tokens)::BIGINT AS tokens FROM {corpus} ORDER BY sentence")
    ends = np.cumsum(lengths["tokens"])
    kept = slice(int(np.searchsorted(ends, tokens)) + 1)
    sizes = np.asarray(lengths["tokens"][kept], np.int64)
    positions = np.concatenate([np.arange(size) for size in sizes.tolist()])
    return Places(np.repeat(np.asarray(lengths["sentence"][kept], np.int64), sizes), positions)


def score_prefixes(
    index: Index, other: Index, places: Places, memories: Sequence[MemoryId], model: MemoryModel | None = None
) -> NDArray[np.float32]:
    """Return the detectors' scores of prefixes of another index. [memories, prefixes]

    Subjects by states are left out if no model is given.
    """
    by_memory = index.rows_of("patterns", memories, "pattern, prefixes, confidence, share", where=f"kind != '{NEXT}'")
    rows = [(place, row) for place, memory in enumerate(memories) for row in by_memory[memory]]
    words = Words()
    prefixes = read_prefix_words(other, *places, words)
    held = _match_wordings(index, prefixes, words, {row["pattern"] for _, row in rows})
    scores = np.zeros((len(memories), len(places.sentences)), np.float32)

    def add(place: int, row: Mapping[str, Any], matches: NDArray[np.int64]) -> None:
        scores[place, matches] = np.maximum(scores[place, matches], row["confidence"])

    for place, row in rows:
        if row["pattern"] in held:
            add(place, row, held[row["pattern"]])
    for start in (_TOPIC, _SUBJECT):
        chosen = [(place, row) for place, row in rows if row["pattern"].startswith(start)]
        if chosen and (start == _TOPIC or model is not None):
            triggers = [_read_places(index, memories[place], row["prefixes"]) for place, row in chosen]
            joined = Places(*(np.concatenate(column) for column in zip(*triggers, strict=True)))
            possible = np.arange(prefixes.size)
            if model is None or start == _TOPIC:
                vectors = _word_vectors(index, words, prefixes, joined)
            else:
                possible = np.flatnonzero(~prefixes.goes_on)
                vectors = _state_vectors(index, other, model, joined, Places(*(own[possible] for own in places)))
            ends = np.cumsum([len(own.sentences) for own in triggers])
            for (place, row), own in zip(chosen, np.split(vectors[0], ends[:-1]), strict=True):
                add(place, row, possible[_nearest(own, vectors[1], row["share"])])
    return scores


def _match_wordings(index: Index, prefixes: Any, words: Words, names: Iterable[str]) -> dict[str, NDArray[np.int64]]:
    """Return the prefixes that have each feature, by the feature's name."""
    spelled, feature_names = number_features(words, prefixes.last, index.vocabulary, token_classes(index))
    each = np.arange(prefixes.size)[:, None]  # one prefix per row, so that shared_keys returns all keys of each prefix
    owner, keys, _, _ = shared_keys(each, prefixes, spelled, 1)
    order = np.argsort(keys, kind="stable")
    distinct, starts = np.unique(keys[order], return_index=True)
    parts_of = {name: _parts_of(name) for name in names}
    wanted = {part for parts in parts_of.values() for part in parts}
    held: dict[str, NDArray[np.int64]] = {}
    for key, matches in zip(distinct.tolist(), np.split(owner[order], starts[1:]), strict=True):
        name = read_key(key, feature_names).name(words)
        if name in wanted:
            held[name] = matches.astype(np.int64)
    nothing = np.zeros(0, np.int64)
    return {name: reduce(np.intersect1d, [held.get(one, nothing) for one in own]) for name, own in parts_of.items()}


def _parts_of(name: str) -> list[str]:
    """Return the names of the n-grams that a longer one was joined of, or only this name."""
    kind, _, text = name.partition(":")
    words = text.split(" ")
    if kind != "n-gram" or len(words) <= LONGEST:
        return [name]
    return [f"{kind}:{' '.join(words[first : first + LONGEST])}" for first in range(len(words) - LONGEST + 1)]


def _read_places(index: Index, memory: MemoryId, ranks: Iterable[int]) -> Places:
    """Return the triggers of a memory with these ranks."""
    triggers = index.triggers(memory)
    prefixes = [triggers[rank].prefix for rank in ranks]
    return Places(np.array([own.sentence for own in prefixes]), np.array([own.position for own in prefixes]))


Vectors = tuple[NDArray[np.float32], NDArray[np.float32]]  # of triggers, and of prefixes of the other text; unit length


def _word_vectors(index: Index, words: Words, prefixes: Any, triggers: Places) -> Vectors:
    own = read_prefix_words(index, *triggers, words)
    noted = index.manifest.patterns
    vectors = word_vectors(index, words, noted.content["seed"] if noted else 0)
    first, second = (
        whole_vectors(VectorWords.of(read, vectors), vectors, np.arange(read.size)) for read in (own, prefixes)
    )
    return first, second


def _state_vectors(index: Index, other: Index, model: MemoryModel, triggers: Places, places: Places) -> Vectors:
    import torch

    mine, others = read_states(index, model, *triggers), read_states(other, model, *places)
    states, scales = torch.cat([mine.states, others.states]), torch.cat([mine.scales, others.scales])
    both = EndStates(states, scales, np.concatenate([mine.there, others.there]), mine.tokens + others.tokens)
    unit = both.unit_vectors(model, np.arange(len(mine.there), len(both.there))).float().numpy()
    unit[~both.there] = 0
    return unit[: len(mine.there)], unit[len(mine.there) :]


def _nearest(members: NDArray[np.float32], prefixes: NDArray[np.float32], share: float) -> NDArray[np.int64]:
    """Return the prefixes that are closer to the mean of `members` than all but this share of the prefixes."""
    near = prefixes @ members.sum(0)
    return np.flatnonzero(near > np.quantile(near, 1 - share))


def read_all_coefficients(
    other: Index, model: MemoryModel, places: Places, memories: Sequence[MemoryId]
) -> NDArray[np.float32]:
    """Return the coefficients of memories at all prefixes of sentences (all_prefixes). [memories, prefixes]"""
    import torch

    numbers, firsts = np.unique(places.sentences, return_index=True)
    by_layer: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for place, memory in enumerate(memories):
        by_layer[memory.layer].append((place, other.names.number(memory)))
    coefficients = np.zeros((len(memories), len(places.sentences)), np.float32)
    bos = other.manifest.model.bos
    shift = 0 if bos is None else 1
    rows = other.sentences(numbers.tolist())
    fed = [(place, np.asarray(rows[number]["tokens"], np.int64)) for place, number in enumerate(numbers.tolist())]
    for batch in cut_batches(fed, _BATCH, bos):

        def take(layer: int, block: CoefficientBlock, batch: Any = batch) -> None:
            columns = block.group.columns
            span = range(columns.start, columns.stop)
            inside = [(place, number - span.start) for place, number in by_layer[layer] if number in span]
            if not inside:
                return
            targets, numbers_inside = map(list, zip(*inside, strict=True))
            found = block.everywhere()[:, shift:, numbers_inside].float().cpu().numpy()
            for row, (sentence, length) in enumerate(
                zip(batch.sentences.tolist(), batch.lengths.tolist(), strict=True)
            ):
                first = firsts[sentence]
                coefficients[targets, first : first + length] = found[row, :length].T

        with torch.inference_mode(), model.watch(take, sorted(by_layer)):
            model.run_body(torch.from_numpy(batch.tokens))
    return coefficients
