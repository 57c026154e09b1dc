"""Coefficients on a text: the coefficients of one memory at every token, or the memories that are most active.

To rank the memories of all layers in one list, each coefficient is divided by the memory's range in the scan:

    relative = m / max   if m is positive,   m / min   if m is negative

A memory is left out if none of its coefficients in the scan had this sign.
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
    """Return the coefficients of one memory at every token of a text.

    Args:
        model: A model, an argument of `load`, or an index.
        memory: A name like "L5N94", or a MemoryId.
        text: The text.

    Returns:
        The tokens and their coefficients.

    Raises:
        SettingError: The text has no tokens or is longer than the model's context.
        UnknownName: The model does not have this memory.

    Example:
        >>> len(memlens.coefficients_on(model, "L1N7", "The river").coefficients) >= 2
        True
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
    """Return the text of each token. A token that continues a multi-byte character has no text."""
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
    """Return the memories that are most active on a text.

    Args:
        model: An index, or a model together with `index`.
        text: The text.
        index: An index of the model.
        order: "relative" sorts by the coefficient divided by the memory's range in the scan. "effect" sorts by the
            effect on the logit of the token that is predicted after the text.
        layers: The layers. None for all layers of the index.
        limit: Maximum number of memories.

    Returns:
        The memories, and the total number of active memories.

    Raises:
        SettingError: There is no index, or the text, order or limit is not valid.

    Example:
        >>> len(memlens.fires_on(model, "The river runs", index=index, limit=3).found)
        3
    """
    loaded, opened = open_model(model, index)
    if opened is None:
        raise SettingError("to rank memories, the range of their coefficients must be known from a scan; name an index")
    return firing_of(TracedPrompt.run(loaded, read_prompt(loaded, text)), opened, order, layers, limit)


def firing_of(run: TracedPrompt, index: Index, order: str, layers: Sequence[int] | None, limit: int) -> FiringResult:
    """Return the most active memories of a prompt that has already been run. The arguments are those of fires_on."""
    check_top(limit)
    if order not in FIRING_ORDERS:
        raise SettingError(f"--order is '{order}'; choose one of: {', '.join(FIRING_ORDERS)}")
    for layer in layers or ():
        index.memories(layer)  # raises UnknownName if the index lacks the layer
    ranges = _ranges(index)
    final, direction = _predicted(run)
    columns = [_of_layer(run, layer, ranges[layer], direction) for layer in layers or index.layers]
    table = {name: np.concatenate([part[name] for part in columns]) for name in columns[0]}
    active = np.flatnonzero(table["relative"] > 0)
    strength = table["relative"] if order == "relative" else np.abs(table["effect"])
    best = active[np.lexsort((table["number"][active], table["layer"][active], -strength[active]))[:limit]]
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
    return FiringResult(run.prompt.text, texts, token, order, len(active), hits)


def _ranges(index: Index) -> dict[int, NDArray[np.float32]]:
    """Return the largest and the smallest coefficients in the scan, {layer: [2, memories]}."""
    ranges = {layer: np.zeros((2, index.memories(layer)), np.float32) for layer in index.layers}
    table = index.table("memories", ["layer", "memory", "max", "min"])
    layer, memory, high, low = (table.column(name).to_numpy() for name in ("layer", "memory", "max", "min"))
    for number, numbers in ranges.items():
        rows = layer == number
        numbers[:, memory[rows]] = high[rows], low[rows]
    return ranges


def _predicted(run: TracedPrompt) -> tuple[int, Tensor]:
    """Return the token that is predicted after the text and the direction [1, d] in which its logit grows."""
    last = len(run.model.layers) - 1
    token = run.tops[last][-1][0]
    row = torch.tensor([token], device=run.model.device)
    return token, LogitDecomposition(run.model).direction(row, run.positions.o[last][-1:])


def _of_layer(
    run: TracedPrompt, layer: int, ranges: NDArray[np.float32], direction: Tensor
) -> dict[str, NDArray[np.generic]]:
    """Return columns for a layer with one entry per memory, at the position of its largest relative coefficient."""
    m = run.positions.coefficients[layer].cpu().float().numpy()  # [pos, memories]
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(m > 0, m / ranges[0], np.where(m < 0, m / ranges[1], 0))
    has_range = ((m > 0) & (ranges[0] > 0)) | ((m < 0) & (ranges[1] < 0))
    relative = np.where(has_range, relative, 0.0)
    at = relative.argmax(0)
    numbers = np.arange(m.shape[1])
    used = run.positions[-1:].used(layer)
    effect = LogitDecomposition(run.model).memories(layer, used, direction)[0].cpu().float().numpy()
    return {
        "layer": np.full(m.shape[1], layer),
        "number": numbers,
        "m": m[at, numbers],
        "position": at,
        "relative": relative[at, numbers],
        "effect": effect,
    }
