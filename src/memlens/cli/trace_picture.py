"""A trace on a terminal: layers down, tokens across, then the parts of the logit and the memories that mattered most.

This module draws what a trace found; it knows no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from memlens.cli.screen import Screen
from memlens.cli.text import cut_left, cut_right, number, visible

if TYPE_CHECKING:
    from memlens.trace import Comparison, Continuation, LayerTrace, Trace, TracedMemory
    from memlens.trace.result import Token, TokenShare

_TOKEN_WIDTH, _PROMPT_WIDTH, _MEMORIES = 12, 60, 10
_CASE_STYLES = {"composition": "yellow", "ffn": "green", "reversal": "red"}


def print_trace(screen: Screen, trace: Trace, top: int) -> None:
    _print_header(screen, trace)
    screen.result()
    screen.result(_layer_table(trace, top))
    screen.result()
    screen.result(_parts(trace))
    screen.result()
    screen.result(_memory_table(trace.memories[: max(top, _MEMORIES)], top))


def print_comparison(screen: Screen, compared: Comparison, top: int) -> None:
    """What the edits changed, in sum, token by token and layer by layer."""
    before, after = compared.before, compared.after
    screen.result()
    edits = ", ".join(_edit(edit.target, edit.coefficient, edit.factor) for edit in compared.intervention.edits)
    line = Text.assemble(("with ", "dim"), (visible(edits), "bold"), f"   KL {number(compared.kl)}")
    line.append(f"   logit of {_quoted(before.token)} {number(before.logit)} → {number(after.logit)}")
    line.append(f"   p {number(before.token.p)} → {number(after.token.p)}")
    screen.result(line)
    screen.result()
    table = _table("", "before", "after")
    for rank, (left, right) in enumerate(zip(before.layers[-1].output, after.layers[-1].output, strict=True)):
        table.add_row(Text(f"{rank + 1}", "dim"), _share(left), _share(right))
    screen.result(table)
    screen.result()
    table = _table("layer", "output before", "output after", "case before", "case after")
    for left_layer, right_layer in zip(before.layers, after.layers, strict=True):
        table.add_row(
            Text(str(left_layer.layer)),
            _shares(left_layer.output[:1]),
            _shares(right_layer.output[:1]),
            _case(left_layer),
            _case(right_layer),
        )
    screen.result(table)


def print_continuations(screen: Screen, texts: Sequence[Continuation]) -> None:
    if not texts:
        return
    screen.result()
    for label, text in zip(("goes on", "edited "), texts, strict=False):
        line = Text.assemble((f"{label}  ", "dim"), visible(text.prompt), (visible(text.text), "bold"))
        screen.result(line)


def _print_header(screen: Screen, trace: Trace) -> None:
    prefix = "".join(token.text for token in trace.prefix)
    shown = cut_left(visible(prefix), _PROMPT_WIDTH)
    screen.result(Text.assemble((shown, "bold"), f"   position {trace.position}   {visible(trace.model)}"))
    line = Text.assemble(("predicts ", "dim"), _share(trace.prediction), ("   settled in layer ", "dim"))
    line.append(str(trace.settled))
    if trace.token.id != trace.prediction.id:
        line.append_text(Text.assemble(("   traced ", "dim"), _share(trace.token), f"   rank {trace.rank}"))
    screen.result(line)


def _layer_table(trace: Trace, top: int) -> Table:
    table = _table("layer", "residual", "ffn", "output", "case", "memories")
    for layer in trace.layers:
        name = Text(str(layer.layer), "bold" if layer.layer == trace.settled else "")
        table.add_row(
            name,
            _shares(layer.residual[:1]),
            _shares(layer.ffn[:1]),
            _shares(layer.output[:top]),
            _case(layer),
            Text("  ".join(f"{one.memory}{one.effect:+.2f}" for one in layer.by_effect[:top])),
        )
    return table


def _memory_table(memories: Iterable[TracedMemory], top: int) -> Table:
    table = _table("memory", "m", "effect", "promotes", "demotes", "known as")
    for one in memories:
        known = "; ".join(one.patterns) or ("" if one.trigger is None else f"… {one.trigger}")
        table.add_row(
            Text(str(one.memory), "bold"),
            Text(number(one.coefficient)),
            Text(f"{one.effect:+.3f}"),
            _tokens(one.promotes[:top]),
            _tokens(one.demotes[:top]),
            Text(cut_left(visible(known), 40), "dim"),
        )
    return table


def _parts(trace: Trace) -> Text:
    line = Text.assemble(("logit of ", "dim"), _quoted(trace.token), f" {number(trace.logit)}", (" = ", "dim"))
    parts = [f"{name} {value:+.3f}" for name, value in trace.parts.items() if value != 0]
    line.append("  ".join(parts))
    return line


def _table(*heads: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for head in heads:
        table.add_column(Text(head))
    return table


def _edit(target: str, coefficient: float | None, factor: float | None) -> str:
    if factor is not None:
        return f"{target}=x{factor:g}"
    return f"{target}={0 if coefficient is None else coefficient:g}"


def _case(layer: LayerTrace) -> Text:
    return Text(layer.case, _CASE_STYLES.get(layer.case, ""))


def _shares(shares: Iterable[TokenShare]) -> Text:
    return Text("  ").join(_share(share) for share in shares)


def _share(share: TokenShare) -> Text:
    return Text.assemble(_quoted(share), (f" {share.p:.2f}", "dim"))


def _tokens(tokens: Iterable[Token]) -> Text:
    return Text(" ".join(_quoted(token) for token in tokens))


def _quoted(token: Token) -> str:
    """A token with its own spaces seen."""
    return f"'{cut_right(visible(token.text), _TOKEN_WIDTH)}'"
