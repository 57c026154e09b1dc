"""Tokenizer: text to tokens and back, with the character at which each token ends.

`Tokenizer` wraps a fast tokenizer from Hugging Face. Encoding adds no special tokens. BOS is added when batches are
built.
"""

import base64
import json
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from memlens.errors import CorpusError, MemlensError, ModelError, UnknownName
from memlens.memory import EncodedText

_PROBE = "The river"
_MOST_GROWTH = 64  # maximum growth of a text by the replacements of a normalizer
_PATIENCE = 60.0  # time limit per text in seconds, plus one second for every _SLOWEST characters
_GRACE = 5.0  # seconds to wait after a signal, because Rust should not return to an interpreter that is ending
_SLOWEST = 10_000  # characters per second; most tokenizers read more than 100,000
_MOST_ADDED = 64  # maximum number of special tokens that the tokenizer may add to a text
_MOST_UNUSED = 1 << 20  # maximum number of ids without a token
_LONE_BYTES = re.compile("[\udc80-\udcff]+")
_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")  # a single byte in sentencepiece
_SPACE_MARK = "\u2581"  # a space in sentencepiece


class Tokenizer:
    """The tokenizer of one checkpoint."""

    def __init__(self, fast: Any, adds_bos: bool | None = None) -> None:
        """Wrap a fast tokenizer.

        Args:
            fast: A tokenizer of transformers with a tokenizer.json.
            adds_bos: True if texts start with BOS. None determines this by encoding a text. .gguf files contain the
                setting.
        """
        if not getattr(fast, "is_fast", False):
            raise ModelError(
                f"{type(fast).__name__} has no character offsets; pass a fast tokenizer (with a tokenizer.json)"
            )
        self._fast = fast
        if backend := getattr(fast, "backend_tokenizer", None):
            _check_normalizer(backend.normalizer)
            if (added := backend.num_special_tokens_to_add(False)) > _MOST_ADDED:
                raise ModelError(f"the tokenizer adds {added:,} special tokens to a text; fix its tokenizer.json")
        self._texts: dict[int, str] = {}  # cache of token_text
        prefix = self._prefix_tokens()
        self.bos: int | None = fast.bos_token_id
        if self.bos is None and len(prefix) == 1:
            self.bos = prefix[0]
        self.adds_bos: bool = bool(prefix) and prefix[0] == self.bos if adds_bos is None else adds_bos
        if self.adds_bos and self.bos is None:
            raise ModelError("the tokenizer adds BOS but has no BOS token; fix its configuration")

    def _prefix_tokens(self) -> list[int]:
        """Return the special tokens that the checkpoint's tokenizer adds before a text."""
        plain = self._tokenize(_PROBE, add_special_tokens=False)["input_ids"]
        complete = self._tokenize(_PROBE, add_special_tokens=True)["input_ids"]
        added = len(complete) - len(plain)
        starts = [start for start in range(added + 1) if complete[start : start + len(plain)] == plain]
        return complete[: starts[0]] if starts else []

    @property
    def size(self) -> int:
        return len(self._fast)

    def encode(self, texts: Sequence[str]) -> list[EncodedText]:
        if not texts:
            return []
        batch = self._tokenize(
            list(texts),
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            padding=False,
            truncation=False,
            verbose=False,
        )
        return [
            # tokens within one character share its end; some tokenizers report decreasing ends, hence the maximum
            EncodedText(list(ids), list(accumulate((end for _start, end in offsets), max)))
            for ids, offsets in zip(batch["input_ids"], batch["offset_mapping"], strict=True)
        ]

    def _tokenize(self, texts: str | list[str], **options: Any) -> Any:
        """Call the tokenizer in a thread, so that a signal or the time limit can end the wait.

        Raises:
            CorpusError: A text is not valid Unicode, takes too long, or makes the tokenizer panic.
        """
        outcome: Future[Any] = Future()

        def call() -> None:
            try:
                outcome.set_result(self._fast(texts, **options))
            except BaseException as error:
                outcome.set_exception(error)

        length = max(map(len, [texts] if isinstance(texts, str) else texts))
        seconds = _PATIENCE + sum(map(len, texts)) / _SLOWEST
        with explain_panics(CorpusError, "the tokenizer failed on a text"):
            thread = Thread(target=call, daemon=True)  # Rust cannot be interrupted, so the thread may outlive the limit
            thread.start()
            try:
                return outcome.result(seconds)
            except TimeoutError:
                raise CorpusError(
                    f"the tokenizer takes more than {seconds:,.0f} seconds for texts of up to {length:,} characters; "
                    "check its tokenizer.json"
                ) from None
            except (TypeError, UnicodeError) as error:
                raise CorpusError(
                    f"a text is not valid Unicode and cannot be tokenized ({_first_line(error)})"
                ) from error
            except BaseException:
                thread.join(_GRACE)
                raise

    def token_text(self, token: int) -> str:
        """Return the token as text with its leading space. Incomplete characters are written like ⟨E2 80⟩."""
        if token not in self._texts:
            self._texts[token] = self._read_token(token)
        return self._texts[token]

    def _read_token(self, token: int) -> str:
        if token < 0:
            raise UnknownName(f"token {token} does not exist: tokens count from 0")
        if token in self._special:
            return self._special[token]
        piece: str | None = self._fast.convert_ids_to_tokens(token) if token < self.size else None
        if piece is None:  # an unused row of the output embedding
            return f"<no token {token}>"
        if self._byte_level:
            table = self._byte_of
            if all(symbol in table for symbol in piece):
                return bytes_text(bytes(table[symbol] for symbol in piece))
        if _BYTE_PIECE.fullmatch(piece):
            return f"⟨{piece[3:5]}⟩"
        return piece.replace(_SPACE_MARK, " ") if self._space_marked else piece

    def id_of(self, text: str) -> int:
        """Return the id of the token with this text. " Paris" and "Paris" are different tokens.

        Raises:
            UnknownName: The text is not exactly one token. The message shows how it is split.
        """
        if text in self._token_reading:
            return self._token_reading[text]
        ids = self.encode([text])[0].ids
        if len(ids) == 1 and ids[0] != self._fast.unk_token_id:
            return ids[0]
        split = " + ".join(repr(self.token_text(token)) for token in ids) or "no token"
        raise UnknownName(f"{text!r} is not one token of this model but {split}; use a single token")

    def decode(self, tokens: Sequence[int]) -> str:
        """Return several tokens as one text. A character that spans several tokens is complete in the text."""
        with explain_panics(CorpusError, "the tokenizer failed on tokens"):
            text: str = self._fast.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files to a folder."""
        self._fast.save_pretrained(folder)

    def serialized(self) -> str:
        """Return everything that determines how texts become tokens, as stable text for a fingerprint.

        Raises:
            ModelError: A token has an id so high that the tokenizers library would fill the memory, because it lists
                all unused ids.
        """
        highest = max(self._fast.get_vocab().values(), default=0)
        if highest > 2 * self.size + _MOST_UNUSED:
            raise ModelError(
                f"the tokenizer has {self.size:,} tokens but an id of {highest:,}; fix the ids in its tokenizer.json"
            )
        state = json.loads(self._fast.backend_tokenizer.to_str())
        # padding and truncation come from the latest call, not from the checkpoint
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
        """Return the byte of each symbol of byte-level BPE. Bytes that are not printable have symbols from U+0100."""
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        hidden = [byte for byte in range(256) if byte not in printable]
        return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}

    @cached_property
    def _token_reading(self) -> dict[str, int]:
        """The lowest token with each text, {text: token}. Texts with incomplete characters are left out."""
        readings: dict[str, int] = {}
        for token in range(self.size):
            text = self.token_text(token)
            if "⟨" not in text:
                readings.setdefault(text, token)
        return readings


def bytes_text(data: bytes) -> str:
    """Decode UTF-8. Bytes that form no complete character are written like ⟨E2 80⟩, so that all tokens differ."""
    text = data.decode("utf-8", errors="surrogateescape")
    return _LONE_BYTES.sub(lambda run: f"⟨{' '.join(f'{ord(byte) - 0xDC00:02X}' for byte in run[0])}⟩", text)


_stderr = Lock()


@contextmanager
def explain_panics(kind: type[MemlensError], failure: str) -> Iterator[None]:
    """Turn a panic of a Rust library into a one-line error. Other output to stderr is held back until the block ends.

    A panic is a BaseException, raised for example if a regular expression backtracks too often. Rust first reports the
    panic on stderr in up to hundreds of lines. These lines are dropped.
    """
    with _stderr:
        try:
            before = os.dup(2)
        except OSError:  # stderr is closed
            before = os.open(os.devnull, os.O_WRONLY)
        held = os.memfd_create("stderr") if hasattr(os, "memfd_create") else os.open(os.devnull, os.O_RDWR)
        try:
            os.dup2(held, 2)
            yield
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            with suppress(OSError):  # truncating the null device fails
                os.truncate(held, 0)
            raise kind(f"{failure} ({_first_line(error)}); check its tokenizer.json") from None
        finally:
            os.dup2(before, 2)
            if content := os.pread(held, 1 << 20, 0):
                os.write(2, content)
            os.close(before)
            os.close(held)


def _check_normalizer(normalizer: Any) -> None:
    """Raise ModelError if a normalizer may make a text so much longer that a short text would fill the memory.

    A replacement multiplies the length of the matched text by a factor. The factors of two replacements multiply if the
    second one may match what the first one inserts. A replacement is assumed to match any text unless it replaces a
    fixed string.
    """
    from tokenizers import Regex, normalizers

    later: list[tuple[str, float]] = []  # for each later replacement: the string that it requires, and its growth
    for step in reversed([] if normalizer is None else _steps(json.loads(normalizer.__getstate__()))):
        literal = ""
        match step.get("type"):
            case "Replace":
                content, literal = step["content"], step["pattern"].get("String", "")
            case "Prepend":
                content = step["prepend"]
            case "Precompiled":  # a trie of known size, and its replacements separated by NUL
                charsmap = base64.b64decode(step["precompiled_charsmap"])
                replacements = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].decode(errors="replace")
                content = max(replacements.split("\0"), key=len)
            case _:
                continue
        growth = len(content) / max(len(literal), 1)
        if not literal and "pattern" in step:  # a pattern that matches the empty string inserts everywhere
            replaced = normalizers.Replace(Regex(step["pattern"].get("Regex", "")), content).normalize_str("\0\0")
            growth = max(growth, len(replaced) / 2)
        followers = [factor for needed, factor in later if not needed or set(needed) & set(content)]
        growth = max(growth, 1.0) * max(followers, default=1.0)
        if growth > _MOST_GROWTH:
            what = repr(literal) if literal else "a character"
            raise ModelError(
                f"the tokenizer's normalizer may make {what} more than {_MOST_GROWTH} times longer; fix its "
                "tokenizer.json"
            )
        later.append((literal, growth))


def _steps(normalizer: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the steps of a normalizer in order, with nested sequences flattened."""
    if "normalizers" not in normalizer:
        return [normalizer]
    return [step for part in normalizer["normalizers"] for step in _steps(part)]


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
