"""The experiments of an index as sections of the page: what is there with figure and table, what is missing by name.

Tables that no topic describes are shown as well, under their own name. This module knows which table belongs to which
topic; how a section looks is the template's business.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from memlens.experiments.last_layer import summarize_verdicts
from memlens.experiments.registry import Experiment
from memlens.experiments.running import STOP_WORDS
from memlens.report.figures import DRAWERS, Model, Panel, own_panel
from memlens.report.published import published
from memlens.report.tables import Row, Tables
from memlens.report.text import number, token
from memlens.report.topics import LAYERS, TOPICS, Topic

_ROWS_SHOWN = 200
_SAMPLES = {"prefixes": "prefixes", "memories": "memories", "left_out": "left out"}


@dataclass(frozen=True)
class ShownTable:
    """A table as text."""

    caption: str
    columns: list[str]
    rows: list[list[str]]
    left_out: int = 0


@dataclass(frozen=True)
class Section:
    """One experiment on the page."""

    topic: Topic
    is_present: bool
    panels: list[Panel] = field(default_factory=list)
    tables: list[ShownTable] = field(default_factory=list)
    data: pa.Table | None = None
    facts: list[tuple[str, str]] = field(default_factory=list)  # how the numbers were made
    command: str = ""
    is_stale: bool = False  # made from something that has changed since
    note: str = ""  # what a reader must know beside the lead


def make_sections(tables: Tables) -> list[Section]:
    """All topics in their order, then tables without a topic."""
    described = {topic.name for topic in TOPICS}
    extra = [
        Topic(name, LAYERS, f"Table {name}", "", "", "Columns as the experiment wrote them.")
        for name in tables.names()
        if name not in described
    ]
    return [_section(topic, tables) for topic in (*TOPICS, *extra)]


def _section(topic: Topic, tables: Tables) -> Section:
    data = tables.table(topic.name)
    if data is None or (topic.by_people and not data.num_rows):
        return Section(topic, is_present=False)
    rows: list[Row] = data.to_pylist()
    shown = [_shown("this model", rows, data.column_names, tables.index.vocabulary)]
    theirs = published(topic.name)
    if theirs:
        shown.append(_shown("the paper", theirs, list(theirs[0]), None))
    return Section(
        topic,
        True,
        _panels(topic.name, data, rows, tables),
        shown,
        data,
        _facts(topic, data, rows, tables),
        _command(topic, tables.notes(topic.name)),
        tables.is_stale(topic.name),
        _note(topic.name, rows, tables),
    )


def _note(name: str, rows: list[Row], tables: Tables) -> str:
    """At which rate of false discoveries patterns were found; how people judge the last layer's changes."""
    noted = tables.index.manifest.get("patterns", {})
    if name == "patterns" and "rate" in noted:
        tested = f" over the {noted['hypotheses']:,} hypotheses of the whole model" if noted.get("hypotheses") else ""
        return (
            f"Of all patterns that are reported, at most {100 * noted['rate']:.2g}% are expected to be chance{tested}."
        )
    summary = summarize_verdicts(rows) if name == "last-layer" else None
    return f"Here {summary}." if summary else ""


def _panels(name: str, data: pa.Table, rows: list[Row], tables: Tables) -> list[Panel]:
    if not rows:
        return []
    model = Model(tables.layers, tables.vocabulary)
    if name in DRAWERS:
        return DRAWERS[name](rows, model)
    chart = _own_chart(name, tables)
    return [own_panel(name, chart(data))] if chart else []


def _own_chart(name: str, tables: Tables) -> Any:
    """The chart that the experiment of that table draws itself; None for a table of none."""
    owner = tables.owner(name)
    return next(chart for table, _, chart in owner.tables() if table == name) if owner else None


def _shown(caption: str, rows: list[Row], columns: list[str], vocabulary: list[str] | None) -> ShownTable:
    def cell(column: str, value: Any) -> str:
        is_token = vocabulary is not None and column == "token" and isinstance(value, int)
        if is_token and vocabulary is not None and 0 <= value < len(vocabulary):
            return token(vocabulary[value])
        return number(value)

    body = [[cell(column, row[column]) for column in columns] for row in rows[:_ROWS_SHOWN]]
    return ShownTable(caption, columns, body, max(0, len(rows) - _ROWS_SHOWN))


def _facts(topic: Topic, data: pa.Table, rows: list[Row], tables: Tables) -> list[tuple[str, str]]:
    facts = []
    for column, label in _SAMPLES.items():
        if column in data.column_names:
            counts = [row[column] for row in rows if isinstance(row[column], int)]
            if counts:
                low, high = min(counts), max(counts)
                facts.append((f"{label} a row", number(low) if low == high else f"{number(low)} to {number(high)}"))
    noted = tables.notes(topic.name)
    origin = tables.origin(topic.name)
    if origin:
        facts.append(("sample", origin))
    elif "sample" in noted:
        facts.append(("sample", _sample(tables.owner(topic.name), noted["sample"])))
    if "seed" in noted:
        facts.append(("seed", number(noted["seed"])))
    note = _note(topic.name, rows, tables)
    if note:
        facts.append(("false discoveries" if topic.name == "patterns" else "verdicts", note))
    file = f"experiments/{topic.name}"
    facts.append(("table", f"{file}.parquet"))
    checksum = tables.checksum(file)
    if checksum:
        facts.append(("SHA-256", checksum))
    return facts


def _command(topic: Topic, noted: dict[str, Any]) -> str:
    """What a person types to make the same table."""
    options = [f"--{name} {noted[name]}" for name in ("sample", "seed") if noted.get(name) is not None]
    options += ["--validation CORPUS"] if noted.get("validation") else []
    options += [f"--stop-words {noted['stop_words']}"] if noted.get("stop_words", STOP_WORDS) != STOP_WORDS else []
    return " ".join([topic.made_by, *options])


def _sample(experiment: Experiment | None, size: int | None) -> str:
    return " ".join(["all" if size is None else number(size), experiment.sample_of if experiment else ""]).strip()
