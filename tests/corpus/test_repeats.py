"""Repeated prefixes, compared with their definition."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from memlens.corpus import repeats
from memlens.corpus.repeats import find_repeats, split_sentences

Sentences = Sequence[Sequence[int]]
Dedup = Literal["prefix", "sentence"]


def chunks_of(sentences: Sentences, size: int = 5) -> Iterator[tuple[np.ndarray, list[bytes]]]:
    for first in range(0, len(sentences), size):
        chunk = sentences[first : first + size]
        tokens = np.array([token for sentence in chunk for token in sentence], np.int32).tobytes()
        yield np.arange(first, first + len(chunk)), split_sentences(tokens, np.array([len(s) for s in chunk], np.int64))


def repeats_of(sentences: Sentences, dedup: Dedup, rows: int = 1 << 15) -> list[int]:
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        patch.setattr(repeats, "_ROWS", rows)
        lengths = find_repeats(chunks_of(sentences), len(sentences), Path(folder), dedup)
        assert not list(Path(folder).iterdir())
    return lengths.tolist()


def naive(sentences: Sentences, dedup: Dedup) -> list[int]:
    """Return the repeats by their definition in `find_repeats`."""
    answers = []
    for place, tokens in enumerate(sentences):
        earlier = [list(sentence) for sentence in sentences[:place]]
        shared = [n for sentence in earlier for n in range(1, len(tokens) + 1) if sentence[:n] == list(tokens[:n])]
        answers.append(max(shared, default=0) if dedup == "prefix" else len(tokens) * (list(tokens) in earlier))
    return answers


few_symbols = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=14)
large_symbols = st.lists(st.lists(st.sampled_from([0, 1, 255, 256, 65_536, 2**31 - 1]), max_size=4), max_size=14)
nested = st.permutations([[1], [1, 2], [1, 2, 3], [1, 2, 3], [1, 2, 4], [2], [2, 2], [1, 2, 3, 4, 5]])


@given(few_symbols | large_symbols | nested, st.sampled_from([1, 3, 1 << 15]))
@example([[5, 6], [5, 6], [5], [5, 6]], 1)
@example([[], [1], [], []], 2)
@example([], 1)
def test_repeats_match_the_definition(sentences: Sentences, rows: int) -> None:
    for dedup in ("prefix", "sentence"):
        assert repeats_of(sentences, dedup, rows) == naive(sentences, dedup)


def prefixes_seen(sentences: Sentences) -> list[int]:
    """Return the same as `naive` for "prefix", fast enough for many sentences."""
    earlier: set[tuple[int, ...]] = {()}
    answers = []
    for tokens in sentences:
        prefixes = [tuple(tokens[:n]) for n in range(len(tokens) + 1)]
        answers.append(max(n for n, prefix in enumerate(prefixes) if prefix in earlier))
        earlier.update(prefixes)
    return answers


def draw_sentences(kind: str) -> Sentences:
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
def test_long_texts_have_the_same_repeats_for_any_batch_size(kind: str) -> None:
    sentences = draw_sentences(kind)
    expected = prefixes_seen(sentences)
    for rows in (1 << 15, 100):
        assert repeats_of(sentences, "prefix", rows) == expected


def test_a_text_that_is_sorted_on_disk_has_the_same_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "_MEMORY", "24MB")
    sentences = [[n * 7919 % 1009, n % 11, *range(n % 40)] for n in range(20_000)]
    assert repeats_of(sentences, "prefix") == prefixes_seen(sentences)


def test_stopping_leaves_no_file(tmp_path: Path) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        find_repeats(chunks_of([[1], [2]]), 2, tmp_path, "prefix", stop)
    assert not list(tmp_path.iterdir())
