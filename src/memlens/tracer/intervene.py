"""Run a model with edited coefficients: traces before and after, continuations, and selections of memories.

The positions of an intervention count the prompt's tokens. In the model's input, BOS may come before these tokens.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memlens.errors import ModelError, SettingError, UnknownName
from memlens.index.reader import Index, open_index
from memlens.index.search import SearchQuery, ValueHit, search_values
from memlens.memory import ExpertId, MemoryId
from memlens.models.groups import MemoryGroup
from memlens.models.huggingface import HuggingFaceModel
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
    """The part of an edit that applies to one group of memories."""

    memories: Tensor | None  # [k]: numbers of memories within the group; None for all
    rows: tuple[int, ...] | None  # positions in the model's input; None for all
    coefficient: float | None
    factor: float | None

    def apply_(self, m: Tensor) -> None:
        """Change m [batch, pos, size] in place."""
        length = m.shape[1]
        # the input may end before an edited position, which then has no effect because attention is causal
        places = range(length) if self.rows is None else [row for row in self.rows if row < length]
        rows = torch.tensor(list(places), device=m.device, dtype=torch.int64)[:, None]
        columns = torch.arange(m.shape[2], device=m.device) if self.memories is None else self.memories
        if self.factor is not None:
            m[:, rows, columns] = m[:, rows, columns] * self.factor
        else:
            m[:, rows, columns] = 0.0 if self.coefficient is None else self.coefficient


def apply_edits(
    model: MemoryModel, intervention: Intervention, prompt: Prompt | None = None
) -> AbstractContextManager[None]:
    """Return a context manager in which the model runs with these edits.

    Raises an error if an edit does not fit the model. Without a prompt, the model may run on any text, so edits of
    individual positions are rejected.
    """
    intervention.check(model)
    edits: dict[ExpertId, list[_GroupEdit]] = {}
    for edit in intervention.edits:
        _refuse_too_large(model, edit)
        rows = None
        if edit.positions is not None:
            if prompt is None:
                raise SettingError(f"the edit of {edit.target} names positions of a prompt; use edits at all positions")
            rows = tuple(prompt.place(at) + prompt.shift for at in edit.positions)
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
    # a set, because a memory that is named twice is scaled only once
    return [(owner, sorted({memory.memory for memory in edit.memories if memory.owner == owner})) for owner in owners]


def _refuse_too_large(model: MemoryModel, edit: Edit) -> None:
    for number in (edit.coefficient, edit.factor):
        if number is not None and not torch.isfinite(torch.tensor(number, dtype=model.dtype)):
            kind = str(model.dtype).removeprefix("torch.")
            raise SettingError(f"{number:g} for {edit.target} is too large for {kind}; use a smaller number")


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
    """Trace one position of a prompt without and with edits.

    Args:
        model: A model, an argument of `load`, or an index.
        prompt: The text.
        intervention: An Intervention, or its edits as Edit or text: `["L5N94=0", Edit(layer=3, factor=2.0)]`.
        position: The traced position.
        token: The token to follow in both traces. None for the token that is predicted without the edits.
        top: Number of tokens, and of memories per layer, to list.
        index: An index of the model, which adds the triggers and patterns of memories.
        against: A second token. The traces then follow the difference of the two logits.

    Returns:
        The traces without and with the edits, and their differences.

    Raises:
        SettingError: The prompt, position or an edit is not valid.
        UnknownName: The model does not have a named memory, layer or token.

    Example:
        >>> memlens.intervene(model, "The river runs", "L1N7=0").kl >= 0
        True
    """
    check_top(top)
    intervention = Intervention.of(intervention)
    loaded, opened = open_model(model, index)
    checked = read_prompt(loaded, prompt)
    place = checked.place(position)
    token_id, other_id = (None if word is None else read_token(loaded, word) for word in (token, against))
    edits = apply_edits(loaded, intervention, checked)  # raises before the model runs
    without = TracedPrompt.run(loaded, checked, place)
    with edits:
        edited = TracedPrompt.run(loaded, checked, place)
    return effect_of(intervention, without, edited, place, token_id, other_id, top, opened)


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
    """Return both traces of a position and their differences, from a run without edits and a run with edits."""
    before, log_p = without.trace(position, token, against, top, index)
    after, log_q = edited.trace(position, before.token.id, against, top, index)
    changes = before.prediction.id != after.prediction.id
    return InterventionEffect(intervention, before, after, float(divergence(log_p, log_q)), changes)


@contextmanager
def hooked(model: Source, edits: Intervention | Edit | str | Iterable[Edit | str]) -> Iterator[Any]:
    """Apply edits to the transformers model inside a `with` block, for code that is not part of memlens.

    The edits apply at every position of every forward pass inside the block, also in `generate`, and are removed at the
    end of the block. Code that copies the weights into another network runs without the edits.

    Args:
        model: A model, an argument of `load`, or an index.
        edits: An Intervention, or its edits as Edit or text.

    Returns:
        A context manager that yields the `PreTrainedModel`.

    Raises:
        ModelError: The model is not a transformers model.
        SettingError: An edit names individual positions, or does not fit the model.

    Example:
        >>> import torch
        >>> with memlens.hooked(model, "L1N7=0") as network:
        ...     network(input_ids=torch.tensor([[1, 2, 3]])).logits.shape[1]
        3
    """
    loaded, _ = open_model(model)
    if not isinstance(loaded, HuggingFaceModel):
        raise ModelError(f"{loaded.name} ({loaded.family}) is not a transformers model; use memlens.generate or trace")
    with loaded.running(), apply_edits(loaded, Intervention.of(edits)):
        yield loaded.network


@dataclass(frozen=True)
class Continuation:
    """A model's continuation of a prompt."""

    prompt: str
    text: str
    tokens: tuple[int, ...]
    p: tuple[float, ...]  # probability of each token in the edited model

    def to_json(self) -> dict[str, Any]:
        """Return plain data for json.dumps."""
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
    """Continue a prompt by `count` tokens, with or without edits.

    The whole text is run again for every token, so that edits apply at every position as in a trace. An end-of-text
    token does not end the continuation.

    Args:
        model: A model, an argument of `load`, or an index.
        prompt: The text.
        count: Number of tokens.
        intervention: Edits of coefficients, or None.
        temperature: 0 selects the most likely token. Above 0, tokens are sampled.
        seed: Seed of the samples.

    Returns:
        The continuation.

    Raises:
        SettingError: An argument is not valid, or the text would exceed the model's context.

    Example:
        >>> len(memlens.generate(model, "The river runs", 3, "L1N7=0").tokens)
        3
    """
    loaded, _ = open_model(model)
    generation = Generation.begin(loaded, prompt, count, intervention, temperature, seed)
    for _ in generation:
        pass
    return generation.continuation


class Generation(Iterator[TokenShare]):
    """A continuation that is computed token by token. The model is edited only while a token is computed."""

    def __init__(
        self, model: MemoryModel, prompt: Prompt, count: int, edits: Intervention | None, temperature: float, seed: int
    ) -> None:
        self._model, self._prompt, self._remaining, self._edits = model, prompt, count, edits
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
        """Check the arguments of `generate` before the model runs, and return a Generation."""
        check_count(count, "the number of tokens")
        if check_number(temperature, "the temperature") < 0:
            raise SettingError(f"the temperature is {temperature}; it must be 0 (greedy) or more")
        if not 0 <= seed <= _LARGEST_SEED:
            raise SettingError(f"the seed is {seed}; it must be a whole number from 0 to {_LARGEST_SEED}")
        edits = None if intervention is None else Intervention.of(intervention)
        checked = read_prompt(model, prompt, room=count)
        if edits is not None:
            apply_edits(model, edits, checked)
        return cls(model, checked, count, edits, float(temperature), int(seed))

    def __next__(self) -> TokenShare:
        if not self._remaining:
            raise StopIteration
        self._remaining -= 1
        edits = self._edits
        with nullcontext() if edits is None else apply_edits(self._model, edits, self._prompt):
            logs = log_probabilities(self._model, self._model.run_body(self._fed)[0, -1])  # [vocabulary]
        if self._temperature == 0:
            token = int((logs == logs.max()).nonzero()[0])  # ties go to the lowest id
        else:
            # subtract the maximum first, so that the best token has score 0 at any temperature
            weights = torch.softmax((logs - logs.max()) / self._temperature, 0)
            token = int(torch.multinomial(weights, 1, generator=self._random))
        self._tokens.append(token)
        self._p.append(float(logs[token].exp()))
        self._fed = torch.cat([self._fed, torch.tensor([[token]])], dim=1)
        return TokenShare(token, self._model.tokenizer.token_text(token), self._p[-1])

    @property
    def continuation(self) -> Continuation:
        """The continuation so far."""
        text = _text(self._model, self._prompt, self._tokens)
        return Continuation(self._prompt.text, text, tuple(self._tokens), tuple(self._p))


def _text(model: MemoryModel, prompt: Prompt, tokens: list[int]) -> str:
    """Return the text of the new tokens, decoded together with the prompt to keep a space at their start."""
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
    """Return the memories whose values promote one of the tokens, strongest first.

    Args:
        index: An index with values.
        tokens: One token or several, as text.
        end: "top" for memories that promote the tokens, "bottom" for memories that demote them.
        within: How many tokens at this end of a value to search.
        limit: Maximum number of memories. None for all.

    Returns:
        The memories.

    Raises:
        SettingError: The index lists fewer tokens per value than `within`.
        UnknownName: No memory has one of the tokens, or `end` is not "top" or "bottom".

    Example:
        >>> memlens.values(index, model=model)  # doctest: +ELLIPSIS
        <Index ...>
        >>> promoted = index.table("values", ["tokens"])["tokens"][0].as_py()[0]
        >>> len(memlens.promoting(index, index.vocabulary[promoted])) >= 1
        True
    """
    opened = open_index(index)
    texts = [tokens] if isinstance(tokens, str) else list(tokens)
    check_count(within, "within")
    if limit is not None:
        check_count(limit, "limit")
    if end not in ("top", "bottom"):
        raise UnknownName(f"end is '{end}'; it must be 'top' or 'bottom'")
    query = SearchQuery(tuple(texts), "values", bottom=end == "bottom", limit=sum(map(opened.memories, opened.layers)))
    hits = [hit for hit in search_values(opened, query).found if isinstance(hit, ValueHit)]
    listed = min(opened.manifest.values.top, len(opened.vocabulary))
    if within > listed:
        advice = "lower `within`, or run `memlens values` with a larger --top"
        raise SettingError(f"{opened.folder} lists {listed} tokens per value, fewer than {within}; {advice}")
    memories = tuple(memory.name for memory in hits if memory.rank < within)[:limit]
    if not memories:
        raise UnknownName(f"no memory has {tokens!r} among the {within} first tokens of its value; raise `within`")
    return memories
