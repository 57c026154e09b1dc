"""The experiments' charts and tables, as the report draws them, with the published numbers beside them.

Drawing needs the experiments, which need torch, so nothing of this is imported before somebody asks; what was drawn is
kept until an experiment is run again.
"""

from __future__ import annotations

from threading import Lock
from typing import Any

from pydantic import BaseModel

from memlens.index.layout import EXPERIMENTS
from memlens.web.served_index import ServedIndex

_DRAWING = Lock()  # several pages may ask at once; one draws


class ChartTable(BaseModel):
    """Numbers as text."""

    caption: str
    columns: list[str]
    rows: list[list[str]]


class Chart(BaseModel):
    """A Vega-Lite specification, and the same in words."""

    name: str
    alt: str
    spec: dict[str, Any]


class ChartSection(BaseModel):
    """One experiment: what it asks, what to look for, how it is drawn, and its numbers."""

    name: str
    figure: str
    title: str
    lead: str
    charts: list[Chart]
    tables: list[ChartTable]


def experiment_tables(index: ServedIndex) -> list[str]:
    """The experiments that were run, by the names of their tables."""
    found = sorted(name.removesuffix(".parquet") for name in index.manifest["files"] if name.startswith(EXPERIMENTS))
    return [name for name in found if index.has(name)]


def read_charts(index: ServedIndex) -> list[ChartSection]:
    """Every experiment that was run; none costs nothing."""
    tables = experiment_tables(index)
    if not tables:
        return []
    with _DRAWING:
        return index.remember([*tables, "patterns"], ("charts",), lambda: _draw(index))


def _draw(index: ServedIndex) -> list[ChartSection]:
    from memlens.report.sections import make_sections
    from memlens.report.tables import Tables

    return [
        ChartSection(
            name=section.topic.name,
            figure=section.topic.figure,
            title=section.topic.title,
            lead=section.topic.lead,
            charts=[Chart(name=panel.name, alt=panel.alt, spec=panel.spec) for panel in section.panels],
            tables=[
                ChartTable(caption=table.caption, columns=table.columns, rows=table.rows) for table in section.tables
            ],
        )
        for section in make_sections(Tables(index))
        if section.is_present and section.panels
    ]
