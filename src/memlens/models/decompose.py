"""States of every layer at selected positions, and a token's logit as an exact sum over the parts of a state.

The last state is a sum of embedding, attention, memories and biases. The final norm is linear except for its scale, so
the scale is fixed at its value for the decomposed state:

    logit = constant + sum over parts of part . direction

The constant comes from biases. A post-norm between memories and stream is treated in the same way. The sum is the
model's logit before soft-capping. For an adaptive softmax, the sum is the score of the word plus the score
of its band's class, both before normalization (`Lens.logit_is`). With `relative`, the mean logit over the vocabulary is
subtracted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from memlens.models import hooks
from memlens.models.groups import CoefficientBlock, MemoryLayer, scaled
from memlens.models.lens import Lens, Norm, at_least_float32
from memlens.models.memory_model import MemoryModel


class LayerUse(NamedTuple):
    """The coefficients of one layer's memories and the weights of the layer's groups, at n positions."""

    coefficients: Tensor  # [n, memories]
    weights: Tensor  # [n, groups], factor of each group's m and biases; 0 if the token did not reach the group

    def at(self, rows: Tensor) -> LayerUse:
        return LayerUse(self.coefficients[rows], self.weights[rows])


@dataclass(frozen=True, eq=False)
class PositionStates:
    """States and coefficients of every layer at n positions, with o = r + y, copied as float32 or float64."""

    embedding: Tensor  # [n, d], the input of the first layer
    r: dict[int, Tensor]  # [n, d]
    y: dict[int, Tensor]  # [n, d]
    o: dict[int, Tensor]  # [n, d]
    coefficients: dict[int, Tensor]  # [n, memories], for the requested layers
    weights: dict[int, Tensor]  # [n, groups], for the requested layers

    def __len__(self) -> int:
        return len(self.embedding)

    def used(self, layer: int) -> LayerUse:
        return LayerUse(self.coefficients[layer], self.weights[layer])

    def attention(self, layer: int) -> Tensor:
        """Return what the layer adds to the stream besides y, [n, d]."""
        before = self.embedding if layer == 0 else self.o[layer - 1]
        return self.r[layer] - before

    def __getitem__(self, part: slice) -> PositionStates:
        def cut(store: dict[int, Tensor]) -> dict[int, Tensor]:
            return {layer: tensor[part] for layer, tensor in store.items()}

        stores = (self.r, self.y, self.o, self.coefficients, self.weights)
        return PositionStates(self.embedding[part], *map(cut, stores))

    def copy(self) -> PositionStates:
        """Return a copy. Without a copy, a small slice would keep the whole tensors in memory."""
        return PositionStates.join([self, self[:0]])

    @staticmethod
    def join(parts: list[PositionStates]) -> PositionStates:
        """Concatenate the positions of several passes."""

        def joined(stores: list[dict[int, Tensor]]) -> dict[int, Tensor]:
            return {layer: torch.cat([store[layer] for store in stores]) for layer in stores[0]}

        return PositionStates(
            torch.cat([part.embedding for part in parts]),
            joined([part.r for part in parts]),
            joined([part.y for part in parts]),
            joined([part.o for part in parts]),
            joined([part.coefficients for part in parts]),
            joined([part.weights for part in parts]),
        )


def record_positions(
    model: MemoryModel, tokens: Tensor, rows: Tensor, layers: Collection[int] | None = None
) -> PositionStates:
    """Run tokens [batch, pos] and record the positions `rows` [n] of the flattened [batch * pos].

    Args:
        model: The model to run.
        tokens: [batch, pos] int64.
        rows: [n] int64.
        layers: Layers whose coefficients are recorded, or None for all layers. States are always recorded for all
            layers.
    """
    rows = rows.to(model.device)
    embedding: dict[int, Tensor] = {}
    y: dict[int, Tensor] = {}
    o: dict[int, Tensor] = {}
    coefficients: dict[int, Tensor] = {}
    weights: dict[int, Tensor] = {}

    def keep(store: dict[int, Tensor], layer: int) -> Callable[[Tensor], None]:
        def pick(states: Tensor) -> None:  # [batch, pos, ...]
            # advanced indexing copies, so later in-place changes do not affect the record
            store[layer] = at_least_float32(states.detach().flatten(0, 1)[rows])

        return pick

    def begin(layer: MemoryLayer, states: Tensor) -> None:
        coefficients[layer.number] = at_least_float32(states.new_zeros(len(rows), layer.memories))
        weights[layer.number] = at_least_float32(states.new_zeros(len(rows), len(layer.groups)))

    def take(layer: MemoryLayer, block: CoefficientBlock) -> None:
        m, scale = block.at(rows)
        coefficients[layer.number][:, block.group.columns] = m.detach()
        weights[layer.number][:, layer.groups.index(block.group)] = scale.detach()

    with ExitStack() as stack:
        stack.enter_context(hooks.on_input(model.layers[0].block, keep(embedding, 0)))
        for layer, memories in enumerate(model.layers):
            if layers is None or layer in layers:
                stack.enter_context(hooks.on_input(memories.block, partial(begin, memories)))
                stack.enter_context(hooks.watch_coefficients(memories, partial(take, memories)))
            stack.enter_context(hooks.watch_addition(memories, keep(y, layer)))
            stack.enter_context(hooks.on_output(memories.block, keep(o, layer)))
        model.run_body(tokens)
    return PositionStates(embedding[0], {layer: o[layer] - y[layer] for layer in o}, y, o, coefficients, weights)


@dataclass(frozen=True, eq=False)
class LogitParts:
    """The logits of n tokens, split into parts: logit = embedding + constant + sum over layers of (attention + ffn)."""

    embedding: Tensor  # [n]
    attention: Tensor  # [layers, n]
    ffn: Tensor  # [layers, n], memories and the block's biases
    constant: Tensor  # [n], from the biases of the final norm and the output embedding

    @property
    def logit(self) -> Tensor:
        return self.embedding + self.attention.sum(0) + self.ffn.sum(0) + self.constant


class LogitDecomposition:
    """Splits the logits of one model into parts. The output embedding is computed once, on first use."""

    def __init__(self, model: MemoryModel) -> None:
        self._model = model
        self._lens: Lens = model.lens

    @cached_property
    def _embedding(self) -> Tensor:
        return self._lens.embedding  # [vocabulary, d]

    @cached_property
    def _mean(self) -> Tensor:
        every = torch.arange(self._lens.vocabulary, device=self._model.device)
        return self._lens.logit_rows(every).mean(0)  # [d]

    def direction(self, tokens: Tensor, states: Tensor, relative: bool = False) -> Tensor:
        """Return one direction per token, [n, d]. A part of a state adds part . direction to the token's logit.

        Args:
            tokens: [n].
            states: [n, d], the states at which the final norm's scale is fixed.
            relative: Use the logit minus the mean of all logits, which does not change if all logits shift by a
                constant.
        """
        rows = self._lens.logit_rows(tokens)
        if relative:
            rows = rows - self._mean
        norm = self._lens.final_norm
        return rows if norm is None else _backwards(norm, rows, states)

    def constant(self, tokens: Tensor, relative: bool = False) -> Tensor:
        """Return the part of each token's logit that does not depend on the state, [n]."""
        rows = self._lens.logit_rows(tokens)
        if relative:
            rows = rows - self._mean
        constant = rows.new_zeros(len(rows))
        norm = self._lens.final_norm
        if norm is not None and norm.bias is not None:
            constant = constant + rows @ norm.bias
        bias = self._lens.bias
        if bias is not None:
            bias = at_least_float32(bias)
            constant = constant + bias[tokens] - (bias.mean() if relative else 0)
        return constant

    def memories(self, layer: int, use: LayerUse, direction: Tensor) -> Tensor:
        """Return the contribution of each memory of the layer along the direction [n, d], as [n, memories]."""
        block = self._model.layers[layer]
        inward = self._before_post_norm(block, use, direction)
        effects = torch.empty_like(use.coefficients)
        for group in block.groups:
            values = at_least_float32(group.values)
            torch.matmul(scaled(inward, group.scale), values.T, out=effects[:, group.columns])
        return effects.mul_(use.coefficients)

    def block_bias(self, layer: int, use: LayerUse, direction: Tensor) -> Tensor:
        """Return the contribution of the block's biases along the direction, [n].

        The contributions of memories and biases sum to the block's part.
        """
        block = self._model.layers[layer]
        total = direction.new_zeros(len(direction))
        biases = _biases(block, use.weights)
        if biases is not None:
            inward = self._before_post_norm(block, use, direction)
            total = total + (inward * biases).sum(-1)
        if block.post_norm is not None and block.post_norm.bias is not None:
            total = total + scaled(direction, block.scale) @ block.post_norm.bias
        return total

    def cosine(self, tokens: Tensor, other_tokens: Tensor) -> Tensor:
        """Return the cosine similarity of the output embeddings of two tokens, [n]."""
        return torch.cosine_similarity(self._embedding[tokens], self._embedding[other_tokens], dim=-1)

    def logit_parts(self, positions: PositionStates, tokens: Tensor, relative: bool = False) -> LogitParts:
        """Split the model's logit of one token per position [n] into parts."""
        layers = range(len(self._model.layers))
        direction = self.direction(tokens, positions.o[layers[-1]], relative)
        return LogitParts(
            embedding=_dot(positions.embedding, direction),
            attention=torch.stack([_dot(positions.attention(layer), direction) for layer in layers]),
            ffn=torch.stack([_dot(positions.y[layer], direction) for layer in layers]),
            constant=self.constant(tokens, relative),
        )

    @staticmethod
    def _before_post_norm(block: MemoryLayer, use: LayerUse, direction: Tensor) -> Tensor:
        """Return the direction carried back through the block's scale and post-norm, with the norm's scale fixed."""
        direction = scaled(direction, block.scale)
        if block.post_norm is None:
            return direction
        output = torch.zeros_like(direction)
        for group in block.groups:
            added = use.coefficients[:, group.columns] @ at_least_float32(group.values)
            output = output + scaled(added, group.scale)
        biases = _biases(block, use.weights)
        return _backwards(block.post_norm, direction, output if biases is None else output + biases)


def _biases(block: MemoryLayer, weights: Tensor) -> Tensor | None:
    """Return the biases in a block's output, weighted by group, [n, d], or None if the block has no biases."""
    parts = [
        weights[:, place, None] * scaled(at_least_float32(group.value_bias), group.scale)
        for place, group in enumerate(block.groups)
        if group.value_bias is not None
    ]
    return torch.stack(parts).sum(0) if parts else None


def _backwards(norm: Norm, direction: Tensor, states: Tensor) -> Tensor:
    """Return d' such that x . d' = norm(x) . direction, without the norm's bias. The scale is fixed for `states`."""
    gain = norm.gain
    if gain is not None:
        direction = direction * gain
    if norm.centers:
        # centering either side of a dot product gives the same result
        direction = direction - direction.mean(-1, keepdim=True)
        states = states - states.mean(-1, keepdim=True)
    return direction / torch.sqrt(states.square().mean(-1, keepdim=True) + norm.epsilon)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1)
