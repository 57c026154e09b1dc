"""An intervention done to a model: within the `with`, every pass uses the edited coefficients; after it, none does.

Positions of an intervention are those of one prompt; they are found in what is fed, behind BOS. This module knows how
coefficients are changed, not why.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from memlens.errors import SettingError
from memlens.models.memory_model import MemoryModel
from memlens.trace.intervention import Edit, Intervention
from memlens.trace.prompt import Prompt


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
