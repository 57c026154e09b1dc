"""`memlens search`: memories by what is in their triggers."""

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

# Where to look. A new place is one function (index, query, options) -> printed result, and one line here.
_PLACES = ("triggers",)
# The tables of places that this version cannot search yet.
_TABLES = {"values": "values", "patterns": "patterns"}


def search(
    index: IndexFolder,
    query: Annotated[str, typer.Argument(metavar="QUERY", help="The text to look for.")],
    place: Annotated[
        str, typer.Option("--in", metavar="triggers", help="Where to look: in the prefixes that trigger a memory.")
    ] = "triggers",
    ends: Annotated[bool, typer.Option("--ends", help="The prefix must end with the text.")] = False,
    ignore_case: Annotated[bool, typer.Option("--ignore-case", "-i", help="Capitals equal small letters.")] = False,
    limit: Annotated[int, typer.Option(metavar="N", help="Memories to list.")] = 20,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Find memories by the text of their triggers, most matches first."""
    from memlens.index.reader import Index

    screen = Screen(as_json, quiet, verbose)
    opened = Index(index)
    if place not in _PLACES:
        _refuse(opened, place)
    from memlens.index.search import search_triggers

    result = search_triggers(opened, query, ends=ends, ignore_case=ignore_case, limit=limit)
    if as_json:
        screen.json(_as_json(query, result))
    else:
        _print(screen, opened, query, result)


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
