"""One edit: the coefficients of some memories, or of a whole layer, set, scaled or silenced at some positions.

Numbers are coefficients m, what the value is multiplied with; what stands before the activation is never written.
Whatever it is made from (Python, `L3N512=0`, JSON) is checked here, once. How a model is edited, applying.py knows.

Interventions: which coefficients are set, scaled or silenced where; a small document that can be saved and replayed.

    {"kind": "memlens intervention", "schema": 1, "unit": "coefficient",
     "model": {"name": ..., "fingerprint": ..., "dtype": "float32"},
     "edits": [{"action": "set", "coefficient": 3.5, "memories": ["L3N512"], "positions": "all"},
               {"action": "scale", "factor": 2.0, "memories": ["L3N7", "L4N9"], "positions": [0, -1]},
               {"action": "silence", "layer": 3, "positions": "all"}]}

`"model": null` is for any model that has such memories. Edits are done in their order. This module knows the document;
what an edit is, edits.py says, and how a model is edited applying.py.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlens.errors import IndexFolderError, ModelError, SettingError, UnknownName
from memlens.files import replacing
from memlens.memory import MemoryId

if TYPE_CHECKING:
    from memlens.models.memory_model import MemoryModel
    from memlens.tracer.prompt import Source

_ACTIONS = {"set": "coefficient", "scale": "factor", "silence": None}
_LAYER = re.compile(r"[Ll]([0-9]{1,9})")
_HOW = "write L3N512=3.5 to set, =x2 to scale, =0 to silence"


@dataclass(frozen=True)
class Edit:
    """One change to the coefficients of some memories, or of a whole layer.

        Edit("L3N512")                          silenced
        Edit(["L3N7", "L4N9"], factor=2.0)      scaled
        Edit(layer=3, coefficient=0.5)          a whole layer, set

    Give `coefficient` to set them, `factor` to scale them, neither to silence them. `positions` count the prompt's own
    tokens from 0, or from its end if negative; None means every position that is fed, BOS and continuation included.
    """

    memories: tuple[MemoryId, ...] = ()  # also taken: names, one or several
    layer: int | None = None  # a whole layer, instead of memories
    coefficient: float | None = None
    factor: float | None = None
    positions: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        self._put("memories", _memories(self.memories))
        self._put("positions", _positions(self.positions))
        for name in ("coefficient", "factor"):
            self._put(name, _number(getattr(self, name), name))
        if self.layer is not None and not is_whole(self.layer):
            raise SettingError(f"an edit's layer must be a whole number, not {short(self.layer)}")
        self._put("layer", None if self.layer is None else int(self.layer))
        if bool(self.memories) == (self.layer is not None):
            raise SettingError("an edit names no memory, or memories and a layer; give either memories or one layer")
        if self.coefficient is not None and self.factor is not None:
            raise SettingError("an edit has a coefficient and a factor; give one to set or to scale, none to silence")
        for number in (self.coefficient, self.factor):
            if number is not None and not math.isfinite(number):
                raise SettingError(f"{self.target} is to become {number}; a coefficient must be a finite number")

    def _put(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # frozen for everybody else

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

    def __str__(self) -> str:
        """As `parse` takes it, where it names one memory or a layer, everywhere."""
        amount = f"x{_written(self.factor)}" if self.factor is not None else _written(self.coefficient or 0.0)
        at = "" if self.positions is None else f" at {', '.join(map(str, self.positions))}"
        return f"{self.target}={amount}{at}"

    @classmethod
    def parse(cls, text: str, positions: Iterable[int] | None = None) -> Edit:
        """`L3N512=0` silences, `L3N512=3.5` sets, `L3N512=x2` scales; `L3=...` means a whole layer."""
        if not isinstance(text, str):
            raise SettingError(f"{short(text)} is not an edit; {_HOW}")
        target, equals, amount = text.partition("=")
        if not equals:
            raise SettingError(f"'{text}' changes nothing; {_HOW}")
        whole = _LAYER.fullmatch(target.strip())
        named: dict[str, Any] = {"layer": int(whole[1])} if whole else {"memories": (MemoryId.parse(target),)}
        amount = amount.strip()
        scales = amount[:1] in ("x", "X")
        try:
            if "_" in amount or not amount.isascii():  # Python would read 1_0 as 10, and digits of every script
                raise ValueError
            number = float(amount[1:] if scales else amount)
        except ValueError:
            raise SettingError(f"'{text}' has no number after =; {_HOW}") from None
        at: Any = positions  # whatever it is, Edit reads it
        if scales:
            return cls(**named, factor=number, positions=at)
        return cls(**named, coefficient=None if number == 0 else number, positions=at)

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
        action = content.get("action") if isinstance(content, dict) else None
        if not isinstance(action, str) or action not in _ACTIONS:
            raise SettingError(f"an edit must have the action {', '.join(_ACTIONS)}, not {short(content)}")
        unit = _ACTIONS[action]
        known = {"action", "memories", "layer", "positions"} | ({unit} if unit else set())
        if set(content) - known:
            raise SettingError(f"a {action} edit cannot have {short(sorted(set(content) - known)[0])}")
        if unit is not None and content.get(unit) is None:
            raise SettingError(f"an edit's {unit} must be a number, but a {action} edit has none")
        names, positions = content.get("memories", []), content.get("positions", "all")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise SettingError(f"an edit's memories must be a list of names like L3N512, not {short(names)}")
        if positions != "all" and not isinstance(positions, list):
            raise SettingError(f"an edit's positions must be 'all' or a list of whole numbers, not {short(positions)}")
        return cls(
            memories=tuple(MemoryId.parse(name) for name in names),
            layer=content.get("layer"),
            positions=None if positions == "all" else positions,
            **({} if unit is None else {unit: content[unit]}),
        )


def check_memory(model: MemoryModel, memory: MemoryId) -> None:
    """Refuse a memory that the model does not have."""
    if not 0 <= memory.layer < len(model.layers):
        raise UnknownName(f"{memory} does not exist: {model.name} has layers 0 to {len(model.layers) - 1}")
    count = model.layers[memory.layer].memories
    if not 0 <= memory.memory < count:
        raise UnknownName(
            f"{memory} does not exist: layer {memory.layer} of {model.name} has memories 0 to {count - 1}"
        )


def as_memory(given: Any) -> MemoryId:
    """A memory by its name, or as it is."""
    if isinstance(given, MemoryId) and is_whole(given.layer) and is_whole(given.memory):
        return MemoryId(int(given.layer), int(given.memory))
    if not isinstance(given, str):
        raise UnknownName(f"{short(given)} is not a memory's name; write layer and memory like L3N512, both from 0")
    return MemoryId.parse(given)


def is_whole(given: Any) -> bool:
    """A whole number of any kind, numpy's as well."""
    return isinstance(given, Integral) and not isinstance(given, bool)


def short(content: Any) -> str:
    """A few characters of whatever was given, for a message."""
    try:
        text = repr(content)
    except (RecursionError, ValueError):  # nested too deeply, or a number of too many digits
        return f"something of kind {type(content).__name__}"
    return text if len(text) <= 40 else f"{text[:39]}…"


def _memories(given: Any) -> tuple[MemoryId, ...]:
    several = (given,) if isinstance(given, (str, MemoryId)) else given
    if not isinstance(several, Iterable):
        raise SettingError(f"an edit's memories must be names like L3N512, not {short(given)}")
    return tuple(as_memory(one) for one in several)


def _positions(given: Any) -> tuple[int, ...] | None:
    if given is None:
        return None
    several = (given,) if is_whole(given) else tuple(given) if isinstance(given, Iterable) else ()
    if not several or not all(is_whole(position) for position in several):
        raise SettingError(f"an edit's positions must be 'all' or a list of whole numbers, not {short(given)}")
    return tuple(int(position) for position in several)


def _number(given: Any, unit: str) -> float | None:
    if given is None:
        return None
    if isinstance(given, (bool, str)) or not hasattr(given, "__float__"):
        raise SettingError(f"an edit's {unit} must be a number, not {short(given)}")
    try:
        return float(given)
    except OverflowError:  # JSON's whole numbers know no limit
        return math.inf
    except (TypeError, ValueError, RuntimeError):  # an array of several numbers
        raise SettingError(f"an edit's {unit} must be one number, not {short(given)}") from None


def _written(number: float) -> str:
    """As few digits as people write, unless more are needed to read the same number again."""
    return f"{number:g}" if float(f"{number:g}") == number else repr(number)


__all__ = ["Edit", "Intervention", "check_memory"]

KIND, SCHEMA, UNIT = "memlens intervention", 1, "coefficient"
_PARTS = {"kind", "schema", "unit", "model", "edits"}


@dataclass(frozen=True)
class Intervention:
    """Edits, one after another, and the model they are meant for (None for any that has such memories).

    Intervention.parse("L3N512=0", "L4=x2").save("edits.json", model); Intervention.load("edits.json")
    """

    edits: tuple[Edit, ...]  # also taken: one edit, and edits in words
    model: str = ""  # its name, for people
    fingerprint: str | None = None
    dtype: str | None = None  # of the model, which the fingerprint depends on

    def __post_init__(self) -> None:
        given: Any = self.edits
        several = [given] if isinstance(given, (Edit, str)) else given
        if not isinstance(several, Iterable) or isinstance(several, (bytes, dict)):
            raise SettingError(f"{short(given)} is not an intervention; give edits like 'L3N512=0', or load a file")
        edits = tuple(one if isinstance(one, Edit) else Edit.parse(one) for one in several)
        object.__setattr__(self, "edits", edits)  # frozen for everybody else

    @classmethod
    def parse(cls, *texts: str, positions: Sequence[int] | None = None) -> Intervention:
        """From `L3N512=0` and the like."""
        at = tuple(positions) if isinstance(positions, Iterable) else positions  # read for every text
        return cls(tuple(Edit.parse(text, at) for text in texts))

    @classmethod
    def of(cls, given: Intervention | Edit | str | Iterable[Edit | str]) -> Intervention:
        """An intervention as it is, or made of edits, each an Edit or a text like `L3N512=0`."""
        edits: Any = given
        return edits if isinstance(edits, Intervention) else cls(edits)

    def __add__(self, other: Intervention | Edit | str | Iterable[Edit | str]) -> Intervention:
        """The edits of both; meant for the model of the one that says which."""
        other = Intervention.of(other)
        if None not in (self.fingerprint, other.fingerprint) and self.fingerprint != other.fingerprint:
            raise ModelError(f"one intervention is for {self.model}, the other for {other.model}; use them one by one")
        known = self if self.fingerprint is not None else other
        return replace(known, edits=(*self.edits, *other.edits))

    def __str__(self) -> str:
        return "; ".join(str(edit) for edit in self.edits)

    def check(self, model: MemoryModel) -> None:
        """Refuse a model that this is not meant for, or that lacks the memories."""
        if self.fingerprint is not None and self.fingerprint != model.fingerprint():
            raise ModelError(self._why_not(model))
        for edit in self.edits:
            edit.check(model)

    def _why_not(self, model: MemoryModel) -> str:
        kind = _kind_of(model)
        if self.dtype is not None and self.dtype != kind:
            return (
                f"the intervention is for {self.model} in {self.dtype}, and {model.name} is in {kind} here, so the two "
                f"cannot be compared; load the model in {self.dtype} (--dtype {self.dtype})"
            )
        meant = f" but for {self.model}" if self.model != model.name else ""
        return f"the intervention is not for {model.name}{meant} (the fingerprint differs); use it with its own model"

    def meant_for(self, model: Source) -> Intervention:
        """The same, bound to this model."""
        from memlens.tracer.prompt import open_model

        loaded, _ = open_model(model)
        bound = replace(self, model=loaded.name, fingerprint=loaded.fingerprint(), dtype=_kind_of(loaded))
        if self.fingerprint not in (None, bound.fingerprint):
            raise ModelError(self._why_not(loaded))
        self.for_any().check(loaded)
        return bound

    def for_any(self) -> Intervention:
        """The same, for any model that has such memories: nothing is compared, which takes a while for a large one."""
        return Intervention(self.edits)

    def to_json(self) -> dict[str, Any]:
        """The document, which `from_json` reads."""
        model = {"name": self.model, "fingerprint": self.fingerprint, "dtype": self.dtype}
        return {
            "kind": KIND,
            "schema": SCHEMA,
            "unit": UNIT,
            "model": None if self.fingerprint is None else model,
            "edits": [edit.to_json() for edit in self.edits],
        }

    @classmethod
    def from_json(cls, content: Any) -> Intervention:
        if not isinstance(content, dict) or content.get("kind") != KIND:
            raise SettingError(
                f'this is not an intervention (no "kind": "{KIND}"); save one with `memlens trace --save`'
            )
        schema, unit, edits = content.get("schema"), content.get("unit"), content.get("edits")
        if not is_whole(schema) or schema != SCHEMA:
            raise SettingError(f"the intervention has schema {short(schema)}, this memlens reads {SCHEMA}")
        if unit != UNIT:
            raise SettingError(f"the intervention's unit is {short(unit)}; only '{UNIT}' can be written")
        if not isinstance(edits, list) or set(content) != _PARTS:
            raise SettingError("the intervention must have kind, schema, unit, model and a list of edits, and no more")
        return cls(tuple(Edit.from_json(edit) for edit in edits), **_read_model(content["model"]))

    def save(self, path: str | os.PathLike[str], model: Source | None = None) -> None:
        """Write the document, bound to the model; as it is where none is given."""
        bound = self if model is None else self.meant_for(model)
        content = json.dumps(bound.to_json(), indent=1, allow_nan=False) + "\n"
        try:
            with replacing(_as_path(path)) as beside:
                beside.write_text(content, encoding="utf-8")
        except IndexFolderError as error:
            why = getattr(error.__cause__, "strerror", None) or error
            raise SettingError(f"{path} cannot be written ({why}); choose another file") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Intervention:
        """Read a document; whether it suits a model, `check` says."""
        try:
            content = json.loads(_as_path(path).read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise SettingError(f"{path} cannot be read ({error.strerror}); name an intervention's file") from error
        except (ValueError, RecursionError) as error:
            raise SettingError(
                f"{path} is not a JSON document; name a file that `memlens trace --save` made"
            ) from error
        try:
            return cls.from_json(content)
        except (SettingError, UnknownName) as error:
            raise type(error)(f"{path}: {error}") from error


def _as_path(given: Any) -> Path:
    try:
        return Path(given)
    except TypeError as error:
        raise SettingError(f"{short(given)} is not a file's name; name an intervention's file") from error


def _read_model(model: Any) -> dict[str, Any]:
    """Name, fingerprint and dtype of the model that a document is for; nothing for null."""
    if model is None:
        return {}
    parts = ("name", "fingerprint", "dtype")
    if (
        not isinstance(model, dict)
        or not all(isinstance(model.get(part), str) for part in parts[:2])
        or not isinstance(model.get("dtype"), (str, type(None)))
        or set(model) - set(parts)
    ):
        raise SettingError("the intervention does not say which model it is for (name, fingerprint, dtype; or null)")
    return {"model": model["name"], "fingerprint": model["fingerprint"], "dtype": model.get("dtype")}


def _kind_of(model: MemoryModel) -> str:
    return str(model.dtype).removeprefix("torch.")
