"""Running a model with edited coefficients: traces before and after, continuations, groups of memories to edit.

Positions of an intervention are those of one prompt; in what is fed they lie behind BOS.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memlens.errors import SettingError, UnknownName
from memlens.index.reader import Index, open_index
from memlens.index.search import SearchQuery, ValueHit, search_values
from memlens.memory import ExpertId, MemoryId
from memlens.models.groups import MemoryGroup
from memlens.models.memory_model import MemoryModel
from memlens.text import plain
from memlens.tracer.intervention import Edit, Intervention
from memlens.tracer.prompt import (
    Prompt,
    Source,
    check_count,
    check_number,
    check_top,
    open_model,
    read_prompt,
    read_token,
)
from memlens.tracer.result import InterventionEffect, TokenShare
from memlens.tracer.trace import TracedPrompt, divergence, log_probabilities

_LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True, eq=False)
class _GroupEdit:
    """One edit in one group of memories."""

    memories: Tensor | None  # [k], counted within the group; None for all
    rows: tuple[int, ...] | None  # positions in what is fed; None for all
    coefficient: float | None
    factor: float | None

    def apply_(self, m: Tensor) -> None:
        """Change m [batch, pos, size] in place."""
        fed = m.shape[1]
        # a pass may end before a position: causal attention makes the two the same
        places = range(fed) if self.rows is None else [row for row in self.rows if row < fed]
        rows = torch.tensor(list(places), device=m.device, dtype=torch.int64)[:, None]
        columns = torch.arange(m.shape[2], device=m.device) if self.memories is None else self.memories
        if self.factor is not None:
            m[:, rows, columns] = m[:, rows, columns] * self.factor
        else:
            m[:, rows, columns] = 0.0 if self.coefficient is None else self.coefficient


def apply_edits(model: MemoryModel, intervention: Intervention, prompt: Prompt) -> AbstractContextManager[None]:
    """Inside the `with` the model runs with these edits; those that it cannot make are refused before."""
    intervention.check(model)
    edits: dict[ExpertId, list[_GroupEdit]] = {}
    for edit in intervention.edits:
        _refuse_too_large(model, edit)
        rows = None if edit.positions is None else tuple(prompt.place(at) + prompt.shift for at in edit.positions)
        for owner, memories in _by_group(edit, model):
            columns = None if memories is None else torch.tensor(memories, device=model.device)
            edits.setdefault(owner, []).append(_GroupEdit(columns, rows, edit.coefficient, edit.factor))

    def change(m: Tensor, group: MemoryGroup, layer: int) -> Tensor:
        group_edits = edits.get(ExpertId(layer, group.kind, group.expert), [])
        if not group_edits:
            return m
        m = m.clone()
        for edit in group_edits:
            edit.apply_(m)
        return m

    return model.edit({layer: partial(change, layer=layer) for layer in {owner.layer for owner in edits}})


def _by_group(edit: Edit, model: MemoryModel) -> list[tuple[ExpertId, list[int] | None]]:
    if edit.expert is not None:
        return [(edit.expert, None)]
    if edit.layer is not None:
        groups = model.layers[edit.layer].groups
        return [(ExpertId(edit.layer, group.kind, group.expert), None) for group in groups]
    owners = sorted({memory.owner for memory in edit.memories})
    # a memory named twice is still edited once: it is scaled once
    return [(owner, sorted({memory.memory for memory in edit.memories if memory.owner == owner})) for owner in owners]


def _refuse_too_large(model: MemoryModel, edit: Edit) -> None:
    for number in (edit.coefficient, edit.factor):
        if number is not None and not torch.isfinite(torch.tensor(number, dtype=model.dtype)):
            kind = str(model.dtype).removeprefix("torch.")
            raise SettingError(f"{edit.target} is to become {number:g}, which {kind} cannot hold; use a smaller number")


def intervene(
    model: Source,
    prompt: str,
    intervention: Intervention | Edit | str | Iterable[Edit | str],
    position: int = -1,
    token: str | int | None = None,
    top: int = 10,
    index: Index | str | os.PathLike[str] | None = None,
    against: str | int | None = None,
) -> InterventionEffect:
    """Trace with and without the edits. `token` None: the one that the model predicts without them.

        memlens.intervene("gpt2", "The capital of France is", "L5N94=0").kl

    The intervention may be given as its edits, in words or not: `["L5N94=0", Edit(layer=3, factor=2.0)]`.
    """
    check_top(top)
    intervention = Intervention.of(intervention)
    loaded, opened = open_model(model, index)
    read = read_prompt(loaded, prompt)
    place = read.place(position)
    chosen, other = (None if word is None else read_token(loaded, word) for word in (token, against))
    edits = apply_edits(loaded, intervention, read)  # refuses what cannot be, before anything runs
    without = TracedPrompt.run(loaded, read, place)
    with edits:
        edited = TracedPrompt.run(loaded, read, place)
    return effect_of(intervention, without, edited, place, chosen, other, top, opened)


def effect_of(
    intervention: Intervention,
    without: TracedPrompt,
    edited: TracedPrompt,
    position: int,
    token: int | None,
    against: int | None,
    top: int,
    index: Index | None,
) -> InterventionEffect:
    """One position of a prompt that was run without and with the edits."""
    before, log_p = without.trace(position, token, against, top, index)
    after, log_q = edited.trace(position, before.token.id, against, top, index)
    changes = before.prediction.id != after.prediction.id
    return InterventionEffect(intervention, before, after, float(divergence(log_p, log_q)), changes)


@dataclass(frozen=True)
class Continuation:
    """The text that a model puts after a prompt."""

    prompt: str
    text: str
    tokens: tuple[int, ...]
    p: tuple[float, ...]  # of each token, as the model (with its edits) took it to be

    def to_json(self) -> dict[str, Any]:
        """Plain data, for json.dumps."""
        return plain(self)

    def __str__(self) -> str:
        return self.prompt + self.text


def generate(
    model: Source,
    prompt: str,
    count: int,
    intervention: Intervention | Edit | str | Iterable[Edit | str] | None = None,
    *,
    temperature: float = 0.0,
    seed: int = 0,
) -> Continuation:
    """`count` tokens more. Temperature 0 takes the most likely token; above, tokens are drawn, by the seed alone.

        memlens.generate("gpt2", "The capital of France is", 20, "L5N94=0").text

    The whole text is run again for every token, so that edits hold at every position just as they do in a trace. An
    end-of-text token is a token like others.
    """
    loaded, _ = open_model(model)
    going_on = Generation.begin(loaded, prompt, count, intervention, temperature, seed)
    for _ in going_on:
        pass
    return going_on.continuation


class Generation(Iterator[TokenShare]):
    """A text that goes on token by token; edits hold only while a token is computed, so others may use it between."""

    def __init__(
        self, model: MemoryModel, prompt: Prompt, count: int, edits: Intervention | None, temperature: float, seed: int
    ) -> None:
        self._model, self._prompt, self._left, self._edits = model, prompt, count, edits
        self._temperature, self._random = temperature, torch.Generator().manual_seed(seed)
        self._fed, self._tokens, self._p = prompt.fed(), list[int](), list[float]()

    @classmethod
    def begin(
        cls,
        model: MemoryModel,
        prompt: str,
        count: int,
        intervention: Intervention | Edit | str | Iterable[Edit | str] | None = None,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> "Generation":
        """Refused before anything runs where it cannot be."""
        check_count(count, "tokens cannot be generated")
        if check_number(temperature, "the temperature") < 0:
            raise SettingError(f"the temperature is {temperature}; it must be 0 (greedy) or more")
        if not 0 <= seed <= _LARGEST_SEED:
            raise SettingError(f"the seed is {seed}; it must be a whole number from 0 to {_LARGEST_SEED}")
        edits = None if intervention is None else Intervention.of(intervention)
        read = read_prompt(model, prompt, room=count)
        if edits is not None:
            apply_edits(model, edits, read)
        return cls(model, read, count, edits, float(temperature), int(seed))

    def __next__(self) -> TokenShare:
        if not self._left:
            raise StopIteration
        self._left -= 1
        edits = self._edits
        with nullcontext() if edits is None else apply_edits(self._model, edits, self._prompt):
            logs = log_probabilities(self._model, self._model.run_body(self._fed)[0, -1])  # [vocabulary]
        if self._temperature == 0:
            token = int((logs == logs.max()).nonzero()[0])  # of equals the lowest id
        else:
            # less the highest, so that no temperature is too low: the best token's score stays 0
            weights = torch.softmax((logs - logs.max()) / self._temperature, 0)
            token = int(torch.multinomial(weights, 1, generator=self._random))
        self._tokens.append(token)
        self._p.append(float(logs[token].exp()))
        self._fed = torch.cat([self._fed, torch.tensor([[token]])], dim=1)
        return TokenShare(token, self._model.tokenizer.token_text(token), self._p[-1])

    @property
    def continuation(self) -> Continuation:
        """The text so far."""
        text = _text(self._model, self._prompt, self._tokens)
        return Continuation(self._prompt.text, text, tuple(self._tokens), tuple(self._p))


def _text(model: MemoryModel, prompt: Prompt, tokens: list[int]) -> str:
    """The new tokens as they read behind the prompt: some tokenizers drop a space that would begin a text."""
    before = model.tokenizer.decode(prompt.tokens)
    whole = model.tokenizer.decode([*prompt.tokens, *tokens])
    return whole[len(before) :] if whole.startswith(before) else model.tokenizer.decode(tokens)


def promoting(
    index: Index | str | os.PathLike[str],
    tokens: str | Sequence[str],
    *,
    end: str = "top",
    within: int = 10,
    limit: int | None = None,
) -> tuple[MemoryId, ...]:
    """All memories that have one of the tokens among the `within` first of their value's list, strongest first.

        memlens.Edit(memlens.promoting("gpt2-index", " Paris"))

    `end="bottom"` gives those that push the tokens down; a limit keeps the strongest.
    """
    opened = open_index(index)
    texts = [tokens] if isinstance(tokens, str) else list(tokens)
    check_count(within, "first tokens cannot be looked through")
    if limit is not None:
        check_count(limit, "memories are no group")
    if end not in ("top", "bottom"):
        raise UnknownName(f"a value has the ends 'top' and 'bottom', not '{end}'")
    query = SearchQuery(tuple(texts), "values", bottom=end == "bottom", limit=sum(map(opened.memories, opened.layers)))
    hits = [hit for hit in search_values(opened, query).found if isinstance(hit, ValueHit)]
    listed = min(opened.manifest.values.top, len(opened.vocabulary))
    if within > listed:
        advice = "lower `within` or make the values again"
        raise SettingError(f"{opened.folder} lists {listed} tokens per value, not {within}; {advice}")
    memories = tuple(memory.name for memory in hits if memory.rank < within)[:limit]
    if not memories:
        raise UnknownName(f"no memory has {tokens!r} among the {within} first tokens of its value; raise `within`")
    return memories
