"""generate(): how a text goes on, with and without an intervention, greedily or by seeded sampling.

The whole text is run again for every token, so that edits hold at every position just as they do in a trace. The number
of tokens is what was asked for: an end-of-text token is a token like others.
"""

from __future__ import annotations

import math
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch

from memlens.errors import SettingError
from memlens.models import load
from memlens.models.memory_model import MemoryModel
from memlens.trace.applying import applied
from memlens.trace.intervention import Intervention
from memlens.trace.prompt import Prompt, read_prompt
from memlens.trace.reading import log_probabilities


@dataclass(frozen=True)
class Continuation:
    """What was put after a prompt."""

    prompt: str
    text: str
    tokens: tuple[int, ...]
    p: tuple[float, ...]  # of each token, as the model (with its edits) took it to be

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return self.prompt + self.text


def generate(
    model: MemoryModel | str | os.PathLike[str],
    prompt: str,
    count: int,
    intervention: Intervention | None = None,
    *,
    temperature: float = 0.0,
    seed: int = 0,
) -> Continuation:
    """`count` tokens more. Temperature 0 takes the most likely token; above, tokens are drawn, by the seed alone."""
    if count < 1:
        raise SettingError(f"{count} tokens cannot be generated; ask for 1 or more")
    if not math.isfinite(temperature) or temperature < 0:
        raise SettingError(f"the temperature is {temperature}; it must be 0 (greedy) or more")
    loaded = load(model)
    read = read_prompt(loaded, prompt, room=count)
    edits: AbstractContextManager[None] = nullcontext()
    if intervention is not None:
        edits = applied(loaded, intervention, read)
    with edits:
        tokens, p = _extend(loaded, read, count, temperature, torch.Generator().manual_seed(seed))
    return Continuation(prompt, _text(loaded, read, tokens), tuple(tokens), tuple(p))


def _extend(
    model: MemoryModel, prompt: Prompt, count: int, temperature: float, random: torch.Generator
) -> tuple[list[int], list[float]]:
    fed, chosen, p = prompt.fed(), [], []
    for _ in range(count):
        logs = log_probabilities(model, model.run_body(fed)[0, -1])  # [vocabulary]
        if temperature == 0:
            token = int((logs == logs.max()).nonzero()[0])  # of equals the lowest id
        else:
            token = int(torch.multinomial(torch.softmax(logs / temperature, 0), 1, generator=random))
        chosen.append(token)
        p.append(float(logs[token].exp()))
        fed = torch.cat([fed, torch.tensor([[token]])], dim=1)
    return chosen, p


def _text(model: MemoryModel, prompt: Prompt, tokens: list[int]) -> str:
    """The new tokens as they read behind the prompt: some tokenizers drop a space that would begin a text."""
    before = model.tokenizer.decode(prompt.tokens)
    whole = model.tokenizer.decode([*prompt.tokens, *tokens])
    return whole[len(before) :] if whole.startswith(before) else model.tokenizer.decode(tokens)
