"""The Overview page: the map, the table of layers, the charts of the experiments, and dead memories."""

from secrets import randbelow
from threading import Lock
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from pydantic import BaseModel

from memlens.errors import UnknownName
from memlens.experiments.run import EXPERIMENTS
from memlens.index.format import EXPERIMENTS as EXPERIMENTS_FOLDER, REPORT
from memlens.index.memory import read_routing, read_summaries
from memlens.reports.report import WORKBENCH, with_links
from memlens.reports.sections import Section, Tables, make_sections
from memlens.text import tail
from memlens.web.memory_map import (
    LayerStatistics,
    MemoryMap,
    draw_map,
    list_measures,
    list_sorts,
    read_layers,
    read_similarity_orders,
    read_statistics,
)
from memlens.web.pages.collections import names_beside
from memlens.web.rendering import PROBLEMS, Bench, page
from memlens.web.workbench import ServedIndex, Workbench

router = APIRouter(tags=["overview"])
_CHARTS_LOCK = Lock()  # lets concurrent requests draw the charts only once


def list_experiment_tables(index: ServedIndex) -> list[str]:
    """Return the names of the tables of experiments that were run."""
    return sorted(name.removesuffix(".parquet") for name in index.manifest.files if name.startswith(EXPERIMENTS_FOLDER))


def read_charts(index: ServedIndex) -> list[Section]:
    """Return a section with charts for every experiment that was run. Charts are drawn only once per index."""

    def draw() -> list[Section]:
        return [section for section in make_sections(Tables(index)) if section.is_present and section.charts]

    if not list_experiment_tables(index):
        return []
    with _CHARTS_LOCK:
        return index.remember("charts", draw)


class Status(BaseModel):
    """The state of the model."""

    status: Literal["none", "loading", "ready", "failed"]
    text: str


class Counts(BaseModel):
    """Sizes of the model, the index and the corpus."""

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


class Example(BaseModel):
    """A memory to read first, with the held-out scores of its best pattern. `auroc_same_token` compares triggers with
    prefixes that have the same last token. `covered` is the share of its triggers that its patterns cover.
    """

    name: str
    pattern: str
    kind: str
    auroc: float
    auroc_same_token: float | None
    covered: float
    triggers: list[tuple[str, str]]  # the end of the text before the last token, and the last token
    promotes: list[str]
    agrees: bool  # whether the value promotes the token that follows the triggers


class Brief(BaseModel):
    """A summary of one memory in one line."""

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
    """Return the variables that overview.html needs both in the workbench and in a static site."""
    index = bench.index
    measures, sorts = list_measures(read_statistics(index)), list_sorts(read_statistics(index))
    return {
        "counts": read_counts(bench),
        "layers": read_layers(index),
        "measures": measures,
        "by": by if any(by == measure.name for measure in measures) else measures[0].name,
        "sorts": sorts,
        "sort": sort if sort in sorts else "place",
        "missing": _list_missing(bench),
        "worth": worth_reading(index),
        "experiments": sum(index.has(f"experiments/{name}") for name in EXPERIMENTS),
        "has_report": (index.folder / REPORT).is_file(),
    }


@router.get("/random", include_in_schema=False)
def random_memory(bench: Bench) -> RedirectResponse:
    """Redirect to a random memory that is not dead."""
    statistics = read_statistics(bench.index)
    active = np.flatnonzero(statistics.categories["dead"] == 0)
    row = int(active[randbelow(len(active))]) if len(active) else 0
    layer = int(np.searchsorted(statistics.starts, row, "right")) - 1
    name = bench.index.names.name(statistics.layers[layer], row - int(statistics.starts[layer]))
    return RedirectResponse(f"/m/{name}", 303, headers={"cache-control": "no-store"})


# A report contains scripts and may come from someone else, so it runs in a sandbox and cannot send requests.
_REPORT_HEADERS = {
    "content-security-policy": (
        "sandbox allow-scripts allow-downloads; default-src 'none'; script-src 'unsafe-inline'; "
        "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "unsafe-none",  # required for a sandboxed page
}


@router.get("/report", include_in_schema=False)
def report_page(bench: Bench) -> Response:
    """Return the report of the index, if there is one."""
    path = bench.index.folder / REPORT
    if not path.is_file():
        raise UnknownName(f"this index has no report yet; write one with `memlens report {bench.folder}`")
    text = with_links(path.read_text(encoding="utf-8", errors="replace"), WORKBENCH)
    return Response(text, media_type="text/html", headers=_REPORT_HEADERS)


@router.get("/api/worth-reading")
def read_worth_reading(bench: Bench) -> list[Example]:
    """List the memories whose patterns have the highest held-out scores, at most one per layer."""
    return worth_reading(bench.index)


@router.get("/api/status")
def read_status(bench: Bench) -> Status:
    """Return the state of the model, as a word and as a sentence."""
    return Status.model_validate({"status": bench.status, "text": bench.status_text})


@router.get("/api/counts")
def read_counts(bench: Bench) -> Counts:
    """Return the size of the model, the index and the corpus."""
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
    """Return the statistics of every layer."""
    return read_layers(bench.index)


@router.get("/api/map", responses=PROBLEMS)
def read_map(
    bench: Bench,
    by: Annotated[str, Query(max_length=30)] = "max",
    room: Annotated[int, Query(ge=1, le=65536, description="Number of cells per layer.")] = 4096,
    sort: Annotated[
        str,
        Query(max_length=30, description="Order of the memories in a layer: place, level, class, role or likeness."),
    ] = "place",
) -> MemoryMap:
    """Return one statistic of all memories as one byte per cell.

    If there are more memories than cells, a cell stands for several memories.
    """
    index = bench.index

    def draw() -> MemoryMap:
        return draw_map(read_statistics(index), by, room, sort, lambda: read_similarity_orders(index))

    return index.remember(("map", by, room, sort), draw)


@router.get("/api/brief/{name}", responses=PROBLEMS)
def read_brief(bench: Bench, name: str, by: Annotated[str, Query(max_length=30)] = "max") -> Brief:
    """Return a summary of one memory in one line, with the exact value of a statistic."""
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
    """Return the charts of all experiments that were run. The first request takes some seconds."""
    return read_charts(bench.index)


_WORTH = """
WITH tested AS (
    SELECT *, auroc + coalesce(auroc_same_token, 0.5) AS held_out,
           row_number() OVER (PARTITION BY layer, memory ORDER BY held_out DESC, pattern) AS place
    FROM {patterns} WHERE auroc > 0.7
), best AS (
    SELECT layer, memory, description, kind, auroc, auroc_same_token, covered / triggers AS covered, promotes,
           coalesce(agrees, false) AS agrees, held_out + CASE WHEN agrees THEN 0.25 ELSE 0 END AS evidence
    FROM {names} JOIN tested USING (layer, memory) WHERE place = 1 AND triggers >= 10
)
SELECT * FROM best QUALIFY row_number() OVER (PARTITION BY layer ORDER BY evidence DESC, covered DESC, memory) = 1
ORDER BY evidence DESC, layer LIMIT $1
"""


def worth_reading(index: ServedIndex, count: int = 6) -> list[Example]:
    """Return the memories with the best evidence, at most one per layer.

    The evidence is the sum of the best pattern's two held-out AUROCs, plus 0.25 if the value promotes the token that
    follows the triggers.
    """
    if not (index.has("names") and index.has("patterns")):
        return []
    return index.remember(("worth reading", count), lambda: _read_examples(index, count))


def _read_examples(index: ServedIndex, count: int) -> list[Example]:
    rows = index.sql(_WORTH, [count])
    names = [index.names.name(row["layer"], row["memory"]) for row in rows]
    triggers = index.triggers_of(names, limit=3)
    return [
        Example(
            name=str(name),
            pattern=row["description"],
            **{field: row[field] for field in ("kind", "auroc", "auroc_same_token", "covered", "agrees")},
            triggers=[(tail(trigger.before, 60), trigger.token) for trigger in triggers[name]],
            promotes=[index.vocabulary[token] for token in row["promotes"] or ()],
        )
        for name, row in zip(names, rows, strict=True)
    ]


def _list_missing(bench: Workbench) -> list[tuple[str, str]]:
    """Return the command and the purpose of every stage that was not run."""
    stages = (("values", "what each memory promotes"), ("patterns", "what triggers have in common"))
    missing = [(f"memlens {table} {bench.folder}", what) for table, what in stages if not bench.index.has(table)]
    if not list_experiment_tables(bench.index):
        missing.append((f"memlens experiment {bench.folder} all", "the paper’s experiments"))
    return missing
