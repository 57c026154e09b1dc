"""Read and check the arguments of live commands: model, prompt, position, token and counts.

Positions count the prompt's tokens from 0, without BOS. Negative positions count from the end, so -1 is the last token.
Attention is causal: tokens after the traced position have no effect, so the model does not read them. The model reads
BOS first if the checkpoint's tokenizer puts BOS before a text.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memlens.errors import CorpusError, ModelError, ModelNotFound, SettingError, UnknownName
from memlens.index.format import MANIFEST, PARTIAL
from memlens.index.reader import Index, open_index
from memlens.models.load import load
from memlens.models.memory_model import MemoryModel
from memlens.settings import HUB
from memlens.tracer.intervention import short
from memlens.tracer.result import check_index

_MOST = 1000  # maximum number of tokens or memories in a list


@dataclass(frozen=True)
class Prompt:
    """The tokens of a text, and the BOS token before them, if any."""

    text: str
    tokens: tuple[int, ...]
    bos: int | None
    ends: tuple[int, ...] = ()  # character offsets in the text at which the tokens end

    def until(self, position: int) -> str:
        """Return the text up to and including the token at a position."""
        return self.text[: self.ends[position]] if self.ends else self.text

    @property
    def shift(self) -> int:
        """The index of position 0 in the model's input: 1 with BOS, otherwise 0."""
        return 0 if self.bos is None else 1

    def fed(self, position: int | None = None) -> Tensor:
        """Return the model's input [1, pos], up to a position or in full."""
        tokens = self.tokens if position is None else self.tokens[: position + 1]
        return torch.tensor([[*([] if self.bos is None else [self.bos]), *tokens]])

    def place(self, position: int) -> int:
        """Return a position counted from 0. Raises SettingError if the prompt does not have this position."""
        count = len(self.tokens)
        if not -count <= position < count:
            advice = f"use 0 to {count - 1}, or -1 for the last"
            raise SettingError(f"position {position} is not in the prompt of {count} tokens; {advice}")
        return int(position) % count


def read_prompt(model: MemoryModel, text: str, room: int = 0) -> Prompt:
    """Tokenize a prompt. Raises SettingError if it is empty or if fewer than `room` tokens of context remain."""
    tokenizer = model.tokenizer
    try:
        encoded = tokenizer.encode([text])[0]
    except CorpusError as error:
        if isinstance(error.__cause__, TypeError | UnicodeError):
            raise SettingError(f"the prompt {short(text)} is not valid Unicode; write it in UTF-8") from error
        raise
    tokens = tuple(encoded.ids)
    if not tokens:
        raise SettingError(f"the prompt {text[:40]!r} has no tokens; use at least one word")
    if max(tokens) >= model.vocabulary:
        raise ModelError(
            f"the tokenizer produced token {max(tokens)}, but {model.name} has only {model.vocabulary} tokens; "
            "use the tokenizer of this model"
        )
    prompt = Prompt(text, tokens, tokenizer.bos if tokenizer.adds_bos else None, tuple(encoded.ends))
    needed = len(tokens) + prompt.shift + room
    if model.context is not None and needed > model.context:
        continuation = f" and {room} new ones" if room else ""
        raise SettingError(
            f"the prompt's {needed - room} tokens{continuation} exceed the context of {model.name} "
            f"({model.context} tokens); shorten the prompt"
        )
    return prompt


def read_token(model: MemoryModel, token: str | int) -> int:
    """Return the id of a token from its text or id. Raises UnknownName if the model does not have this token."""
    if isinstance(token, str):
        token = model.tokenizer.id_of(token)
    if not 0 <= token < model.vocabulary:
        raise UnknownName(f"token {token} does not exist: {model.name} has tokens 0 to {model.vocabulary - 1}")
    return int(token)


def check_top(top: int) -> int:
    """Return `top`. Raises SettingError if it is out of range."""
    if not 1 <= top <= _MOST:
        raise SettingError(f"--top is {top}; it must be 1 or more, and at most {_MOST}")
    return int(top)


def check_count(count: int, name: str) -> int:
    """Return a count. Raises SettingError if it is below 1."""
    if count < 1:
        raise SettingError(f"{name} is {count}; it must be 1 or more")
    return int(count)


def check_number(number: float, name: str) -> float:
    """Return a number as a float. Raises SettingError if it is NaN or infinite."""
    if not math.isfinite(number):
        raise SettingError(f"{name} is {number}; it must be a finite number")
    return float(number)


Source = MemoryModel | Index | str | os.PathLike[str]
"""A MemoryModel, the name or folder of a model, an Index, or the folder of an index."""


def open_model(
    model: Source | Any,
    index: Index | str | os.PathLike[str] | None = None,
    *,
    where: str | None = None,
    device: str = "auto",
    dtype: str | None = None,
) -> tuple[MemoryModel, Index | None]:
    """Load a model, and open the index that describes its memories, if any.

    Args:
        model: A model, or an index whose model is loaded.
        index: An index of the model. If it is None and `model` is an index, that index is used.
        where: The current location of the index's model, if it has moved.
        device: The device.
        dtype: The weight dtype. None for the dtype of the index, or "auto" without an index.

    Raises:
        SettingError: `where` is given for a model that is not an index, or `dtype` is not that of the index.
        ModelError: The index belongs to another model.
    """
    opened = None if index is None else open_index(index)
    own_index = _as_index(model)
    if own_index is None:
        if where is not None:
            raise SettingError(f"--model is for the model of an index, but {model} is not an index; leave it out")
        loaded = load(model, device=device, dtype=dtype or "auto")
    else:
        _check_dtype(own_index, dtype)
        loaded = own_index.load_model(where, device=device)
    if opened is not None:
        check_index(loaded, opened)
    return loaded, own_index if opened is None else opened


def _as_index(model: Any) -> Index | None:
    if isinstance(model, Index):
        return model
    if not isinstance(model, (str, os.PathLike)):
        return None
    folder = Path(model)
    try:
        is_here = bool(os.fspath(model)) and ((folder / MANIFEST).is_file() or (folder / PARTIAL).is_dir())
    except OSError as error:
        raise ModelNotFound(
            f"{short(os.fspath(model))} is neither a model nor an index ({error.strerror}); check the path"
        ) from error
    return Index(folder) if is_here or os.fspath(model).startswith(HUB) else None


def _check_dtype(index: Index, dtype: str | None) -> None:
    scanned = index.manifest.model.dtype
    if dtype is not None and scanned is not None and dtype != scanned:
        raise SettingError(
            f"{index.folder} was made with the model in {scanned}, not {dtype}; leave --dtype out, "
            "or trace the model without the index"
        )
