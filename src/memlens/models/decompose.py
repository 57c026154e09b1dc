"""The states of every layer at chosen positions, and a token's logit as an exact sum over the parts of a state.

The last state is a sum of embedding, attention, memories and biases. The final norm would be linear if its scale did
not depend on the state, so the scale is frozen at the state that is read:

    logit = constant + sum over parts of part . direction

The constant is the biases' share, which no part changes. A post-norm between memories and stream is frozen in the same
way. The sum is the model's logit before soft-capping; for an adaptive softmax, the word's score plus that of its band's
class before both are normalised (`Lens.logit_is`). `relative` takes the logit less the mean over the vocabulary.
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
    """The coefficients of the memories of one layer, and the weights of its groups, at n positions."""

    coefficients: Tensor  # [n, memories]
    weights: Tensor  # [n, groups]: what m and the biases of a group were multiplied by; 0 where it was not used

    def at(self, rows: Tensor) -> LayerUse:
        return LayerUse(self.coefficients[rows], self.weights[rows])


@dataclass(frozen=True, eq=False)
class PositionStates:
    """States and coefficients of every layer at n positions; o = r + y. All are copies, float32 or finer."""

    embedding: Tensor  # [n, d], the input of the first layer
    r: dict[int, Tensor]  # [n, d]
    y: dict[int, Tensor]  # [n, d]
    o: dict[int, Tensor]  # [n, d]
    coefficients: dict[int, Tensor]  # [n, memories], of the layers asked for
    weights: dict[int, Tensor]  # [n, groups], of the same layers

    def __len__(self) -> int:
        return len(self.embedding)

    def used(self, layer: int) -> LayerUse:
        return LayerUse(self.coefficients[layer], self.weights[layer])

    def attention(self, layer: int) -> Tensor:
        """The rest of a layer's update of the stream, besides its memories, [n, d]."""
        before = self.embedding if layer == 0 else self.o[layer - 1]
        return self.r[layer] - before

    def __getitem__(self, part: slice) -> PositionStates:
        def cut(store: dict[int, Tensor]) -> dict[int, Tensor]:
            return {layer: tensor[part] for layer, tensor in store.items()}

        stores = (self.r, self.y, self.o, self.coefficients, self.weights)
        return PositionStates(self.embedding[part], *map(cut, stores))

    def copy(self) -> PositionStates:
        """The same numbers, so that a small part need not keep the whole in memory."""
        return PositionStates.join([self, self[:0]])

    @staticmethod
    def join(parts: list[PositionStates]) -> PositionStates:
        """The positions of several passes, one after another."""

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
    """Run tokens [batch, pos] and keep the chosen rows of the flattened [batch * pos], [n] int64.

    States are kept of all layers, coefficients of `layers` (None = all).
    """
    rows = rows.to(model.device)
    embedding: dict[int, Tensor] = {}
    y: dict[int, Tensor] = {}
    o: dict[int, Tensor] = {}
    coefficients: dict[int, Tensor] = {}
    weights: dict[int, Tensor] = {}

    def keep(store: dict[int, Tensor], layer: int) -> Callable[[Tensor], None]:
        def pick(states: Tensor) -> None:  # [batch, pos, ...]
            # advanced indexing copies, so that later in-place changes do not reach what is kept
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
    """The logits of n tokens in parts: logit = embedding + constant + sum over layers of attention + ffn."""

    embedding: Tensor  # [n]
    attention: Tensor  # [layers, n]
    ffn: Tensor  # [layers, n]; memories and the block's biases together
    constant: Tensor  # [n]; biases of the final norm and of the output embedding

    @property
    def logit(self) -> Tensor:
        return self.embedding + self.attention.sum(0) + self.ffn.sum(0) + self.constant


class LogitDecomposition:
    """Directions, constants and parts for one model; its output embedding is computed once, when first needed."""

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
        """[n, d]: part . direction is what a part of a state [n, d] adds to the logit of its token [n].

        relative: to the logit less the mean of all logits, which no common shift of them can change.
        """
        rows = self._lens.logit_rows(tokens)
        if relative:
            rows = rows - self._mean
        norm = self._lens.final_norm
        return rows if norm is None else _backwards(norm, rows, states)

    def constant(self, tokens: Tensor, relative: bool = False) -> Tensor:
        """[n]: what is in the logit of each token whatever the state is."""
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

    def memories(self, layer: int, used: LayerUse, direction: Tensor) -> Tensor:
        """[n, memories]: what each memory of that layer added along the direction [n, d]."""
        block = self._model.layers[layer]
        inward = self._before_post_norm(block, used, direction)
        effects = torch.empty_like(used.coefficients)
        for group in block.groups:
            values = at_least_float32(group.values)
            torch.matmul(scaled(inward, group.scale), values.T, out=effects[:, group.columns])
        return effects.mul_(used.coefficients)

    def block_bias(self, layer: int, used: LayerUse, direction: Tensor) -> Tensor:
        """[n]: what the block's own biases added; with all memories it is what the block added."""
        block = self._model.layers[layer]
        total = direction.new_zeros(len(direction))
        biases = _biases(block, used.weights)
        if biases is not None:
            inward = self._before_post_norm(block, used, direction)
            total = total + (inward * biases).sum(-1)
        if block.post_norm is not None and block.post_norm.bias is not None:
            total = total + scaled(direction, block.scale) @ block.post_norm.bias
        return total

    def cosine(self, tokens: Tensor, others: Tensor) -> Tensor:
        """[n]: how alike the output embeddings of two tokens are, from -1 to 1."""
        return torch.cosine_similarity(self._embedding[tokens], self._embedding[others], dim=-1)

    def logit_parts(self, positions: PositionStates, tokens: Tensor, relative: bool = False) -> LogitParts:
        """The logit that the model itself gives to each position's token [n], in parts."""
        layers = range(len(self._model.layers))
        direction = self.direction(tokens, positions.o[layers[-1]], relative)
        return LogitParts(
            embedding=_dot(positions.embedding, direction),
            attention=torch.stack([_dot(positions.attention(layer), direction) for layer in layers]),
            ffn=torch.stack([_dot(positions.y[layer], direction) for layer in layers]),
            constant=self.constant(tokens, relative),
        )

    @staticmethod
    def _before_post_norm(block: MemoryLayer, used: LayerUse, direction: Tensor) -> Tensor:
        """The direction as it is met before the block's post-norm and scale, frozen at what the block put out."""
        direction = scaled(direction, block.scale)
        if block.post_norm is None:
            return direction
        output = torch.zeros_like(direction)
        for group in block.groups:
            added = used.coefficients[:, group.columns] @ at_least_float32(group.values)
            output = output + scaled(added, group.scale)
        biases = _biases(block, used.weights)
        return _backwards(block.post_norm, direction, output if biases is None else output + biases)


def _biases(block: MemoryLayer, weights: Tensor) -> Tensor | None:
    """[n, d]: the biases in a block's output, each times what its group is multiplied by; None where there are none."""
    parts = [
        weights[:, place, None] * scaled(at_least_float32(group.value_bias), group.scale)
        for place, group in enumerate(block.groups)
        if group.value_bias is not None
    ]
    return torch.stack(parts).sum(0) if parts else None


def norm_scale(norm: Norm, states: Tensor) -> Tensor:
    """[n, 1]: what a norm divides each state [n, d] by."""
    if norm.centres:
        states = states - states.mean(-1, keepdim=True)
    return torch.sqrt(states.square().mean(-1, keepdim=True) + norm.epsilon)


def _backwards(norm: Norm, direction: Tensor, states: Tensor) -> Tensor:
    """Norm(x) . direction, without the norm's bias, is x . this; the scale is that of `states`. All [n, d]."""
    gain = norm.gain
    if gain is not None:
        direction = direction * gain
    if norm.centres:
        # taking the mean off one side of a product is the same as taking it off the other
        direction = direction - direction.mean(-1, keepdim=True)
    return direction / norm_scale(norm, states)


def _dot(left: Tensor, right: Tensor) -> Tensor:
    return (left * right).sum(-1)
