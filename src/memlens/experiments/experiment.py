"""Experiment: a question of the paper with its tables, charts, terminal picture, words, claims and published rows.

An experiment is one module of this package that ends in `EXPERIMENT = Experiment(...)`, and one name in the registry.
The command line, the report and the workbench read everything about it from there. These modules are imported to look
something up, so that they import torch, numba and Altair only inside the functions that compute or draw.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import pyarrow as pa

from memlens.errors import IndexFolderError
from memlens.experiments.verdicts import FEWEST, Claim, Evidence, JudgedClaim, Row, depth, estimate_of
from memlens.index.reader import Index
from memlens.memory import KINDS, MemoryNames
from memlens.parallel import Progress
from memlens.stats import Estimate, mean_estimate, slope_weights
from memlens.text import number, percent, visible

Write = Callable[[Any], str]
Rows = Mapping[str, Sequence[Row]]  # the tables of an experiment by name

KEYS, LAYERS = "What memories hold", "How memories add up"  # the two parts of the report
SAMPLE = 4000  # prefixes
PREFIX_OPTIONS = ("validation", "stop_words")  # of the pass over prefixes
PAPER_LAYERS, PAPER_MEMORIES = 16, 4096
PAPER_HEAD = 20_000  # words of its adaptive softmax among which a flat value ranks all targets
QUARTILES = ("q1", "median", "q3")


@dataclass(frozen=True)
class ModelShape:
    """The sizes of the model and the names of its memories, for a chart."""

    layers: int
    vocabulary: int
    names: MemoryNames

    @classmethod
    def of(cls, index: Index) -> "ModelShape":
        return cls(len(index.manifest.model.memories), index.manifest.model.vocabulary, index.names)


@dataclass(frozen=True)
class Panel:
    """One chart of a figure."""

    name: str  # of its files
    alt: str  # what it shows, for those who do not see it
    spec: dict[str, Any]  # Vega-Lite, in the page's colours


@dataclass(frozen=True, eq=False)
class ResultTable:
    """One table of an experiment, and the words of the section about it."""

    name: str
    schema: pa.Schema
    # of (index, model, *, seed, sample, progress), or of (seen, seed) for an experiment on prefixes
    compute: Callable[..., list[Row]]
    question: str
    lead: str  # what to look for
    how: str  # how the numbers come about
    figure: str = ""  # in the paper, where the experiment's is another
    draw: Callable[[list[Row], ModelShape], list[Panel]] | None = None
    published: Callable[[], list[Row]] = list  # the rows that the paper's own model would have
    contract: tuple[str, ...] = ("layer",)  # columns without which it cannot be shown
    command: str = ""  # what makes the table, if not `memlens experiment`
    by_people: bool = False  # empty until people have done something
    note: Callable[[Index, list[Row]], tuple[str, str] | None] | None = None  # a label and a sentence beside the lead


def count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def signed(share: float | None) -> str:
    return "–" if share is None else f"{share:+.0%}"


def short(value: float | None) -> str:
    return "–" if value is None else number(value)


@dataclass(frozen=True)
class Column:
    """One column on a terminal: a number, and its interval where there is one."""

    head: str
    name: str
    write: Write = percent
    interval: tuple[str, str] | None = None  # names of the columns that hold its ends

    def cell(self, row: Row) -> str:
        return self.write(row[self.name])

    def span(self, row: Row) -> str:
        low, high = (row[name] for name in self.interval or ())
        if low is None or high is None:
            return "–"
        # one sign for both ends keeps three intervals on one line
        return f"{self.write(low).removesuffix('%')} to {self.write(high)}"


@dataclass(frozen=True)
class Picture:
    """A terminal picture of an experiment that has a row per layer."""

    columns: tuple[Column, ...]
    curves: Mapping[str, str]  # column -> label
    by_layer: Callable[[Sequence[Row]], list[Row]] = list  # a row per layer, where the table has others
    remark: Callable[[Index], str] | None = None  # beside how many took part
    below: Callable[[Rows], list[Any]] | None = None  # what rich can print, from the other tables

    @classmethod
    def plain(cls, rows: Sequence[Row]) -> "Picture":
        """The picture of an experiment that brings none: the first numbers of its table."""
        numbers = [name for name in (rows[0] if rows else {}) if isinstance(rows[0][name], float)][:4]
        return cls(tuple(Column(visible(name), name, short) for name in numbers), {name: name for name in numbers[:1]})

    def headline(self, rows: Sequence[Row]) -> list[tuple[str, list[float | None], Write]]:
        """The curves: label, numbers by layer, how they are written."""
        writes = {column.name: column.write for column in self.columns}
        shown = self.by_layer(rows)
        return [(label, [row.get(name) for row in shown], writes[name]) for name, label in self.curves.items()]


@dataclass(frozen=True, eq=False)
class Experiment:
    """One experiment of the paper."""

    name: str
    figure: str  # where the paper shows it
    title: str
    tables: tuple[ResultTable, ...]  # the first has the experiment's name, and its claims look at it
    sample_of: str = "memories per layer"  # what `sample` counts
    sample: int | None = None  # how many by default; None = all
    needs: tuple[str, ...] = ()  # tables that must be in the index
    uses_model: bool = False
    maps: bool = False  # takes `pool`, a Pool or None, on which the model runs
    tokens_run: int = 0  # about so many, in passes of its own, for each of the sample in a layer
    last_layer: bool = False  # must the model's last layer have been scanned?
    people: str = ""  # which history of people's work it reads (see annotations.store)
    claims: tuple[Claim, ...] = ()
    picture: Picture | None = None
    # in place of a picture, of (index, rows by table, columns of the terminal, origin of the prefixes): a line about
    # what took part, and what rich can print
    terminal: Callable[[Index, Rows, int, str], tuple[str, list[Any]]] | None = None

    @property
    def on_prefixes(self) -> bool:
        """Is it read from the pass over sampled prefixes?"""
        return self.sample_of == "prefixes"

    @property
    def options(self) -> tuple[str, ...]:
        """Further settings that its computation takes."""
        return PREFIX_OPTIONS if self.on_prefixes else ()

    @property
    def part(self) -> str:
        """The part of the report that it belongs to."""
        return LAYERS if self.on_prefixes else KEYS

    def figure_of(self, table: ResultTable) -> str:
        """The figure or table of the paper that shows a table; empty where memlens adds the experiment."""
        return table.figure or (self.figure if self.figure.startswith(("Figure", "Section")) else "")

    @property
    def table_names(self) -> tuple[str, ...]:
        return tuple(table.name for table in self.tables)

    def judge(self, index: Index, rows: Callable[[str], list[Row] | None]) -> list[JudgedClaim]:
        """Its claims with what its tables say about them; `rows` gives those of a table, None where it is missing."""
        model = index.manifest.model
        memories = {layer: index.memories(layer) for layer in index.layers}
        at_zero = not model.gated and (model.activation or "relu").startswith("relu")
        judged = []
        for claim in self.claims:
            table = next(known for known in self.tables if known.name == (claim.table or self.name))
            table_rows = rows(table.name)
            evidence = Evidence(
                table_rows or [], len(model.memories), memories, table.published(), PAPER_LAYERS, at_zero
            )
            judgement = None if table_rows is None else claim.judge(evidence)
            judged.append(JudgedClaim(claim, self.name, self.figure_of(table), judgement))
        return judged

    def charts(self, index: Index) -> list[Any]:
        """The charts of its tables in an index, as a notebook draws them."""
        from memlens.experiments.style import notebook_chart

        panels: list[Panel] = []
        for table in self.tables:
            rows = index.table(f"experiments/{table.name}").to_pylist()
            panels += table.draw(rows, ModelShape.of(index)) if table.draw and rows else []
        return [notebook_chart(panel.spec) for panel in panels]

    def obstacle(self, index: Index) -> str | None:
        """The reason why this index cannot have the experiment, with what to do; None where nothing is in the way."""
        for table in self.needs:
            try:
                index.path(table)
            except IndexFolderError as error:
                return str(error)
        last = len(index.manifest.model.memories) - 1
        if self.last_layer and last not in index.layers:
            return f"the model's last layer, {last}, was not scanned into {index.folder}; scan with it in --layers"
        return None


def schema(*groups: str) -> pa.Schema:
    """Columns as `name:type`, [type] for a list; a column without a type holds float64."""

    def column(text: str) -> tuple[str, pa.DataType]:
        name, _, kind = text.partition(":")
        plain = pa.type_for_alias(kind.strip("[]") or "float64")
        return name, pa.list_(plain) if kind.startswith("[") else plain

    return pa.schema([column(text) for group in groups for text in group.split()])


def prefix_experiment(name: str, figure: str, title: str, table: ResultTable, **rest: Any) -> Experiment:
    """An experiment that is read from the one pass over sampled prefixes."""
    return Experiment(
        name, figure, title, (table,), sample_of="prefixes", sample=SAMPLE, needs=("values",), uses_model=True, **rest
    )


def layers_of(index: Index, name: str, progress: Progress) -> Iterator[int]:
    """The scanned layers one by one, with progress."""
    for done, layer in enumerate(index.layers):
        progress(name, done, len(index.layers))
        yield layer
    progress(name, len(index.layers), len(index.layers))


@cache
def paper_figures() -> dict[str, Any]:
    """The paper's plotted numbers by figure, as read off its vector graphics; layers count from 0."""
    text = files("memlens.experiments").joinpath("published_figures.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


def paper_statement(name: str) -> float:
    """A number that the paper's text states and no figure shows."""
    return float(paper_figures()["stated"][name])


def paper_quartiles(figure: str, unit: float = 1) -> list[Row]:
    columns = paper_figures()[figure]
    return [{"layer": n} | {name: columns[name][n] * unit for name in QUARTILES} for n in range(PAPER_LAYERS)]


def quartiles(numbers: Any) -> dict[str, float]:
    """q1, median and q3, linear between neighbours."""
    return dict(zip(QUARTILES, np.percentile(numbers, [25, 50, 75]).tolist(), strict=True))


def part_shares(row: Row, parts: Sequence[str]) -> Row:
    """The row with counts as shares of their sum."""
    total = sum(row[part] for part in parts)
    return row | {part: row[part] / total if total else None for part in parts}


def estimate_columns(name: str, estimate: tuple[float, float | None, float | None] | None) -> Row:
    """A number and its interval as three columns."""
    value, low, high = estimate or (None, None, None)
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def prefix_trend(matrix: Any, layers: Sequence[int], depths: int, random: np.random.Generator) -> Row:
    """Slope over relative depth of numbers [layers, prefixes] from layer 1 on, prefix by prefix; for every row."""
    rest = [place for place, layer in enumerate(layers) if layer > 0]
    if len(rest) < 2:
        return estimate_columns("trend", None)
    weights = np.array(slope_weights([depth(layers[place], depths) for place in rest]))
    return estimate_columns("trend", mean_estimate(weights @ np.asarray(matrix, np.float64)[rest], random))


def prefix_estimate(
    rows: Sequence[Row], name: str, otherwise: Callable[[], Estimate | None] = lambda: None
) -> Estimate | None:
    """A number that is the same in every row, with its interval; `otherwise` for rows without it, as the paper's."""
    if not rows or name not in rows[0]:
        return otherwise() if rows else None
    return estimate_of(rows[0], name, f"{name}_low", f"{name}_high")


def known_rows(rows: list[Row], columns: Sequence[str], observed: str) -> list[Row]:
    """The rows that have numbers there, of enough observations where their number is known (the paper's is not)."""
    enough = [row for row in rows if row.get(observed) is None or row[observed] >= FEWEST]
    return [row for row in enough if all(row[column] is not None for column in columns)]


def rule_of_enough(observed: str) -> str:
    return f" Layers with fewer than {FEWEST} {observed} do not count."


# Kinds of memories. A figure of a layer speaks of all its memories together. In a model with a router the same number
# stands beside it for each kind: `routed_rate` beside `rate`. Other models have nothing there.


def kind_columns(*names: str) -> Iterator[str]:
    """Columns of a schema, one of each for every kind."""
    return (f"{kind}_{name}" for kind in KINDS for name in names)


def kind_spans(names: MemoryNames, layer: int) -> dict[str, range]:
    """kind -> the numbers of its memories in a layer; none in a model without a router."""
    if not any(group.kind == "routed" for groups in names.layers.values() for group in groups):
        return {}
    spans: dict[str, range] = {}
    first = 0
    for group in names.layers[layer]:
        last = first + group.count * group.size
        spans[group.kind] = range(spans[group.kind].start if group.kind in spans else first, last)
        first = last
    return spans


def of_kind(kind: str, columns: Mapping[str, object]) -> Row:
    """Columns as those of a kind."""
    return {f"{kind}_{name}": value for name, value in columns.items()}


def draw_kinds(
    name: str, rows: list[Row], column: str, title: str, form: str, text: str, model: ModelShape
) -> list[Panel]:
    """A chart with a curve for each kind; none where no row tells kinds apart."""
    from memlens.experiments import charts

    points = [
        {"whose": charts.YOURS, "layer": row["layer"], "kind": kind, "value": row[f"{kind}_{column}"]}
        | {edge: row.get(f"{kind}_{edge}") for edge in ("low", "high")}
        for row in rows
        for kind in KINDS
        if row.get(f"{kind}_{column}") is not None
    ]
    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in points)]
    if not kinds:
        return []
    chart = charts.grouped_curves(charts.with_depth(points, model.layers), "kind", kinds, title, form, model.layers)
    return [charts.panel(f"{name}-kinds", chart, f"{text}, by kind of memory and depth")]
