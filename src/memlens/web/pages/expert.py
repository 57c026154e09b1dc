"""The page of one expert of a mixture: how often it is chosen, on which tokens, and its strongest memories."""

from typing import Annotated

from fastapi import APIRouter, Path, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from memlens.index.memory import ExpertRecord, LayerRouting, find_expert, read_expert, read_routing
from memlens.memory import ExpertId
from memlens.web.rendering import PROBLEMS, Bench, IndexRoute, page
from memlens.web.served_index import ServedIndex

router = APIRouter(tags=["expert"], route_class=IndexRoute)
Name = Annotated[str, Path(description="Layer and expert from 0, like L3E5, or L3S0 of a shared one.", max_length=30)]
_TOKENS, _PREFIXES = 40, 20


@router.get("/e/{name}", response_class=HTMLResponse, include_in_schema=False)
def expert_page(request: Request, bench: Bench, name: Name) -> Response:
    expert = find_expert(bench.index, name)
    if name != str(expert):
        return RedirectResponse(f"/e/{expert}", 308)
    return page(
        request,
        "expert.html",
        view=read_expert(bench.index, expert),
        neighbours=_neighbours(bench.index, expert),
        tokens_shown=_TOKENS,
        prefixes_shown=_PREFIXES,
    )


@router.get("/api/experts", responses=PROBLEMS)
def read_all_routing(bench: Bench) -> list[LayerRouting]:
    """The use of each layer's experts by its router; empty for a model without experts."""
    return read_routing(bench.index)


@router.get("/api/experts/{name}", responses=PROBLEMS)
def read_one_expert(bench: Bench, name: Name) -> ExpertRecord:
    """Everything the index knows of one expert."""
    return read_expert(bench.index, name)


def _neighbours(index: ServedIndex, expert: ExpertId) -> list[ExpertId]:
    """The experts of its kind before and after it in its layer."""
    count = sum(group.count for group in index.names.layers[expert.layer] if group.kind == expert.kind)
    return [
        ExpertId(expert.layer, expert.kind, number)
        for number in (expert.expert - 1, expert.expert + 1)
        if 0 <= number < count
    ]
