"""Attribution: how much of a token's probability p each memory accounts for.

Silencing (exact). Memory i is set to 0 and the model run again; many copies of the prompt run as one batch, each with
another memory silenced:

    effect_i = p - p(m_i = 0)

Integrated gradients (all memories of a layer at once; Sundararajan, Taly and Yan 2017, https://arxiv.org/abs/1703.01365)
along the layer's coefficients m, from 0 to what they are:

    effect_i = sum over positions of  m_i * integral over a in [0, 1] of  dp/dm_i at a m

1. Take Gauss-Legendre nodes a_k and weights w_k: for a smooth path they need far fewer steps than equal ones.
2. Run the model with the layer's coefficients a_k m, and take the gradient of p by them.
3. Sum w_k m_i dp/dm_i.

By completeness the effects of a layer sum to p - p(all of the layer's memories silenced), but for the number of steps.
The difference is measured and reported for every layer, as `gaps`. Behind a post-norm (Gemma 2, OLMo 2) nearly all of
the path happens close to 0, since the norm undoes the scaling: where the gap is large, take many steps or silence_each.
"""

from collections.abc import Iterable, Iterator, Sequence
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
from memlens.models.memory_model import MemoryModel
from memlens.text import plain
from memlens.tracer.intervention import check_layer, check_memory, memories_of
from memlens.tracer.prompt import Prompt, Source, check_count, check_number, open_model, read_prompt, read_token
from memlens.tracer.result import Token, attribution_html
from memlens.tracer.trace import refuse_overflow

_BATCH_TOKENS = 2048
_BATCH_SCORES = 2**25  # each prompt of a batch is scored over the whole vocabulary; more of them would be gigabytes


@dataclass(frozen=True)
class Attribution:
    """The effect of each of some memories on a token's probability."""

    prompt: str
    token: Token
    p: float  # of the token, with all memories as they are
    method: str  # "exact" or "integrated"
    effects: dict[MemoryId, float]  # p that is owed to each memory
    gaps: dict[int, float] = field(default_factory=dict)  # of "integrated": layer -> effects less what they must sum to

    @property
    def gap(self) -> float:
        """The largest gap of a layer, sign kept; 0 for "exact". Beside it smaller effects mean nothing."""
        return max(self.gaps.values(), key=abs, default=0.0)

    def strongest(self, count: int = 10) -> list[tuple[MemoryId, float]]:
        """The memories that change the answer most, of either sign."""
        return sorted(self.effects.items(), key=lambda item: (-abs(item[1]), item[0]))[:count]

    def to_json(self) -> dict[str, Any]:
        effects = {str(memory): effect for memory, effect in self.strongest(len(self.effects))}
        return plain(self) | {"effects": effects, "gaps": {str(layer): gap for layer, gap in self.gaps.items()}}

    def __repr__(self) -> str:
        shown = ", ".join(f"{memory} {effect:+.3g}" for memory, effect in self.strongest(3))
        how = f"{self.method}, gap {self.gap:+.2g}" if self.gaps else self.method
        return f"<Attribution ({how}) of {self.token.text!r}, p {self.p:.3g}: {shown}, ...>"

    def _repr_html_(self) -> str:
        return attribution_html(self)


@dataclass(frozen=True, eq=False)
class Question:
    """A prompt up to the position where the answer is read, the answer's token, and where memories are changed."""

    model: MemoryModel
    prompt: Prompt
    token: int
    fed: Tensor  # [1, pos]
    rows: Tensor  # [k] positions in what is fed
    p: float

    @classmethod
    def ask(
        cls, model: MemoryModel, prompt: str, token: str | int | None, position: int, positions: Sequence[int] | None
    ) -> "Question":
        read = read_prompt(model, prompt)
        place = read.place(position)
        chosen = None if token is None else read_token(model, token)
        fed = read.fed(place)
        at = [] if positions is None else list(positions)
        places = range(fed.shape[1]) if positions is None else [read.place(position) + read.shift for position in at]
        rows = torch.tensor([row for row in places if row < fed.shape[1]], device=model.device, dtype=torch.int64)
        if not len(rows):
            where = "no positions are given" if not at else f"positions {at} all lie behind position {place}"
            raise SettingError(f"{where}; none has an effect")
        p = probabilities(model, fed)[0]
        answer = int(p.argmax()) if chosen is None else chosen
        return cls(model, read, answer, fed, rows, float(p[answer]))

    def prompts_at_once(self, batch_tokens: int) -> int:
        """Copies of the prompt that run as one batch."""
        return max(1, min(batch_tokens // self.fed.shape[1], _BATCH_SCORES // self.model.vocabulary))

    def attribution(
        self, method: str, effects: dict[MemoryId, float], gaps: dict[int, float] | None = None
    ) -> Attribution:
        token = Token(self.token, self.model.tokenizer.token_text(self.token))
        return Attribution(self.prompt.text, token, self.p, method, effects, gaps or {})


def probabilities(model: MemoryModel, tokens: Tensor, gradients: bool = False) -> Tensor:
    """p [batch, vocabulary] after the last of tokens [batch, pos]."""
    last = model.run_body(tokens, gradients)[:, -1]
    with torch.set_grad_enabled(gradients):
        p = model.lens.probabilities(model.lens.state_logits(last, gradients))
    refuse_overflow(model, p)
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
    """The exact effect of silencing each of some memories, or each memory of some layers (None: of all).

        memlens.silence_each("gpt2", "The capital of France is", layers=[9, 10]).strongest(5)

    `position`: where the answer is read; `positions`: where memories are silenced (None: everywhere, BOS included).
    """
    check_count(batch_tokens, "tokens are no batch")
    loaded, _ = open_model(model)
    chosen = _chosen_memories(loaded, memories, layers)
    question = Question.ask(loaded, prompt, token, position, positions)
    a_batch = question.prompts_at_once(batch_tokens)
    effects: dict[MemoryId, float] = {}
    for first in range(0, len(chosen), a_batch):
        part = chosen[first : first + a_batch]
        with loaded.edit(_each_by_itself(part, question.rows)):
            p = probabilities(loaded, question.fed.expand(len(part), -1))[:, question.token]
        effects.update(zip(part, (question.p - p.double()).tolist(), strict=True))
    return question.attribution("exact", effects)


def _layers_of(model: MemoryModel, layers: Sequence[int] | None) -> list[int]:
    named = range(len(model.layers)) if layers is None else [int(layer) for layer in layers]
    if not named:
        raise SettingError("no layers are named, so there is nothing to look at; name some, or leave it out for all")
    for layer in named:
        check_layer(model, layer)
    return sorted(set(named))


def _chosen_memories(
    model: MemoryModel, memories: str | MemoryId | Iterable[str | MemoryId] | None, layers: Sequence[int] | None
) -> list[MemoryId]:
    if memories is None:
        chosen = _layers_of(model, layers)
        return [model.names.name(layer, number) for layer in chosen for number in range(model.layers[layer].memories)]
    if layers is not None:
        raise SettingError("memories and layers are both given; name either the memories or whole layers")
    named = sorted(set(memories_of(memories)))
    if not named:
        raise SettingError("no memories are named, so none can be silenced; name some, or leave it out for all")
    for memory in named:
        check_memory(model, memory)
    return named


def _each_by_itself(memories: list[MemoryId], rows: Tensor) -> dict[int, Change]:
    """Silence memory i in line i of the batch."""

    def change(m: Tensor, group: MemoryGroup, layer: int) -> Tensor:  # [batch, pos, size]
        lines = [line for line, memory in enumerate(memories) if memory.layer == layer and group.holds(memory)]
        if not lines:
            return m
        m = m.clone()
        columns = torch.tensor([memories[line].memory for line in lines], device=m.device)
        m[torch.tensor(lines, device=m.device)[:, None], rows, columns[:, None]] = 0
        return m

    return {layer: partial(change, layer=layer) for layer in {memory.layer for memory in memories}}


_MOST_STEPS = 1000  # finding the points of n steps takes n x n numbers
_INTEGRATED_BATCH_TOKENS = 1024  # a backward pass keeps all that it needs, so fewer than in a forward pass


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
    """The effect of every memory of some layers (None: all) on the answer's probability.

        memlens.integrate("gpt2", "The capital of France is").gap

    `position`: where the answer is read; `positions`: where coefficients are followed (None: everywhere, BOS included).
    """
    if check_count(steps, "steps cannot be integrated over") > _MOST_STEPS:
        raise SettingError(f"{steps} steps are more than {_MOST_STEPS}; take fewer, or silence_each")
    check_count(batch_tokens, "tokens are no batch")
    loaded, _ = open_model(model)
    chosen = _layers_of(loaded, layers)
    question = Question.ask(loaded, prompt, token, position, positions)
    with loaded.record(chosen, states=False) as recording:
        loaded.run_body(question.fed)
    effects: dict[MemoryId, float] = {}
    gaps: dict[int, float] = {}
    for layer in chosen:
        amounts = _integrate_layer(question, layer, recording.coefficients[layer], steps, batch_tokens)
        effects.update((loaded.names.name(layer, number), amount) for number, amount in enumerate(amounts.tolist()))
        gaps[layer] = float(amounts.sum()) - _effect_of_layer(question, layer)
    return question.attribution("integrated", effects, gaps)


def _effect_of_layer(question: Question, layer: int) -> float:
    """p - p with the layer's memories silenced at the chosen positions: what its effects must add up to."""

    def silence(m: Tensor, _group: MemoryGroup) -> Tensor:  # [1, pos, size]
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
    with question.model.edit({layer: lambda _own, group: path[..., group.columns]}):
        p = probabilities(question.model, question.fed.expand(len(shares), -1), gradients=True)
    # only the path is differentiated: the model's parameters get no gradients
    (gradient,) = torch.autograd.grad(p[:, question.token].sum(), path)
    return gradient


@dataclass(frozen=True)
class CommonMemory:
    """A memory that counts in many of the prompts."""

    memory: MemoryId
    prompts: int  # in how many it counts
    effect: float  # mean over all prompts


def in_common(
    attributions: Attribution | Sequence[Attribution], *, threshold: float = 0.2, share: float = 0.7
) -> list[CommonMemory]:
    """Memories that count in at least `share` of the prompts, those in most prompts first, then by effect.

        memlens.in_common([memlens.integrate(model, prompt, token=" Paris") for prompt in paraphrases])

    A memory counts in a prompt if its effect there is at least `threshold` of the largest of that prompt. Only memories
    that support the answer count; a prompt in which none does has none.
    """
    several = [attributions] if isinstance(attributions, Attribution) else list(attributions)
    for name, value in (("threshold", threshold), ("share", share)):
        if not 0 < check_number(value, name) <= 1:
            raise SettingError(f"{name} is {value}; it must be above 0 and at most 1")
    for problem in _differences(several):
        raise SettingError(problem)
    counts: dict[MemoryId, int] = {}
    for attribution in several:
        bar = threshold * max(attribution.effects.values(), default=0.0)
        for memory, effect in attribution.effects.items():
            if effect > 0 and effect >= bar:
                counts[memory] = counts.get(memory, 0) + 1
    common = [
        CommonMemory(memory, count, sum(attribution.effects.get(memory, 0.0) for attribution in several) / len(several))
        for memory, count in counts.items()
        if count / len(several) >= share  # as a product 0.28 * 25 would be a little more than 7
    ]
    return sorted(common, key=lambda memory: (-memory.prompts, -memory.effect, memory.memory))


def _differences(attributions: list[Attribution]) -> Iterator[str]:
    """The reason why attributions cannot be compared: effects on other tokens, of other memories, by another method."""
    if not attributions:
        yield "no attributions were given; make one for each paraphrase"
    first = attributions[0]
    for other in attributions[1:]:
        if other.method != first.method:
            yield "exact and integrated attributions cannot be compared; use one method for all prompts"
        if other.token.id != first.token.id:
            asked = f"{first.token.text!r}, another for {other.token.text!r}"
            yield f"one prompt was asked for {asked}; give all one token="
        if other.effects.keys() != first.effects.keys():
            yield "the attributions are of different memories; use the same layers or memories for all"
