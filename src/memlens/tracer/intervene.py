"""An intervention done to a model: within the `with`, every pass uses the edited coefficients; after it, none does.

Positions of an intervention are those of one prompt; they are found in what is fed, behind BOS. This module knows how
coefficients are changed, not why.

intervene(): a trace before and after an intervention, and how far the two distributions lie apart.

Groups of memories to intervene on: all that promote some tokens, as the index's values table lists them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memlens.errors import SettingError, UnknownName
from memlens.index.reader import Index
from memlens.index.search import SearchQuery, ValueHit, search_values
from memlens.memory import MemoryId
from memlens.models.memory_model import MemoryModel
from memlens.tracer.intervention import Edit, Intervention, short
from memlens.tracer.prompt import (
    Prompt,
    Source,
    check_count,
    check_top,
    open_index,
    open_model,
    read_prompt,
    read_token,
)
from memlens.tracer.result import Trace
from memlens.tracer.trace import divergence, trace_prompt


@dataclass(frozen=True, eq=False)
class _Step:
    """One edit as one layer meets it."""

    memories: Tensor | None  # [k]; None for all
    rows: tuple[int, ...] | None  # positions in what is fed; None for all
    coefficient: float | None
    factor: float | None

    def do_(self, m: Tensor) -> None:
        """Change m [batch, pos, memories] in place."""
        fed = m.shape[1]
        # a pass may end before a position: causal attention makes the two the same
        places = range(fed) if self.rows is None else [row for row in self.rows if row < fed]
        rows = torch.tensor(list(places), device=m.device, dtype=torch.int64)[:, None]
        columns = torch.arange(m.shape[2], device=m.device) if self.memories is None else self.memories
        if self.factor is not None:
            m[:, rows, columns] = m[:, rows, columns] * self.factor
        else:
            m[:, rows, columns] = 0.0 if self.coefficient is None else self.coefficient


def applied(model: MemoryModel, intervention: Intervention, prompt: Prompt) -> AbstractContextManager[None]:
    """Within, the model runs with these edits; refused if it cannot."""
    intervention.check(model)
    steps: dict[int, list[_Step]] = {}
    for edit in intervention.edits:
        _refuse_too_large(model, edit)
        rows = None if edit.positions is None else tuple(prompt.place(at) + prompt.shift for at in edit.positions)
        for layer, memories in _by_layer(edit):
            columns = None if memories is None else torch.tensor(memories, device=model.device)
            steps.setdefault(layer, []).append(_Step(columns, rows, edit.coefficient, edit.factor))
    return model.edit({layer: _change(own) for layer, own in steps.items()})


def _by_layer(edit: Edit) -> list[tuple[int, list[int] | None]]:
    if edit.layer is not None:
        return [(edit.layer, None)]
    layers = sorted({memory.layer for memory in edit.memories})
    # a memory named twice is still edited once: it is scaled once
    return [(layer, sorted({one.memory for one in edit.memories if one.layer == layer})) for layer in layers]


def _change(steps: list[_Step]) -> Callable[[Tensor], Tensor]:
    def change(m: Tensor) -> Tensor:
        m = m.clone()
        for step in steps:
            step.do_(m)
        return m

    return change


def _refuse_too_large(model: MemoryModel, edit: Edit) -> None:
    for number in (edit.coefficient, edit.factor):
        if number is not None and not torch.isfinite(torch.tensor(number, dtype=model.dtype)):
            kind = str(model.dtype).removeprefix("torch.")
            raise SettingError(f"{edit.target} is to become {number:g}, which {kind} cannot hold; use a smaller number")


@dataclass(frozen=True)
class Comparison:
    """The same position of the same prompt, without and with the edits; both traces follow the same token."""

    intervention: Intervention
    before: Trace
    after: Trace
    kl: float  # KL(before || after) of the next token, in nats

    @property
    def changes_prediction(self) -> bool:
        return self.before.prediction.id != self.after.prediction.id

    def to_json(self) -> dict[str, Any]:
        return {
            "intervention": self.intervention.to_json(),
            "before": self.before.to_json(),
            "after": self.after.to_json(),
            "kl": self.kl,
            "changes_prediction": self.changes_prediction,
        }

    def __repr__(self) -> str:
        before, after = self.before, self.after
        return (
            f"<Comparison: {before.token.text!r} p {before.token.p:.3g} -> {after.token.p:.3g}, "
            f"logit {before.logit:.4g} -> {after.logit:.4g}, prediction {before.prediction.text!r} -> "
            f"{after.prediction.text!r}, KL {self.kl:.4g}>"
        )

    def _repr_html_(self) -> str:
        from memlens.tracer.result import pair_html

        return pair_html(self.before, self.after, self.kl, str(self.intervention))


def intervene(
    model: Source,
    prompt: str,
    intervention: Intervention | Edit | str | Iterable[Edit | str],
    position: int = -1,
    token: str | int | None = None,
    top: int = 10,
    index: Index | str | os.PathLike[str] | None = None,
) -> Comparison:
    """Trace with and without the edits. `token` None: the one that the model predicts without them.

        memlens.intervene("gpt2", "The capital of France is", "L5N94=0").kl

    The intervention may be given as its edits, in words or not: `["L5N94=0", Edit(layer=3, factor=2.0)]`.
    """
    check_top(top)
    intervention = Intervention.of(intervention)
    loaded, opened = open_model(model, index)
    read = read_prompt(loaded, prompt)
    place = read.place(position)
    chosen = None if token is None else read_token(loaded, token)
    edits = applied(loaded, intervention, read)  # refuses what cannot be, before anything runs
    before = trace_prompt(loaded, read, place, chosen, top, opened)
    with edits:
        after = trace_prompt(loaded, read, place, before.trace.token.id, top, opened)
    return Comparison(intervention, before.trace, after.trace, float(divergence(before.log_p, after.log_p)))


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
    named: Any = [tokens] if isinstance(tokens, str) else tokens
    texts = list(named) if isinstance(named, Iterable) else [named]
    if not all(isinstance(text, str) for text in texts):
        raise SettingError(f"a group's tokens are named by their texts, like ' Paris', not {short(tokens)}")
    check_count(within, "first tokens cannot be looked through")
    if limit is not None:
        check_count(limit, "memories are no group")
    if end not in ("top", "bottom"):
        raise UnknownName(f"a value has the ends 'top' and 'bottom', not '{end}'")
    query = SearchQuery(tuple(texts), "values", bottom=end == "bottom", limit=sum(map(opened.memories, opened.layers)))
    found = [hit for hit in search_values(opened, query).found if isinstance(hit, ValueHit)]
    listed = min(opened.manifest.values.top, len(opened.vocabulary))
    if within > listed:
        raise SettingError(
            f"{opened.folder} lists {listed} tokens a value, not {within}; lower `within` or make the values again"
        )
    memories = tuple(one.name for one in found if one.rank < within)[:limit]
    if not memories:
        raise UnknownName(f"no memory has {tokens!r} among the {within} first tokens of its value; raise `within`")
    return memories
