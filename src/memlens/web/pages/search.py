"""The search page: memories by what triggers them, what they promote, what their triggers share, or their name.

Everything is found by memlens.index.search, as `memlens search` finds it.
"""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from pydantic import StringConstraints

from memlens.errors import MemlensError, SettingError, UnknownName
from memlens.index.expert import find_expert
from memlens.index.search import (
    MemoryHit,
    PatternHit,
    Place,
    SearchQuery,
    SearchResult,
    Statistic,
    StatisticHit,
    TriggerHit,
    ValueHit,
    search,
)
from memlens.memory import ROLES, ExpertId, MemoryId
from memlens.settings import parse_layers
from memlens.text import cell, probability, signed
from memlens.tracer.result import FiringHit, FiringOrder, FiringResult
from memlens.web.pages.collections import names_beside
from memlens.web.pages.memory import refuse_long_prompt
from memlens.web.rendering import LIVE_PROBLEMS, MODEL_PROBLEMS, Bench, LiveRoute, page, status_of
from memlens.web.served_index import ServedIndex, read_statistics
from memlens.web.workbench import Workbench, trigger_text

router = APIRouter(tags=["search"], route_class=LiveRoute)

_WORDS = {"max": "strongest", "frequency": "fires on", "mean": "mean", "max_p": "highest p"}


def read_asked(
    q: Annotated[
        tuple[Annotated[str, StringConstraints(max_length=1000)], ...],
        Query(max_length=100, description="The text, words or name to look for; in values, one token or several."),
    ] = (),
    place: Annotated[Place | Literal["fires"], Query(alias="in", description="Where to look.")] = "triggers",
    layers: Annotated[str, Query(max_length=100, description="Layers like 0-5,11.")] = "",
    kind: Annotated[
        Literal["", "none", "shallow", "semantic", "both"],
        Query(alias="class", description="What kind of pattern its triggers share."),
    ] = "",
    agreement: Annotated[
        Literal["", "yes", "no"], Query(description="Does its value promote what follows its top trigger?")
    ] = "",
    role: Annotated[str, Query(max_length=100, description="What it is for, as `memlens roles` says.")] = "",
    order: Annotated[Statistic, Query(description="By what to sort, where nothing is looked for.")] = "max",
    limit: Annotated[int, Query(ge=1, le=500)] = 20,
    ends: Annotated[bool, Query(description="In triggers: the prefix must end with the text.")] = False,
    ignore_case: Annotated[
        bool | None, Query(description="In triggers; by default capitals matter only where the text has some.")
    ] = None,
    substring: Annotated[bool, Query(description="In values and patterns: whatever contains the text.")] = False,
    bottom: Annotated[bool, Query(description="In values: memories that push the token down.")] = False,
    by: Annotated[FiringOrder, Query(description="Of memories that fire on a text.")] = "relative",
) -> dict[str, Any]:
    asked = dict(locals())
    texts = tuple(text for text in q if text)
    further = (*texts[1:], *([""] if texts and place == "values" else []))  # fields of the form, the last one empty
    return {**asked, "texts": texts, "q": " ".join(texts), "further": further}


Asked = Annotated[dict[str, Any], Depends(read_asked)]


def _query(asked: dict[str, Any]) -> SearchQuery:
    """The request as a query; refused where its layers cannot be read."""
    layers = asked["layers"].strip()
    return SearchQuery(
        asked["texts"],
        asked["place"],
        parse_layers(layers) if layers else None,
        asked["kind"] or None,
        asked["agreement"] or None,
        asked["role"] or None,
        *(asked[name] for name in ("order", "limit", "ends", "ignore_case", "substring", "bottom")),
    )


@router.get("/search", response_class=HTMLResponse, include_in_schema=False)
def search_page(request: Request, bench: Bench, asked: Asked) -> Response:
    named = _named(bench.index, asked["q"])
    if named is not None and asked["place"] in ("triggers", "name"):
        return RedirectResponse(f"/m/{named}" if isinstance(named, MemoryId) else f"/e/{named}", 303)
    return _answer(request, bench, asked, "search.html")


@router.get("/search/results", response_class=HTMLResponse, include_in_schema=False)
def search_results(request: Request, bench: Bench, asked: Asked) -> Response:
    """The list alone, for a page that is open already."""
    return _answer(request, bench, asked, "results.html")


@router.get("/api/fires", responses=LIVE_PROBLEMS)
def search_firing(
    bench: Bench,
    text: Annotated[str, Query(min_length=1, max_length=4000, description="The text that they fire on.")],
    order: Annotated[
        FiringOrder, Query(description="By their own range, or by effect on what is predicted.")
    ] = "relative",
    layers: Annotated[str, Query(max_length=100, description="Layers like 0-5,11.")] = "",
    limit: Annotated[int, Query(ge=1, le=500)] = 20,
) -> FiringResult:
    """Memories that fire on a text, the strongest in their own range first. Needs the model."""
    from memlens.tracer.firing import firing_of
    from memlens.tracer.prompt import read_prompt

    chosen = parse_layers(layers) if layers.strip() else None
    with bench.model() as model:
        refuse_long_prompt(model, text, bench.live.prompt_tokens)
        run = bench.kept.run(model, read_prompt(model, text))
        return firing_of(run, bench.index, order, chosen, limit)


@router.get("/api/search", responses=MODEL_PROBLEMS)
def search_memories(bench: Bench, asked: Asked) -> SearchResult:
    """Memories that pass all filters, the best matches first."""
    if asked["place"] == "fires":
        raise SettingError("memories that fire on a text are found at /api/fires?text=")
    return search(bench.index, _query(asked), trigger_text(bench.index))


def search_content(index: ServedIndex, asked: dict[str, Any]) -> dict[str, Any]:
    """The variables of search.html and results.html, but for the answer itself and the address of a longer one."""
    statistics = read_statistics(index)
    return {
        "asked": asked,
        "reason": reason,
        "orders": list(statistics.numbers),
        "has_classes": "class" in statistics.categories,
        "has_values": "agreement" in statistics.categories,
        "roles": ROLES if "role" in statistics.categories else (),
        "layer_count": len(statistics.layers),
        "kept": names_beside(index),
    }


def _answer(request: Request, bench: Workbench, asked: dict[str, Any], template: str) -> HTMLResponse:
    longer = request.url.include_query_params(limit=min(500, 5 * asked["limit"])).query
    content = {**search_content(bench.index, asked), "more": f"/search?{longer}"}
    try:
        fires = asked["place"] == "fires" and asked["q"]
        found = _firing(bench, asked) if fires else search_memories(bench, {**asked, **_as_list(asked)})
        return page(request, template, answer=found, problem=None, **content)
    except MemlensError as error:
        return page(request, template, status_of(error), answer=None, problem=str(error), **content)


def _as_list(asked: dict[str, Any]) -> dict[str, Any]:
    """The place to list memories from where nothing is written yet: no memory fires on an empty text."""
    return {"place": "triggers"} if asked["place"] == "fires" else {}


def _firing(bench: Workbench, asked: dict[str, Any]) -> FiringResult:
    return search_firing(bench, asked["q"], asked["by"], asked["layers"], asked["limit"])


def reason(hit: MemoryHit) -> str:
    """Why a memory was found, in a few words."""
    if isinstance(hit, FiringHit):
        return f"{100 * hit.relative:.0f}% of its range, effect {signed(hit.effect)}"
    if isinstance(hit, TriggerHit):
        side = "" if hit.end == "top" else " most negative"
        return f"{hit.matches}{side} trigger{'' if hit.matches == 1 else 's'}"
    if isinstance(hit, ValueHit):
        return f"place {hit.rank + 1:,}, p {probability(hit.p)}"
    if isinstance(hit, PatternHit):
        return f"in {hit.prefixes} of its triggers"
    if isinstance(hit, StatisticHit):
        shown = (probability if hit.statistic in ("frequency", "max_p") else cell)(hit.number)
        return f"{_WORDS[hit.statistic]} {shown}"
    return ""


def _named(index: ServedIndex, text: str) -> MemoryId | ExpertId | None:
    """The memory, or the expert, that a text is the whole name of, if there is one."""
    try:
        return index.check(text) if ExpertId.find(text) is None else find_expert(index, text)
    except UnknownName:
        return None
