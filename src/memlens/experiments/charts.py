"""The few shapes that experiments are drawn in, as Altair charts. Knows columns, not what they mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

WIDTH, HEIGHT = 480, 240


def by_layer(
    table: pa.Table, column: str, title: str, *, format: str = "", lines: Mapping[str, str] | None = None
) -> Any:
    """Bars by layer with intervals `low` to `high`, and other columns as lines with a legend."""
    import altair as alt

    base = alt.Chart(table).encode(x=alt.X("layer:O", title="layer", axis=alt.Axis(labelAngle=0)))
    axis = alt.Axis(format=format) if format else alt.Axis()
    bars = base.mark_bar(color="#9aa0a6").encode(y=alt.Y(f"{column}:Q", title=title, axis=axis), tooltip=_all(table))
    parts = [bars, base.mark_rule().encode(y=alt.Y("low:Q", title=title), y2="high:Q")]
    for name, label in (lines or {}).items():
        drawn = base.transform_calculate(label=f"'{label}'").mark_line(point=True)
        parts.append(drawn.encode(y=alt.Y(f"{name}:Q", title=title), color=alt.Color("label:N", title=None)))
    return alt.layer(*parts).properties(width=WIDTH, height=HEIGHT)


def quartiles_by_layer(table: pa.Table, title: str, *, scale: str = "linear") -> Any:
    """A band from q1 to q3, the median as a line with its interval."""
    import altair as alt

    base = alt.Chart(table).encode(x=alt.X("layer:O", title="layer", axis=alt.Axis(labelAngle=0)))
    band = base.mark_area(opacity=0.25).encode(
        y=alt.Y("q1:Q", title=title, scale=alt.Scale(type=scale)),
        y2="q3:Q",
    )
    middle = base.mark_line(point=True).encode(y="median:Q", tooltip=_all(table))
    whiskers = base.mark_rule().encode(y="low:Q", y2="high:Q")
    return alt.layer(band, middle, whiskers).properties(width=WIDTH, height=HEIGHT)


def _all(table: pa.Table) -> list[str]:
    return list(table.column_names)
