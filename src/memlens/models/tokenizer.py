"""Text to tokens and back, with the character at which each token ends: a Hugging Face fast tokenizer.

No special token is added to a text: BOS is put before it when a batch is made.
"""

import json
import re
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from memlens.errors import CorpusError, ModelError, UnknownName
from memlens.memory import EncodedText

_PROBE = "The river"
_LONE_BYTES = re.compile("[\udc80-\udcff]+")
_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")  # how sentencepiece writes a token of one byte
_SPACE_MARK = "\u2581"  # how sentencepiece writes a space inside a token


class Tokenizer:
    """The tokens of one checkpoint."""

    def __init__(self, fast: Any, adds_bos: bool | None = None) -> None:
        """`adds_bos` overrides what encoding a text shows, for files that state it (.gguf)."""
        if not getattr(fast, "is_fast", False):
            raise ModelError(
                f"{type(fast).__name__} gives no character offsets; pass a fast tokenizer (one with a tokenizer.json)"
            )
        self._fast = fast
        self._texts: dict[int, str] = {}  # of the tokens that were asked for
        put_before = self._put_before_a_text()
        self.bos: int | None = fast.bos_token_id
        if self.bos is None and len(put_before) == 1:
            self.bos = put_before[0]
        self.adds_bos: bool = bool(put_before) and put_before[0] == self.bos if adds_bos is None else adds_bos
        if self.adds_bos and self.bos is None:
            raise ModelError("the tokenizer says that it adds BOS but names no BOS token; mend its configuration")

    def _put_before_a_text(self) -> list[int]:
        bare = self._fast(_PROBE, add_special_tokens=False)["input_ids"]
        dressed = self._fast(_PROBE, add_special_tokens=True)["input_ids"]
        added = len(dressed) - len(bare)
        starts = [start for start in range(added + 1) if dressed[start : start + len(bare)] == bare]
        return dressed[: starts[0]] if starts else []

    @property
    def size(self) -> int:
        return len(self._fast)

    def encode(self, texts: Sequence[str]) -> list[EncodedText]:
        if not texts:
            return []
        try:
            batch = self._fast(
                list(texts),
                add_special_tokens=False,
                return_offsets_mapping=True,
                return_attention_mask=False,
                return_token_type_ids=False,
                padding=False,
                truncation=False,
                verbose=False,
            )
        except (TypeError, UnicodeError) as error:
            raise CorpusError(
                f"a text is not valid Unicode and cannot be cut into tokens ({_first_line(error)})"
            ) from error
        return [
            # a character of several tokens has the same end in each; some tokenizers step back, so take the furthest
            EncodedText(list(ids), list(accumulate((end for _start, end in offsets), max)))
            for ids, offsets in zip(batch["input_ids"], batch["offset_mapping"], strict=True)
        ]

    def token_text(self, token: int) -> str:
        """The token as text, its leading space kept; bytes that are no full character like ⟨E2 80⟩."""
        if token not in self._texts:
            self._texts[token] = self._read_token(token)
        return self._texts[token]

    def _read_token(self, token: int) -> str:
        if token < 0:
            raise UnknownName(f"token {token} does not exist: tokens count from 0")
        if token in self._special:
            return self._special[token]
        piece: str | None = self._fast.convert_ids_to_tokens(token) if token < self.size else None
        if piece is None:  # rows of the output embedding that no token uses
            return f"<no token {token}>"
        if self._byte_level:
            table = self._byte_of
            if all(sign in table for sign in piece):
                return bytes_text(bytes(table[sign] for sign in piece))
        if _BYTE_PIECE.fullmatch(piece):
            return f"⟨{piece[3:5]}⟩"
        return piece.replace(_SPACE_MARK, " ") if self._space_marked else piece

    def id_of(self, text: str) -> int:
        """The one token that reads `text` (" Paris" and "Paris" are two); UnknownName says how other texts split."""
        if text in self._token_reading:
            return self._token_reading[text]
        ids = self.encode([text])[0].ids
        if len(ids) == 1 and ids[0] != self._fast.unk_token_id:
            return ids[0]
        split = " + ".join(repr(self.token_text(token)) for token in ids) or "no token at all"
        raise UnknownName(f"{text!r} is not one token of this model but {split}; name one of its tokens")

    def decode(self, tokens: Sequence[int]) -> str:
        """Several tokens as one text, characters of several tokens made whole."""
        text: str = self._fast.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files into a checkpoint's folder."""
        self._fast.save_pretrained(folder)

    def serialized(self) -> str:
        """Everything that decides how texts become tokens, as stable text for a fingerprint."""
        state = json.loads(self._fast.backend_tokenizer.to_str())
        # padding and truncation are leftovers of the latest call, not of the checkpoint
        state.pop("padding", None)
        state.pop("truncation", None)
        state["memlens"] = {"bos": self.bos, "adds_bos": self.adds_bos}
        return json.dumps(state, sort_keys=True, ensure_ascii=True)

    @cached_property
    def _special(self) -> dict[int, str]:
        return {token: str(added.content) for token, added in self._fast.added_tokens_decoder.items()}

    @cached_property
    def _decoder(self) -> str:
        decoder = self._fast.backend_tokenizer.decoder
        return "" if decoder is None else decoder.__getstate__().decode("utf-8")

    @cached_property
    def _byte_level(self) -> bool:
        return '"ByteLevel"' in self._decoder

    @cached_property
    def _space_marked(self) -> bool:
        return '"Metaspace"' in self._decoder or _SPACE_MARK in json.dumps(
            json.loads(self._decoder or "null"), ensure_ascii=False
        )

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        """Byte-level BPE writes each byte as one printable sign: itself where it is one, else the next from U+0100."""
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        hidden = [byte for byte in range(256) if byte not in printable]
        return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}

    @cached_property
    def _token_reading(self) -> dict[str, int]:
        """token_text turned round; of several tokens that read the same the lowest, and none that is only bytes."""
        readings: dict[str, int] = {}
        for token in range(self.size):
            text = self.token_text(token)
            if "⟨" not in text:
                readings.setdefault(text, token)
        return readings


def bytes_text(data: bytes) -> str:
    """UTF-8 as text; bytes that are no full character are written ⟨E2 80⟩, so that no two tokens look alike."""
    text = data.decode("utf-8", errors="surrogateescape")
    return _LONE_BYTES.sub(lambda run: f"⟨{' '.join(f'{ord(sign) - 0xDC00:02X}' for sign in run[0])}⟩", text)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
