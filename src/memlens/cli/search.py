"""`memlens search`: memories by what is in their triggers, what their values promote, or what their patterns are."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memlens.cli.options import IndexFolder, Json, Quiet, Verbose
from memlens.cli.screen import Screen
from memlens.cli.text import visible
from memlens.errors import SettingError

if TYPE_CHECKING:
    from memlens.index.reader import Index
    from memlens.index.search import PatternSearch, TriggerSearch

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
        from memlens.cli.value_search import search_in_values

        search_in_values(screen, opened, query, substring, bottom, limit)
        return
    _search_in_triggers(screen, opened, query, limit, ends=ends, ignore_case=ignore_case)


def _search_in_triggers(screen: Screen, index: Index, query: list[str], limit: int, **options: bool) -> None:
    from memlens.index.search import search_triggers

    if len(query) > 1:
        raise SettingError(f"{len(query)} texts were given to look for in triggers; put one text in quotes")
    result = search_triggers(index, query[0], limit=limit, **options)
    if screen.as_json:
        screen.json(_as_json(query[0], result))
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


def _as_json(query: str, result: TriggerSearch) -> dict[str, Any]:
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
    from memlens.cli.trigger_table import match_table

    if not result.found:
        screen.note(f"no memory has '{visible(query)}' in its triggers")
        return
    screen.result(match_table(screen, result.found))
    if result.total > len(result.found):
        screen.note(f"{len(result.found)} of {result.total:,} are listed; see more with --limit")
