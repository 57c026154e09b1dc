"""trace(): one forward pass over a prompt, and what every layer did at one position of it.

A memory's effect is coefficient x value along the direction in which the traced token's logit grows, with the scale of
the final norm taken as it was; so all effects of a layer are one product, nothing is run again, and the parts add up to
the logit. Interventions are hooks of the model: a trace within one shows what the edited model did.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.models.accounting import Accounting
from memlens.models.cases import case_of
from memlens.models.memory_model import MemoryModel
from memlens.models.norm import at_least_float32
from memlens.models.positions import Positions, record_positions
from memlens.trace.naming import Names, name_memories
from memlens.trace.opening import Source, open_model
from memlens.trace.prompt import Prompt, check_top, read_prompt, read_token
from memlens.trace.reading import Readings, TokenTexts, read_states
from memlens.trace.result import LayerTrace, TokenShare, Trace, TracedMemory


def trace(
    model: Source,
    prompt: str,
    position: int = -1,
    token: str | int | None = None,
    top: int = 10,
    index: Index | str | os.PathLike[str] | None = None,
) -> Trace:
    """What every layer did at a position of the prompt, and where a token's logit came from.

        memlens.trace("gpt2", "The capital of France is").memories[0]

    `model`: a model or an index, whose model is loaded. `token`: text or number of the token whose logit is taken
    apart; None for the one the model predicts. `top`: how many tokens and how many memories a layer to list. `index`:
    of this model; adds triggers and patterns.
    """
    check_top(top)
    loaded, opened = open_model(model, index)
    read = read_prompt(loaded, prompt)
    chosen = None if token is None else read_token(loaded, token)
    return trace_prompt(loaded, read, read.place(position), chosen, top, opened).trace


class Traced(NamedTuple):
    """A trace, and the whole distribution that it ends with."""

    trace: Trace
    log_p: Tensor  # [vocabulary] float64


def trace_prompt(
    model: MemoryModel, prompt: Prompt, position: int, token: int | None, top: int, index: Index | None
) -> Traced:
    """The same for what is checked already; position from 0."""
    tokens = prompt.fed(position)
    positions = record_positions(model, tokens, torch.tensor([tokens.shape[1] - 1]))
    tracing = _Tracing(model, prompt, position, positions, top)
    log_p = torch.log_softmax(torch.from_numpy(tracing.readings.scores[-1]).double(), dim=-1)
    return Traced(tracing.result(token, index), log_p)


@dataclass(frozen=True, eq=False)
class _Picked:
    """The memories of a layer that are shown."""

    by_effect: list[TracedMemory]  # without their names yet
    by_size: list[TracedMemory]
    total: float  # what all memories of the layer added


class _Tracing:
    """One recorded position on its way to a Trace."""

    def __init__(self, model: MemoryModel, prompt: Prompt, position: int, positions: Positions, top: int) -> None:
        self.model, self.prompt, self.position, self.positions, self.top = model, prompt, position, positions, top
        self.texts = TokenTexts(model)
        self.count = len(model.layers)
        states = [store[layer] for layer in range(self.count) for store in (positions.r, positions.y, positions.o)]
        self.readings: Readings = read_states(model, torch.cat(states), top)
        self.accounting = Accounting(model)

    def result(self, token: int | None, index: Index | None) -> Trace:
        last = 3 * self.count - 1
        final = self.readings.top(last)
        chosen = final if token is None else token
        row = torch.tensor([chosen], device=self.model.device)
        direction = self.accounting.direction(row, self.positions.o[self.count - 1])  # [1, d]
        picked = [self._pick(layer, direction) for layer in range(self.count)]
        shown = sorted({one.memory for layer in picked for one in (*layer.by_effect, *layer.by_size)})
        names = name_memories(self.model, shown, self.top, index)
        return Trace(
            model=self.model.name,
            prompt=self.prompt.text,
            prefix=self.texts.tokens(list(self.prompt.tokens[: self.position + 1])),
            position=self.position,
            token=TokenShare(chosen, self.texts(chosen), self.readings.p(last, chosen)),
            rank=self.readings.rank(last, chosen),
            settled=self._settled(final),
            embedding=_dot(self.positions.embedding, direction),
            constant=float(self.accounting.constant(row)[0]),
            layers=tuple(self._layer(layer, chosen, direction, picked[layer], names) for layer in range(self.count)),
            text=self.prompt.until(self.position),
            logit_is=self.model.lens.logit_is,
        )

    def _settled(self, final: int) -> int:
        layer = self.count - 1
        while layer > 0 and self.readings.top(3 * (layer - 1) + 2) == final:
            layer -= 1
        return layer

    def _pick(self, layer: int, direction: Tensor) -> _Picked:
        m = self.positions.coefficients[layer]  # [1, memories]
        effects = self.accounting.memories(layer, m, direction)[0]
        sizes = m[0].abs() * _lengths(at_least_float32(self.model.layers[layer].values))
        count = min(self.top, len(effects))

        def listed(strengths: Tensor) -> list[TracedMemory]:
            strongest = strengths.topk(count).indices
            columns = (strongest, m[0][strongest], effects[strongest], sizes[strongest])
            return [
                TracedMemory(MemoryId(layer, memory), coefficient, effect, size, (), ())
                for memory, coefficient, effect, size in zip(*(column.tolist() for column in columns), strict=True)
                if coefficient != 0
            ]

        return _Picked(listed(effects.abs()), listed(sizes), float(effects.cpu().sum(dtype=torch.float64)))

    def _layer(
        self, layer: int, token: int, direction: Tensor, picked: _Picked, names: dict[MemoryId, Names]
    ) -> LayerTrace:
        residual, ffn, output = range(3 * layer, 3 * layer + 3)
        top, shares = self.readings.top, self.readings.shares
        shown = {one.memory: one for one in (*picked.by_effect, *picked.by_size)}
        named = {memory: self._named(one, names[memory]) for memory, one in shown.items()}
        return LayerTrace(
            layer=layer,
            residual=shares(residual, self.texts),
            ffn=shares(ffn, self.texts),
            output=shares(output, self.texts),
            p=self.readings.p(output, token),
            case=case_of(top(residual), top(ffn), top(output)),
            by_effect=tuple(named[one.memory] for one in picked.by_effect),
            by_size=tuple(named[one.memory] for one in picked.by_size),
            attention=_dot(self.positions.attention(layer), direction),
            memories=picked.total,
            bias=float(self.accounting.block_bias(layer, self.positions.coefficients[layer], direction)[0]),
        )

    def _named(self, one: TracedMemory, names: Names) -> TracedMemory:
        turned = names.turned(one.coefficient)
        return replace(
            one,
            promotes=self.texts.tokens(turned.top),
            demotes=self.texts.tokens(turned.bottom),
            trigger=turned.triggers.get("top"),
            patterns=turned.patterns,
        )


def _lengths(values: Tensor) -> Tensor:
    """||v|| of every row, [memories]."""
    # most families store values as columns, over which torch's norm is five times slower than a product
    return values.norm(dim=1) if values.is_contiguous() else torch.linalg.vecdot(values, values).sqrt()


def _dot(part: Tensor, direction: Tensor) -> float:
    """What one part [1, d] adds to the logit; in float64, since large parts nearly cancel."""
    return float((part.cpu().double() * direction.cpu().double()).sum())
