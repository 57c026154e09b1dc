"""Subjects in the model's states: triggers after which the final states are similar.

A bag of words does not show what the model expects at a position, such as a comparison, a date or the title of a work.
The model's state at this position shows it.

 1. Run the model once over the sentences of triggers, of prefixes with the same last tokens (matched) and of
    random prefixes, at most TOKENS tokens. Store the state after the last block at the end of each prefix in float16.
    Leave out prefixes that end inside a word, because their states only predict the rest of the word.
 2. Apply the final norm, subtract the mean of random prefixes, and scale to unit length.
 3. S = sum of cosines over pairs of a memory's first SIZE triggers, one per document, with different last tokens.
    z = (S - n mu) / (sigma sqrt(n)) for n pairs, with mu and sigma estimated from sets of random prefixes.
 4. net = z minus the mean z of SWAPS sets in which every trigger is swapped for a prefix of another document with the
    same last token. A memory has a subject if net >= LEAST and its false discovery rate is at most RATE. The rate is
    estimated from decoys: one further swapped set per memory, minus the mean of the same SWAPS sets.
 5. A trigger belongs to the subject if its state is closer to the mean of the other states than NEAR percent of random
    prefixes. At least a share MOSTLY of the triggers must belong to the subject, with at least SIZE / 2 different last
    tokens.
 6. The subject is named by the tokens with the largest sum of p log(p / p_random) over its triggers. A token must be
    one of the EXPECTED most expected tokens after at least half of these triggers. A subject without such a token has
    no name and is dropped.
 7. Held-out triggers must be closer to the subject than prefixes with the same last tokens (score).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memlens.corpus.sentences import cut_batches
from memlens.index.reader import Index
from memlens.pattern.matched import LastTokens, draw_matched, same_last_tokens, swap_prefixes
from memlens.pattern.score import Scores, is_subject_refuted, subject_scores
from memlens.pattern.shallow import last_token_counts
from memlens.pattern.words import (
    GROUNDED,
    HELD,
    TriggerRows,
    Words,
    one_per_document,
    ranks_of,
    read_prefix_words,
    read_trigger_rows,
    sample_prefixes,
)
from memlens.progress import Progress, no_progress
from memlens.settings import PatternSettings

if TYPE_CHECKING:
    from torch import Tensor

    from memlens.models.memory_model import MemoryModel

SIZE = 12  # number of triggers per memory whose states are compared
SWAPS = 4
LEAST = 2.0
RATE = 0.05  # readers confirm about the same share of subjects as at a lower rate, which loses half of the subjects
NEAR = 84
MOSTLY = 0.4
TOKENS = 300_000  # maximum number of tokens on which the model runs
_RANDOM = 2000  # number of random prefixes
_SETS = 4000  # number of sets of random prefixes
_PAIRS = 10  # minimum number of pairs of triggers to test a memory
_BATCH = 4096  # tokens per batch
_AT_ONCE = 1024  # memories per block
_ROUNDS = 3
EXPECTED = 64  # number of most expected tokens of each prefix
_NAMING = 12  # number of triggers whose next tokens name a subject
_SHOWN = 4


@dataclass(frozen=True)
class StateSubject:
    """A subject of one memory."""

    members: int  # bit mask of trigger ranks
    expects: tuple[int, ...]  # tokens, most expected first
    share: float  # share of random prefixes that are as close to the subject as its triggers
    net: float  # z of the triggers minus the mean z of swapped triggers
    q: float
    scores: Scores


@dataclass(frozen=True)
class StateSubjects:
    """Subjects by row of TriggerRows, and notes for the manifest."""

    by_memory: dict[int, StateSubject]
    notes: dict[str, Any]


def find_state_subjects(
    index: Index, model: MemoryModel, settings: PatternSettings, progress: Progress = no_progress
) -> StateSubjects:
    """Run the model on the sentences of triggers, and find the subjects of the top triggers of each memory."""
    triggers = read_trigger_rows(index, settings.top, HELD)
    if not len(triggers.rows):
        return StateSubjects({}, {"tested": 0, "tokens": 0, "swapped": 0.0, "subjects": 0})
    places, tokens, is_inside = _read_places(index, triggers, settings)
    ends = read_states(index, model, *places, progress)
    ends.there[is_inside] = False
    random = np.flatnonzero(ends.there)
    random = random[random >= len(places[0]) - _RANDOM]
    unit = ends.unit_vectors(model, random)
    rows = one_per_document(np.where(ends.there[triggers.rows], triggers.rows, -1), tokens.documents)
    rows = np.take_along_axis(rows, np.argsort(rows < 0, 1, kind="stable"), 1)[:, :SIZE]
    draw = np.random.default_rng([settings.seed, 13])
    coherence = StateCoherence.calibrate(unit, tokens.tokens, random, draw)
    z = coherence.z_scores(rows)
    fake, *swapped = (
        coherence.z_scores(_there(swap_prefixes(rows, tokens, draw), ends.there)) for _ in range(1 + SWAPS)
    )
    control = np.mean(swapped, 0)
    net, decoys = z - control, fake - control
    known, tested = np.flatnonzero(~np.isnan(net)), ~np.isnan(decoys)
    notes: dict[str, Any] = {"tested": len(known), "tokens": ends.tokens}
    if not (len(known) and tested.any()):
        return StateSubjects({}, notes | {"swapped": 0.0, "subjects": 0})
    notes["swapped"] = float((decoys[tested] >= LEAST).mean())
    q = _false_discovery_rates(net[known], decoys[tested])
    chosen = known[(net[known] >= LEAST) & (q <= RATE)]
    rates = dict(zip(known.tolist(), q.tolist(), strict=True))
    held = _there(triggers.held[chosen], ends.there)
    same = _there(same_last_tokens(triggers.held[chosen], tokens, settings.seed), ends.there)
    by_memory = {}
    for place, m in enumerate(chosen.tolist()):
        own = _there(triggers.rows[m], ends.there)
        found = _find_members(own, unit, tokens, unit[random])
        if found is None:
            continue
        members, direction, bar, share = found
        near = partial(_nearness, unit, direction)
        scores = subject_scores(near, held[place], same[place], near(random), bar)
        if not is_subject_refuted(scores, held[place], same[place]):
            by_memory[m] = StateSubject(members, (), share, float(net[m]), rates[m], scores)
    expected = _expected_tokens(model, ends, random, triggers.rows, by_memory, index.vocabulary)
    subjects = {
        m: StateSubject(own.members, expected[m], own.share, own.net, own.q, own.scores)
        for m, own in by_memory.items()
        if m in expected
    }
    return StateSubjects(subjects, notes | {"subjects": len(subjects)})


def _false_discovery_rates(numbers: NDArray[np.float64], decoys: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the false discovery rate at each of `numbers`, estimated from decoys.

    The rate never increases with the number.
    """
    order = np.argsort(numbers, kind="stable")
    ascending = numbers[order]
    reached, fakes = (1 - np.searchsorted(np.sort(own), ascending) / len(own) for own in (numbers, decoys))
    rates = np.empty(len(numbers))
    rates[order] = np.minimum(np.minimum.accumulate(fakes / reached), 1.0)
    return rates


def _there(rows: NDArray[np.int64], there: NDArray[np.bool_]) -> NDArray[np.int64]:
    return np.where((rows >= 0) & there[rows], rows, -1)


def _read_places(
    index: Index, triggers: TriggerRows, settings: PatternSettings
) -> tuple[tuple[NDArray[np.int64], NDArray[np.int64]], LastTokens, NDArray[np.bool_]]:
    """Return the places and last tokens of triggers, matched and random prefixes, and which of them end inside a word.

    The state of a prefix that ends inside a word predicts the rest of the word, which says nothing about a subject.
    """
    words = Words()
    read = read_prefix_words(index, triggers.sentences, triggers.positions, words)
    matched = draw_matched(index, last_token_counts(triggers.rows, read.tokens, index), settings.seed)
    sample = sample_prefixes(index, _RANDOM, settings.seed)
    if len(sample[0]) < _RANDOM:  # a small corpus: draw with repetition, so that the last _RANDOM prefixes are random
        again = np.random.default_rng([settings.seed, 14]).integers(0, len(sample[0]), _RANDOM)
        sample = sample[0][again], sample[1][again]
    else:
        sample = sample[0][:_RANDOM], sample[1][:_RANDOM]
    for sentences, positions in ((matched.sentences, matched.positions), sample):
        read = read.join(read_prefix_words(index, sentences, positions, words))
    columns = zip((triggers.sentences, triggers.positions), (matched.sentences, matched.positions), sample, strict=True)
    tokens = LastTokens.of(read, matched, len(triggers.sentences))
    sentences, positions = (np.concatenate(column) for column in columns)
    return (sentences, positions), tokens, read.goes_on


@dataclass(frozen=True, eq=False)
class EndStates:
    """States after the last block at the ends of prefixes."""

    states: Tensor  # float16 [prefixes, d], each state divided by its scale
    scales: Tensor  # float32 [prefixes, 1]: largest absolute entry of each state
    there: NDArray[np.bool_]  # [prefixes]: whether the model ran on the prefix
    tokens: int  # number of tokens on which the model ran

    def of(self, rows: Any) -> Tensor:
        return self.states[rows].float() * self.scales[rows]

    def unit_vectors(self, model: MemoryModel, random: NDArray[np.int64]) -> Tensor:
        """Return states after the final norm, minus their mean over `random` prefixes, scaled to unit length.

        float16 [prefixes, d]
        """
        import torch

        norm = getattr(model.lens, "final_norm", None)

        def normed(rows: Any) -> Tensor:
            states = self.of(rows).to(model.device)
            with torch.no_grad():
                return (states if norm is None else norm(states.to(model.dtype))).float().cpu()

        mean = normed(random).mean(0)
        unit = torch.empty_like(self.states)
        for first in range(0, len(unit), _BATCH):
            rows = slice(first, first + _BATCH)
            unit[rows] = torch.nn.functional.normalize(normed(rows) - mean, dim=1).to(unit.dtype)
        return unit


def read_states(
    index: Index,
    model: MemoryModel,
    sentences: NDArray[np.int64],
    positions: NDArray[np.int64],
    progress: Progress = no_progress,
    most_tokens: int = TOKENS,
) -> EndStates:
    """Return the state after the last block at each position. Each sentence runs once, up to its last position.

    If the sentences have more than `most_tokens` tokens, sentences with random prefixes (the last _RANDOM positions)
    and sentences with many positions per token come first.
    """
    import torch

    order = np.argsort(sentences, kind="stable")
    numbers, starts, counts = np.unique(sentences[order], return_index=True, return_counts=True)
    reach = np.maximum.reduceat(positions[order], starts) + 1
    is_random = np.isin(numbers, sentences[-_RANDOM:])
    ranked = np.lexsort((numbers, -counts / np.maximum(reach, 1), ~is_random))
    kept = np.sort(ranked[np.cumsum(reach[ranked]) <= max(most_tokens, reach[ranked[0]])])
    bos, width = index.manifest.model.bos, model.width
    states = torch.zeros((len(sentences), width), dtype=torch.float16)
    scales, there = torch.ones((len(sentences), 1)), np.zeros(len(sentences), np.bool_)
    done = 0
    for first in range(0, len(kept), _BATCH):
        part = kept[first : first + _BATCH].tolist()
        rows = index.sentences(numbers[part].tolist())
        fed = [(place, np.asarray(rows[numbers[place]]["tokens"][: reach[place]], np.int64)) for place in part]
        for batch in cut_batches(fed, _BATCH, bos):
            own = [order[starts[place] : starts[place] + counts[place]] for place in batch.sentences.tolist()]
            row = torch.from_numpy(np.repeat(np.arange(len(own)), [len(column) for column in own]))
            prefixes = np.concatenate(own)
            position = torch.from_numpy(positions[prefixes] + (bos is not None))
            with torch.inference_mode():
                ends = model.run_body(torch.from_numpy(batch.tokens))[row, position].float().cpu()
            scale = ends.abs().amax(1, keepdim=True).clamp(min=1e-9)
            states[prefixes], scales[prefixes] = (ends / scale).to(torch.float16), scale
            there[prefixes] = True
            done += len(own)
            progress("states", done, len(kept))
    return EndStates(states, scales, there, int(reach[kept].sum()))


@dataclass(frozen=True, eq=False)
class StateCoherence:
    """A measure of how similar the states of a set of prefixes are, as a z-score against sets of random prefixes."""

    unit: Tensor  # [prefixes, d]
    tokens: NDArray[np.int32]  # [prefixes]: last tokens
    mean: float = 0.0  # mean cosine of a pair of random prefixes
    deviation: float = 1.0  # standard deviation of a sum over n pairs, divided by sqrt(n)

    @classmethod
    def calibrate(
        cls, unit: Tensor, tokens: NDArray[np.int32], random: NDArray[np.int64], draw: np.random.Generator
    ) -> StateCoherence:
        raw = cls(unit, tokens)
        sums, pairs = raw.sums(random[draw.integers(0, len(random), (_SETS, SIZE))])
        sums, pairs = sums[pairs > 0], pairs[pairs > 0]
        mean = sums.sum() / max(pairs.sum(), 1)
        deviation = np.sqrt(((sums - mean * pairs) ** 2 / pairs).mean()) if len(pairs) else 1.0
        return cls(unit, tokens, float(mean), float(max(deviation, 1e-9)))

    def z_scores(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return z of each set of prefixes [sets, t], or nan for a set with fewer than _PAIRS pairs."""
        sums, pairs = self.sums(rows)
        z = (sums - self.mean * pairs) / (self.deviation * np.sqrt(np.maximum(pairs, 1)))
        return np.where(pairs >= _PAIRS, z, np.nan)

    def sums(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return the sum of cosines over pairs with different last tokens, and the number of these pairs."""
        import torch

        sums, pairs = [np.zeros(0)], [np.zeros(0, np.int64)]
        upper = np.triu(np.ones((rows.shape[1],) * 2, np.bool_), 1)
        for first in range(0, len(rows), _AT_ONCE):
            own = rows[first : first + _AT_ONCE]
            last = np.where(own >= 0, self.tokens[own], -1)
            is_pair = (own[:, :, None] >= 0) & (own[:, None, :] >= 0) & (last[:, :, None] != last[:, None, :])
            is_pair &= (own[:, :, None] != own[:, None, :]) & upper
            vectors = self.unit[torch.from_numpy(np.maximum(own, 0))].float()
            cosines = torch.bmm(vectors, vectors.transpose(1, 2)).numpy()
            sums.append((cosines * is_pair).sum((1, 2), dtype=np.float64))
            pairs.append(is_pair.sum((1, 2)))
        return np.concatenate(sums), np.concatenate(pairs)


def _nearness(unit: Tensor, direction: Tensor, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the cosines of prefixes with a direction."""
    cosines: NDArray[np.float64] = (unit[rows].float() @ direction).numpy().astype(np.float64)
    return cosines


def _find_members(
    rows: NDArray[np.int64], unit: Tensor, tokens: LastTokens, random: Tensor
) -> tuple[int, Tensor, float, float] | None:
    """Return the subject's triggers and direction, the minimum cosine, and the share of random prefixes that exceed it.

    Returns None if too few triggers, documents or last tokens share the subject.
    """
    ranks = np.flatnonzero(rows >= 0)
    vectors, members = unit[rows[ranks]].float().numpy(), np.ones(len(ranks), np.bool_)
    background = random.float().numpy()
    bar, share = 0.0, 1.0
    for _ in range(_ROUNDS):
        total = vectors[members].sum(0)
        near = background @ (total / max(float(np.linalg.norm(total)), 1e-9))
        bar = float(np.percentile(near, NEAR))
        share = float(((near > bar).sum() + 1) / (len(near) + 1))
        others = total - vectors * members[:, None]  # compare each trigger with the sum of the other triggers
        members = (vectors * others).sum(1) / np.maximum(np.linalg.norm(others, axis=1), 1e-9) > bar
        places = rows[ranks[members]]
        documents, last = (len(np.unique(column[places])) for column in (tokens.documents, tokens.tokens))
        if documents < GROUNDED or len(places) < MOSTLY * len(ranks) or last < SIZE // 2:
            return None
    import torch

    direction = torch.nn.functional.normalize(torch.from_numpy(vectors[members].sum(0)), dim=0)
    return sum(1 << rank for rank in ranks[members].tolist()), direction, bar, share


def _expected_tokens(
    model: MemoryModel,
    ends: EndStates,
    random: NDArray[np.int64],
    rows: NDArray[np.int64],
    subjects: dict[int, StateSubject],
    vocabulary: Sequence[str],
) -> dict[int, tuple[int, ...]]:
    """Return the tokens that name each subject, by row of TriggerRows. Leaves out subjects without a name."""
    import torch

    members = {m: rows[m][ranks_of(own.members)[:_NAMING]] for m, own in subjects.items()}
    usual = torch.stack([p.sum(0) for p in _predictions(model, ends, random)]).sum(0) / len(random)
    needed = np.unique(np.concatenate([np.zeros(0, np.int64), *members.values()]))
    place = {row: number for number, row in enumerate(needed.tolist())}
    tops = []
    for p in _predictions(model, ends, needed):
        gained = p * torch.log(p.clamp(min=1e-12) / usual.clamp(min=1e-12))
        tops.append(tuple(part.numpy() for part in gained.topk(min(EXPECTED, gained.shape[1]))))
    if not tops:
        return {}
    gains, tokens = (np.concatenate(column) for column in zip(*tops, strict=True))
    found = {}
    for m, own in members.items():
        places = [place[row] for row in own.tolist()]
        is_gained = gains[places] > 0
        seen, number, triggers = np.unique(tokens[places][is_gained], return_inverse=True, return_counts=True)
        gained_here = np.bincount(number, gains[places][is_gained])
        ordered = np.lexsort((seen, -gained_here))
        ordered = seen[ordered[triggers[ordered] >= len(places) / 2]]
        found[m] = tuple(_different_words(ordered.tolist(), vocabulary))[:_SHOWN]
    return {m: words for m, words in found.items() if words}


def _different_words(tokens: Sequence[int], vocabulary: Sequence[str]) -> Iterator[int]:
    """Yield the tokens that have letters or digits, except repeated words and tokens that continue a word."""
    seen: set[str] = set()
    for token in tokens:
        written = vocabulary[token] if token < len(vocabulary) else ""
        text = written.strip().lower()
        is_piece = written == text and text.isascii() and text.isalpha()
        if any(map(str.isalnum, text)) and not is_piece and text not in seen:
            seen.add(text)
            yield token


def _predictions(model: MemoryModel, ends: EndStates, rows: NDArray[np.int64]) -> Iterator[Tensor]:
    """Yield blocks of the model's next-token probabilities after prefixes, [up to 256, vocabulary]."""
    import torch

    for first in range(0, len(rows), 256):
        states = ends.of(rows[first : first + 256]).to(model.device)
        with torch.inference_mode():
            yield model.lens.probabilities(model.lens.state_logits(states)).float().cpu()
