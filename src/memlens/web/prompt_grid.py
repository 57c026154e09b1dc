"""A prompt seen through a model: what every layer would predict after every token, and one cell of that looked into.

The grid reads the output of every layer at every position as the model reads its last state; within an intervention
it is the edited model's. A cell is one layer of `memlens.trace`. Knows models; knows no page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from memlens.errors import SettingError

if TYPE_CHECKING:
    from memlens.index.reader import Index
    from memlens.models.memory_model import MemoryModel
    from memlens.trace import LayerTrace, Trace
    from memlens.trace.result import TokenShare, TracedMemory

MOST_TOKENS = 96  # of a prompt: a grid of more is no picture any longer
_TOKENS, _MEMORIES = 8, 10


class Cell(BaseModel):
    """The most likely next token as one layer has it after one token of the prompt."""

    token: int
    text: str
    p: float
    settled: bool = Field(description="From this layer on, the token stays what the model predicts.")
    was: str | None = Field(None, description="The token without the edits, where that is another one.")


class Grid(BaseModel):
    """Layers by positions."""

    prompt: str
    tokens: list[str]
    layers: list[list[Cell]] = Field(description="One row a layer, one cell a token of the prompt.")
    edits: list[str]


class Share(BaseModel):
    """A token and how likely it is."""

    token: int
    text: str
    p: float


class Effect(BaseModel):
    """A memory that fired, and what it did to the traced token's logit."""

    memory: str
    coefficient: float
    effect: float
    promotes: list[str]
    demotes: list[str]
    trigger: str | None
    patterns: list[str]


class Answer(BaseModel):
    """What the model predicts, and how likely the traced token is."""

    top: list[Share]
    p: float
    logit: float
    rank: int
    settled: int


class Opened(BaseModel):
    """One layer at one position: what came in, what the memories added, what went out."""

    layer: int
    position: int
    token: str = Field(description="The prompt's own token at the position.")
    traced: Share = Field(description="The token whose logit effects are about: what the unedited model predicts.")
    residual: list[Share]
    ffn: list[Share]
    output: list[Share]
    case: str
    p: float = Field(description="Of the traced token in the layer's output.")
    attention: float = Field(description="What the layer's attention added to the traced token's logit.")
    memories: float = Field(description="What its memories added.")
    by_effect: list[Effect]
    before: Answer
    after: Answer | None = Field(None, description="With the edits, where there are any.")
    kl: float | None = Field(None, description="KL(before || after) of the next token, in nats.")
    edits: list[str]


def last_of_each(sets: list[str]) -> list[str]:
    """Edits as they were written; of several of one memory or layer the last."""
    from memlens.trace import Edit

    by_target: dict[str, str] = {}
    for text in sets:
        target = Edit.parse(text).target
        by_target.pop(target, None)
        by_target[target] = text.strip()
    return list(by_target.values())


def read_grid(model: MemoryModel, text: str, sets: list[str]) -> Grid:
    """All layers at all positions; with edits, the edited model's, and what was there without."""
    from memlens.trace import Intervention
    from memlens.trace.applying import applied
    from memlens.trace.prompt import read_prompt

    prompt = read_prompt(model, text)
    if len(prompt.tokens) > MOST_TOKENS:
        raise SettingError(f"the prompt has {len(prompt.tokens)} tokens; the grid shows {MOST_TOKENS}, so shorten it")
    edits = last_of_each(sets)
    changes = applied(model, Intervention.of(edits), prompt) if edits else None  # refuses before anything runs
    before = _tops(model, prompt)
    after = before
    if changes is not None:
        with changes:
            after = _tops(model, prompt)
    texts = model.tokenizer.token_text
    return Grid(
        prompt=text,
        tokens=[texts(token) for token in prompt.tokens],
        layers=[
            [_cell(after, before, layer, position, texts) for position in range(len(prompt.tokens))]
            for layer in range(len(after))
        ],
        edits=edits,
    )


def open_cell(index: Index, model: MemoryModel, text: str, layer: int, position: int, sets: list[str]) -> Opened:
    """One cell; with edits, as the edited model has it, with the answer before and after."""
    from memlens.errors import UnknownName
    from memlens.trace import intervene, trace

    if not 0 <= layer < len(model.layers):
        raise UnknownName(f"layer {layer} does not exist: {model.name} has layers 0 to {len(model.layers) - 1}")
    edits = last_of_each(sets)
    after: Trace | None = None
    kl = None
    if not edits:
        before = trace(model, text, position, top=_MEMORIES, index=index)
    else:
        compared = intervene(model, text, edits, position, top=_MEMORIES, index=index)
        before, after, kl = compared.before, compared.after, compared.kl
    shown: LayerTrace = (after or before).layers[layer]
    return Opened(
        layer=layer,
        position=before.position,
        token=before.prefix[-1].text,
        traced=_share(before.token),
        residual=_shares(shown.residual),
        ffn=_shares(shown.ffn),
        output=_shares(shown.output),
        case=shown.case,
        p=shown.p,
        attention=shown.attention,
        memories=shown.memories,
        by_effect=[_effect(one) for one in shown.by_effect],
        before=_answer(before),
        after=None if after is None else _answer(after),
        kl=kl,
        edits=edits,
    )


def _tops(model: MemoryModel, prompt: Any) -> list[list[tuple[int, float]]]:
    """[layers][positions]: the top token of o and its probability."""
    import torch

    from memlens.models.positions import record_positions
    from memlens.trace.reading import read_states

    fed = prompt.fed()
    rows = torch.arange(prompt.shift, fed.shape[1])
    positions = record_positions(model, fed, rows, layers=())
    found = []
    for layer in range(len(model.layers)):  # one at a time: a distribution is as wide as the vocabulary
        readings = read_states(model, positions.o[layer], 1)
        tops = [readings.top(row) for row in range(len(rows))]
        found.append([(token, readings.p(row, token)) for row, token in enumerate(tops)])
    return found


def _cell(after: Any, before: Any, layer: int, position: int, texts: Any) -> Cell:
    token, p = after[layer][position]
    final = after[-1][position][0]
    settled = all(row[position][0] == final for row in after[layer:])
    without = before[layer][position][0]
    was = texts(without) if without != token else None
    return Cell(token=token, text=texts(token), p=p, settled=settled, was=was)


def _share(one: TokenShare) -> Share:
    return Share(token=one.id, text=one.text, p=one.p)


def _shares(shares: tuple[TokenShare, ...]) -> list[Share]:
    return [_share(one) for one in shares[:_TOKENS]]


def _effect(one: TracedMemory) -> Effect:
    return Effect(
        memory=str(one.memory),
        coefficient=one.coefficient,
        effect=one.effect,
        promotes=[token.text for token in one.promotes[:_TOKENS]],
        demotes=[token.text for token in one.demotes[:_TOKENS]],
        trigger=one.trigger,
        patterns=list(one.patterns),
    )


def _answer(traced: Trace) -> Answer:
    return Answer(
        top=_shares(traced.layers[-1].output),
        p=traced.token.p,
        logit=traced.logit,
        rank=traced.rank,
        settled=traced.settled,
    )
