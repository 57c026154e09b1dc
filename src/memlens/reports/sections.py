"""The experiments' tables of an index, as far as they are there.

Any of them may be missing; a table that is there but lacks a column of the contract is refused by name. This module
knows names and columns of tables, not what they mean.

The experiments of an index as sections of the page: what is there with figure and table, what is missing by name.

Tables that no topic describes are shown as well, under their own name. This module knows which table belongs to which
topic; how a section looks is the template's business.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pyarrow as pa

from memlens.errors import IndexFolderError
from memlens.experiments.last_layer import summarize_verdicts
from memlens.experiments.registry import EXPERIMENTS as REGISTRY
from memlens.experiments.registry import Experiment
from memlens.experiments.run import STOP_WORDS, is_outdated, origin
from memlens.index.layout import EXPERIMENTS
from memlens.index.reader import Index
from memlens.reports.figures import DRAWERS, Model, Panel, own_panel
from memlens.reports.published import published
from memlens.reports.topics import LAYERS, TOPICS, Topic
from memlens.text import cell, token

Row = dict[str, Any]

_QUARTILES = ("layer", "q1", "median", "q3")

_ON_PREFIXES = tuple(name for name, experiment in REGISTRY.items() if experiment.on_prefixes)
_WORKING = {"prefixes", "prefix-layers"}  # what other tables are read from

COLUMNS: dict[str, tuple[str, ...]] = {
    "patterns": ("layer", "prefixes", "patterned_memories", "shallow", "semantic", "both", "not_covered"),
    "local-edits": ("layer", "edit", "change", "low", "high"),
    "agreement": ("layer", "memories", "agree", "rate", "low", "high", "baseline"),
    "rank": _QUARTILES,
    "predictive-values": ("layer", "memory", "max_p", "token", "precision"),
    "predictive-values-bins": ("from_p", "to_p", "memories", "agree", "rate", "low", "high"),
    "active": _QUARTILES,
    "composition": ("layer", "prefixes", "zero", "rate", "zero_active"),
    "refinement": ("layer", "prefixes", "match", "rate"),
    "confidence": _QUARTILES,
    "cases": ("layer", "residual", "ffn", "agreement", "composition", "reversal"),
}


class Tables:
    """Experiment tables by name, each read once."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.layers = len(index.manifest.model.memories)  # of the model, scanned or not
        self.vocabulary = index.manifest.model.vocabulary
        self.table = cache(self._read)

    def names(self) -> list[str]:
        """The experiments that have a table, sorted."""
        found = {path.stem for path in (self.index.folder / EXPERIMENTS).glob("*.parquet")}
        return sorted(found - _WORKING)

    def rows(self, name: str) -> list[Row] | None:
        """The rows of a table in its own order; None where the experiment was not run."""
        table = self.table(name)
        if table is None:
            return None
        rows: list[Row] = table.to_pylist()
        return rows

    def notes(self, name: str) -> dict[str, Any]:
        """What the manifest says about how a table was made; empty where it says nothing."""
        owner = self.owner(name)
        return dict(self.index.manifest.experiment(owner.name).content) if owner else {}

    def owner(self, name: str) -> Experiment | None:
        """The experiment that makes a table; None for a table that no experiment of this version makes."""
        return next((one for one in REGISTRY.values() if name in one.table_names), None)

    def origin(self, name: str) -> str:
        """Where the prefixes of a table of section 5 come from, in words; empty for other tables."""
        return origin(self.index, REGISTRY[name]) if name in REGISTRY else ""

    def passes(self) -> list[tuple[str, list[str]]]:
        """The passes over prefixes that tables of section 5 come from, in words, and the tables of each."""
        found: dict[tuple[str, ...], list[str]] = {}
        for name in _ON_PREFIXES:
            if self.table(name) is not None and self.origin(name):
                noted = self.notes(name)
                settings = tuple(str(noted.get(key)) for key in ("sample", "seed", "validation", "stop_words"))
                found.setdefault(settings, []).append(name)
        return [(f"{self.origin(names[0])}, stop words {settings[-1]}", names) for settings, names in found.items()]

    def is_stale(self, name: str) -> bool:
        """Has something that the table was made from changed since?"""
        owner = self.owner(name)
        return owner is not None and is_outdated(self.index, owner)

    def checksum(self, table: str) -> str | None:
        """SHA-256 of a table's file (`experiments/agreement`, `patterns`), as the manifest has it."""
        return self.index.manifest.sha256(table)

    def _read(self, name: str) -> pa.Table | None:
        if not self.index.has(f"{EXPERIMENTS}/{name}"):
            return None
        table = self.index.table(f"{EXPERIMENTS}/{name}")
        for column in COLUMNS.get(name, ()):
            if column not in table.column_names:
                raise IndexFolderError(
                    f"the table '{EXPERIMENTS}/{name}' of {self.index.folder} has no column '{column}'; "
                    f"run `memlens experiment {self.index.folder} {name}` again"
                )
        return table


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
    noted = tables.index.manifest.patterns
    if name == "patterns" and noted is not None:
        tested = f" over the {noted.hypotheses:,} hypotheses of the whole model" if noted.hypotheses else ""
        return f"Of all patterns that are reported, at most {100 * noted.rate:.2g}% are expected to be chance{tested}."
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
    def shown(column: str, value: Any) -> str:
        is_token = vocabulary is not None and column == "token" and isinstance(value, int)
        if is_token and vocabulary is not None and 0 <= value < len(vocabulary):
            return token(vocabulary[value])
        return cell(value)

    body = [[shown(column, row[column]) for column in columns] for row in rows[:_ROWS_SHOWN]]
    return ShownTable(caption, columns, body, max(0, len(rows) - _ROWS_SHOWN))


def _facts(topic: Topic, data: pa.Table, rows: list[Row], tables: Tables) -> list[tuple[str, str]]:
    facts = []
    for column, label in _SAMPLES.items():
        if column in data.column_names:
            counts = [row[column] for row in rows if isinstance(row[column], int)]
            if counts:
                low, high = min(counts), max(counts)
                facts.append((f"{label} a row", cell(low) if low == high else f"{cell(low)} to {cell(high)}"))
    noted = tables.notes(topic.name)
    origin = tables.origin(topic.name)
    if origin:
        facts.append(("sample", origin))
    elif "sample" in noted:
        facts.append(("sample", _sample(tables.owner(topic.name), noted["sample"])))
    if "seed" in noted:
        facts.append(("seed", cell(noted["seed"])))
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
    return " ".join(["all" if size is None else cell(size), experiment.sample_of if experiment else ""]).strip()
