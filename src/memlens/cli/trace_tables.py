"""Tables of `memlens trace` on a terminal: layers down, tokens across, the parts of the logit, memories by effect.

Rows show as much as the terminal's width holds (a CJK character takes two columns); no row is broken into two lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from memlens.cli.screen import Screen
from memlens.text import cut_left, number, quoted, visible

if TYPE_CHECKING:
    from memlens.tracer.intervene import Continuation
    from memlens.tracer.result import InterventionEffect, LayerTrace, Token, TokenShare, Trace, TracedMemory

_GAP, _TOKEN_WIDTH, _LEAST_PROMPT, _MEMORIES = 2, 12, 20, 10
_CASE_STYLES = {"composition": "yellow", "ffn": "green", "reversal": "red"}


@dataclass(frozen=True)
class Room:
    """The number and width of the things that a row shows."""

    tokens: int
    memories: int
    token: int = 12  # columns of one token's text
    known: int = 40  # columns of what a memory is known as


def rooms(top: int) -> Iterator[Room]:
    """From everything to the least that is still of use: first fewer things, then shorter ones."""
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


def print_trace(screen: Screen, trace: Trace, top: int) -> None:
    _print_header(screen, trace)
    screen.result()
    screen.result(_layer_table(screen, trace, top))
    screen.result()
    _print_parts(screen, trace)
    screen.result()
    screen.result(_memory_table(screen, trace.memories[: max(top, _MEMORIES)], top))


def print_effect(screen: Screen, effect: InterventionEffect) -> None:
    """The effect of the edits in sum, token by token and layer by layer."""
    before, after = effect.before, effect.after
    screen.result()
    edits = [Text(visible(str(edit)), "bold") for edit in effect.intervention.edits]
    _print_flowing(screen, [Text("with", "dim"), *edits], gap="  ")
    changes = [
        Text.assemble(("KL ", "dim"), number(effect.kl)),
        Text.assemble((f"{before.logit_name} of ", "dim"), _quoted(before.token), _change(before.logit, after.logit)),
        Text.assemble(("p", "dim"), _change(before.token.p, after.token.p)),
    ]
    _print_flowing(screen, changes)
    screen.result()
    pairs = list(zip(before.layers[-1].output, after.layers[-1].output, strict=True))
    tokens = [[Text(str(at), "dim"), _share(left), _share(right)] for at, (left, right) in enumerate(pairs, start=1)]
    screen.result(_table(screen, ("", "before", "after"), lambda _: tokens, 1))
    screen.result()
    layers = [
        [Text(str(left.layer)), _share(left.output[0]), _share(right.output[0]), _case(left), _case(right)]
        for left, right in zip(before.layers, after.layers, strict=True)
    ]
    heads = ("layer", "output before", "output after", "case before", "case after")
    screen.result(_table(screen, heads, lambda _: layers, 1))


def print_continuations(screen: Screen, texts: Sequence[Continuation]) -> None:
    if not texts:
        return
    screen.result()
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in zip(("goes on", "edited"), texts, strict=False):
        table.add_row(Text(label, "dim"), Text.assemble(visible(text.prompt), (visible(text.text), "bold")))
    screen.result(table)


def _print_header(screen: Screen, trace: Trace) -> None:
    place = f"   position {trace.position}   {visible(trace.model)}"
    room = max(screen.out.width - Text(place).cell_len, _LEAST_PROMPT)
    _print_flowing(screen, [Text.assemble((cut_left(visible(trace.text), room), "bold"), place)])
    pieces = [
        Text.assemble(("predicts ", "dim"), _share(trace.prediction)),
        Text.assemble(("settled in layer ", "dim"), str(trace.settled)),
    ]
    if trace.token.id != trace.prediction.id:
        pieces.append(Text.assemble(("traced ", "dim"), _share(trace.token), f" rank {trace.rank}"))
    _print_flowing(screen, pieces)


def _layer_table(screen: Screen, trace: Trace, top: int) -> Table:
    def rows(room: Room) -> list[list[Text]]:
        return [
            [
                Text(str(layer.layer), "bold" if layer.layer == trace.settled else ""),
                _share(layer.residual[0], room.token),
                _share(layer.ffn[0], room.token),
                Text("  ").join(_share(share, room.token) for share in layer.output[: room.tokens]),
                _case(layer),
                Text("  ".join(f"{one.memory}{one.effect:+.2f}" for one in layer.by_effect[: room.memories])),
            ]
            for layer in trace.layers
        ]

    return _table(screen, ("layer", "residual", "ffn", "output", "case", "memories"), rows, top)


def _memory_table(screen: Screen, memories: Sequence[TracedMemory], top: int) -> Table:
    def rows(room: Room) -> list[list[Text]]:
        return [
            [
                Text(str(one.memory), "bold"),
                Text(number(one.coefficient)),
                Text(f"{one.effect:+.3f}"),
                _tokens(one.promotes[: room.tokens], room.token),
                _tokens(one.demotes[: room.tokens], room.token),
                *([Text(cut_left(visible(_known(one)), room.known), "dim")] if is_known else []),
            ]
            for one in memories
        ]

    is_known = any(_known(one) for one in memories)
    heads = ("memory", "m", "effect", "promotes", "demotes", *(["known as"] if is_known else []))
    return _table(screen, heads, rows, top)


def _known(memory: TracedMemory) -> str:
    return "; ".join(memory.patterns) or ("" if memory.trigger is None else f"… {memory.trigger}")


def _print_parts(screen: Screen, trace: Trace) -> None:
    whole = Text.assemble(
        (f"{trace.logit_name} of ", "dim"), _quoted(trace.token), f" {number(trace.logit)}", (" =", "dim")
    )
    parts = [Text(f"{name} {value:+.3f}") for name, value in trace.parts.items() if value != 0]
    _print_flowing(screen, [whole, *parts], gap="  ")
    if not trace.is_plain_logit:
        words = f"({trace.logit_name}: {trace.logit_is})".split()
        _print_flowing(screen, [Text(word, "dim") for word in words], gap=" ")


def _print_flowing(screen: Screen, pieces: Sequence[Text], gap: str = "   ") -> None:
    """Pieces one after another, a new line begun where one does not fit; a single piece is cut, never broken."""
    lines: list[Text] = []
    for piece in pieces:
        if lines and lines[-1].cell_len + len(gap) + piece.cell_len <= screen.out.width:
            lines[-1] = Text.assemble(lines[-1], gap, piece)
        else:
            line = Text.assemble("  " if lines else "", piece)
            line.truncate(screen.out.width, overflow="ellipsis")
            lines.append(line)
    for line in lines:
        screen.result(line)


def _table(screen: Screen, heads: Sequence[str], rows: Callable[[Room], list[list[Text]]], top: int) -> Table:
    """The table with as much in its rows as the terminal's width holds."""
    lines: list[list[Text]] = []
    for room in rooms(top):
        lines = rows(room)
        columns = zip(*([Text(head) for head in heads], *lines), strict=True)
        if sum(max(cell.cell_len for cell in column) + _GAP for column in columns) - _GAP <= screen.out.width:
            break
    table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="dim", pad_edge=False)
    for head in heads:
        table.add_column(Text(head), no_wrap=True, overflow="ellipsis")
    for line in lines:
        table.add_row(*line)
    return table


def _change(before: float, after: float) -> str:
    return f" {number(before)} → {number(after)}"


def _case(layer: LayerTrace) -> Text:
    return Text(layer.case, _CASE_STYLES.get(layer.case, ""))


def _share(share: TokenShare, width: int = _TOKEN_WIDTH) -> Text:
    return Text.assemble(_quoted(share, width), (f" {share.p:.2f}", "dim"))


def _tokens(tokens: Iterable[Token], width: int) -> Text:
    return Text(" ".join(_quoted(token, width) for token in tokens))


def _quoted(token: Token, width: int = _TOKEN_WIDTH) -> str:
    return quoted(token.text, width + 2)
