"""Wires: the values that a key reads and the keys that a value feeds, computed from weights alone.

1. The norm before a block is folded into its keys (vocab/table.py), and the post-norm after a block into its values, so
   that both are directions of the residual stream. A gated memory has two keys: its gate and its up row.
2. A wire from memory i to a later memory j is the cosine of i's value with j's key. Attention and the scales of norms
   are left out: a wire is a connection at the same position.
3. The cosine of random directions in d dimensions has standard deviation 1 / sqrt(d), so z = cosine * sqrt(d).
4. Co-activation comes from the index: the share of i's top triggers whose prefix is also a top trigger of j.

`validate_wires` compares wires with an experiment: on the triggers of j, silence i and measure the change of m_j. The
prediction adds -m_i (v_i . k_j), times the scale of the norm at that position, to j's product with its key. The product
with its up row changes in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from memlens.errors import SettingError
from memlens.index.memory import read_summaries
from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.models import hooks
from memlens.models.groups import MemoryGroup, MemoryLayer
from memlens.models.lens import Norm, at_least_float32
from memlens.models.memory_model import MemoryModel
from memlens.tracer.prompt import read_prompt
from memlens.vocab.table import through_norm

Side = Literal["key", "up"]  # `key` is the key, or the gate of a gated block; `up` is the up row


@dataclass(frozen=True)
class Wire:
    """A connection between two memories."""

    memory: MemoryId
    by: Side  # which key of the later memory the wire leads to
    cosine: float
    z: float  # cosine in standard deviations of random directions
    shared: float | None  # part of this memory's top triggers that the other memory also has; None if not scanned
    summary: str | None  # one-line summary of the other memory


@dataclass(frozen=True)
class TokenWire:
    """A token whose input embedding a key responds to."""

    token: int
    text: str
    by: Side
    cosine: float
    z: float


@dataclass(frozen=True)
class Wires:
    """The strongest wires of one memory, largest absolute z first."""

    memory: MemoryId
    tokens: tuple[TokenWire, ...]
    reads: tuple[Wire, ...]  # earlier memories to whose values this memory's keys respond
    feeds: tuple[Wire, ...]  # later memories whose keys respond to this memory's value


def wires(index: Index, model: MemoryModel, memory: str | MemoryId, top: int = 10) -> Wires:
    """Return the strongest wires of a memory: the tokens and memories that it reads, and the memories that it feeds.

    Args:
        index: The index, which names memories and counts shared triggers.
        model: The model of the index.
        memory: The memory, like "L5N94".
        top: Maximum number of wires of each kind.

    Raises:
        SettingError: `top` is less than 1.
        UnknownName: The index has no such memory.
    """
    if top < 1:
        raise SettingError(f"--top is {top}; it must be 1 or more")
    name = index.check(memory)
    number = model.names.number(name)
    layer = model.layers[name.layer]
    keys = {by: rows[number] for by, rows in folded_keys(layer).items()}
    value = folded_values(layer)[number]
    reads = [
        (other, by, cosine)
        for earlier in model.layers[: name.layer]
        if earlier.groups
        for by, key in keys.items()
        for other, cosine in _strongest(model, earlier.number, cosines(folded_values(earlier), key), top)
    ]
    feeds = [
        (other, by, cosine)
        for later in model.layers[name.layer + 1 :]
        if later.groups
        for by, rows in folded_keys(later).items()
        for other, cosine in _strongest(model, later.number, cosines(rows, value), top)
    ]
    strongest = [sorted(side, key=lambda wire: (-abs(wire[2]), wire[0], wire[1]))[:top] for side in (reads, feeds)]
    others = sorted({other for side in strongest for other, _, _ in side})
    shared = shared_triggers(index, name, others)
    summaries = read_summaries(index, [other for other in others if other.layer in index.layers])
    scale = model.width**0.5
    earlier_wires, later_wires = (
        tuple(Wire(other, by, c, c * scale, shared.get(other), summaries.get(other)) for other, by, c in side)
        for side in strongest
    )
    return Wires(name, tuple(_tokens(model, keys, top)), earlier_wires, later_wires)


def folded_keys(layer: MemoryLayer) -> dict[Side, Tensor]:
    """Return the keys of a layer as directions of the stream, [memories, d]. Only gated blocks have `up`."""
    keys: dict[Side, Tensor] = {"key": through_norm(layer.keys, layer)}
    ups = [group.up for group in layer.groups]
    if layer.groups and all(up is not None for up in ups):
        keys["up"] = through_norm(torch.cat([up for up in ups if up is not None]), layer)
    return keys


def folded_values(layer: MemoryLayer) -> Tensor:
    """Return the values of a layer as directions of the stream, [memories, d]."""
    values = at_least_float32(layer.values)
    values = values if layer.post_norm is None else layer.post_norm.folded(values)
    if layer.scale is None:
        return values
    return values * (layer.scale.to(values) if isinstance(layer.scale, Tensor) else layer.scale)


def cosines(rows: Tensor, one: Tensor) -> Tensor:
    """Return the cosine of each row [n, d] with a vector [d]. The cosine with a vector of length 0 is 0."""
    lengths = torch.linalg.vecdot(rows, rows).sqrt() * one.norm()
    return (rows @ one) / lengths.clamp(min=1e-30)


def _strongest(model: MemoryModel, layer: int, cosine: Tensor, top: int) -> Iterator[tuple[MemoryId, float]]:
    """Yield the memories of a layer with the largest absolute cosines, and these cosines."""
    for number in cosine.abs().topk(min(top, len(cosine))).indices.tolist():
        yield model.names.name(layer, number), float(cosine[number])


def _tokens(model: MemoryModel, keys: dict[Side, Tensor], top: int) -> list[TokenWire]:
    """Return the tokens whose input embedding has the largest absolute cosine with a key."""
    embedding = model.lens.input_embedding
    if embedding.shape[1] != model.width:
        return []  # embeddings of another width are no directions of the stream: the model projects them first
    tokens = []
    for by, key in keys.items():
        values = cosines(embedding, key)
        for token in values.abs().topk(min(top, len(values))).indices.tolist():
            cosine = float(values[token])
            text = model.tokenizer.token_text(token)
            tokens.append(TokenWire(token, text, by, cosine, cosine * model.width**0.5))
    return sorted(tokens, key=lambda wire: (-abs(wire.z), wire.token, wire.by))[:top]


def shared_triggers(index: Index, memory: MemoryId, others: Sequence[MemoryId]) -> dict[MemoryId, float]:
    """Return, for each of `others`, the share of `memory`'s top triggers that are also its top triggers."""
    scanned = [other for other in {*others, memory} if other.layer in index.layers]
    rows = index.rows_of("triggers", scanned, "sentence, position", where="\"end\" = 'top'")
    prefixes = {name: {(row["sentence"], row["position"]) for row in triggers} for name, triggers in rows.items()}
    own = prefixes.get(memory, set())
    return {other: len(own & prefixes[other]) / len(own) for other in scanned if other != memory and own}


@dataclass(frozen=True)
class WireCheck:
    """Predicted and measured changes of a later memory's coefficient when an earlier memory is silenced."""

    predicted: tuple[float, ...]  # predicted changes, one per wire and trigger
    measured: tuple[float, ...]
    correlation: float


def validate_wires(index: Index, model: MemoryModel, pairs: Sequence[tuple[str, str]], triggers: int = 3) -> WireCheck:
    """Silence the first memory of each pair on triggers of the second, and compare the change with the prediction.

    Args:
        index: The index with the triggers.
        model: The model of the index.
        pairs: Pairs of an earlier and a later memory, by name.
        triggers: Number of triggers of each later memory to run.
    """
    predicted: list[float] = []
    measured: list[float] = []
    for earlier, later in ((index.check(a), index.check(b)) for a, b in pairs):
        for trigger in index.triggers_of([later], "top", triggers)[later]:
            prediction, change = _silence(model, earlier, later, trigger.text)
            predicted.append(prediction)
            measured.append(change)
    both = np.array([predicted, measured])
    correlation = float(np.corrcoef(both)[0, 1]) if len(predicted) > 1 and (both.std(1) > 0).all() else float("nan")
    return WireCheck(tuple(predicted), tuple(measured), correlation)


def _silence(model: MemoryModel, earlier: MemoryId, later: MemoryId, text: str) -> tuple[float, float]:
    """Return the predicted and the measured change of the later memory's coefficient at the last token of a text."""
    if "routed" in (earlier.kind, later.kind):
        raise SettingError(f"{earlier} -> {later}: wires of routed experts cannot be validated; use dense memories")
    fed = read_prompt(model, text).fed()
    source, target = model.layers[earlier.layer], model.layers[later.layer]
    (group, row), number = target.group_of(model.names.number(later)), model.names.number(earlier)

    def matches(edits: dict[int, hooks.Change]) -> list[Tensor]:
        """Return the products of the later memory with its key and its up row, if it has one."""
        inputs: list[Tensor] = []
        with model.edit(edits), hooks.on_input(group.reader, inputs.append):
            model.run_to(later.layer, fed)
        x = inputs[0].detach().reshape(-1, inputs[0].shape[-1])[-1]
        return [one[row] for one in group.matches(x) if one is not None]

    def coefficient(products: list[Tensor]) -> float:
        return float(group.combined(products[0], products[1] if len(products) > 1 else None))

    with model.record([earlier.layer], states=False) as recording:
        model.run_to(earlier.layer, fed)
    step = -float(recording.coefficients[earlier.layer][0, -1, number])
    step *= _norm_scale(model, source.post_norm, earlier.layer, fed)
    step *= _norm_scale(model, target.input_norm, later.layer, fed)
    value, keys = folded_values(source)[number], folded_keys(target)
    before = matches({})
    predicted = [
        z + step * (value @ rows[model.names.number(later)]).to(z)
        for z, rows in zip(before, keys.values(), strict=True)
    ]
    after = matches({earlier.layer: partial(_set_to_zero, number=number)})
    return coefficient(predicted) - coefficient(before), coefficient(after) - coefficient(before)


def _norm_scale(model: MemoryModel, norm: Norm | None, layer: int, fed: Tensor) -> float:
    """Return the factor 1 / sigma (or 1 / rms) of a norm of a layer at the last position, or 1 without a norm."""
    if norm is None:
        return 1.0
    inputs: list[Tensor] = []
    with hooks.on_input(norm.module, inputs.append):
        model.run_to(layer, fed)
    state = at_least_float32(inputs[0].detach().reshape(-1, inputs[0].shape[-1])[-1])
    state = state - state.mean() if norm.centers else state
    return float(torch.rsqrt(state.square().mean() + norm.epsilon))


def _set_to_zero(m: Tensor, group: MemoryGroup, *, number: int) -> Tensor:
    """Silence one memory of the layer at every position, if the group holds it."""
    place = number - group.start
    if not 0 <= place < group.size:
        return m
    m = m.clone()
    m[..., place] = 0
    return m
