"""The Search page: find memories by trigger, promoted token, pattern, name, or a text on which they fire.

The results are the same as those of `memlens search`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.concurrency import run_in_threadpool
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
from memlens.web.memory_map import read_statistics
from memlens.web.pages.collections import names_beside
from memlens.web.pages.memory import check_prompt_length
from memlens.web.rendering import LIVE_PROBLEMS, MODEL_PROBLEMS, Bench, page, run_model, status_of
from memlens.web.workbench import ServedIndex, Workbench

if TYPE_CHECKING:
    from memlens.models.memory_model import MemoryModel

router = APIRouter(tags=["search"])

_STATISTICS = {"max": "max", "frequency": "active on", "mean": "mean", "max_p": "max p"}


@dataclass(frozen=True)
class SearchRequest:
    """A search, as described by the form and the address. A filter that is not set is empty."""

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
        """The texts after the first.

        In a search for values, the last text is empty, for a field in which another token can be entered.
        """
        return (*self.texts[1:], *([""] if self.texts and self.place == "values" else []))

    @property
    def query(self) -> SearchQuery:
        """The query to run on the index. Raises SettingError for invalid layers."""
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
        Query(max_length=100, description="Text, words or name to search for; in values, one or more tokens."),
    ] = (),
    place: Annotated[Place | Literal["fires"], Query(alias="in", description="Where to search.")] = "triggers",
    layers: Annotated[str, Query(max_length=100, description="Layers like 0-5,11.")] = "",
    kind: Annotated[
        Literal["", "none", "shallow", "semantic", "both"],
        Query(alias="class", description="Find only memories with this kind of pattern."),
    ] = "",
    agreement: Annotated[
        Literal["", "yes", "no"],
        Query(description="Whether the top token of the value is the token that follows the top trigger."),
    ] = "",
    role: Annotated[
        str, Query(max_length=100, description="Role of the memories, as assigned by `memlens roles`.")
    ] = "",
    order: Annotated[Statistic, Query(description="Sort order of a search without a text.")] = "max",
    limit: Annotated[int, Query(ge=1, le=500)] = 20,
    ends: Annotated[bool, Query(description="In triggers: match at the end of a prefix only.")] = False,
    ignore_case: Annotated[
        bool | None,
        Query(description="In triggers: ignore case. By default, case matters only if the text contains capitals."),
    ] = None,
    substring: Annotated[bool, Query(description="In values and patterns: match within tokens and words.")] = False,
    bottom: Annotated[bool, Query(description="In values: find memories that demote the token.")] = False,
    by: Annotated[FiringOrder, Query(description="Sort order of memories that fire on a text.")] = "relative",
) -> SearchRequest:
    texts = tuple(text for text in q if text)
    return SearchRequest(
        texts, place, layers, kind, agreement, role, order, limit, ends, ignore_case, substring, bottom, by
    )


Asked = Annotated[SearchRequest, Depends(read_asked)]


@router.get("/search", response_class=HTMLResponse, include_in_schema=False)
async def search_page(request: Request, bench: Bench, asked: Asked) -> Response:
    name = _find_name(bench.index, asked.q)
    if name is not None and asked.place in ("triggers", "name"):
        return RedirectResponse(f"/m/{name}" if isinstance(name, MemoryId) else f"/e/{name}", 303)
    return await _show_results(request, bench, asked, "search.html")


@router.get("/search/results", response_class=HTMLResponse, include_in_schema=False)
async def search_results(request: Request, bench: Bench, asked: Asked) -> Response:
    """Return only the list of results, with which the script updates the open page."""
    return await _show_results(request, bench, asked, "results.html")


@router.get("/api/fires", responses=LIVE_PROBLEMS)
async def search_firing(
    request: Request,
    bench: Bench,
    text: Annotated[str, Query(min_length=1, max_length=4000, description="The text.")],
    order: Annotated[
        FiringOrder,
        Query(
            description="Sort by the coefficient relative to the memory's range, or by the effect on the prediction."
        ),
    ] = "relative",
    layers: Annotated[str, Query(max_length=100, description="Layers like 0-5,11.")] = "",
    limit: Annotated[int, Query(ge=1, le=500)] = 20,
) -> FiringResult:
    """List the memories that are active on a text. Needs the model.

    By default, memories whose coefficients are closest to their maximum come first.
    """
    return await run_model(request, bench, lambda model: _find_firing(bench, model, text, order, layers, limit))


@router.get("/api/search", responses=MODEL_PROBLEMS)
def search_memories(bench: Bench, asked: Asked) -> SearchResult:
    """List the memories that pass all filters, best matches first."""
    if asked.place == "fires":
        raise SettingError("in=fires works only at /api/fires?text=...")
    return search(bench.index, asked.query)


def _find_firing(
    bench: Workbench, model: MemoryModel, text: str, order: FiringOrder, layers: str, limit: int
) -> FiringResult:
    from memlens.tracer.firing import firing_of
    from memlens.tracer.prompt import read_prompt

    selected_layers = parse_layers(layers) if layers.strip() else None
    check_prompt_length(model, text, bench.live.prompt_tokens)
    run = bench.kept.run(model, read_prompt(model, text))
    return firing_of(run, bench.index, order, selected_layers, limit)


def search_content(index: ServedIndex, asked: SearchRequest) -> dict[str, Any]:
    """Return the variables of search.html and results.html, without the results."""
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


async def _show_results(request: Request, bench: Workbench, asked: SearchRequest, template: str) -> HTMLResponse:
    longer = request.url.include_query_params(limit=min(500, 5 * asked.limit)).query

    def show(answer: SearchResult | FiringResult | None, problem: str | None = None, status: int = 200) -> HTMLResponse:
        content = {**search_content(bench.index, asked), "more": f"/search?{longer}"}
        return page(request, template, status, answer=answer, problem=problem, **content)

    def show_firing(model: MemoryModel) -> HTMLResponse:
        return show(_find_firing(bench, model, asked.q, asked.by, asked.layers, asked.limit))

    try:
        if asked.place == "fires" and asked.q:
            return await run_model(request, bench, show_firing)
        # a search without a text lists all memories
        return await run_in_threadpool(lambda: show(search(bench.index, asked.query)))
    except MemlensError as error:
        return await run_in_threadpool(show, None, str(error), status_of(error))


def reason(hit: MemoryHit) -> str:
    """Return a few words that say why a memory was found."""
    if isinstance(hit, FiringHit):
        return f"{100 * hit.relative:.0f}% of its range, effect {signed(hit.effect)}"
    if isinstance(hit, TriggerHit):
        side = "" if hit.end == "top" else " most negative"
        return f"{hit.matches}{side} trigger{'' if hit.matches == 1 else 's'}"
    if isinstance(hit, ValueHit):
        return f"rank {hit.rank + 1:,}, p {probability(hit.p)}"
    if isinstance(hit, PatternHit):
        return f"in {hit.prefixes} of its triggers"
    if isinstance(hit, StatisticHit):
        shown = (probability if hit.statistic in ("frequency", "max_p") else cell)(hit.number)
        return f"{_STATISTICS[hit.statistic]} {shown}"
    return ""


def _find_name(index: ServedIndex, text: str) -> MemoryId | ExpertId | None:
    """Return the memory or expert with this name, or None."""
    try:
        return index.check(text) if ExpertId.find(text) is None else find_expert(index, text)
    except UnknownName:
        return None
