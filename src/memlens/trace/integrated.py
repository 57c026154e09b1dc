"""Which memories an answer hangs on, all at once: integrated gradients along the coefficients.

The coefficients of one layer go from 0 to what they are, and the gradient of the answer's probability is added up on
the way: effect_i = sum over positions of m_i * integral of dp/dm_i at a * m for a from 0 to 1. Layer by layer the
effects add up to p - p with that layer's memories silenced, exactly but for the number of steps. What they fall short
or go beyond is measured and reported for every layer, as `gaps`. The integral is taken at Gauss-Legendre points, which
for a smooth path need far fewer steps than equal ones. Behind a post-norm (Gemma 2, OLMo 2) nearly all of it happens
close to 0, since the norm undoes the scaling: where the gap is large, take many steps or silence_each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from memlens.errors import SettingError
from memlens.memory import MemoryId
from memlens.trace.attribution import Attribution, Question, chosen_layers, probabilities
from memlens.trace.edits import short
from memlens.trace.opening import Source, open_model
from memlens.trace.prompt import check_count

_MOST_STEPS = 1000  # finding the points of n steps takes n x n numbers
_BATCH_TOKENS = 1024  # a backward pass keeps all that it needs, so fewer than in a forward pass


def integrate(
    model: Source,
    prompt: str,
    *,
    layers: Sequence[int] | None = None,
    token: str | int | None = None,
    position: int = -1,
    positions: Sequence[int] | None = None,
    steps: int = 20,
    batch_tokens: int = _BATCH_TOKENS,
) -> Attribution:
    """The effect of every memory of some layers (None: all) on the answer's probability.

        memlens.integrate("gpt2", "The capital of France is").gap

    `position`: where the answer is read; `positions`: where coefficients are followed (None: everywhere, BOS included).
    """
    if check_count(steps, "steps cannot be integrated over") > _MOST_STEPS:
        raise SettingError(f"{short(steps)} steps are more than {_MOST_STEPS}; take fewer, or silence_each")
    check_count(batch_tokens, "tokens are no batch")
    loaded, _ = open_model(model)
    own = chosen_layers(loaded, layers)
    question = Question.ask(loaded, prompt, token, position, positions)
    with loaded.record(own, states=False) as recording:
        loaded.run_body(question.fed)
    effects: dict[MemoryId, float] = {}
    gaps: dict[int, float] = {}
    for layer in own:
        amounts = _integrate_layer(question, layer, recording.coefficients[layer], steps, batch_tokens)
        effects.update((MemoryId(layer, memory), amount) for memory, amount in enumerate(amounts.tolist()))
        gaps[layer] = float(amounts.sum()) - _owed_to_layer(question, layer)
    return question.attribution("integrated", effects, gaps)


def _owed_to_layer(question: Question, layer: int) -> float:
    """p - p with the layer's memories silenced at the chosen positions: what its effects must add up to."""

    def silence(m: Tensor) -> Tensor:  # [1, pos, memories]
        m = m.clone()
        m[:, question.rows] = 0
        return m

    with question.model.edit({layer: silence}):
        return question.p - float(probabilities(question.model, question.fed)[0, question.token])


def _integrate_layer(question: Question, layer: int, m: Tensor, steps: int, batch_tokens: int) -> Tensor:
    """[memories] float64, for the layer's own coefficients m [1, pos, memories]."""
    nodes, weights = np.polynomial.legendre.leggauss(steps)
    shares = torch.from_numpy((nodes + 1) / 2).to(m.device, m.dtype)
    a_batch = question.prompts_at_once(batch_tokens)
    total = torch.zeros(m.shape[2], dtype=torch.float64)
    for first in range(0, steps, a_batch):
        part = slice(first, first + a_batch)
        gradient = _gradient(question, layer, m, shares[part])[:, question.rows].cpu().double()
        weight = torch.from_numpy(weights[part] / 2)[:, None, None]
        total += (gradient * weight * m[:, question.rows].cpu().double()).sum((0, 1))
    return total


def _gradient(question: Question, layer: int, m: Tensor, shares: Tensor) -> Tensor:
    """dp/dm [steps, pos, memories] at each share of m, at the chosen positions; elsewhere m stays as it is."""
    path = m.repeat(len(shares), 1, 1)
    path[:, question.rows] = m[:, question.rows] * shares[:, None, None]
    path.requires_grad_()
    with question.model.edit({layer: lambda _own: path}):
        p = probabilities(question.model, question.fed.expand(len(shares), -1), gradients=True)
    # only the path is differentiated: the model's parameters get no gradients
    (gradient,) = torch.autograd.grad(p[:, question.token].sum(), path)
    return gradient
