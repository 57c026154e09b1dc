"""Norms, the lens from states and values to vocabulary scores, and the cases of the paper's Fig 11.

A state (r or o) is read as the model itself reads it: final norm, output embedding E, its bias. A value is a direction,
not a state, so it is read through the linear part only: `folded` is (v * gain) E, v centred first where the final norm
is a LayerNorm, and a post-norm's gain folded in before that; `raw` is v E. No bias in either. y, what a block adds to
the stream, is a sum of values and is read as they are: where it is one value, its top token is that value's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from memlens.errors import SettingError

NormKind = Literal["layer", "rms", "layer+1", "rms+1"]
"""layer: centred, gain and bias; rms: gain only; +1: the gain is one plus the stored weight (Nemotron, Gemma)."""


@dataclass(frozen=True, eq=False)
class Norm:
    """One normalisation layer and how its stored weight is meant."""

    module: nn.Module
    kind: NormKind
    stated_epsilon: float | None = None  # of a module that keeps none

    def __call__(self, states: Tensor) -> Tensor:
        output: Tensor = self.module(states)
        return output

    @property
    def centres(self) -> bool:
        """Is the mean over the width taken off first?"""
        return self.kind.startswith("layer")

    @property
    def label(self) -> str:
        return "LayerNorm" if self.centres else "RMSNorm"

    @property
    def gain(self) -> Tensor | None:
        """The factor of each coordinate, [d], at least float32; None where the norm has no gain."""
        weight: Tensor | None = getattr(self.module, "weight", None)
        if weight is None:
            return None
        gain = at_least_float32(weight.detach())
        return gain + 1 if self.kind.endswith("+1") else gain

    @property
    def bias(self) -> Tensor | None:
        """The last summand, [d], at least float32; None where there is none."""
        bias: Tensor | None = getattr(self.module, "bias", None)
        return None if bias is None else at_least_float32(bias.detach())

    @property
    def epsilon(self) -> float:
        if self.stated_epsilon is not None:
            return self.stated_epsilon
        for name in ("eps", "variance_epsilon", "epsilon", "norm_eps"):
            if isinstance(epsilon := getattr(self.module, name, None), float):
                return epsilon
        raise AttributeError(f"{type(self.module).__name__} does not say its epsilon")

    def folded(self, vectors: Tensor) -> Tensor:
        """The linear part of the norm on `vectors` [n, d]: centred for a LayerNorm, times the gain; no bias."""
        if self.centres:
            vectors = vectors - vectors.mean(-1, keepdim=True)
        gain = self.gain
        return vectors if gain is None else vectors * gain.to(vectors.device)

    def unfolded(self, vectors: Tensor) -> Tensor:
        """`vectors` [n, d] with the gain taken out again; 0 where it was 0."""
        gain = self.gain
        return vectors if gain is None else torch.where(gain == 0, 0, vectors / gain)

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


class Lens:
    """A linear output embedding behind an optional final norm. Scores are float32 or finer."""

    def __init__(
        self,
        output: Any,  # the module with E as its weight and perhaps a bias
        input_embedding: Any,  # the module with the input embedding as its weight
        final_norm: Norm | None,
        post_norms: Sequence[Norm | None],
        soft_cap: float | None = None,
        state_scale: float = 1.0,
        logit_scale: float = 1.0,
        layer_scales: Sequence[float | Tensor | None] = (),
    ) -> None:
        self._output = output
        self._input_embedding = input_embedding
        self.final_norm = final_norm
        self._post_norms = tuple(post_norms)
        self._layer_scales = tuple(layer_scales) or (None,) * len(self._post_norms)
        self._state_scale = state_scale  # constants before and behind the output embedding, as in MiniCPM and Granite
        self._logit_scale = logit_scale
        self.soft_cap = soft_cap  # logits are squeezed into (-cap, cap) before the softmax, as in Gemma 2

    @property
    def readings(self) -> tuple[str, ...]:
        """The ways to read a value, the default first."""
        return ("raw",) if self.final_norm is None else ("folded", "raw")

    @property
    def vocabulary(self) -> int:
        return self._output_weight.shape[0]

    @property
    def embedding(self) -> Tensor:
        """E, the output embedding times its constants, [vocabulary, d], float32 or finer; a copy where it must be."""
        return self._scaled(at_least_float32(self._output_weight))

    @property
    def logit_is(self) -> str:
        """The meaning of a logit here, in words for people."""
        return "the model's own logit" + ("" if self.soft_cap is None else " before it is soft-capped")

    def logit_rows(self, tokens: Tensor) -> Tensor:
        """[n, d]: times a state behind the final norm, the logit of each token [n], but for the bias."""
        return self._scaled(at_least_float32(self._output_weight[tokens]))

    def _scaled(self, rows: Tensor) -> Tensor:
        factor = self._state_scale * self._logit_scale
        return rows if factor == 1 else rows * factor

    @property
    def bias(self) -> Tensor | None:
        """The output embedding's bias, [vocabulary]; None where there is none."""
        bias: Tensor | None = getattr(self._output, "bias", None)
        if bias is None:
            return None
        return bias.detach() if self._logit_scale == 1 else bias.detach() * self._logit_scale

    @property
    def input_embedding(self) -> Tensor:
        """The input embedding as stored, [tokens, d], float32 or finer."""
        weight: Tensor = self._input_embedding.weight.detach()
        return at_least_float32(weight)

    @property
    def tied(self) -> bool:
        """Are input and output embedding one matrix?"""
        return self._output_weight.data_ptr() == self._input_embedding.weight.data_ptr()

    @property
    def _output_weight(self) -> Tensor:
        weight: Tensor = self._output.weight.detach()
        return weight

    def folded(self, vectors: Tensor, layer: int, reading: str | None = None) -> Tensor:
        """The factor of E that reads `vectors` [n, d] of a layer, so that a caller may multiply in blocks."""
        reading = self.checked_reading(reading)
        vectors = at_least_float32(vectors)
        post_norm, scale = self._post_norms[layer], self._layer_scales[layer]
        if post_norm is not None and reading != "raw":
            vectors = post_norm.folded(vectors)
        if scale is not None:
            vectors = vectors * (scale.to(vectors) if isinstance(scale, Tensor) else scale)
        if reading == "raw":
            return vectors
        return vectors if self.final_norm is None else self.final_norm.folded(vectors)

    def value_scores(self, values: Tensor, layer: int, reading: str | None = None, out: Tensor | None = None) -> Tensor:
        """Scores [n, vocabulary] of values [n, d] of a layer; into `out` where that can be."""
        return self.folded_scores(self.folded(values, layer, reading), out)

    def addition_scores(self, additions: Tensor, layer: int, reading: str | None = None) -> Tensor:
        """Scores [n, vocabulary] of y [n, d], what the block of a layer adds to the stream, read as its values are."""
        reading = self.checked_reading(reading)
        additions = at_least_float32(additions)
        post_norm = self._post_norms[layer] if self._post_norms else None
        if reading == "raw":
            return self.folded_scores(additions if post_norm is None else post_norm.unfolded(additions))
        # the post-norm's gain is in y already
        return self.folded_scores(additions if self.final_norm is None else self.final_norm.folded(additions))

    def folded_scores(self, vectors: Tensor, out: Tensor | None = None) -> Tensor:
        """Scores [n, vocabulary] of what `folded` gave, [n, d], of any layers together; into `out` if given."""
        with torch.no_grad():
            return torch.matmul(vectors, self.embedding.T, out=out)

    def state_logits(self, states: Tensor, gradients: bool = False) -> Tensor:
        """The model's scores for states [n, d] (or [..., d]), before soft-capping: [n, vocabulary]."""
        with torch.set_grad_enabled(gradients):
            # in the model's own dtype and by its own modules, so that the last state gives exactly its own prediction
            states = states.to(self._output_weight.dtype)
            normed = states if self.final_norm is None else self.final_norm(states)
            normed = normed if self._state_scale == 1 else normed * self._state_scale
            logits = nn.functional.linear(normed, self._output_weight, getattr(self._output, "bias", None))
            return at_least_float32(logits if self._logit_scale == 1 else logits * self._logit_scale)

    def capped(self, logits: Tensor) -> Tensor:
        """Logits as the model hands them out: soft-capped where it does that."""
        return logits if self.soft_cap is None else torch.tanh(logits / self.soft_cap) * self.soft_cap

    def probabilities(self, logits: Tensor) -> Tensor:
        """Soft-capping where the model has it, then softmax."""
        return torch.softmax(self.capped(at_least_float32(logits)), dim=-1)

    def checked_reading(self, reading: str | None) -> str:
        """The reading asked for, or the default for None; refused where the model does not have it."""
        if reading is None:
            return self.readings[0]
        if reading not in self.readings:
            raise SettingError(
                f"'{reading}' is not a way to read values of this model; use {' or '.join(self.readings)}"
            )
        return reading


def split_cases(r: Any, y: Any, o: Any) -> dict[str, Any]:
    """The case that holds for the top tokens of r, y and o: tokens, or arrays of them. Exactly one always does."""
    return {
        "residual": (o == r) & (o != y),
        "ffn": (o == y) & (o != r),
        "agreement": (o == r) & (o == y),
        "composition": (o != r) & (o != y) & (r != y),
        "reversal": (o != r) & (r == y),
    }


def case_of(r: int, y: int, o: int) -> str:
    """The name of the case for one layer at one position."""
    return next(case for case, holds in split_cases(r, y, o).items() if holds)
