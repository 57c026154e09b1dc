"""`memlens search --in values`: which memories promote a token, or push it down."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memlens.cli.screen import Screen
from memlens.cli.text import cut_right, number, quoted, visible
from memlens.errors import SettingError

if TYPE_CHECKING:
    from rich.table import Table

    from memlens.index.reader import Index
    from memlens.values.search import Promotion

_TAKEN = 36  # columns of a table line beside its tokens
_TOKENS_SHOWN = 12


def search_in_values(screen: Screen, index: Index, query: list[str], substring: bool, bottom: bool, limit: int) -> None:
    from memlens.values.search import search_values

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
        listed = index.manifest["values"]["top"]
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
