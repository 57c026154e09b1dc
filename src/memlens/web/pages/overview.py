"""The overview page: the model as a map, its layers as a table, the experiments' charts, memories that never fire."""

from secrets import randbelow
from threading import Lock
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from pydantic import BaseModel

from memlens.errors import UnknownName
from memlens.index.format import EXPERIMENTS, REPORT
from memlens.index.memory import read_routing, read_summaries
from memlens.reports.report import WORKBENCH, with_links
from memlens.reports.sections import Section, Tables, make_sections
from memlens.web.memory_map import MemoryMap, draw_map, likeness, measures, sorts
from memlens.web.pages.collections import names_beside
from memlens.web.rendering import PROBLEMS, Bench, IndexRoute, page
from memlens.web.served_index import TABLES, LayerStatistics, ServedIndex, read_layers, read_statistics
from memlens.web.workbench import Workbench

_DRAWING = Lock()  # several pages may ask at once; one draws


def experiment_tables(index: ServedIndex) -> list[str]:
    """The experiments that were run, by the names of their tables."""
    names = sorted(name.removesuffix(".parquet") for name in index.manifest.files if name.startswith(EXPERIMENTS))
    return [name for name in names if index.has(name)]


def read_charts(index: ServedIndex) -> list[Section]:
    """Every experiment that was run; none costs nothing."""
    tables = experiment_tables(index)
    if not tables:
        return []
    with _DRAWING:
        return index.remember([*tables, "patterns"], ("charts",), lambda: _draw(index))


def _draw(index: ServedIndex) -> list[Section]:
    return [section for section in make_sections(Tables(index)) if section.is_present and section.charts]


router = APIRouter(tags=["overview"], route_class=IndexRoute)


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
def overview_page(
    request: Request, bench: Bench, by: str = "max", sort: str = "place", charts: Literal["yes", "no"] = "no"
) -> HTMLResponse:
    sections = read_charts(bench.index) if charts == "yes" else None
    content = overview_content(bench, by, sort)
    return page(request, "overview.html", sections=sections, routing=read_routing(bench.index), **content)


def overview_content(bench: Workbench, by: str = "max", sort: str = "place") -> dict[str, Any]:
    """The variables of overview.html, but for the tables of the experiments."""
    index = bench.index
    known_measures, orders = measures(read_statistics(index)), sorts(read_statistics(index))
    return {
        "counts": read_counts(bench),
        "layers": read_layers(index),
        "measures": known_measures,
        "by": by if any(by == measure.name for measure in known_measures) else known_measures[0].name,
        "sorts": orders,
        "sort": sort if any(sort == order.name for order in orders) else orders[0].name,
        "missing": _missing(index),
        "worth": worth_reading(index),
        "has_experiments": bool(experiment_tables(index)),
        "has_report": (index.folder / REPORT).is_file(),
    }


@router.get("/random", include_in_schema=False)
def random_memory(bench: Bench) -> RedirectResponse:
    """Any memory that fires."""
    statistics = read_statistics(bench.index)
    alive = np.flatnonzero(statistics.categories["dead"] == 0)
    row = int(alive[randbelow(len(alive))]) if len(alive) else 0
    layer = int(np.searchsorted(statistics.starts, row, "right")) - 1
    name = bench.index.names.name(statistics.layers[layer], row - int(statistics.starts[layer]))
    return RedirectResponse(f"/m/{name}", 303, headers={"cache-control": "no-store"})


# A report is one file with its scripts in it, and may be anybody's: it runs as a page of nowhere and asks nothing.
_REPORT_HEADERS = {
    "content-security-policy": (
        "sandbox allow-scripts allow-downloads; default-src 'none'; script-src 'unsafe-inline'; "
        "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "unsafe-none",  # HTML forbids any other beside a sandbox
}


@router.get("/report", include_in_schema=False)
def report_page(bench: Bench) -> Response:
    """The report of the index, if it was made."""
    path = bench.index.folder / REPORT
    if not path.is_file():
        raise UnknownName("there is no report of this index yet; make it with `memlens report INDEX`")
    text = with_links(path.read_text(encoding="utf-8", errors="replace"), WORKBENCH)
    return Response(text, media_type="text/html", headers=_REPORT_HEADERS)


@router.get("/api/worth-reading")
def read_worth_reading(bench: Bench) -> list[Brief]:
    """Memories to begin with; `value` is the share of triggers that have one of its patterns."""
    return worth_reading(bench.index)


@router.get("/api/status")
def read_status(bench: Bench) -> Status:
    """The state of the model's loading, also in words."""
    return Status.model_validate({"status": bench.status, "text": bench.status_text})


@router.get("/api/counts")
def read_counts(bench: Bench) -> Counts:
    """The index in a few numbers: model, memories, sentences, tokens, prefixes."""
    model, counts = bench.index.manifest.model, bench.index.manifest.counts
    layers = read_layers(bench.index)
    return Counts(
        model=model.name,
        family=model.family,
        activation=model.activation,
        layers=len(layers),
        memories=sum(layer.memories for layer in layers),
        dead=sum(layer.dead for layer in layers),
        vocabulary=model.vocabulary,
        sentences=counts.sentences,
        tokens=counts.tokens,
        prefixes=counts.prefixes,
    )


@router.get("/api/layers")
def read_layer_table(bench: Bench) -> list[LayerStatistics]:
    """Every layer in a few numbers."""
    return read_layers(bench.index)


@router.get("/api/map", responses=PROBLEMS)
def read_map(
    bench: Bench,
    by: Annotated[str, Query(max_length=30)] = "max",
    room: Annotated[int, Query(ge=1, le=65536, description="Cells that fit into one layer.")] = 4096,
    sort: Annotated[
        str, Query(max_length=30, description="The order in a layer: place, level, class, role, likeness.")
    ] = "place",
) -> MemoryMap:
    """All memories by one statistic, a byte each, sorted in each layer; several to a cell where there is no room."""
    index = bench.index

    def draw() -> MemoryMap:
        return draw_map(read_statistics(index), by, room, sort, lambda: likeness(index))

    return index.remember((*TABLES, "triggers"), ("map", by, room, sort), draw)


@router.get("/api/brief/{name}", responses=PROBLEMS)
def read_brief(bench: Bench, name: str, by: Annotated[str, Query(max_length=30)] = "max") -> Brief:
    """One memory in one line, with its exact number."""
    memory = bench.index.check(name)
    statistics = read_statistics(bench.index)
    column = statistics.numbers.get(by)
    note, summary = names_beside(bench.index).get(memory), read_summaries(bench.index, [memory]).get(memory)
    return Brief(
        name=str(memory),
        value=None if column is None else float(column[statistics.row_of(memory)]),
        summary=f"{note.name}: {summary or ''}" if note and note.name else summary,
    )


@router.get("/api/charts")
def read_experiment_charts(bench: Bench) -> list[Section]:
    """The charts of all experiments that were run; the first time this takes some seconds."""
    return read_charts(bench.index)


_WORTH = """
WITH topics AS (
    SELECT layer, memory, max(len(prefixes) * confidence) AS explained FROM {patterns} WHERE kind = 'semantic'
    GROUP BY layer, memory
), scored AS (
    SELECT layer, memory, name, covered / triggers AS share,
           coalesce(explained, 0) / triggers + CASE WHEN agrees THEN 0.5 ELSE 0 END AS worth
    FROM {names} LEFT JOIN topics USING (layer, memory) WHERE triggers >= 10
), best AS (
    SELECT *, row_number() OVER (PARTITION BY layer ORDER BY worth DESC, share DESC, memory) AS place FROM scored
)
SELECT layer, memory, name, share FROM best WHERE place = 1 ORDER BY worth DESC, layer LIMIT $1
"""


def worth_reading(index: ServedIndex, count: int = 6) -> list[Brief]:
    """One of a layer: its triggers share a subject, or its value promotes what follows them; the best first."""
    if not (index.has("names") and index.has("patterns")):
        return []
    rows = index.remember(("names", "patterns"), ("worth reading", count), lambda: index.sql(_WORTH, [count]))
    named = [(str(index.names.name(row["layer"], row["memory"])), row) for row in rows]
    return [Brief(name=name, value=row["share"], summary=row["name"]) for name, row in named]


def _missing(index: ServedIndex) -> list[tuple[str, str]]:
    """Tables that the index lacks, each with the command that makes it."""
    stages = (("values", "what every memory promotes"), ("patterns", "what triggers have in common"))
    missing = [(f"memlens {table} INDEX", what) for table, what in stages if not index.has(table)]
    if not experiment_tables(index):
        missing.append(("memlens experiment INDEX all", "the paper’s experiments"))
    return missing
