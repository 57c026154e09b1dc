"""`memlens trace`: one prompt, live, with or without memories changed, and its tables on a terminal.

Layers go down, tokens across; then come the parts of the logit and the memories by effect. Rows show as much as the
terminal's width holds (a CJK character takes two columns); no row is broken into two lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

import memlens
from memlens.cli.options import Device, refuse_unused, with_screen
from memlens.cli.screen import Screen
from memlens.errors import SettingError
from memlens.files import refuse_output
from memlens.settings import RUN
from memlens.text import cut_left, number, plain, quoted, visible

if TYPE_CHECKING:
    from memlens.models.memory_model import MemoryModel
    from memlens.tracer.intervene import Continuation
    from memlens.tracer.intervention import Edit, Intervention
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
    """Sizes of a row to try in turn, from the largest to the least that is of use: first fewer things, then shorter."""
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
                Text("  ".join(f"{memory.memory}{memory.effect:+.2f}" for memory in layer.by_effect[: room.memories])),
            ]
            for layer in trace.layers
        ]

    return _table(screen, ("layer", "residual", "ffn", "output", "case", "memories"), rows, top)


def _memory_table(screen: Screen, memories: Sequence[TracedMemory], top: int) -> Table:
    def rows(room: Room) -> list[list[Text]]:
        return [
            [
                Text(str(memory.memory), "bold"),
                Text(number(memory.coefficient)),
                Text(f"{memory.effect:+.3f}"),
                _tokens(memory.promotes[: room.tokens], room.token),
                _tokens(memory.demotes[: room.tokens], room.token),
                *([Text(cut_left(visible(_known(memory)), room.known), "dim")] if is_known else []),
            ]
            for memory in memories
        ]

    is_known = any(_known(memory) for memory in memories)
    heads = ("memory", "m", "effect", "promotes", "demotes", *(["known as"] if is_known else []))
    return _table(screen, heads, rows, top)


def _known(memory: TracedMemory) -> str:
    return "; ".join(memory.patterns) or ("" if memory.trigger is None else f"… {memory.trigger}")


def _print_parts(screen: Screen, trace: Trace) -> None:
    whole = Text.assemble((f"{trace.logit_name} of ", "dim"), _quoted(trace.token))
    if trace.against is not None:
        whole.append_text(Text.assemble((" and ", "dim"), _quoted(trace.against)))
    whole.append_text(Text.assemble(f" {number(trace.logit)}", (" =", "dim")))
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


_EDITS, _TEXT = "Changing memories", "Going on with the text"


_Model = Annotated[str, typer.Argument(metavar="MODEL|INDEX", help="A model, or an index folder: its model is loaded.")]
_Position = Annotated[int, typer.Option(metavar="N", help="The prompt's token to trace at, from 0; -1 is the last.")]
_Token = Annotated[
    str | None, typer.Option(metavar="TEXT", help="Whose logit to explain. Default: what the model predicts.")
]
_Against = Annotated[
    str | None, typer.Option(metavar="TEXT", help="Another token: explain how far --token's logit lies above its.")
]
_Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="L3N51=0",
        help="Silence (=0), set (=3.5) or scale (=x2) a memory, or a layer (L3=0). Repeatable.",
        rich_help_panel=_EDITS,
    ),
]
_At = Annotated[
    list[int] | None,
    typer.Option("--at", metavar="N", help="Where --set holds. Default: everywhere.", rich_help_panel=_EDITS),
]
_File = Annotated[Path | None, typer.Option(metavar="FILE", help="An intervention to replay.", rich_help_panel=_EDITS)]
_Save = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Save the intervention as JSON.", rich_help_panel=_EDITS)
]
_Force = Annotated[
    bool, typer.Option("--force", help="Save over a file that memlens did not make.", rich_help_panel=_EDITS)
]
_Generate = Annotated[int, typer.Option(metavar="N", min=0, help="Tokens to go on with.", rich_help_panel=_TEXT)]
_Temperature = Annotated[
    float, typer.Option(metavar="T", help="0: the most likely token; above: drawn.", rich_help_panel=_TEXT)
]
_Seed = Annotated[int, typer.Option(metavar="N", help="For drawn tokens.", rich_help_panel=_TEXT)]
_Where = Annotated[
    str | None, typer.Option("--model", metavar="MODEL", help="Where an index's model is now.", rich_help_panel=RUN)
]
_Dtype = Annotated[
    str | None, typer.Option(help="Numbers of the model. Default: float32, or the index's.", rich_help_panel=RUN)
]


@with_screen(json=True)
def trace(
    screen: Screen,
    model: _Model,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to trace.")],
    position: _Position = -1,
    token: _Token = None,
    against: _Against = None,
    top: Annotated[int, typer.Option(metavar="K", help="Tokens and memories to list.")] = 3,
    sets: _Sets = None,
    at: _At = None,
    file: _File = None,
    save: _Save = None,
    force: _Force = False,
    generate: _Generate = 0,
    temperature: _Temperature = 0.0,
    seed: _Seed = 0,
    where: _Where = None,
    device: Device = "auto",
    dtype: _Dtype = None,
) -> None:
    """Show what every layer did with a prompt: what fired, what it promotes, what is predicted."""
    intervention = _intervention(sets or [], at, file)
    if save is not None and intervention is None:
        raise SettingError(f"there is nothing to save in {save}; say what to change with --set")
    if save is None:
        refuse_unused({"--force": force}, "is for --save, which is not there")
    else:
        from memlens.tracer.intervention import is_intervention

        refuse_output(save, is_intervention, force=force)  # now, not after a model was loaded
    if not generate and (temperature != 0 or seed != 0):
        raise SettingError("--temperature and --seed say how a text goes on, but there is no --generate")
    if temperature == 0 and seed != 0:
        raise SettingError("--seed is for tokens that are drawn, and with --temperature 0 none is; leave it out")
    from memlens.tracer.prompt import open_model

    loaded, index = open_model(model, where=where, device=device, dtype=dtype)
    if intervention is not None and (screen.as_json or save is not None or file is not None):
        intervention = intervention.meant_for(loaded)  # what is printed can be replayed, just as what is saved
    result = _look(loaded, index, prompt, intervention, position=position, token=token, against=against, top=top)
    texts = _continue(loaded, prompt, generate, intervention, temperature, seed)
    if save is not None and intervention is not None:
        intervention.save(save, force=force)
        screen.note(f"saved the intervention in {save}")
    if screen.as_json:
        screen.json(plain(result) | {"continuation": texts})
        return
    print_trace(screen, result if intervention is None else result.before, top)
    if intervention is not None:
        print_effect(screen, result)
    print_continuations(screen, texts)


def _intervention(sets: list[str], at: list[int] | None, file: Path | None) -> Intervention | None:
    """The edits of --file, then those of --set; None where nothing is changed."""
    from memlens.tracer.intervention import Intervention

    if at and not sets:
        raise SettingError("--at says where --set holds, but there is no --set")
    parts = [] if file is None else [Intervention.load(file)]
    if sets:
        parts.append(Intervention.parse(*sets, positions=at or None))
        _refuse_contrary(parts[-1].edits)
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _refuse_contrary(edits: Sequence[Edit]) -> None:
    """Refuse an edit that changes nothing since a later one sets the very same memory; scaling what was set is fine."""
    last: dict[str, Edit] = {}
    for edit in edits:
        before = last.get(edit.target, edit)
        if edit.action != "scale" and str(before) != str(edit):
            raise SettingError(f"--set {before} would change nothing, since {edit} comes after it; leave one out")
        last[edit.target] = edit


def _look(
    model: MemoryModel, index: memlens.Index | None, prompt: str, intervention: Intervention | None, **options: Any
) -> Any:
    """Trace the prompt; an InterventionEffect where something is changed."""
    from memlens.tracer.intervene import intervene
    from memlens.tracer.trace import trace

    if intervention is None:
        return trace(model, prompt, index=index, **options)
    # its fingerprint was compared with the model's once, which takes a while for a large model
    effect = intervene(model, prompt, intervention.for_any(), index=index, **options)
    return replace(effect, intervention=intervention)


def _continue(
    model: MemoryModel, prompt: str, count: int, intervention: Intervention | None, temperature: float, seed: int
) -> list[Continuation]:
    """Continue the prompt without the edits and, if there are any, with them."""
    from memlens.tracer.intervene import generate

    if not count:
        return []
    variants = [None] if intervention is None else [None, intervention.for_any()]
    return [generate(model, prompt, count, edits, temperature=temperature, seed=seed) for edits in variants]
