"""One feed-forward block seen as memories: keys, values, biases, activation, gate.

A memory is one hidden unit: row i of `keys` with row i of `values` (and of `up` where the block is gated). All tensors
are views of the checkpoint's own parameters, so nothing is held twice. This module knows the modules of a block but
not the architecture they come from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from memlens.models.lens import Norm


@dataclass(frozen=True, eq=False)
class FeedForward:
    """The memories of one layer, and the modules through which they are watched and edited.

    plain: m = f(x K^T + b_K);  gated: m = f(x G^T + b_G) * (x U^T + b_U), with G in `keys` and U in `up`.
    The block adds y = m V + b_V to the residual stream, through `post_norm` where there is one.
    """

    layer: int
    activation: str  # the checkpoint's own name, such as "gelu_new"
    block: nn.Module = field(repr=False)  # its output (or that output's first element) is o, [batch, pos, d]
    key_projection: nn.Module = field(repr=False)  # x -> x K^T + b_K; the gate of a gated block
    up_projection: nn.Module | None = field(repr=False)
    down: nn.Module = field(repr=False)  # its input is m, its output m V + b_V
    input_norm: Norm | None = field(repr=False)  # the norm whose output is x; None where x is the stream itself
    post_norm: Norm | None = field(repr=False)  # the norm between m V + b_V and the stream
    parallel: bool = False  # does the block read the stream from before the attention of its layer?
    activate: Callable[[Tensor], Tensor] = field(default=torch.relu, repr=False)  # f, found by the activation's name

    @property
    def memories(self) -> int:
        return self.values.shape[0]

    @property
    def gated(self) -> bool:
        return self.up_projection is not None

    @property
    def signed(self) -> bool:
        """Do negative coefficients mean something? Then bottom triggers are kept by default."""
        return self.gated

    @property
    def keys(self) -> Tensor:
        """[memories, d]; the gate's rows where the block is gated."""
        return _input_rows(self.key_projection)

    @property
    def key_bias(self) -> Tensor | None:
        return _bias(self.key_projection)

    @property
    def up(self) -> Tensor | None:
        """[memories, d]; None where the block is not gated."""
        return None if self.up_projection is None else _input_rows(self.up_projection)

    @property
    def up_bias(self) -> Tensor | None:
        return None if self.up_projection is None else _bias(self.up_projection)

    @property
    def values(self) -> Tensor:
        """[memories, d]"""
        return _input_rows(self.down).T

    @property
    def value_bias(self) -> Tensor | None:
        return _bias(self.down)

    def coefficients(self, inputs: Tensor) -> Tensor:
        """m [..., memories] for block inputs x [..., d], by the formula above and not by the model's own modules.

        Computed in the dtype of `inputs`, whatever the model's is.
        """
        coefficients = self.activate(_affine(inputs, self.keys, self.key_bias))
        return coefficients if self.up is None else coefficients * _affine(inputs, self.up, self.up_bias)


def _affine(inputs: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
    return nn.functional.linear(inputs, rows.to(inputs.dtype), None if bias is None else bias.to(inputs.dtype))


def _input_rows(projection: Any) -> Tensor:
    """The matrix of a projection with one row an output, [outputs, inputs], whichever way round it is stored."""
    weight: Tensor = projection.weight.detach()
    # transformers' Conv1D (GPT-2) stores [inputs, outputs]; it is told by its name so that this file needs torch only
    return weight.T if type(projection).__name__ == "Conv1D" else weight


def _bias(projection: nn.Module) -> Tensor | None:
    bias: Tensor | None = getattr(projection, "bias", None)
    return None if bias is None else bias.detach()
