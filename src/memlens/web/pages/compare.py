"""The page Compare: two indexes, or two layers, side by side, with the memories that changed most."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, Response

from memlens.comparison.compare import ASPECTS, IndexComparison, compare_indexes, parse_pair
from memlens.errors import MemlensError, SettingError
from memlens.web.rendering import MODEL_PROBLEMS, Bench, IndexRoute, page, status_of
from memlens.web.workbench import Workbench

router = APIRouter(tags=["compare"], route_class=IndexRoute)

_TABLES = ("triggers", "corpus", "vocabulary", "values", "patterns", "names", "roles")
By = Annotated[Literal["triggers", "values", "patterns", "roles"], Query(description="What of a memory is compared.")]
Pair = Annotated[str, Query(max_length=24, description="A layer of each, like 3:5, matched by best counterpart.")]
Order = Annotated[
    Literal["changed", "alike"] | None, Query(description="What comes first; by default changed, of two layers alike.")
]
Top = Annotated[int, Query(ge=1, le=200, description="Pairs to list.")]


@router.get("/compare", response_class=HTMLResponse, include_in_schema=False)
def compare_page(
    request: Request,
    bench: Bench,
    by: By = "triggers",
    layers: Pair = "",
    a: Annotated[str, Query(max_length=10)] = "",
    b: Annotated[str, Query(max_length=10)] = "",
    order: Order = None,
    top: Top = 20,
) -> Response:
    if (a or b) and not layers:  # a form's two fields
        layers = f"{a}:{b}"
    pair = layers or _first_pair(bench)
    found, problem, status = None, "", 200
    try:
        if pair or bench.other is not None:
            found = _compare(bench, by, pair, order, top)
    except MemlensError as error:
        problem, status = str(error), status_of(error)
    return page(
        request,
        "compare.html",
        status,
        found=found,
        problem=problem,
        by=by,
        pair=_numbers(pair),
        order=order if found is None else "alike" if found.alike else "changed",
        top=top,
        ours=bench.index.layers,
        theirs=(bench.other or bench.index).layers,
        kinds=ASPECTS,
    )


@router.get("/api/compare", responses=MODEL_PROBLEMS)
def read_comparison(
    bench: Bench, by: By = "triggers", layers: Pair = "", order: Order = None, top: Top = 20
) -> IndexComparison:
    """The memories that changed most between the two indexes, or are most alike in two layers of the first."""
    return _compare(bench, by, layers, order, top)


def _compare(bench: Workbench, by: str, layers: str, order: str | None, top: int) -> IndexComparison:
    """The comparison, computed once as long as the tables stay the same."""
    if bench.other is None and not layers:
        raise SettingError("there is one index only; name two of its layers, or serve with --compare INDEX")
    other, alike = bench.other or bench.index, None if order is None else order == "alike"
    stamps = tuple(other.stamp(table) for table in _TABLES)
    return bench.index.remember(
        _TABLES,
        ("comparison", by, layers, alike, top, stamps),
        lambda: compare_indexes(bench.index, other, by=by, layers=layers or None, top=top, alike=alike),
    )


def _first_pair(bench: Workbench) -> str:
    """The default: of one index its last two layers, of two indexes all memories by name."""
    if bench.other is not None or len(bench.index.layers) < 2:
        return ""
    return f"{bench.index.layers[-2]}:{bench.index.layers[-1]}"


def _numbers(pair: str) -> tuple[int, int] | None:
    """The pair of layers that the form shows as chosen; None for anything else."""
    try:
        return parse_pair(pair) if pair else None
    except SettingError:
        return None
