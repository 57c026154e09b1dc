"""Rows that fit a terminal: how much of a trace is shown where there is little room, and lines broken between pieces.

Widths are columns of a terminal, in which a CJK character takes two. This module knows rich, not traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from rich.table import Table
from rich.text import Text

_GAP = 2


@dataclass(frozen=True)
class Room:
    """How much of each thing a row shows."""

    tokens: int
    memories: int
    token: int = 12  # columns of one token's text
    known: int = 40  # columns of what a memory is known as


def rooms(top: int) -> Iterator[Room]:
    """From everything to the least that still says something: first fewer things, then shorter ones."""
    room = Room(top, top)
    yield room
    while max(room.tokens, room.memories) > 2:
        fewer_tokens = room.tokens >= room.memories
        room = replace(room, tokens=room.tokens - fewer_tokens, memories=room.memories - (not fewer_tokens))
        yield room
    yield (room := replace(room, token=9, known=24))
    for memories in (room.memories, 1):
        yield (room := replace(room, tokens=1, memories=memories, token=9))
        yield (room := replace(room, token=7))
    for token in (6, 5, 4):
        yield (room := replace(room, token=token, known=max(4 * (token - 2), 8)))


def fitted(heads: Sequence[str], rows: Callable[[Room], list[list[Text]]], top: int, width: int) -> Table:
    """The table with as much in its rows as `width` columns hold; no row is ever broken into two lines."""
    lines: list[list[Text]] = []
    for room in rooms(top):
        lines = rows(room)
        if _width(heads, lines) <= width:
            break
    table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="dim", pad_edge=False)
    for head in heads:
        table.add_column(Text(head), no_wrap=True, overflow="ellipsis")
    for line in lines:
        table.add_row(*line)
    return table


def _width(heads: Sequence[str], lines: list[list[Text]]) -> int:
    columns = zip(*([Text(head) for head in heads], *lines), strict=True)
    return sum(max(cell.cell_len for cell in column) + _GAP for column in columns) - _GAP


def flowing(pieces: Sequence[Text], width: int, indent: int = 2, gap: str = "   ") -> list[Text]:
    """Pieces one after another, a new line begun where one does not fit; a single piece is cut, never broken."""
    lines: list[Text] = []
    for piece in pieces:
        if lines and lines[-1].cell_len + len(gap) + piece.cell_len <= width:
            lines[-1] = Text.assemble(lines[-1], gap, piece)
        else:
            line = Text.assemble(" " * (indent if lines else 0), piece)
            line.truncate(width, overflow="ellipsis")
            lines.append(line)
    return lines
