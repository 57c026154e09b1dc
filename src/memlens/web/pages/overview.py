"""The overview page: the model as a map, its layers as a table, the experiments' charts, memories that never fire.

The map has one cell per memory, a byte each. A layer with more memories than there is room for is drawn in cells of
several; a cell then stands for its highest memory, so that nothing rare disappears.
"""

from base64 import b64encode
from dataclasses import dataclass
from secrets import randbelow
from threading import Lock
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from numpy.typing import NDArray
from pydantic import BaseModel

from memlens.errors import UnknownName
from memlens.index.expert import read_routing
from memlens.index.layout import EXPERIMENTS, REPORT
from memlens.index.memory import read_summaries
from memlens.memory import GroupShape
from memlens.reports.sections import Section, Tables, make_sections
from memlens.web.pages.collections import names_beside
from memlens.web.rendering import PROBLEMS, Bench, IndexRoute, page
from memlens.web.served_index import TABLES, LayerStatistics, ServedIndex, Statistics, read_layers, read_statistics
from memlens.web.workbench import Workbench

_DRAWING = Lock()  # several pages may ask at once; one draws


def experiment_tables(index: ServedIndex) -> list[str]:
    """The experiments that were run, by the names of their tables."""
    found = sorted(name.removesuffix(".parquet") for name in index.manifest.files if name.startswith(EXPERIMENTS))
    return [name for name in found if index.has(name)]


def read_charts(index: ServedIndex) -> list[Section]:
    """Every experiment that was run; none costs nothing."""
    tables = experiment_tables(index)
    if not tables:
        return []
    with _DRAWING:
        return index.remember([*tables, "patterns"], ("charts",), lambda: _draw(index))


def _draw(index: ServedIndex) -> list[Section]:
    return [section for section in make_sections(Tables(index)) if section.is_present and section.charts]


NOTHING = 255  # the level of a memory of which nothing is known
_STEPS = 254


@dataclass(frozen=True)
class Measure:
    """Something the map can be coloured by."""

    name: str
    label: str
    meaning: str  # in one line
    scale: str = "linear"  # linear or log, from the lowest to the highest
    kinds: tuple[str, ...] = ()  # names of levels, where it is no number
    percent: bool = False


MEASURES = (
    Measure("max", "strongest coefficient", "the highest coefficient that any prefix of the corpus gives it"),
    Measure("frequency", "how often it fires", "the share of prefixes with a positive coefficient", percent=True),
    Measure("mean", "mean coefficient", "over all prefixes of the corpus"),
    Measure("max_p", "confidence of its value", "the probability of the token it promotes most", "log", percent=True),
    Measure(
        "agreement",
        "agreement",
        "is the token it promotes most the one that follows its top trigger?",
        kinds=("nothing follows", "another token", "agrees"),
    ),
    Measure(
        "class",
        "kind of pattern",
        "what the machine found its triggers to have in common",
        kinds=("no pattern", "shallow only", "semantic only", "both kinds"),
    ),
    Measure("dead", "never fires", "memories without any trigger", kinds=("fires", "never fires")),
)


class MapLayer(BaseModel):
    """One row of the map: how many memories it has, how many of them are one cell, and what names are made from."""

    layer: int
    memories: int
    size: int
    groups: list[GroupShape]


class MemoryMap(BaseModel):
    """Cells of all layers, one after another: a byte a cell, in base64. 255 is a cell of which nothing is known.

    A number's level l means low + (high - low) * l / 254, or on a log scale low * (high / low) ** (l / 254); for
    anything else it is a place in `kinds`. `highest` says which memory of a cell is meant (two bytes a cell, little
    endian), where any cell has several.
    """

    by: str
    label: str
    meaning: str
    scale: str
    percent: bool
    low: float | None
    high: float | None
    kinds: list[str]
    layers: list[MapLayer]
    levels: str
    highest: str | None


def measures(statistics: Statistics) -> list[Measure]:
    """What the tables of this index allow."""
    return [one for one in MEASURES if one.name in statistics.numbers or one.name in statistics.categories]


def draw_map(statistics: Statistics, by: str, room: int) -> MemoryMap:
    """At most `room` cells a layer."""
    measure = next((one for one in measures(statistics) if one.name == by), None)
    if measure is None:
        known = ", ".join(one.name for one in measures(statistics))
        raise UnknownName(f"the map cannot be coloured by '{by}'; it can by: {known}")
    low = high = None
    if measure.kinds:
        levels = statistics.categories[by]
    else:
        low, high = _range(statistics.numbers[by], measure.scale)
        levels = _levels(statistics.numbers[by], measure.scale, low, high)
    rows, cells, places = [], [], []
    for layer in statistics.layers:
        own = levels[statistics.rows_of_layer(layer)]
        size = max(1, -(-len(own) // room))
        highest, place = _cells(own, size)
        groups = list(statistics.names.layers[layer])
        rows.append(MapLayer(layer=layer, memories=len(own), size=size, groups=groups))
        cells.append(highest)
        places.append(place)
    is_binned = any(row.size > 1 for row in rows)
    return MemoryMap(
        by=by,
        label=measure.label,
        meaning=measure.meaning,
        scale=measure.scale,
        percent=measure.percent,
        low=low,
        high=high,
        kinds=list(measure.kinds),
        layers=rows,
        levels=b64encode(np.concatenate(cells).tobytes()).decode(),
        highest=b64encode(np.concatenate(places).astype("<u2").tobytes()).decode() if is_binned else None,
    )


def _range(numbers: NDArray[np.floating], scale: str) -> tuple[float, float]:
    """From the lowest to the highest, the most extreme 1 in 500 left out: one odd memory must not hide all others."""
    known = numbers[np.isfinite(numbers) & ((numbers > 0) | (scale != "log"))]
    if not len(known):
        return (1e-9, 1.0) if scale == "log" else (0.0, 1.0)
    low, high = (float(number) for number in np.quantile(known, [0.002, 0.998]))
    if scale != "log":
        low = min(low, 0.0) if low < 0.3 * high else low
    return low, high if high > low else low + max(abs(low), 1e-9)


def _levels(numbers: NDArray[np.floating], scale: str, low: float, high: float) -> NDArray[np.uint8]:
    known = np.isfinite(numbers)
    value = np.clip(np.where(known, numbers, low), low, high).astype(np.float64)
    share = np.log(value / low) / np.log(high / low) if scale == "log" else (value - low) / (high - low)
    return np.where(known, np.rint(share * _STEPS), NOTHING).astype(np.uint8)


def _cells(levels: NDArray[np.uint8], size: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The highest known level of each cell, and where in the cell it is."""
    if size == 1:
        return levels, np.zeros(len(levels), np.int64)
    padded = np.full(-(-len(levels) // size) * size, NOTHING, np.uint8)
    padded[: len(levels)] = levels
    block = padded.reshape(-1, size)
    order = np.where(block == NOTHING, -1, block.astype(np.int16))
    place = order.argmax(1)
    return block[np.arange(len(block)), place], place


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
def overview_page(request: Request, bench: Bench, by: str = "max", charts: Literal["yes", "no"] = "no") -> HTMLResponse:
    sections = read_charts(bench.index) if charts == "yes" else None
    content = overview_content(bench, by)
    return page(request, "overview.html", sections=sections, routing=read_routing(bench.index), **content)


def overview_content(bench: Workbench, by: str = "max") -> dict[str, Any]:
    """The variables of overview.html, but for the tables of the experiments."""
    index = bench.index
    found = measures(read_statistics(index))
    return {
        "counts": read_counts(bench),
        "layers": read_layers(index),
        "measures": found,
        "by": by if any(by == measure.name for measure in found) else found[0].name,
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
_REPORT_POLICY = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@router.get("/report", include_in_schema=False)
def report_page(bench: Bench) -> Response:
    """The report of the index, if it was made."""
    path = bench.index.folder / REPORT
    if not path.is_file():
        raise UnknownName("there is no report of this index yet; make it with `memlens report INDEX`")
    return Response(path.read_bytes(), media_type="text/html", headers={"content-security-policy": _REPORT_POLICY})


@router.get("/api/worth-reading")
def read_worth_reading(bench: Bench) -> list[Brief]:
    """Memories to begin with; `value` is the share of triggers that have one of its patterns."""
    return worth_reading(bench.index)


@router.get("/api/status")
def read_status(bench: Bench) -> Status:
    """Whether the model is loaded, and the same in words."""
    return Status.model_validate({"status": bench.status, "text": bench.status_text})


@router.get("/api/counts")
def read_counts(bench: Bench) -> Counts:
    """What was scanned."""
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
) -> MemoryMap:
    """All memories by one statistic, a byte each; several to a cell where there is no room."""
    index = bench.index
    return index.remember(TABLES, ("map", by, room), lambda: draw_map(read_statistics(index), by, room))


@router.get("/api/brief/{name}", responses=PROBLEMS)
def read_brief(bench: Bench, name: str, by: Annotated[str, Query(max_length=30)] = "max") -> Brief:
    """One memory in one line, with its exact number."""
    memory = bench.index.check(name)
    statistics = read_statistics(bench.index)
    column = statistics.numbers.get(by)
    kept, found = names_beside(bench.index).get(memory), read_summaries(bench.index, [memory]).get(memory)
    return Brief(
        name=str(memory),
        value=None if column is None else float(column[statistics.row_of(memory)]),
        summary=f"{kept.name}: {found or ''}" if kept and kept.name else found,
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
    """What would make these pages fuller, and how to get it."""
    stages = (("values", "what every memory promotes"), ("patterns", "what triggers have in common"))
    missing = [(f"memlens {table} INDEX", what) for table, what in stages if not index.has(table)]
    if not experiment_tables(index):
        missing.append(("memlens experiment INDEX all", "the paper’s experiments"))
    return missing
