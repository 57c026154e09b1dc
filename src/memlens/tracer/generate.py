"""generate(): how a text goes on, with and without an intervention, greedily or by seeded sampling.

The whole text is run again for every token, so that edits hold at every position just as they do in a trace. The number
of tokens is what was asked for: an end-of-text token is a token like others.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch

from memlens.errors import SettingError
from memlens.models.memory_model import MemoryModel
from memlens.tracer.intervene import applied
from memlens.tracer.intervention import Edit, Intervention, is_whole, short
from memlens.tracer.prompt import Prompt, Source, check_count, check_number, open_model, read_prompt
from memlens.tracer.trace import log_probabilities

_LARGEST_SEED = 2**63 - 1


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
    model: Source,
    prompt: str,
    count: int,
    intervention: Intervention | Edit | str | Iterable[Edit | str] | None = None,
    *,
    temperature: float = 0.0,
    seed: int = 0,
) -> Continuation:
    """`count` tokens more. Temperature 0 takes the most likely token; above, tokens are drawn, by the seed alone.

    memlens.generate("gpt2", "The capital of France is", 20, "L5N94=0").text
    """
    check_count(count, "tokens cannot be generated")
    if check_number(temperature, "the temperature") < 0:
        raise SettingError(f"the temperature is {temperature}; it must be 0 (greedy) or more")
    if not is_whole(seed) or not 0 <= seed <= _LARGEST_SEED:
        raise SettingError(f"the seed is {short(seed)}; it must be a whole number from 0 to {_LARGEST_SEED}")
    edited = None if intervention is None else Intervention.of(intervention)
    loaded, _ = open_model(model)
    read = read_prompt(loaded, prompt, room=count)
    edits: AbstractContextManager[None] = nullcontext()
    if edited is not None:
        edits = applied(loaded, edited, read)
    with edits:
        tokens, p = _extend(loaded, read, count, float(temperature), torch.Generator().manual_seed(int(seed)))
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
            # less the highest, so that no temperature is too low: the best token's score stays 0
            weights = torch.softmax((logs - logs.max()) / temperature, 0)
            token = int(torch.multinomial(weights, 1, generator=random))
        chosen.append(token)
        p.append(float(logs[token].exp()))
        fed = torch.cat([fed, torch.tensor([[token]])], dim=1)
    return chosen, p


def _text(model: MemoryModel, prompt: Prompt, tokens: list[int]) -> str:
    """The new tokens as they read behind the prompt: some tokenizers drop a space that would begin a text."""
    before = model.tokenizer.decode(prompt.tokens)
    whole = model.tokenizer.decode([*prompt.tokens, *tokens])
    return whole[len(before) :] if whole.startswith(before) else model.tokenizer.decode(tokens)
