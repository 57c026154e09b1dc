"""Triggers as lines of a table: the prefix up to its last token, which is marked, and apart from it what follows.

Prefixes end in one column, so that what they have in common stands one below the other; long ones are cut at the left.

One memory's value on a terminal: what it promotes beside what it pushes down, and what its key matches alone.

One memory's patterns on a terminal: a letter each, so that triggers can be marked with those they contain.

This module draws what the patterns tables have; it computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from memlens.cli.screen import Screen
from memlens.memory import MemoryId, Trigger
from memlens.text import cut_left, cut_right, letter, number, quoted, visible
from memlens.vocab.read import MemoryValue, TokenNumber

if TYPE_CHECKING:
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


_TOKEN_WIDTH = 22
_KEY_TOKENS = 8


def print_value(screen: Screen, value: MemoryValue, count: int) -> None:
    """Numbers in one line, then both ends as two columns, then the key's own tokens."""
    screen.result()
    line = Text.assemble("value", (f" ({value.reading})", "dim"))
    for name, fact in (("max p", value.max_p), ("entropy", value.entropy), ("norm", value.norm)):
        line.append_text(Text.assemble((f"   {name} ", "dim"), number(fact)))
    screen.result(line)
    screen.result(_agreement(value))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for head in ("promotes", "p", "demotes", "p"):
        table.add_column(head, justify="right" if head == "p" else "left", no_wrap=True)
    for up, down in zip(value.promotes[:count], value.demotes[:count], strict=True):
        table.add_row(_token(up, "green"), number(up.number), _token(down, "red"), number(down.number))
    screen.result(table)
    if value.key:
        tokens = [quoted(one.text, _TOKEN_WIDTH) for one in value.key[:_KEY_TOKENS]]
        screen.result(Text.assemble(("its key alone matches  ", "dim"), _fitting(tokens, screen.out.width - 23)))


def value_json(value: MemoryValue | None) -> dict[str, Any] | None:
    """None where the index has no values yet."""
    if value is None:
        return None
    return {
        "reading": value.reading,
        "max_p": value.max_p,
        "entropy": value.entropy,
        "norm": value.norm,
        "agrees": value.agrees,
        "target": value.target,
        "target_text": value.target_text,
        "target_rank": value.target_rank,
        "promotes": [{"token": one.token, "text": one.text, "p": one.number} for one in value.promotes],
        "demotes": [{"token": one.token, "text": one.text, "p": one.number} for one in value.demotes],
        "key": [{"token": one.token, "text": one.text, "score": one.number} for one in value.key],
    }


def _agreement(value: MemoryValue) -> Text:
    if value.target_text is None:
        return Text("nothing follows its top trigger, so there is no agreement to speak of", "dim")
    target = quoted(value.target_text, _TOKEN_WIDTH)
    if value.agrees:
        return Text.assemble(("✓ agrees", "bold green"), (": its top token follows its top trigger, ", "dim"), target)
    words = ("✗ ", "bold"), (f"{target} follows its top trigger, here at rank {value.target_rank:,}", "dim")
    return Text.assemble(*words)


def _token(one: TokenNumber, style: str) -> Text:
    return Text(quoted(one.text, _TOKEN_WIDTH), style)


def _fitting(tokens: list[str], room: int) -> str:
    """As many as fit one line."""
    from rich.cells import cell_len

    line = tokens[0]
    for token in tokens[1:]:
        if cell_len(line) + 1 + cell_len(token) > room:
            break
        line += " " + token
    return line


_RELATED = 5


@dataclass(frozen=True)
class MemoryPatterns:
    """What `memlens patterns` says about one memory."""

    name: dict[str, Any] | None  # its row of the names; None for a memory without triggers
    rows: list[dict[str, Any]]  # its patterns, the surest first

    def letters(self, rank: int) -> str:
        """The patterns that a trigger contains."""
        return "".join(letter(i) for i, row in enumerate(self.rows) if rank in row["prefixes"])


def read_patterns(index: Index, memory: MemoryId) -> MemoryPatterns | None:
    """None where the index has no patterns yet."""
    if not index.has("patterns") or not index.has("names"):
        return None
    from memlens.pattern.table import memory_name, memory_patterns

    return MemoryPatterns(memory_name(index, memory), memory_patterns(index, memory))


def patterns_json(index: Index, memory: MemoryId, found: MemoryPatterns | None) -> dict[str, Any]:
    if found is None:
        return {"summary": None, "patterns": None, "related": None}
    from memlens.pattern.related import related_memories

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
    for place, row in enumerate(found.rows):
        mark = Text(letter(place), "magenta")
        cells = (row["kind"], str(len(row["prefixes"])), f"{row['confidence']:.2f}")
        table.add_row(mark, *cells, Text(visible(row["description"]), "cyan"))
    if found.rows:
        screen.result(table)


def print_related(screen: Screen, index: Index, memory: MemoryId) -> None:
    """The memories that have most in common with this one, and what."""
    from rich.table import Table
    from rich.text import Text

    from memlens.pattern.related import related_memories

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
