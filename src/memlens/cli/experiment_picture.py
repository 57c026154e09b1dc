"""Experiments on a terminal: for each a line of small bars over the layers, the paper's below it, and a small table.

Which columns matter, and how they are written, is said in pictures, a line an experiment; one that has none there is
shown with the columns it has. This module draws what an experiment found; it computes nothing of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from memlens.cli.example_table import EXAMPLES, print_origin, told_origin
from memlens.cli.pictures import CASES, KINDS, PICTURES, Column, Picture, Row, Write, short
from memlens.cli.screen import Screen
from memlens.cli.text import curve, cut_right, visible

if TYPE_CHECKING:
    from memlens.experiments import Experiment
    from memlens.index.reader import Index

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
    from memlens.report.published import published

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
    if experiment.name == "patterns":
        parts.append(f"at most {index.manifest['patterns']['rate']:.2g} of all patterns by chance")
    return ", ".join(parts) + (f"; left out: {', '.join(left)}" if left else "")


def _plain_picture(rows: list[Row]) -> Picture:
    """For an experiment that nobody has drawn yet: its numbers as they are."""
    numbers = [name for name in (rows[0] if rows else {}) if isinstance(rows[0][name], float)][:4]
    return Picture(tuple(Column(visible(name), name, short) for name in numbers), tuple(numbers[:1]), "memories")
