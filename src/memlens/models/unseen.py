"""Looks for memories that were not seen: parts of a block that work on each position by itself and were not found.

What a block adds is memories and what mixes positions. Behind the memories the proof's check of the stream sees all; in
front of them and beside them (a parallel block, a layer without memories) unseen ones are looked for here, in modules
and in the products that a block's own code makes of its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from memlens.models.blocks import BlockCall, ModuleCall, replaced
from memlens.models.groups import MemoryLayer
from memlens.models.match import rows_of
from memlens.models.products import Product, ProductMode


def unseen_part(
    layer: MemoryLayer,
    block: BlockCall,
    calls: Mapping[nn.Module, ModuleCall],
    products: Sequence[Product],
    o: Tensor,
) -> str | None:
    """Say which part of a block works on each position by itself and is none of its memories; None if none does.

    `calls`, `products`: those made when the block was run on its probe and put out `o` [batch * pos, d].
    """
    batch, positions, width = block.states.shape
    if positions < 2:
        return None
    known = {module for part in layer.outputs for module in part.modules()}
    parameters = {id(parameter) for module in known for parameter in module.parameters(False)}
    seen = {name for name, parameter in layer.block.named_parameters() if id(parameter) in parameters}
    others = [product for product in products if product.parameter not in seen]
    held = _PinnedBlock(block, others, [calls[part] for part in layer.outputs])
    alone, mixing = held.ways()
    modules = {name: calls[module] for name, module in layer.block.named_modules() if module in calls.keys() - known}
    for name, call in modules.items():  # the outer before the inner
        holds_known = {*call.module.modules()} & {*layer.outputs}
        holds_mixing = any(product.parameter.startswith(f"{name}.") for product in mixing)
        if holds_known or holds_mixing or _matrices(call.module) < 2:
            continue
        shapes = {rows_of(call.given).shape, rows_of(call.output).shape}
        if shapes == {(batch * positions, width)} and _works_alone(call, block.states.shape):
            return f"{name} works on each position by itself and is not made of memories"
    if writers := held.writers(alone, o):
        return f"{writers[0].name} works on each position by itself and is not made of memories"
    if not layer.groups and len(writers := held.writers(mixing, o)) > 1:
        names = " and ".join(product.name for product in writers)
        return f"{names} add to the stream one after the other, and neither is made of memories"
    return None


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


class _PinnedBlock:
    """A block run again with its recorded products and memories, some of them changed at the first position.

    Where a change is seen in the output, it went through no other product.
    """

    def __init__(self, block: BlockCall, products: Sequence[Product], memories: Sequence[ModuleCall]) -> None:
        self.block, self.products, self.memories = block, products, memories
        self.shape = block.shape

    def ways(self) -> tuple[list[Product], list[Product]]:
        """Products whose input is made of others' output at each position by itself, and those whose input mixes."""
        _, given = self._run(self.products)
        outputs = [rows_of(product.output) for product in self.products]
        alone, mixing = [], []
        for product in self.products:
            if product.key not in given:
                continue
            moved = (given[product.key] != product.given).reshape(*self.shape, -1).any(-1).any(0)  # [pos]
            if moved[1:].any():
                mixing.append(product)
            elif moved[0] and not any(torch.equal(rows_of(product.given), output) for output in outputs):
                alone.append(product)  # of two maps in turn, which are one, nothing is made in between
        return alone, mixing

    def writers(self, products: Sequence[Product], o: Tensor) -> list[Product]:
        """Those of some products whose output reaches the stream by no other product."""
        if not products or torch.equal(rows_of(self._run(products)[0]), o):  # most often none, which one run shows
            return []
        return [product for product in products if not torch.equal(rows_of(self._run([product])[0]), o)]

    def _run(self, changed: Sequence[Product]) -> tuple[Tensor, dict[tuple[str, int], Tensor]]:
        outputs = {
            product.key: _first_position_turned(product.output, self.shape) if product in changed else product.output
            for product in self.products
        }
        memories = {call.module: partial(_again, call) for call in self.memories}
        with replaced(memories), ProductMode(self.block.block, self.shape, outputs) as mode:
            put_out = self.block.run()
        return put_out, {product.key: product.given for product in mode.products}


def _again(call: ModuleCall, *_arguments: Any, **_named: Any) -> Any:
    return call.returning(call.output.clone())


def _first_position_turned(output: Tensor, shape: tuple[int, int]) -> Tensor:
    turned = output.reshape(*shape, -1).clone()
    turned[:, 0] = turned[:, 0].flip(-1) + 1
    return turned.reshape(output.shape)
