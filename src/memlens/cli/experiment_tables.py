"""Which columns of each experiment are drawn on a terminal, and how they are written: a line an experiment.

Knows names of columns; how they are drawn is experiment_picture's matter.

Experiments whose rows are memories or prefixes rather than layers, on a terminal.

This module draws what an experiment found; it computes nothing of its own.

Experiments on a terminal: for each a line of small bars over the layers, the paper's below it, and a small table.

Which columns matter, and how they are written, is said in pictures, a line an experiment; one that has none there is
shown with the columns it has. This module draws what an experiment found; it computes nothing of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from memlens.cli.screen import Screen
from memlens.memory import MemoryId
from memlens.text import curve, cut_left, cut_right, number, percent, quoted, visible

if TYPE_CHECKING:
    from memlens.experiments.registry import Experiment
    from memlens.index.reader import Index

Row = dict[str, Any]
Write = Callable[[Any], str]


def count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def signed(share: float | None) -> str:
    return "–" if share is None else f"{share:+.0%}"


def logit(value: float | None) -> str:
    return "–" if value is None else f"{value:+.2f}"


def short(value: float | None) -> str:
    return "–" if value is None else number(value)


@dataclass(frozen=True)
class Column:
    """One column of the table: a number, and its interval where there is one."""

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
        first = self.write(low)
        # one sign for both ends keeps three intervals on one line
        return f"{first.removesuffix('%')} to {self.write(high)}"


@dataclass(frozen=True)
class Picture:
    """What is drawn of an experiment that has a row a layer."""

    columns: tuple[Column, ...]
    curves: tuple[str, ...]  # columns that are drawn as curves
    used: str  # what took part, as the column that counts it


_RATE = ("low", "high")
_QUARTILES = tuple(Column(name, name) for name in ("q1", "q3"))
_RANK = tuple(Column(name, name, count) for name in ("q1", "q3"))
CASES = ("residual", "agreement", "composition", "ffn", "reversal")
_EDITS = ("first", "last", "random")
KINDS = ("shallow", "semantic", "both", "not_covered")

PICTURES = {
    "agreement": Picture(
        (
            Column("agree", "rate", percent, _RATE),
            Column("shuffled", "shuffled"),
            Column("memories", "memories", count),
        ),
        ("rate",),
        "memories",
    ),
    "rank": Picture(
        (Column("median", "median", count, _RATE), *_RANK, Column("memories", "memories", count)),
        ("median",),
        "memories",
    ),
    "local-edits": Picture(
        tuple(Column(edit, edit, signed, (f"{edit}_low", f"{edit}_high")) for edit in _EDITS),
        _EDITS,
        "memories",
    ),
    "patterns": Picture(
        (
            *(Column(kind, kind, percent, (f"{kind}_low", f"{kind}_high")) for kind in ("shallow", "semantic")),
            Column("both", "both"),
            Column("not covered", "not_covered"),
        ),
        ("shallow", "semantic"),
        "memories",
    ),
    "active": Picture(
        (
            Column("median", "median", percent, _RATE),
            *_QUARTILES,
            Column("effective memories", "effective_median", count),
            Column("of", "memories", count),
        ),
        ("median",),
        "prefixes",
    ),
    "composition": Picture(
        (
            Column("no memory", "rate", percent, _RATE),
            Column("no active one", "rate_active", percent, ("low_active", "high_active")),
        ),
        ("rate", "rate_active"),
        "prefixes",
    ),
    "refinement": Picture((Column("predict it", "rate", percent, _RATE),), ("rate",), "prefixes"),
    "confidence": Picture(
        (Column("median p", "median", short, _RATE), Column("q1", "q1", short), Column("q3", "q3", short),
         Column("median rank", "median_rank", count)),
        ("median",),
        "prefixes",
    ),
    "cases": Picture(tuple(Column(case, case) for case in CASES), CASES, "prefixes"),
    "contributions": Picture(
        (Column("ffn", "ffn_share"), Column("attention", "attention_share"), Column("top 1", "top1_share"),
         Column("top 10", "top10_share"), Column("top 100", "top100_share"),
         Column("ffn logit", "ffn", logit, _RATE)),
        ("ffn_share", "attention_share"),
        "prefixes",
    ),
}  # fmt: skip


ExampleTableRow = dict[str, Any]
Tables = Mapping[str, Sequence[ExampleTableRow]]

_SHOWN = 10
_FEW = 5  # of examples that take a line of text each
_TEXT_TAKEN = 55  # columns beside a prefix
_VERDICTS_TAKEN = 24


def print_origin(screen: Screen, figure: str, words: str) -> None:
    """Where the paper has it and what took part here; broken between words where it is long."""
    from rich.padding import Padding

    screen.result(Padding(Text(f"{figure}: {words}", "dim"), 0))


def _predictive_values(
    screen: Screen, index: Index, experiment: Experiment, rows: list[ExampleTableRow], tables: Tables
) -> None:
    bins = list(tables["predictive-values-bins"])
    words = f"{len(rows):,} most confident values of {sum(row['memories'] for row in bins):,} with a target"
    if rows:
        words += f"; mean precision {percent(sum(row['precision'] for row in rows) / len(rows))}"
        words += f", {sum(row['agrees'] for row in rows):,} agree with a trigger"
        words += f" (by chance {sum(row['chance'] for row in rows):,.1f})" if "chance" in rows[0] else ""
    print_origin(screen, experiment.figure, words)
    where = Counter(row["layer"] for row in rows)
    curves = Table.grid(padding=(0, 2, 0, 0))
    counts = [float(where[layer]) for layer in index.layers]
    curves.add_row("by layer", Text(curve(counts), "cyan"), Text(f"{max(counts):,.0f} at most", "dim"))
    rates = [row["rate"] for row in bins]
    if bins:
        words = f"agreement for max p {number(bins[0]['from_p'])} to {number(bins[-1]['to_p'])}, up to "
        words += percent(max(rate for rate in rates if rate is not None))
        curves.add_row("by confidence", Text(curve(rates), "cyan"), Text(words, "dim"))
    screen.result(curves)
    table = _columns("memory", "token", ">p", ">precision", ">triggers", "agrees")
    for row in rows[:_SHOWN]:
        table.add_row(
            _memory(row),
            Text(quoted(index.vocabulary[row["token"]], 20), "cyan"),
            number(row["max_p"]),
            percent(row["precision"]),
            str(row["triggers"]),
            Text("yes", "green") if row["agrees"] else Text("no"),
        )
    screen.result(table)


def _last_layer(
    screen: Screen, index: Index, experiment: Experiment, rows: list[ExampleTableRow], tables: Tables
) -> None:
    found = rows[0]["compositions"] if rows else 0
    words = f"{len(rows):,} of {found:,} compositions of the last layer, among {told_origin(index, experiment)}"
    print_origin(screen, experiment.figure, words)
    if not rows:
        return
    cosines = [row["cosine"] for row in rows]
    edges = [-1 + step / 5 for step in range(11)]
    bins = [float(sum(low <= min(one, 0.999) < high for one in cosines)) for low, high in pairwise(edges)]
    screen.result(Text.assemble("cosine of the two words  -1 ", (curve(bins), "cyan"), " 1"))
    from memlens.experiments.last_layer import summarize_verdicts

    summary = summarize_verdicts(rows)
    if summary:
        screen.result(Text(str(summary), "dim"))
    verdicts = ["verdicts"] if summary else []
    room = max(min(screen.out.width, 160) - _TEXT_TAKEN - len(verdicts) * _VERDICTS_TAKEN, 16)
    table = _columns(">prefix", "before", "after", ">cosine", *verdicts, "pushed by")
    for row in rows[:_FEW]:
        table.add_row(
            cut_left(visible(row["text"] or "–"), room),
            quoted(row["residual_text"], 12),
            Text(quoted(row["output_text"], 12), "cyan"),
            f"{row['cosine']:.2f}",
            *([_verdicts(row)] if summary else []),
            Text(" ".join(str(MemoryId(row["layer"], memory)) for memory in row["memories"][:2]), "bold"),
        )
    screen.result(table)


def _verdicts(row: ExampleTableRow) -> str:
    said = [f"{row[choice]} {choice}" for choice in ("related", "distant") if row[choice]]
    return ", ".join(said) or "–"


def _vetoes(screen: Screen, index: Index, experiment: Experiment, rows: list[ExampleTableRow], tables: Tables) -> None:
    compositions = {row["layer"]: row["compositions"] for row in rows}
    total = sum(compositions.values())
    words = f"{len(rows):,} memories in {total:,} compositions, among {told_origin(index, experiment)}"
    print_origin(screen, experiment.figure, words)
    counts = [float(compositions.get(layer, 0)) for layer in index.layers]
    screen.result(Text.assemble("compositions  ", (curve(counts), "cyan"), (f"  {max(counts):,.0f} at most", "dim")))
    table = _columns("memory", ">times", ">of", ">mean push", "mostly against", ">times")
    best = sorted(rows, key=lambda row: (-row["times"], row["layer"], row["memory"]))
    for row in best[:_SHOWN]:
        table.add_row(
            _memory(row),
            f"{row['times']:,}",
            f"{row['compositions']:,}",
            number(row["push"]),
            Text(quoted(row["token_text"], 20), "cyan"),
            f"{row['token_times']:,}",
        )
    screen.result(table)


def _memory(row: ExampleTableRow) -> Text:
    return Text(str(MemoryId(row["layer"], row["memory"])), "bold")


def told_origin(index: Index, experiment: Experiment) -> str:
    """Which prefixes were looked at."""
    from memlens.experiments.run import origin

    return visible(origin(index, experiment) or "sampled prefixes")


def _columns(*heads: str) -> Table:
    """A table; a head with > before it stands over numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for head in heads:
        table.add_column(head.removeprefix(">"), justify="right" if head.startswith(">") else "left", no_wrap=True)
    return table


EXAMPLES = {"predictive-values": _predictive_values, "last-layer": _last_layer, "vetoes": _vetoes}


_LAYERS = 12  # rows of a table; -v shows every layer
_LABEL = 15
_CURVES = {
    "rate": "agree",
    "rate_active": "active only",
    "ffn_share": "ffn",
    "attention_share": "attention",
}
_CURVES_OF = {"refinement": "predict it", "composition": "no memory"}


def print_experiment(screen: Screen, index: Index, experiment: Experiment, tables: Mapping[str, Sequence[Row]]) -> None:
    """Heading, what was used, curves, table."""
    screen.result(Text.assemble((experiment.name, "bold"), "  " + experiment.title))
    rows = list(tables[experiment.name])
    if experiment.name in EXAMPLES:
        EXAMPLES[experiment.name](screen, index, experiment, rows, tables)
        return
    picture = PICTURES.get(experiment.name) or _plain_picture(rows)
    rows = by_layer(experiment.name, rows)
    print_origin(screen, experiment.figure, _used(index, experiment, picture, rows))
    screen.result(_curves(experiment.name, picture, rows))
    screen.result(_table(picture, rows, None if screen.verbose else _LAYERS))
    if len(rows) > _LAYERS and not screen.verbose:
        screen.note(f"{_LAYERS} of {len(rows)} layers are listed; see all with -v")
    people = list(tables.get("patterns-people", ()))
    if people:
        screen.result("by people who have finished")
        screen.result(_people_table(picture, by_layer(experiment.name, people)))


def by_layer(name: str, rows: Sequence[Row]) -> list[Row]:
    """A row a layer: edits side by side, cases and kinds of pattern as shares."""
    if name == "local-edits":
        layers: dict[int, Row] = {}
        for row in rows:
            edit, layer = row["edit"], layers.setdefault(row["layer"], {"layer": row["layer"]})
            layer |= {edit: row["change"], f"{edit}_low": row.get("low"), f"{edit}_high": row.get("high")}
            layer |= {column: row[column] for column in ("memories", "prefixes", "left_out") if column in row}
        return list(layers.values())
    for own, parts in (("cases", CASES), ("patterns", KINDS)):
        if name == own:
            return [row | _shares(row, parts) for row in rows]
    return list(rows)


def _shares(row: Row, parts: Sequence[str]) -> dict[str, float | None]:
    total = sum(row[part] for part in parts)
    return {part: row[part] / total if total else None for part in parts}


def headline(name: str, rows: Sequence[Row]) -> list[tuple[str, list[float | None], Write]]:
    """The curves of an experiment: label, numbers by layer, how they are written."""
    picture = PICTURES[name]
    writes = {column.name: column.write for column in picture.columns}
    labels = {column: _CURVES_OF.get(name, label) if column == "rate" else label for column, label in _CURVES.items()}
    return [(labels.get(curve, curve), [row.get(curve) for row in rows], writes[curve]) for curve in picture.curves]


def _curves(name: str, picture: Picture, rows: list[Row]) -> Table:
    from memlens.reports.published import published

    table = Table.grid(padding=(0, 2, 0, 0))
    ours = headline(name, rows) if name in PICTURES else [
        (curve, [row[curve] for row in rows], short) for curve in picture.curves
    ]  # fmt: skip
    theirs = headline(name, by_layer(name, published(name))) if name in PICTURES and published(name) else []
    for number_, (label, numbers, write) in enumerate(ours):
        table.add_row(Text(f"{label:<{_LABEL}}"), Text(curve(numbers), "cyan"), _span(numbers, write))
        if theirs and any(theirs[number_][1]):
            published_numbers = theirs[number_][1]
            line = Text(curve(published_numbers), "magenta")
            table.add_row(Text("  in the paper", "dim"), line, _span(published_numbers, write))
    return table


def _span(numbers: Sequence[float | None], write: Write) -> Text:
    known = [value for value in numbers if value is not None]
    if not known:
        return Text("no numbers", "dim")
    return Text(f"{write(min(known))} to {write(max(known))}", "dim")


def _table(picture: Picture, rows: list[Row], most: int | None) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("layer", justify="right", no_wrap=True)
    for column in picture.columns:
        table.add_column(column.head, justify="right", no_wrap=True)
        if column.interval:
            table.add_column("95%", no_wrap=True, style="dim")
    for row in _evenly(rows, most):
        cells = []
        for column in picture.columns:
            cells += [column.cell(row), column.span(row)] if column.interval else [column.cell(row)]
        table.add_row(str(row["layer"]), *cells)
    return table


def _evenly(rows: list[Row], most: int | None) -> list[Row]:
    """At most so many rows, the first and the last among them."""
    if most is None or len(rows) <= most:
        return rows
    return [rows[round(place * (len(rows) - 1) / (most - 1))] for place in range(most)]


def _people_table(picture: Picture, rows: list[Row]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("annotator", no_wrap=True)
    for head in ("layer", "memories", *(column.head for column in picture.columns)):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        cells = [str(row["layer"]), f"{row['memories']:,}", *(column.cell(row) for column in picture.columns)]
        table.add_row(Text(cut_right(visible(row["annotator"]), _LABEL)), *cells)
    return table


def _used(index: Index, experiment: Experiment, picture: Picture, rows: list[Row]) -> str:
    """How many memories and prefixes took part, and what was left out."""
    total = sum(row.get(picture.used) or 0 for row in rows)
    if picture.used == "prefixes":
        return told_origin(index, experiment)
    parts = [f"{total:,} memories"]
    if any("prefixes" in row for row in rows):
        parts.append(f"{sum(row['prefixes'] for row in rows):,} prefixes")
    words = {
        "no_trigger": "without a trigger",
        "no_next": "at a sentence's end",
        "left_out": "prefixes of one token",
    }
    left = [f"{sum(row[c] for row in rows):,} {w}" for c, w in words.items() if any(row.get(c) for row in rows)]
    if experiment.name == "patterns" and index.manifest.patterns:
        parts.append(f"at most {index.manifest.patterns.rate:.2g} of all patterns by chance")
    return ", ".join(parts) + (f"; left out: {', '.join(left)}" if left else "")


def _plain_picture(rows: list[Row]) -> Picture:
    """For an experiment that nobody has drawn yet: its numbers as they are."""
    numbers = [name for name in (rows[0] if rows else {}) if isinstance(rows[0][name], float)][:4]
    return Picture(tuple(Column(visible(name), name, short) for name in numbers), tuple(numbers[:1]), "memories")
