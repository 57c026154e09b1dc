"""Lookups in an index: `show` a memory or an expert, `search` for memories, `compare` two indexes.

Prefixes are aligned at their last token, which puts equal endings below each other. Long prefixes are cut on the left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import click
from rich.cells import cell_len
from rich.text import Text

import memlens
from memlens.cli.options import (
    WholeNumber,
    argument,
    flag,
    given_options,
    index_argument,
    location_option,
    option,
    refuse_options,
    refuse_others,
    verb,
)
from memlens.cli.screen import Cell, Screen, command_line, fit_items
from memlens.errors import SettingError
from memlens.memory import ROLES, ExpertId, MemoryId, Trigger
from memlens.settings import parse_layers
from memlens.text import MISSING, cut_left, cut_right, letter, number, percent, plain, quoted, sparkline, visible

if TYPE_CHECKING:
    from memlens.comparison.compare import IndexComparison, MemoryChange, MemorySide
    from memlens.index.memory import ExpertRecord, MemoryPattern, MemoryRecord, MemoryValue, TokenNumber
    from memlens.index.search import SearchQuery, SearchResult
    from memlens.models.memory_model import MemoryModel

_TOP = 10  # number of triggers and tokens to show by default
_NEXT_WIDTH = 16  # width of the token after a prefix
_TOKEN_WIDTH = 22
_BOS = "(BOS)"  # shown for a prefix that consists of BOS only
_CONTINUATION = "◌"  # shown for a token that continues a character
_END = "(end)"
_MARK_STYLE = "bold black on yellow"
_UNDERTRAINED = " °"
_KEY_TOKENS = 8
_RELATED = 5
_LIVE = ("--on", "--nearest", "--wires", "--effect")  # options of `show` that load the model


def suggest_memory(index: memlens.Index) -> str:
    """Return the name of the memory with the largest coefficient, as a suggestion for `show`."""
    from memlens.index.search import SearchQuery, search

    (best,) = search(index, SearchQuery((), order="max", limit=1)).found
    return str(best.name)


@verb(json=True)
@index_argument
@argument("memory", metavar="MEMORY", help="Name of a memory (L3N51) or an expert (L3E5).")
@option(
    "--top",
    type=WholeNumber(1),
    metavar="N",
    help="Number of triggers and tokens to show. Default: 10, or all with --json.",
)
@flag("--bottom", help="Show only the triggers with the most negative coefficients.")
@option("--on", metavar="TEXT", help="Show the coefficient at every token of a text. Loads the model.")
@flag("--nearest", help="List the memories with the most similar keys and values. Loads the model.")
@flag(
    "--wires",
    help="List the tokens and memories that the key responds to, and the memories that respond to the value. Loads "
    "the model.",
)
@flag("--effect", help="List the tokens whose probability changes most without the memory. Loads the model.")
@location_option()
def show(
    screen: Screen,
    index: str,
    memory: str,
    top: int | None,
    bottom: bool,
    on: str | None,
    nearest: bool,
    wires: bool,
    effect: bool,
    model: str | None,
) -> None:
    """Show one memory: its triggers, their patterns, and the tokens it promotes."""
    from memlens.index.memory import ENDS, read_expert, read_memory
    from memlens.pattern.related import related_memories

    opened = memlens.Index(index)
    if ExpertId.find(memory) is not None:
        refuse_others(f"an expert ({memory})", ["--top"])
        expert = read_expert(opened, memory, top if screen.as_json else top or _TOP)
        screen.json(plain(expert)) if screen.as_json else _print_expert(screen, expert)
        return
    if mode := next((name for name in given_options() if name in _LIVE), None):
        refuse_others(mode, [mode, "--model", *(["--top"] if mode != "--on" else [])])
        opened.check(memory)  # reject an unknown memory before the model is loaded
        _show_live(screen, mode, opened, opened.load_model(model), memory, on or "", top or _TOP)
        return
    refuse_options(["--model"], f"has no effect without {', '.join(_LIVE[:-1])} or {_LIVE[-1]}")
    ends = ENDS[1:] if bottom else ENDS
    record = read_memory(opened, memory, ends, top if screen.as_json else None)
    if screen.as_json:
        related = None if record.patterns is None else related_memories(opened, record.name)
        screen.json(plain(record) | {"related": related})
        return
    _print_header(screen, record)
    if not bottom:
        _print_patterns(screen, record)
    if record.lower_patterns is not None:
        screen.result()
        screen.result(Text(f"{_count(record.lower_patterns, 'pattern')} of the most negative triggers", "dim"))
        _print_pattern_table(screen, record.lower_patterns)
    if record.value is None:
        screen.note(f"to list the tokens that its value promotes, run `{command_line('values', opened.folder)}`")
    else:
        _print_value(screen, opened, record.value, top or _TOP)
    if record.patterns is None:
        screen.note(f"to find its patterns, run `{command_line('patterns', opened.folder)}`")
    for end in ends:
        _print_triggers(screen, record, end, top or _TOP)
    if not bottom:
        _print_quadrants(screen, record)
    if record.patterns is not None and not bottom:
        _print_related(screen, opened, record.name)


def _show_live(
    screen: Screen, mode: str, index: memlens.Index, model: MemoryModel, memory: str, text: str, count: int
) -> None:
    """Print the result of one of the options in _LIVE."""
    if mode == "--on":
        from memlens.tracer.firing import coefficients_on

        on_text = coefficients_on(model, memory, text)
        pairs = zip(on_text.tokens, on_text.coefficients, strict=True)
        screen.records(on_text, ["token", "coefficient"], [[quoted(token, 24), number(m)] for token, m in pairs])
    elif mode == "--nearest":
        _print_nearest(screen, index, model, memory, count)
    elif mode == "--wires":
        from memlens.circuits.wires import wires
        from memlens.cli.circuit import print_wires

        print_wires(screen, wires(index, model, memory, count))
    else:
        _print_effect(screen, index, model, memory, count)


def _print_nearest(screen: Screen, index: memlens.Index, model: MemoryModel, memory: str, count: int) -> None:
    """Print the memories with the nearest keys and those with the nearest values, by cosine."""
    from memlens.vocab.nearest import SIDES, nearest_memories

    by_side = {side: nearest_memories(index, model, memory, side, count) for side in SIDES}
    if screen.as_json:
        screen.json(by_side)
        return
    for side, neighbors in by_side.items():
        screen.result(f"nearest {side}s")
        rows = [[str(one.name), f"{one.cosine:.3f}", Text(visible(one.summary or ""), "cyan")] for one in neighbors]
        screen.table(["memory", "cosine", "summary"], rows, wrap=True)
        screen.result()


def _print_effect(screen: Screen, index: memlens.Index, model: MemoryModel, memory: str, count: int) -> None:
    """Print the tokens whose probability changes most without the memory, and the same for a control memory."""
    from memlens.tracer.token_change import token_change

    result = token_change(index, model, memory, top=count)
    if screen.as_json:
        screen.json(plain(result) | {"note": result.note})
        return
    screen.result(f"{result.memory} is silenced at the last token of its {result.triggers} strongest triggers")
    rows = []
    for fall, rise in zip_longest(result.falls, result.rises):
        cells: list[Cell] = []
        for token, style in ((fall, "red"), (rise, "green")):
            if token is None:
                cells += ["", "", ""]
                continue
            cells += [Text(quoted(token.text, _TOKEN_WIDTH), style), f"{token.change:+.4f}", f"{token.control:+.4f}"]
        rows.append(cells)
    screen.table(["falls", "change", "control", "rises", "change", "control"], rows)
    screen.paragraph(result.note)


def _print_header(screen: Screen, record: MemoryRecord) -> None:
    """Print statistics, histogram and roles."""
    pieces = [Text.assemble((str(record.name), "bold"), f"  {visible(record.model)}")]
    for name, value in (("max", record.max), ("mean", record.mean), ("min", record.min)):
        pieces.append(Text.assemble((f"{name} ", "dim"), number(value)))
    reached = f" of the {record.seen:,} prefixes that are routed to its expert" if record.name.kind == "routed" else ""
    pieces.append(Text.assemble(("active on ", "dim"), percent(record.frequency), (reached or " of prefixes", "dim")))
    if record.seen == 0:
        pieces.append(Text("never reached, because no prefix is routed to its expert", "bold red"))
    if record.dead:
        pieces.append(Text("dead", "bold red"))
    screen.flow(pieces)
    screen.result(_histogram(record))
    if record.roles is not None and record.roles.roles:
        numbers = [Text(f"{name} {number(value)}", "dim") for name, value in record.roles.behind.items()]
        screen.flow([Text.assemble(("role  ", "dim"), (", ".join(record.roles.roles), "bold")), *numbers])


def _histogram(record: MemoryRecord) -> Text:
    """Return the bins from the first to the last non-empty one, between the smallest and the largest coefficient."""
    counts, edges = list(record.histogram), record.histogram_edges
    filled = [place for place, count in enumerate(counts) if count]
    if not filled:
        return Text("no sampled coefficients", "dim")
    first, last = filled[0], filled[-1]
    # the outermost bins extend beyond the memory's range
    low = "" if first == 0 else f"{max(edges[first - 1], record.min):.3g} "
    high = "" if last == len(edges) else f" {min(edges[last], record.max):.3g}"
    return Text.assemble((low, "dim"), sparkline(counts[first : last + 1]), (high, "dim"))


def _count(items: Sequence[Any], noun: str) -> str:
    return f"{len(items)} {noun}" if len(items) == 1 else f"{len(items)} {noun}s"


def _print_patterns(screen: Screen, record: MemoryRecord) -> None:
    """Print the summary of a memory, how many triggers its patterns cover, and each pattern with its letter."""
    summary, patterns = record.summary, record.patterns
    if summary is None or patterns is None:
        return
    screen.result()
    screen.paragraph(Text(visible(summary.name), "bold"))
    covered = f"{summary.covered} of {summary.triggers} triggers covered"
    screen.result(Text(f"{_count(patterns, 'pattern')}, {covered}", "dim"))
    _print_pattern_table(screen, patterns)


def _print_pattern_table(screen: Screen, patterns: Sequence[MemoryPattern]) -> None:
    rows: list[list[Any]] = [
        [
            Text(letter(place), "magenta"),
            pattern.kind,
            len(pattern.prefixes),
            f"{pattern.confidence:.2f}",
            *(MISSING if score is None else f"{score:.2f}" for score in (pattern.auroc, pattern.auroc_same_token)),
            Text(visible(pattern.description), "cyan"),
        ]
        for place, pattern in enumerate(patterns)
    ]
    if rows:
        heads = ["", "kind", "prefixes", "confidence", "AUROC", "same token", "pattern"]
        screen.table(heads, rows, wrap=True)


def _print_value(screen: Screen, index: memlens.Index, value: MemoryValue, count: int) -> None:
    """Print statistics of a value, the tokens that it promotes and demotes, and the tokens that match the key."""
    screen.result()
    over = "" if value.vocabulary == "all" else f", over {value.vocabulary} tokens"
    pieces = [Text.assemble("value", (f" ({value.reading}{over})", "dim"))]
    pieces.append(Text.assemble(("max p ", "dim"), number(value.max_p), f" ({value.times_uniform:.2f} x uniform)"))
    for name, fact in (("entropy", value.entropy), ("norm", value.norm)):
        pieces.append(Text.assemble((f"{name} ", "dim"), number(fact)))
    screen.flow(pieces)
    share = (
        f"its top tokens are more similar to each other than those of {percent(value.coherence)} of random directions"
    )
    screen.paragraph(Text(share if value.is_clear else f"no clearer than a random direction: {share}", "dim"))
    screen.result(_agreement(value))
    low, high = value.demotes[0].score, value.promotes[0].score
    if value.histogram and low is not None and high is not None:
        screen.result(Text.assemble(("scores ", "dim"), f"{low:.2f} ", sparkline(value.histogram), f" {high:+.2f}"))

    def cells(token: TokenNumber, style: str) -> list[Cell]:
        text = quoted(token.text, _TOKEN_WIDTH) + ("" if token.trained else _UNDERTRAINED)
        return [Text(text, style), number(token.number)]

    ends = list(zip(value.promotes[:count], value.demotes[:count], strict=True))
    screen.table(["promotes", "p", "demotes", "p"], [cells(up, "green") + cells(down, "red") for up, down in ends])
    if any(not token.trained for pair in ends for token in pair):
        command = command_line("values", index.folder)
        screen.paragraph(
            Text(f"{_UNDERTRAINED.strip()} marks undertrained tokens. To leave them out, run {command}", "dim")
        )
    if value.key:
        head = "its key matches  "
        tokens = fit_items([Text(quoted(token.text, _TOKEN_WIDTH)) for token in value.key[:_KEY_TOKENS]], gap=" ")
        screen.result(Text.assemble((head, "dim"), tokens(screen.out.width - len(head))))


def _agreement(value: MemoryValue) -> Text:
    if value.target_text is None:
        return Text("agreement is undefined because no token follows its top trigger", "dim")
    target = quoted(value.target_text, _TOKEN_WIDTH)
    if value.agrees:
        return Text.assemble(
            ("✓ agrees", "bold green"), (": its top token is the token after its top trigger, ", "dim"), target
        )
    return Text.assemble(
        ("✗ ", "bold"), (f"{target} follows its top trigger and has rank {value.target_rank:,} in the value", "dim")
    )


def _print_triggers(screen: Screen, record: MemoryRecord, end: str, count: int) -> None:
    triggers = record.triggers[end]
    if not triggers:
        if end == "top" or len(record.triggers) == 1:
            side = "positive" if end == "top" else "negative"
            screen.result()
            screen.result(
                f"There are no {end} triggers: no prefix has a {side} coefficient, or the scan did not keep them."
            )
        return
    screen.result()
    screen.result(f"{end} triggers ({min(count, len(triggers))} of {len(triggers)})")
    letters: list[str] | None = None
    if record.patterns and end == "top":
        letters = ["".join(map(letter, record.patterns_of(trigger.rank))) for trigger in triggers[:count]]
    _print_trigger_table(screen, triggers[:count], letters)


def _print_trigger_table(
    screen: Screen, triggers: Sequence[Trigger], letters: Sequence[str] | None = None, head: str = "coeff."
) -> None:
    """Print one row per trigger. `letters` names the patterns of each trigger."""
    rows: list[list[Any]] = []
    for place, trigger in enumerate(triggers):
        following = Text(_END, "dim")
        if trigger.next_text is not None:
            following = Text(cut_right(visible(trigger.next_text), _NEXT_WIDTH), "cyan")
        marks = [] if letters is None else [Text(letters[place], "magenta")]
        rows.append(
            [trigger.rank, number(trigger.coefficient), *marks, _mark_prefix(trigger, screen.styled), following]
        )
    heads = ["#", head, *([] if letters is None else ["has"]), "prefix", "next"]
    screen.table(heads, rows, align_right=["prefix"] if screen.out.is_terminal else [])


def _mark_prefix(trigger: Trigger, styled: bool) -> Callable[[int], Text]:
    """Return a table cell with a prefix whose last token is highlighted by color or by « and »."""
    marks = ("", "") if styled else ("«", "»")
    token = (visible(trigger.token) or _CONTINUATION) if trigger.prefix.position >= 0 else _BOS
    before = visible(trigger.before)

    def cell(width: int) -> Text:
        room = width - len("".join(marks))
        shown = cut_left(token, room)
        rest = cut_left(before, room - cell_len(shown))
        return Text.assemble(rest, marks[0], (shown, _MARK_STYLE if styled else ""), marks[1], no_wrap=True)

    return cell


def _print_quadrants(screen: Screen, record: MemoryRecord) -> None:
    for quadrant in record.quadrants or ():
        signs = " and ".join(
            f"{side} {'above' if sign == '+' else 'below'} 0"
            for side, sign in zip(("gate", "input"), quadrant.quadrant, strict=True)
        )
        screen.result()
        screen.result(f"{quadrant.quadrant}  {signs}: {percent(quadrant.share)} of prefixes")
        if quadrant.triggers:
            _print_trigger_table(screen, quadrant.triggers)


def _print_related(screen: Screen, index: memlens.Index, memory: MemoryId) -> None:
    """Print the memories that share the most triggers, patterns and tokens with this one."""
    from memlens.pattern.related import related_memories

    rows: list[list[Any]] = [
        [str(other.name), other.triggers, other.tokens, ", ".join(other.patterns) or MISSING]
        for other in related_memories(index, memory, _RELATED)
    ]
    if rows:
        screen.result()
        screen.result("related memories")
        screen.table(["memory", "equal triggers", "equal tokens", "equal patterns"], rows, wrap=True)


def _print_expert(screen: Screen, expert: ExpertRecord) -> None:
    """Print the routing of an expert, its tokens and prefixes, and its strongest memories."""
    dead = f", {expert.dead:,} of them dead" if expert.dead else ""
    screen.result(
        Text.assemble((str(expert.name), "bold"), f"  {visible(expert.model)}   {expert.memories:,} memories{dead}")
    )
    if expert.chosen is None:
        screen.result("shared: it processes every token")
    elif expert.chosen == 0:
        screen.result(Text("never chosen in this corpus", "bold red"))
    else:
        share = f"chosen for {expert.chosen:,} prefixes ({percent(expert.share or 0)}), mean weight "
        screen.paragraph(
            f"{share}{number(expert.weight or 0)}; each prefix is routed to {expert.top_k or 0:.3g} experts"
        )
    if expert.tokens:
        screen.result()
        screen.result(f"last tokens of {expert.drawn:,} random prefixes that are routed to it")
        screen.paragraph(Text("  ".join(f"{quoted(token.text)} {percent(token.number)}" for token in expert.tokens)))
    if expert.router:
        screen.result()
        screen.result("tokens whose embeddings match its router weights")
        screen.paragraph(Text("  ".join(quoted(token.text) for token in expert.router)))
    if expert.heaviest:
        screen.result()
        screen.result("prefixes with the largest weights")
        _print_trigger_table(screen, expert.heaviest, head="weight")
    screen.result()
    screen.result("memories with the largest coefficients")
    rows = [[str(one.name), number(one.max), percent(one.frequency), one.summary] for one in expert.strongest]
    screen.table(["memory", "max", "active on", "summary"], rows, wrap=True)


_PLACES = ("triggers", "values", "patterns", "name", "fires")
_CLASSES = ("none", "shallow", "semantic", "both")
_TOKENS_SHOWN = 12
_TRIGGERS, _VALUES, _FILTERS = "Matching in triggers", "Matching in values and patterns", "Filters"


@verb(json=True)
@index_argument
@argument(
    "query",
    nargs=-1,
    metavar="QUERY",
    help="Text to find, or several tokens with --in values. Default: list all memories.",
)
@option(
    "--in",
    "place",
    default="triggers",
    metavar="|".join(_PLACES),
    help="Where to search: triggers, promoted tokens (values), patterns or names. The choice `fires` loads the model "
    "and finds memories that are active on the text.",
)
@option("--limit", type=int, default=20, metavar="N", help="Number of memories to list.")
@option(
    "--order",
    type=click.Choice(("max", "frequency", "mean", "max_p", "relative", "effect")),
    metavar="ORDER",
    help="Sort order: max (default), frequency, mean or max_p. With --in fires: relative (default) or effect.",
)
@flag("--ends", panel=_TRIGGERS, help="Find the text only at the end of triggers.")
@option(
    "--ignore-case/--match-case",
    "-i",
    panel=_TRIGGERS,
    help="Ignore or match case. Default: match case only if the text contains capitals.",
)
@flag("--substring", panel=_VALUES, help="Also match parts of tokens and words.")
@flag("--bottom", panel=_VALUES, help="Find memories that demote the token, instead of those that promote it.")
@option("--layers", panel=_FILTERS, metavar="0-5,11", help="Layers to search. Default: all.")
@option(
    "--class",
    "kind",
    panel=_FILTERS,
    type=click.Choice(_CLASSES),
    metavar="|".join(_CLASSES),
    help="Find only memories with this kind of pattern.",
)
@option(
    "--agreement",
    type=click.Choice(("yes", "no")),
    panel=_FILTERS,
    metavar="yes|no",
    help="Find only memories for which the top token of the value is (yes) or is not (no) the token that follows the "
    "top trigger.",
)
@option(
    "--role",
    type=click.Choice(ROLES),
    panel=_FILTERS,
    metavar="ROLE",
    help=f"Find only memories with this role: {', '.join(ROLES)}.",
)
@location_option()
def search(
    screen: Screen,
    index: str,
    query: tuple[str, ...],
    place: str,
    limit: int,
    order: str | None,
    ends: bool,
    ignore_case: bool | None,
    substring: bool,
    bottom: bool,
    layers: str | None,
    kind: str | None,
    agreement: str | None,
    role: str | None,
    model: str | None,
) -> None:
    """Find memories by their triggers, promoted tokens (--in values), patterns or names."""
    from memlens.index import search as engine

    opened = memlens.Index(index)
    if place == "fires":
        refuse_others("--in fires", ["--in", "--order", "--layers", "--limit", "--model"])
        _search_firing(screen, opened, query, order, layers, limit, model)
        return
    refuse_options(["--model"], "has no effect without --in fires")
    if not query:
        refuse_options(["--ends", "--ignore-case", "--match-case", "--substring"], "has no effect without QUERY")
    if order in ("relative", "effect"):
        raise SettingError(f"--order {order} works only with --in fires; choose max, frequency, mean or max_p")
    if query and order is not None:
        raise SettingError("--order has no effect with QUERY; leave it out")
    filters: dict[str, Any] = {"kind": kind, "agreement": agreement, "role": role, "order": order or "max"}
    asked = engine.SearchQuery(
        query,
        place=place,  # type: ignore[arg-type]  # checked by SearchQuery
        layers=None if layers is None else parse_layers(layers),
        limit=limit,
        ends=ends,
        ignore_case=ignore_case,
        substring=substring,
        bottom=bottom,
        **filters,
    )
    result = engine.search(opened, asked)
    if screen.as_json:
        screen.json(result)
    else:
        _print_matches(screen, opened, asked, result)


def _search_firing(
    screen: Screen,
    index: memlens.Index,
    query: tuple[str, ...],
    order: str | None,
    layers: str | None,
    limit: int,
    model: str | None,
) -> None:
    """Print the memories that fire on a text."""
    from memlens.tracer.firing import fires_on
    from memlens.tracer.result import FIRING_ORDERS

    if len(query) != 1:
        raise SettingError(f"--in fires needs one text, but {len(query)} were given; put the text in quotes")
    if (order or "relative") not in FIRING_ORDERS:
        raise SettingError(f"--order is '{order}'; with --in fires choose one of: {', '.join(FIRING_ORDERS)}")
    selected = None if layers is None else parse_layers(layers)
    loaded = index.load_model(model)
    result = fires_on(loaded, query[0], index=index, order=order or "relative", layers=selected, limit=limit)
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
    screen.table(["memory", "of its range", "m", "at", "effect", "summary"], rows, wrap=True)
    predicted = quoted(result.prediction.text, 20)
    screen.note(f"{result.total:,} memories are active. Effects are contributions to the logit of {predicted}.")


def _print_matches(screen: Screen, index: memlens.Index, query: SearchQuery, result: SearchResult) -> None:
    if result.note:
        screen.note(result.note)
    if not result.found:
        screen.note(_describe_no_match(index, query))
        return
    _print_match_table(screen, query, result.found)
    if result.total > len(result.found):
        screen.note(f"{len(result.found)} of {result.total:,} memories listed; see more with --limit")


def _describe_no_match(index: memlens.Index, query: SearchQuery) -> str:
    texts = " or ".join(f"'{visible(text)}'" for text in query.texts)
    if query.texts and query.place == "values":
        end = "bottom" if query.bottom else "top"
        return f"no value has {texts} among its {index.manifest.values.top} {end} tokens"
    if query.texts and query.place == "patterns":
        return f"no memory has a pattern with '{visible(query.text)}'"
    return f"no memory has {texts} in its {query.place}" if query.texts else "no memory matches these filters"


def _print_match_table(screen: Screen, query: SearchQuery, hits: Any) -> None:
    """Print the memories that a search found. The columns depend on where the text was searched for."""
    if not query.texts or query.place == "name":
        heads = ["memory", *([query.order] if not query.texts else []), "summary"]
        rows: list[list[Any]] = [
            [
                str(hit.name),
                *([number(hit.number)] if not query.texts else []),
                Text(visible(hit.summary or ""), "cyan"),
            ]
            for hit in hits
        ]
        screen.table(heads, rows, wrap=True)
    elif query.place == "triggers":
        has_bottom = any(hit.end == "bottom" for hit in hits)
        heads = ["memory", *(["end"] if has_bottom else []), "matches", "rank", "prefix"]
        rows = [
            [
                str(hit.name),
                *([hit.end] if has_bottom else []),
                hit.matches,
                hit.trigger.rank,
                _mark_prefix(hit.trigger, screen.styled),
            ]
            for hit in hits
        ]
        screen.table(heads, rows, align_right=["prefix"] if screen.out.is_terminal else [])
    elif query.place == "patterns":
        rows = [
            [
                str(hit.name),
                hit.kind,
                hit.prefixes,
                f"{hit.confidence:.2f}",
                Text(visible(hit.description), "cyan"),
            ]
            for hit in hits
        ]
        screen.table(["memory", "kind", "prefixes", "confidence", "pattern"], rows, wrap=True)
    else:
        from memlens.index.memory import CLEAR

        style = "red" if query.bottom else "green"
        rows = [
            [
                str(hit.name),
                number(hit.p),
                hit.rank + 1,
                "yes" if hit.coherence >= CLEAR else "no",
                Text(_join_tokens(hit.tokens), style),
            ]
            for hit in hits
        ]
        screen.table(["memory", "p", "rank", "clear", "demotes" if query.bottom else "promotes"], rows)


def _join_tokens(tokens: Any) -> str:
    shown = "  ".join(
        quoted(token.text, 20) + (f" {number(token.p)}" if len(tokens) > 1 else "") for token in tokens[:_TOKENS_SHOWN]
    )
    return shown + (f"  and {len(tokens) - _TOKENS_SHOWN} more" if len(tokens) > _TOKENS_SHOWN else "")


_MEASURES = {"prefixes": "trigger prefixes", "endings": "last tokens of triggers", "tokens": "promoted tokens"}


@verb(json=True)
@index_argument
@argument("other", metavar="OTHER", help="Index to compare with. It may be the same index.")
@option("--by", default="triggers", metavar="triggers|values|patterns|roles", help="What to compare.")
@option("--top", type=int, default=20, metavar="N", help="Number of memories to list.")
@option(
    "--layers",
    metavar="A:B",
    help="A layer of each index, like 3:5, whose memories are matched by similarity. Default: compare "
    "memories with the same name.",
)
@option(
    "--alike/--changed",
    help="List the most similar or the most changed memories first. Default: --changed, or --alike with --layers.",
)
def compare(screen: Screen, index: str, other: str, by: str, top: int, layers: str | None, alike: bool | None) -> None:
    """List the memories that changed most between two indexes, or the most similar memories of two layers."""
    from memlens.comparison.compare import compare_indexes

    comparison = compare_indexes(memlens.Index(index), memlens.Index(other), by=by, layers=layers, top=top, alike=alike)
    if screen.as_json:
        screen.json(comparison)
        return
    before, after = (visible(model) for model in comparison.models)
    facts = [
        "one model" if comparison.same_model else "two models",
        "one corpus" if comparison.same_corpus else "two corpora",
        f"compared by {_MEASURES.get(comparison.measure, comparison.measure)}",
        "most alike first" if comparison.alike else "most changed first",
    ]
    models = Text.assemble((before, "bold"), (" → ", "dim"), (after, "bold"))
    screen.flow([models, *(Text(fact, "dim") for fact in facts)], gap=", ")
    screen.result()
    rows: list[list[Any]] = [
        [
            str(layer.layer) if layer.layer == layer.other else f"{layer.layer}:{layer.other}",
            layer.memories,
            layer.matched,
            percent(layer.mean_change),
            layer.unchanged,
            layer.replaced,
        ]
        for layer in comparison.layers
    ]
    screen.table(["layer", "memories", "compared", "mean change", "unchanged", "all changed"], rows)
    if not comparison.changes:
        screen.note("no memory of one index has a counterpart in the other")
        return
    screen.result()
    _print_changes(screen, comparison)


def _print_changes(screen: Screen, comparison: IndexComparison) -> None:
    rows = []
    for change in comparison.changes:
        before, after = change.before, change.after
        same_name = before.memory == after.memory
        coefficients = [MISSING if side.coefficient is None else number(side.coefficient) for side in (before, after)]
        rows.append(
            [
                str(before.memory) if same_name else f"{before.memory} → {after.memory}",
                percent(change.change),
                _describe_overlap(comparison, change),
                " → ".join(coefficients),
                _describe_side(comparison.by, before),
                _describe_side(comparison.by, after),
            ]
        )
    heads = ["memory", "change", "shared", "strongest", "before", "after"]
    screen.table(heads, rows, optional=["strongest", "shared"])


def _describe_overlap(comparison: IndexComparison, change: MemoryChange) -> str:
    measures = {"prefixes": change.triggers, "endings": change.endings, "tokens": change.values, "roles": change.roles}
    overlap = measures.get(comparison.measure, change.patterns)
    return MISSING if overlap is None else f"{overlap.shared} of {overlap.a} | {overlap.b}"


def _describe_side(by: str, side: MemorySide) -> Cell:
    """Return a table cell with the roles, the name, the promoted tokens or the best trigger (cut on the left)."""
    if by == "roles":
        return Text(", ".join(side.roles or ()) or "no role")
    if by == "patterns":
        return Text(visible(side.name or "no pattern"))
    if by == "values":
        p = "" if side.max_p is None else f"{side.max_p:.2f} "
        tokens = [Text(quoted(token, 14)) for token in side.promotes[:6]]
        return lambda width: Text.assemble((p, "dim"), fit_items(tokens, gap=" ")(width - len(p)))
    if not side.triggers:
        return Text("no triggers", "dim")
    before, token = (visible(part) for part in side.triggers[0])

    def cell(width: int) -> Text:
        shown = cut_left(token, width)
        return Text.assemble((cut_left(before, width - cell_len(shown)), "dim"), (shown, "bold"))

    return cell
