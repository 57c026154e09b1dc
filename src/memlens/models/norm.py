"""A normalisation layer of a model, taken apart into what reading memories needs: centring, gain, bias.

The module that the checkpoint runs stays the authority (`norm(states)` calls it); `by_formula` states the same in
plain arithmetic, and the proof at load time compares the two, so that a gain read wrongly cannot go unnoticed.
This module does not know where in a model a norm sits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

NormKind = Literal["layer", "rms", "rms+1"]
"""layer: centred, gain and bias; rms: gain only; rms+1: the gain is one plus the stored weight (Gemma)."""


@dataclass(frozen=True, eq=False)
class Norm:
    """One normalisation layer and how its stored weight is meant."""

    module: nn.Module
    kind: NormKind

    def __call__(self, states: Tensor) -> Tensor:
        output: Tensor = self.module(states)
        return output

    @property
    def centres(self) -> bool:
        """Is the mean over the width taken off first?"""
        return self.kind == "layer"

    @property
    def label(self) -> str:
        return "LayerNorm" if self.kind == "layer" else "RMSNorm"

    @property
    def gain(self) -> Tensor | None:
        """What each coordinate is multiplied with, [d], at least float32; None where the norm has no gain."""
        weight: Tensor | None = getattr(self.module, "weight", None)
        if weight is None:
            return None
        gain = at_least_float32(weight.detach())
        return gain + 1 if self.kind == "rms+1" else gain

    @property
    def bias(self) -> Tensor | None:
        """What is added at the end, [d], at least float32; None where nothing is."""
        bias: Tensor | None = getattr(self.module, "bias", None)
        return None if bias is None else at_least_float32(bias.detach())

    @property
    def epsilon(self) -> float:
        for name in ("eps", "variance_epsilon"):
            if hasattr(self.module, name):
                return float(getattr(self.module, name))
        raise AttributeError(f"{type(self.module).__name__} does not say its epsilon")

    def folded(self, vectors: Tensor) -> Tensor:
        """The linear part of the norm on `vectors` [n, d]: centred for a LayerNorm, times the gain; no bias."""
        if self.centres:
            vectors = vectors - vectors.mean(-1, keepdim=True)
        gain = self.gain
        return vectors if gain is None else vectors * gain.to(vectors.device)

    def by_formula(self, states: Tensor) -> Tensor:
        """The whole norm in plain arithmetic, at least float32."""
        states = at_least_float32(states)
        if self.centres:
            states = states - states.mean(-1, keepdim=True)
        states = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.epsilon)
        gain, bias = self.gain, self.bias
        states = states if gain is None else states * gain
        return states if bias is None else states + bias


def at_least_float32(tensor: Tensor) -> Tensor:
    """The same numbers in float32, or as they are where they are finer; no copy where none is needed."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
