"""From an experiment's rows to its figure: this model and, where there is one, the paper's curve on the same axes.

One function an experiment; each takes the rows of its table and the model's depth, and returns panels. A table that no
function here knows is drawn by the experiment's own chart(). Nothing is computed here beyond shares of counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from memlens.reports import charts
from memlens.reports.charts import PAPER, YOURS, with_depth
from memlens.reports.published import LAYERS, VOCABULARY, published
from memlens.reports.style import Spec, page_spec
from memlens.stats import wilson
from memlens.text import visible

Row = dict[str, Any]

_CONFIDENCE_TICKS = (0, 0.001, 0.01, 0.1, 0.3, 1)
EDITS = ("first", "random", "last")
CASES = {"residual": "c1", "composition": "c2", "agreement": "c3", "ffn": "c4", "reversal": "c5"}
BASELINES = {"shuffled": "this model, targets shuffled", "baseline": "a random token"}  # columns of the agreement
PATTERNS = {"shallow": "c1", "both": "c3", "semantic": "c2", "not_covered": "c5"}


@dataclass(frozen=True)
class Model:
    """What a drawing needs to know of the model."""

    layers: int
    vocabulary: int


@dataclass(frozen=True)
class Panel:
    """One chart of a figure."""

    name: str  # of its files
    alt: str  # what it shows, for those who do not see it
    spec: Spec


Drawer = Callable[[list[Row], Model], list[Panel]]


def draw_agreement(rows: list[Row], model: Model) -> list[Panel]:
    yours = [{**row, "value": row["rate"]} for row in rows]
    both = _both("agreement", yours, model, "rate", ("low", "high"))
    chance = [
        {"baseline": label, "layer": row["layer"], "value": row.get(column)}
        for column, label in BASELINES.items()
        for row in rows
        if row.get(column) is not None
    ]
    chart = charts.curves(both, "memories that agree", ".1%", model.layers, baselines=with_depth(chance, model.layers))
    return [_panel("agreement", chart, "Share of memories that agree with what follows, by depth", yours, "value", "%")]


def draw_rank(rows: list[Row], model: Model) -> list[Panel]:
    """As shares of the vocabulary: a rank of 5,000 is one thing among 50,000 tokens and another among 250,000."""
    both = _whose(_scaled(rows, 1 / model.vocabulary), YOURS, model.layers)
    both += _whose(_scaled(published("rank"), 1 / VOCABULARY), PAPER, LAYERS)
    title = "rank of the following token, as a share of the vocabulary"
    chart = charts.bands(both, title, ".2~%", model.layers, scale=alt.Scale(type="log"))
    return [_panel("rank", chart, "Rank of the following token under the value, by depth", rows, "median", "")]


def draw_edits(rows: list[Row], model: Model) -> list[Panel]:
    yours = [{**row, "value": row["change"]} for row in rows]
    both = _both("local-edits", yours, model, "change", ("low", "high", "edit"))
    chart = charts.grouped_curves(both, "edit", EDITS, "mean change of the coefficient", ".0%", model.layers)
    last = [row for row in yours if row["edit"] == "last"]
    text = "Change of the coefficient without the first, a random or the last token, by depth; without the last"
    return [_panel("local-edits", chart, text, last, "value", "%")]


def draw_active(rows: list[Row], model: Model) -> list[Panel]:
    chart = charts.bands(_quartiles("active", rows, model), "memories with m > 0", ".0%", model.layers)
    return [_panel("active", chart, "Share of active memories, by depth", rows, "median", "%")]


def draw_composition(rows: list[Row], model: Model) -> list[Panel]:
    yours = []
    for row in rows:
        low, high = wilson(row["zero"], row["prefixes"])
        yours.append({**row, "value": row["rate"], "low": row.get("low", low), "high": row.get("high", high)})
    chart = charts.curves(
        _both("composition", yours, model, "rate", ("low", "high")),
        "outputs that match no single memory",
        ".0%",
        model.layers,
        scale=alt.Scale(domain=[0, 1]),
    )
    return [
        _panel("composition", chart, "Share of outputs that match no memory's value, by depth", yours, "value", "%")
    ]


def draw_refinement(rows: list[Row], model: Model) -> list[Panel]:
    yours = []
    for row in rows:
        low, high = wilson(row["match"], row["prefixes"])
        yours.append({**row, "value": row["rate"], "low": row.get("low", low), "high": row.get("high", high)})
    chart = charts.curves(
        _both("refinement", yours, model, "rate", ("low", "high")),
        "residuals that have the final token on top",
        ".0%",
        model.layers,
        scale=alt.Scale(domain=[0, 1]),
    )
    text = "Share of prefixes whose residual already predicts the final token, by depth"
    return [_panel("refinement", chart, text, yours, "value", "%")]


def draw_confidence(rows: list[Row], model: Model) -> list[Panel]:
    chart = charts.bands(
        _quartiles("confidence", rows, model),
        "probability of the final token",
        "~g",
        model.layers,
        scale=alt.Scale(type="symlog", constant=0.001, domainMax=1),
        ticks=_CONFIDENCE_TICKS,
    )
    text = "Probability of the final token under the residual, by depth"
    return [_panel("confidence", chart, text, rows, "median", "")]


def draw_cases(rows: list[Row], model: Model) -> list[Panel]:
    panels = []
    for name, whose, own, layers in (
        ("cases", YOURS, rows, model.layers),
        ("cases-paper", PAPER, published("cases"), LAYERS),
    ):
        chart = charts.stacked(_stack(own, CASES, "case", layers), "case", CASES, whose, layers)
        panels.append(_panel(name, chart, f"How {whose} combines residual and layer, by depth", own, "", ""))
    return panels


def draw_patterns(rows: list[Row], model: Model) -> list[Panel]:
    return [
        _pattern_panel("patterns", rows, YOURS, model.layers),
        _pattern_panel("patterns-paper", published("patterns"), PAPER, LAYERS),
    ]


def draw_people(rows: list[Row], model: Model) -> list[Panel]:
    """One panel a person."""
    panels = []
    for number, person in enumerate(dict.fromkeys(row["annotator"] for row in rows)):
        own = [row for row in rows if row["annotator"] == person]
        panels.append(_pattern_panel(f"patterns-people-{number}", own, visible(person), model.layers))
    return panels


def _pattern_panel(name: str, rows: list[Row], whose: str, layers: int) -> Panel:
    hues = {kind.replace("_", " "): hue for kind, hue in PATTERNS.items()}
    chart = charts.stacked(_stack(rows, PATTERNS, "pattern", layers), "pattern", hues, whose, layers)
    return _panel(name, chart, f"Kinds of pattern among the trigger prefixes, by {whose}, by depth", rows, "", "")


def draw_predictive(rows: list[Row], model: Model) -> list[Panel]:
    """Where the most confident values sit."""
    counts: dict[int, int] = {}
    for row in rows:
        counts[row["layer"]] = counts.get(row["layer"], 0) + 1
    own = [{"layer": layer, "value": count} for layer, count in sorted(counts.items())]
    chart = charts.bars(with_depth(own, model.layers), f"of the {len(rows)} most confident values", ",", model.layers)
    return [_panel("predictive-values", chart, "Number of the most confident values, by depth", own, "value", "")]


def draw_dead(rows: list[Row], model: Model) -> list[Panel]:
    own = [{**row, "value": row["share"]} for row in rows]
    chart = charts.bars(with_depth(own, model.layers), "memories that never fire", ".1%", model.layers)
    return [_panel("dead", chart, "Share of memories without any trigger, by depth", own, "value", "%")]


def draw_bins(rows: list[Row], model: Model) -> list[Panel]:
    """Agreement against the value's confidence; both axes are the same for any model."""
    both: list[Row] = []
    for row in rows:
        if row["rate"] is not None:
            middle = (row["from_p"] * row["to_p"]) ** 0.5
            both.append({"whose": YOURS, "max_p": middle, "value": row["rate"], "low": row["low"], "high": row["high"]})
    for row in published("predictive-values-bins"):
        both.append({"whose": PAPER, "max_p": row["max_p"], "value": row["rate"], "low": None, "high": None})
    both = [{**row, "depth": row["max_p"]} for row in both]
    chart = charts.curves(both, "memories that agree", ".0%", model.layers, x=charts.confidence_axis())
    return [_panel("predictive-values-bins", chart, "Agreement by the value's confidence", both, "value", "%")]


DRAWERS: dict[str, Drawer] = {
    "patterns": draw_patterns,
    "patterns-people": draw_people,
    "local-edits": draw_edits,
    "agreement": draw_agreement,
    "rank": draw_rank,
    "predictive-values": draw_predictive,
    "predictive-values-bins": draw_bins,
    "active": draw_active,
    "composition": draw_composition,
    "refinement": draw_refinement,
    "confidence": draw_confidence,
    "cases": draw_cases,
}


def own_panel(name: str, chart: Any) -> Panel:
    """The chart that an experiment draws itself."""
    return Panel(name, f"Chart of the table {name}", page_spec(chart))


def _panel(name: str, chart: Any, text: str, rows: list[Row], column: str, unit: str) -> Panel:
    return Panel(name, text + _ends(rows, column, unit) + ".", page_spec(chart))


def _ends(rows: list[Row], column: str, unit: str) -> str:
    """The curve in words: where it begins and ends."""
    known = [row for row in rows if column and row.get(column) is not None]
    if not known or "layer" not in known[0]:
        return ""
    first, last = known[0], known[-1]

    def shown(value: float) -> str:
        return f"{100 * value:.3g}%" if unit == "%" else f"{value:.3g}"

    return f": {shown(first[column])} in layer {first['layer']}, {shown(last[column])} in layer {last['layer']}"


def _whose(rows: list[Row], whose: str, layers: int) -> list[Row]:
    return [{"whose": whose, **row} for row in with_depth(rows, layers)]


def _both(name: str, yours: list[Row], model: Model, column: str, keep: Sequence[str]) -> list[Row]:
    """This model's rows and the paper's with their value, on one axis."""
    wanted = ("depth", "layer", "value", *keep)
    theirs = [{**row, "value": row[column]} for row in published(name)]
    both = _whose(yours, YOURS, model.layers) + _whose(theirs, PAPER, LAYERS)
    return [{"whose": row["whose"]} | {key: row.get(key) for key in wanted} for row in both]


def _quartiles(name: str, rows: list[Row], model: Model) -> list[Row]:
    both = _whose(rows, YOURS, model.layers) + _whose(published(name), PAPER, LAYERS)
    return [{key: row[key] for key in ("whose", "depth", "layer", "q1", "median", "q3")} for row in both]


def _scaled(rows: list[Row], by: float) -> list[Row]:
    """Quartiles times a number; a layer without any stays a gap."""

    def scaled(value: float | None) -> float | None:
        return None if value is None else value * by

    return [{"layer": row["layer"], **{key: scaled(row[key]) for key in ("q1", "median", "q3")}} for row in rows]


def _stack(rows: list[Row], names: Collection[str], group: str, layers: int) -> list[Row]:
    """One row a layer and part, with the edges of its rectangle."""
    stacked: list[Row] = []
    for row in with_depth(rows, layers):
        total, below = sum(row[name] for name in names), 0.0
        for name in names:
            share = row[name] / total if total else 0.0
            place = {"depth": row["depth"], "layer": row["layer"], "from": below, "to": below + share}
            known = {edge: row[f"{name}_{edge}"] for edge in ("low", "high") if row.get(f"{name}_{edge}") is not None}
            stacked.append({**place, group: name.replace("_", " "), "share": share, "count": row[name], **known})
            below += share
    return stacked
