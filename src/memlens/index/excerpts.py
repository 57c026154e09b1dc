"""Excerpts: the coefficients of memories at every token of a stretch of text, from one pass over each sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memlens.corpus.sentences import Batch, cut_batches
from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.parallel import Progress, no_progress

if TYPE_CHECKING:
    from memlens.models.groups import CoefficientBlock
    from memlens.models.memory_model import MemoryModel

_BATCH_TOKENS = 4096
_SENTENCES = 4096  # that are read at once


@dataclass(frozen=True, eq=False)
class Excerpts:
    """Stretches of sentences, each with the memory whose coefficients are wanted along it; all columns are [n]."""

    layer: NDArray[np.int64]
    memory: NDArray[np.int64]  # its number in the layer
    sentence: NDArray[np.int64]
    first: NDArray[np.int64]  # the position of the first token; -1 is BOS
    stop: NDArray[np.int64]  # the position after the last token

    @property
    def longest(self) -> int:
        return int((self.stop - self.first).max(initial=0))


def read_coefficients(
    index: Index,
    model: MemoryModel,
    excerpts: Excerpts,
    into: NDArray[np.float32] | None = None,
    progress: Progress = no_progress,
) -> NDArray[np.float32]:
    """[n, longest]: column i of a row is the coefficient at the excerpt's token i; columns after its end mean nothing.

    A sentence is fed once, however many excerpts it has, and no further than they reach. `into` is filled if given.
    """
    coefficients = np.zeros((len(excerpts.layer), excerpts.longest), np.float32) if into is None else into
    if not len(coefficients):
        return coefficients
    order = np.argsort(excerpts.sentence, kind="stable")
    sentences, starts = np.unique(excerpts.sentence[order], return_index=True)
    stops = np.append(starts[1:], len(order))
    reach = np.maximum.reduceat(excerpts.stop[order], starts)
    bos, done = index.manifest.model.bos, 0
    for first in range(0, len(sentences), _SENTENCES):
        places = range(first, min(first + _SENTENCES, len(sentences)))
        rows = index.sentences(sentences[first : places.stop].tolist())
        fed = [(place, np.asarray(rows[sentences[place]]["tokens"][: reach[place]], np.int64)) for place in places]
        for batch in cut_batches(fed, _BATCH_TOKENS, bos):
            in_batch = np.concatenate([order[starts[place] : stops[place]] for place in batch.sentences])
            row = np.repeat(np.arange(len(batch.sentences)), (stops - starts)[batch.sentences])
            _read_batch(model, batch, excerpts, in_batch, row, 0 if bos is None else 1, coefficients)
            done += len(batch.sentences)
            progress("coefficients", done, len(sentences))
    return coefficients


def _read_batch(
    model: MemoryModel,
    batch: Batch,
    excerpts: Excerpts,
    in_batch: NDArray[np.int64],  # [k] the excerpts of this batch
    row: NDArray[np.int64],  # [k] in which row of it each lies
    shift: int,
    coefficients: NDArray[np.float32],
) -> None:
    import torch

    layers = excerpts.layer[in_batch]
    of_layer = {layer: np.flatnonzero(layers == layer) for layer in np.unique(layers).tolist()}

    def take(layer: int, block: CoefficientBlock) -> None:
        columns, chosen = block.group.columns, of_layer[layer]
        memory = excerpts.memory[in_batch[chosen]]
        chosen = chosen[(memory >= columns.start) & (memory < columns.stop)]
        if not len(chosen):
            return
        position = excerpts.first[in_batch[chosen]][:, None] + shift + np.arange(coefficients.shape[1])
        position = position.clip(max=batch.tokens.shape[1] - 1)  # a short excerpt ends before the longest does
        memory = excerpts.memory[in_batch[chosen]][:, None] - columns.start
        where = (row[chosen][:, None], position, memory)
        coefficients[in_batch[chosen]] = block.everywhere()[tuple(map(torch.from_numpy, where))].float().cpu().numpy()

    with torch.inference_mode(), model.watch(take, list(of_layer)):
        model.run_body(torch.from_numpy(batch.tokens))


def token_texts(sentence: dict[str, Any], first: int, stop: int) -> list[str]:
    """The text of each token of an excerpt; BOS, and a token that is a further byte of a character, have none."""
    text, ends = sentence["text"], sentence["ends"]
    edges: Sequence[int] = [0, *ends] if first <= 0 else ends[first - 1 :]
    texts = [text[begin:end] for begin, end in zip(edges, ends[max(first, 0) : stop], strict=False)]
    return ["", *texts] if first < 0 else texts


@dataclass(frozen=True)
class TriggerCoefficients:
    """A trigger's sentence, token by token, with the memory's coefficient at each."""

    rank: int
    position: int
    tokens: list[str]
    coefficients: list[float]


def shade_triggers(
    index: Index, model: MemoryModel, name: MemoryId, end: str, limit: int | None = None
) -> list[TriggerCoefficients]:
    """Coefficients along the sentences of a memory's triggers, up to one token after each."""
    triggers = index.triggers(name, end, limit)
    sentences = index.sentences(sorted({trigger.prefix.sentence for trigger in triggers}))
    places = [(trigger.prefix.sentence, trigger.prefix.position + 2) for trigger in triggers]
    sentence = np.array([number for number, _ in places], np.int64)
    stop = np.array([min(reach, len(sentences[number]["tokens"])) for number, reach in places], np.int64)
    zeros = np.zeros_like(stop)
    wanted = Excerpts(zeros + name.layer, zeros + index.names.number(name), sentence, zeros, stop)
    coefficients = read_coefficients(index, model, wanted).tolist()
    return [
        TriggerCoefficients(
            trigger.rank,
            trigger.prefix.position,
            token_texts(sentences[trigger.prefix.sentence], 0, count),
            coefficients[number][:count],
        )
        for number, (trigger, count) in enumerate(zip(triggers, stop.tolist(), strict=True))
    ]
