"""What a sentence shares with earlier ones, against the definition written out naively."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlens.corpus.sentences import find_repeats

Sentences = list[list[int]]


def in_order(sentences: Sentences) -> list[tuple[int, Sequence[int]]]:
    return sorted(enumerate(sentences), key=lambda each: (each[1], each[0]))


def naive_fresh_from(sentences: Sentences) -> list[int]:
    fresh = []
    for at, tokens in enumerate(sentences):
        longest = 0
        for earlier in sentences[:at]:
            for length in range(1, len(tokens) + 1):
                if earlier[:length] == tokens[:length] and len(earlier) >= length:
                    longest = max(longest, length)
        fresh.append(longest)
    return fresh


few_symbols = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=14)


@given(few_symbols)
def test_repeats_are_as_the_definition_says(sentences: Sentences) -> None:
    found = find_repeats(in_order(sentences), len(sentences))
    assert found.fresh_from.tolist() == naive_fresh_from(sentences)
    assert found.repeated.tolist() == [tokens in sentences[:at] for at, tokens in enumerate(sentences)]


@given(few_symbols)
def test_arrays_and_a_stream_give_the_same(sentences: Sentences) -> None:
    stream = ((sentence, np.array(tokens, dtype=np.int32)) for sentence, tokens in in_order(sentences))
    assert find_repeats(stream, len(sentences)).fresh_from.tolist() == naive_fresh_from(sentences)


@given(st.permutations([[1], [1, 2], [1, 2, 3], [1, 2, 3], [1, 2, 4], [2], [2, 2], [1, 2, 3, 4, 5]]))
def test_nested_prefixes_are_found_in_any_order_of_ids(sentences: Sentences) -> None:
    assert find_repeats(in_order(sentences), len(sentences)).fresh_from.tolist() == naive_fresh_from(sentences)


def test_the_first_of_equal_sentences_is_fresh_and_the_others_are_repeated() -> None:
    found = find_repeats(in_order([[5, 6], [5, 6], [5], [5, 6]]), 4)
    assert found.fresh_from.tolist() == [0, 2, 1, 2]
    assert found.repeated.tolist() == [False, True, False, True]


def test_the_types_are_those_promised() -> None:
    found = find_repeats([], 3)
    assert (found.fresh_from.dtype, found.repeated.dtype) == (np.int32, np.bool_)
    assert (found.fresh_from.tolist(), found.repeated.tolist()) == ([0] * 3, [False] * 3)


@pytest.mark.parametrize(
    "sentences", [[(0, [2]), (1, [1])], [(0, [1, 2]), (1, [1])], [(1, [1]), (0, [1])], [(0, [1, 3]), (1, [1, 2])]]
)
def test_sentences_out_of_order_are_noticed(sentences: list[tuple[int, list[int]]]) -> None:
    with pytest.raises(ValueError, match="sorted"):
        find_repeats(sentences, 2)
