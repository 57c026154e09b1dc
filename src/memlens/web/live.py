"""What only the model can say about a memory: its coefficient at every token of its triggers, and what it changes.

Sentences are fed as the scan fed them, so that the coefficient at a trigger's last token is the one in the index. The
model is the caller's, for the time being. Knows models and indexes; knows no page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel

from memlens.index.reader import Index
from memlens.memory import MemoryId

if TYPE_CHECKING:
    from memlens.models.memory_model import MemoryModel

_BATCH_TOKENS = 4096


class Shaded(BaseModel):
    """A trigger's sentence, token by token, with the memory's coefficient at each."""

    rank: int
    position: int
    tokens: list[str]
    coefficients: list[float]


class Likely(BaseModel):
    """A token and how likely it is to come next."""

    token: int
    text: str
    p: float


class Silenced(BaseModel):
    """The next token after a prompt, with the memory and with its coefficient changed."""

    prompt: str
    edit: str
    before: list[Likely]
    after: list[Likely]
    kl: float
    changes_prediction: bool


def shade_triggers(index: Index, model: MemoryModel, name: MemoryId, end: str) -> list[Shaded]:
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
    found: dict[int, list[float]] = {}
    for batch in cut_batches([one for one in fed if len(one[1])], _BATCH_TOKENS, bos):
        seen: list[torch.Tensor] = []

        def take(_layer: int, m: torch.Tensor, seen: list[torch.Tensor] = seen) -> None:  # [batch, pos, memories]
            seen.append(m[:, shift:, name.memory].float().cpu())

        with torch.inference_mode(), model.watch(take, [name.layer]):
            model.run_body(torch.from_numpy(batch.tokens))
        for row, (number, length) in enumerate(zip(batch.sentences.tolist(), batch.lengths.tolist(), strict=True)):
            found[number] = seen[0][row, :length].tolist()
    return [
        Shaded(
            rank=trigger.rank,
            position=trigger.prefix.position,
            tokens=_pieces(sentences[trigger.prefix.sentence], len(fed[number][1])),
            coefficients=found.get(number, []),
        )
        for number, trigger in enumerate(triggers)
    ]


def silence(index: Index, model: MemoryModel, name: MemoryId, prompt: str, change: str, top: int = 8) -> Silenced:
    """`change` is what follows the `=` in `memlens trace --set`: 0 silences, 3.5 sets, x2 scales."""
    from memlens.tracer.intervene import intervene

    compared = intervene(model, prompt, f"{name}={change}", top=top)
    return Silenced(
        prompt=prompt,
        edit=f"{name}={change}",
        before=[Likely(token=one.id, text=one.text, p=one.p) for one in compared.before.layers[-1].output],
        after=[Likely(token=one.id, text=one.text, p=one.p) for one in compared.after.layers[-1].output],
        kl=compared.kl,
        changes_prediction=compared.changes_prediction,
    )


def _pieces(sentence: dict[str, object], count: int) -> list[str]:
    """The text of each of the first tokens; a token that is a further byte of a character has none of its own."""
    text, ends = str(sentence["text"]), list(sentence["ends"])  # type: ignore[call-overload]
    begins = [0, *ends]
    return [text[begin:end] for begin, end in zip(begins[:count], ends[:count], strict=True)]
