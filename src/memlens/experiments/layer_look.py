"""What one layer did at a handful of prefixes: the numbers that every experiment of section 5 is made of.

Unembedding dominates, so each state is read at most once: r for its top and the final token's probability, y and o for
their tops. Which token a value promotes is looked up in the values table, never computed again.
This module knows recorded positions; sentences, files and samples it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memlens.experiments.unembedding import Unembedding
from memlens.models.decompose import LogitDecomposition, PositionStates
from memlens.models.lens import at_least_float32
from memlens.models.memory_model import MemoryModel

TOP_MEMORIES = (1, 10, 100)  # how many of the strongest memories are added up
LISTED = 10  # memories that are named where a composition happens

Columns = dict[str, Any]  # name -> [n] array, or [n] list of lists (None where there is nothing to list)


class LayerLook:
    """Looks at positions, layer by layer."""

    def __init__(
        self,
        model: MemoryModel,
        promoted: Mapping[int, NDArray[np.int32]],  # layer -> [memories], the top token of each value
        unembedding: Unembedding,
    ) -> None:
        self.model, self.promoted, self.unembedding = model, promoted, unembedding
        self.accounting = LogitDecomposition(model)
        self.last = len(model.layers) - 1
        self.norms = {layer: at_least_float32(model.layers[layer].values).norm(dim=1) for layer in promoted}
        # a yes or no for every token, so that most prefixes need no look at single memories
        self.promotes = {layer: np.zeros(model.vocabulary, bool) for layer in promoted}
        for layer, tokens in promoted.items():
            self.promotes[layer][tokens] = True

    def look(self, positions: PositionStates) -> tuple[Columns, dict[int, Columns]]:
        """What holds for each prefix, and for each prefix in each layer."""
        final = self.unembedding.top(positions.o[self.last])
        tokens = self._tensor(final)
        account = self.accounting.logit_parts(positions, tokens)
        relative = self.accounting.logit_parts(positions, tokens, relative=True)
        whole = {
            "final_token": final,
            "logit": _numbers(account.logit),
            "logit_embedding": _numbers(account.embedding),
            "logit_constant": _numbers(account.constant),
            "above_mean": _numbers(relative.logit),
            "embedding": _numbers(relative.embedding),
            "constant": _numbers(relative.constant),
        }
        direction = self.accounting.direction(tokens, positions.o[self.last], relative=True)
        layers = {}
        for layer in self.promoted:
            columns = self._read(layer, positions, final)
            columns |= self._count(layer, positions.coefficients[layer], columns["ffn_token"])
            columns |= {
                "ffn_logit": _numbers(account.ffn[layer]),
                "attention_logit": _numbers(account.attention[layer]),
                "ffn_above": _numbers(relative.ffn[layer]),
                "attention_above": _numbers(relative.attention[layer]),
            }
            columns |= self._strongest(layer, positions.coefficients[layer], direction)
            columns |= self._name_memories(layer, positions, columns)
            layers[layer] = columns
        return whole, layers

    def _read(self, layer: int, positions: PositionStates, final: NDArray[np.int32]) -> Columns:
        r, y, o = positions.r[layer], positions.y[layer], positions.o[layer]
        tops = self.unembedding.layer(r, y, o, final, layer == self.last)
        return {
            "residual_token": tops.residual,
            "ffn_token": tops.ffn,
            "output_token": tops.output,
            "p_final": tops.final.p,
            "rank_final": tops.final.rank,
        }

    def _count(self, layer: int, coefficients: Tensor, ffn: NDArray[np.int32]) -> Columns:
        """Active and effective memories; does any memory promote the token that the layer promotes?"""
        sizes = coefficients.abs() * self.norms[layer]
        total, length = sizes.sum(1).double(), torch.linalg.vector_norm(sizes, dim=1).double()
        effective = (total / length.clamp_min(torch.finfo(torch.float32).tiny)).square()  # 0 where all are silent
        active = coefficients > 0  # [n, memories]
        found = self.promotes[layer][ffn]
        found_active = np.zeros(len(ffn), bool)
        for row in np.flatnonzero(found):
            same = np.flatnonzero(self.promoted[layer] == ffn[row])
            found_active[row] = bool(active[row, self._tensor(same)].any())
        return {
            "active": active.sum(1).cpu().numpy(),
            "effective": _numbers(effective),
            "promoted": found,
            "promoted_active": found_active,
        }

    def _strongest(self, layer: int, coefficients: Tensor, direction: Tensor) -> Columns:
        """What the 1, 10 and 100 memories that added most to the final token added; fewer where fewer added at all."""
        added = self.accounting.memories(layer, coefficients, direction)  # [n, memories]
        most = min(TOP_MEMORIES[-1], added.shape[1])
        running = added.topk(most, dim=1).values.clamp_min(0).double().cumsum(1)
        return {f"top{count}": _numbers(running[:, min(count, most) - 1]) for count in TOP_MEMORIES}

    def _name_memories(self, layer: int, positions: PositionStates, columns: Columns) -> Columns:
        """Where residual, layer and output have three tokens: who vetoed, and in the last layer who pushed.

        A veto is what a memory took from the residual's token, beside the mean of all tokens; a push what it gave to
        the output's token over the residual's. Both at the scale of the final norm for this layer's output.
        """
        output, residual, ffn = columns["output_token"], columns["residual_token"], columns["ffn_token"]
        rows = np.flatnonzero((output != residual) & (output != ffn) & (residual != ffn))
        named: Columns = {
            name: [None] * len(output) for name in ("vetoes", "veto_pushes", "pushers", "pushes", "cosine")
        }
        if not len(rows):
            return named
        where = self._tensor(rows)
        states, coefficients = positions.o[layer][where], positions.coefficients[layer][where]
        before, after = self._tensor(residual[rows]), self._tensor(output[rows])
        down = self.accounting.direction(before, states, relative=True)
        _list_(named, ("vetoes", "veto_pushes"), rows, self.accounting.memories(layer, coefficients, down), -1)
        if layer == self.last:
            up = self.accounting.direction(after, states) - self.accounting.direction(before, states)
            _list_(named, ("pushers", "pushes"), rows, self.accounting.memories(layer, coefficients, up), 1)
            for row, cosine in zip(rows, self.accounting.cosine(before, after).tolist(), strict=True):
                named["cosine"][row] = cosine
        return named

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self.model.device)


def _list_(named: Columns, names: tuple[str, str], rows: NDArray[np.int64], added: Tensor, sign: int) -> None:
    """Put the strongest memories of one sign, and what they added, where they belong."""
    amounts, memories = (added * sign).topk(min(LISTED, added.shape[1]), dim=1)
    for row, amount, memory in zip(rows, amounts.tolist(), memories.tolist(), strict=True):
        kept = [(i, sign * x) for i, x in zip(memory, amount, strict=True) if x > 0]
        named[names[0]][row] = [i for i, _ in kept]
        named[names[1]][row] = [x for _, x in kept]


def _numbers(tensor: Tensor) -> NDArray[np.float64]:
    return tensor.double().cpu().numpy()
