"""The records of a trace, shown as tables in a notebook, and the names of the memories in them.

Records are frozen data, the same in Python, in `--json` and in the workbench. A name is the tokens at both ends of
a memory's value, and from an index also its best trigger and patterns. Tokens come from the index's values table as far
as it was read through the model's own lens and from the values that the model has now; all others are read through the
lens, in one product.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any, Literal, get_args

from memlens.errors import ModelError
from memlens.index.reader import Index
from memlens.index.search import MemoryHit
from memlens.memory import MemoryId
from memlens.text import plain, tail, visible
from memlens.tracer.intervention import Intervention

if TYPE_CHECKING:  # the workbench describes its answers by these records, and looking at an index needs no torch
    from torch import Tensor

    from memlens.models.memory_model import MemoryModel
    from memlens.tracer.attribution import Attribution

_TRIGGER_CHARACTERS = 60  # of a trigger's end; the whole is in the index
_COMPARED = 16  # values by which an index of another model is recognised
_SAME_NORM = 1e-4  # relative; a value that differs more is read anew
_VALUES_AT_ONCE = 1024  # scores of thousands over a large vocabulary are gigabytes


@dataclass
class Names:
    """The names of one memory."""

    top: list[int] = field(default_factory=list)  # tokens that its value promotes, strongest first
    bottom: list[int] = field(default_factory=list)
    triggers: dict[str, str] = field(default_factory=dict)  # end -> the best prefix's last words
    patterns: tuple[str, ...] = ()  # of the triggers at the top; those at the bottom have none

    def for_sign(self, coefficient: float) -> Names:
        """With a coefficient of this sign: the tokens it promotes, and the triggers of that end, are at the top."""
        if coefficient >= 0:
            return self
        swapped = {"bottom" if end == "top" else "top": text for end, text in self.triggers.items()}
        return Names(self.bottom, self.top, swapped)


def check_index(model: MemoryModel, index: Index) -> None:
    """Refuse an index that cannot be of this model; fingerprints may differ, as while values are changed."""
    for why in _differences(model, index):
        raise ModelError(f"{index.folder} is not an index of {model.name}: {why}; load the model with the index")


def _differences(model: MemoryModel, index: Index) -> Iterator[str]:
    for name in ("family", "width", "vocabulary"):
        noted, here = getattr(index.manifest.model, name), getattr(model, name)
        if noted is not None and noted != here:
            yield f"{name} {noted}, not {here}"
    for layer in index.layers:
        if layer >= len(model.layers) or model.layers[layer].shape != index.names.layers[layer]:
            yield f"layer {layer} differs"
    if index.has("values") and not _has_values_of(index, model):
        yield "its values are others"


def _has_values_of(index: Index, model: MemoryModel) -> bool:
    """Do most of the first few values have the norms that the index lists, whatever dtype they were read in?"""
    layer = index.layers[0]
    rows = index.sql("SELECT memory, norm FROM {values} WHERE layer = $1 AND memory < $2", [layer, _COMPARED])
    values = model.layers[layer].values_of([row["memory"] for row in rows])
    alike = [_has_norm(value, row["norm"], 0.02) for value, row in zip(values, rows, strict=True)]
    return 2 * sum(alike) >= len(alike)


def name_memories(
    model: MemoryModel, memories: Sequence[MemoryId], top: int, index: Index | None
) -> dict[MemoryId, Names]:
    """Names of the memories, with up to `top` tokens at each end."""
    names = {memory: Names() for memory in memories}
    listed: set[MemoryId] = set()
    if index is not None:
        scanned = [memory for memory in names if memory.layer in index.layers]
        if _lists_as_read(index, model, top):
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
        for first in range(0, len(order), _VALUES_AT_ONCE):  # nearly always one block
            block = slice(first, first + _VALUES_AT_ONCE)
            scores = model.lens.folded_scores(vectors[block]).to("cpu", torch.float32).contiguous().numpy()
            ends = find_ends(scores, min(top, model.vocabulary), pool)
            for memory, high, low in zip(order[block], ends.top.tolist(), ends.bottom.tolist(), strict=True):
                names[memory].top, names[memory].bottom = high, low


def _lists_as_read(index: Index, model: MemoryModel, top: int) -> bool:
    """Does the values table list enough tokens, read through the lens that effects are read through?"""
    noted = index.manifest.values
    is_enough = noted.top >= min(top, model.vocabulary)
    is_as_read = noted.reading == model.lens.readings[0] and noted.vocabulary == "all"
    return index.has("values") and is_enough and is_as_read


def _look_up_values_(
    names: dict[MemoryId, Names], memories: list[MemoryId], top: int, index: Index, model: MemoryModel
) -> set[MemoryId]:
    """The memories whose tokens were looked up: all but those whose value has changed, as within `trying`."""
    columns = f"norm, tokens[:{top}] AS tokens, bottom_tokens[:{top}] AS bottom_tokens"
    values = {memory: rows[0] for memory, rows in index.rows_of("values", memories, columns).items() if rows}
    listed: set[MemoryId] = set()
    for layer in {memory.layer for memory in values}:
        rows = {memory: row for memory, row in values.items() if memory.layer == layer}
        listed |= {memory for memory, is_same in zip(rows, _are_read_from(rows, layer, model), strict=True) if is_same}
    for memory in listed:
        names[memory].top, names[memory].bottom = values[memory]["tokens"], values[memory]["bottom_tokens"]
    return listed


def _are_read_from(rows: dict[MemoryId, dict[str, Any]], layer: int, model: MemoryModel) -> list[bool]:
    """Has each value the norm in the table, and does it score the table's first token at least as high as the last?"""
    import torch

    values = model.layers[layer].values_of([model.names.number(memory) for memory in rows])
    ends = torch.tensor([[row["tokens"][0], row["bottom_tokens"][0]] for row in rows.values()], device=model.device)
    embedded = model.lens.logit_rows(ends.flatten()).unflatten(0, ends.shape)  # [memories, 2, d]
    scores = (embedded * model.lens.folded(values, layer)[:, None]).sum(-1).tolist()
    noted = [row["norm"] for row in rows.values()]
    return [
        high >= low and _has_norm(value, norm, _SAME_NORM)
        for (high, low), value, norm in zip(scores, values, noted, strict=True)
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
    """A token and how likely it is in some distribution."""

    p: float


@dataclass(frozen=True)
class TracedMemory:
    """A memory that fired at the traced position.

    `promotes` and `demotes` are what it really did: where the coefficient is negative the value's ends are swapped.
    """

    memory: MemoryId
    coefficient: float
    effect: float  # what it added to the traced token's logit, the final norm's scale taken as it was
    size: float  # |m| * ||v||
    promotes: tuple[Token, ...]
    demotes: tuple[Token, ...]
    trigger: str | None = None  # the prefix that drives it furthest to this side, from the index
    patterns: tuple[str, ...] = ()  # what its top triggers have in common, from the index; none if it is negative here


@dataclass(frozen=True)
class TextCoefficients:
    """A text, token by token, with one memory's coefficient at each."""

    memory: MemoryId
    tokens: tuple[str, ...]
    coefficients: tuple[float, ...]


@dataclass(frozen=True)
class FiringHit(MemoryHit):
    """A memory that fires on the text, where it does so furthest in its range."""

    coefficient: float
    position: int
    token: str
    relative: float  # 1: as strong as the strongest prefix of the scan
    effect: float  # on the logit of the token that is predicted after the text


@dataclass(frozen=True)
class FiringResult:
    """The memories that fire most on a text."""

    text: str
    tokens: tuple[str, ...]
    prediction: Token  # after the text; whose logit effects are on
    order: str
    total: int  # memories that fire at all
    found: tuple[FiringHit, ...]

    @property
    def note(self) -> str:
        return f"effects are on the logit of {self.prediction.text!r}, predicted after the text"


@dataclass(frozen=True)
class LayerTrace:
    """One layer at the traced position. r, y and o are read as the model would read its last state."""

    layer: int
    residual: tuple[TokenShare, ...]  # top tokens of r
    ffn: tuple[TokenShare, ...]  # of y, read as values are: a sum of them
    output: tuple[TokenShare, ...]  # of o
    p: float  # of the traced token in o
    case: str  # of Fig 11
    by_effect: tuple[TracedMemory, ...]  # largest |effect| first; none that did not fire
    by_size: tuple[TracedMemory, ...]  # largest |m| * ||v|| first
    attention: float  # what attention added to the traced token's logit, its biases included
    memories: float  # what all memories together added
    bias: float  # what the block's own biases added


@dataclass(frozen=True)
class Trace:
    """One position of one prompt, and where the logit of one token at it came from.

    The logit is a plain model's own, before any soft-capping. Of an adaptive softmax it is the word's score and, for a
    word of a rarer band, that of the band's class as well: log p but for the normalisers of the head and of the band.
    """

    model: str
    prompt: str
    prefix: tuple[Token, ...]  # the prompt's tokens up to the traced position
    position: int
    token: TokenShare  # the traced token, as likely as the model takes it to be
    rank: int  # 1 + tokens that are more likely
    prediction: TokenShare  # the token that the model takes to be most likely
    settled: int  # the first layer from which top(o) stays the prediction
    logit: float  # of the traced token, less that of `against`
    parts: dict[str, float]  # embedding, attention, memories, block biases, output biases; sums to the logit
    embedding: float  # what the input embedding added to the logit
    constant: float  # biases of the final norm and of the output embedding
    layers: tuple[LayerTrace, ...]
    text: str = ""  # the prompt up to the traced position
    logit_is: str = PLAIN_LOGIT  # what the parts sum to: not the same for every kind of output embedding
    against: TokenShare | None = None  # the other token, where the difference of two logits is taken apart

    @property
    def is_plain_logit(self) -> bool:
        return self.logit_is == PLAIN_LOGIT

    @property
    def logit_name(self) -> str:
        """One word for it: only what the model itself compares between all tokens is a logit."""
        word = "logit" if self.logit_is.startswith(PLAIN_LOGIT) else "score"
        return word if self.against is None else f"{word} difference"

    @property
    def memories(self) -> tuple[TracedMemory, ...]:
        """The memories of all layers that did most to the traced token's logit, largest |effect| first."""
        listed = [memory for layer in self.layers for memory in layer.by_effect]
        return tuple(sorted(listed, key=lambda memory: (-abs(memory.effect), memory.memory)))

    def to_json(self) -> dict[str, Any]:
        """Plain data, for json.dumps."""
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
    """The same position of the same prompt, without and with the edits; both traces follow the same token."""

    intervention: Intervention
    before: Trace
    after: Trace
    kl: float  # KL(before || after) of the next token, in nats
    changes_prediction: bool

    def to_json(self) -> dict[str, Any]:
        """Plain data, for json.dumps."""
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
# isolated, so that a sign that turns writing round does not reach beyond its own text
_CODE = '<code style="white-space:pre;unicode-bidi:isolate">{}</code>'
# a caption would be broken to the width of its table, and some of these tables are narrow
_TABLE = (
    '<div style="margin:0.5em 0">{}</div><table style="text-align:left;border-spacing:1em 0.2em"><tr>{}</tr>{}</table>'
)


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


def effect_html(effect: InterventionEffect) -> str:
    """The top tokens before and after an intervention."""
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
    """The memories that an answer hangs on."""
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
    is_known = any(_known(memory) for memory in memories)
    head = _head("memory", "m", "effect", "promotes", "demotes", *(["known as"] if is_known else []))
    rows = "".join(
        f"<tr><td>{memory.memory}</td><td>{memory.coefficient:.3g}</td><td>{memory.effect:+.3f}</td>"
        f"<td>{_tokens(memory.promotes)}</td><td>{_tokens(memory.demotes)}</td>"
        + (f"<td>{escape(_known(memory))}</td></tr>" if is_known else "</tr>")
        for memory in memories
    )
    return _TABLE.format(f"memories by their effect on the {logit_name}", head, rows)


def _known(memory: TracedMemory) -> str:
    return "; ".join(memory.patterns) or memory.trigger or ""


def _shares(shares: Iterable[TokenShare]) -> str:
    return " ".join(_share(share) for share in list(shares)[:_TOKENS])


def _share(share: TokenShare) -> str:
    return f'<span title="p {share.p:.4g}">{_code(share.text)}&nbsp;{share.p:.2f}</span>'


def _hover(memory: TracedMemory) -> str:
    """The tooltip of a memory's name: what it did."""
    known = f"{_known(memory)}; " if _known(memory) else ""
    words = ", ".join(repr(visible(token.text)) for token in memory.promotes[:_TOKENS])
    return escape(f"{known}m {memory.coefficient:.3g}; promotes {words}")


def _tokens(tokens: Iterable[Token]) -> str:
    return " ".join(_code(token.text) for token in list(tokens)[:_TOKENS])


def _prompt(text: str) -> str:
    return _code(tail(text, _TEXT))


def _code(text: str) -> str:
    """A text with its own spaces kept and its line breaks visible."""
    return _CODE.format(escape(visible(text)))
