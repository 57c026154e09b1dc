"""From a state or a value to scores over the vocabulary.

A state (r, y or o) is read as the model itself would read it: final norm, output embedding E, its bias. A value is a
direction, not a state, so it is read through the linear part only: `folded` is (v * gain) E, v centred first where the
final norm is a LayerNorm, and a post-norm's gain folded in before that; `raw` is v E. No bias in either.
The lens knows neither tokens' texts nor memories.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from memlens.errors import SettingError
from memlens.models.norm import Norm, at_least_float32


class Lens:
    """A linear output embedding behind an optional final norm. Scores are float32 or finer."""

    def __init__(
        self,
        output: Any,  # the module with E as its weight and perhaps a bias
        input_embedding: Any,  # the module with the input embedding as its weight
        final_norm: Norm | None,
        post_norms: Sequence[Norm | None],
        soft_cap: float | None = None,
    ) -> None:
        self._output = output
        self._input_embedding = input_embedding
        self.final_norm = final_norm
        self._post_norms = tuple(post_norms)
        self.soft_cap = soft_cap  # logits are squeezed into (-cap, cap) before the softmax, as in Gemma 2

    @property
    def readings(self) -> tuple[str, ...]:
        """How a value can be read, the default first."""
        return ("raw",) if self.final_norm is None else ("folded", "raw")

    @property
    def vocabulary(self) -> int:
        return self._output_weight.shape[0]

    @property
    def embedding(self) -> Tensor:
        """E, the output embedding, [vocabulary, d], float32 or finer (a copy where the model is coarser)."""
        return at_least_float32(self._output_weight)

    @property
    def logit_is(self) -> str:
        """What is called a logit here, in words for people."""
        return "the model's own logit" + ("" if self.soft_cap is None else " before it is soft-capped")

    def logit_rows(self, tokens: Tensor) -> Tensor:
        """[n, d]: times a state behind the final norm, the logit of each token [n], but for the bias."""
        return at_least_float32(self._output_weight[tokens])

    @property
    def bias(self) -> Tensor | None:
        """The output embedding's bias, [vocabulary]; None where there is none."""
        bias: Tensor | None = getattr(self._output, "bias", None)
        return None if bias is None else bias.detach()

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
        """What is multiplied with E to read `vectors` [n, d] of a layer, so that a caller may do that in blocks."""
        reading = self.checked_reading(reading)
        vectors = at_least_float32(vectors)
        if reading == "raw":
            return vectors
        post_norm = self._post_norms[layer]
        if post_norm is not None:
            vectors = post_norm.folded(vectors)
        return vectors if self.final_norm is None else self.final_norm.folded(vectors)

    def value_scores(self, values: Tensor, layer: int, reading: str | None = None, out: Tensor | None = None) -> Tensor:
        """Scores [n, vocabulary] of values [n, d] of a layer; into `out` where that can be."""
        return self.folded_scores(self.folded(values, layer, reading), out)

    def folded_scores(self, vectors: Tensor, out: Tensor | None = None) -> Tensor:
        """Scores [n, vocabulary] of what `folded` gave, [n, d], of any layers together; into `out` if given."""
        with torch.no_grad():
            return torch.matmul(vectors, self.embedding.T, out=out)

    def state_logits(self, states: Tensor, gradients: bool = False) -> Tensor:
        """What the model would score from states [n, d] (or [..., d]), before soft-capping: [n, vocabulary]."""
        with torch.set_grad_enabled(gradients):
            # in the model's own dtype and by its own modules, so that the last state gives exactly its own prediction
            states = states.to(self._output_weight.dtype)
            normed = states if self.final_norm is None else self.final_norm(states)
            return at_least_float32(nn.functional.linear(normed, self._output_weight, self.bias))

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
