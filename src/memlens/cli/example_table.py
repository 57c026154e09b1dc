"""Experiments whose rows are memories or prefixes rather than layers, on a terminal.

This module draws what an experiment found; it computes nothing of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from memlens.cli.screen import Screen
from memlens.cli.text import curve, cut_left, number, percent, quoted, visible
from memlens.memory import MemoryId

if TYPE_CHECKING:
    from memlens.experiments import Experiment
    from memlens.index.reader import Index

Row = dict[str, Any]
Tables = Mapping[str, Sequence[Row]]

_SHOWN = 10
_FEW = 5  # of examples that take a line of text each
_TEXT_TAKEN = 55  # columns beside a prefix
_VERDICTS_TAKEN = 24


def print_origin(screen: Screen, figure: str, words: str) -> None:
    """Where the paper has it and what took part here; broken between words where it is long."""
    from rich.padding import Padding

    screen.result(Padding(Text(f"{figure}: {words}", "dim"), 0))


def _predictive_values(screen: Screen, index: Index, experiment: Experiment, rows: list[Row], tables: Tables) -> None:
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


def _last_layer(screen: Screen, index: Index, experiment: Experiment, rows: list[Row], tables: Tables) -> None:
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


def _verdicts(row: Row) -> str:
    said = [f"{row[choice]} {choice}" for choice in ("related", "distant") if row[choice]]
    return ", ".join(said) or "–"


def _vetoes(screen: Screen, index: Index, experiment: Experiment, rows: list[Row], tables: Tables) -> None:
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


def _memory(row: Row) -> Text:
    return Text(str(MemoryId(row["layer"], row["memory"])), "bold")


def told_origin(index: Index, experiment: Experiment) -> str:
    """Which prefixes were looked at."""
    from memlens.experiments import origin

    return visible(origin(index, experiment) or "sampled prefixes")


def _columns(*heads: str) -> Table:
    """A table; a head with > before it stands over numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for head in heads:
        table.add_column(head.removeprefix(">"), justify="right" if head.startswith(">") else "left", no_wrap=True)
    return table


EXAMPLES = {"predictive-values": _predictive_values, "last-layer": _last_layer, "vetoes": _vetoes}
