"""The overview: the model as a map, its layers as a table, the experiments' charts, memories that never fire."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse
from pydantic import BaseModel

from memlens.web.charts import ChartSection, experiment_tables, read_charts
from memlens.web.layer_table import LayerView, read_layers
from memlens.web.map import MapView, draw_map, measures
from memlens.web.memory_view import read_summaries
from memlens.web.rendering import PROBLEMS, Bench, page
from memlens.web.served_index import ServedIndex
from memlens.web.statistics import TABLES, read_statistics

router = APIRouter(tags=["overview"])


class Status(BaseModel):
    """Is the model there?"""

    status: Literal["none", "loading", "ready", "failed"]
    text: str


class Counts(BaseModel):
    """The index in a few numbers."""

    model: str
    family: str | None
    activation: str | None
    layers: int
    memories: int
    dead: int
    vocabulary: int
    sentences: int
    tokens: int
    prefixes: int


class Brief(BaseModel):
    """A memory in one line."""

    name: str
    value: float | None
    summary: str | None


@router.get("/", response_class=HTMLResponse, include_in_schema=False)
def overview_page(request: Request, bench: Bench, by: str = "max", charts: Literal["yes", "no"] = "no") -> HTMLResponse:
    index = bench.index
    found = measures(read_statistics(index))
    return page(
        request,
        "overview.html",
        counts=read_counts(bench),
        layers=read_layers(index),
        measures=found,
        by=by if any(by == measure.name for measure in found) else found[0].name,
        missing=_missing(index),
        has_experiments=bool(experiment_tables(index)),
        sections=read_charts(index) if charts == "yes" else None,
    )


@router.get("/api/status")
def read_status(bench: Bench) -> Status:
    """Whether the model is loaded, and the same in words."""
    return Status.model_validate({"status": bench.status, "text": bench.status_text})


@router.get("/api/counts")
def read_counts(bench: Bench) -> Counts:
    """What was scanned."""
    model, counts = bench.index.manifest["model"], bench.index.manifest["counts"]
    layers = read_layers(bench.index)
    return Counts(
        model=model["name"],
        family=model.get("family"),
        activation=model.get("activation"),
        layers=len(layers),
        memories=sum(layer.memories for layer in layers),
        dead=sum(layer.dead for layer in layers),
        vocabulary=model["vocabulary"],
        sentences=counts["sentences"],
        tokens=counts["tokens"],
        prefixes=counts["prefixes"],
    )


@router.get("/api/layers")
def read_layer_table(bench: Bench) -> list[LayerView]:
    """Every layer in a few numbers."""
    return read_layers(bench.index)


@router.get("/api/map", responses=PROBLEMS)
def read_map(
    bench: Bench,
    by: Annotated[str, Query(max_length=30)] = "max",
    room: Annotated[int, Query(ge=1, le=65536, description="Cells that fit into one layer.")] = 4096,
) -> MapView:
    """All memories by one statistic, a byte each; several to a cell where there is no room."""
    index = bench.index
    return index.remember(TABLES, ("map", by, room), lambda: draw_map(read_statistics(index), by, room))


@router.get("/api/brief/{name}", responses=PROBLEMS)
def read_brief(bench: Bench, name: str, by: Annotated[str, Query(max_length=30)] = "max") -> Brief:
    """One memory in one line, with its exact number."""
    memory = bench.index.check(name)
    statistics = read_statistics(bench.index)
    column = statistics.numbers.get(by)
    return Brief(
        name=str(memory),
        value=None if column is None else float(column[statistics.row_of(memory)]),
        summary=read_summaries(bench.index, [memory]).get(memory),
    )


@router.get("/api/charts")
def read_experiment_charts(bench: Bench) -> list[ChartSection]:
    """The charts of all experiments that were run; the first time this takes some seconds."""
    return read_charts(bench.index)


def _missing(index: ServedIndex) -> list[tuple[str, str]]:
    """What would make these pages fuller, and how to get it."""
    stages = (("values", "what every memory promotes"), ("patterns", "what triggers have in common"))
    missing = [(f"memlens {table} INDEX", what) for table, what in stages if not index.has(table)]
    if not experiment_tables(index):
        missing.append(("memlens experiment INDEX all", "the paper’s experiments"))
    return missing
