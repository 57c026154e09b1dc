"""Whole words as tokens, from a fairseq dictionary (dict.txt): what stands between white space is one word.

Four special words come first, then line k of the file is token k + 4. Words that are not in the file are `<unk>`.
The same interface as Tokenizer, of which this is a kind without Hugging Face; it knows no model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from memlens.errors import ModelError, UnknownName
from memlens.models.tokenizer import Encoded, Tokenizer

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
START, PADDING, END, UNKNOWN = range(4)
_WORD = re.compile(r"\S+")
_OVERWRITE = " #fairseq:overwrite"  # behind a word that is meant to take the place of an earlier one


class WordTokenizer(Tokenizer):
    """The words of one dictionary."""

    def __init__(self, words: Sequence[str], bos: int = END) -> None:
        """`words`: all of them by id, the special ones first; of equal ones the last is used."""
        self._words = list(words)
        self._ids = {word: token for token, word in enumerate(self._words)}
        # padding is a place that attention would skip, never a word of a text
        self._ids[SPECIAL[PADDING]] = UNKNOWN
        self.bos = bos
        self.adds_bos = True

    @property
    def size(self) -> int:
        return len(self._words)

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        encoded = []
        for text in texts:
            found = list(_WORD.finditer(text))
            ids = [self._ids.get(match[0], UNKNOWN) for match in found]
            encoded.append(Encoded(ids, [match.end() for match in found]))
        return encoded

    def token_text(self, token: int) -> str:
        """The word, without the space that stands before it in a text."""
        if token < 0:
            raise UnknownName(f"token {token} does not exist: tokens count from 0")
        return self._words[token] if token < self.size else f"<no token {token}>"

    def id_of(self, text: str) -> int:
        """The word's id, white space around it left aside; UnknownName where the dictionary does not hold it."""
        words = text.split()
        if len(words) != 1:
            split = " + ".join(repr(word) for word in words) or "no word at all"
            raise UnknownName(f"{text!r} is not one word but {split}; this model's tokens are whole words")
        if words[0] == SPECIAL[PADDING]:
            return PADDING
        if words[0] not in self._ids:
            raise UnknownName(f"{words[0]!r} is not in this model's dictionary, which would read it as <unk>")
        return self._ids[words[0]]

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(self.token_text(token) for token in tokens)

    def save(self, folder: Path) -> None:
        raise ModelError(f"a dictionary of whole words cannot be saved into {folder}; keep the checkpoint's dict.txt")

    def serialized(self) -> str:
        return json.dumps({"words": self._words, "memlens": {"bos": self.bos, "adds_bos": self.adds_bos}})


def read_dictionary(path: Path) -> list[str]:
    """All words by id, the special ones first."""
    try:
        lines = path.read_text(encoding="utf-8-sig").rstrip("\n").split("\n")
    except (OSError, UnicodeError) as error:
        raise ModelError(f"{path} cannot be read as UTF-8 text; get the checkpoint again") from error
    words = list(SPECIAL)
    seen = set(words)
    for number, line in enumerate(lines, start=1):
        entry = line.rstrip()
        is_overwriting = entry.endswith(_OVERWRITE)
        word, space, count = entry.removesuffix(_OVERWRITE).rpartition(" ")
        if not space or not word or not (count.isascii() and count.isdigit()):
            raise ModelError(f"{path}, line {number}: not a word, a space and a count; get the checkpoint again")
        if word in seen and not is_overwriting:
            raise ModelError(f"{path}, line {number}: {word!r} stands there twice; get the checkpoint again")
        seen.add(word)
        words.append(word)
    return words
