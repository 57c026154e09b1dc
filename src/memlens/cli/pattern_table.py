"""One memory's patterns on a terminal: a letter each, so that triggers can be marked with those they contain.

This module draws what the patterns tables have; it computes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any

from memlens.cli.screen import Screen
from memlens.cli.text import visible
from memlens.memory import MemoryId

if TYPE_CHECKING:
    from memlens.index.reader import Index

_RELATED = 5


@dataclass(frozen=True)
class MemoryPatterns:
    """What `memlens patterns` says about one memory."""

    name: dict[str, Any] | None  # its row of the names; None for a memory without triggers
    rows: list[dict[str, Any]]  # its patterns, the surest first

    def letters(self, rank: int) -> str:
        """The patterns that a trigger contains."""
        return "".join(letter(i) for i, row in enumerate(self.rows) if rank in row["prefixes"])


def letter(number: int) -> str:
    """a, b, ... z, then numbers."""
    return ascii_lowercase[number] if number < len(ascii_lowercase) else f"({number})"


def read_patterns(index: Index, memory: MemoryId) -> MemoryPatterns | None:
    """None where the index has no patterns yet."""
    if not index.has("patterns") or not index.has("names"):
        return None
    from memlens.patterns import memory_name, memory_patterns

    return MemoryPatterns(memory_name(index, memory), memory_patterns(index, memory))


def patterns_json(index: Index, memory: MemoryId, found: MemoryPatterns | None) -> dict[str, Any]:
    if found is None:
        return {"summary": None, "patterns": None, "related": None}
    from memlens.patterns import related_memories

    columns = ("pattern", "kind", "description", "prefixes", "confidence", "share", "q")
    related = [
        {"name": str(r.memory), "triggers": r.triggers, "tokens": r.tokens, "patterns": list(r.patterns)}
        for r in related_memories(index, memory)
    ]
    return {
        "summary": found.name,
        "patterns": [{column: row[column] for column in columns} for row in found.rows],
        "related": related,
    }


def print_patterns(screen: Screen, found: MemoryPatterns) -> None:
    """The memory in one line, how much of it is covered, and each pattern with its letter."""
    from rich.table import Table
    from rich.text import Text

    if found.name is None:
        return
    screen.result()
    screen.result(Text(visible(found.name["name"]), "bold"))
    count = len(found.rows)
    words = f"{count} {'pattern' if count == 1 else 'patterns'}"
    covered = f"{found.name['covered']} of {found.name['triggers']} triggers covered"
    screen.result(Text.assemble((f"{words}, {covered}", "dim")))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for head in ("", "kind", "prefixes", "confidence"):
        table.add_column(head, justify="right" if head in ("prefixes", "confidence") else "left", no_wrap=True)
    table.add_column("pattern", no_wrap=not screen.out.is_terminal)
    for number, row in enumerate(found.rows):
        mark = Text(letter(number), "magenta")
        cells = (row["kind"], str(len(row["prefixes"])), f"{row['confidence']:.2f}")
        table.add_row(mark, *cells, Text(visible(row["description"]), "cyan"))
    if found.rows:
        screen.result(table)


def print_related(screen: Screen, index: Index, memory: MemoryId) -> None:
    """The memories that have most in common with this one, and what."""
    from rich.table import Table
    from rich.text import Text

    from memlens.patterns import related_memories

    found = related_memories(index, memory, _RELATED)
    if not found:
        return
    screen.result()
    screen.result("related memories")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for head in ("memory", "equal triggers", "equal tokens", "equal patterns"):
        table.add_column(head, justify="right" if head in ("equal triggers", "equal tokens") else "left")
    for other in found:
        tokens = "–" if other.tokens is None else str(other.tokens)
        patterns = Text(visible(", ".join(other.patterns)) or "–")
        table.add_row(Text(str(other.memory), "bold"), str(other.triggers), tokens, patterns)
    screen.result(table)
