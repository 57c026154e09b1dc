"""intervene(): a trace before and after an intervention, and how far the two distributions lie apart."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from memlens.index.reader import Index
from memlens.models import load
from memlens.models.memory_model import MemoryModel
from memlens.trace.applying import applied
from memlens.trace.intervention import Intervention
from memlens.trace.naming import check_index
from memlens.trace.prompt import check_top, read_prompt, read_token
from memlens.trace.reading import divergence
from memlens.trace.result import Trace
from memlens.trace.tracing import trace_prompt


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
        from memlens.trace.html import pair_html

        return pair_html(self.before, self.after, self.kl)


def intervene(
    model: MemoryModel | str | os.PathLike[str],
    prompt: str,
    intervention: Intervention,
    position: int = -1,
    token: str | int | None = None,
    top: int = 10,
    index: Index | None = None,
) -> Comparison:
    """Trace with and without the edits. `token` None: the one that the model predicts without them."""
    check_top(top)
    loaded = load(model)
    if index is not None:
        check_index(loaded, index)
    read = read_prompt(loaded, prompt)
    place = read.place(position)
    chosen = None if token is None else read_token(loaded, token)
    edits = applied(loaded, intervention, read)  # refuses what cannot be, before anything runs
    before = trace_prompt(loaded, read, place, chosen, top, index)
    with edits:
        after = trace_prompt(loaded, read, place, before.trace.token.id, top, index)
    return Comparison(intervention, before.trace, after.trace, float(divergence(before.log_p, after.log_p)))
