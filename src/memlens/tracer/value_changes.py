"""Values changed: tried and undone, measured for side effects on other prompts, saved as a new checkpoint.

    change = ValueChange.towards(model, "L3N51", " Rome", 2.0)
    with trying(model, change): trace(model, prompt)
    side_effects(model, change, probes)
    save_changed(model, change, "edited-model")

The weights are written in place and put back bit by bit, whatever happens within, so no weight is in memory twice.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from memlens.errors import SettingError
from memlens.files import refuse_place
from memlens.memory import MemoryId
from memlens.models.groups import scaled
from memlens.models.lens import Norm, at_least_float32
from memlens.models.memory_model import MemoryModel
from memlens.tracer.intervention import check_memory, memories_of, short
from memlens.tracer.prompt import Prompt, Source, check_number, open_model, read_prompt, read_token
from memlens.tracer.result import Token
from memlens.tracer.trace import divergence, log_probabilities


@dataclass(frozen=True, eq=False)
class ValueChange:
    """A memory whose value becomes another.

    ValueChange.towards(model, "L3N51", " Rome", 2.0); ValueChange.replaced(model, "L3N51", [0.0] * model.width)
    """

    memory: MemoryId
    value: Tensor  # [d]

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory", memories_of(self.memory)[0])
        object.__setattr__(self, "value", at_least_float32(torch.as_tensor(self.value)))

    @classmethod
    def towards(cls, model: Source, memory: str | MemoryId, token: str | int, amount: float) -> "ValueChange":
        """The value with `amount` times the token's direction added: a vector of length 1, see `token_direction`."""
        loaded, _ = open_model(model)
        name = memories_of(memory)[0]
        check_memory(loaded, name)
        check_number(amount, f"the amount of a token's direction that is added to {name}")
        direction = token_direction(loaded, name, read_token(loaded, token))
        change = cls(name, at_least_float32(_own_value(loaded, name)) + amount * direction)
        change.check(loaded)
        return change

    @classmethod
    def replaced(cls, model: Source, memory: str | MemoryId, value: Tensor | Sequence[float]) -> "ValueChange":
        """Another value altogether, [d]."""
        loaded, _ = open_model(model)
        change = cls(memories_of(memory)[0], torch.as_tensor(value).detach().clone())
        change.check(loaded)
        return change

    def check(self, model: MemoryModel) -> None:
        """Refuse a memory that the model does not have, and a value that it cannot hold."""
        check_memory(model, self.memory)
        if tuple(self.value.shape) != (model.width,):
            shape = list(self.value.shape)
            raise SettingError(f"the new value of {self.memory} has shape {shape}, not [{model.width}]")
        if not torch.isfinite(self.value.to(model.dtype)).all():
            kind = str(model.dtype).removeprefix("torch.")
            raise SettingError(f"the new value of {self.memory} is not finite in {kind}; use smaller numbers")


def token_direction(model: MemoryModel, memory: MemoryId, token: int) -> Tensor:
    """[d], of length 1: the direction of a value in which the token's score rises fastest, norms' gains counted in."""
    layer = model.layers[memory.layer]
    direction = model.lens.logit_rows(torch.tensor([token], device=model.device))[0]
    for norm, scale in ((model.lens.final_norm, layer.scale), (layer.post_norm, layer.group_named(memory.owner).scale)):
        direction = scaled(direction if norm is None else _through(norm, direction), scale)
    length = direction.norm()
    if not length > 0:
        raise SettingError(f"token {token} has an output embedding of length 0, so it has no direction")
    return direction / length


@contextmanager
def trying(model: MemoryModel, changes: ValueChange | Iterable[ValueChange]) -> Iterator[None]:
    """Inside the `with` the loaded model has the changed values; afterwards it has its own again, bit for bit.

    with memlens.trying(model, change): memlens.trace(model, prompt)
    """
    if not isinstance(model, MemoryModel):
        raise SettingError(f"{short(model)} is not loaded, so nothing can be tried on it; use memlens.load() first")
    several = _checked_changes(model, changes)
    originals = {change.memory: _own_value(model, change.memory).clone() for change in several}
    try:
        for change in several:
            _write_(model, change.memory, change.value)
        yield
    finally:
        for memory, value in originals.items():
            _write_(model, memory, value)


@dataclass(frozen=True)
class SideEffect:
    """The effect of changed values on one probe prompt."""

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


def side_effects(
    model: Source, changes: ValueChange | Iterable[ValueChange], prompts: str | Iterable[str]
) -> list[SideEffect]:
    """The effect of changed values on other prompts, the most affected first.

    memlens.side_effects(model, change, ["The capital of Spain is", "Rain fell on"])
    """
    loaded, _ = open_model(model)
    several = _checked_changes(loaded, changes)
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not texts:
        raise SettingError("no probe prompts were given; give some whose continuation should stay as it is")
    effects = []
    for prompt in [read_prompt(loaded, text) for text in texts]:
        # one at a time: whole distributions of all positions are compared
        before = _all_positions(loaded, prompt)
        with trying(loaded, several):
            after = _all_positions(loaded, prompt)
        effects.append(_side_effect(loaded, prompt, before, after))
    return sorted(effects, key=lambda effect: (-effect.kl, effect.prompt))


def save_changed(model: Source, changes: ValueChange | Iterable[ValueChange], folder: str | os.PathLike[str]) -> Path:
    """A new safetensors checkpoint with the changed values; the model itself stays as it is.

    memlens.save_changed(model, change, "edited-model")
    """
    path = Path(folder)
    refuse_place(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise SettingError(f"{path} is there already and not an empty folder; choose another for the edited model")
    loaded, _ = open_model(model)
    with trying(loaded, changes):
        try:
            loaded.save(path)
        except OSError as error:
            raise SettingError(f"{path} cannot be written ({error.strerror}); choose another folder") from error
    return path


def _side_effect(model: MemoryModel, prompt: Prompt, before: Tensor, after: Tensor) -> SideEffect:
    kl = divergence(before, after)  # [pos]
    tops = before.argmax(-1), after.argmax(-1)
    first, then = (int(top[-1]) for top in tops)
    texts = model.tokenizer.token_text
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
    """The direction in front of a norm: its gain, then its centring, applied to the direction behind it."""
    direction = direction if norm.gain is None else direction * norm.gain
    return direction - direction.mean() if norm.centers else direction


def _own_value(model: MemoryModel, memory: MemoryId) -> Tensor:
    """[d], a view of the checkpoint's own parameter: what is written into it is what the network runs with."""
    return model.layers[memory.layer].group_named(memory.owner).values[memory.memory]


def _write_(model: MemoryModel, memory: MemoryId, value: Tensor) -> None:
    with torch.no_grad():
        _own_value(model, memory).copy_(value)


def _checked_changes(model: MemoryModel, changes: ValueChange | Iterable[ValueChange]) -> list[ValueChange]:
    """One change or several, each checked against the model."""
    several = [changes] if isinstance(changes, ValueChange) else list(changes)
    for change in several:
        change.check(model)
    return several
