"""A second probe for the proof: a longer row of larger numbers, so that what begins later or above a size is seen.

Products with large matrices are what a pass costs, and torch's own linear maps do the same at every position. So each
of them is stood in for by a map of a few directions, which costs next to nothing; all that the network's own code does
around them is run for 64 positions, on a stream and on coefficients up to a thousand times the usual size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from memlens.models.blocks import BlockCall, ModuleCall, first_input, replaced
from memlens.models.groups import LinearGroup, MemoryGroup, MemoryLayer
from memlens.models.match import rows_of
from memlens.models.memory_model import MemoryModel

_LENGTH, _DIRECTIONS, _SEED = 64, 4, 2022
_STREAM, _LARGEST = 100.0, 1000.0  # sizes: of the stream as a multiple of the probe's, and of what keys find


def second_calls(model: MemoryModel, calls: Sequence[BlockCall]) -> list[BlockCall] | None:
    """The calls of the blocks in a longer row, none of which is run; None where the model reads no longer row."""
    length = _LENGTH if model.context is None else min(_LENGTH, model.context)
    if length <= calls[0].shape[1]:
        return None
    generator = torch.Generator().manual_seed(_SEED)
    tokens = torch.randint(0, model.vocabulary, (1, length), generator=generator).to(model.device)
    longer: list[ModuleCall] = []

    def forward(call: BlockCall) -> Callable[..., Any]:
        def pass_over(*arguments: Any, **named: Any) -> Any:
            given = first_input(arguments, named).detach()
            longer.append(ModuleCall(call.block, arguments, named, given, given, None))
            return _longer(call, given)

        return pass_over

    with replaced({call.block: forward(call) for call in calls}):
        model.run_body(tokens)
    far = [BlockCall(call) for call in longer]
    for call, near in zip(far, calls, strict=True):
        call.states = _states(call.states, generator) * near.states.square().mean().sqrt() * _STREAM
    return far


def _longer(call: BlockCall, states: Tensor) -> Any:
    """The block's return value with these states; other tensors by position in it are repeated up to their length."""
    places = torch.arange(states.shape[1]) % call.shape[1]

    def longer(value: Any) -> Any:
        by_position = isinstance(value, Tensor) and value.shape[:2] == call.shape
        return value[:1, places.to(value.device)] if by_position else value

    returned = call.own.returning(states)
    if not isinstance(returned, tuple | list):
        return returned
    return type(returned)(value if value is states else longer(value) for value in returned)


def code_of(block: nn.Module) -> Hashable:
    """The same for blocks that run the same code: classes, settings and functions of all modules inside."""

    def settings(module: nn.Module) -> Iterator[tuple[str, Any]]:
        for name, value in vars(module).items():
            if isinstance(value, bool | str | float):
                yield name, value
            elif callable(value):
                yield name, id(getattr(value, "__func__", value))

    return tuple((name, type(module), tuple(settings(module))) for name, module in block.named_modules())


def _states(like: Tensor, generator: torch.Generator) -> Tensor:
    """Noise in which one coordinate stands out at every third position, as in trained networks."""
    states = torch.randn(like.shape, generator=generator)
    places = torch.arange(0, like.shape[1], 3)
    states[:, places, places % like.shape[2]] *= 30
    return states.to(like)


@dataclass(eq=False)
class _Map:
    """x -> (x A) B: a linear map of a few directions. Its size is set when it is first run."""

    outputs: int
    size: float
    spread: float  # the largest unit's size as a multiple of the smallest's
    parts: list[Tensor] = field(default_factory=list)

    def __call__(self, *arguments: Any, **named: Any) -> Tensor:
        inputs: Tensor = first_input(arguments, named)
        if not self.parts:
            generator = torch.Generator().manual_seed(_SEED)
            inward = torch.randn(inputs.shape[-1], _DIRECTIONS, generator=generator)
            outward = torch.randn(_DIRECTIONS, self.outputs, generator=generator)
            outward = outward * self.spread ** torch.rand(self.outputs, generator=generator)
            inward, outward = inward.to(inputs), outward.to(inputs)
            largest = (inputs @ inward @ outward).abs().max().clamp_min(1e-30)
            self.parts = [inward, outward * (self.size / largest)]
        return inputs @ self.parts[0] @ self.parts[1]


@dataclass(frozen=True, eq=False)
class _StandIn(LinearGroup):
    """A group whose projections are stood in for."""

    maps: dict[nn.Module, _Map] = field(kw_only=True)

    @property
    def value_bias(self) -> None:
        return None

    def matches(self, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        gate = self.maps[self.key_projection](inputs)[..., self.key_rows]
        up = None if self.up_projection is None else self.maps[self.up_projection](inputs)[..., self.up_rows]
        return gate, up

    def weighed_values(self, coefficients: Tensor) -> Tensor:
        return self.maps[self.down](coefficients)


@dataclass(frozen=True, eq=False)
class _RecordedGroup(LinearGroup):
    """A group whose products are those that torch's own linear maps have made."""

    calls: dict[nn.Module, ModuleCall] = field(kw_only=True)

    def matches(self, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        gate = self._product(self.key_projection)[..., self.key_rows]
        return gate, None if self.up_projection is None else self._product(self.up_projection)[..., self.up_rows]

    def weighed_values(self, coefficients: Tensor) -> Tensor:
        product = self._product(self.down)
        return product if self.value_bias is None else product - self.value_bias

    def _product(self, module: nn.Module) -> Tensor:
        return rows_of(self.calls[module].output)


def as_recorded(layer: MemoryLayer, call: BlockCall) -> MemoryLayer:
    """The layer with the products of torch's own linear maps as they were made in the run that is proven."""
    calls = {part.module: part for part in call.trace.calls}

    def recorded(group: MemoryGroup) -> MemoryGroup:
        parts = projections(group)
        # another kind of group may show other weights; by a number of the token values are weighed another way
        if type(group) is not LinearGroup or group.token_scale is not None:
            return group
        if not all(is_plain(part) and part in calls for part in parts):
            return group
        return _RecordedGroup(**{field.name: getattr(group, field.name) for field in fields(group)}, calls=calls)

    return replace(layer, groups=tuple(map(recorded, layer.groups)))


@contextmanager
def stood_in(layer: MemoryLayer, call: BlockCall) -> Iterator[MemoryLayer]:
    """Within, the linear maps of a block are stood in for; yields the layer whose formulas say so."""
    size = float(call.states.square().mean().sqrt())
    maps = {module: _Map(_outputs(module), 3.0, 1.0) for module in layer.block.modules() if is_plain(module)}
    groups: list[MemoryGroup] = []
    for group in layer.groups:
        parts = projections(group)
        if parts and all(part in maps for part in parts):
            maps |= {part: _Map(maps[part].outputs, _LARGEST, _LARGEST) for part in parts}
            maps[parts[-1]] = _Map(maps[parts[-1]].outputs, 3 * size, 1.0)
            known = {field.name: getattr(group, field.name) for field in fields(group)}
            groups.append(_StandIn(**known, maps=maps))
        else:
            for part in parts:
                maps.pop(part, None)
            groups.append(group)
    with replaced(maps):
        yield replace(layer, groups=tuple(groups))


def projections(group: MemoryGroup) -> list[nn.Module]:
    """The projections of a group, the down projection last."""
    if not isinstance(group, LinearGroup):
        return []
    return [part for part in (group.key_projection, group.up_projection, group.down) if part is not None]


def is_plain(module: nn.Module) -> bool:
    """Is a module a linear map of torch or transformers, with their code alone, and not that of a single number?"""
    kind, hooked = type(module), module._forward_hooks or module._forward_pre_hooks
    of_all = torch.nn.modules.module  # hooks that somebody has given to every module
    if hooked or of_all._global_forward_hooks or of_all._global_forward_pre_hooks or "forward" in vars(module):
        return False
    known = kind is nn.Linear or (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")
    parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
    return known and all(type(parameter) is nn.Parameter for parameter in parameters) and _outputs(module) > 1


def _outputs(module: Any) -> int:
    return int(module.nf if hasattr(module, "nf") else module.out_features)
