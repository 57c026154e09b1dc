"""One memory's value on a terminal: what it promotes beside what it pushes down, and what its key matches alone."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from memlens.cli.screen import Screen
from memlens.cli.text import number, quoted
from memlens.values.looking import MemoryValue, TokenNumber

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
