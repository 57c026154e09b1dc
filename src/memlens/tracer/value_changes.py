"""Change values: try a change and undo it, measure its side effects on other prompts, and save a new checkpoint.

    change = ValueChange.towards(model, "L3N51", " Rome", 2.0)
    with trying(model, change): trace(model, prompt)
    side_effects(model, change, probes)
    save_changed(model, change, "edited-model")

Weights are changed in place and restored exactly, also after an exception. To save memory, only the changed values are
copied before the change.
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
    """A new value for a memory.

    Example:
        >>> change = memlens.ValueChange.towards(model, "L1N7", 5, 2.0)
        >>> zero = memlens.ValueChange.replaced(model, "L1N7", [0.0] * model.width)
        >>> str(zero.memory), float(zero.value.abs().sum())
        ('L1N7', 0.0)
    """

    memory: MemoryId
    value: Tensor  # [d]

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory", memories_of(self.memory)[0])
        object.__setattr__(self, "value", at_least_float32(torch.as_tensor(self.value)))

    @classmethod
    def towards(cls, model: Source, memory: str | MemoryId, token: str | int, amount: float) -> "ValueChange":
        """Return a change that moves a memory's value along the direction of a token.

        Args:
            model: A model, an argument of `load`, or an index.
            memory: A name like "L5N94", or a MemoryId.
            token: The token, as text or number.
            amount: Factor of the token's unit direction (see `token_direction`).

        Returns:
            The change.

        Raises:
            UnknownName: The model does not have the memory or the token.

        Example:
            >>> str(memlens.ValueChange.towards(model, "L1N7", 5, 2.0).memory)
            'L1N7'
        """
        loaded, _ = open_model(model)
        name = memories_of(memory)[0]
        check_memory(loaded, name)
        check_number(amount, f"the amount for {name}")
        direction = token_direction(loaded, name, read_token(loaded, token))
        change = cls(name, at_least_float32(_value_of(loaded, name)) + amount * direction)
        change.check(loaded)
        return change

    @classmethod
    def replaced(cls, model: Source, memory: str | MemoryId, value: Tensor | Sequence[float]) -> "ValueChange":
        """Return a change that replaces a memory's value by another vector.

        Args:
            model: A model, an argument of `load`, or an index.
            memory: A name like "L5N94", or a MemoryId.
            value: The new value [d].

        Returns:
            The change.

        Raises:
            SettingError: The vector has a wrong shape or is not finite.
            UnknownName: The model does not have the memory.

        Example:
            >>> str(memlens.ValueChange.replaced(model, "L1N7", [0.0] * model.width).memory)
            'L1N7'
        """
        loaded, _ = open_model(model)
        change = cls(memories_of(memory)[0], torch.as_tensor(value).detach().clone())
        change.check(loaded)
        return change

    def check(self, model: MemoryModel) -> None:
        """Raise an error if the change cannot be applied to this model.

        Args:
            model: A loaded model.

        Raises:
            SettingError: The value has a wrong shape or is not finite.
            UnknownName: The model does not have the memory.

        Example:
            >>> memlens.ValueChange.replaced(model, "L1N7", [0.0] * model.width).check(model)
        """
        check_memory(model, self.memory)
        if tuple(self.value.shape) != (model.width,):
            shape = list(self.value.shape)
            raise SettingError(f"the new value of {self.memory} has shape {shape}, not [{model.width}]")
        if not torch.isfinite(self.value.to(model.dtype)).all():
            kind = str(model.dtype).removeprefix("torch.")
            raise SettingError(f"the new value of {self.memory} is not finite in {kind}; use smaller numbers")


def token_direction(model: MemoryModel, memory: MemoryId, token: int) -> Tensor:
    """Return the unit vector [d] along which a value's score for the token rises fastest, accounting for norms."""
    layer = model.layers[memory.layer]
    direction = model.lens.logit_rows(torch.tensor([token], device=model.device))[0]
    for norm, scale in ((model.lens.final_norm, layer.scale), (layer.post_norm, layer.group_named(memory.owner).scale)):
        direction = scaled(direction if norm is None else _through(norm, direction), scale)
    length = direction.norm()
    if not length > 0:
        raise SettingError(f"the output embedding of token {token} is 0, so it has no direction; choose another token")
    return direction / length


@contextmanager
def trying(model: MemoryModel, changes: ValueChange | Iterable[ValueChange]) -> Iterator[None]:
    """Change values of a loaded model inside the `with` block, and restore them exactly afterwards.

    Args:
        model: A loaded model.
        changes: One change or several.

    Yields:
        Nothing. `model` itself has the new values inside the block.

    Raises:
        SettingError: The model is not loaded, or a value does not fit.
        UnknownName: The model does not have a memory.

    Example:
        >>> change = memlens.ValueChange.replaced(model, "L1N7", [0.0] * model.width)
        >>> with memlens.trying(model, change):
        ...     edited = memlens.trace(model, "The river runs")
    """
    if not isinstance(model, MemoryModel):
        raise SettingError(f"{short(model)} is not a loaded model; load it with memlens.load()")
    checked = _check_changes(model, changes)
    originals = {change.memory: _value_of(model, change.memory).clone() for change in checked}
    try:
        for change in checked:
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
    mean_kl: float  # mean KL(before || after) over all positions of the prompt
    positions: int
    changed: int  # number of positions whose most likely token changed

    @property
    def changes_prediction(self) -> bool:
        return self.before.id != self.after.id


def side_effects(
    model: Source, changes: ValueChange | Iterable[ValueChange], prompts: str | Iterable[str]
) -> list[SideEffect]:
    """Return the effect of changed values on other prompts, most affected prompts first.

    Args:
        model: A model, an argument of `load`, or an index.
        changes: One change or several.
        prompts: Prompts whose predictions should not change.

    Returns:
        One effect per prompt.

    Raises:
        SettingError: There are no prompts, or a value does not fit.
        UnknownName: The model does not have a memory.

    Example:
        >>> change = memlens.ValueChange.towards(model, "L1N7", 5, 2.0)
        >>> memlens.side_effects(model, change, "The river runs")[0].kl >= 0
        True
    """
    loaded, _ = open_model(model)
    checked = _check_changes(loaded, changes)
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not texts:
        raise SettingError("there are no prompts; give prompts whose prediction should not change")
    effects = []
    for prompt in [read_prompt(loaded, text) for text in texts]:
        # one prompt at a time, because the distributions of all positions take much memory
        before = _all_positions(loaded, prompt)
        with trying(loaded, checked):
            after = _all_positions(loaded, prompt)
        effects.append(_side_effect(loaded, prompt, before, after))
    return sorted(effects, key=lambda effect: (-effect.kl, effect.prompt))


def save_changed(model: Source, changes: ValueChange | Iterable[ValueChange], folder: str | os.PathLike[str]) -> Path:
    """Write a safetensors checkpoint with the changed values. The loaded model stays unchanged.

    Args:
        model: A model, an argument of `load`, or an index.
        changes: One change or several.
        folder: An empty or new folder.

    Returns:
        The folder.

    Raises:
        SettingError: The folder is not empty or cannot be written.

    Example:
        >>> change = memlens.ValueChange.towards(model, "L1N7", 5, 2.0)
        >>> (memlens.save_changed(model, change, folder) / "config.json").exists()
        True
    """
    path = Path(folder)
    refuse_place(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise SettingError(f"{path} exists and is not an empty folder; choose another folder for the edited model")
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
    """Return log p [pos, vocabulary] at the positions of the prompt."""
    return log_probabilities(model, model.run_body(prompt.fed())[0, prompt.shift :])


def _through(norm: Norm, direction: Tensor) -> Tensor:
    """Return the direction in a norm's input that corresponds to `direction` in its output."""
    direction = direction if norm.gain is None else direction * norm.gain
    return direction - direction.mean() if norm.centers else direction


def _value_of(model: MemoryModel, memory: MemoryId) -> Tensor:
    """Return the value [d] as a view of the network's parameter, so that writing to it changes the network."""
    return model.layers[memory.layer].group_named(memory.owner).values[memory.memory]


def _write_(model: MemoryModel, memory: MemoryId, value: Tensor) -> None:
    with torch.no_grad():
        _value_of(model, memory).copy_(value)


def _check_changes(model: MemoryModel, changes: ValueChange | Iterable[ValueChange]) -> list[ValueChange]:
    """Return one or several changes as a list. Raises an error if one does not fit the model."""
    listed = [changes] if isinstance(changes, ValueChange) else list(changes)
    for change in listed:
        change.check(model)
    return listed
