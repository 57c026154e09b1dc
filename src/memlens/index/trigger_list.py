"""A memory's triggers as a list that a notebook shows as a table. Made from rows of an index; reads nothing itself."""

from __future__ import annotations

from html import escape
from typing import Any

from memlens.memory import Prefix, Trigger

_MARK = "background:#ffe08a;color:#000;border-radius:2px"
_CELL = "text-align:right;white-space:pre-wrap"


class TriggerList(list[Trigger]):
    """Triggers, best first; in everything but its look in a notebook a plain list."""

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{trigger.rank}</td><td>{trigger.coefficient:.4g}</td>"
            f'<td style="{_CELL}">{escape(trigger.before)}<span style="{_MARK}">{escape(trigger.token)}</span></td>'
            f'<td style="text-align:left;white-space:pre-wrap;opacity:.6">{escape(trigger.after[:40])}</td></tr>'
            for trigger in self
        )
        head = "<tr><th>rank</th><th>coefficient</th><th>prefix</th><th>what follows</th></tr>"
        return f"<table>{head}{rows}</table>"


def trigger_of(row: dict[str, Any], sentence: dict[str, Any]) -> Trigger:
    """A row of a trigger table and the row of its sentence, as one trigger; position -1 is BOS alone."""
    text, ends, position = sentence["text"], sentence["ends"], row["position"]
    begin = ends[position - 1] if position > 0 else 0
    end = ends[position] if position >= 0 else 0
    prefix = Prefix(row["sentence"], position)
    return Trigger(
        row["rank"], row["coefficient"], prefix, text[:begin], text[begin:end], text[end:], row["next_token"]
    )
