"""`memlens show`: one memory with its statistics, its patterns, both ends of its value, and its triggers."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memlens.cli.options import IndexFolder, Json, Quiet, Verbose
from memlens.cli.screen import Screen
from memlens.text import number, percent, sparkline, visible

if TYPE_CHECKING:
    from rich.text import Text

    from memlens.cli.tables import MemoryPatterns
    from memlens.index.reader import Index, MemoryFacts

_ENDS = ("top", "bottom")
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
    from memlens.cli.tables import print_patterns, print_related, read_patterns
    from memlens.index.reader import Index

    screen = Screen(as_json, quiet, verbose)
    opened = Index(index)
    facts = opened.facts(memory)
    ends = _ENDS[1:] if bottom else _ENDS
    if as_json:
        screen.json(_as_json(opened, facts, ends, top))
        return
    patterns = read_patterns(opened, facts.id)
    _print_header(screen, opened, facts)
    if patterns is not None and not bottom:
        print_patterns(screen, patterns)
    _print_value(screen, opened, facts, top or _SHOWN)
    if patterns is None:
        screen.note(f"its patterns are not known yet; run `memlens patterns {visible(str(opened.folder))}`")
    for end in ends:
        _print_triggers(screen, opened, facts, end, top or _SHOWN, patterns, is_only=len(ends) == 1)
    if patterns is not None and not bottom:
        print_related(screen, opened, facts.id)


def _as_json(index: Index, facts: MemoryFacts, ends: tuple[str, ...], top: int | None) -> dict[str, Any]:
    from memlens.cli.tables import patterns_json, read_patterns, value_json
    from memlens.vocab.read import read_value

    patterns = read_patterns(index, facts.id)
    numbers = {name: value for name, value in asdict(facts).items() if name != "id"}
    return {
        "name": str(facts.id),
        "layer": facts.id.layer,
        "memory": facts.id.memory,
        "model": index.manifest.model.name,
        **numbers,
        "histogram_edges": index.manifest.histogram_edges,
        **patterns_json(index, facts.id, patterns),
        "value": value_json(read_value(index, facts.id)),
        "triggers": {end: [_trigger_json(index, t) for t in index.triggers(facts.id, end, top)] for end in ends},
        "ordinary": [_trigger_json(index, trigger) for trigger in index.ordinary(facts.id)],
    }


def _trigger_json(index: Index, trigger: Any) -> dict[str, Any]:
    following = trigger.next_token
    return {
        "rank": trigger.rank,
        "coefficient": trigger.coefficient,
        "sentence": trigger.prefix.sentence,
        "position": trigger.prefix.position,
        "text": trigger.text,
        "token": trigger.token,
        "after": trigger.after,
        "next_token": following,
        "next_text": None if following is None else index.vocabulary[following],
    }


def _print_header(screen: Screen, index: Index, facts: MemoryFacts) -> None:
    from rich.text import Text

    model = visible(index.manifest.model.name)
    line = Text.assemble((str(facts.id), "bold"), f"  {model}   ", ("max ", "dim"), number(facts.max))
    line.append_text(Text.assemble(("   mean ", "dim"), number(facts.mean)))
    line.append_text(Text.assemble(("   min ", "dim"), number(facts.min)))
    line.append_text(Text.assemble(("   fires on ", "dim"), percent(facts.frequency), (" of prefixes", "dim")))
    if facts.dead:
        line.append_text(Text("   dead", "bold red"))
    screen.result(line)
    screen.result(_histogram(facts, index.manifest.histogram_edges))


def _histogram(facts: MemoryFacts, edges: list[float]) -> Text:
    """The filled part of the histogram, with the coefficients at its two ends; bins double in width outwards."""
    from rich.text import Text

    counts = facts.histogram
    filled = [i for i, count in enumerate(counts) if count]
    if not filled:
        return Text("no sample of its coefficients", "dim")
    first, last = filled[0], filled[-1]
    # the outermost bins reach further than the memory does: a ReLU's first one would begin below zero
    low = "" if first == 0 else f"{max(edges[first - 1], facts.min):.3g} "
    high = "" if last == len(edges) else f" {min(edges[last], facts.max):.3g}"
    return Text.assemble((low, "dim"), sparkline(counts[first : last + 1]), (high, "dim"))


def _print_value(screen: Screen, index: Index, facts: MemoryFacts, count: int) -> None:
    from memlens.cli.tables import print_value
    from memlens.vocab.read import read_value

    value = read_value(index, facts.id)
    if value is None:
        screen.note(f"what its value promotes is not known yet; run `memlens values {visible(str(index.folder))}`")
        return
    print_value(screen, value, count)


def _print_triggers(
    screen: Screen,
    index: Index,
    facts: MemoryFacts,
    end: str,
    count: int,
    patterns: MemoryPatterns | None,
    is_only: bool,
) -> None:
    from memlens.cli.tables import trigger_table

    triggers = index.triggers(facts.id, end)
    if not triggers:
        if end == "top" or is_only:
            screen.result()
            screen.result(f"no {end} triggers: no prefix has a {_side(end)} coefficient, or the scan did not keep them")
        return
    screen.result()
    screen.result(f"{end} triggers ({min(count, len(triggers))} of {len(triggers)})")
    marks = patterns.letters if patterns is not None and patterns.rows and end == "top" else None
    screen.result(trigger_table(screen, index, triggers[:count], marks))


def _side(end: str) -> str:
    return "positive" if end == "top" else "negative"
