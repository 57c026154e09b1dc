"""Triggers as lines of a table: the prefix up to its last token, which is marked, and apart from it what follows.

Prefixes end in one column, so that what they have in common stands one below the other; long ones are cut at the left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from memlens.cli.screen import Screen
from memlens.cli.text import cut_left, cut_right, number, visible
from memlens.memory import Trigger

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from memlens.index.reader import Index
    from memlens.index.search import MemoryMatch

_NEXT_WIDTH = 16
_LEAST_WIDTH = 20  # of a prefix, on the narrowest terminal
_GAPS = 2 * 3
_BOS = "(BOS)"  # the prefix that is nothing but BOS has no text of its own
_WITHIN = "◌"  # a token that is a further byte of the character before it
_END = "(end)"
_MARKED = "bold black on yellow"


def trigger_table(
    screen: Screen, index: Index, triggers: Sequence[Trigger], marks: Callable[[int], str] | None = None
) -> Table:
    """A line a trigger; `marks` gives the letters of the patterns that the trigger of a rank contains."""
    from rich.table import Table
    from rich.text import Text

    coefficients = [number(trigger.coefficient) for trigger in triggers]
    ranks = [str(trigger.rank) for trigger in triggers]
    letters = [marks(trigger.rank) if marks else "" for trigger in triggers]
    taken = max(map(len, [*coefficients, "coeff."])) + max(map(len, [*ranks, "#"])) + _NEXT_WIDTH + _GAPS
    taken += max(map(len, [*letters, "has"])) + 2 if marks else 0
    room = max(screen.out.width - taken, _LEAST_WIDTH)
    on_terminal = screen.out.is_terminal
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("#", justify="right")
    table.add_column("coeff.", justify="right")
    if marks:
        table.add_column("has", style="magenta", no_wrap=True)
    table.add_column("prefix", justify="right" if on_terminal else "left", no_wrap=True)
    table.add_column("next", no_wrap=True)
    for rank, coefficient, own, trigger in zip(ranks, coefficients, letters, triggers, strict=True):
        following = Text(_next_token(index, trigger), "dim" if trigger.next_token is None else "cyan")
        has = [own] if marks else []
        table.add_row(rank, coefficient, *has, marked_prefix(trigger, room, screen.styled), following)
    return table


def match_table(screen: Screen, matches: Sequence[MemoryMatch]) -> Table:
    """Memories that a search has found, each with its best matching prefix."""
    from rich.table import Table

    names = [str(match.memory) for match in matches]
    has_bottom = any(match.end == "bottom" for match in matches)
    taken = max(map(len, [*names, "memory"])) + len("matches" + "rank") + has_bottom * len("bottom  ") + _GAPS
    room = max(screen.out.width - taken, _LEAST_WIDTH)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("memory", style="bold")
    if has_bottom:
        table.add_column("end")
    table.add_column("matches", justify="right")
    table.add_column("rank", justify="right")
    table.add_column("prefix", justify="right" if screen.out.is_terminal else "left", no_wrap=True)
    for name, match in zip(names, matches, strict=True):
        end = [match.end] if has_bottom else []
        prefix = marked_prefix(match.best, room, screen.styled)
        table.add_row(name, *end, str(match.matches), str(match.best.rank), prefix)
    return table


def marked_prefix(trigger: Trigger, room: int, styled: bool) -> Text:
    """The prefix in at most `room` columns, its last token in reverse, or between « and » where there is no style."""
    from rich.cells import cell_len
    from rich.text import Text

    token = (visible(trigger.token) or _WITHIN) if trigger.prefix.position >= 0 else _BOS
    marks = ("", "") if styled else ("«", "»")
    token = cut_left(token, room - len("".join(marks)))
    before = cut_left(visible(trigger.before), room - cell_len(token) - len("".join(marks)))
    return Text.assemble(before, marks[0], (token, _MARKED if styled else ""), marks[1], no_wrap=True)


def _next_token(index: Index, trigger: Trigger) -> str:
    if trigger.next_token is None:
        return _END
    return cut_right(visible(index.vocabulary[trigger.next_token]), _NEXT_WIDTH)
