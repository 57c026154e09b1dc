"""Looks for memories that were not seen: parts of a block that work on each position by itself and were not found.

What a block adds is memories and what mixes positions. Behind the memories the proof's check of the stream sees all; in
front of them and beside them (a parallel block, a layer without memories) unseen ones are looked for here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from memlens.models.blocks import BlockCall, ModuleCall, first_input, replaced
from memlens.models.groups import MemoryLayer
from memlens.models.match import is_linear, rows_of


def unseen_part(layer: MemoryLayer, block: BlockCall, calls: Mapping[nn.Module, ModuleCall]) -> str | None:
    """The name of a part of a block, none of its memories, that adds what it makes of each position by itself.

    `calls`: those made when the block was run on its probe.
    """
    batch, positions, width = block.states.shape
    if positions < 2:
        return None
    known = {module for part in layer.outputs for module in part.modules()}
    others = {name: calls[module] for name, module in layer.block.named_modules() if module in calls.keys() - known}
    maps = [call for call in others.values() if is_linear(call) and len(rows_of(call.given)) == batch * positions]
    alone, mixing = _linear_maps(block, maps, [calls[module] for module in layer.outputs])
    for name, call in others.items():  # the outer before the inner
        if {*call.module.modules()} & {*layer.outputs, *mixing} or _matrices(call.module) < 2:
            continue
        shapes = {rows_of(call.given).shape, rows_of(call.output).shape}
        if shapes == {(batch * positions, width)} and _works_alone(call, block.states.shape):
            return name
    return next((name for name, call in others.items() if call.module in alone), None)


def _matrices(module: nn.Module) -> int:
    return sum(parameter.dim() > 1 for parameter in module.parameters())


def _works_alone(call: ModuleCall, shape: torch.Size) -> bool:
    """Does what a module puts out at the last position depend on what it is given there, and on nothing else?"""

    def heeds(changed: slice) -> bool:
        given = call.given.reshape(shape).clone()
        given[:, changed] = given[:, changed].flip(-1)
        after = call.again(given.reshape(call.given.shape)).reshape(shape)
        return not torch.allclose(after[:, -1], call.output.reshape(shape)[:, -1], rtol=1e-5, atol=1e-6)

    return heeds(slice(-1, None)) and not heeds(slice(-1))  # what heeds neither adds a constant


def _linear_maps(
    block: BlockCall, maps: Sequence[ModuleCall], memories: Sequence[ModuleCall]
) -> tuple[set[nn.Module], set[nn.Module]]:
    """Linear maps that write what was made of each position by itself, and those whose input mixes positions.

    All linear maps and the memories put out what they did, but for one map, which puts out something else at the first
    position: where that is seen, it went through no other map.
    """
    shape = block.states.shape[:2]
    given: dict[nn.Module, Tensor] = {}
    changed: nn.Module | None = None

    def forward(call: ModuleCall) -> Callable[..., Any]:
        def put_out(*arguments: Any, **named: Any) -> Any:
            given[call.module] = first_input(arguments, named).detach().clone()
            own = call.output.clone()
            return call.returning(_first_position_turned(own, shape) if call.module is changed else own)

        return put_out

    alone, mixing, writing = set[nn.Module](), set[nn.Module](), set[nn.Module]()
    with replaced({call.module: forward(call) for call in (*maps, *memories)}):
        o, before = block.run(), dict(given)
        for source in maps:
            changed = source.module
            if not torch.equal(block.run()[:, 0], o[:, 0]):
                writing.add(changed)
            for module in (call.module for call in maps if call is not source):
                moved = (given[module] != before[module]).reshape(*shape, -1).any(-1).any(0)  # [pos]
                if moved[1:].any():
                    mixing.add(module)
                elif moved[0] and not torch.equal(rows_of(before[module]), rows_of(source.output)):
                    alone.add(module)  # two maps in turn are one
    return (alone & writing) - mixing, mixing


def _first_position_turned(output: Tensor, shape: torch.Size) -> Tensor:
    turned = output.reshape(*shape, -1).clone()
    turned[:, 0] = turned[:, 0].flip(-1) + 1
    return turned.reshape(output.shape)
