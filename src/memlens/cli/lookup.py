"""Look-ups: `memlens show` one memory with all that is known of it, `memlens search` for memories."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

import memlens
from memlens.cli.options import IndexFolder, ModelNow, refuse_unused, with_screen
from memlens.cli.screen import Screen
from memlens.cli.tables import (
    match_table,
    pattern_letters,
    print_expert,
    print_lower_patterns,
    print_patterns,
    print_related,
    print_value,
    trigger_table,
)
from memlens.errors import SettingError
from memlens.memory import ROLES, ExpertId
from memlens.settings import parse_layers
from memlens.text import cut_right, number, percent, plain, plain_table, quoted, sparkline, visible

if TYPE_CHECKING:
    from memlens.index.memory import MemoryRecord
    from memlens.index.search import SearchQuery, SearchResult

_SHOWN = 10


@with_screen(json=True)
def show(
    screen: Screen,
    index: IndexFolder,
    memory: Annotated[str, typer.Argument(metavar="MEMORY", help="Layer and memory from 0, like L3N51; or L3E5.")],
    top: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Triggers and tokens to show. Default: 10; as JSON all.")
    ] = None,
    bottom: Annotated[bool, typer.Option("--bottom", help="Show the most negative triggers only.")] = False,
    on: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Its coefficient at every token of this text; loads the model.")
    ] = None,
    nearest: Annotated[
        bool, typer.Option("--nearest", help="Memories with the nearest keys and values; loads the model.")
    ] = False,
    model: ModelNow = None,
) -> None:
    """Show one memory: what triggers it, what that has in common, and what it promotes. Or one expert, like L3E5."""
    from memlens.index.memory import ENDS, read_expert, read_memory
    from memlens.pattern.related import related_memories

    opened = memlens.Index(index)
    live = {"--on": on, "--nearest": nearest, "--model": model}
    if ExpertId.find(memory) is not None:
        refuse_unused({**live, "--bottom": bottom}, f"is for a memory, and {memory} is an expert")
        expert = read_expert(opened, memory, top if screen.as_json else top or _SHOWN)
        screen.json(plain(expert)) if screen.as_json else print_expert(screen, expert)
        return
    if on is not None:
        refuse_unused({"--nearest": nearest, "--bottom": bottom, "--top": top}, "does not go with --on")
        _show_on(screen, opened, memory, on, model)
        return
    if nearest:
        refuse_unused({"--bottom": bottom}, "does not go with --nearest")
        _show_nearest(screen, opened, memory, top or _SHOWN, model)
        return
    refuse_unused({"--model": model}, "is for --on and --nearest, which load the model")
    ends = ENDS[1:] if bottom else ENDS
    record = read_memory(opened, memory, ends, top if screen.as_json else None)
    if screen.as_json:
        related = None if record.patterns is None else related_memories(opened, record.name)
        screen.json(plain(record) | {"related": related})
        return
    folder = visible(str(opened.folder))
    _print_header(screen, record)
    if not bottom:
        print_patterns(screen, record)
    print_lower_patterns(screen, record)
    if record.value is None:
        screen.note(f"what its value promotes is not known yet; run `memlens values {folder}`")
    else:
        print_value(screen, record.value, top or _SHOWN)
    if record.patterns is None:
        screen.note(f"its patterns are not known yet; run `memlens patterns {folder}`")
    for end in ends:
        _print_triggers(screen, record, end, top or _SHOWN)
    if not bottom:
        _print_quadrants(screen, record)
    if record.patterns is not None and not bottom:
        print_related(screen, opened, record.name)


def _show_on(screen: Screen, index: memlens.Index, memory: str, text: str, model: str | None) -> None:
    """Print the memory's coefficient at every token of a text."""
    from memlens.tracer.firing import coefficients_on

    index.check(memory)  # before a model is loaded
    on_text = coefficients_on(index.load_model(model), memory, text)
    if screen.as_json:
        screen.json(plain(on_text))
        return
    rows = [[quoted(token, 24), number(m)] for token, m in zip(on_text.tokens, on_text.coefficients, strict=True)]
    screen.result(plain_table(["token", ">coefficient"], rows))


def _show_nearest(screen: Screen, index: memlens.Index, memory: str, count: int, model: str | None) -> None:
    """Memories by the cosine of their keys, and of their values."""
    from memlens.vocab.nearest import SIDES, nearest_memories

    index.check(memory)  # before a model is loaded
    loaded = index.load_model(model)
    by_side = {side: nearest_memories(index, loaded, memory, side, count) for side in SIDES}
    if screen.as_json:
        screen.json(by_side)
        return
    for side, near in by_side.items():
        rows = [
            [str(neighbour.name), f"{neighbour.cosine:.3f}", Text(visible(neighbour.summary or ""), "cyan")]
            for neighbour in near
        ]
        screen.result(f"nearest {side}s")
        screen.result(plain_table(["memory", ">cosine", "summary"], rows, screen.out.is_terminal))
        screen.result()


def _print_header(screen: Screen, record: MemoryRecord) -> None:

    line = Text.assemble(
        (str(record.name), "bold"), f"  {visible(record.model)}   ", ("max ", "dim"), number(record.max)
    )
    line.append_text(Text.assemble(("   mean ", "dim"), number(record.mean)))
    line.append_text(Text.assemble(("   min ", "dim"), number(record.min)))
    line.append_text(Text.assemble(("   fires on ", "dim"), percent(record.frequency), (" of prefixes", "dim")))
    if record.name.kind == "routed":
        line.append_text(Text.assemble((" among the ", "dim"), f"{record.seen:,}", (" that reach its expert", "dim")))
    if record.seen == 0:
        line.append_text(Text("   never reached: its expert is never chosen", "bold red"))
    if record.dead:
        line.append_text(Text("   dead", "bold red"))
    screen.result(line)
    screen.result(_histogram(record))
    if record.roles is not None and record.roles.roles:
        behind = "  ".join(f"{name} {number(value)}" for name, value in record.roles.behind.items())
        screen.result(
            Text.assemble(("role  ", "dim"), (", ".join(record.roles.roles), "bold"), (f"   {behind}", "dim"))
        )


def _histogram(record: MemoryRecord) -> Text:
    """The filled part of the histogram, with the coefficients at its two ends; bins double in width outwards."""

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


def _print_quadrants(screen: Screen, record: MemoryRecord) -> None:
    for quadrant in record.quadrants or ():
        signs = " and ".join(
            f"{what} {'above' if sign == '+' else 'below'} 0"
            for what, sign in zip(("gate", "input"), quadrant.quadrant, strict=True)
        )
        screen.result()
        screen.result(f"{quadrant.quadrant}  {signs}: {percent(quadrant.share)} of prefixes")
        if quadrant.triggers:
            screen.result(trigger_table(screen, quadrant.triggers, None))


_PLACES = ("triggers", "values", "patterns", "name", "fires")
_CHOICES = {
    "--class": ("none", "shallow", "semantic", "both"),
    "--agreement": ("yes", "no"),
    "--role": ROLES,
    "--order": ("max", "frequency", "mean", "max_p", "relative", "effect"),
}
_TAKEN = 36  # columns of a table line beside its tokens
_TOKENS_SHOWN = 12
_TRIGGERS, _VALUES, _FILTERS = "In triggers", "In values or patterns", "Among which memories"


_Query = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[QUERY]...",
        help="The text to look for; in values, one token or several. Without one, memories by --order.",
        show_default=False,
    ),
]
_Place = Annotated[
    str,
    typer.Option(
        "--in",
        metavar="|".join(_PLACES),
        help="In the prefixes that trigger a memory, in what it promotes, in words of its patterns, or in names; "
        "fires: memories that fire on the text (loads the model).",
    ),
]
_Ends = Annotated[bool, typer.Option("--ends", help="The prefix must end with the text.", rich_help_panel=_TRIGGERS)]
_IgnoreCase = Annotated[
    bool | None,
    typer.Option(
        "--ignore-case/--match-case",
        "-i",
        help="Do capitals equal small letters? Default: unless the text has capitals.",
        show_default=False,
        rich_help_panel=_TRIGGERS,
    ),
]
_Substring = Annotated[
    bool,
    typer.Option(
        "--substring", help="Whatever contains the text; in patterns also within words.", rich_help_panel=_VALUES
    ),
]
_Bottom = Annotated[bool, typer.Option("--bottom", help="Memories that push the token down.", rich_help_panel=_VALUES)]
_Layers = Annotated[str | None, typer.Option(metavar="LAYERS", help="Layers like 0-5,11.", rich_help_panel=_FILTERS)]
_Kind = Annotated[
    str | None,
    typer.Option(
        "--class",
        metavar="|".join(_CHOICES["--class"]),
        help="What kind of pattern the triggers share.",
        rich_help_panel=_FILTERS,
    ),
]
_Agreement = Annotated[
    str | None,
    typer.Option(
        metavar="yes|no", help="Does the value promote what follows the top trigger?", rich_help_panel=_FILTERS
    ),
]
_Role = Annotated[
    str | None,
    typer.Option(metavar="ROLE", help=f"What the memory is for: {', '.join(ROLES)}.", rich_help_panel=_FILTERS),
]
_Order = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(_CHOICES["--order"]),
        help="By what to sort where no QUERY is given (default: max); with --in fires by relative (default) or effect.",
    ),
]


@with_screen(json=True)
def search(
    screen: Screen,
    index: IndexFolder,
    query: _Query = None,
    place: _Place = "triggers",
    ends: _Ends = False,
    ignore_case: _IgnoreCase = None,
    substring: _Substring = False,
    bottom: _Bottom = False,
    layers: _Layers = None,
    kind: _Kind = None,
    agreement: _Agreement = None,
    role: _Role = None,
    order: _Order = None,
    limit: Annotated[int, typer.Option(metavar="N", help="Memories to list.")] = 20,
    model: ModelNow = None,
) -> None:
    """Find memories by their triggers, by the tokens they promote (--in values), by their patterns or their name."""
    from memlens.index import search as engine

    opened = memlens.Index(index)
    for option, given in (("--class", kind), ("--agreement", agreement), ("--role", role), ("--order", order)):
        if given is not None and given not in _CHOICES[option]:
            raise SettingError(f"{option} is '{given}'; choose one of: {', '.join(_CHOICES[option])}")
    wording = {"--ends": ends, "--ignore-case or --match-case": ignore_case is not None, "--substring": substring}
    if place == "fires":
        filters = {"--bottom": bottom, "--class": kind, "--agreement": agreement, "--role": role}
        refuse_unused({**wording, **filters}, "does not go with --in fires")
        _search_firing(screen, opened, query or [], order, layers, limit, model)
        return
    refuse_unused({"--model": model}, "is for --in fires, which loads the model")
    if not query:
        refuse_unused(wording, "says how a QUERY is looked for, but there is none")
    if order in ("relative", "effect"):
        raise SettingError(f"--order {order} is for --in fires; choose max, frequency, mean or max_p")
    if query and order is not None:
        raise SettingError("--order says how to sort where no QUERY is given, but there is one; leave --order out")
    chosen: dict[str, Any] = {
        "place": place,
        "kind": kind,
        "agreement": agreement,
        "role": role,
        "order": order or "max",
    }
    asked = engine.SearchQuery(
        tuple(query or ()),
        layers=None if layers is None else parse_layers(layers),
        limit=limit,
        ends=ends,
        ignore_case=ignore_case,
        substring=substring,
        bottom=bottom,
        **chosen,
    )
    result = engine.search(opened, asked)
    if screen.as_json:
        screen.json(result)
    else:
        _print(screen, opened, asked, result)


def _search_firing(
    screen: Screen,
    index: memlens.Index,
    query: list[str],
    order: str | None,
    layers: str | None,
    limit: int,
    model: str | None,
) -> None:
    """Memories that fire on a text."""
    from memlens.tracer.firing import fires_on
    from memlens.tracer.result import FIRING_ORDERS

    if len(query) != 1:
        raise SettingError(f"--in fires reads one text, but {len(query)} were given; put it in quotes")
    if (order or "relative") not in FIRING_ORDERS:
        raise SettingError(f"--order is '{order}'; with --in fires choose one of: {', '.join(FIRING_ORDERS)}")
    chosen = None if layers is None else parse_layers(layers)
    loaded = index.load_model(model)
    result = fires_on(loaded, query[0], index=index, order=order or "relative", layers=chosen, limit=limit)
    if screen.as_json:
        screen.json(result)
        return
    rows = [
        [
            str(hit.name),
            percent(hit.relative),
            number(hit.coefficient),
            quoted(hit.token, 16),
            f"{hit.effect:+.3f}",
            Text(visible(hit.summary or ""), "cyan"),
        ]
        for hit in result.found
    ]
    heads = ["memory", ">of its range", ">m", "at", ">effect", "summary"]
    screen.result(plain_table(heads, rows, screen.out.is_terminal))
    screen.note(f"{result.total:,} fire; effects are on the logit of {quoted(result.prediction.text, 20)}")


def _print(screen: Screen, index: memlens.Index, query: SearchQuery, result: SearchResult) -> None:
    if result.note:
        screen.note(result.note)
    if not result.found:
        screen.note(_nothing(index, query))
        return
    if query.texts and query.place == "triggers":
        screen.result(match_table(screen, result.found))
    else:
        screen.result(_table(screen, query, result.found))
    if result.total > len(result.found):
        screen.note(f"{len(result.found)} of {result.total:,} are listed; see more with --limit")


def _nothing(index: memlens.Index, query: SearchQuery) -> str:
    texts = " or ".join(f"'{visible(text)}'" for text in query.texts)
    if query.texts and query.place == "values":
        end = "bottom" if query.bottom else "top"
        return f"no value has {texts} among the {index.manifest.values.top} tokens at its {end}"
    if query.texts and query.place == "patterns":
        return f"no memory has a pattern with '{visible(query.text)}'"
    return f"no memory has {texts} in its {query.place}" if query.texts else "no memory passes these filters"


def _table(screen: Screen, query: SearchQuery, hits: Any) -> Any:
    """Memories found by value, pattern, name or statistic."""

    wraps = screen.out.is_terminal
    if not query.texts or query.place == "name":
        numbers = [[number(hit.number)] if not query.texts else [] for hit in hits]
        heads = ["memory", *([f">{query.order}"] if not query.texts else []), "summary"]
        rows = [
            [str(hit.name), *cells, Text(visible(hit.summary or ""), "cyan")]
            for hit, cells in zip(hits, numbers, strict=True)
        ]
        return plain_table(heads, rows, wraps)
    if query.place == "patterns":
        rows = [
            [
                str(hit.name),
                hit.kind,
                str(hit.prefixes),
                f"{hit.confidence:.2f}",
                Text(visible(hit.description), "cyan"),
            ]
            for hit in hits
        ]
        return plain_table(["memory", "kind", ">prefixes", ">confidence", "pattern"], rows, wraps)
    style = "red" if query.bottom else "green"
    room = max(min(screen.out.width, 160) - _TAKEN, 20)
    rows = [
        [str(hit.name), number(hit.p), str(hit.rank + 1), Text(cut_right(_tokens(hit.tokens), room), style)]
        for hit in hits
    ]
    return plain_table(["memory", ">p", ">place", "pushes down" if query.bottom else "promotes"], rows)


def _tokens(tokens: Any) -> str:
    shown = "  ".join(
        quoted(token.text, 20) + (f" {number(token.p)}" if len(tokens) > 1 else "") for token in tokens[:_TOKENS_SHOWN]
    )
    return shown + (f"  and {len(tokens) - _TOKENS_SHOWN} more" if len(tokens) > _TOKENS_SHOWN else "")
