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


def unseen_part(layer: MemoryLayer, block: BlockCall, calls: Mapping[nn.Module, ModuleCall], o: Tensor) -> str | None:
    """The name of a part of a block, none of its memories, that adds what it makes of each position by itself.

    `calls`: those made when the block was run on its probe and put out `o` [batch * pos, d].
    """
    batch, positions, width = block.states.shape
    if positions < 2:
        return None
    known = {module for part in layer.outputs for module in part.modules()}
    others = {name: calls[module] for name, module in layer.block.named_modules() if module in calls.keys() - known}
    maps = [call for call in others.values() if is_linear(call) and len(rows_of(call.given)) == batch * positions]
    held = _Held(block, maps, [calls[module] for module in layer.outputs])
    alone, mixing = held.ways()
    for name, call in others.items():  # the outer before the inner
        if {*call.module.modules()} & {*layer.outputs, *mixing} or _matrices(call.module) < 2:
            continue
        shapes = {rows_of(call.given).shape, rows_of(call.output).shape}
        if shapes == {(batch * positions, width)} and _works_alone(call, block.states.shape):
            return name
    return next((name for name, call in others.items() if call.module in alone and held.writes(call, o)), None)


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


class _Held:
    """A block whose linear maps and memories put out what they did, but for some that put out something else at first.

    "At first": at the first position. Where that is seen, it went through no other map.
    """

    def __init__(self, block: BlockCall, maps: Sequence[ModuleCall], memories: Sequence[ModuleCall]) -> None:
        self.block, self.maps, self.memories = block, maps, memories
        self.shape = block.states.shape[:2]

    def ways(self) -> tuple[set[nn.Module], set[nn.Module]]:
        """Maps whose input is made of other maps' output at each position by itself, and those whose input mixes."""
        _, given = self._run(self.maps)
        alone, mixing = set[nn.Module](), set[nn.Module]()
        for call in self.maps:
            moved = (given[call.module] != call.given).reshape(*self.shape, -1).any(-1).any(0)  # [pos]
            if moved[1:].any():
                mixing.add(call.module)
            elif moved[0] and not any(torch.equal(rows_of(call.given), rows_of(one.output)) for one in self.maps):
                alone.add(call.module)  # of two maps in turn, which are one, nothing is made in between
        return alone, mixing

    def writes(self, call: ModuleCall, o: Tensor) -> bool:
        """Does what a map puts out reach the stream by no other map?"""
        put_out, _ = self._run([call])
        return not torch.equal(rows_of(put_out), o)

    def _run(self, changed: Sequence[ModuleCall]) -> tuple[Tensor, dict[nn.Module, Tensor]]:
        given: dict[nn.Module, Tensor] = {}

        def forward(call: ModuleCall) -> Callable[..., Any]:
            own = _first_position_turned(call.output, self.shape) if call in changed else call.output.clone()

            def put_out(*arguments: Any, **named: Any) -> Any:
                given[call.module] = first_input(arguments, named).detach().clone()
                return call.returning(own)

            return put_out

        with replaced({call.module: forward(call) for call in (*self.maps, *self.memories)}):
            return self.block.run(), given


def _first_position_turned(output: Tensor, shape: torch.Size) -> Tensor:
    turned = output.reshape(*shape, -1).clone()
    turned[:, 0] = turned[:, 0].flip(-1) + 1
    return turned.reshape(output.shape)
