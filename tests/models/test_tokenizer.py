"""Tokens, their texts and their ends within a text."""

import os
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import tokenizers
from hypothesis import given, strategies as st
from transformers import PreTrainedTokenizerFast

from memlens.errors import CorpusError, ModelError, UnknownName
from memlens.models.tokenizer import Tokenizer, bytes_text
from memlens.testing import VOCABULARY, tiny_tokenizer
from memlens.text import token as shown_token

BYTES = Tokenizer(tiny_tokenizer())
SPACES = Tokenizer(tiny_tokenizer(style="spaces"))


def pieces(tokenizer, text):
    encoded = tokenizer.encode([text])[0]
    return [text[start:end] for start, end in zip([0, *encoded.ends], encoded.ends, strict=False)]


@pytest.mark.parametrize("tokenizer", [BYTES, SPACES], ids=["bytes", "spaces"])
def test_ends_split_a_text_into_its_tokens(tokenizer):
    text = "The river in Paris rose."
    assert "".join(pieces(tokenizer, text)) == text
    assert "".join(map(tokenizer.token_text, tokenizer.encode([text])[0].ids)).strip() == text


def test_a_character_of_several_tokens_ends_at_the_same_place_in_each():
    assert pieces(BYTES, "café")[-2:] == ["fé", ""] and BYTES.encode(["café"])[0].ends[-2:] == [4, 4]


@given(st.lists(st.text(max_size=20), max_size=4))
def test_ends_are_sorted_and_within_the_text(texts):
    texts = [text.encode("utf-8", "ignore").decode("utf-8") for text in texts]
    for tokenizer in (BYTES, SPACES):
        for text, one in zip(texts, tokenizer.encode(texts), strict=True):
            assert len(one.ids) == len(one.ends) and one.ends == sorted(one.ends)
            assert all(0 <= end <= len(text) for end in one.ends)


def test_ends_that_step_back_are_replaced_by_the_running_maximum():
    class SteppingBack:
        """A tokenizer whose normalizer reorders characters, so a later token can end before an earlier one."""

        is_fast, bos_token_id = True, None

        def __call__(self, texts, **options):
            if isinstance(texts, str):
                return {"input_ids": [5, 6, 7]}
            return {"input_ids": [[5, 6, 7]], "offset_mapping": [[(0, 3), (1, 2), (3, 4)]]}

    assert Tokenizer(SteppingBack()).encode(["abcd"])[0].ends == [3, 3, 4]


def test_no_special_token_is_added_to_a_text():
    assert Tokenizer(tiny_tokenizer(adds_bos=True)).encode(["The river"]) == BYTES.encode(["The river"])
    assert BYTES.encode([""])[0].ids == [] == BYTES.encode([])


def test_adds_bos_is_determined_by_encoding_a_text():
    assert (BYTES.bos, BYTES.adds_bos) == (1, False)
    dressed = Tokenizer(tiny_tokenizer(adds_bos=True))
    assert (dressed.bos, dressed.adds_bos) == (1, True)
    assert Tokenizer(tiny_tokenizer(adds_bos=True), adds_bos=False).adds_bos is False
    fast = tiny_tokenizer()
    fast.bos_token = None
    tokenizer = Tokenizer(fast)
    assert (tokenizer.bos, tokenizer.adds_bos) == (None, False)
    with pytest.raises(ModelError, match="BOS"):
        Tokenizer(fast, adds_bos=True)


def test_half_characters_special_tokens_and_unused_rows_have_a_text():
    half = BYTES.encode(["é"])[0].ids
    assert len(half) == 2 and [BYTES.token_text(token) for token in half] == ["⟨C3⟩", "⟨A9⟩"]
    assert BYTES.token_text(1) == "<s>"
    assert BYTES.size == VOCABULARY
    assert BYTES.token_text(VOCABULARY + 3) == "<no token 100>"
    with pytest.raises(UnknownName):
        BYTES.token_text(-1)


@pytest.mark.parametrize("tokenizer", [BYTES, SPACES], ids=["bytes", "spaces"])
def test_no_two_tokens_look_alike(tokenizer):
    texts = [shown_token(tokenizer.token_text(number)) for number in range(tokenizer.size)]
    assert len(set(texts)) == len(texts)


def test_incomplete_characters_are_written_as_bytes():
    assert bytes_text(b" \xe2\x80") == " ⟨E2 80⟩" and bytes_text(b"\x80\xc3\xa9\xff") == "⟨80⟩é⟨FF⟩"
    every = [bytes_text(bytes([first, second])) for first in range(256) for second in range(256)]
    assert len(set(every)) == len(every)


@pytest.mark.parametrize("tokenizer", [BYTES, SPACES], ids=["bytes", "spaces"])
def test_every_complete_token_is_found_by_its_text(tokenizer):
    assert tokenizer.token_text(tokenizer.id_of(" river")) == " river"
    assert tokenizer.token_text(tokenizer.id_of("he")) == "he"
    for token in range(tokenizer.size):
        text = tokenizer.token_text(token)
        if "⟨" not in text:
            assert tokenizer.token_text(tokenizer.id_of(text)) == text


def test_a_text_of_several_tokens_is_rejected_with_its_split():
    with pytest.raises(UnknownName, match=r"'Paris' is not one token .* 'Par' \+ 'is'"):
        BYTES.id_of("Paris")
    with pytest.raises(UnknownName, match="no token"):
        BYTES.id_of("")


def test_a_lone_surrogate_and_a_slow_tokenizer_are_rejected():
    with pytest.raises(CorpusError, match="not valid Unicode") as caught:
        BYTES.encode(["fine", "broken \ud800"])
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelError, match="fast tokenizer"):
        Tokenizer(type("Slow", (), {"is_fast": False})())


def split_by(pattern: str) -> PreTrainedTokenizerFast:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_a_panic_of_the_tokenizer_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CorpusError, match=r"^the tokenizer failed on a text \(.*retry-limit.*\); check"):
        Tokenizer(split_by("(a+)+$")).encode(["a" * 40 + "!"])
    assert capfd.readouterr().err == "", "Rust's own report is dropped"
    os.write(2, b"stderr is as before")
    assert capfd.readouterr().err == "stderr is as before"


def test_what_is_written_to_stderr_while_the_tokenizer_runs_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    class Talking:
        is_fast, bos_token_id = True, None

        def __call__(self, texts, **options):
            os.write(2, b"a warning\n")
            return {"input_ids": [5]}

    Tokenizer(Talking())
    assert capfd.readouterr().err == "a warning\n" * 2


def test_a_text_that_takes_too_long_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    class Stuck:
        is_fast, bos_token_id = True, None

        def __call__(self, texts, **options):
            release.wait()

    monkeypatch.setattr("memlens.models.tokenizer._PATIENCE", 0.0)
    with pytest.raises(CorpusError, match="takes more than 0 seconds for texts of up to 9 characters; check its"):
        Tokenizer(Stuck())
    release.set()


def replacing(*steps: tuple[str | tokenizers.Regex, str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer that replaces strings and patterns in order, in nested sequences."""
    tokenizer, sequence = split_by("a"), tokenizers.normalizers.Sequence
    replacements = [tokenizers.normalizers.Replace(pattern, content) for pattern, content in steps]
    tokenizer.backend_tokenizer.normalizer = sequence([sequence(replacements[:1]), *replacements[1:]])
    return tokenizer


BOMBS = {
    "one character": [("a", "a" * 10)] * 8,
    "one step": [("a", "b" * 100)],
    "a word": [("zqx", "zqx" * 10)] * 8,
    "a pattern": [(tokenizers.Regex("(?i)zqx[0-9]"), "zqx7" * 10)] * 8,
    "in turns": [("a", "b" * 10), ("b", "a" * 10)] * 4,
    "between characters": [(tokenizers.Regex("c*"), "a")] * 40,
}


def charsmap(*replacements: str) -> bytes:
    """Return a precompiled normalizer with an empty trie and these replacements."""
    content = "".join(f"{replacement}\0" for replacement in replacements).encode()
    return (1024).to_bytes(4, "little") + bytes(1024) + content


@pytest.mark.parametrize(
    ("normalizer", "is_rejected"),
    [
        (tokenizers.normalizers.Prepend("\u2581"), False),
        (tokenizers.normalizers.Prepend("a" * 100), True),
        (tokenizers.normalizers.Precompiled(charsmap("ss", "ffi")), False),
        (tokenizers.normalizers.Precompiled(charsmap("ss", "a" * 100)), True),
    ],
    ids=["short prefix", "long prefix", "short replacements", "long replacement"],
)
def test_long_prefixes_and_precompiled_replacements_are_rejected(normalizer: Any, is_rejected: bool) -> None:
    tokenizer = split_by("a")
    tokenizer.backend_tokenizer.normalizer = normalizer
    with pytest.raises(ModelError, match="may make a character more than 64 times") if is_rejected else nullcontext():
        Tokenizer(tokenizer)


def test_a_template_that_adds_many_special_tokens_is_rejected() -> None:
    tokenizer, template = split_by("a"), tokenizers.processors.TemplateProcessing
    special = {"id": "many", "ids": [0] * 10, "tokens": ["a"] * 10}
    tokenizer.backend_tokenizer.post_processor = template(single="many " * 10 + "$A", special_tokens=[special])
    with pytest.raises(ModelError, match="adds 100 special tokens to a text"):
        Tokenizer(tokenizer)


@pytest.mark.parametrize("steps", BOMBS.values(), ids=BOMBS)
def test_a_normalizer_that_fills_the_memory_is_rejected(steps: list[tuple[Any, str]]) -> None:
    with pytest.raises(ModelError, match=r"may make .* more than 64 times longer"):
        Tokenizer(replacing(*steps))


def test_replacements_that_do_not_multiply_each_other_are_accepted() -> None:
    ligatures = [(sign, sign * 3) for sign in "abcdefghij"]
    spaces = [(tokenizers.Regex(r"\s+"), " "), ("``", '"'), (" ", "\u2581")] * 9
    Tokenizer(replacing(*ligatures, *spaces))
