"""`memlens show`: one memory with its statistics, its patterns, both ends of its value, and its triggers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from memlens.cli.options import IndexFolder, Json, Quiet, Verbose
from memlens.cli.screen import Screen
from memlens.text import number, percent, plain, sparkline, visible

if TYPE_CHECKING:
    from rich.text import Text

    from memlens.index.memory import MemoryRecord

_SHOWN = 10


def show(
    index: IndexFolder,
    memory: Annotated[str, typer.Argument(metavar="MEMORY", help="Layer and memory from 0, like L3N512.")],
    top: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Triggers and tokens to show. Default: 10; as JSON all.")
    ] = None,
    bottom: Annotated[bool, typer.Option("--bottom", help="Show the most negative triggers only.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show one memory: what triggers it, what that has in common, and what it promotes."""
    from memlens.cli.tables import print_patterns, print_related, print_value
    from memlens.index.memory import ENDS, read_memory
    from memlens.index.reader import Index
    from memlens.pattern.related import related_memories

    screen = Screen(as_json, quiet, verbose)
    opened = Index(index)
    ends = ENDS[1:] if bottom else ENDS
    record = read_memory(opened, memory, ends, top if as_json else None)
    if as_json:
        related = None if record.patterns is None else related_memories(opened, record.name)
        screen.json(plain(record) | {"related": related})
        return
    folder = visible(str(opened.folder))
    _print_header(screen, record)
    if not bottom:
        print_patterns(screen, record)
    if record.value is None:
        screen.note(f"what its value promotes is not known yet; run `memlens values {folder}`")
    else:
        print_value(screen, record.value, top or _SHOWN)
    if record.patterns is None:
        screen.note(f"its patterns are not known yet; run `memlens patterns {folder}`")
    for end in ends:
        _print_triggers(screen, record, end, top or _SHOWN)
    if record.patterns is not None and not bottom:
        print_related(screen, opened, record.name)


def _print_header(screen: Screen, record: MemoryRecord) -> None:
    from rich.text import Text

    line = Text.assemble(
        (str(record.name), "bold"), f"  {visible(record.model)}   ", ("max ", "dim"), number(record.max)
    )
    line.append_text(Text.assemble(("   mean ", "dim"), number(record.mean)))
    line.append_text(Text.assemble(("   min ", "dim"), number(record.min)))
    line.append_text(Text.assemble(("   fires on ", "dim"), percent(record.frequency), (" of prefixes", "dim")))
    if record.dead:
        line.append_text(Text("   dead", "bold red"))
    screen.result(line)
    screen.result(_histogram(record))


def _histogram(record: MemoryRecord) -> Text:
    """The filled part of the histogram, with the coefficients at its two ends; bins double in width outwards."""
    from rich.text import Text

    counts, edges = list(record.histogram), record.histogram_edges
    filled = [i for i, count in enumerate(counts) if count]
    if not filled:
        return Text("no sample of its coefficients", "dim")
    first, last = filled[0], filled[-1]
    # the outermost bins reach further than the memory does: a ReLU's first one would begin below zero
    low = "" if first == 0 else f"{max(edges[first - 1], record.min):.3g} "
    high = "" if last == len(edges) else f" {min(edges[last], record.max):.3g}"
    return Text.assemble((low, "dim"), sparkline(counts[first : last + 1]), (high, "dim"))


def _print_triggers(screen: Screen, record: MemoryRecord, end: str, count: int) -> None:
    from memlens.cli.tables import pattern_letters, trigger_table

    triggers = record.triggers[end]
    if not triggers:
        if end == "top" or len(record.triggers) == 1:
            side = "positive" if end == "top" else "negative"
            screen.result()
            screen.result(f"no {end} triggers: no prefix has a {side} coefficient, or the scan did not keep them")
        return
    screen.result()
    screen.result(f"{end} triggers ({min(count, len(triggers))} of {len(triggers)})")
    marks = pattern_letters(record) if record.patterns and end == "top" else None
    screen.result(trigger_table(screen, triggers[:count], marks))
