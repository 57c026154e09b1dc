"""Records of traces, their HTML tables, and descriptions of the memories in them.

The records are the same in Python, in `--json` and in the workbench. A memory is described by the top and bottom tokens
of its value and, with an index, by its best trigger and its patterns. The tokens are read from the values table of the
index if this table has the model's default reading and the value has not been changed. All other values are read
through the lens in one matrix product.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any, Literal, get_args

from memlens.errors import ModelError
from memlens.index.reader import Index
from memlens.index.search import MemoryHit
from memlens.memory import MemoryId
from memlens.text import plain, tail, visible
from memlens.tracer.intervention import Intervention

if TYPE_CHECKING:  # the workbench uses these records for its schema, and lookups must not import torch
    from torch import Tensor

    from memlens.models.memory_model import MemoryModel
    from memlens.tracer.attribution import Attribution

_TRIGGER_CHARACTERS = 60  # characters shown from the end of a trigger
_COMPARED = 16  # number of values that are compared to detect an index of another model
_SAME_NORM = 1e-4  # relative tolerance for the norm of an unchanged value
_VALUES_AT_ONCE = 1024  # maximum number of values to score at once, to limit memory use


@dataclass
class Names:
    """What is known about one memory: the tokens at both ends of its value, its best triggers and its patterns."""

    top: list[int] = field(default_factory=list)  # tokens that the memory's value promotes, strongest first
    bottom: list[int] = field(default_factory=list)
    triggers: dict[str, str] = field(default_factory=dict)  # end ("top" or "bottom") -> end of the best trigger's text
    patterns: tuple[str, ...] = ()  # patterns of the top triggers

    def for_sign(self, coefficient: float) -> Names:
        """Return the description for the sign of a coefficient. A negative coefficient swaps top and bottom."""
        if coefficient >= 0:
            return self
        swapped = {"bottom" if end == "top" else "top": text for end, text in self.triggers.items()}
        return Names(self.bottom, self.top, swapped)


def check_index(model: MemoryModel, index: Index) -> None:
    """Raise ModelError if the index belongs to another model. A few changed values are allowed."""
    differences = []
    for name in ("family", "width", "vocabulary"):
        indexed, loaded = getattr(index.manifest.model, name), getattr(model, name)
        if indexed is not None and indexed != loaded:
            differences.append(f"its {name} is {indexed}, not {loaded}")
    for layer in index.layers:
        if layer >= len(model.layers) or model.layers[layer].shape != index.names.layers[layer]:
            differences.append(f"layer {layer} differs")
    if not differences and index.has("values") and not _has_values_of(index, model):
        differences.append("its values differ")
    if differences:
        why = f"{differences[0]}; load the model with the index"
        raise ModelError(f"{index.folder} is not an index of {model.name}: {why}")


def _has_values_of(index: Index, model: MemoryModel) -> bool:
    """Return True if at least half of the compared values have the norms that the index lists, within 2%."""
    layer = index.layers[0]
    rows = index.sql("SELECT memory, norm FROM {values} WHERE layer = $1 AND memory < $2", [layer, _COMPARED])
    values = model.layers[layer].values_of([row["memory"] for row in rows])
    is_same = [_has_norm(value, row["norm"], 0.02) for value, row in zip(values, rows, strict=True)]
    return 2 * sum(is_same) >= len(is_same)


def name_memories(
    model: MemoryModel, memories: Sequence[MemoryId], top: int, index: Index | None
) -> dict[MemoryId, Names]:
    """Describe the memories, with up to `top` tokens at each end of their values."""
    names = {memory: Names() for memory in memories}
    listed: set[MemoryId] = set()
    if index is not None:
        scanned = [memory for memory in names if memory.layer in index.layers]
        if _has_usable_lists(index, model, top):
            listed = _look_up_values_(names, scanned, top, index, model)
        _look_up_triggers_(names, scanned, index)
        if index.has("patterns"):
            for memory, rows in index.rows_of("patterns", scanned, "description").items():
                names[memory].patterns = tuple(row["description"] for row in rows)
    _read_values_(names, [memory for memory in names if memory not in listed], top, model)
    return names


def _read_values_(names: dict[MemoryId, Names], memories: list[MemoryId], top: int, model: MemoryModel) -> None:
    if not memories:
        return
    import torch

    from memlens.vocab.kernels import find_ends, thread_pool

    parts, order = [], []
    for layer in sorted({memory.layer for memory in memories}):
        of_layer = [memory for memory in memories if memory.layer == layer]
        rows = [model.names.number(memory) for memory in of_layer]
        parts.append(model.lens.folded(model.layers[layer].values_of(rows), layer))
        order.extend(of_layer)
    vectors = torch.cat(parts)
    with thread_pool() as pool:
        for first in range(0, len(order), _VALUES_AT_ONCE):
            block = slice(first, first + _VALUES_AT_ONCE)
            scores = model.lens.folded_scores(vectors[block]).to("cpu", torch.float32).contiguous().numpy()
            ends = find_ends(scores, min(top, model.vocabulary), pool)
            for memory, high, low in zip(order[block], ends.top.tolist(), ends.bottom.tolist(), strict=True):
                names[memory].top, names[memory].bottom = high, low


def _has_usable_lists(index: Index, model: MemoryModel, top: int) -> bool:
    """Return True if the values table lists enough tokens in the model's default reading."""
    values = index.manifest.values
    is_long_enough = values.top >= min(top, model.vocabulary)
    is_same_reading = values.reading == model.lens.readings[0] and values.vocabulary == "all"
    return index.has("values") and is_long_enough and is_same_reading


def _look_up_values_(
    names: dict[MemoryId, Names], memories: list[MemoryId], top: int, index: Index, model: MemoryModel
) -> set[MemoryId]:
    """Fill in tokens from the index and return the memories that were filled in.

    Memories whose values were changed, for example by `trying`, are skipped.
    """
    columns = f"norm, tokens[:{top}] AS tokens, bottom_tokens[:{top}] AS bottom_tokens"
    values = {memory: rows[0] for memory, rows in index.rows_of("values", memories, columns).items() if rows}
    listed: set[MemoryId] = set()
    for layer in {memory.layer for memory in values}:
        rows = {memory: row for memory, row in values.items() if memory.layer == layer}
        listed |= {memory for memory, is_same in zip(rows, _are_unchanged(rows, layer, model), strict=True) if is_same}
    for memory in listed:
        names[memory].top, names[memory].bottom = values[memory]["tokens"], values[memory]["bottom_tokens"]
    return listed


def _are_unchanged(rows: dict[MemoryId, dict[str, Any]], layer: int, model: MemoryModel) -> list[bool]:
    """Return whether each value has the norm in its row and scores the row's top token above its bottom token."""
    import torch

    values = model.layers[layer].values_of([model.names.number(memory) for memory in rows])
    ends = torch.tensor([[row["tokens"][0], row["bottom_tokens"][0]] for row in rows.values()], device=model.device)
    embedded = model.lens.logit_rows(ends.flatten()).unflatten(0, ends.shape)  # [memories, 2, d]
    scores = (embedded * model.lens.folded(values, layer)[:, None]).sum(-1).tolist()
    norms = [row["norm"] for row in rows.values()]
    return [
        high >= low and _has_norm(value, norm, _SAME_NORM)
        for (high, low), value, norm in zip(scores, values, norms, strict=True)
    ]


def _has_norm(value: Tensor, norm: float, tolerance: float) -> bool:
    return abs(float(value.float().norm()) - norm) <= tolerance * norm


def _look_up_triggers_(names: dict[MemoryId, Names], memories: list[MemoryId], index: Index) -> None:
    for end in ("top", "bottom"):
        for memory, triggers in index.triggers_of(memories, end, limit=1).items():
            if triggers:
                names[memory].triggers[end] = triggers[0].text[-_TRIGGER_CHARACTERS:]


FiringOrder = Literal["relative", "effect"]
FIRING_ORDERS: tuple[str, ...] = get_args(FiringOrder)
PLAIN_LOGIT = "the model's own logit"


@dataclass(frozen=True)
class Token:
    """A token with its text."""

    id: int
    text: str


@dataclass(frozen=True)
class TokenShare(Token):
    """A token with its probability."""

    p: float


@dataclass(frozen=True)
class TracedMemory:
    """A memory that was active at the traced position.

    `promotes` and `demotes` take the sign into account: a negative coefficient swaps the ends of the value.
    """

    memory: MemoryId
    coefficient: float
    effect: float  # contribution to the logit of the traced token, with the scale of the final norm fixed
    size: float  # |m| * ||v||
    promotes: tuple[Token, ...]
    demotes: tuple[Token, ...]
    trigger: str | None = None  # from the index: best trigger with a coefficient of this sign
    patterns: tuple[str, ...] = ()  # patterns of the top triggers, from the index; empty for a negative coefficient


@dataclass(frozen=True)
class TextCoefficients:
    """The coefficient of one memory at every token of a text."""

    memory: MemoryId
    tokens: tuple[str, ...]
    coefficients: tuple[float, ...]


@dataclass(frozen=True)
class FiringHit(MemoryHit):
    """A memory that is active on the text, shown at the position of its largest relative coefficient."""

    coefficient: float
    position: int
    token: str
    relative: float  # coefficient divided by the scan's largest coefficient of the same sign
    effect: float  # effect on the logit of the predicted token


@dataclass(frozen=True)
class FiringResult:
    """The memories that are most active on a text."""

    text: str
    tokens: tuple[str, ...]
    prediction: Token  # the predicted next token; effects are contributions to its logit
    order: str  # one of FIRING_ORDERS
    total: int  # number of active memories
    found: tuple[FiringHit, ...]

    @property
    def note(self) -> str:
        return f"effects refer to the logit of {self.prediction.text!r}, the token that is predicted after the text"


@dataclass(frozen=True)
class LayerTrace:
    """One layer at the traced position. r and o are read through the final norm, and y is read like a value."""

    layer: int
    residual: tuple[TokenShare, ...]  # top tokens of r
    ffn: tuple[TokenShare, ...]  # top tokens of y
    output: tuple[TokenShare, ...]  # top tokens of o
    p: float  # probability of the traced token in o
    case: str  # one of the cases of Figure 11: residual, ffn, agreement, composition or reversal
    by_effect: tuple[TracedMemory, ...]  # active memories, largest |effect| first
    by_size: tuple[TracedMemory, ...]  # active memories, largest |m| * ||v|| first
    attention: float  # contribution of attention and its biases to the traced token's logit
    memories: float  # contribution of all memories
    bias: float  # contribution of the block's biases


@dataclass(frozen=True)
class Trace:
    """One position of a prompt, with the logit of one token as a sum of parts.

    The logit is the model's logit before soft-capping. For an adaptive softmax, it is the score of the word, plus the
    score of the word's cluster if the word is not in the head. This score is log p without the normalizers of the head
    and of the cluster.
    """

    model: str
    prompt: str
    prefix: tuple[Token, ...]  # the prompt's tokens up to the traced position
    position: int
    token: TokenShare  # the traced token
    rank: int  # 1 + the number of tokens that are more likely
    prediction: TokenShare  # the most likely token
    settled: int  # first layer from which top(o) stays the prediction
    logit: float  # logit of the traced token, minus the logit of `against` if there is one
    parts: dict[str, float]  # embedding, attention, memories, block biases and output biases; they sum to the logit
    embedding: float  # contribution of the input embedding
    constant: float  # contribution of the biases of the final norm and output embedding
    layers: tuple[LayerTrace, ...]
    text: str = ""  # the prompt up to the traced position
    logit_is: str = PLAIN_LOGIT  # description of the sum of the parts; depends on the kind of output embedding
    against: TokenShare | None = None  # the second token, if the parts sum to a difference of two logits

    @property
    def is_plain_logit(self) -> bool:
        """Whether the parts sum to the model's own logit."""
        return self.logit_is == PLAIN_LOGIT

    @property
    def logit_name(self) -> str:
        """The name of `logit`. A number that cannot be compared between tokens is called "score"."""
        word = "logit" if self.logit_is.startswith(PLAIN_LOGIT) else "score"
        return word if self.against is None else f"{word} difference"

    @property
    def memories(self) -> tuple[TracedMemory, ...]:
        """The listed memories of all layers, largest |effect| on the traced token's logit first."""
        listed = [memory for layer in self.layers for memory in layer.by_effect]
        return tuple(sorted(listed, key=lambda memory: (-abs(memory.effect), memory.memory)))

    def to_json(self) -> dict[str, Any]:
        """Return plain data for json.dumps."""
        return plain(self)

    def __repr__(self) -> str:
        return (
            f"<Trace of {self.token.text!r} after {self.text[-30:]!r}: p {self.token.p:.3g}, logit {self.logit:.4g}, "
            f"prediction {self.prediction.text!r} settled in layer {self.settled}>"
        )

    def _repr_html_(self) -> str:
        return trace_html(self)


@dataclass(frozen=True)
class InterventionEffect:
    """Traces of one position without and with edits. Both traces follow the same token."""

    intervention: Intervention
    before: Trace
    after: Trace
    kl: float  # KL(before || after) of the next token, in nats
    changes_prediction: bool

    def to_json(self) -> dict[str, Any]:
        """Return plain data for json.dumps."""
        return plain(self)

    def __repr__(self) -> str:
        before, after = self.before, self.after
        return (
            f"<InterventionEffect: {before.token.text!r} p {before.token.p:.3g} -> {after.token.p:.3g}, "
            f"logit {before.logit:.4g} -> {after.logit:.4g}, prediction {before.prediction.text!r} -> "
            f"{after.prediction.text!r}, KL {self.kl:.4g}>"
        )

    def _repr_html_(self) -> str:
        return effect_html(self)


_TOKENS, _MEMORIES, _TEXT = 3, 3, 60
# isolate the text, so that right-to-left characters do not affect the surrounding text
_CODE = '<code style="white-space:pre;unicode-bidi:isolate">{}</code>'
# use a <div>, because a <caption> would wrap at the width of a narrow table
_TABLE = (
    '<div style="margin:0.5em 0">{}</div><table style="text-align:left;border-spacing:1em 0.2em"><tr>{}</tr>{}</table>'
)


def trace_html(trace: Trace) -> str:
    """Return a trace as HTML: a table of layers and a table of the memories with the largest effects."""
    rows = "".join(_layer(layer, layer.layer == trace.settled) for layer in trace.layers)
    parts = ", ".join(f"{name} {value:+.3f}" for name, value in trace.parts.items() if value != 0)
    caption = (
        f"{_code(trace.token.text)} after {_prompt(trace.text)}: p {trace.token.p:.3g}, rank {trace.rank}<br>"
        f"predicted: {_share(trace.prediction)}, settled in layer {trace.settled}<br>"
        f"{trace.logit_name} {trace.logit:.3f} = {escape(parts)} ({escape(trace.logit_is)})"
    )
    head = _head("layer", "residual", "ffn", "output", "case", "memories")
    return _TABLE.format(caption, head, rows) + _memories(trace.memories[:10], trace.logit_name)


def effect_html(effect: InterventionEffect) -> str:
    """Return the top tokens before and after an intervention as an HTML table."""
    before, after = effect.before, effect.after
    shares = zip(before.layers[-1].output, after.layers[-1].output, strict=True)
    rows = "".join(f"<tr><td>{_share(left)}</td><td>{_share(right)}</td></tr>" for left, right in shares)
    caption = (
        f"{_code(before.token.text)} after {_prompt(before.text)}, with {escape(str(effect.intervention))}<br>"
        f"p {before.token.p:.3g} → {after.token.p:.3g}, "
        f"{before.logit_name} {before.logit:.3f} → {after.logit:.3f}, KL {effect.kl:.4g}"
    )
    return _TABLE.format(caption, _head("before", "after"), rows)


def attribution_html(attribution: Attribution) -> str:
    """Return the memories with the largest effects as an HTML table."""
    rows = "".join(f"<tr><td>{memory}</td><td>{effect:+.4g}</td></tr>" for memory, effect in attribution.strongest())
    gap = f", largest gap of a layer {attribution.gap:+.2g}" if attribution.gaps else ""
    answer = f"{_code(attribution.token.text)} after {_prompt(attribution.prompt)}: p {attribution.p:.3g}"
    caption = f"{answer}, {escape(attribution.method)}{gap}"
    return _TABLE.format(caption, _head("memory", "effect on p"), rows)


def _head(*names: str) -> str:
    return "".join(f"<th>{name}</th>" for name in names)


def _layer(layer: LayerTrace, settles: bool) -> str:
    memories = " ".join(
        f'<span title="{_hover(memory)}">{memory.memory}&nbsp;{memory.effect:+.2f}</span>'
        for memory in layer.by_effect[:_MEMORIES]
    )
    states = "".join(f"<td>{_shares(shares)}</td>" for shares in (layer.residual, layer.ffn, layer.output))
    name = f"<b>{layer.layer}</b>" if settles else str(layer.layer)
    return f"<tr><td>{name}</td>{states}<td>{escape(layer.case)}</td><td>{memories}</td></tr>"


def _memories(memories: Sequence[TracedMemory], logit_name: str) -> str:
    has_names = any(_known_as(memory) for memory in memories)
    head = _head("memory", "m", "effect", "promotes", "demotes", *(["known as"] if has_names else []))
    rows = "".join(
        f"<tr><td>{memory.memory}</td><td>{memory.coefficient:.3g}</td><td>{memory.effect:+.3f}</td>"
        f"<td>{_tokens(memory.promotes)}</td><td>{_tokens(memory.demotes)}</td>"
        + (f"<td>{escape(_known_as(memory))}</td></tr>" if has_names else "</tr>")
        for memory in memories
    )
    return _TABLE.format(f"memories by their effect on the {logit_name}", head, rows)


def _known_as(memory: TracedMemory) -> str:
    """Return the patterns of a memory, or its trigger if it has no patterns."""
    return "; ".join(memory.patterns) or memory.trigger or ""


def _shares(shares: Iterable[TokenShare]) -> str:
    return " ".join(_share(share) for share in list(shares)[:_TOKENS])


def _share(share: TokenShare) -> str:
    return f'<span title="p {share.p:.4g}">{_code(share.text)}&nbsp;{share.p:.2f}</span>'


def _hover(memory: TracedMemory) -> str:
    """Return the tooltip of a memory."""
    name = f"{_known_as(memory)}; " if _known_as(memory) else ""
    tokens = ", ".join(repr(visible(token.text)) for token in memory.promotes[:_TOKENS])
    return escape(f"{name}m {memory.coefficient:.3g}; promotes {tokens}")


def _tokens(tokens: Iterable[Token]) -> str:
    return " ".join(_code(token.text) for token in list(tokens)[:_TOKENS])


def _prompt(text: str) -> str:
    return _code(tail(text, _TEXT))


def _code(text: str) -> str:
    """Return a text as an HTML code element that keeps spaces and shows line breaks."""
    return _CODE.format(escape(visible(text)))
