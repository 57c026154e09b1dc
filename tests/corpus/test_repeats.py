"""Repeated prefixes against their definition, however little memory there is, and memory that does not grow."""

import random
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from memlens.corpus import repeats
from memlens.corpus.repeats import SentenceGroup, StoredSentences, cut_by_size, find_repeats

Sentences = Sequence[Sequence[int]]
Dedup = Literal["prefix", "sentence"]
# bytes sorted at once, bytes divided at once, ids arranged at once: all in memory, and next to nothing in it
ROOMS = [(1 << 24, 1 << 21, 1 << 20), (900, 500, 3), (1, 1, 1)]


def group_of(sentences: Sentences) -> SentenceGroup:
    def chunks() -> Iterator[StoredSentences]:
        lengths = np.array([len(tokens) for tokens in sentences], np.int64)
        cuts = cut_by_size(lengths)
        for begin, end in pairwise(cuts):
            tokens = np.array([token for each in sentences[begin:end] for token in each], np.int32).tobytes()
            yield StoredSentences(np.arange(begin, end), lengths[begin:end], tokens)

    return SentenceGroup(len(sentences), sum(map(len, sentences)), chunks)


def found_in(sentences: Sentences, dedup: Dedup, room: tuple[int, int, int] = ROOMS[0]) -> list[int]:
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        for name, value in zip(("_ROOM", "_CHUNK", "_RANGE"), room, strict=True):
            patch.setattr(repeats, name, value)
        pieces = list(find_repeats(group_of(sentences), Path(folder), dedup))
        assert not list(Path(folder).iterdir())
    assert all(piece.dtype == np.int32 for piece in pieces)
    return [number for piece in pieces for number in piece.tolist()]


def naive(sentences: Sentences, dedup: Dedup) -> list[int]:
    """For each sentence the longest prefix that any earlier sentence shares; or its length if one is the same."""
    answers = []
    for at, tokens in enumerate(sentences):
        earlier = [list(other) for other in sentences[:at]]
        shared = [n for other in earlier for n in range(1, len(tokens) + 1) if other[:n] == list(tokens[:n])]
        answers.append(max(shared, default=0) if dedup == "prefix" else len(tokens) * (list(tokens) in earlier))
    return answers


few_symbols = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=14)
large_symbols = st.lists(st.lists(st.sampled_from([0, 1, 255, 256, 65_536, 2**31 - 1]), max_size=4), max_size=14)
nested = st.permutations([[1], [1, 2], [1, 2, 3], [1, 2, 3], [1, 2, 4], [2], [2, 2], [1, 2, 3, 4, 5]])


@given(few_symbols | large_symbols | nested, st.sampled_from(ROOMS))
@example([[5, 6], [5, 6], [5], [5, 6]], ROOMS[2])
@example([[], [1], [], []], ROOMS[2])
@example([], ROOMS[0])
def test_repeats_are_as_the_definition_says(sentences: Sentences, room: tuple[int, int, int]) -> None:
    for dedup in ("prefix", "sentence"):
        assert found_in(sentences, dedup, room) == naive(sentences, dedup)


def prefixes_seen(sentences: Sentences) -> list[int]:
    """The same as the naive way, with a set, for many sentences."""
    seen: set[tuple[int, ...]] = {()}
    answers = []
    for tokens in sentences:
        prefixes = [tuple(tokens[:n]) for n in range(len(tokens) + 1)]
        answers.append(max(n for n, prefix in enumerate(prefixes) if prefix in seen))
        seen.update(prefixes)
    return answers


def drawn(kind: str) -> Sentences:
    draw = random.Random(7)
    if kind == "one first token for all":
        return [[9, *(draw.randrange(3) for _ in range(draw.randrange(9)))] for _ in range(3000)]
    if kind == "one very long sentence, many short ones":
        longest = [draw.randrange(4) for _ in range(2000)]
        short = [[*longest[: draw.randrange(1, 12)], draw.randrange(4)] for _ in range(1500)]
        return [*short[:700], longest, *short[700:], longest[:1900]]
    if kind == "the same sentence again and again":
        return [[1, 2, 3, 4] if draw.random() < 0.9 else [1, 2, draw.randrange(9)] for _ in range(3000)]
    if kind == "each the beginning of a longer one":
        return [[5] * draw.randrange(1, 150) for _ in range(1200)]
    if kind == "sorted":
        return sorted([draw.randrange(5) for _ in range(draw.randrange(1, 9))] for _ in range(3000))
    return [[draw.randrange(20_000), draw.randrange(50)] for _ in range(3000)]


KINDS = (
    "one first token for all",
    "one very long sentence, many short ones",
    "the same sentence again and again",
    "each the beginning of a longer one",
    "sorted",
    "next to no repeats",
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_is_divided_again_and_again_has_the_same_repeats(kind: str) -> None:
    sentences = drawn(kind)
    expected = prefixes_seen(sentences)
    for room in ROOMS[0], (30_000, 5000, 777), (4000, 1000, 100):
        assert found_in(sentences, "prefix", room) == expected


ROOM = 1 << 18


def peak(sentence: Callable[[int], Sequence[int]], count: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes in use at once to find the repeats of so many sentences."""
    for name, value in {"_ROOM": ROOM, "_CHUNK": ROOM // 8, "_RANGE": 1 << 10}.items():
        monkeypatch.setattr(repeats, name, value)

    def chunks() -> Iterator[StoredSentences]:
        for first in range(0, count, 250):
            for chunk in group_of([sentence(at) for at in range(first, first + 250)]).chunks():
                yield replace(chunk, ids=chunk.ids + first)

    with TemporaryDirectory() as folder:
        tracemalloc.start()
        try:
            tokens = sum(len(sentence(at)) for at in range(count))
            for _ in find_repeats(SentenceGroup(count, tokens, chunks), Path(folder), "prefix"):
                pass
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize(
    "sentence",
    [
        lambda at: [1, 2, 3, 4, 5],
        lambda at: [at * 7919 % 100_003, at % 11, at],
        lambda at: [3] * (at % 40) + [at],
        lambda at: [4, at],
    ],
    ids=["the same", "next to no repeats", "many beginnings of others", "sorted"],
)
def test_memory_does_not_grow_with_the_text(
    sentence: Callable[[int], Sequence[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is 16 times as large as the room that it may be sorted in takes no more than some three rooms."""
    assert peak(sentence, 20_000, monkeypatch) < 3 * ROOM


def test_what_is_called_meanwhile_may_stop_it_and_no_file_is_left(tmp_path: Path) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(find_repeats(group_of([[1], [2]]), tmp_path, "prefix", stop))
    assert not list(tmp_path.iterdir())
