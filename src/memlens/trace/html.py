"""A trace, or two side by side, as a table for a notebook. Every text of a model or a prompt is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from memlens.trace.result import LayerTrace, Token, TokenShare, Trace, TracedMemory

if TYPE_CHECKING:
    from memlens.trace.attribution import Attribution

_TOKENS, _MEMORIES, _TEXT = 3, 3, 60
# isolated, so that a sign that turns writing round does not reach beyond its own text
_CODE = '<code style="white-space:pre;unicode-bidi:isolate">{}</code>'
# a caption would be broken to the width of its table, and some of these tables are narrow
_TABLE = (
    '<div style="margin:0.5em 0">{}</div><table style="text-align:left;border-spacing:1em 0.2em"><tr>{}</tr>{}</table>'
)
_NAMED = {"\n": "⏎", "\t": "⇥", "\r": "␍"}


def trace_html(trace: Trace) -> str:
    """Layers down, tokens across, then the memories that mattered most."""
    rows = "".join(_layer(layer, layer.layer == trace.settled) for layer in trace.layers)
    parts = ", ".join(f"{name} {value:+.3f}" for name, value in trace.parts.items() if value != 0)
    caption = (
        f"{_code(trace.token.text)} after {_prompt(trace.text)}: p {trace.token.p:.3g}, rank {trace.rank}<br>"
        f"predicted: {_share(trace.prediction)}, settled in layer {trace.settled}<br>"
        f"{trace.logit_name} {trace.logit:.3f} = {escape(parts)} ({escape(trace.logit_is)})"
    )
    head = _head("layer", "residual", "ffn", "output", "case", "memories")
    return _TABLE.format(caption, head, rows) + _memories(trace.memories[:10], trace.logit_name)


def pair_html(before: Trace, after: Trace, kl: float, edits: str) -> str:
    """The top tokens before and after an intervention."""
    shares = zip(before.layers[-1].output, after.layers[-1].output, strict=True)
    rows = "".join(f"<tr><td>{_share(left)}</td><td>{_share(right)}</td></tr>" for left, right in shares)
    caption = (
        f"{_code(before.token.text)} after {_prompt(before.text)}, with {escape(edits)}<br>"
        f"p {before.token.p:.3g} → {after.token.p:.3g}, "
        f"{before.logit_name} {before.logit:.3f} → {after.logit:.3f}, KL {kl:.4g}"
    )
    return _TABLE.format(caption, _head("before", "after"), rows)


def attribution_html(found: Attribution) -> str:
    """The memories that an answer hangs on."""
    rows = "".join(f"<tr><td>{memory}</td><td>{effect:+.4g}</td></tr>" for memory, effect in found.strongest())
    gap = f", largest gap of a layer {found.gap:+.2g}" if found.gaps else ""
    caption = f"{_code(found.token.text)} after {_prompt(found.prompt)}: p {found.p:.3g}, {escape(found.method)}{gap}"
    return _TABLE.format(caption, _head("memory", "effect on p"), rows)


def _head(*names: str) -> str:
    return "".join(f"<th>{name}</th>" for name in names)


def _layer(layer: LayerTrace, settles: bool) -> str:
    memories = " ".join(f"{one.memory}&nbsp;{one.effect:+.2f}" for one in layer.by_effect[:_MEMORIES])
    states = "".join(f"<td>{_shares(shares)}</td>" for shares in (layer.residual, layer.ffn, layer.output))
    name = f"<b>{layer.layer}</b>" if settles else str(layer.layer)
    return f"<tr><td>{name}</td>{states}<td>{escape(layer.case)}</td><td>{memories}</td></tr>"


def _memories(memories: Sequence[TracedMemory], logit_name: str) -> str:
    is_known = any(_known(one) for one in memories)
    head = _head("memory", "m", "effect", "promotes", "demotes", *(["known as"] if is_known else []))
    rows = "".join(
        f"<tr><td>{one.memory}</td><td>{one.coefficient:.3g}</td><td>{one.effect:+.3f}</td>"
        f"<td>{_tokens(one.promotes)}</td><td>{_tokens(one.demotes)}</td>"
        + (f"<td>{escape(_known(one))}</td></tr>" if is_known else "</tr>")
        for one in memories
    )
    return _TABLE.format(f"memories by their effect on the {logit_name}", head, rows)


def _known(memory: TracedMemory) -> str:
    return "; ".join(memory.patterns) or memory.trigger or ""


def _shares(shares: Iterable[TokenShare]) -> str:
    return " ".join(_share(share) for share in list(shares)[:_TOKENS])


def _share(share: TokenShare) -> str:
    return f"{_code(share.text)}&nbsp;{share.p:.2f}"


def _tokens(tokens: Iterable[Token]) -> str:
    return " ".join(_code(token.text) for token in list(tokens)[:_TOKENS])


def _prompt(text: str) -> str:
    return _code(text if len(text) <= _TEXT else f"…{text[-_TEXT:]}")


def _code(text: str) -> str:
    """A text with its own spaces kept and its line breaks seen."""
    return _CODE.format(escape("".join(_NAMED.get(sign, sign) for sign in text)))
