"""Names of memories: the tokens at both ends of their values; from an index also their best trigger and patterns.

Tokens come from the index's values table as far as it was read through the model's own lens and from the values that
the model has now. All others are read through the lens, in one product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from memlens.errors import ModelError
from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.models.memory_model import MemoryModel
from memlens.vocab.kernels import find_ends, thread_pool

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
        noted, own = getattr(index.manifest.model, name), getattr(model, name)
        if noted is not None and noted != own:
            yield f"{name} {noted}, not {own}"
    for layer in index.layers:
        if layer >= len(model.layers) or model.layers[layer].memories != index.memories(layer):
            yield f"layer {layer} differs"
    if index.has("values") and not _has_values_of(index, model):
        yield "its values are others"


def _has_values_of(index: Index, model: MemoryModel) -> bool:
    """Do most of the first few values have the norms that the index lists, whatever dtype they were read in?"""
    layer = index.layers[0]
    rows = index.sql("SELECT memory, norm FROM {values} WHERE layer = $1 AND memory < $2", [layer, _COMPARED])
    values = model.layers[layer].values
    alike = [_has_norm(values[row["memory"]], row["norm"], 0.02) for row in rows]
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
    parts, order = [], []
    for layer in sorted({memory.layer for memory in memories}):
        own = [memory for memory in memories if memory.layer == layer]
        rows = torch.tensor([memory.memory for memory in own], device=model.device)
        parts.append(model.lens.folded(model.layers[layer].values[rows], layer))
        order.extend(own)
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
    return index.has("values") and is_enough and noted.reading == model.lens.readings[0]


def _look_up_values_(
    names: dict[MemoryId, Names], memories: list[MemoryId], top: int, index: Index, model: MemoryModel
) -> set[MemoryId]:
    """The memories whose tokens were looked up: all but those whose value has changed, as within `trying`."""
    listed = set()
    for memory, rows in index.rows_of("values", memories, "norm, tokens, bottom_tokens").items():
        if rows and _is_read_from(rows[0], model, memory):
            names[memory].top, names[memory].bottom = rows[0]["tokens"][:top], rows[0]["bottom_tokens"][:top]
            listed.add(memory)
    return listed


def _is_read_from(row: dict[str, Any], model: MemoryModel, memory: MemoryId) -> bool:
    """Does the value have the norm in the table, and score the table's first token at least as high as the last?"""
    value = model.layers[memory.layer].values[memory.memory]
    if not _has_norm(value, row["norm"], _SAME_NORM):
        return False
    ends = torch.tensor([row["tokens"][0], row["bottom_tokens"][0]], device=model.device)
    high, low = (model.lens.logit_rows(ends) @ model.lens.folded(value[None], memory.layer)[0]).tolist()
    return bool(high >= low)


def _has_norm(value: Tensor, norm: float, tolerance: float) -> bool:
    return abs(float(value.float().norm()) - norm) <= tolerance * norm


def _look_up_triggers_(names: dict[MemoryId, Names], memories: list[MemoryId], index: Index) -> None:
    for end in ("top", "bottom"):
        for memory, triggers in index.triggers_of(memories, end, limit=1).items():
            if triggers:
                names[memory].triggers[end] = triggers[0].text[-_TRIGGER_CHARACTERS:]
