"""The search page: memories by what triggers them, what they promote, what their triggers share, or their name.

Everything is found by memlens.index.search, as `memlens search` finds it.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from pydantic import StringConstraints

from memlens.errors import MemlensError, SettingError, UnknownName
from memlens.index.memory import find_expert
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


@dataclass(frozen=True)
class SearchRequest:
    """A search as the form of the page and the address write it; empty where a filter is not set."""

    texts: tuple[str, ...]
    place: Place | Literal["fires"]
    layers: str
    kind: Literal["", "none", "shallow", "semantic", "both"]
    agreement: Literal["", "yes", "no"]
    role: str
    order: Statistic
    limit: int
    ends: bool
    ignore_case: bool | None
    substring: bool
    bottom: bool
    by: FiringOrder

    @property
    def q(self) -> str:
        return " ".join(self.texts)

    @property
    def further(self) -> tuple[str, ...]:
        """The fields of the form after the first; in values the last one is empty, for another token."""
        return (*self.texts[1:], *([""] if self.texts and self.place == "values" else []))

    @property
    def query(self) -> SearchQuery:
        """The same for the tables, of which none knows what fires; refused where its layers cannot be read."""
        return SearchQuery(
            self.texts,
            "triggers" if self.place == "fires" else self.place,
            parse_layers(self.layers.strip()) if self.layers.strip() else None,
            self.kind or None,
            self.agreement or None,
            self.role or None,
            self.order,
            self.limit,
            self.ends,
            self.ignore_case,
            self.substring,
            self.bottom,
        )


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
) -> SearchRequest:
    texts = tuple(text for text in q if text)
    return SearchRequest(
        texts, place, layers, kind, agreement, role, order, limit, ends, ignore_case, substring, bottom, by
    )


Asked = Annotated[SearchRequest, Depends(read_asked)]


@router.get("/search", response_class=HTMLResponse, include_in_schema=False)
def search_page(request: Request, bench: Bench, asked: Asked) -> Response:
    named = _named(bench.index, asked.q)
    if named is not None and asked.place in ("triggers", "name"):
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
    if asked.place == "fires":
        raise SettingError("memories that fire on a text are found at /api/fires?text=")
    return search(bench.index, asked.query, trigger_text(bench.index))


def search_content(index: ServedIndex, asked: SearchRequest) -> dict[str, Any]:
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


def _answer(request: Request, bench: Workbench, asked: SearchRequest, template: str) -> HTMLResponse:
    longer = request.url.include_query_params(limit=min(500, 5 * asked.limit)).query
    content = {**search_content(bench.index, asked), "more": f"/search?{longer}"}
    try:
        return page(request, template, answer=_found(bench, asked), problem=None, **content)
    except MemlensError as error:
        return page(request, template, status_of(error), answer=None, problem=str(error), **content)


def _found(bench: Workbench, asked: SearchRequest) -> SearchResult | FiringResult:
    if asked.place == "fires" and asked.q:
        return search_firing(bench, asked.q, asked.by, asked.layers, asked.limit)
    return search(bench.index, asked.query, trigger_text(bench.index))  # where nothing is written, all memories


def reason(hit: MemoryHit) -> str:
    """The reason why a memory was found, in a few words."""
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
