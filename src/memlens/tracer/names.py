"""What memories are known for: the tokens at both ends of their values; from an index also triggers and patterns.

With an index the tokens come from its values table, as far as that was read as the model reads and the values are still
those that it was read from. All others are read through the lens, in one product. This module knows nothing of prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from memlens.errors import ModelError
from memlens.index.reader import Index, trigger_of
from memlens.memory import MemoryId
from memlens.models.memory_model import MemoryModel
from memlens.vocab.kernels import find_ends, thread_pool

_TRIGGER_CHARACTERS = 60  # of a trigger's end; the whole is in the index
_COMPARED = 16  # values of a model that are looked at to tell whether an index is of it
_SAME_LENGTH = 1e-4  # relative; a value that differs more is read anew
_OTHER_END = {"top": "bottom", "bottom": "top"}
_VALUES_AT_ONCE = 1024  # scores of thousands over a large vocabulary are gigabytes


@dataclass
class Names:
    """What one memory is known for."""

    top: list[int] = field(default_factory=list)  # tokens that its value promotes, strongest first
    bottom: list[int] = field(default_factory=list)
    triggers: dict[str, str] = field(default_factory=dict)  # end -> the best prefix's last words
    patterns: tuple[str, ...] = ()  # of the triggers at the top; those at the bottom have none

    def turned(self, coefficient: float) -> Names:
        """The same as a coefficient of this sign has it: at the top is what is promoted, and what triggers that."""
        if coefficient >= 0:
            return self
        swapped = {_OTHER_END[end]: text for end, text in self.triggers.items()}
        return Names(self.bottom, self.top, swapped)


def check_index(model: MemoryModel, index: Index) -> None:
    """Refuse an index that cannot be of this model, at a glance; that it is, `index.load_model()` has made sure.

    A glance, since a model may be looked at while some of its values are changed: their fingerprint is another.
    """
    for name in ("family", "width", "vocabulary"):
        noted, own = getattr(index.manifest.model, name), getattr(model, name)
        if noted is not None and noted != own:
            raise ModelError(_not_its_index(index, model, f"{name} {noted}, not {own}"))
    for layer in index.layers:
        if layer >= len(model.layers) or model.layers[layer].memories != index.memories(layer):
            raise ModelError(_not_its_index(index, model, f"layer {layer} differs"))
    if index.has("values") and not _has_values_of(index, model):
        raise ModelError(_not_its_index(index, model, "its values are others"))


def _has_values_of(index: Index, model: MemoryModel) -> bool:
    """Are most of the first few values as long as the index has them, whatever dtype they were read in?"""
    layer = index.layers[0]
    rows = index.sql("SELECT memory, norm FROM {values} WHERE layer = $1 AND memory < $2", [layer, _COMPARED])
    values = model.layers[layer].values
    alike = [_is_as_long(values[row["memory"]], row["norm"], 0.02) for row in rows]
    return 2 * sum(alike) >= len(alike)


def _not_its_index(index: Index, model: MemoryModel, why: str) -> str:
    return f"{index.folder} is not an index of {model.name}: {why}; load the model with the index"


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
            _look_up_patterns_(names, scanned, index)
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
    """Does the values table list enough tokens, read as effects are: not raw where the model has a final norm?"""
    noted = index.manifest.values
    is_enough = noted.top >= min(top, model.vocabulary)
    return index.has("values") and is_enough and noted.reading == model.lens.readings[0]


def _look_up_values_(
    names: dict[MemoryId, Names], memories: list[MemoryId], top: int, index: Index, model: MemoryModel
) -> set[MemoryId]:
    """The memories whose tokens were found; not those whose value is another now, as within `trying`."""
    found = set()
    for memory, row in _rows(index, "values", memories, "norm, tokens, bottom_tokens"):
        if _is_read_from(row, model, memory):
            names[memory].top, names[memory].bottom = row["tokens"][:top], row["bottom_tokens"][:top]
            found.add(memory)
    return found


def _is_read_from(row: dict[str, Any], model: MemoryModel, memory: MemoryId) -> bool:
    """Has the value the length that the table has, and does it point from the last token to the first?"""
    value = model.layers[memory.layer].values[memory.memory]
    if not _is_as_long(value, row["norm"], _SAME_LENGTH):
        return False
    ends = torch.tensor([row["tokens"][0], row["bottom_tokens"][0]], device=model.device)
    high, low = (model.lens.logit_rows(ends) @ model.lens.folded(value[None], memory.layer)[0]).tolist()
    return bool(high >= low)


def _is_as_long(value: Tensor, norm: float, tolerance: float) -> bool:
    return abs(float(value.float().norm()) - norm) <= tolerance * norm


def _look_up_triggers_(names: dict[MemoryId, Names], memories: list[MemoryId], index: Index) -> None:
    rows = list(
        _rows(index, "triggers", memories, '"end", rank, coefficient, sentence, position, next_token', "rank = 0")
    )
    sentences = index.sentences(sorted({row["sentence"] for _, row in rows}))
    for memory, row in rows:
        text = trigger_of(row, sentences[row["sentence"]], index.vocabulary).text
        names[memory].triggers[row["end"]] = text[-_TRIGGER_CHARACTERS:]


def _look_up_patterns_(names: dict[MemoryId, Names], memories: list[MemoryId], index: Index) -> None:
    for memory, row in _rows(index, "patterns", memories, "description"):
        names[memory].patterns = (*names[memory].patterns, row["description"])


def _rows(
    index: Index, table: str, memories: list[MemoryId], columns: str, where: str = "true"
) -> list[tuple[MemoryId, dict[str, Any]]]:
    """The rows of a table about some memories, in the table's order."""
    if not memories:
        return []
    pairs = ", ".join(f"({memory.layer}, {memory.memory})" for memory in memories)
    rows = index.sql(
        f"SELECT layer, memory, {columns} FROM {{{table}}} WHERE (layer, memory) IN (VALUES {pairs}) AND {where}"
    )
    return [(MemoryId(row["layer"], row["memory"]), row) for row in rows]
