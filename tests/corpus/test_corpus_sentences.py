"""Units become sentences of tokens: ids, cuts, blocks, limits; repeats against their definition."""

import re
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlens.corpus.sentences import Sentence, TextUnit, find_repeats, tokenize_units
from memlens.errors import SettingError
from memlens.memory import EncodedText

Sentences = list[list[int]]


def encode_words(texts: Sequence[str]) -> list[EncodedText]:
    """A word with the space before it is a token; punctuation-only texts such as "-" have none."""
    found = [list(re.finditer(r"\s*\w+", text)) for text in texts]
    return [EncodedText([len(match[0].strip()) for match in each], [match.end() for match in each]) for each in found]


def encode_bytes(texts: Sequence[str]) -> list[EncodedText]:
    """A byte is a token and ends where its character does, as byte-level tokenizers tell it."""
    return [
        EncodedText(list(text.encode()), [at + 1 for at, character in enumerate(text) for _ in character.encode()])
        for text in texts
    ]


def units(*texts: str) -> list[TextUnit]:
    return [TextUnit(text, f"a.txt:{number}") for number, text in enumerate(texts, 1)]


def test_ids_run_in_reading_order_and_units_without_tokens_get_none() -> None:
    found = list(
        tokenize_units(units("one two", "-", "three"), encode_words, max_length=None, max_tokens=None, batch=2)
    )
    assert found == [
        Sentence(0, "one two", [3, 3], [3, 7], "a.txt:1", 0),
        Sentence(1, "three", [5], [5], "a.txt:3", 0),
    ]


def test_a_long_sentence_is_cut_and_says_how_much_was_dropped() -> None:
    found = list(tokenize_units(units("a bb ccc dddd"), encode_words, max_length=2, max_tokens=None))
    assert found == [Sentence(0, "a bb", [1, 2], [1, 4], "a.txt:1", 2)]


def test_a_sentence_that_just_fits_is_kept_whole() -> None:
    found = list(tokenize_units(units("a bb."), encode_words, max_length=2, max_tokens=None))
    assert found == [Sentence(0, "a bb.", [1, 2], [1, 4], "a.txt:1", 0)]


@pytest.mark.parametrize(("limit", "sentences"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (99, 3)])
def test_reading_stops_after_the_sentence_that_reaches_the_limit(limit: int, sentences: int) -> None:
    found = list(tokenize_units(units("a b", "c d", "e f"), encode_words, max_length=None, max_tokens=limit))
    assert [len(sentence.tokens) for sentence in found] == [2] * sentences


def test_tokens_that_were_cut_off_do_not_count_towards_the_limit() -> None:
    found = list(tokenize_units(units("a b c d", "e f g h"), encode_words, max_length=2, max_tokens=3))
    assert [sentence.cut for sentence in found] == [2, 2]


def test_units_are_not_read_far_ahead_of_the_sentences() -> None:
    read = []

    def stream() -> Iterator[TextUnit]:
        for number in range(10**9):
            read.append(number)
            yield TextUnit("a b", "a.txt:1")

    list(tokenize_units(stream(), encode_words, max_length=None, max_tokens=20, batch=8))
    assert len(read) == 16


def test_long_documents_are_encoded_a_few_at_a_time() -> None:
    sizes = []

    def encode(texts: Sequence[str]) -> list[EncodedText]:
        sizes.append(len(texts))
        return [EncodedText([1], [len(text)]) for text in texts]

    assert len(list(tokenize_units(units(*["x" * (3 << 20)] * 5), encode, max_length=None, max_tokens=None))) == 5
    assert sizes == [2, 2, 1]


def test_a_document_is_cut_into_blocks_whose_ends_are_their_own() -> None:
    found = list(tokenize_units(units("a bb ccc", "-", "d"), encode_words, max_length=2, max_tokens=None, block=2))
    assert found == [
        Sentence(0, "a bb", [1, 2], [1, 4], "a.txt:1", 0),
        Sentence(1, " ccc", [3], [4], "a.txt:1", 0),
        Sentence(2, "d", [1], [1], "a.txt:3", 0),
    ]


@given(st.lists(st.text("aé日😀 ", min_size=1, max_size=12), max_size=5), st.integers(1, 7), st.integers(1, 4))
def test_blocks_lose_no_token_and_no_text(texts: list[str], block: int, batch: int) -> None:
    found = list(
        tokenize_units(units(*texts), encode_bytes, max_length=None, max_tokens=None, block=block, batch=batch)
    )
    assert [sentence.id for sentence in found] == list(range(len(found)))
    for number, (text, encoded) in enumerate(zip(texts, encode_bytes(texts), strict=True), 1):
        blocks = [sentence for sentence in found if sentence.source == f"a.txt:{number}"]
        assert [len(each.tokens) for each in blocks[:-1]] == [block] * (len(blocks) - 1)
        assert [token for each in blocks for token in each.tokens] == encoded.ids
        assert "".join(each.text for each in blocks) == text
        begins = [sum(len(each.text) for each in blocks[:at]) for at in range(len(blocks))]
        ends = [begin + end for begin, each in zip(begins, blocks, strict=True) for end in each.ends]
        assert ends == encoded.ends


@given(st.text("aé日😀 ", min_size=1, max_size=12), st.integers(1, 20))
def test_a_cut_keeps_the_first_tokens_and_the_text_they_cover(text: str, length: int) -> None:
    (found,) = tokenize_units(units(text), encode_bytes, max_length=length, max_tokens=None)
    (encoded,) = encode_bytes([text])
    assert found.tokens == encoded.ids[:length]
    assert found.ends == encoded.ends[:length]
    assert found.cut == len(encoded.ids) - len(found.tokens)
    assert text.startswith(found.text) and len(found.text) == found.ends[-1]


def test_a_context_without_room_and_blocks_longer_than_it_are_refused_before_anything_is_read() -> None:
    with pytest.raises(SettingError, match="max length is 0"):
        tokenize_units([], encode_words, max_length=0, max_tokens=None)
    with pytest.raises(SettingError, match="use block:7 or less"):
        tokenize_units([], encode_words, max_length=7, max_tokens=None, block=8)


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
