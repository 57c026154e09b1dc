"""Sections of the report: each table of an experiment with its charts, text and command, the claims, and roles."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pyarrow as pa

from memlens.experiments.experiment import (
    THIRDS,
    Experiment,
    JudgedClaim,
    ModelShape,
    Panel,
    ResultTable,
    Row,
    third,
)
from memlens.experiments.run import EXPERIMENTS, STOP_WORDS, all_tables, in_paper_order, is_outdated, origin
from memlens.index.format import EXPERIMENTS as FOLDER, ExperimentNote
from memlens.index.reader import Index
from memlens.memory import ROLES
from memlens.role.table import RoleEffect, read_effects, roles_by_layer
from memlens.settings import CorpusSettings
from memlens.text import cell, column_cells, token

_ROWS_SHOWN = 200
_COUNTED = {"prefixes": "prefixes", "memories": "memories", "left_out": "left out"}
# Published counts use other definitions of the roles, and few papers report shares. The report therefore shows what
# papers say about depth next to the numbers of this model.
PUBLISHED = {
    "dead": "more than 70% in some lower layers of OPT-66B (Voita et al. 2023)",
    "token": "many in the lower half of OPT (Voita et al. 2023)",
    "n-gram": "in the lower half of OPT (Voita et al. 2023)",
    "positional": "indicators of position ranges in small OPT models, less explicit in large ones (Voita et al. 2023)",
    "entropy": "a few, in the last layers (Stolfo et al. 2024)",
    "token-frequency": "a few, in the last layers (Stolfo et al. 2024)",
    "prediction": "from the middle layers of GPT-2 on (Gurnee et al. 2024)",
    "suppression": "in the last layers of GPT-2 (Gurnee et al. 2024)",
    "enrichment": "in lower and middle layers (Gerstner and Schütze 2025)",
    "depletion": "in the last layers (Gerstner and Schütze 2025)",
}


class Tables:
    """The tables of an index's experiments, by name. Each table is read at most once, and any table may be missing."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.shape = ModelShape.of(index)
        self.layers = self.shape.layers  # all layers of the model, scanned or not
        self.table = cache(self._read)
        self._descriptions = {table.name: (experiment, table) for experiment, table in all_tables()}

    def rows(self, name: str) -> list[Row] | None:
        """Return the rows of a table, or None if it is missing or waits for people's annotations."""
        table = self.table(name)
        if table is None or (self._descriptions[name][1].by_people and not table.num_rows):
            return None
        rows: list[Row] = table.to_pylist()
        return rows

    def note(self, name: str) -> ExperimentNote:
        """Return the manifest's note on how a table was made, or an empty note."""
        return self.index.manifest.experiment(self._descriptions[name][0].name)

    def command(self, name: str) -> str:
        """Return the command that computes a table. For an existing table, the command repeats its settings."""
        options = [] if self.rows(name) is None else _options(self.note(name))
        return " ".join([self._descriptions[name][1].command or f"memlens experiment INDEX {name}", *options])

    def origin(self, name: str) -> str:
        """Describe the corpus from which the prefixes of a table were drawn.

        Returns "" for a table without prefixes.
        """
        return origin(self.index, EXPERIMENTS[name]) if name in EXPERIMENTS else ""

    def passes(self) -> list[tuple[str, list[str]]]:
        """Return the passes over prefixes as pairs: a description of the pass, and the tables computed from it."""
        by_settings: dict[tuple[str, ...], list[str]] = {}
        for name, experiment in EXPERIMENTS.items():
            if experiment.on_prefixes and self.table(name) is not None and self.origin(name):
                note = self.note(name)
                settings = tuple(map(str, (note.sample, note.seed, note.validation, note.stop_words)))
                by_settings.setdefault(settings, []).append(name)
        return [
            (f"{self.origin(names[0])}, stop words {settings[-1]}", names) for settings, names in by_settings.items()
        ]

    def judge(self) -> list[JudgedClaim]:
        """Judge every claim of the paper."""
        return [judged for experiment in in_paper_order() for judged in experiment.judge(self.index, self.rows)]

    def _read(self, name: str) -> pa.Table | None:
        return self._descriptions[name][1].read(self.index)


@dataclass(frozen=True)
class ShownTable:
    """A table as text."""

    caption: str
    columns: list[str]
    rows: list[list[str]]
    left_out: int = 0


@dataclass(frozen=True)
class Section:
    """One table of an experiment as the report and the workbench show it."""

    name: str
    part: str
    figure: str
    title: str
    lead: str
    how: str
    command: str  # command that computes the table
    is_present: bool
    charts: list[Panel] = field(default_factory=list)
    tables: list[ShownTable] = field(default_factory=list)
    facts: list[tuple[str, str]] = field(default_factory=list)  # facts about how the numbers were computed
    is_stale: bool = False  # True if a source of the table has changed after the table was computed
    note: str = ""  # sentence next to the lead
    below: str = ""  # sentence below the charts


def make_sections(tables: Tables) -> list[Section]:
    """Return the sections of all tables of experiments, in the order of the paper."""
    return [_section(experiment, table, tables) for experiment, table in all_tables()]


def _section(experiment: Experiment, table: ResultTable, tables: Tables) -> Section:
    noted, rows = tables.note(table.name), tables.rows(table.name)
    texts = (table.name, experiment.part, experiment.figure_of(table), table.question, table.lead, table.how)
    command = tables.command(table.name)
    if rows is None:
        return Section(*texts, command, is_present=False)
    columns, theirs = list(rows[0] if rows else table.schema.names), table.published()
    shown = [_shown("this model", rows, columns, tables.index.vocabulary)]
    if theirs:
        shown.append(_shown("the paper", theirs, list(theirs[0]), None))
    note = table.note(tables.index, rows) if table.note else None
    facts = _counts(rows, columns) + _sample(experiment, noted, tables.origin(table.name))
    return Section(
        *texts,
        command,
        is_present=True,
        charts=table.draw(rows, tables.shape) if table.draw and rows else [],
        tables=shown,
        facts=[*facts, *([note] if note else []), *_file_facts(table.name, tables.index)],
        is_stale=is_outdated(tables.index, experiment),
        note=note[1] if note else "",
        below=table.below,
    )


def _shown(caption: str, rows: list[Row], columns: list[str], vocabulary: list[str] | None) -> ShownTable:
    """Return the first rows as text, without empty columns."""

    def write(column: str) -> list[str]:
        values = [row[column] for row in rows[:_ROWS_SHOWN]]
        if column == "token" and vocabulary is not None:
            return [token(vocabulary[value]) if value in range(len(vocabulary)) else cell(value) for value in values]
        return column_cells(values)

    columns = [name for name in columns if not rows or any(row.get(name) is not None for row in rows)]
    body = zip(*(write(column) for column in columns), strict=True)
    return ShownTable(caption, columns, [list(row) for row in body], max(0, len(rows) - _ROWS_SHOWN))


def _counts(rows: list[Row], columns: list[str]) -> list[tuple[str, str]]:
    """Return the numbers of prefixes and memories per row as labels and values."""
    facts = []
    for column, label in _COUNTED.items():
        counts = [row[column] for row in rows if column in columns and isinstance(row[column], int)]
        if counts:
            low, high = min(counts), max(counts)
            facts.append((f"{label} per row", cell(low) if low == high else f"{cell(low)} to {cell(high)}"))
    return facts


def _sample(experiment: Experiment, noted: ExperimentNote, prefixes: str) -> list[tuple[str, str]]:
    """Return the sample and its seed as labels and values."""
    facts = []
    if prefixes:
        facts.append(("sample", prefixes))
    elif "sample" in noted.content:
        size = "all" if noted.sample is None else cell(noted.sample)
        facts.append(("sample", f"{size} {experiment.sample_of}"))
    return facts + ([] if noted.seed is None else [("seed", cell(noted.seed))])


def _file_facts(name: str, index: Index) -> list[tuple[str, str]]:
    checksum = index.manifest.sha256(f"{FOLDER}/{name}")
    return [("table", f"{FOLDER}/{name}.parquet")] + ([("SHA-256", checksum)] if checksum else [])


def _options(noted: ExperimentNote) -> list[str]:
    """Return the options with which the command computes the same table again."""
    numbers = {"sample": noted.sample, "seed": noted.seed}
    options = [f"--{name} {number}" for name, number in numbers.items() if number is not None]
    options += _validation(noted.validation_corpus) if noted.validation else []
    return options + ([] if noted.stop_words in (None, STOP_WORDS) else [f"--stop-words {noted.stop_words}"])


def _validation(corpus: Mapping[str, Any] | None) -> list[str]:
    """Return the options that select the validation corpus."""
    if corpus is None:
        return ["--validation CORPUS"]
    options = [f"--validation {shlex.quote(source)}" for source in corpus["sources"]]
    defaults = {"unit": CorpusSettings.unit, "column": CorpusSettings.column}
    return options + [f"--{name} {shlex.quote(corpus[name])}" for name in defaults if corpus[name] != defaults[name]]


@dataclass(frozen=True)
class RoleShare:
    """The number of memories with a role, and their share of all memories and of each third of the layers."""

    role: str
    count: int
    shares: tuple[float | None, ...]  # in the lower, middle and upper third; None for a third without scanned layers
    share: float
    published: str


@dataclass(frozen=True)
class RoleSection:
    """Roles, their counts by layer, and the effects of silencing the memories with a role."""

    roles: list[RoleShare]
    by_layer: list[dict[str, int]]
    none: float  # share of memories without a role
    untested: tuple[str, ...]  # roles that could not be tested on this index
    effects: list[RoleEffect]  # effects of silencing; empty before `memlens roles --effects`


def role_section(index: Index) -> RoleSection | None:
    """Return the section on roles, or None if there is no roles table. Memories count for each of their roles."""
    if not index.has("roles"):
        return None
    layers = roles_by_layer(index)
    depth = len(index.manifest.model.memories)
    groups = [[layer for layer in layers if third(layer.layer, depth) == which] for which in THIRDS]
    untested = _untested_roles(index)
    rows = []
    for role in ROLES:
        counts = [(sum(layer.roles[role] for layer in part), sum(layer.memories for layer in part)) for part in groups]
        count, total = (sum(column) for column in zip(*counts, strict=True))
        if role not in untested:
            shares = tuple(with_role / memories if memories else None for with_role, memories in counts)
            rows.append(RoleShare(role, count, shares, count / total, PUBLISHED.get(role, "")))
    none = sum(layer.none for layer in layers) / sum(layer.memories for layer in layers)
    counted = [
        {"layer": layer.layer, "memories": layer.memories, **layer.roles, "none": layer.none} for layer in layers
    ]
    return RoleSection(rows, counted, none, untested, read_effects(index))


def _untested_roles(index: Index) -> tuple[str, ...]:
    """Return the roles that could not be tested: the model has no gates, or the index has no counts by position."""
    (row,) = index.sql("SELECT count(position) AS positions, min(q_along) AS along FROM {roles}")
    gated = ("enrichment", "depletion") if row["along"] == 1 else ()  # q is 1 for memories that were not tested
    return gated if row["positions"] else ("positional", *gated)
