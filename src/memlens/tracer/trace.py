"""trace(): run a prompt once and show what every layer does at one position.

r, y and o of every layer are read as distributions over the vocabulary in one product with the output embedding. The
effect of memory i on the logit of token t is

    effect_i = m_i v_i . d_t

where d_t is the direction in which the logit of t grows, with the scale of the final norm fixed. The effects of a layer
are therefore one matrix product, and all parts sum to the logit (models/decompose.py). Interventions edit the model
through hooks, so a trace inside an intervention shows the edited model.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memlens.errors import ModelError
from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.models.decompose import LogitDecomposition, PositionStates, record_positions
from memlens.models.lens import case_of
from memlens.models.memory_model import MemoryModel
from memlens.tracer.prompt import Prompt, Source, check_top, open_model, read_prompt, read_token
from memlens.tracer.result import LayerTrace, Names, Token, TokenShare, Trace, TracedMemory, name_memories
from memlens.vocab.kernels import Ends, FloatArray, Softmax, find_ends, read_softmax, thread_pool


@dataclass(frozen=True, eq=False)
class Readings:
    """The distributions over the vocabulary of n vectors of the stream."""

    scores: NDArray[np.float32]  # [n, vocabulary], after the model's soft-capping, if any
    ends: Ends
    softmax: Softmax

    def top(self, row: int) -> int:
        """Return the most likely token."""
        return int(self.ends.top[row, 0])

    def shares(self, row: int, token: Callable[[int], Token]) -> tuple[TokenShare, ...]:
        """Return the top tokens with their probabilities."""
        p = self._p(row, self.ends.top_scores[row])
        ids = self.ends.top[row].tolist()
        return tuple(TokenShare(number, token(number).text, float(share)) for number, share in zip(ids, p, strict=True))

    def p(self, row: int, token: int) -> float:
        """Return the probability of a token."""
        return float(self._p(row, self.scores[row, token : token + 1])[0])

    def _p(self, row: int, scores: FloatArray) -> NDArray[np.float64]:
        above = scores.astype(np.float64) - self.softmax.highest[row]
        probabilities: NDArray[np.float64] = np.exp(above) / self.softmax.total[row]
        return probabilities

    def rank(self, row: int, token: int) -> int:
        """Return 1 + the number of tokens with a strictly higher score."""
        return 1 + int((self.scores[row] > self.scores[row, token]).sum())


def read_states(model: MemoryModel, states: Tensor, top: int) -> Readings:
    """Return the distribution of each state [n, d], with its `top` most likely tokens."""
    return _read_scores(model, model.lens.capped(model.lens.state_logits(states)), top)


def _read_scores(model: MemoryModel, logits: Tensor, top: int) -> Readings:
    scores = logits.to("cpu", torch.float32).contiguous().numpy()
    check_finite(model, logits)
    with thread_pool() as pool:
        ends = find_ends(scores, min(top, scores.shape[1]), pool)
        return Readings(scores, ends, read_softmax(scores, ends, np.full(len(scores), -1), pool))


def check_finite(model: MemoryModel, scores: Tensor) -> None:
    """Raise ModelError if a score is NaN or infinite."""
    if not torch.isfinite(scores).all():
        raise ModelError(
            f"{model.name} produced scores that are NaN or infinite; "
            "use smaller coefficients or values, or --dtype float32"
        )


def log_probabilities(model: MemoryModel, states: Tensor) -> Tensor:
    """Return log p [n, vocabulary] of states [n, d] in float64, which is precise enough to compare distributions."""
    logits = model.lens.capped(model.lens.state_logits(states)).cpu().double()
    check_finite(model, logits)
    return torch.log_softmax(logits, dim=-1)


def divergence(before: Tensor, after: Tensor) -> Tensor:
    """Return KL(before || after) [n] in nats from log-probabilities [n, vocabulary], at least 0."""
    terms = before.exp() * (before - after)
    return terms.sum(-1).clamp_min(0)


def trace(
    model: Source,
    prompt: str,
    position: int = -1,
    token: str | int | None = None,
    top: int = 10,
    index: Index | str | os.PathLike[str] | None = None,
    against: str | int | None = None,
) -> Trace:
    """Trace one position of a prompt: the states and memories of every layer, and the parts of a token's logit.

    Args:
        model: A model, an argument of `load`, or an index.
        prompt: The text.
        position: The traced position. Negative positions count from the end.
        token: The token whose logit is split into parts, as text or id. None for the predicted token.
        top: Number of tokens, and of memories per layer, to list.
        index: An index of the model, which adds the triggers and patterns of memories.
        against: A second token. The parts then sum to the difference of the two logits.

    Returns:
        The trace.

    Raises:
        SettingError: The prompt, the position or `top` is not valid.
        UnknownName: The model does not have the token.

    Example:
        >>> trace = memlens.trace(model, "The river runs")
        >>> abs(trace.logit - sum(trace.parts.values())) < 1e-5
        True
    """
    check_top(top)
    loaded, opened = open_model(model, index)
    checked = read_prompt(loaded, prompt)
    token_id, other_id = (None if word is None else read_token(loaded, word) for word in (token, against))
    place = checked.place(position)
    return TracedPrompt.run(loaded, checked, place).trace(place, token_id, other_id, top, opened)[0]


@dataclass(frozen=True, eq=False)
class TracedPrompt:
    """A prompt that was run once. Its recorded positions can be traced for any token without another pass."""

    model: MemoryModel
    prompt: Prompt
    first: int  # position of the first row of `positions`
    positions: PositionStates

    @classmethod
    def run(cls, model: MemoryModel, prompt: Prompt, position: int | None = None) -> "TracedPrompt":
        """Run the prompt and record one position, or all positions if `position` is None."""
        fed = prompt.fed(position)
        begin = prompt.shift if position is None else fed.shape[1] - 1
        rows = torch.arange(begin, fed.shape[1])
        return cls(model, prompt, begin - prompt.shift, record_positions(model, fed, rows))

    def trace(
        self, position: int, token: int | None, against: int | None, top: int, index: Index | None
    ) -> tuple[Trace, Tensor]:
        """Return the trace of a position and log p [vocabulary] (float64) of its next token."""
        row = position - self.first
        tracer = _Tracer(self.model, self.prompt, position, self.positions[row : row + 1], top)
        log_p = torch.log_softmax(torch.from_numpy(tracer.readings.scores[-1]).double(), dim=-1)
        return tracer.trace(token, against, index), log_p

    @cached_property
    def tops(self) -> list[list[tuple[int, float]]]:
        """The top token of o and its probability, by layer and position."""
        by_layer = []
        for layer in range(len(self.model.layers)):  # one layer at a time, to limit memory use
            readings = read_states(self.model, self.positions.o[layer], 1)
            tops = [readings.top(row) for row in range(len(self.positions))]
            by_layer.append([(token, readings.p(row, token)) for row, token in enumerate(tops)])
        return by_layer

    @property
    def nbytes(self) -> int:
        """The size of the recorded states and coefficients."""
        recorded = self.positions
        stores = (recorded.r, recorded.y, recorded.o, recorded.coefficients, recorded.weights)
        tensors = [recorded.embedding, *(tensor for store in stores for tensor in store.values())]
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)  # a view keeps its whole tensor in memory


@dataclass(frozen=True, eq=False)
class _LayerMemories:
    """The listed memories of a layer."""

    by_effect: list[TracedMemory]  # tokens, triggers and patterns are filled in later
    by_size: list[TracedMemory]
    total: float  # contribution of all memories of the layer


class _Tracer:
    """Builds the Trace of one recorded position."""

    def __init__(self, model: MemoryModel, prompt: Prompt, position: int, positions: PositionStates, top: int) -> None:
        self.model, self.prompt, self.position, self.positions, self.top = model, prompt, position, positions, top
        text: Callable[[int], str] = model.tokenizer.token_text
        self.token = cache(lambda token: Token(token, text(token)))  # look up every token once
        self.count = len(model.layers)
        lens, layers = model.lens, range(self.count)
        states = [store[layer] for layer in layers for store in (positions.r, positions.o)]
        logits = lens.capped(lens.state_logits(torch.cat(states))).unflatten(0, (self.count, 2))
        added = torch.stack([lens.addition_scores(positions.y[layer], layer) for layer in layers])  # read y like values
        every = torch.cat([logits[:, :1], added, logits[:, 1:]], dim=1)  # [layers, r y o, vocabulary]
        self.readings: Readings = _read_scores(model, every.flatten(0, 1), top)
        self.accounting = LogitDecomposition(model)

    def trace(self, token: int | None, against: int | None, index: Index | None) -> Trace:
        last = 3 * self.count - 1
        final = self.readings.top(last)
        token = final if token is None else token
        direction, constant = self._direction(token)
        if against is not None:
            other_direction, other_constant = self._direction(against)
            direction, constant = direction - other_direction, constant - other_constant
        listed = [self._list_memories(layer, direction) for layer in range(self.count)]
        memories = sorted({traced.memory for layer in listed for traced in (*layer.by_effect, *layer.by_size)})
        names = name_memories(self.model, memories, self.top, index)
        layers = tuple(self._layer(layer, token, direction, listed[layer], names) for layer in range(self.count))
        embedding = _dot(self.positions.embedding, direction)
        parts = {
            "embedding": embedding,
            "attention": math.fsum(layer.attention for layer in layers),
            "memories": math.fsum(layer.memories for layer in layers),
            "block biases": math.fsum(layer.bias for layer in layers),
            "output biases": constant,
        }
        return Trace(
            model=self.model.name,
            prompt=self.prompt.text,
            prefix=tuple(map(self.token, self.prompt.tokens[: self.position + 1])),
            position=self.position,
            token=self._share(token),
            rank=self.readings.rank(last, token),
            prediction=layers[-1].output[0],
            settled=self._settling_layer(final),
            logit=math.fsum(parts.values()),
            parts=parts,
            embedding=embedding,
            constant=constant,
            layers=layers,
            text=self.prompt.until(self.position),
            logit_is=self.model.lens.logit_is,
            against=None if against is None else self._share(against),
        )

    def _share(self, token: int) -> TokenShare:
        return TokenShare(token, self.token(token).text, self.readings.p(3 * self.count - 1, token))

    def _direction(self, token: int) -> tuple[Tensor, float]:
        """Return the direction [1, d] in which a token's logit grows, and the constant term of this logit."""
        row = torch.tensor([token], device=self.model.device)
        direction = self.accounting.direction(row, self.positions.o[self.count - 1])
        return direction, float(self.accounting.constant(row)[0])

    def _settling_layer(self, final: int) -> int:
        layer = self.count - 1
        while layer > 0 and self.readings.top(3 * (layer - 1) + 2) == final:
            layer -= 1
        return layer

    def _list_memories(self, layer: int, direction: Tensor) -> _LayerMemories:
        m = self.positions.coefficients[layer]  # [1, memories]
        if not m.shape[1]:
            return _LayerMemories([], [], 0.0)
        effects = self.accounting.memories(layer, self.positions.used(layer), direction)[0]
        sizes = m[0].abs() * self.model.layers[layer].lengths()
        count = min(self.top, len(effects))

        def strongest_by(strengths: Tensor) -> list[TracedMemory]:
            strongest = strengths.topk(count).indices
            columns = (strongest, m[0][strongest], effects[strongest], sizes[strongest])
            return [
                TracedMemory(self.model.names.name(layer, memory), coefficient, effect, size, (), ())
                for memory, coefficient, effect, size in zip(*(column.tolist() for column in columns), strict=True)
                if coefficient != 0
            ]

        return _LayerMemories(
            strongest_by(effects.abs()), strongest_by(sizes), float(effects.cpu().sum(dtype=torch.float64))
        )

    def _layer(
        self, layer: int, token: int, direction: Tensor, memories: _LayerMemories, names: dict[MemoryId, Names]
    ) -> LayerTrace:
        residual, ffn, output = range(3 * layer, 3 * layer + 3)
        top, shares = self.readings.top, self.readings.shares
        by_name = {traced.memory: traced for traced in (*memories.by_effect, *memories.by_size)}
        named = {memory: self._with_names(traced, names[memory]) for memory, traced in by_name.items()}
        return LayerTrace(
            layer=layer,
            residual=shares(residual, self.token),
            ffn=shares(ffn, self.token),
            output=shares(output, self.token),
            p=self.readings.p(output, token),
            case=case_of(top(residual), top(ffn), top(output)),
            by_effect=tuple(named[traced.memory] for traced in memories.by_effect),
            by_size=tuple(named[traced.memory] for traced in memories.by_size),
            attention=_dot(self.positions.attention(layer), direction),
            memories=memories.total,
            bias=float(self.accounting.block_bias(layer, self.positions.used(layer), direction)[0]),
        )

    def _with_names(self, memory: TracedMemory, names: Names) -> TracedMemory:
        signed = names.for_sign(memory.coefficient)
        return replace(
            memory,
            promotes=tuple(map(self.token, signed.top)),
            demotes=tuple(map(self.token, signed.bottom)),
            trigger=signed.triggers.get("top"),
            patterns=signed.patterns,
        )


def _dot(part: Tensor, direction: Tensor) -> float:
    """Return the contribution of one part [1, d] to the logit. Large parts nearly cancel, so this uses float64."""
    return float((part.cpu().double() * direction.cpu().double()).sum())
