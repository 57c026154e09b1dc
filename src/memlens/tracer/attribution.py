"""Attribution: how much of a token's probability p each memory accounts for.

Silencing is exact. Set the coefficient of memory i to 0 and run the model again. Many copies of the prompt run as one
batch, each with a different memory silenced:

    effect_i = p - p(m_i = 0)

Integrated gradients give the effects of all memories of a layer at once (Sundararajan, Taly and Yan 2017,
https://arxiv.org/abs/1703.01365). The gradients are integrated along the straight path from 0 to the layer's
coefficients m:

    effect_i = sum over positions of  m_i * integral over a in [0, 1] of  dp/dm_i at a m

1. Take Gauss-Legendre nodes a_k and weights w_k. On a smooth path, they need far fewer steps than equidistant nodes.
2. Run the model with the layer's coefficients a_k m, and compute the gradient of p with respect to them.
3. Sum w_k m_i dp/dm_i.

The effects of a layer sum to p - p(all memories of the layer silenced), up to the error of the numeric integral. This
error is measured for every layer and reported as `gaps`. If a post-norm follows the block (Gemma 2, OLMo 2), almost all
of the change of p is close to a = 0, because the norm undoes the scaling. If the gap is large, take more steps or use
silence_each.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memlens.errors import SettingError
from memlens.memory import MemoryId
from memlens.models.groups import MemoryGroup
from memlens.models.hooks import Change
from memlens.models.lens import to_float64
from memlens.models.memory_model import MemoryModel
from memlens.text import plain
from memlens.tracer.intervention import check_layer, check_memory, memories_of
from memlens.tracer.prompt import Prompt, Source, check_count, check_number, open_model, read_prompt, read_token
from memlens.tracer.result import Token, attribution_html
from memlens.tracer.trace import check_finite

_BATCH_TOKENS = 2048
_BATCH_SCORES = 2**25  # maximum number of vocabulary scores in a batch, to limit memory use


@dataclass(frozen=True)
class Attribution:
    """Effects of memories on the probability of a token."""

    prompt: str
    token: Token
    p: float  # probability of the token without edits
    method: str  # "exact" or "integrated"
    effects: dict[MemoryId, float]  # the part of p that each memory accounts for
    gaps: dict[int, float] = field(default_factory=dict)  # for "integrated": layer -> sum of effects minus exact sum

    @property
    def gap(self) -> float:
        """The largest gap of any layer, with its sign, or 0 for "exact". Smaller effects are not reliable."""
        return max(self.gaps.values(), key=abs, default=0.0)

    def strongest(self, count: int = 10) -> list[tuple[MemoryId, float]]:
        """Return the `count` memories with the largest |effect|."""
        return sorted(self.effects.items(), key=lambda item: (-abs(item[1]), item[0]))[:count]

    def to_json(self) -> dict[str, Any]:
        """Return plain data for json.dumps."""
        effects = {str(memory): effect for memory, effect in self.strongest(len(self.effects))}
        return plain(self) | {"effects": effects, "gaps": {str(layer): gap for layer, gap in self.gaps.items()}}

    def __repr__(self) -> str:
        strongest = ", ".join(f"{memory} {effect:+.3g}" for memory, effect in self.strongest(3))
        method = f"{self.method}, gap {self.gap:+.2g}" if self.gaps else self.method
        return f"<Attribution ({method}) of {self.token.text!r}, p {self.p:.3g}: {strongest}, ...>"

    def _repr_html_(self) -> str:
        return attribution_html(self)


@dataclass(frozen=True, eq=False)
class Question:
    """A prompt up to the position of the prediction, the predicted token, and the positions to edit."""

    model: MemoryModel
    prompt: Prompt
    token: int
    fed: Tensor  # [1, pos], the model's input
    rows: Tensor  # [k]: indexes of the edited positions in `fed`
    p: float

    @classmethod
    def ask(
        cls, model: MemoryModel, prompt: str, token: str | int | None, position: int, positions: Sequence[int] | None
    ) -> "Question":
        """Check the arguments of `silence_each` and `integrate`, and run the prompt once without edits."""
        checked = read_prompt(model, prompt)
        place = checked.place(position)
        token_id = None if token is None else read_token(model, token)
        fed = checked.fed(place)
        edited = [] if positions is None else list(positions)
        indexes = range(fed.shape[1]) if positions is None else [checked.place(at) + checked.shift for at in edited]
        rows = torch.tensor([row for row in indexes if row < fed.shape[1]], device=model.device, dtype=torch.int64)
        if not len(rows):
            problem = (
                f"positions {edited} all come after position {place}" if edited else "the list of positions is empty"
            )
            raise SettingError(f"{problem}, so the prediction cannot change; use positions up to {place}")
        p = probabilities(model, fed)[0]
        answer = int(p.argmax()) if token_id is None else token_id
        return cls(model, checked, answer, fed, rows, float(p[answer]))

    def prompts_at_once(self, batch_tokens: int) -> int:
        """Return how many copies of the prompt run as one batch."""
        return max(1, min(batch_tokens // self.fed.shape[1], _BATCH_SCORES // self.model.vocabulary))

    def attribution(
        self, method: str, effects: dict[MemoryId, float], gaps: dict[int, float] | None = None
    ) -> Attribution:
        """Return an Attribution of this prompt and token with these effects."""
        token = Token(self.token, self.model.tokenizer.token_text(self.token))
        return Attribution(self.prompt.text, token, self.p, method, effects, gaps or {})


def probabilities(model: MemoryModel, tokens: Tensor, gradients: bool = False) -> Tensor:
    """Return p [batch, vocabulary] of the token that follows tokens [batch, pos]."""
    last = model.run_body(tokens, gradients)[:, -1]
    with torch.set_grad_enabled(gradients):
        p = model.lens.probabilities(model.lens.state_logits(last, gradients))
    check_finite(model, p)
    return p


def silence_each(
    model: Source,
    prompt: str,
    memories: str | MemoryId | Iterable[str | MemoryId] | None = None,
    *,
    layers: Sequence[int] | None = None,
    token: str | int | None = None,
    position: int = -1,
    positions: Sequence[int] | None = None,
    batch_tokens: int = _BATCH_TOKENS,
) -> Attribution:
    """Silence memories one at a time and return the exact effect of each on the probability of a token.

    Args:
        model: A model, an argument of `load`, or an index.
        prompt: The text.
        memories: Names of memories; None for every memory of `layers`.
        layers: Whole layers instead of memories. None for all layers.
        token: The token whose probability is measured. None for the predicted token.
        position: The position whose prediction is measured.
        positions: The positions at which memories are silenced. None for all positions, including BOS.
        batch_tokens: Maximum number of tokens per forward pass.

    Returns:
        The effects by memory.

    Raises:
        SettingError: The prompt, a position or a count is not valid, or both memories and layers are given.
        UnknownName: The model does not have a named memory, layer or token.

    Example:
        >>> len(memlens.silence_each(model, "The river runs", ["L1N7", "L1N8"]).strongest(1))
        1
    """
    check_count(batch_tokens, "batch_tokens")
    loaded, _ = open_model(model)
    selected = _select_memories(loaded, memories, layers)
    question = Question.ask(loaded, prompt, token, position, positions)
    batch_size = question.prompts_at_once(batch_tokens)
    effects: dict[MemoryId, float] = {}
    for first in range(0, len(selected), batch_size):
        batch = selected[first : first + batch_size]
        with loaded.edit(silence_one_per_line(batch, question.rows)):
            p = probabilities(loaded, question.fed.expand(len(batch), -1))[:, question.token]
        effects.update(zip(batch, (question.p - to_float64(p)).tolist(), strict=True))
    return question.attribution("exact", effects)


def _select_layers(model: MemoryModel, layers: Sequence[int] | None) -> list[int]:
    numbers = range(len(model.layers)) if layers is None else [int(layer) for layer in layers]
    if not numbers:
        raise SettingError("the list of layers is empty; name at least one layer, or leave it out for all layers")
    for layer in numbers:
        check_layer(model, layer)
    return sorted(set(numbers))


def _select_memories(
    model: MemoryModel, memories: str | MemoryId | Iterable[str | MemoryId] | None, layers: Sequence[int] | None
) -> list[MemoryId]:
    if memories is None:
        layers = _select_layers(model, layers)
        return [model.names.name(layer, number) for layer in layers for number in range(model.layers[layer].memories)]
    if layers is not None:
        raise SettingError("both memories and layers are given; use only one of them")
    names = sorted(set(memories_of(memories)))
    if not names:
        raise SettingError("the list of memories is empty; name at least one memory, or leave it out for all memories")
    for memory in names:
        check_memory(model, memory)
    return names


def silence_one_per_line(memories: list[MemoryId], rows: Tensor) -> dict[int, Change]:
    """Return changes that silence memory i in prompt i of the batch."""

    def change(m: Tensor, group: MemoryGroup, layer: int) -> Tensor:  # [batch, pos, size]
        lines = [line for line, memory in enumerate(memories) if memory.layer == layer and group.holds(memory)]
        if not lines:
            return m
        m = m.clone()
        columns = torch.tensor([memories[line].memory for line in lines], device=m.device)
        m[torch.tensor(lines, device=m.device)[:, None], rows, columns[:, None]] = 0
        return m

    return {layer: partial(change, layer=layer) for layer in {memory.layer for memory in memories}}


_MOST_STEPS = 1000  # limit of `steps`, because n nodes are computed from an n x n matrix
_INTEGRATED_BATCH_TOKENS = 1024  # smaller than _BATCH_TOKENS, because a backward pass keeps all activations


def integrate(
    model: Source,
    prompt: str,
    *,
    layers: Sequence[int] | None = None,
    token: str | int | None = None,
    position: int = -1,
    positions: Sequence[int] | None = None,
    steps: int = 20,
    batch_tokens: int = _INTEGRATED_BATCH_TOKENS,
) -> Attribution:
    """Return the effect of every memory of some layers on the probability of a token, by integrated gradients.

    Args:
        model: A model, an argument of `load`, or an index.
        prompt: The text.
        layers: The layers. None for all layers.
        token: The token whose probability is measured. None for the predicted token.
        position: The position whose prediction is measured.
        positions: The positions whose coefficients are scaled from 0 to m. None for all positions, including BOS.
        steps: Number of nodes of the integral. More steps make `gaps` smaller.
        batch_tokens: Maximum number of tokens per forward pass.

    Returns:
        The effects by memory, with the gap to their exact sum.

    Raises:
        SettingError: The prompt, a position or a count is not valid.
        UnknownName: The model does not have a named layer or token.

    Example:
        >>> len(memlens.integrate(model, "The river runs", layers=[1], steps=4).effects)
        40
    """
    if check_count(steps, "steps") > _MOST_STEPS:
        raise SettingError(f"steps is {steps}; it must be at most {_MOST_STEPS}")
    check_count(batch_tokens, "batch_tokens")
    loaded, _ = open_model(model)
    selected = _select_layers(loaded, layers)
    question = Question.ask(loaded, prompt, token, position, positions)
    with loaded.record(selected, states=False) as recording:
        loaded.run_body(question.fed)
    effects: dict[MemoryId, float] = {}
    gaps: dict[int, float] = {}
    for layer in selected:
        amounts = _integrate_layer(question, layer, recording.coefficients[layer], steps, batch_tokens)
        effects.update((loaded.names.name(layer, number), amount) for number, amount in enumerate(amounts.tolist()))
        gaps[layer] = float(amounts.sum()) - _effect_of_layer(question, layer)
    return question.attribution("integrated", effects, gaps)


def _effect_of_layer(question: Question, layer: int) -> float:
    """Return the exact sum of the layer's effects, p - p(all memories of the layer silenced)."""

    def silence(m: Tensor, _group: MemoryGroup) -> Tensor:  # [1, pos, size]
        m = m.clone()
        m[:, question.rows] = 0
        return m

    with question.model.edit({layer: silence}):
        return question.p - float(probabilities(question.model, question.fed)[0, question.token])


def _integrate_layer(question: Question, layer: int, m: Tensor, steps: int, batch_tokens: int) -> Tensor:
    """Return the effects [memories] (float64) of a layer with coefficients m [1, pos, memories]."""
    nodes, weights = np.polynomial.legendre.leggauss(steps)
    shares = torch.from_numpy((nodes + 1) / 2).to(m.device, m.dtype)
    batch_size = question.prompts_at_once(batch_tokens)
    total = torch.zeros(m.shape[2], dtype=torch.float64)
    for first in range(0, steps, batch_size):
        nodes_of_batch = slice(first, first + batch_size)
        gradient = _gradient(question, layer, m, shares[nodes_of_batch])[:, question.rows].cpu().double()
        weight = torch.from_numpy(weights[nodes_of_batch] / 2)[:, None, None]
        total += (gradient * weight * m[:, question.rows].cpu().double()).sum((0, 1))
    return total


def _gradient(question: Question, layer: int, m: Tensor, shares: Tensor) -> Tensor:
    """Return dp/dm [steps, pos, memories] at `shares` times m. Only the edited positions are scaled."""
    path = m.repeat(len(shares), 1, 1)
    path[:, question.rows] = m[:, question.rows] * shares[:, None, None]
    path.requires_grad_()
    with question.model.edit({layer: lambda _m, group: path[..., group.columns]}):
        p = probabilities(question.model, question.fed.expand(len(shares), -1), gradients=True)
    # autograd.grad with respect to the path leaves the gradients of the model's parameters unchanged
    (gradient,) = torch.autograd.grad(p[:, question.token].sum(), path)
    return gradient


@dataclass(frozen=True)
class CommonMemory:
    """A memory that supports the prediction of several prompts."""

    memory: MemoryId
    prompts: int  # number of prompts in which the memory matters (see in_common)
    effect: float  # mean effect over all prompts


def in_common(
    attributions: Attribution | Sequence[Attribution], *, threshold: float = 0.2, share: float = 0.7
) -> list[CommonMemory]:
    """Return the memories that matter in several prompts, sorted by number of prompts, then by effect.

    A memory matters in a prompt if its effect is positive and at least `threshold` times the largest effect.

    Args:
        attributions: Results of `silence_each` or `integrate`, one per prompt.
        threshold: Smallest effect that matters, relative to the largest effect in the same prompt.
        share: Share of the prompts in which a memory must matter.

    Returns:
        The memories with the number of prompts and their effects.

    Raises:
        SettingError: A threshold is not in (0, 1], or the attributions differ in token, method or memories.

    Example:
        >>> prompts = ["The river runs", "A river runs"]
        >>> attributions = [memlens.silence_each(model, prompt, layers=[1], token=5) for prompt in prompts]
        >>> all(memory.memory.layer == 1 for memory in memlens.in_common(attributions))
        True
    """
    several = [attributions] if isinstance(attributions, Attribution) else list(attributions)
    for name, value in (("threshold", threshold), ("share", share)):
        if not 0 < check_number(value, name) <= 1:
            raise SettingError(f"{name} is {value}; it must be above 0 and at most 1")
    _check_comparable(several)
    counts: dict[MemoryId, int] = {}
    for attribution in several:
        bar = threshold * max(attribution.effects.values(), default=0.0)
        for memory, effect in attribution.effects.items():
            if effect > 0 and effect >= bar:
                counts[memory] = counts.get(memory, 0) + 1
    common = [
        CommonMemory(memory, count, sum(attribution.effects.get(memory, 0.0) for attribution in several) / len(several))
        for memory, count in counts.items()
        if count / len(several) >= share  # `count >= share * n` would fail, because 0.28 * 25 is slightly above 7
    ]
    return sorted(common, key=lambda memory: (-memory.prompts, -memory.effect, memory.memory))


def _check_comparable(attributions: list[Attribution]) -> None:
    """Raise SettingError if there are no attributions, or if they differ in method, token or memories."""
    if not attributions:
        raise SettingError("no attributions are given; give one for each prompt")
    first = attributions[0]
    for other in attributions[1:]:
        if other.method != first.method:
            raise SettingError("exact and integrated attributions cannot be compared; use one method for all prompts")
        if other.token.id != first.token.id:
            tokens = f"{first.token.text!r} and {other.token.text!r}"
            raise SettingError(
                f"the attributions follow different tokens ({tokens}); pass the same token= for every prompt"
            )
        if other.effects.keys() != first.effects.keys():
            raise SettingError(
                "the attributions cover different memories; use the same layers or memories for all prompts"
            )
