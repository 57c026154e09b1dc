"""The Compare page: two indexes or two layers side by side."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, Response

from memlens.comparison.compare import ASPECTS, IndexComparison, compare_indexes, parse_pair
from memlens.errors import MemlensError, SettingError
from memlens.web.rendering import MODEL_PROBLEMS, Bench, page, status_of
from memlens.web.workbench import Workbench

router = APIRouter(tags=["compare"])

By = Annotated[Literal["triggers", "values", "patterns", "roles"], Query(description="What to compare.")]
Pair = Annotated[
    str,
    Query(
        max_length=24,
        description="A layer of each index, like 3:5. Each memory is compared with its most similar counterpart.",
    ),
]
Order = Annotated[
    Literal["changed", "alike"] | None,
    Query(description="Pairs to list first. Default: `changed` for two indexes, `alike` for two layers."),
]
Top = Annotated[int, Query(ge=1, le=200, description="Number of pairs to list.")]


@router.get("/compare", response_class=HTMLResponse, include_in_schema=False)
def compare_page(
    request: Request,
    bench: Bench,
    by: By = "triggers",
    layers: Pair = "",
    a: Annotated[str, Query(max_length=10)] = "",
    b: Annotated[str, Query(max_length=10)] = "",
    order: Order = None,
    top: Top = 10,
) -> Response:
    if (a or b) and not layers:  # use the layers from the two fields of the form
        layers = f"{a}:{b}"
    pair = layers or _first_pair(bench)
    comparison, problem, status = None, "", 200
    try:
        if pair or bench.other is not None:
            comparison = _compare(bench, by, pair, order, top)
    except MemlensError as error:
        problem, status = str(error), status_of(error)
    return page(
        request,
        "compare.html",
        status,
        found=comparison,
        problem=problem,
        by=by,
        pair=_parse_pair(pair),
        order=order if comparison is None else "alike" if comparison.alike else "changed",
        top=top,
        ours=bench.index.layers,
        theirs=(bench.other or bench.index).layers,
        kinds=ASPECTS,
    )


@router.get("/api/compare", responses=MODEL_PROBLEMS)
def read_comparison(
    bench: Bench, by: By = "triggers", layers: Pair = "", order: Order = None, top: Top = 20
) -> IndexComparison:
    """List the memories that changed most between two indexes, or the most similar ones of two layers."""
    return _compare(bench, by, layers, order, top)


def _compare(bench: Workbench, by: str, layers: str, order: str | None, top: int) -> IndexComparison:
    """Return the comparison, which is computed only once per index."""
    if bench.other is None and not layers:
        raise SettingError(
            "the workbench has only one index; name two of its layers, or serve a second index with --compare INDEX"
        )
    other, alike = bench.other or bench.index, None if order is None else order == "alike"
    return bench.index.remember(
        ("comparison", by, layers, alike, top),
        lambda: compare_indexes(bench.index, other, by=by, layers=layers or None, top=top, alike=alike),
    )


def _first_pair(bench: Workbench) -> str:
    """Return the default pair of layers: the last two of a single index.

    For two indexes, it is "", which compares memories by name.
    """
    if bench.other is not None or len(bench.index.layers) < 2:
        return ""
    return f"{bench.index.layers[-2]}:{bench.index.layers[-1]}"


def _parse_pair(pair: str) -> tuple[int, int] | None:
    """Return the layers to show as selected in the form, or None if `layers` is not a valid pair."""
    try:
        return parse_pair(pair) if pair else None
    except SettingError:
        return None
