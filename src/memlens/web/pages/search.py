"""One search over triggers, values, patterns and names, with filters that hold for all of them.

    text in triggers    capitals matter only where the text has some
    a token in values   the token of that text, with or without a space before it; else every token that contains it
    words in patterns   of their descriptions
    a name              L3N512, or the beginning of one
    nothing             all memories that pass the filters, by a statistic

Each place gives what the function of `memlens search` gives, from arrays in memory. Knows no HTML.

Search: memories by what triggers them, what they promote, what their triggers share, or their name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from numpy.typing import NDArray
from pydantic import BaseModel

from memlens.errors import MemlensError, SettingError, UnknownName
from memlens.memory import MemoryId
from memlens.scanner.settings import parse_layers
from memlens.web.memory_view import TokenView, read_summaries
from memlens.web.rendering import MODEL_PROBLEMS, Bench, page, status_of
from memlens.web.search_arrays import find_patterns, find_tokens, find_triggers, read_readings
from memlens.web.served_index import ServedIndex
from memlens.web.statistics import Statistics, read_statistics
from memlens.web.workbench import Workbench

Place = Literal["triggers", "values", "patterns", "name"]
Kind = Literal["", "none", "shallow", "semantic", "both"]
Agreement = Literal["", "yes", "no"]
Order = Literal["max", "frequency", "mean", "max_p"]

_MOST_TOKENS = 200  # that contain a text; more of them say nothing
_NAME = re.compile(r"[Ll]([0-9]{1,9})(?:[NnDd]([0-9]{0,9}))?")


@dataclass(frozen=True)
class Wanted:
    """What somebody looks for."""

    text: str = ""
    place: Place = "triggers"
    layers: str = ""
    kind: Kind = ""
    agreement: Agreement = ""
    order: Order = "max"
    limit: int = 20


class FoundTrigger(BaseModel):
    """The best matching prefix, with the text's place in it."""

    end: str
    rank: int
    before: str
    token: str
    after: str


class Found(BaseModel):
    """A memory, and why it was found."""

    name: str
    why: str
    trigger: FoundTrigger | None = None
    tokens: list[TokenView] = []
    pattern: str | None = None
    kind: str | None = None
    summary: str | None = None


class FoundAll(BaseModel):
    """The best matches, and how many there are in all."""

    total: int
    found: list[Found]
    note: str | None = None


def search(index: ServedIndex, wanted: Wanted) -> FoundAll:
    """Refused with one line where the filters or the tables do not allow it."""
    statistics = read_statistics(index)
    mask = _mask(index, statistics, wanted)
    if not wanted.text:
        answer = _all(index, statistics, wanted, mask)
    elif wanted.place == "triggers":
        answer = _in_triggers(index, wanted, mask)
    elif wanted.place == "values":
        answer = _in_values(index, wanted, mask)
    elif wanted.place == "patterns":
        answer = _in_patterns(index, wanted, mask)
    else:
        answer = _by_name(index, statistics, wanted, mask)
    summaries = read_summaries(index, [MemoryId.parse(one.name) for one in answer.found])
    for one in answer.found:
        one.summary = summaries.get(MemoryId.parse(one.name))
    return answer


def named_memory(index: ServedIndex, text: str) -> MemoryId | None:
    """The memory that a text is the whole name of, if there is one."""
    try:
        return index.check(text)
    except UnknownName:
        return None


def _mask(index: ServedIndex, statistics: Statistics, wanted: Wanted) -> NDArray[np.bool_] | None:
    if not (wanted.layers.strip() or wanted.kind or wanted.agreement):
        return None
    layers = parse_layers(wanted.layers) if wanted.layers.strip() else None
    for layer in layers or ():
        index.memories(layer)  # refuses one that is not there
    if wanted.kind:
        index.path("patterns")  # says which command makes it
    if wanted.agreement:
        index.path("values")
    return statistics.chosen(layers, wanted.kind or None, wanted.agreement or None)


def _all(index: ServedIndex, statistics: Statistics, wanted: Wanted, mask: NDArray[np.bool_] | None) -> FoundAll:
    if wanted.order == "max_p":
        index.path("values")
    column = statistics.numbers[wanted.order]
    rows = np.flatnonzero(np.isfinite(column) if mask is None else mask & np.isfinite(column))
    shown = min(wanted.limit, len(rows))
    if not shown:
        return FoundAll(total=0, found=[])
    least = np.partition(column[rows], -shown)[-shown]
    likely = rows[column[rows] >= least]
    best = likely[np.lexsort((likely, -column[likely]))][:shown]
    found = [
        Found(name=str(statistics.memory_at(row)), why=_told(wanted.order, float(column[row]))) for row in best.tolist()
    ]
    return FoundAll(total=len(rows), found=found)


def _told(order: str, number: float) -> str:
    if order in ("frequency", "max_p"):
        shown = f"{100 * number:.3g}%" if number >= 1e-4 else f"{number:.1e}"
    else:
        shown = f"{number:.4g}"
    return {"max": "strongest ", "frequency": "fires on ", "mean": "mean ", "max_p": "highest p "}[order] + shown


def _in_triggers(index: ServedIndex, wanted: Wanted, mask: NDArray[np.bool_] | None) -> FoundAll:
    ignore_case = wanted.text == wanted.text.lower()
    result = find_triggers(index, wanted.text, mask, ignore_case=ignore_case, limit=wanted.limit)
    found = []
    for match in result.found:
        best = match.best
        trigger = FoundTrigger(end=match.end, rank=best.rank, before=best.before, token=best.token, after=best.after)
        side = "" if match.end == "top" else " most negative"
        plural = "" if match.matches == 1 else "s"
        found.append(Found(name=str(match.memory), why=f"{match.matches}{side} trigger{plural}", trigger=trigger))
    return FoundAll(total=result.total, found=found)


def _in_values(index: ServedIndex, wanted: Wanted, mask: NDArray[np.bool_] | None) -> FoundAll:
    index.path("values")
    readings = read_readings(index)
    texts = [text for text in (wanted.text, f" {wanted.text}") if text in readings]
    note = None
    if not texts:
        texts = sorted(reading for reading in readings if wanted.text in reading)
        if not texts:
            return FoundAll(total=0, found=[], note="no token of this model contains this text")
        if len(texts) > _MOST_TOKENS:
            return FoundAll(total=0, found=[], note=f"{len(texts):,} tokens contain this text; write more of it")
        note = f"not a token of its own; {len(texts)} tokens contain it"
    found, total = find_tokens(index, texts, mask, wanted.limit)
    shown = [
        Found(
            name=str(one.memory),
            why=f"p {100 * one.p:.3g}%" if one.p >= 1e-4 else f"p {one.p:.1e}",
            tokens=[TokenView(token=token.token, text=token.text, number=token.p) for token in one.found],
        )
        for one in found
    ]
    return FoundAll(total=total, found=shown, note=note)


def _in_patterns(index: ServedIndex, wanted: Wanted, mask: NDArray[np.bool_] | None) -> FoundAll:
    result = find_patterns(index, wanted.text, mask, wanted.limit)
    found = [
        Found(name=str(one.memory), why=f"in {one.prefixes} of its triggers", pattern=one.description, kind=one.kind)
        for one in result.found
    ]
    return FoundAll(total=result.total, found=found)


def _by_name(index: ServedIndex, statistics: Statistics, wanted: Wanted, mask: NDArray[np.bool_] | None) -> FoundAll:
    match = _NAME.fullmatch(wanted.text.strip())
    if match is None:
        raise SettingError(f"'{wanted.text}' is not a memory's name; write layer and memory like L3N512, both from 0")
    layer = int(match[1])
    rows = np.arange(index.memories(layer))
    begin = match[2] or ""
    if begin:  # 51 is meant, or the beginning of 51, 510, 5100
        number = int(begin)
        spans = [(number * 10**power, (number + 1) * 10**power) for power in range(10 if number else 1)]
        rows = np.concatenate([np.arange(low, min(high, len(rows))) for low, high in spans])
    if mask is not None:
        rows = rows[mask[statistics.rows_of_layer(layer)][rows]]
    found = [Found(name=str(MemoryId(layer, row)), why="") for row in rows[: wanted.limit].tolist()]
    return FoundAll(total=len(rows), found=found)


router = APIRouter(tags=["search"])


def _wanted(
    q: Annotated[str, Query(max_length=200, description="The text, token, words or name to look for.")] = "",
    place: Annotated[Place, Query(alias="in", description="Where to look.")] = "triggers",
    layers: Annotated[str, Query(max_length=100, description="Layers like 0-5,11.")] = "",
    kind: Annotated[Kind, Query(alias="class", description="What kind of pattern its triggers share.")] = "",
    agreement: Annotated[Agreement, Query(description="Does its value promote what follows its top trigger?")] = "",
    order: Annotated[Order, Query(description="By what to sort, where nothing is looked for.")] = "max",
    limit: Annotated[int, Query(ge=1, le=500)] = 20,
) -> Wanted:
    return Wanted(q, place, layers, kind, agreement, order, limit)


Asked = Annotated[Wanted, Depends(_wanted)]


@router.get("/search", response_class=HTMLResponse, include_in_schema=False)
def search_page(request: Request, bench: Bench, wanted: Asked) -> Response:
    memory = named_memory(bench.index, wanted.text)
    if memory is not None and wanted.place in ("triggers", "name"):
        return RedirectResponse(f"/m/{memory}", 303)
    return _answer(request, bench, wanted, "search.html")


@router.get("/search/results", response_class=HTMLResponse, include_in_schema=False)
def search_results(request: Request, bench: Bench, wanted: Asked) -> Response:
    """The list alone, for a page that is open already."""
    return _answer(request, bench, wanted, "results.html")


@router.get("/api/search", responses=MODEL_PROBLEMS)
def search_memories(bench: Bench, wanted: Asked) -> FoundAll:
    """Memories that pass all filters, the best matches first."""
    return search(bench.index, wanted)


def _answer(request: Request, bench: Workbench, wanted: Wanted, template: str) -> HTMLResponse:
    statistics = read_statistics(bench.index)
    content: dict[str, Any] = {
        "wanted": wanted,
        "orders": list(statistics.numbers),
        "has_classes": "class" in statistics.categories,
        "has_values": "agreement" in statistics.categories,
        "layer_count": len(statistics.layers),
        "more": _more(request, wanted),
    }
    try:
        return page(request, template, answer=search(bench.index, wanted), problem=None, **content)
    except MemlensError as error:
        return page(request, template, status_of(error), answer=None, problem=str(error), **content)


def _more(request: Request, wanted: Wanted) -> str:
    """The address of a longer list of the same."""
    return "/search?" + str(request.url.include_query_params(limit=min(500, 5 * wanted.limit)).query)
