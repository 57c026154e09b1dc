"""One memory as a notebook shows it: triggers shaded token by token, their patterns, what the value promotes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from memlens.index.excerpts import TriggerCoefficients, shade_triggers
from memlens.index.memory import MemoryRecord, TokenNumber, read_memory
from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.text import head, percent, tail, visible

_TRIGGERS, _PATTERNS, _TOKENS = 10, 3, 10
_BEFORE, _AFTER, _SHADED = 160, 40, 40  # characters, and tokens before the last one
_HUES = ("255,176,32", "80,140,255")  # of positive and negative coefficients
_TEXT = "text-align:left;white-space:pre-wrap;unicode-bidi:isolate"
_MARK = "border-bottom:2px solid"


@dataclass(frozen=True)
class ShownMemory(MemoryRecord):
    """The record of a memory with the coefficients along its triggers; none where the index has no model at hand."""

    shading: tuple[TriggerCoefficients, ...] = ()

    def _repr_html_(self) -> str:
        by_rank = {shading.rank: shading for shading in self.shading}
        strongest = max((abs(m) for shading in self.shading for m in shading.coefficients), default=0.0)
        rows = "".join(
            f'<tr><td>{trigger.coefficient:.4g}</td><td style="{_TEXT}">'
            + (
                _shaded(by_rank[trigger.rank], strongest)
                if trigger.rank in by_rank
                else _marked(trigger.before, trigger.token)
            )
            + f'<span style="opacity:.6">{escape(head(trigger.after, _AFTER))}</span></td></tr>'
            for trigger in self.triggers["top"]
        )
        name = f": {visible(self.summary.name)}" if self.summary else ""
        fires = (
            "never fires" if self.dead else f"fires on {percent(self.frequency)} of prefixes, m up to {self.max:.4g}"
        )
        patterns = "".join(
            f"<li>{escape(visible(pattern.description))} ({len(pattern.prefixes)} triggers)</li>"
            for pattern in (self.patterns or ())[:_PATTERNS]
        )
        note = "" if self.shading else "<div>tokens are shaded with a model: index.model = index.load_model()</div>"
        return (
            f"<div><b>{self.name}</b>{escape(name)}<br>{fires}</div><ul>{patterns}</ul>"
            f"<table><tr><th>m</th><th>triggers</th></tr>{rows}</table>{note}{self._value()}"
        )

    def _value(self) -> str:
        if self.value is None:
            return ""
        ends = (("promotes", self.value.promotes), ("demotes", self.value.demotes))
        return "".join(f"<div>{name} {_tokens(tokens)}</div>" for name, tokens in ends)


def show_memory(index: Index, name: str | MemoryId) -> ShownMemory:
    """Its record with the strongest triggers of the top end, shaded where the index has its model."""
    record = read_memory(index, name, ("top",), _TRIGGERS)
    model = index.model
    shading = () if model is None else shade_triggers(index, model, record.name, "top", _TRIGGERS)
    return ShownMemory(**vars(record), shading=tuple(shading))


def _shaded(trigger: TriggerCoefficients, strongest: float) -> str:
    first = max(0, trigger.position - _SHADED)
    parts = ["…"] if first else []
    for place in range(first, trigger.position + 1):
        m = trigger.coefficients[place]
        shade = f"rgba({_HUES[m < 0]},{0.8 * abs(m) / strongest if strongest else 0:.2f})"
        mark = f";{_MARK}" if place == trigger.position else ""
        text = escape(visible(trigger.tokens[place]))
        parts.append(f'<span title="{m:.4g}" style="background:{shade}{mark}">{text}</span>')
    return "".join(parts)


def _marked(before: str, token: str) -> str:
    return f'{escape(tail(before, _BEFORE))}<span style="{_MARK}">{escape(visible(token))}</span>'


def _tokens(tokens: Sequence[TokenNumber]) -> str:
    return " ".join(
        f'<code title="p {token.number:.3g}" style="white-space:pre">{escape(visible(token.text))}</code>'
        for token in tokens[:_TOKENS]
    )
