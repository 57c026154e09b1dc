"""`memlens search`: memories by what is in their triggers, or by what their values promote."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from memlens.cli.options import IndexFolder, Json, Quiet, Verbose
from memlens.cli.screen import Screen
from memlens.cli.text import visible
from memlens.errors import SettingError

if TYPE_CHECKING:
    from memlens.index.reader import Index
    from memlens.index.search import TriggerSearch

# Where to look. A new place is a name here and a branch in `search`.
_PLACES = ("triggers", "values")
# The tables of places that this version cannot search yet.
_TABLES = {"patterns": "patterns"}
_TRIGGERS, _VALUES = "In triggers", "In values"


def search(
    index: IndexFolder,
    query: Annotated[
        list[str], typer.Argument(metavar="QUERY", help="The text to look for; in values, one token or several.")
    ],
    place: Annotated[
        str,
        typer.Option(
            "--in", metavar="triggers|values", help="In the prefixes that trigger a memory, or in what it promotes."
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
        typer.Option("--substring", help="Every token that contains the text.", rich_help_panel=_VALUES),
    ] = False,
    bottom: Annotated[
        bool, typer.Option("--bottom", help="Memories that push the token down.", rich_help_panel=_VALUES)
    ] = False,
    limit: Annotated[int, typer.Option(metavar="N", help="Memories to list.")] = 20,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Find memories by their triggers, or by the tokens they promote (--in values)."""
    from memlens.index.reader import Index

    screen = Screen(as_json, quiet, verbose)
    opened = Index(index)
    if place not in _PLACES:
        _refuse(opened, place)
    for option, given, home in (
        ("--ends", ends, "triggers"),
        ("--ignore-case", ignore_case, "triggers"),
        ("--substring", substring, "values"),
        ("--bottom", bottom, "values"),
    ):
        if given and place != home:
            raise SettingError(f"{option} is for --in {home}, but this looks in {place}; leave it out")
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


def _refuse(index: Index, place: str) -> None:
    if place in _TABLES:
        index.path(_TABLES[place])  # says which command makes the table, if it is not there
        raise SettingError(f"--in {place} is not known to this version; use --in {' or '.join(_PLACES)}")
    raise SettingError(f"--in is '{place}'; choose one of: {', '.join(_PLACES)}")


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
