"""Sections of the report: each table of an experiment with its charts, text and command, the claims, and roles."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pyarrow as pa

from memlens.errors import IndexFolderError
from memlens.experiments.experiment import (
    LAYERS,
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
_WORKING = {"prefixes", "prefix-layers"}  # intermediate tables, from which other tables are computed
# The authors count differently, and few print shares. Their statements about depth are shown next to the numbers.
PUBLISHED = {
    "dead": "more than 70% in some lower layers of OPT-66B (Voita et al. 2023)",
    "token": "many in the lower half of OPT (Voita et al. 2023)",
    "n-gram": "in the lower half of OPT (Voita et al. 2023)",
    "positional": "indicators of position ranges in small OPT models, less explicit in large ones (Voita et al. 2023)",
    "entropy": "a few, in the last layers (Stolfo et al. 2024)",
    "token-frequency": "a few, in the last layers (Stolfo et al. 2024)",
    "prediction": "from the middle of GPT-2 on (Gurnee et al. 2024)",
    "suppression": "in the last layers of GPT-2 (Gurnee et al. 2024)",
    "enrichment": "in lower and middle layers (Gerstner and Schütze 2025)",
    "depletion": "in the last layers (Gerstner and Schütze 2025)",
}


class Tables:
    """The experiments' tables of an index by name, each read once. Any table may be missing."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.shape = ModelShape.of(index)
        self.layers = self.shape.layers  # all layers of the model, scanned or not
        self.table = cache(self._read)
        self._known = {table.name: (experiment, table) for experiment, table in all_tables()}

    def names(self) -> list[str]:
        """Return the names of the tables in the index, sorted."""
        names = {path.stem for path in (self.index.folder / FOLDER).glob("*.parquet")}
        return sorted(names - _WORKING)

    def rows(self, name: str) -> list[Row] | None:
        """Return the rows of a table, or None if it is missing or still lacks the annotations that it needs."""
        table = self.table(name)
        if table is None or (name in self._known and self._known[name][1].by_people and not table.num_rows):
            return None
        rows: list[Row] = table.to_pylist()
        return rows

    def columns(self, name: str) -> list[str]:
        table = self.table(name)
        return [] if table is None else list(table.column_names)

    def note(self, name: str) -> ExperimentNote:
        """Return the manifest's note on how a table was made, or an empty note."""
        return self.index.manifest.experiment(self._known[name][0].name if name in self._known else "")

    def command(self, name: str) -> str:
        """Return the command that computes a table, with the sample, seed and text of an existing table."""
        options = [] if self.rows(name) is None else _options(self.note(name))
        return " ".join([self._known[name][1].command or f"memlens experiment INDEX {name}", *options])

    def origin(self, name: str) -> str:
        """Describe the corpus of the prefixes of a table of section 5. Returns "" for other tables."""
        return origin(self.index, EXPERIMENTS[name]) if name in EXPERIMENTS else ""

    def passes(self) -> list[tuple[str, list[str]]]:
        """Return the passes over prefixes that tables of section 5 come from: a description, and the tables of each."""
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
        if not self.index.has(f"{FOLDER}/{name}"):
            return None
        table = self.index.table(f"{FOLDER}/{name}")
        for column in self._known[name][1].contract if name in self._known else ():
            if column not in table.column_names:
                raise IndexFolderError(
                    f"the table '{FOLDER}/{name}' of {self.index.folder} has no column '{column}'; "
                    f"run `memlens experiment {self.index.folder} {name}` again"
                )
        return table


@dataclass(frozen=True)
class ShownTable:
    """A table as text."""

    caption: str
    columns: list[str]
    rows: list[list[str]]
    left_out: int = 0


@dataclass(frozen=True)
class Section:
    """One table of an experiment, as the report and the workbench show it."""

    name: str
    part: str
    figure: str
    title: str
    lead: str
    how: str
    command: str  # command that computes the table, with sample and seed if known
    is_present: bool
    charts: list[Panel] = field(default_factory=list)
    tables: list[ShownTable] = field(default_factory=list)
    facts: list[tuple[str, str]] = field(default_factory=list)  # facts about how the numbers were computed
    is_stale: bool = False  # True if the sources of the table have changed since
    note: str = ""  # text next to the lead
    below: str = ""  # text below the charts


def make_sections(tables: Tables) -> list[Section]:
    """Return all tables of experiments in the order of the paper, then other tables."""
    sections = [_section(experiment, table, tables) for experiment, table in all_tables()]
    described = {section.name for section in sections}
    unknown = [name for name in tables.names() if name not in described]
    return sections + [_section_of_unknown(name, tables) for name in unknown]


def _section(experiment: Experiment, table: ResultTable, tables: Tables) -> Section:
    noted, rows = tables.note(table.name), tables.rows(table.name)
    words = (table.name, experiment.part, experiment.figure_of(table), table.question, table.lead, table.how)
    command = tables.command(table.name)
    if rows is None:
        return Section(*words, command, is_present=False)
    columns, theirs = tables.columns(table.name), table.published()
    shown = [_shown("this model", rows, columns, tables.index.vocabulary)]
    if theirs:
        shown.append(_shown("the paper", theirs, list(theirs[0]), None))
    note = table.note(tables.index, rows) if table.note else None
    facts = _counts(rows, columns) + _sample(experiment, noted, tables.origin(table.name))
    return Section(
        *words,
        command,
        is_present=True,
        charts=table.draw(rows, tables.shape) if table.draw and rows else [],
        tables=shown,
        facts=[*facts, *([note] if note else []), *_file_facts(table.name, tables.index)],
        is_stale=is_outdated(tables.index, experiment),
        note=note[1] if note else "",
        below=table.below,
    )


def _section_of_unknown(name: str, tables: Tables) -> Section:
    rows, columns = tables.rows(name) or [], tables.columns(name)
    return Section(
        name,
        LAYERS,
        "",
        f"Table {name}",
        "",
        "Columns as the experiment wrote them.",
        f"memlens experiment INDEX {name}",
        is_present=True,
        tables=[_shown("this model", rows, columns, tables.index.vocabulary)],
        facts=_counts(rows, columns) + _file_facts(name, tables.index),
    )


def _shown(caption: str, rows: list[Row], columns: list[str], vocabulary: list[str] | None) -> ShownTable:
    def shown(column: str) -> list[str]:
        values = [row[column] for row in rows[:_ROWS_SHOWN]]
        if column == "token" and vocabulary is not None:
            known = range(len(vocabulary))
            return [token(vocabulary[value]) if value in known else cell(value) for value in values]
        return column_cells(values)

    columns = [name for name in columns if not rows or any(row.get(name) is not None for row in rows)]
    body = zip(*(shown(column) for column in columns), strict=True)
    return ShownTable(caption, columns, [list(row) for row in body], max(0, len(rows) - _ROWS_SHOWN))


def _counts(rows: list[Row], columns: list[str]) -> list[tuple[str, str]]:
    facts = []
    for column, label in _COUNTED.items():
        counts = [row[column] for row in rows if column in columns and isinstance(row[column], int)]
        if counts:
            low, high = min(counts), max(counts)
            facts.append((f"{label} a row", cell(low) if low == high else f"{cell(low)} to {cell(high)}"))
    return facts


def _sample(experiment: Experiment, noted: ExperimentNote, prefixes: str) -> list[tuple[str, str]]:
    """Describe the sample and its seed."""
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
    """Return the options of the command that makes the same table."""
    numbers = {"sample": noted.sample, "seed": noted.seed}
    options = [f"--{name} {number}" for name, number in numbers.items() if number is not None]
    options += _validation(noted.validation_corpus) if noted.validation else []
    return options + ([] if noted.stop_words in (None, STOP_WORDS) else [f"--stop-words {noted.stop_words}"])


def _validation(corpus: Mapping[str, Any] | None) -> list[str]:
    """Return the options of the validation text."""
    if corpus is None:
        return ["--validation CORPUS"]
    options = [f"--validation {shlex.quote(source)}" for source in corpus["sources"]]
    usual = {"unit": CorpusSettings.unit, "column": CorpusSettings.column}
    return options + [f"--{name} {shlex.quote(corpus[name])}" for name in usual if corpus[name] != usual[name]]


@dataclass(frozen=True)
class RoleShare:
    """One role: its number of memories, and their share of each third of the layers and of all."""

    role: str
    count: int
    shares: tuple[float | None, ...]  # shares in the lower, middle and upper third; None without scanned layers
    share: float
    published: str


@dataclass(frozen=True)
class RoleSection:
    """Roles, counts by layer, and the effects of silencing them."""

    roles: list[RoleShare]
    by_layer: list[dict[str, int]]
    none: float  # share of memories without a role
    not_asked: tuple[str, ...]  # roles that need gates or counts by position, which this index lacks
    effects: list[RoleEffect]  # effects of silencing; empty before `memlens roles --effects`


def role_section(index: Index) -> RoleSection | None:
    """Return the section on roles, or None before `memlens roles`. A memory with several roles counts for each."""
    if not index.has("roles"):
        return None
    layers = roles_by_layer(index)
    depth = len(index.manifest.model.memories)
    groups = [[layer for layer in layers if third(layer.layer, depth) == which] for which in THIRDS]
    not_asked = _not_asked(index)
    rows = []
    for role in ROLES:
        counts = [(sum(layer.roles[role] for layer in some), sum(layer.memories for layer in some)) for some in groups]
        count, total = (sum(column) for column in zip(*counts, strict=True))
        if role not in not_asked:
            shares = tuple(with_role / memories if memories else None for with_role, memories in counts)
            rows.append(RoleShare(role, count, shares, count / total, PUBLISHED.get(role, "")))
    none = sum(layer.none for layer in layers) / sum(layer.memories for layer in layers)
    counted = [
        {"layer": layer.layer, "memories": layer.memories, **layer.roles, "none": layer.none} for layer in layers
    ]
    return RoleSection(rows, counted, none, not_asked, read_effects(index))


def _not_asked(index: Index) -> tuple[str, ...]:
    """Return the roles that could not be tested. (A tested role without memories is a result.)"""
    (known,) = index.sql("SELECT count(position) AS positions, min(q_along) AS along FROM {roles}")
    gated = ("enrichment", "depletion") if known["along"] == 1 else ()  # these roles were not tested for any memory
    return gated if known["positions"] else ("positional", *gated)
