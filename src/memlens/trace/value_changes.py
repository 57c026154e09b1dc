"""Values themselves changed: tried and undone, looked at for side effects, saved as a new checkpoint.

    change = ValueChange.towards(model, "L3N512", " Rome", 2.0)
    with trying(model, [change]): trace(model, prompt)
    side_effects(model, [change], probes)
    save_changed(model, [change], "edited-model")

The weights are written in place and put back bit by bit, whatever happens within, so nothing is held twice.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memlens.errors import SettingError
from memlens.memory import MemoryId
from memlens.models.memory_model import MemoryModel
from memlens.models.norm import Norm, at_least_float32
from memlens.trace.intervention import check_memory
from memlens.trace.prompt import Prompt, read_prompt, read_token
from memlens.trace.reading import divergence, log_probabilities
from memlens.trace.result import Token


@dataclass(frozen=True, eq=False)
class ValueChange:
    """A memory whose value becomes another."""

    memory: MemoryId
    value: Tensor  # [d]

    @classmethod
    def towards(cls, model: MemoryModel, memory: str | MemoryId, token: str | int, amount: float) -> ValueChange:
        """The value with `amount` times the token's direction added: a vector of length 1, see `token_direction`."""
        name = _checked(model, memory)
        if not math.isfinite(amount):
            raise SettingError(f"{amount} times a token's direction cannot be added to {name}; give a finite number")
        direction = token_direction(model, name.layer, read_token(model, token))
        return cls(name, at_least_float32(model.layers[name.layer].values[name.memory]) + amount * direction)

    @classmethod
    def replaced(cls, model: MemoryModel, memory: str | MemoryId, value: Tensor | Sequence[float]) -> ValueChange:
        """Another value altogether, [d]."""
        name = _checked(model, memory)
        new = torch.as_tensor(value, dtype=torch.promote_types(model.dtype, torch.float32), device=model.device)
        if tuple(new.shape) != (model.width,):
            raise SettingError(f"the new value of {name} has shape {list(new.shape)}, not [{model.width}]")
        return cls(name, new.detach().clone())


def token_direction(model: MemoryModel, layer: int, token: int) -> Tensor:
    """[d], of length 1: the direction of a value in which the token's score rises fastest, norms' gains counted in."""
    direction = model.lens.embedding[token]
    for norm in (model.lens.final_norm, model.layers[layer].post_norm):
        if norm is not None:
            direction = _through(norm, direction)
    length = direction.norm()
    if not length > 0:
        raise SettingError(f"token {token} has an output embedding of length 0, so it has no direction")
    return direction / length


@contextmanager
def trying(model: MemoryModel, changes: Sequence[ValueChange]) -> Iterator[None]:
    """Within, the model has the changed values; after it, its own, bit by bit."""
    for change in changes:
        check_memory(model, change.memory)
        if not torch.isfinite(change.value.to(model.dtype)).all():
            raise SettingError(f"the new value of {change.memory} is not finite in {model.dtype}; use smaller numbers")
    kept = {one.memory: model.layers[one.memory.layer].values[one.memory.memory].clone() for one in changes}
    try:
        for change in changes:
            _write_(model, change.memory, change.value)
        yield
    finally:
        for memory, value in kept.items():
            _write_(model, memory, value)


@dataclass(frozen=True)
class SideEffect:
    """What changed for one probe prompt."""

    prompt: str
    before: Token  # the most likely next token
    after: Token
    kl: float  # KL(before || after) of the next token, in nats
    mean_kl: float  # over all positions of the prompt
    positions: int
    changed: int  # positions whose most likely token changed

    @property
    def changes_prediction(self) -> bool:
        return self.before.id != self.after.id


def side_effects(model: MemoryModel, changes: Sequence[ValueChange], prompts: Sequence[str]) -> list[SideEffect]:
    """What the changes do to other prompts, the most affected first."""
    if not prompts:
        raise SettingError("no probe prompts were given; give some whose continuation should stay as it is")
    read = [read_prompt(model, prompt) for prompt in prompts]
    found = []
    for prompt in read:  # one at a time: whole distributions of all positions are compared
        before = _all_positions(model, prompt)
        with trying(model, changes):
            after = _all_positions(model, prompt)
        found.append(_side_effect(model, prompt, before, after))
    return sorted(found, key=lambda one: (-one.kl, one.prompt))


def save_changed(model: MemoryModel, changes: Sequence[ValueChange], folder: str | os.PathLike[str]) -> Path:
    """A new safetensors checkpoint with the changed values; the model itself stays as it is."""
    path = Path(folder)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise SettingError(f"{path} is there already and not an empty folder; choose another for the edited model")
    with trying(model, changes):
        try:
            model.save(path)
        except OSError as error:
            raise SettingError(f"{path} cannot be written ({error.strerror}); choose another folder") from error
    return path


def _side_effect(model: MemoryModel, prompt: Prompt, before: Tensor, after: Tensor) -> SideEffect:
    kl = divergence(before, after)  # [pos]
    tops = before.argmax(-1), after.argmax(-1)
    first, then = (int(top[-1]) for top in tops)
    texts: Any = model.tokenizer.token_text
    return SideEffect(
        prompt=prompt.text,
        before=Token(first, texts(first)),
        after=Token(then, texts(then)),
        kl=float(kl[-1]),
        mean_kl=float(kl.mean()),
        positions=len(kl),
        changed=int((tops[0] != tops[1]).sum()),
    )


def _all_positions(model: MemoryModel, prompt: Prompt) -> Tensor:
    """log p [pos, vocabulary] at the prompt's own positions."""
    return log_probabilities(model, model.run_body(prompt.fed())[0, prompt.shift :])


def _through(norm: Norm, direction: Tensor) -> Tensor:
    """The direction before a norm whose linear part turns it into `direction`'s products: gain, then centring."""
    direction = direction if norm.gain is None else direction * norm.gain
    return direction - direction.mean() if norm.centres else direction


def _write_(model: MemoryModel, memory: MemoryId, value: Tensor) -> None:
    with torch.no_grad():
        # `values` is a view of the checkpoint's own parameter, so this is what the network runs with
        model.layers[memory.layer].values[memory.memory].copy_(value)


def _checked(model: MemoryModel, memory: str | MemoryId) -> MemoryId:
    name = MemoryId.parse(memory) if isinstance(memory, str) else memory
    check_memory(model, name)
    return name
