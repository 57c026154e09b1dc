"""Dense, shared and routed memories told apart: columns by kind in the tables of a mixture of experts, and their chart.

A figure of a layer speaks of all its memories together. In a model with a router the same number stands beside it for
each kind: `routed_rate` beside `rate`. Other models, and layers without memories of a kind, have nothing there.
"""

from collections.abc import Iterator, Mapping

from memlens.experiments.experiment import ModelShape, Panel
from memlens.experiments.verdicts import Row
from memlens.memory import KINDS, MemoryNames


def kind_columns(*names: str) -> Iterator[str]:
    """Columns of a schema, one of each for every kind."""
    return (f"{kind}_{name}" for kind in KINDS for name in names)


def kind_spans(names: MemoryNames, layer: int) -> dict[str, range]:
    """kind -> the numbers of its memories in a layer; none in a model without a router."""
    if not any(group.kind == "routed" for groups in names.layers.values() for group in groups):
        return {}
    spans: dict[str, range] = {}
    first = 0
    for group in names.layers[layer]:
        last = first + group.count * group.size
        spans[group.kind] = range(spans[group.kind].start if group.kind in spans else first, last)
        first = last
    return spans


def of_kind(kind: str, columns: Mapping[str, object]) -> Row:
    """Columns as those of a kind."""
    return {f"{kind}_{name}": value for name, value in columns.items()}


def draw_kinds(
    name: str, rows: list[Row], column: str, title: str, form: str, text: str, model: ModelShape
) -> list[Panel]:
    """A chart with a curve for each kind; none where no row tells kinds apart."""
    from memlens.experiments import charts

    own = [
        {"whose": charts.YOURS, "layer": row["layer"], "kind": kind, "value": row[f"{kind}_{column}"]}
        | {edge: row.get(f"{kind}_{edge}") for edge in ("low", "high")}
        for row in rows
        for kind in KINDS
        if row.get(f"{kind}_{column}") is not None
    ]
    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in own)]
    if not kinds:
        return []
    chart = charts.grouped_curves(charts.with_depth(own, model.layers), "kind", kinds, title, form, model.layers)
    return [charts.panel(f"{name}-kinds", chart, f"{text}, by kind of memory and depth")]
