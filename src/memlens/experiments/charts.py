"""Charts of the experiments: curves, quartile bands, stacked shares and bars by depth.

The paper's curve is dashed and has points of a different shape. Both models share one horizontal axis: the layer if
they have the same number of layers, otherwise relative depth, (layer + 1/2) / L.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import altair as alt

from memlens.experiments.experiment import PAPER_LAYERS, ModelShape, Panel, Row, depth
from memlens.experiments.style import CATEGORIES, SHAPES, colour, page_spec
from memlens.stats import wilson

FORMULA = "(layer + ½) / L"
YOURS, PAPER = "this model", "the paper"
LOG_TICKS = [digit * 10.0**power for power in range(-9, 0) for digit in (1, 3)] + [1.0]  # ticks for shares

_WHOSE = {YOURS: ("yours", "circle"), PAPER: ("paper", "square")}  # color and shape
_DASHES = alt.Scale(domain=[YOURS, PAPER], range=[[1, 0], [6, 4]])
_STROKE: dict[str, Any] = {
    "symbolType": "stroke",
    "symbolSize": 500,
    "symbolOffset": 4,
    "symbolStrokeColor": colour("soft"),
}
_BASELINE_DASHES = [[8, 3, 2, 3], [2, 3]]
_EDGES = (("low", ".1%"), ("high", ".1%"))
_SMALL, _LARGE = 46, 170  # size of a point, normally and under the pointer


def curves(
    rows: list[Row],
    title: str,
    form: str,
    layers: int,
    *,
    scale: alt.Scale | None = None,
    x: alt.X | None = None,
    baselines: Sequence[Row] = (),
) -> Any:
    """Draw a line with points for each model, whiskers if rows have `low` and `high`, and thin lines for baselines."""
    base = alt.Chart(alt.Data(values=rows))
    x = x or _depth("depth", layers)
    y = _y("value", form, scale)
    hue, shape = _whose(rows)
    shown = [("whose", ""), ("layer", ","), ("value", form), ("low", form), ("high", form)]
    return alt.layer(
        *([_baselines(baselines, x)] if baselines else []),
        *_whiskers(base, x, hue, rows),
        base.mark_line().encode(x=x, y=y, color=hue, strokeDash=_dash(None)),
        _points(base, x, "value", hue, shape, ["whose"], shown, rows),
        title=title,
    )


def bands(
    rows: list[Row],
    title: str,
    form: str,
    layers: int,
    *,
    scale: alt.Scale | None = None,
    ticks: Sequence[float] | None = None,
    baselines: Sequence[Row] = (),
) -> Any:
    """Draw medians as lines, quartiles as bands, and thin lines for baselines."""
    base = alt.Chart(alt.Data(values=rows))
    x = _depth("depth", layers)
    hue, shape = _whose(rows)
    shown = [("whose", ""), ("layer", ","), ("q1", form), ("median", form), ("q3", form)]
    return alt.layer(
        *([_baselines(baselines, x)] if baselines else []),
        base.mark_area(opacity=0.16).encode(x=x, y=_y("q3", form, scale, ticks), y2="q1:Q", color=hue),
        base.mark_line().encode(x=x, y=alt.Y("median:Q"), color=hue, strokeDash=_dash(None)),
        _points(base, x, "median", hue, shape, ["whose"], shown, rows),
        title=title,
    )


def grouped_curves(rows: list[Row], group: str, names: Sequence[str], title: str, form: str, layers: int) -> Any:
    """Draw one curve per group and model. Groups differ in color and shape. The paper's curves are dashed."""
    base = alt.Chart(alt.Data(values=rows))
    x = _depth("depth", layers)
    legend = alt.Legend(**_legend_columns(names))
    hues = alt.Scale(domain=list(names), range=[colour(hue) for hue in CATEGORIES[: len(names)]])
    hue = alt.Color(f"{group}:N", scale=hues, legend=legend)
    forms = alt.Scale(domain=list(names), range=list(SHAPES[: len(names)]))
    shape = alt.Shape(f"{group}:N", scale=forms, legend=legend)
    shown = [("whose", ""), (group, ""), ("layer", ","), ("value", form), ("low", form), ("high", form)]
    stroke = None  # without the paper, all lines are solid
    if any(row["whose"] == PAPER for row in rows):
        stroke = alt.Legend(**_STROKE)
    return alt.layer(
        *_whiskers(base, x, hue, rows),
        base.mark_line().encode(x=x, y=_y("value", form, None), color=hue, strokeDash=_dash(stroke)),
        _points(base, x, "value", hue, shape, ["whose", group], shown, rows),
        title=title,
    )


def stacked(rows: list[Row], group: str, hues: Mapping[str, str], title: str, layers: int) -> Any:
    """Draw one stacked bar per layer from shares that sum to one. The rows give the segments, `from` and `to`."""
    scale = alt.Scale(domain=list(hues), range=[colour(hue) for hue in hues.values()])
    legend = alt.Legend(columns=3, symbolType="square")
    y = alt.Y("from:Q", title=None, scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format="%", tickCount=5))
    return _rectangles(rows, title, layers).encode(
        y=y,
        y2="to:Q",
        color=alt.Color(f"{group}:N", scale=scale, legend=legend),
        tooltip=_tooltip([(group, ""), ("layer", ","), ("share", ".1%"), *_EDGES, ("count", ",")], rows),
    )


def bars(rows: list[Row], title: str, form: str, layers: int) -> Any:
    """Draw one bar per layer. The column `value` holds the heights."""
    shown = [("layer", ","), ("value", form), ("dead", ","), ("memories", ",")]
    return _rectangles([{**row, "zero": 0} for row in rows], title, layers).encode(
        y=_y("value", form, None), y2="zero:Q", color=alt.value(colour("yours")), tooltip=_tooltip(shown, rows)
    )


def _rectangles(rows: list[Row], title: str, layers: int) -> Any:
    half = 0.42 / layers
    placed = [{**row, "left": row["depth"] - half, "right": row["depth"] + half} for row in rows]
    chart = alt.Chart(alt.Data(values=placed), title=title).mark_rect(stroke=colour("page"), strokeWidth=1)
    return chart.encode(x=_depth("left", layers), x2="right:Q")


def _depth(field: str, layers: int) -> alt.X:
    if layers == PAPER_LAYERS:
        title, places = "layer", [depth(layer, layers) for layer in range(layers)]
        label: dict[str, str] = {"labelExpr": f"format(datum.value * {layers} - 0.5, '.0f')"}
    else:
        title, places = f"relative depth {FORMULA}, L = {layers}", [0, 0.25, 0.5, 0.75, 1]
        label = {"format": ".2~f"}
    scale = alt.Scale(domain=[0, 1], nice=False)
    return alt.X(f"{field}:Q", title=title, scale=scale, axis=alt.Axis(values=places, **label))


def _y(field: str, form: str, scale: alt.Scale | None, ticks: Sequence[float] | None = None) -> alt.Y:
    where: dict[str, Any] = {"tickCount": 5} if ticks is None else {"values": list(ticks), "labelOverlap": "greedy"}
    return alt.Y(f"{field}:Q", title=None, axis=alt.Axis(format=form, **where), scale=scale or alt.Scale(zero=True))


def _whose(rows: Sequence[Row]) -> tuple[alt.Color, alt.Shape]:
    """Return the color and shape of this model and of the paper. The legend lists only models that have rows."""
    models = [model for model in _WHOSE if any(row["whose"] == model for row in rows)]
    hues, shapes = ([_WHOSE[model][place] for model in models] for place in (0, 1))
    return (
        alt.Color("whose:N", scale=alt.Scale(domain=models, range=[colour(hue) for hue in hues])),
        alt.Shape("whose:N", scale=alt.Scale(domain=models, range=shapes)),
    )


def _dash(legend: alt.Legend | None) -> Any:
    """Return dashes for the paper's lines.

    If `legend` is None, this is a condition, because Vega would merge a scale with the legends of other channels.
    """
    if legend is not None:
        return alt.StrokeDash("whose:N", scale=_DASHES, legend=legend)
    return alt.condition(f"datum.whose == '{PAPER}'", alt.value([6, 4]), alt.value([1, 0]))


def _baselines(rows: Sequence[Row], x: alt.X) -> Any:
    """Draw one thin gray line per baseline, with different dashes. Each row has `baseline` (its name) and `value`."""
    names = list(dict.fromkeys(row["baseline"] for row in rows))
    dashes = alt.StrokeDash(
        "baseline:N",
        scale=alt.Scale(domain=names, range=_BASELINE_DASHES[: len(names)]),
        legend=alt.Legend(**_STROKE, **_legend_columns(names)),
    )
    # draw points as well, because the line through a single layer is invisible
    line = alt.Chart(alt.Data(values=list(rows))).mark_line(
        color=colour("soft"), strokeWidth=1.5, point=alt.OverlayMarkDef(size=8, color=colour("soft"))
    )
    return line.encode(x=x, y=alt.Y("value:Q"), strokeDash=dashes)


def _legend_columns(names: Sequence[str]) -> dict[str, int]:
    """Return legend options that put long names below each other, because a wide legend is cut off on a phone."""
    return {"columns": 1} if sum(map(len, names)) > 40 else {}


def _whiskers(base: Any, x: alt.X, hue: alt.Color, rows: list[Row]) -> list[Any]:
    if not any(row.get("low") is not None for row in rows):
        return []  # Vega prints a warning for a scale without numbers
    rules = base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=1.5, opacity=0.6)
    return [rules.encode(x=x, y=alt.Y("low:Q"), y2="high:Q", color=hue)]


def _points(
    base: Any,
    x: alt.X,
    field: str,
    hue: alt.Color,
    shape: alt.Shape,
    by: list[str],
    shown: Sequence[tuple[str, str]],
    rows: list[Row],
) -> Any:
    """Draw points that grow if the pointer or a touch is near them."""
    near = alt.selection_point(name="near", fields=["depth", *by], nearest=True, on="pointerover", empty=False)
    return (
        base.mark_point(strokeWidth=2, fill=colour("page"), opacity=1)
        .encode(
            x=x,
            y=alt.Y(f"{field}:Q"),
            color=hue,
            shape=shape,
            size=alt.condition(near, alt.value(_LARGE), alt.value(_SMALL)),
            tooltip=_tooltip(shown, rows),
        )
        .add_params(near)
    )


def _tooltip(fields: Sequence[tuple[str, str]], rows: list[Row]) -> list[alt.Tooltip]:
    """Return tooltips for those (field, format) pairs whose field occurs in the rows. An empty format means text."""
    return [
        alt.Tooltip(f"{field}:{'Q' if form else 'N'}", title=field, **({"format": form} if form else {}))
        for field, form in fields
        if any(row.get(field) is not None for row in rows)
    ]


def with_depth(rows: Iterable[Row], layers: int) -> list[Row]:
    """Return the rows with the relative depth of their layers."""
    return [{"depth": depth(row["layer"], layers), **row} for row in rows]


def beside_paper(
    yours: list[Row], theirs: list[Row], model: ModelShape, column: str = "", keep: Sequence[str] = ("low", "high")
) -> list[Row]:
    """Return the rows of this model and of the paper on a shared depth axis, with the columns in `keep`.

    If `column` is given, that column is renamed to `value`.
    """
    names = ("whose", "depth", "layer", *(["value"] if column else []), *keep)
    both = [{"whose": YOURS, **row} for row in with_depth(yours, model.layers)]
    both += [{"whose": PAPER, **row} for row in with_depth(theirs, PAPER_LAYERS)]
    return [{key: row.get(column if key == "value" else key) for key in names} for row in both]


def share_panel(
    name: str, rows: list[Row], theirs: list[Row], hits: str, title: str, text: str, model: ModelShape
) -> Panel:
    """Draw a share of prefixes from 0 to 1. Rows without an interval get a Wilson interval."""
    yours = []
    for row in rows:
        low, high = wilson(row[hits], row["prefixes"])
        yours.append({**row, "low": row.get("low", low), "high": row.get("high", high)})
    both = beside_paper(yours, theirs, model, "rate")
    chart = curves(both, title, ".0%", model.layers, scale=alt.Scale(domain=[0, 1]))
    return panel(name, chart, text, yours, "rate", "%")


def stacked_panel(
    name: str, rows: list[Row], group: str, hues: Mapping[str, str], whose: str, layers: int, text: str
) -> Panel:
    """Draw the counts of several parts as stacked shares."""
    labels = {part.replace("_", " "): hue for part, hue in hues.items()}
    return panel(name, stacked(_stack(rows, hues, group, layers), group, labels, whose, layers), text)


def panel(name: str, chart: Any, text: str, rows: Sequence[Row] = (), column: str = "", unit: str = "") -> Panel:
    """Return a chart with a text alternative that gives the first and last value of a column."""
    return Panel(name, text + _ends(rows, column, unit) + ".", page_spec(chart))


def table_panel(name: str, chart: Any) -> Panel:
    """Return a chart whose text alternative is the name of its table."""
    return Panel(name, f"Chart of the table {name}", page_spec(chart))


def _ends(rows: Sequence[Row], column: str, unit: str) -> str:
    measured = [row for row in rows if column and row.get(column) is not None]
    if not measured or "layer" not in measured[0]:
        return ""
    first, last = measured[0], measured[-1]

    def write(value: float) -> str:
        return f"{100 * value:.3g}%" if unit == "%" else f"{value:.3g}"

    return f": {write(first[column])} in layer {first['layer']}, {write(last[column])} in layer {last['layer']}"


def _stack(rows: list[Row], names: Collection[str], group: str, layers: int) -> list[Row]:
    """Return one row per layer and part with the lower and upper edge of its rectangle."""
    placed: list[Row] = []
    for row in with_depth(rows, layers):
        total, below = sum(row[name] for name in names), 0.0
        for name in names:
            share = row[name] / total if total else 0.0
            place = {"depth": row["depth"], "layer": row["layer"], "from": below, "to": below + share}
            edges = {edge: row[f"{name}_{edge}"] for edge in ("low", "high") if row.get(f"{name}_{edge}") is not None}
            placed.append({**place, group: name.replace("_", " "), "share": share, "count": row[name], **edges})
            below += share
    return placed
