"""Memories that fire on a text, and one memory along a text: coefficients of a text that somebody types.

A coefficient is compared with the memory's own range in the scan, so that memories of all layers can stand in one list:

    relative = m / max   where m is positive,   m / min   where it is negative

A memory that never reached that side in the scan has no range there and is left out.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memlens.errors import SettingError
from memlens.index.memory import read_summaries
from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.models.decompose import LogitDecomposition
from memlens.tracer.intervention import check_memory
from memlens.tracer.prompt import Prompt, Source, check_top, open_model, read_prompt
from memlens.tracer.result import FIRING_ORDERS, FiringHit, FiringResult, TextCoefficients, Token
from memlens.tracer.trace import TracedPrompt


def coefficients_on(model: Source, memory: str | MemoryId, text: str) -> TextCoefficients:
    """One memory's coefficient at every token of a text.

    memlens.coefficients_on("gpt2-index", "L5N94", "The capital of France is")
    """
    loaded, _ = open_model(model)
    name = memory if isinstance(memory, MemoryId) else MemoryId.parse(memory)
    check_memory(loaded, name)
    prompt = read_prompt(loaded, text)
    with loaded.record([name.layer], states=False) as recording:
        loaded.run_to(name.layer, prompt.fed())
    coefficients = recording.coefficients[name.layer][0, prompt.shift :, loaded.names.number(name)]
    return TextCoefficients(name, token_texts(prompt), tuple(coefficients.tolist()))


def token_texts(prompt: Prompt) -> tuple[str, ...]:
    """The text of each token; one that is a further byte of a character has none of its own."""
    begins = (0, *prompt.ends)
    return tuple(prompt.text[begin:end] for begin, end in zip(begins, prompt.ends, strict=False))


def fires_on(
    model: Source,
    text: str,
    *,
    index: Index | str | os.PathLike[str] | None = None,
    order: str = "relative",
    layers: Sequence[int] | None = None,
    limit: int = 20,
) -> FiringResult:
    """The memories of an index that fire most on a text, by their own range or by their effect on what is predicted.

    memlens.fires_on("gpt2-index", "The capital of France is").found[0]
    """
    loaded, opened = open_model(model, index)
    if opened is None:
        raise SettingError("which memories fire is told by their range in a scan; name an index")
    return firing_of(TracedPrompt.run(loaded, read_prompt(loaded, text)), opened, order, layers, limit)


def firing_of(run: TracedPrompt, index: Index, order: str, layers: Sequence[int] | None, limit: int) -> FiringResult:
    """The same of a prompt that was run."""
    check_top(limit)
    if order not in FIRING_ORDERS:
        raise SettingError(f"--order is '{order}'; choose one of: {', '.join(FIRING_ORDERS)}")
    for layer in layers or ():
        index.memories(layer)  # refuses one that is not there
    ranges = _ranges(index)
    final, direction = _predicted(run)
    columns = [_of_layer(run, layer, ranges[layer], direction) for layer in layers or index.layers]
    table = {name: np.concatenate([part[name] for part in columns]) for name in columns[0]}
    fires = np.flatnonzero(table["relative"] > 0)
    strength = table["relative"] if order == "relative" else np.abs(table["effect"])
    best = fires[np.lexsort((table["number"][fires], table["layer"][fires], -strength[fires]))[:limit]]
    rows = [{name: column[row].item() for name, column in table.items()} for row in best]
    names = [index.names.name(row["layer"], row["number"]) for row in rows]
    summaries, texts = read_summaries(index, names), token_texts(run.prompt)
    hits = tuple(
        FiringHit(
            name, summaries.get(name), row["m"], row["position"], texts[row["position"]], row["relative"], row["effect"]
        )
        for name, row in zip(names, rows, strict=True)
    )
    token = Token(final, run.model.tokenizer.token_text(final))
    return FiringResult(run.prompt.text, texts, token, order, len(fires), hits)


def _ranges(index: Index) -> dict[int, NDArray[np.float32]]:
    """Layer -> [2, memories]: the largest and the smallest coefficient of the scan."""
    ranges = {layer: np.zeros((2, index.memories(layer)), np.float32) for layer in index.layers}
    table = index.table("memories", ["layer", "memory", "max", "min"])
    layer, memory, high, low = (table.column(name).to_numpy() for name in ("layer", "memory", "max", "min"))
    for number, numbers in ranges.items():
        rows = layer == number
        numbers[:, memory[rows]] = high[rows], low[rows]
    return ranges


def _predicted(run: TracedPrompt) -> tuple[int, Tensor]:
    """The token that is predicted after the text, and the direction [1, d] in which its logit grows."""
    last = len(run.model.layers) - 1
    token = run.tops[last][-1][0]
    row = torch.tensor([token], device=run.model.device)
    return token, LogitDecomposition(run.model).direction(row, run.positions.o[last][-1:])


def _of_layer(
    run: TracedPrompt, layer: int, ranges: NDArray[np.float32], direction: Tensor
) -> dict[str, NDArray[np.generic]]:
    """Every memory of a layer where it is furthest in its range; every column is [memories]."""
    m = run.positions.coefficients[layer].cpu().float().numpy()  # [pos, memories]
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(m > 0, m / ranges[0], np.where(m < 0, m / ranges[1], 0))
    has_range = ((m > 0) & (ranges[0] > 0)) | ((m < 0) & (ranges[1] < 0))
    relative = np.where(has_range, relative, 0.0)
    at = relative.argmax(0)
    every = np.arange(m.shape[1])
    used = run.positions[-1:].used(layer)
    effect = LogitDecomposition(run.model).memories(layer, used, direction)[0].cpu().float().numpy()
    return {
        "layer": np.full(m.shape[1], layer),
        "number": every,
        "m": m[at, every],
        "position": at,
        "relative": relative[at, every],
        "effect": effect,
    }
