"""Search: memories by what triggers them, what they promote, what their triggers share, or their name."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from memlens.errors import MemlensError
from memlens.web.app_errors import status_of
from memlens.web.rendering import MODEL_PROBLEMS, Bench, page
from memlens.web.searching import Agreement, FoundAll, Kind, Order, Place, Wanted, named_memory, search
from memlens.web.statistics import read_statistics
from memlens.web.workbench import Workbench

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
