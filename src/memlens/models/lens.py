"""Norms, the lens from states and values to vocabulary scores, and the cases of the paper's Figure 11.

A state (r or o) is read as the model reads it: final norm, output embedding E, bias. A value is a direction, not a
state, so only the linear part of this reading applies to it, without bias. The reading `folded` is (v * gain) E. If
there is a post-norm, its gain is applied to v first. If the final norm is a LayerNorm, v is then centered. The reading
`raw` is v E. The addition y of a block is a sum of values and is read like a value.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from memlens.errors import SettingError

NormKind = Literal["layer", "rms", "layer+1", "rms+1"]
"""The kind "layer" subtracts the mean and has a gain and a bias, "rms" has a gain only. With "+1", the gain is one plus
the stored weight (Nemotron, Gemma)."""


@dataclass(frozen=True, eq=False)
class Norm:
    """A normalization layer and the meaning of its stored weight."""

    module: nn.Module
    kind: NormKind
    stated_epsilon: float | None = None  # epsilon for modules that store none

    def __call__(self, states: Tensor) -> Tensor:
        output: Tensor = self.module(states)
        return output

    @property
    def centers(self) -> bool:
        """True if the norm subtracts the mean over the coordinates."""
        return self.kind.startswith("layer")

    @property
    def label(self) -> str:
        return "LayerNorm" if self.centers else "RMSNorm"

    @property
    def gain(self) -> Tensor | None:
        """The factor of each coordinate, [d], float32 or float64, or None if the norm has no gain."""
        weight: Tensor | None = getattr(self.module, "weight", None)
        if weight is None:
            return None
        gain = at_least_float32(weight.detach())
        return gain + 1 if self.kind.endswith("+1") else gain

    @property
    def bias(self) -> Tensor | None:
        """The bias, [d], float32 or float64, or None if the norm has none."""
        bias: Tensor | None = getattr(self.module, "bias", None)
        return None if bias is None else at_least_float32(bias.detach())

    @property
    def epsilon(self) -> float:
        if self.stated_epsilon is not None:
            return self.stated_epsilon
        for name in ("eps", "variance_epsilon", "epsilon", "norm_eps"):
            if isinstance(epsilon := getattr(self.module, name, None), float):
                return epsilon
        raise AttributeError(f"{type(self.module).__name__} stores no epsilon")

    def folded(self, vectors: Tensor) -> Tensor:
        """Apply the linear part of the norm to vectors [n, d]: centering for a LayerNorm, then the gain, no bias."""
        if self.centers:
            vectors = vectors - vectors.mean(-1, keepdim=True)
        gain = self.gain
        return vectors if gain is None else vectors * gain.to(vectors.device)

    def unfolded(self, vectors: Tensor) -> Tensor:
        """Divide vectors [n, d] by the gain. The result is 0 where the gain is 0."""
        gain = self.gain
        return vectors if gain is None else torch.where(gain == 0, 0, vectors / gain)

    def by_formula(self, states: Tensor) -> Tensor:
        """Compute the norm in plain arithmetic, in float32 or float64."""
        states = at_least_float32(states)
        if self.centers:
            states = states - states.mean(-1, keepdim=True)
        states = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.epsilon)
        gain, bias = self.gain, self.bias
        states = states if gain is None else states * gain
        return states if bias is None else states + bias


def at_least_float32(tensor: Tensor) -> Tensor:
    """Convert a tensor to float32 if its dtype has lower precision.

    Returns the same tensor if no conversion is needed.
    """
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def with_float64(device: torch.device) -> torch.device:
    """Return the device, or the CPU if the device has no float64."""
    return torch.device("cpu") if device.type == "mps" else device


def to_float64(tensor: Tensor) -> Tensor:
    """Convert to float64. A tensor on a device without float64 is copied to the CPU."""
    return tensor.to(with_float64(tensor.device)).double()


class Lens:
    """An output embedding after an optional final norm. Scores are float32 or float64."""

    def __init__(
        self,
        output: Any,  # the module whose weight is E; it may have a bias
        input_embedding: Any,  # the module whose weight is the input embedding
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
        self._state_scale = state_scale  # constants before and after the output embedding (MiniCPM, Granite)
        self._logit_scale = logit_scale
        self.soft_cap = soft_cap  # maps logits into (-cap, cap) before the softmax (Gemma 2)

    @property
    def modules(self) -> tuple[Any, Any]:
        """The modules of the output and of the input embedding."""
        return self._output, self._input_embedding

    @property
    def readings(self) -> tuple[str, ...]:
        """The supported readings of values, the default first."""
        return ("raw",) if self.final_norm is None else ("folded", "raw")

    @property
    def vocabulary(self) -> int:
        return self._output_weight.shape[0]

    @property
    def embedding(self) -> Tensor:
        """The output embedding E times the constants around it, [vocabulary, d], float32 or float64.

        It is a copy only if there is a constant or a conversion.
        """
        return self._scaled(at_least_float32(self._output_weight))

    @property
    def logit_is(self) -> str:
        """The meaning of a logit of this model, as a phrase for reports."""
        return "the model's own logit" + ("" if self.soft_cap is None else " before it is soft-capped")

    def logit_rows(self, tokens: Tensor) -> Tensor:
        """Return rows [n, d] whose product with a normalized state is the logit of each token [n], without the bias."""
        return self._scaled(at_least_float32(self._output_weight[tokens]))

    def _scaled(self, rows: Tensor) -> Tensor:
        factor = self._state_scale * self._logit_scale
        return rows if factor == 1 else rows * factor

    @property
    def bias(self) -> Tensor | None:
        """The output embedding's bias, [vocabulary], or None."""
        bias: Tensor | None = getattr(self._output, "bias", None)
        if bias is None:
            return None
        return bias.detach() if self._logit_scale == 1 else bias.detach() * self._logit_scale

    @property
    def input_embedding(self) -> Tensor:
        """The input embedding as stored, [tokens, d], float32 or float64."""
        weight: Tensor = self._input_embedding.weight.detach()
        return at_least_float32(weight)

    @property
    def tied(self) -> bool:
        """True if input and output embedding share one matrix."""
        return self._output_weight.data_ptr() == self._input_embedding.weight.data_ptr()

    @property
    def _output_weight(self) -> Tensor:
        weight: Tensor = self._output.weight.detach()
        return weight

    def folded(self, vectors: Tensor, layer: int, reading: str | None = None) -> Tensor:
        """Fold the norms into vectors [n, d] of a layer, in preparation for `folded_scores`."""
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
        """Return scores [n, vocabulary] of values [n, d] of a layer.

        The scores are written to `out` if the lens supports this.
        """
        return self.folded_scores(self.folded(values, layer, reading), out)

    def addition_scores(self, additions: Tensor, layer: int, reading: str | None = None) -> Tensor:
        """Return scores [n, vocabulary] of the addition y [n, d] of a layer, which is read like the layer's values."""
        reading = self.checked_reading(reading)
        additions = at_least_float32(additions)
        post_norm = self._post_norms[layer] if self._post_norms else None
        if reading == "raw":
            return self.folded_scores(additions if post_norm is None else post_norm.unfolded(additions))
        # y already includes the post-norm's gain
        return self.folded_scores(additions if self.final_norm is None else self.final_norm.folded(additions))

    def folded_scores(self, vectors: Tensor, out: Tensor | None = None) -> Tensor:
        """Return scores [n, vocabulary] of vectors [n, d] from `folded`. They are written to `out` if it is given.

        The vectors may come from several layers.
        """
        with torch.no_grad():
            return torch.matmul(vectors, self.embedding.T, out=out)

    def state_logits(self, states: Tensor, gradients: bool = False) -> Tensor:
        """Return the model's logits [..., vocabulary] for states [..., d], before soft-capping."""
        with torch.set_grad_enabled(gradients):
            # use the model's own dtype and norm module, so that the last state gives exactly the model's prediction
            states = states.to(self._output_weight.dtype)
            normed = states if self.final_norm is None else self.final_norm(states)
            normed = normed if self._state_scale == 1 else normed * self._state_scale
            logits = nn.functional.linear(normed, self._output_weight, getattr(self._output, "bias", None))
            return at_least_float32(logits if self._logit_scale == 1 else logits * self._logit_scale)

    def capped(self, logits: Tensor) -> Tensor:
        """Apply the model's soft cap to logits, if it has one."""
        return logits if self.soft_cap is None else torch.tanh(logits / self.soft_cap) * self.soft_cap

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the softmax of the logits, which are soft-capped first if the model has a soft cap."""
        return torch.softmax(self.capped(at_least_float32(logits)), dim=-1)

    def checked_reading(self, reading: str | None) -> str:
        """Return the reading, or the model's default reading if it is None.

        Raises:
            SettingError: The model does not support this reading.
        """
        if reading is None:
            return self.readings[0]
        if reading not in self.readings:
            raise SettingError(f"'{reading}' is not a reading of this model's values; use {' or '.join(self.readings)}")
        return reading


def split_cases(r: Any, y: Any, o: Any) -> dict[str, Any]:
    """Return {case: bool} for the top tokens of r, y and o (integers or arrays). Exactly one case is true."""
    return {
        "residual": (o == r) & (o != y),
        "ffn": (o == y) & (o != r),
        "agreement": (o == r) & (o == y),
        "composition": (o != r) & (o != y) & (r != y),
        "reversal": (o != r) & (r == y),
    }


def case_of(r: int, y: int, o: int) -> str:
    """Return the name of the case for the top tokens of r, y and o at one position."""
    return next(case for case, holds in split_cases(r, y, o).items() if holds)
