"""The edge of the tracer: the model, prompt, position and token that a person names, refused here if they cannot be.

Positions count the prompt's own tokens from 0, BOS not counted; from the end they are negative, -1 the last one. BOS is
fed exactly when the checkpoint's own tokenizer puts it before a text.
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

_MOST = 1000  # tokens or memories in one list


@dataclass(frozen=True)
class Prompt:
    """A text's own tokens, and the BOS token that is fed before them, if one is."""

    text: str
    tokens: tuple[int, ...]
    bos: int | None
    ends: tuple[int, ...] = ()  # where in the text each token ends

    def until(self, position: int) -> str:
        """The text up to a position, its token included."""
        return self.text[: self.ends[position]] if self.ends else self.text

    @property
    def shift(self) -> int:
        """The index of the prompt's own position 0 among the tokens that are fed."""
        return 0 if self.bos is None else 1

    def fed(self, position: int | None = None) -> Tensor:
        """[1, pos]: what the model is fed, up to a position or whole; attention is causal, so no more is needed."""
        tokens = self.tokens if position is None else self.tokens[: position + 1]
        return torch.tensor([[*([] if self.bos is None else [self.bos]), *tokens]])

    def place(self, position: int) -> int:
        """A position from 0, also for one that was given from the end."""
        count = len(self.tokens)
        if not -count <= position < count:
            advice = f"give 0 to {count - 1}, or -1 for the last"
            raise SettingError(f"position {position} is not in the prompt of {count} tokens; {advice}")
        return int(position) % count


def read_prompt(model: MemoryModel, text: str, room: int = 0) -> Prompt:
    """The prompt for a model, refused if it is empty or leaves less than `room` of the model's context."""
    tokenizer = model.tokenizer
    try:
        encoded = tokenizer.encode([text])[0]
    except CorpusError as error:
        if isinstance(error.__cause__, TypeError | UnicodeError):
            raise SettingError(f"the prompt {short(text)} is not valid Unicode; write it in UTF-8") from error
        raise  # the tokenizer itself failed
    tokens = tuple(encoded.ids)
    if not tokens:
        raise SettingError(f"the prompt {text[:40]!r} has no tokens; give at least one word")
    if max(tokens) >= model.vocabulary:
        raise ModelError(f"{model.name} has {model.vocabulary} tokens but its tokenizer made token {max(tokens)}")
    prompt = Prompt(text, tokens, tokenizer.bos if tokenizer.adds_bos else None, tuple(encoded.ends))
    needed = len(tokens) + prompt.shift + room
    if model.context is not None and needed > model.context:
        further = f" and {room} more" if room else ""
        raise SettingError(
            f"the prompt's {needed - room} tokens{further} are more than {model.name} reads at once "
            f"({model.context}); shorten it"
        )
    return prompt


def read_token(model: MemoryModel, token: str | int) -> int:
    """A token by its text or number, refused if the model has none such."""
    if isinstance(token, str):
        token = model.tokenizer.id_of(token)
    if not 0 <= token < model.vocabulary:
        raise UnknownName(f"token {token} does not exist: {model.name} has tokens 0 to {model.vocabulary - 1}")
    return int(token)


def check_top(top: int) -> int:
    if not 1 <= top <= _MOST:
        raise SettingError(f"--top is {top}; it must be 1 or more, and at most {_MOST}")
    return int(top)


def check_count(count: int, what: str) -> int:
    if count < 1:
        raise SettingError(f"{count} {what}; ask for 1 or more")
    return int(count)


def check_number(number: float, name: str) -> float:
    if not math.isfinite(number):
        raise SettingError(f"{name} is {number}; it must be a finite number")
    return float(number)


Source = MemoryModel | Index | str | os.PathLike[str]
"""MODEL or INDEX: a MemoryModel, a name or folder of a model, an Index or its folder."""


def open_model(
    model: Source | Any,
    index: Index | str | os.PathLike[str] | None = None,
    *,
    where: str | None = None,
    device: str = "auto",
    dtype: str | None = None,
) -> tuple[MemoryModel, Index | None]:
    """The model, and the index that names its memories: the one given, or the one that stands for the model.

    `where`: the place of an index's model, if it has moved. `dtype` None: float32, or what the index was made in.
    """
    opened = None if index is None else open_index(index)
    own_index = _as_index(model)
    if own_index is None:
        if where is not None:
            raise SettingError(f"--model says where an index's model is, but {model} is not an index; leave it out")
        loaded = load(model, device=device, dtype=dtype or "float32")
    else:
        _refuse_other_dtype(own_index, dtype)
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
        raise ModelNotFound(f"{short(os.fspath(model))} cannot be a model or an index ({error.strerror})") from error
    return Index(folder) if is_here or os.fspath(model).startswith(HUB) else None


def _refuse_other_dtype(index: Index, dtype: str | None) -> None:
    made_in = index.manifest.model.dtype
    if dtype is not None and made_in is not None and dtype != made_in:
        raise SettingError(
            f"{index.folder} was made with the model in {made_in}, not {dtype}; leave --dtype out, "
            "or trace the model without the index"
        )
