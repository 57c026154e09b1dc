"""`memlens compare`: which memories changed most between two indexes, or are most alike in two layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

import memlens
from memlens.cli.options import IndexFolder, with_screen
from memlens.cli.screen import Screen
from memlens.text import MISSING, cut_left, cut_right, number, percent, plain_table, quoted, visible

if TYPE_CHECKING:
    from memlens.comparison.compare import IndexComparison, MemoryChange, MemorySide

_TOKEN_WIDTH, _TOKENS = 14, 6
_GAP, _LEAST_WIDTH, _NARROW, _WIDE = 2, 10, 76, 110  # columns of a terminal
_WORDS = {"prefixes": "trigger prefixes", "endings": "the triggers' last tokens", "tokens": "promoted tokens"}


@with_screen(json=True)
def compare(
    screen: Screen,
    index: IndexFolder,
    other: Annotated[str, typer.Argument(metavar="INDEX", help="The index to compare it with; may be the same.")],
    by: Annotated[
        str, typer.Option(metavar="triggers|values|patterns|roles", help="What of a memory is compared.")
    ] = "triggers",
    layers: Annotated[
        str | None,
        typer.Option(metavar="A:B", help="Match a layer of each by best counterpart. Default: the same memories."),
    ] = None,
    top: Annotated[int, typer.Option(metavar="N", help="Memories to list.")] = 20,
    alike: Annotated[
        bool | None, typer.Option("--alike/--changed", help="What comes first. Default: changed; of two layers alike.")
    ] = None,
) -> None:
    """Show which memories changed most, or of two layers are most alike: triggers, values, patterns or roles."""
    from memlens.comparison.compare import compare_indexes

    comparison = compare_indexes(memlens.Index(index), memlens.Index(other), by=by, layers=layers, top=top, alike=alike)
    if screen.as_json:
        screen.json(comparison)
        return
    screen.result(_head(comparison))
    screen.result()
    screen.result(_layer_table(comparison))
    if not comparison.changes:
        screen.note("no memory has a counterpart")
        return
    screen.result()
    screen.result(_change_table(screen, comparison))


def _head(comparison: IndexComparison) -> Text:
    line = Text.assemble(
        (visible(comparison.models[0]), "bold"), (" → ", "dim"), (visible(comparison.models[1]), "bold")
    )
    same = [
        "one model" if comparison.same_model else "two models",
        "one corpus" if comparison.same_corpus else "two corpora",
        f"compared by {_WORDS.get(comparison.measure, comparison.measure)}",
        "most alike first" if comparison.alike else "most changed first",
    ]
    return line.append_text(Text("   " + ", ".join(same), "dim"))


def _layer_table(comparison: IndexComparison) -> Table:
    table = plain_table([">layer", ">memories", ">compared", ">mean change", ">unchanged", ">all new"])
    for layer in comparison.layers:
        name = str(layer.layer) if layer.layer == layer.other else f"{layer.layer}:{layer.other}"
        counts = [f"{count:,}" for count in (layer.memories, layer.matched, layer.unchanged, layer.replaced)]
        table.add_row(name, *counts[:2], percent(layer.mean_change), *counts[2:])
    return table


def _change_table(screen: Screen, comparison: IndexComparison) -> Table:
    """Numbers are shown whole, both sides in the remaining room; a narrow terminal gets fewer numbers."""
    width = screen.out.width
    heads = ["memory", "change", "shared", "strongest"][: 4 if width >= _WIDE else 3 if width >= _NARROW else 2]
    facts = [_facts(comparison, change) for change in comparison.changes]
    taken = [max(len(head), *(len(row[place]) for row in facts)) for place, head in enumerate(heads)]
    room = max((width - sum(taken) - _GAP * (len(heads) + 1)) // 2, _LEAST_WIDTH)
    table = plain_table([*heads, "before", "after"])
    for change, row in zip(comparison.changes, facts, strict=True):
        cells = [Text(cell, "" if place else "bold") for place, cell in enumerate(row[: len(heads)])]
        table.add_row(*cells, _side(comparison.by, change.before, room), _side(comparison.by, change.after, room))
    return table


def _facts(comparison: IndexComparison, change: MemoryChange) -> list[str]:
    """Names, change, shared entries and strongest coefficients of both sides."""
    before, after = change.before, change.after
    measures = {"prefixes": change.triggers, "endings": change.endings, "tokens": change.values, "roles": change.roles}
    overlap = measures.get(comparison.measure, change.patterns)
    return [
        str(before.memory) if before.memory == after.memory else f"{before.memory} → {after.memory}",
        percent(change.change),
        MISSING if overlap is None else f"{overlap.shared} of {overlap.a} | {overlap.b}",
        " → ".join(MISSING if side.coefficient is None else number(side.coefficient) for side in (before, after)),
    ]


def _side(by: str, side: MemorySide, room: int) -> Text:
    """The best trigger up to its last token, the promoted tokens, the name, or the roles, in `room` columns."""
    if by == "roles":
        return Text(cut_right(", ".join(side.roles or ()) or "no role", room))
    if by == "patterns":
        return Text(cut_right(visible(side.name or "no pattern"), room))
    if by == "values":
        p = "" if side.max_p is None else f"{side.max_p:.2f} "
        tokens = " ".join(quoted(token, _TOKEN_WIDTH) for token in side.promotes[:_TOKENS])
        return Text.assemble((p, "dim"), cut_right(tokens, room - len(p)))
    if not side.triggers:
        return Text("no triggers", "dim")
    before, token = (visible(part) for part in side.triggers[0])
    token = cut_left(token, room)
    return Text.assemble((cut_left(before, room - cell_len(token)), "dim"), (token, "bold"))
