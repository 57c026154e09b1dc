"""Interventions: which coefficients are set, scaled or silenced where; a small document that can be saved and replayed.

    {"kind": "memlens intervention", "schema": 1, "unit": "coefficient", "model": {"name": ..., "fingerprint": ...},
     "edits": [{"action": "set", "coefficient": 3.5, "memories": ["L3N512"], "positions": "all"},
               {"action": "scale", "factor": 2.0, "memories": ["L3N7", "L4N9"], "positions": [0, -1]},
               {"action": "silence", "layer": 3, "positions": "all"}]}

Numbers are coefficients m, what the value is multiplied with; what stands before the activation is never written.
Edits are done in their order. This module knows the document; how a model is edited is applying.py's matter.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlens.errors import ModelError, SettingError, UnknownName
from memlens.memory import MemoryId

if TYPE_CHECKING:
    from memlens.models.memory_model import MemoryModel

KIND, SCHEMA, UNIT = "memlens intervention", 1, "coefficient"
_ACTIONS = {"set": "coefficient", "scale": "factor", "silence": None}
_LAYER = re.compile(r"[Ll](\d+)")


@dataclass(frozen=True)
class Edit:
    """One change to the coefficients of some memories, or of a whole layer.

    Give `coefficient` to set them, `factor` to scale them, neither to silence them. `positions` count the prompt's own
    tokens from 0, or from its end if negative; None means every position that is fed, BOS and continuation included.
    """

    memories: tuple[MemoryId, ...] = ()
    layer: int | None = None  # a whole layer, instead of memories
    coefficient: float | None = None
    factor: float | None = None
    positions: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if bool(self.memories) == (self.layer is not None):
            raise SettingError("an edit names no memory, or memories and a layer; give either memories or one layer")
        if self.coefficient is not None and self.factor is not None:
            raise SettingError("an edit has a coefficient and a factor; give one to set or to scale, none to silence")
        for number in (self.coefficient, self.factor):
            if number is not None and not math.isfinite(number):
                raise SettingError(f"{self.target} is to become {number}; a coefficient must be a finite number")

    @property
    def action(self) -> str:
        if self.coefficient is not None:
            return "set"
        return "silence" if self.factor is None else "scale"

    @property
    def target(self) -> str:
        """The memories' names, or the layer's, in short."""
        if self.layer is not None:
            return f"L{self.layer}"
        more = f" and {len(self.memories) - 3} more" if len(self.memories) > 3 else ""
        return ", ".join(str(memory) for memory in self.memories[:3]) + more

    @classmethod
    def parse(cls, text: str, positions: tuple[int, ...] | None = None) -> Edit:
        """`L3N512=0` silences, `L3N512=3.5` sets, `L3N512=x2` scales; `L3=...` means a whole layer."""
        target, equals, amount = text.partition("=")
        if not equals:
            raise SettingError(f"'{text}' changes nothing; write L3N512=3.5 to set, =x2 to scale, =0 to silence")
        whole = _LAYER.fullmatch(target.strip())
        named: dict[str, Any] = {"layer": int(whole[1])} if whole else {"memories": (MemoryId.parse(target),)}
        amount = amount.strip()
        scales = amount[:1] in ("x", "X")
        try:
            number = float(amount[1:] if scales else amount)
        except ValueError:
            raise SettingError(
                f"'{text}' has no number after =; write L3N512=3.5 to set, =x2 to scale, =0 to silence"
            ) from None
        if scales:
            return cls(**named, factor=number, positions=positions)
        return cls(**named, coefficient=None if number == 0 else number, positions=positions)

    def check(self, model: MemoryModel) -> None:
        """Refuse layers and memories that the model does not have."""
        for layer in {memory.layer for memory in self.memories} if self.layer is None else {self.layer}:
            if not 0 <= layer < len(model.layers):
                raise UnknownName(f"layer {layer} does not exist: {model.name} has layers 0 to {len(model.layers) - 1}")
        for memory in self.memories:
            check_memory(model, memory)

    def to_json(self) -> dict[str, Any]:
        """The edit as plain data."""
        content: dict[str, Any] = {"action": self.action}
        unit = _ACTIONS[self.action]
        if unit is not None:
            content[unit] = getattr(self, unit)
        if self.layer is None:
            content["memories"] = [str(memory) for memory in self.memories]
        else:
            content["layer"] = self.layer
        return content | {"positions": "all" if self.positions is None else list(self.positions)}

    @classmethod
    def from_json(cls, content: Any) -> Edit:
        if not isinstance(content, dict) or content.get("action") not in _ACTIONS:
            raise SettingError(f"an edit must have the action {', '.join(_ACTIONS)}, not {_short(content)}")
        unit = _ACTIONS[content["action"]]
        known = {"action", "memories", "layer", "positions"} | ({unit} if unit else set())
        if set(content) - known:
            raise SettingError(f"a {content['action']} edit cannot have '{sorted(set(content) - known)[0]}'")
        numbers = {} if unit is None else {unit: _number(content.get(unit), unit)}
        names = content.get("memories", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise SettingError(f"an edit's memories must be a list of names like L3N512, not {_short(names)}")
        layer = content.get("layer")
        if layer is not None and not _is_whole(layer):
            raise SettingError(f"an edit's layer must be a whole number, not {_short(layer)}")
        return cls(
            memories=tuple(MemoryId.parse(name) for name in names),
            layer=layer,
            positions=_positions(content.get("positions", "all")),
            **numbers,
        )


@dataclass(frozen=True)
class Intervention:
    """Edits, one after another, and the model they are meant for (None for any that has such memories)."""

    edits: tuple[Edit, ...]
    model: str = ""  # its name, for people
    fingerprint: str | None = None

    @classmethod
    def parse(cls, *texts: str, positions: Sequence[int] | None = None) -> Intervention:
        """From `L3N512=0` and the like."""
        at = None if positions is None else tuple(positions)
        return cls(tuple(Edit.parse(text, at) for text in texts))

    def __add__(self, other: Intervention) -> Intervention:
        """The edits of both; meant for the model of the one that says which."""
        known = self if self.fingerprint is not None else other
        return Intervention((*self.edits, *other.edits), known.model, known.fingerprint)

    def check(self, model: MemoryModel) -> None:
        """Refuse a model that this is not meant for, or that lacks the memories."""
        if self.fingerprint is not None and self.fingerprint != model.fingerprint():
            meant = f" but for {self.model}" if self.model != model.name else ""
            raise ModelError(
                f"the intervention is not for {model.name}{meant} (the fingerprint differs); use it with its own model"
            )
        for edit in self.edits:
            edit.check(model)

    def meant_for(self, model: MemoryModel) -> Intervention:
        """The same, bound to this model."""
        self.check(model)
        return replace(self, model=model.name, fingerprint=model.fingerprint())

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": KIND,
            "schema": SCHEMA,
            "unit": UNIT,
            "model": {"name": self.model, "fingerprint": self.fingerprint},
            "edits": [edit.to_json() for edit in self.edits],
        }

    @classmethod
    def from_json(cls, content: Any) -> Intervention:
        if not isinstance(content, dict) or content.get("kind") != KIND:
            raise SettingError(
                f'this is not an intervention (no "kind": "{KIND}"); save one with `memlens trace --save`'
            )
        if content.get("schema") != SCHEMA:
            raise SettingError(
                f"the intervention has schema {_short(content.get('schema'))}, this memlens reads {SCHEMA}"
            )
        if content.get("unit") != UNIT:
            raise SettingError(
                f"the intervention's unit is {_short(content.get('unit'))}; only '{UNIT}' can be written"
            )
        model, edits = content.get("model"), content.get("edits")
        if not isinstance(model, dict) or not isinstance(model.get("fingerprint"), str):
            raise SettingError("the intervention does not say which model it is for (model: name, fingerprint)")
        if not isinstance(edits, list) or set(content) - {"kind", "schema", "unit", "model", "edits"}:
            raise SettingError("the intervention must have kind, schema, unit, model and a list of edits, and no more")
        return cls(tuple(Edit.from_json(edit) for edit in edits), str(model.get("name", "")), model["fingerprint"])

    def save(self, path: str | os.PathLike[str], model: MemoryModel) -> None:
        """Write the document, bound to the model."""
        bound = self.meant_for(model)
        try:
            Path(path).write_text(json.dumps(bound.to_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise SettingError(f"{path} cannot be written ({error.strerror}); choose another file") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Intervention:
        """Read a document; whether it suits a model, `check` says."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise SettingError(f"{path} cannot be read ({error.strerror}); name an intervention's file") from error
        except ValueError as error:
            raise SettingError(
                f"{path} is not a JSON document; name a file that `memlens trace --save` made"
            ) from error
        try:
            return cls.from_json(content)
        except (SettingError, UnknownName) as error:
            raise type(error)(f"{path}: {error}") from error


def check_memory(model: MemoryModel, memory: MemoryId) -> None:
    """Refuse a memory that the model does not have."""
    if not 0 <= memory.layer < len(model.layers):
        raise UnknownName(f"{memory} does not exist: {model.name} has layers 0 to {len(model.layers) - 1}")
    count = model.layers[memory.layer].memories
    if not 0 <= memory.memory < count:
        raise UnknownName(
            f"{memory} does not exist: layer {memory.layer} of {model.name} has memories 0 to {count - 1}"
        )


def _positions(given: Any) -> tuple[int, ...] | None:
    if given == "all":
        return None
    if not isinstance(given, list) or not given or not all(_is_whole(position) for position in given):
        raise SettingError(f"an edit's positions must be 'all' or a list of whole numbers, not {_short(given)}")
    return tuple(given)


def _number(given: Any, unit: str) -> float:
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise SettingError(f"an edit's {unit} must be a number, not {_short(given)}")
    try:
        return float(given)
    except OverflowError:  # JSON's whole numbers know no limit
        return math.inf


def _is_whole(given: Any) -> bool:
    return isinstance(given, int) and not isinstance(given, bool)


def _short(content: Any) -> str:
    text = repr(content)
    return text if len(text) <= 40 else f"{text[:39]}…"
