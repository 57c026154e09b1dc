"""Sentences of tokens: ids, cuts, blocks and limits."""

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, strategies as st

from memlens.corpus.readers import Passage
from memlens.corpus.sentences import Sentence, tokenize_units
from memlens.errors import SettingError
from memlens.memory import EncodedText
from memlens.models.tokenizer import Tokenizer
from memlens.testing import tiny_tokenizer


def encode_words(texts: Sequence[str]) -> list[EncodedText]:
    """Encode each word with its leading space as one token. Texts of punctuation only, such as "-", have no tokens."""
    words = [list(re.finditer(r"\s*\w+", text)) for text in texts]
    return [EncodedText([len(word[0].strip()) for word in text], [word.end() for word in text]) for text in words]


def encode_bytes(texts: Sequence[str]) -> list[EncodedText]:
    """Encode each byte as a token that ends where its character ends, as byte-level tokenizers do."""
    return [
        EncodedText(list(text.encode()), [at + 1 for at, character in enumerate(text) for _ in character.encode()])
        for text in texts
    ]


def units(*texts: str) -> list[Passage]:
    return [Passage(text, f"a.txt:{number}") for number, text in enumerate(texts, 1)]


def tokenized(*texts: str, encode: Any = encode_words, **options: int | None) -> list[Sentence]:
    return list(tokenize_units(units(*texts), encode, **{"max_length": None, **options}))


def test_ids_are_in_reading_order_and_units_without_tokens_have_none() -> None:
    one, three = Sentence(0, "one two", [3, 3], [3, 7], "a.txt:1", 0), Sentence(1, "three", [5], [5], "a.txt:3", 0)
    assert tokenized("one two", "-", "three", batch=2) == [one, three]


def test_a_long_sentence_is_cut_and_counts_its_dropped_tokens_and_one_that_just_fits_is_not() -> None:
    assert tokenized("a bb ccc dddd", max_length=2) == [Sentence(0, "a bb", [1, 2], [1, 4], "a.txt:1", 2)]
    assert tokenized("a bb.", max_length=2) == [Sentence(0, "a bb.", [1, 2], [1, 4], "a.txt:1", 0)]


def test_units_are_not_read_far_ahead_of_the_sentences() -> None:
    read = []

    def stream() -> Iterator[Passage]:
        for number in range(10**9):
            read.append(number)
            yield Passage("a b", "a.txt:1")

    list(islice(tokenize_units(stream(), encode_words, max_length=None, batch=8), 10))
    assert len(read) == 16


def test_long_documents_are_encoded_a_few_at_a_time() -> None:
    sizes = []

    def encode(texts: Sequence[str]) -> list[EncodedText]:
        sizes.append(sum(map(len, texts)))
        return [EncodedText([1], [len(text)]) for text in texts]

    documents = ["x" * 200_000] * 5 + ["word " * 200_000] + ["x" * 2_000_000] + ["no spaces in these " * 9]
    assert len(list(tokenize_units(units(*documents), encode, max_length=None))) == 8
    assert max(sizes) < 500_000 and sum(sizes) == sum(map(len, documents))


@pytest.mark.parametrize("style", ["bytes", "spaces"])
@pytest.mark.parametrize("block", [None, 7, 1000])
def test_a_long_text_has_the_same_tokens_as_in_one_piece(style: str, block: int | None) -> None:
    tokenizer = Tokenizer(tiny_tokenizer(style=style))
    text = ("The river runs  to the sea.\n\n" + "x" * 50 + " In 1990 a café opened. ") * 4000
    whole = tokenizer.encode([text])[0]
    parts = list(tokenize_units(units(text), tokenizer.encode, max_length=None, block=block))
    assert [token for part in parts for token in part.tokens] == whole.ids
    assert "".join(part.text for part in parts) == text
    if block is None:
        assert parts[0].ends == whole.ends
        (cut,) = tokenize_units(units(text), tokenizer.encode, max_length=9)
        assert (cut.tokens, cut.ends, cut.cut) == (whole.ids[:9], whole.ends[:9], len(whole.ids) - 9)
    else:
        assert {len(part.tokens) for part in parts[:-1]} == {block}


def test_a_document_is_cut_into_blocks_with_offsets_in_their_own_text() -> None:
    assert tokenized("a bb ccc", "-", "d", max_length=2, block=2) == [
        Sentence(0, "a bb", [1, 2], [1, 4], "a.txt:1", 0),
        Sentence(1, " ccc", [3], [4], "a.txt:1", 0),
        Sentence(2, "d", [1], [1], "a.txt:3", 0),
    ]


@given(st.lists(st.text("aé日😀 ", min_size=1, max_size=12), max_size=5), st.integers(1, 7), st.integers(1, 4))
def test_blocks_lose_no_token_and_no_text(texts: list[str], block: int, batch: int) -> None:
    sentences = tokenized(*texts, encode=encode_bytes, block=block, batch=batch)
    assert [sentence.id for sentence in sentences] == list(range(len(sentences)))
    for number, (text, encoded) in enumerate(zip(texts, encode_bytes(texts), strict=True), 1):
        blocks = [sentence for sentence in sentences if sentence.source == f"a.txt:{number}"]
        assert [len(sentence.tokens) for sentence in blocks[:-1]] == [block] * (len(blocks) - 1)
        assert [token for sentence in blocks for token in sentence.tokens] == encoded.ids
        assert "".join(sentence.text for sentence in blocks) == text
        begins = [sum(len(sentence.text) for sentence in blocks[:place]) for place in range(len(blocks))]
        ends = [begin + end for begin, sentence in zip(begins, blocks, strict=True) for end in sentence.ends]
        assert ends == encoded.ends


@given(st.text("aé日😀 ", min_size=1, max_size=12), st.integers(1, 20))
def test_a_cut_sentence_has_the_first_tokens_and_the_text_they_cover(text: str, length: int) -> None:
    (sentence,) = tokenized(text, encode=encode_bytes, max_length=length)
    (encoded,) = encode_bytes([text])
    assert sentence.tokens == encoded.ids[:length]
    assert sentence.ends == encoded.ends[:length]
    assert sentence.cut == len(encoded.ids) - len(sentence.tokens)
    assert text.startswith(sentence.text) and len(sentence.text) == sentence.ends[-1]


@pytest.mark.parametrize(("options", "words"), [((0, None), "max_length is 0"), ((7, 8), "use block:7 or less")])
def test_a_length_below_one_and_blocks_beyond_the_context_are_rejected_before_anything_is_read(options, words) -> None:
    with pytest.raises(SettingError, match=words):
        tokenize_units([], encode_words, max_length=options[0], block=options[1])
