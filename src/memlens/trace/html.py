"""A trace, or two side by side, as a table for a notebook. Every text of a model or a prompt is escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from memlens.trace.result import LayerTrace, Token, TokenShare, Trace, TracedMemory

_TOKENS, _MEMORIES = 3, 3
_CODE = '<code style="white-space:pre">{}</code>'


def trace_html(trace: Trace) -> str:
    """Layers down, tokens across, then the memories that mattered most."""
    head = "<tr><th>layer</th><th>residual</th><th>ffn</th><th>output</th><th>case</th><th>memories</th></tr>"
    rows = "".join(_layer(layer, layer.layer == trace.settled) for layer in trace.layers)
    parts = ", ".join(f"{name} {value:+.3f}" for name, value in trace.parts.items())
    caption = (
        f"{_code(trace.token)} after {_CODE.format(escape(trace.prompt[-60:]))}: p {trace.token.p:.3g}, "
        f"logit {trace.logit:.3f} = {escape(parts)}; settled in layer {trace.settled}"
    )
    return f"<table><caption>{caption}</caption>{head}{rows}</table>{_memories(trace.memories[:10])}"


def pair_html(before: Trace, after: Trace, kl: float) -> str:
    """The top tokens before and after an intervention."""
    shares = zip(before.layers[-1].output, after.layers[-1].output, strict=True)
    rows = "".join(f"<tr><td>{_share(left)}</td><td>{_share(right)}</td></tr>" for left, right in shares)
    caption = (
        f"{_code(before.token)}: p {before.token.p:.3g} → {after.token.p:.3g}, "
        f"logit {before.logit:.3f} → {after.logit:.3f}, KL {kl:.4g}"
    )
    return f"<table><caption>{caption}</caption><tr><th>before</th><th>after</th></tr>{rows}</table>"


def _layer(layer: LayerTrace, settles: bool) -> str:
    memories = " ".join(f"{one.memory}&nbsp;{one.effect:+.2f}" for one in layer.by_effect[:_MEMORIES])
    states = "".join(f"<td>{_shares(shares)}</td>" for shares in (layer.residual, layer.ffn, layer.output))
    name = f"<b>{layer.layer}</b>" if settles else str(layer.layer)
    return f"<tr><td>{name}</td>{states}<td>{escape(layer.case)}</td><td>{memories}</td></tr>"


def _memories(memories: Iterable[TracedMemory]) -> str:
    head = "<tr><th>memory</th><th>m</th><th>effect</th><th>promotes</th><th>demotes</th><th>known as</th></tr>"
    rows = "".join(
        f"<tr><td>{one.memory}</td><td>{one.coefficient:.3g}</td><td>{one.effect:+.3f}</td>"
        f"<td>{_tokens(one.promotes)}</td><td>{_tokens(one.demotes)}</td><td>{escape(_known(one))}</td></tr>"
        for one in memories
    )
    return f"<table>{head}{rows}</table>"


def _known(memory: TracedMemory) -> str:
    return "; ".join(memory.patterns) or memory.trigger or ""


def _shares(shares: Iterable[TokenShare]) -> str:
    return " ".join(_share(share) for share in list(shares)[:_TOKENS])


def _share(share: TokenShare) -> str:
    return f"{_code(share)}&nbsp;{share.p:.2f}"


def _tokens(tokens: Iterable[Token]) -> str:
    return " ".join(_code(token) for token in list(tokens)[:_TOKENS])


def _code(token: Token) -> str:
    return _CODE.format(escape(token.text))
