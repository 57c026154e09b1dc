"""intervene(): a trace before and after an intervention, and how far the two distributions lie apart."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from memlens.index.reader import Index
from memlens.trace.applying import applied
from memlens.trace.intervention import Edit, Intervention
from memlens.trace.opening import Source, open_model
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
