"""What a forward pass does at a few chosen positions, layer by layer, without keeping the others.

`MemoryModel.record` copies whole batches; a sample of prefixes needs one position of a sentence in twenty. Here a hook
picks the chosen rows out of [batch * pos] as a layer is reached, so that memory grows with the sample and not with the
text around it. This module knows nothing of sentences.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from memlens.models import hooks
from memlens.models.memory_model import MemoryModel
from memlens.models.norm import at_least_float32


@dataclass(frozen=True, eq=False)
class Positions:
    """What every layer did at n positions; o = r + y. All are copies, float32 or finer."""

    embedding: Tensor  # [n, d], the input of the first layer
    r: dict[int, Tensor]  # [n, d]
    y: dict[int, Tensor]  # [n, d]
    o: dict[int, Tensor]  # [n, d]
    coefficients: dict[int, Tensor]  # [n, memories], of the layers asked for

    def __len__(self) -> int:
        return len(self.embedding)

    def attention(self, layer: int) -> Tensor:
        """What a layer added to the stream besides its memories, [n, d]."""
        before = self.embedding if layer == 0 else self.o[layer - 1]
        return self.r[layer] - before

    def __getitem__(self, part: slice) -> Positions:
        def cut(store: dict[int, Tensor]) -> dict[int, Tensor]:
            return {layer: tensor[part] for layer, tensor in store.items()}

        return Positions(self.embedding[part], cut(self.r), cut(self.y), cut(self.o), cut(self.coefficients))

    def copy(self) -> Positions:
        """The same numbers, so that a small part need not keep the whole in memory."""
        return Positions.join([self, self[:0]])

    @staticmethod
    def join(parts: list[Positions]) -> Positions:
        """The positions of several passes, one after another."""

        def joined(stores: list[dict[int, Tensor]]) -> dict[int, Tensor]:
            return {layer: torch.cat([store[layer] for store in stores]) for layer in stores[0]}

        return Positions(
            torch.cat([part.embedding for part in parts]),
            joined([part.r for part in parts]),
            joined([part.y for part in parts]),
            joined([part.o for part in parts]),
            joined([part.coefficients for part in parts]),
        )


def record_positions(
    model: MemoryModel, tokens: Tensor, rows: Tensor, layers: Collection[int] | None = None
) -> Positions:
    """Run tokens [batch, pos] and keep the chosen rows of the flattened [batch * pos], [n] int64.

    States are kept of all layers, coefficients of `layers` (None = all).
    """
    rows = rows.to(model.device)
    embedding: dict[int, Tensor] = {}
    y: dict[int, Tensor] = {}
    o: dict[int, Tensor] = {}
    coefficients: dict[int, Tensor] = {}

    def keep(store: dict[int, Tensor], layer: int) -> Callable[[Tensor], None]:
        def pick(states: Tensor) -> None:  # [batch, pos, ...]
            # advanced indexing copies, so that later in-place changes do not reach what is kept
            store[layer] = at_least_float32(states.detach().flatten(0, 1)[rows])

        return pick

    with ExitStack() as stack:
        stack.enter_context(hooks.on_input(model.layers[0].block, keep(embedding, 0)))
        for layer, memories in enumerate(model.layers):
            if layers is None or layer in layers:
                stack.enter_context(hooks.watching(memories, keep(coefficients, layer)))
            stack.enter_context(hooks.watching_addition(memories, keep(y, layer)))
            stack.enter_context(hooks.on_output(memories.block, keep(o, layer)))
        model.run_body(tokens)
    return Positions(embedding[0], {layer: o[layer] - y[layer] for layer in o}, y, o, coefficients)
