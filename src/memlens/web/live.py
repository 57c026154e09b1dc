"""Answers that need the model: a memory's coefficient at every token of its triggers, and the effect of changing it.

Sentences are fed as the scan fed them, so that the coefficient at a trigger's last token is the one in the index.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.tracer.result import InterventionEffect, Trace

if TYPE_CHECKING:
    from memlens.models.memory_model import MemoryModel

_BATCH_TOKENS = 4096
_TOKENS = 8


@dataclass(frozen=True)
class TriggerCoefficients:
    """A trigger's sentence, token by token, with the memory's coefficient at each."""

    rank: int
    position: int
    tokens: list[str]
    coefficients: list[float]


def shade_triggers(index: Index, model: MemoryModel, name: MemoryId, end: str) -> list[TriggerCoefficients]:
    """Coefficients along the sentences of a memory's triggers, up to one token after each."""
    import numpy as np
    import torch

    from memlens.corpus.batches import cut_batches

    triggers = index.triggers(name, end)
    sentences = index.sentences(sorted({trigger.prefix.sentence for trigger in triggers}))
    fed = []
    for number, trigger in enumerate(triggers):
        own = sentences[trigger.prefix.sentence]["tokens"][: trigger.prefix.position + 2]
        fed.append((number, np.asarray(own, np.int64)))
    bos = index.manifest.model.bos
    shift = 0 if bos is None else 1
    coefficients: dict[int, list[float]] = {}
    for batch in cut_batches([one for one in fed if len(one[1])], _BATCH_TOKENS, bos):
        seen: list[torch.Tensor] = []

        def take(_layer: int, m: torch.Tensor, seen: list[torch.Tensor] = seen) -> None:  # [batch, pos, memories]
            seen.append(m[:, shift:, name.memory].float().cpu())

        with torch.inference_mode(), model.watch(take, [name.layer]):
            model.run_body(torch.from_numpy(batch.tokens))
        for row, (number, length) in enumerate(zip(batch.sentences.tolist(), batch.lengths.tolist(), strict=True)):
            coefficients[number] = seen[0][row, :length].tolist()
    return [
        TriggerCoefficients(
            trigger.rank,
            trigger.prefix.position,
            _token_texts(sentences[trigger.prefix.sentence], len(fed[number][1])),
            coefficients.get(number, []),
        )
        for number, trigger in enumerate(triggers)
    ]


def silence(model: MemoryModel, name: MemoryId, prompt: str, change: str) -> InterventionEffect:
    """`change` is what follows the `=` in `memlens trace --set`: 0 silences, 3.5 sets, x2 scales. Last layer only."""
    from memlens.tracer.intervene import intervene

    effect = intervene(model, prompt, f"{name}={change}", top=_TOKENS)
    last = len(model.layers) - 1
    return replace(effect, before=with_layers(effect.before, last), after=with_layers(effect.after, last))


def with_layers(trace: Trace, *layers: int) -> Trace:
    """The trace with some of its layers only, so that an answer is short."""
    return replace(trace, layers=tuple(trace.layers[layer] for layer in sorted(set(layers))))


def _token_texts(sentence: dict[str, Any], count: int) -> list[str]:
    """The text of each of the first tokens; a token that is a further byte of a character has none of its own."""
    text, ends = sentence["text"], sentence["ends"]
    return [text[begin:end] for begin, end in zip([0, *ends][:count], ends[:count], strict=True)]
