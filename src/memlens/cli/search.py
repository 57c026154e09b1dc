"""`memlens search --in values`: which memories promote a token, or push it down.

`memlens search`: memories by what is in their triggers, what their values promote, or what their patterns are.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memlens.cli.options import IndexFolder, Json, Quiet, Verbose
from memlens.cli.screen import Screen
from memlens.errors import SettingError
from memlens.text import cut_right, number, quoted, visible

if TYPE_CHECKING:
    from rich.table import Table

    from memlens.index.reader import Index
    from memlens.index.search import PatternSearch, TriggerSearch
    from memlens.vocab.search import Promotion

_TAKEN = 36  # columns of a table line beside its tokens
_TOKENS_SHOWN = 12


def search_in_values(screen: Screen, index: Index, query: list[str], substring: bool, bottom: bool, limit: int) -> None:
    from memlens.vocab.search import search_values

    if limit < 1:
        raise SettingError(f"--limit is {limit}; it must be 1 or more")
    mode, end = "substring" if substring else "token", "bottom" if bottom else "top"
    everything = search_values(index, query, mode, end=end, limit=None)
    found = everything[:limit]
    if screen.as_json:
        told = {"query": query, "in": "values", "mode": mode, "end": end, "total": len(everything)}
        screen.json(told | {"memories": [_as_json(one) for one in found]})
        return
    if not found:
        listed = index.manifest.values.top
        texts = " or ".join(f"'{visible(text)}'" for text in query)
        screen.note(f"no value has {texts} among the {listed} tokens at its {end}")
        return
    screen.result(_table(screen, found, bottom))
    if len(everything) > len(found):
        screen.note(f"{len(found)} of {len(everything):,} are listed; see more with --limit")


def _as_json(one: Promotion) -> dict[str, Any]:
    return {
        "name": str(one.memory),
        "layer": one.memory.layer,
        "memory": one.memory.memory,
        "p": one.p,
        "rank": one.rank,
        "found": [{"token": t.token, "text": t.text, "rank": t.rank, "p": t.p} for t in one.found],
    }


def _table(screen: Screen, found: list[Promotion], bottom: bool) -> Table:
    from rich.table import Table
    from rich.text import Text

    room = max(min(screen.out.width, 160) - _TAKEN, 20)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("memory", style="bold")
    table.add_column("p", justify="right")
    table.add_column("place", justify="right")
    table.add_column("pushes down" if bottom else "promotes", no_wrap=True)
    for one in found:
        tokens = "  ".join(
            quoted(token.text, 20) + (f" {number(token.p)}" if len(one.found) > 1 else "")
            for token in one.found[:_TOKENS_SHOWN]
        )
        if len(one.found) > _TOKENS_SHOWN:
            tokens += f"  and {len(one.found) - _TOKENS_SHOWN} more"
        style = "red" if bottom else "green"
        table.add_row(str(one.memory), number(one.p), str(one.rank + 1), Text(cut_right(tokens, room), style))
    return table


# Where to look. A new place is a name here and a branch in `search`.
_PLACES = ("triggers", "values", "patterns")
_TRIGGERS, _VALUES = "In triggers", "In values or patterns"


def search(
    index: IndexFolder,
    query: Annotated[
        list[str], typer.Argument(metavar="QUERY", help="The text to look for; in values, one token or several.")
    ],
    place: Annotated[
        str,
        typer.Option(
            "--in",
            metavar="|".join(_PLACES),
            help="In the prefixes that trigger a memory, in what it promotes, or in words of its patterns.",
        ),
    ] = "triggers",
    ends: Annotated[
        bool, typer.Option("--ends", help="The prefix must end with the text.", rich_help_panel=_TRIGGERS)
    ] = False,
    ignore_case: Annotated[
        bool, typer.Option("--ignore-case", "-i", help="Capitals equal small letters.", rich_help_panel=_TRIGGERS)
    ] = False,
    substring: Annotated[
        bool,
        typer.Option(
            "--substring", help="Whatever contains the text; in patterns also within words.", rich_help_panel=_VALUES
        ),
    ] = False,
    bottom: Annotated[
        bool, typer.Option("--bottom", help="Memories that push the token down.", rich_help_panel=_VALUES)
    ] = False,
    limit: Annotated[int, typer.Option(metavar="N", help="Memories to list.")] = 20,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Find memories by their triggers, by the tokens they promote (--in values), or by their patterns."""
    from memlens.index.reader import Index

    screen = Screen(as_json, quiet, verbose)
    opened = Index(index)
    if place not in _PLACES:
        raise SettingError(f"--in is '{place}'; choose one of: {', '.join(_PLACES)}")
    for option, given, homes in (
        ("--ends", ends, ("triggers",)),
        ("--ignore-case", ignore_case, ("triggers",)),
        ("--substring", substring, ("values", "patterns")),
        ("--bottom", bottom, ("values",)),
    ):
        if given and place not in homes:
            raise SettingError(f"{option} is for --in {' or '.join(homes)}, but this looks in {place}; leave it out")
    if place == "patterns":
        _search_in_patterns(screen, opened, " ".join(query), substring, limit)
        return
    if place == "values":
        search_in_values(screen, opened, query, substring, bottom, limit)
        return
    _search_in_triggers(screen, opened, query, limit, ends=ends, ignore_case=ignore_case)


def _search_in_triggers(screen: Screen, index: Index, query: list[str], limit: int, **options: bool) -> None:
    from memlens.index.search import search_triggers

    if len(query) > 1:
        raise SettingError(f"{len(query)} texts were given to look for in triggers; put one text in quotes")
    result = search_triggers(index, query[0], limit=limit, **options)
    if screen.as_json:
        screen.json(_search_as_json(query[0], result))
    else:
        _print(screen, index, query[0], result)


def _search_in_patterns(screen: Screen, index: Index, query: str, substring: bool, limit: int) -> None:
    from memlens.index.search import search_patterns

    result = search_patterns(index, query, substring=substring, limit=limit)
    if screen.as_json:
        found = [asdict(match) | {"memory": str(match.memory)} for match in result.found]
        screen.json({"query": query, "total": result.total, "memories": found})
    elif not result.found:
        screen.note(f"no memory has a pattern with '{visible(query)}'")
    else:
        _print_patterns(screen, result)


def _print_patterns(screen: Screen, result: PatternSearch) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("memory", style="bold", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    table.add_column("prefixes", justify="right", no_wrap=True)
    table.add_column("confidence", justify="right", no_wrap=True)
    table.add_column("pattern", no_wrap=not screen.out.is_terminal)
    for match in result.found:
        description = Text(visible(match.description), "cyan")
        table.add_row(str(match.memory), match.kind, str(match.prefixes), f"{match.confidence:.2f}", description)
    screen.result(table)
    if result.total > len(result.found):
        screen.note(f"{len(result.found)} of {result.total:,} are listed; see more with --limit")


def _search_as_json(query: str, result: TriggerSearch) -> dict[str, Any]:
    return {
        "query": query,
        "total": result.total,
        "memories": [
            {
                "name": str(match.memory),
                "layer": match.memory.layer,
                "memory": match.memory.memory,
                "end": match.end,
                "matches": match.matches,
                "best_rank": match.best.rank,
                "best_coefficient": match.best.coefficient,
                "best_text": match.best.text,
                "best_token": match.best.token,
            }
            for match in result.found
        ],
    }


def _print(screen: Screen, index: Index, query: str, result: TriggerSearch) -> None:
    from memlens.cli.tables import match_table

    if not result.found:
        screen.note(f"no memory has '{visible(query)}' in its triggers")
        return
    screen.result(match_table(screen, result.found))
    if result.total > len(result.found):
        screen.note(f"{len(result.found)} of {result.total:,} are listed; see more with --limit")
