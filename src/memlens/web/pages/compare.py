"""Two indexes, or two layers, beside each other: the memories that changed most, with both sides to look at."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, Response
from pydantic import BaseModel, Field

from memlens.errors import MemlensError, SettingError
from memlens.web.rendering import MODEL_PROBLEMS, Bench, page, status_of
from memlens.web.workbench import Workbench

if TYPE_CHECKING:
    from memlens.comparison.overlap import Comparison

router = APIRouter(tags=["compare"])

_TABLES = ("triggers", "corpus", "vocabulary", "values", "patterns", "names")
By = Annotated[Literal["triggers", "values", "patterns"], Query(description="What of a memory is compared.")]
Pair = Annotated[str, Query(max_length=24, description="A layer of each, like 3:5, matched by best counterpart.")]
Order = Annotated[Literal["changed", "alike"], Query(description="Which pairs come first.")]
Top = Annotated[int, Query(ge=1, le=200, description="Pairs to list.")]


class OverlapView(BaseModel):
    """Two lists as sets."""

    shared: int
    a: int
    b: int
    jaccard: float
    weighted: float = Field(description="Sum of the lesser weights by sum of the greater ones.")


class SideView(BaseModel):
    """One memory as one index knows it."""

    memory: str
    coefficient: float | None
    triggers: list[tuple[str, str]] = Field(description="The best prefixes: what stands before, and the last token.")
    promotes: list[str]
    max_p: float | None
    name: str | None
    kind: str | None


class ChangeView(BaseModel):
    """One memory and its partner."""

    change: float
    triggers: OverlapView
    endings: OverlapView
    values: OverlapView | None
    patterns: OverlapView | None
    before: SideView
    after: SideView


class LayerView(BaseModel):
    """All pairs of one layer."""

    layer: int
    other: int
    memories: int
    matched: int
    mean_change: float | None
    unchanged: int
    replaced: int


class ComparisonView(BaseModel):
    """Two indexes, or two layers, beside each other."""

    by: str
    measure: str
    models: tuple[str, str]
    same_model: bool
    same_corpus: bool
    memories: int
    matched: int
    layers: list[LayerView]
    changes: list[ChangeView]


@router.get("/compare", response_class=HTMLResponse, include_in_schema=False)
def compare_page(
    request: Request,
    bench: Bench,
    by: By = "triggers",
    layers: Pair = "",
    a: Annotated[str, Query(max_length=10)] = "",
    b: Annotated[str, Query(max_length=10)] = "",
    order: Order | None = None,
    top: Top = 20,
) -> Response:
    if (a or b) and not layers:  # a form's two fields
        layers = f"{a}:{b}"
    pair = layers or _first_pair(bench)
    order = order or ("alike" if pair else "changed")
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
        order=order,
        top=top,
        ours=bench.index.layers,
        theirs=(bench.other or bench.index).layers,
        kinds=("triggers", "values", "patterns"),
    )


@router.get("/api/compare", responses=MODEL_PROBLEMS)
def read_comparison(
    bench: Bench, by: By = "triggers", layers: Pair = "", order: Order = "changed", top: Top = 20
) -> ComparisonView:
    """The memories that changed most between the two indexes, or between two layers of the one that is served."""
    found = _compare(bench, by, layers, order, top)
    content: dict[str, Any] = asdict(found) | {"memories": found.memories, "matched": found.matched}
    return ComparisonView.model_validate(content | {"changes": [change.to_json() for change in found.changes]})


def _compare(bench: Workbench, by: str, layers: str, order: str, top: int) -> Comparison:
    """Computed once for as long as the tables are the same."""
    from memlens.comparison.compare import compare_indexes

    if bench.other is None and not layers:
        raise SettingError("there is one index only; name two of its layers, or serve with --compare INDEX")
    other = bench.other or bench.index
    stamps = tuple(other.stamp(table) for table in _TABLES)
    return bench.index.remember(
        _TABLES,
        ("comparison", by, layers, order, top, stamps),
        lambda: compare_indexes(
            bench.index, other, by=by, layers=layers or None, top=top, alike=order == "alike"
        ),
    )  # fmt: skip


def _first_pair(bench: Workbench) -> str:
    """What to show where nothing was asked for: of one index its last two layers, of two all memories by name."""
    if bench.other is not None or len(bench.index.layers) < 2:
        return ""
    return f"{bench.index.layers[-2]}:{bench.index.layers[-1]}"


def _numbers(pair: str) -> tuple[int, int] | None:
    """The pair for the form; what is none is none."""
    from memlens.comparison.compare import parse_pair

    try:
        return parse_pair(pair) if pair else None
    except SettingError:
        return None
