"""Finds the prefixes that an earlier sentence has, too, in memory that does not grow with the text.

    1  divide   sentences between the same two of some sampled ones go together into a temporary file, those equal to
                a sample by their ids alone; what is still too large for memory is divided again
    2  sort     one part after another, by tokens and then by id
    3  walk     over all parts in order, with a stack no deeper than the longest sentence
    4  arrange  answers go into a temporary file by ranges of ids, and come back by rising id

Tokens are compared as bytes. That is not the order of their numbers, but one in which sentences that begin alike are
neighbours, which is all that is needed.
"""

import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
_ROOM = 1 << 24  # bytes that sentences may take which are sorted at once
_CHUNK = 1 << 21  # of those that are divided at once
_OBJECTS = 200  # bytes that a sentence takes beside its tokens while it is sorted
_RANGE = 1 << 20  # ids whose answers are arranged at once
_MOST_SAMPLES = 128  # that sentences are divided by; of so many drawn, one is taken:
_DRAWN = 16
_FEW = 16  # pairs of sentences that are compared one by one


@dataclass(frozen=True)
class StoredSentences:
    """Some sentences, by rising id."""

    ids: Ints
    lengths: Ints  # in tokens
    tokens: bytes  # int32, of one sentence after another

    def each(self) -> list[bytes]:
        edges = [0, *(4 * np.cumsum(self.lengths)).tolist()]
        return [self.tokens[begin:end] for begin, end in pairwise(edges)]


@dataclass(frozen=True)
class SentenceGroup:
    """Sentences on disk, of which few are in memory at a time; read as often as asked."""

    count: int
    tokens: int
    chunks: Callable[[], Iterator[StoredSentences]]  # by rising id

    @property
    def fits(self) -> bool:
        return self.count == 1 or 4 * self.tokens + _OBJECTS * self.count <= _ROOM


@dataclass(frozen=True)
class _SortedPart:
    """Sentences in order of their tokens, then ids."""

    ids: Ints
    lengths: Ints
    shared: Ints  # tokens that each has in common with the one before it; of the first not known
    first: bytes
    last: bytes


def find_repeats(
    group: SentenceGroup, folder: Path, dedup: str, look: Callable[[], None] = lambda: None
) -> Iterator[NDArray[np.int32]]:
    """The number of tokens that each sentence shares with an earlier one (of lower id), by id, from 0 on.

    Prefixes nest: where the first n tokens were seen before, so were all shorter prefixes. So one number per sentence
    is enough: the longest prefix that it shares with any earlier one or, with dedup "sentence", its length where an
    earlier one is the same. `folder` is for temporary files, `look` is called every moment and may raise.
    """
    parts = _linked(_sorted_parts(group, folder, look))
    found = _longest_shared(parts) if dedup == "prefix" else _repeated(parts)
    return _by_id(found, group.count, folder)


def cut_by_size(lengths: Ints) -> list[int]:
    """The cuts of sentences into chunks: 0, and the number at which each chunk ends."""
    begins = np.cumsum(4 * lengths + _OBJECTS) - 4 * lengths - _OBJECTS
    return [*np.flatnonzero(np.diff(begins // _CHUNK, prepend=-1)).tolist(), len(lengths)]


def _sorted_parts(group: SentenceGroup, folder: Path, look: Callable[[], None]) -> Iterator[_SortedPart]:
    if not group.count:
        return
    if group.fits:
        look()
        yield _sorted(group)
        return
    samples = _sample(group)
    with closing(_Shelves(folder)) as shelves:
        sizes = _divide(group, samples, shelves, look)
        for shelf, (count, tokens) in enumerate(sizes.tolist()):
            if shelf % 2:
                sample = samples[shelf // 2]
                for packed in shelves.take(shelf, _CHUNK // 8):  # ids soon become objects
                    ids = np.frombuffer(packed, np.int64)
                    lengths = np.full(len(ids), len(sample) // 4)
                    yield _SortedPart(ids, lengths, lengths.copy(), sample, sample)
            elif count:
                between = SentenceGroup(count, tokens, _ShelfReader(shelves, shelf))
                yield from _sorted_parts(between, folder, look)


def _sample(group: SentenceGroup) -> list[bytes]:
    """Some sentences in order, as evenly spread as those of the group: at least one, few enough for memory."""
    size = 4 * group.tokens + _OBJECTS * group.count
    wanted = min(_MOST_SAMPLES, -(-2 * size // _ROOM))
    step = max(1, group.count // (_DRAWN * wanted))
    drawn: list[bytes] = []
    room = _ROOM
    seen = 0
    for chunk in group.chunks():
        each = chunk.each()
        for at in range(-seen % step, len(each), step):
            drawn.append(each[at])
            room -= len(each[at]) + _OBJECTS
            if room <= 0:
                break
        seen += len(each)
        if room <= 0:
            break
    drawn.sort()
    return list(dict.fromkeys(drawn[len(drawn) // wanted // 2 :: max(1, len(drawn) // wanted)]))


def _divide(group: SentenceGroup, samples: list[bytes], shelves: "_Shelves", look: Callable[[], None]) -> Ints:
    """Put sentences below the first sample on shelf 0, those equal to it on 1, and so on; how much each has got.

    Those equal to a sample are not counted: there are only ids of them.
    """
    sizes = np.zeros((2 * len(samples) + 1, 2), np.int64)
    bounds = [*samples, None]
    for chunk in group.chunks():
        look()
        each = chunk.each()
        above = [bisect_left(samples, sentence) for sentence in each]
        equal = [bounds[at] == sentence for at, sentence in zip(above, each, strict=True)]
        places = 2 * np.array(above, np.int64) + np.array(equal, np.int64)
        order = np.argsort(places, kind="stable")
        edges = np.searchsorted(places[order], np.arange(len(sizes) + 1)).tolist()
        pieces = []
        for shelf, (begin, end) in enumerate(pairwise(edges)):
            members = order[begin:end]
            ids = chunk.ids[members].tobytes()
            if shelf % 2 or begin == end:
                pieces.append(ids)
            else:
                lengths = chunk.lengths[members]
                sizes[shelf] += len(members), lengths.sum()
                tokens = (each[at] for at in members.tolist())
                pieces.append(b"".join((np.int64(len(members)).tobytes(), ids, lengths.tobytes(), *tokens)))
        shelves.put(pieces)
    return sizes


class _Shelves:
    """A temporary file of several shelves, to each of which is added at its end."""

    def __init__(self, folder: Path) -> None:
        self._file = TemporaryFile(dir=folder)  # noqa: SIM115 closed by close()
        self._edges: list[Ints] = []  # of the pieces that were put at one time

    def put(self, pieces: Sequence[bytes]) -> None:
        """One piece for each shelf; it may be empty."""
        end = self._file.seek(0, 2)
        self._file.writelines(pieces)
        self._edges.append(end + np.cumsum([0, *map(len, pieces)]))

    def take(self, shelf: int, least: int = 1) -> Iterator[bytes]:
        """The pieces of a shelf in the order in which they were put there, joined until they have `least` bytes."""
        pieces: list[bytes] = []
        size = 0
        for edges in self._edges:
            begin, end = edges[shelf : shelf + 2].tolist()
            if begin < end:
                self._file.seek(begin)
                pieces.append(self._file.read(end - begin))
                size += end - begin
            if pieces and size >= least:
                yield b"".join(pieces)
                pieces, size = [], 0
        if pieces:
            yield b"".join(pieces)

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class _ShelfReader:
    """The sentences of one shelf, many at a time: there are some of each chunk that was divided."""

    shelves: _Shelves
    shelf: int

    def __call__(self) -> Iterator[StoredSentences]:
        numbers: list[Ints] = []
        tokens: list[bytes] = []
        size = 0
        for packed in self.shelves.take(self.shelf):
            count = int.from_bytes(packed[:8], sys.byteorder)
            numbers.append(np.frombuffer(packed, np.int64, 2 * count, 8).reshape(2, count))
            tokens.append(packed[8 + 16 * count :])
            size += len(tokens[-1]) + _OBJECTS * count
            if size >= _CHUNK:
                yield _joined(numbers, tokens)
                numbers, tokens, size = [], [], 0
        if numbers:
            yield _joined(numbers, tokens)


def _joined(numbers: Sequence[Ints], tokens: Sequence[bytes]) -> StoredSentences:
    ids, lengths = np.concatenate(numbers, axis=1)
    return StoredSentences(ids, lengths, b"".join(tokens))


def _sorted(group: SentenceGroup) -> _SortedPart:
    each: list[bytes] = []
    numbers = []
    for chunk in group.chunks():
        each += chunk.each()
        numbers.append(np.stack((chunk.ids, chunk.lengths)))
    order = sorted(range(len(each)), key=each.__getitem__)  # stable: equal ones stay by rising id
    ids, lengths = np.concatenate(numbers, axis=1)[:, order]
    first, last = each[order[0]], each[order[-1]]
    tokens = np.frombuffer(b"".join(map(each.__getitem__, order)), np.int32)
    return _SortedPart(ids, lengths, _shared_with_previous(tokens, lengths), first, last)


def _shared_with_previous(tokens: NDArray[np.int32], lengths: Ints) -> Ints:
    """Position by position, for those that have been alike so far."""
    shared = np.zeros(len(lengths), np.int64)
    begins = np.cumsum(lengths) - lengths
    shorter = np.minimum(lengths[1:], lengths[:-1])
    alike = np.flatnonzero(shorter) + 1
    at = 0
    while len(alike) > _FEW:
        alike = alike[tokens[begins[alike] + at] == tokens[begins[alike - 1] + at]]
        at += 1
        shared[alike] = at
        alike = alike[shorter[alike - 1] > at]
    for pair in alike.tolist():
        left, right = (tokens[begins[i] + at :][: shorter[pair - 1] - at] for i in (pair - 1, pair))
        shared[pair] = at + _shared_prefix(left, right)
    return shared


def _shared_prefix(left: NDArray[np.int32], right: NDArray[np.int32]) -> int:
    shorter = min(len(left), len(right))
    differs = left[:shorter] != right[:shorter]
    return int(differs.argmax()) if differs.any() else shorter


def _linked(parts: Iterable[_SortedPart]) -> Iterator[_SortedPart]:
    """Parts that also know what their first sentence shares with the last one of the part before."""
    last = b""
    for part in parts:
        part.shared[0] = _shared_prefix(np.frombuffer(last, np.int32), np.frombuffer(part.first, np.int32))
        last = part.last
        yield part


def _longest_shared(parts: Iterable[_SortedPart]) -> Iterator[tuple[Ints, Ints]]:
    """Ids and longest prefixes that any sentence of lower id shares, in any order.

    In sorted order, what two sentences share is the least that any two neighbours between them share. So the best
    earlier sentence is the nearest one of lower id to the left or to the right. The stack holds sentences by rising id,
    and beside each what it shares with the one below it, rising, too: where a new sentence shares no more than that
    with the top, it shares as much with the one below, which is earlier, and so will all that follow. The top is done.
    """
    ids, links = [-1], [-1]  # of no sentence, so that the stack is never empty
    for part in parts:
        done: list[int] = []
        found: list[int] = []
        for sentence, common in zip(part.ids.tolist(), part.shared.tolist(), strict=True):
            shared = common
            while links[-1] >= shared:
                done.append(ids.pop())
                found.append(links.pop())
            while ids[-1] > sentence:
                done.append(ids.pop())
                found.append(shared)
                shared = links.pop()
            ids.append(sentence)
            links.append(shared)
        yield np.array(done, np.int64), np.array(found, np.int64)
    yield np.array(ids[1:], np.int64), np.array(links[1:], np.int64)


def _repeated(parts: Iterable[_SortedPart]) -> Iterator[tuple[Ints, Ints]]:
    """Ids and lengths of sentences that an earlier one is equal to, and 0 for others: equal ones are neighbours."""
    length = -1  # of the sentence before, which the first does not have
    for part in parts:
        before = np.concatenate(([length], part.lengths[:-1]))
        is_same = (part.shared == part.lengths) & (part.shared == before)
        length = int(part.lengths[-1])
        yield part.ids, np.where(is_same, part.lengths, 0)


def _batched(found: Iterable[tuple[Ints, Ints]]) -> Iterator[Ints]:
    """Many ids with their numbers, by rising id."""
    batch: list[Ints] = []
    size = 0
    for ids, numbers in found:
        batch.append(np.stack((ids, numbers), axis=1))
        size += batch[-1].nbytes
        if size >= _CHUNK:
            pairs = np.concatenate(batch)
            yield pairs[pairs[:, 0].argsort()]
            batch, size = [], 0
    if batch:
        pairs = np.concatenate(batch)
        yield pairs[pairs[:, 0].argsort()]


def _by_id(found: Iterable[tuple[Ints, Ints]], count: int, folder: Path) -> Iterator[NDArray[np.int32]]:
    """The numbers of ids 0 to `count`, some at a time."""
    ranges = range(0, count, _RANGE)
    with closing(_Shelves(folder)) as shelves:
        for pairs in _batched(found):
            edges = np.searchsorted(pairs[:, 0], [*ranges, count]).tolist()
            shelves.put([pairs[begin:end].tobytes() for begin, end in pairwise(edges)])
        for shelf, first in enumerate(ranges):
            answer = np.zeros(min(_RANGE, count - first), np.int32)
            for packed in shelves.take(shelf):
                pairs = np.frombuffer(packed, np.int64).reshape(-1, 2)
                answer[pairs[:, 0] - first] = pairs[:, 1]
            yield answer
