"""Interventions: which coefficients are set, scaled or silenced, at which positions; a document to save and replay.

    {"kind": "memlens intervention", "schema": 1, "unit": "coefficient",
     "model": {"name": ..., "fingerprint": ..., "dtype": "float32"},
     "edits": [{"action": "set", "coefficient": 3.5, "memories": ["L3N51"], "positions": "all"},
               {"action": "scale", "factor": 2.0, "memories": ["L3N7", "L4N9"], "positions": [0, -1]},
               {"action": "silence", "layer": 3, "positions": "all"},
               {"action": "silence", "expert": "L3E5", "positions": "all"}]}

Numbers are coefficients m, the factors of the values; pre-activations are never written. `"model": null` is for any
model that has such memories. Edits are done in their order.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from memlens.errors import FilesError, ModelError, SettingError, UnknownName
from memlens.files import read_limited, refuse_output, replacing
from memlens.memory import ExpertId, MemoryId

if TYPE_CHECKING:
    from memlens.models.memory_model import MemoryModel
    from memlens.tracer.prompt import Source

KIND, SCHEMA, UNIT = "memlens intervention", 1, "coefficient"
_ACTIONS = {"set": "coefficient", "scale": "factor", "silence": None}
_FILE_LIMIT = 64 << 20  # bytes; an edit of every memory of a large model takes less
_LAYER = re.compile(r"[Ll]([0-9]{1,9})")
_HOW = "write L3N51=3.5 to set, =x2 to scale, =0 to silence"


@dataclass(frozen=True)
class Edit:
    """One change to the coefficients of some memories, of a whole layer or of a whole expert.

        Edit("L3N51")                           silenced
        Edit(["L3N7", "L4N9"], factor=2.0)      scaled
        Edit(layer=3, coefficient=0.5)          a whole layer, set
        Edit(expert="L3E5")                     an expert, silenced

    Give `coefficient` to set them, `factor` to scale them, neither to silence them. `positions` count the prompt's own
    tokens from 0, or from its end if negative; None means every position that is fed, BOS and continuation included.
    """

    memories: tuple[MemoryId, ...] = ()  # also taken: names, one or several
    layer: int | None = None  # a whole layer, instead of memories
    coefficient: float | None = None
    factor: float | None = None
    positions: tuple[int, ...] | None = None  # also taken: one position
    expert: ExpertId | None = None  # a whole expert, instead of memories; also taken: its name

    def __post_init__(self) -> None:
        at: Any = self.positions
        given = {
            "memories": memories_of(self.memories),
            "layer": None if self.layer is None else int(self.layer),
            "coefficient": None if self.coefficient is None else float(self.coefficient),
            "factor": None if self.factor is None else float(self.factor),
            "positions": None
            if at is None
            else (int(at),)
            if is_whole(at)
            else tuple(int(position) for position in at),
            "expert": _expert_of(self.expert),
        }
        for name, value in given.items():
            object.__setattr__(self, name, value)  # frozen for everybody else
        for problem in self._problems():
            raise SettingError(problem)

    def _problems(self) -> Iterator[str]:
        if [bool(self.memories), self.layer is not None, self.expert is not None].count(True) != 1:
            yield "an edit names no memory, or memories and a layer; give either memories or one layer (or expert)"
        if self.positions == ():
            yield "an edit's positions must be 'all' or a list of whole numbers, not []"
        if self.coefficient is not None and self.factor is not None:
            yield "an edit has a coefficient and a factor; give one to set or to scale, none to silence"
        for number in (self.coefficient, self.factor):
            if number is not None and not math.isfinite(number):
                yield f"{self.target} is to become {number}; a coefficient must be a finite number"

    @property
    def action(self) -> str:
        if self.coefficient is not None:
            return "set"
        return "silence" if self.factor is None else "scale"

    @property
    def target(self) -> str:
        """The memories' names, or the layer's, in short."""
        if self.layer is not None or self.expert is not None:
            return str(self.expert or ExpertId(self.layer or 0))
        more = f" and {len(self.memories) - 3} more" if len(self.memories) > 3 else ""
        return ", ".join(str(memory) for memory in self.memories[:3]) + more

    def __str__(self) -> str:
        """The text that `parse` takes, for an edit of one memory or layer at all positions."""
        amount = f"x{_digits(self.factor)}" if self.factor is not None else _digits(self.coefficient or 0.0)
        at = "" if self.positions is None else f" at {', '.join(map(str, self.positions))}"
        return f"{self.target}={amount}{at}"

    @classmethod
    def parse(cls, text: str, positions: Iterable[int] | None = None) -> Edit:
        """`L3N51=0` silences, `=3.5` sets, `=x2` scales; `L3=...` means a whole layer, `L3E5=...` an expert."""
        target, equals, amount = text.partition("=")
        if not equals:
            raise SettingError(f"'{text}' changes nothing; {_HOW}")
        whole, expert = _LAYER.fullmatch(target.strip()), ExpertId.find(target)
        named: dict[str, Any] = {"layer": int(whole[1])} if whole else {"expert": expert} if expert else {}
        named = named or {"memories": (MemoryId.parse(target),)}
        amount = amount.strip()
        scales = amount[:1] in ("x", "X")
        try:
            if "_" in amount or not amount.isascii():  # Python would read 1_0 as 10, and digits of every script
                raise ValueError
            number = float(amount[1:] if scales else amount)
        except ValueError:
            raise SettingError(f"'{text}' has no number after =; {_HOW}") from None
        at: Any = positions
        if scales:
            return cls(**named, factor=number, positions=at)
        return cls(**named, coefficient=None if number == 0 else number, positions=at)

    def check(self, model: MemoryModel) -> None:
        """Refuse layers and memories that the model does not have."""
        if self.layer is not None:
            check_layer(model, self.layer)
        if self.expert is not None:
            check_layer(model, self.expert.layer, str(self.expert))
            model.names.span(self.expert)
        for memory in self.memories:
            check_memory(model, memory)

    def to_json(self) -> dict[str, Any]:
        """The edit as plain data."""
        content: dict[str, Any] = {"action": self.action}
        unit = _ACTIONS[self.action]
        if unit is not None:
            content[unit] = getattr(self, unit)
        if self.layer is not None:
            content["layer"] = self.layer
        elif self.expert is not None:
            content["expert"] = str(self.expert)
        else:
            content["memories"] = [str(memory) for memory in self.memories]
        return content | {"positions": "all" if self.positions is None else list(self.positions)}


class _ModelDocument(msgspec.Struct, forbid_unknown_fields=True):
    """The model of an intervention document."""

    name: str
    fingerprint: str
    dtype: str | None = None


class _EditDocument(msgspec.Struct, forbid_unknown_fields=True):
    """An edit of an intervention document."""

    action: Literal["set", "scale", "silence"]
    coefficient: float | None = None
    factor: float | None = None
    memories: list[str] = []
    layer: int | None = None
    expert: str | None = None
    positions: Literal["all"] | list[int] = "all"

    def to_edit(self) -> Edit:
        memories: Any = self.memories
        positions: Any = None if self.positions == "all" else self.positions
        edit = Edit(memories, self.layer, self.coefficient, self.factor, positions, _expert_of(self.expert))
        if edit.action != self.action:
            raise SettingError(f"the action is '{self.action}', but the numbers {edit.action} {edit.target}")
        return edit


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    """An intervention document, as in the example above."""

    kind: Literal["memlens intervention"]
    schema: Literal[1]
    unit: Literal["coefficient"]
    model: _ModelDocument | None
    edits: list[_EditDocument]


@dataclass(frozen=True)
class Intervention:
    """Edits, one after another, and the model they are meant for (None for any that has such memories).

    Intervention.parse("L3N51=0", "L4=x2").save("edits.json", model); Intervention.load("edits.json")
    """

    edits: tuple[Edit, ...]  # also taken: one edit, and edits in words
    model: str = ""  # its name, for people
    fingerprint: str | None = None
    dtype: str | None = None  # of the model, which the fingerprint depends on

    def __post_init__(self) -> None:
        given: Any = self.edits
        several = [given] if isinstance(given, (Edit, str)) else given
        edits = tuple(edit if isinstance(edit, Edit) else Edit.parse(edit) for edit in several)
        object.__setattr__(self, "edits", edits)  # frozen for everybody else

    @classmethod
    def parse(cls, *texts: str, positions: Sequence[int] | None = None) -> Intervention:
        """An edit written as `L3N51=0` and the like."""
        at = None if positions is None else tuple(positions)  # read for every text
        return cls(tuple(Edit.parse(text, at) for text in texts))

    @classmethod
    def of(cls, given: Intervention | Edit | str | Iterable[Edit | str]) -> Intervention:
        """An intervention as it is, or made of edits, each an Edit or a text like `L3N51=0`."""
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

    def check(self, model: MemoryModel, fingerprint: str | None = None) -> None:
        """Refuse a model that this is not meant for, or that lacks the memories; `fingerprint`: its, where known."""
        if self.fingerprint is not None and self.fingerprint != (fingerprint or model.fingerprint()):
            raise ModelError(self._why_not(model))
        for edit in self.edits:
            edit.check(model)

    def _why_not(self, model: MemoryModel) -> str:
        dtype = _dtype_of(model)
        if self.dtype is not None and self.dtype != dtype:
            return (
                f"the intervention is for {self.model} in {self.dtype}, and {model.name} is in {dtype} here, so the "
                f"two cannot be compared; load the model in {self.dtype} (--dtype {self.dtype})"
            )
        meant = f" but for {self.model}" if self.model != model.name else ""
        return f"the intervention is not for {model.name}{meant} (the fingerprint differs); use it with its own model"

    def meant_for(self, model: Source) -> Intervention:
        """The same, bound to this model."""
        from memlens.tracer.prompt import open_model

        loaded, _ = open_model(model)
        fingerprint = loaded.fingerprint()
        self.check(loaded, fingerprint)
        return replace(self, model=loaded.name, fingerprint=fingerprint, dtype=_dtype_of(loaded))

    def for_any(self) -> Intervention:
        """The same, for any model that has such memories: no fingerprints, which take a while for a large model."""
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
    def __get_pydantic_core_schema__(cls, _source: Any, _handler: Any) -> Any:
        """The schema of an intervention in answers of the workbench, where it is its document."""
        from pydantic_core import core_schema

        document = core_schema.plain_serializer_function_ser_schema(
            cls.to_json, return_schema=core_schema.dict_schema(core_schema.str_schema())
        )
        return core_schema.is_instance_schema(cls, serialization=document)

    @classmethod
    def from_json(cls, content: Any) -> Intervention:
        """Return the intervention of a document. Raises SettingError if it is not valid."""
        try:
            document = msgspec.convert(content, _Document)
        except msgspec.ValidationError as error:
            raise SettingError(f"not an intervention document ({error})") from error
        edits = tuple(edit.to_edit() for edit in document.edits)
        if document.model is None:
            return cls(edits)
        return cls(edits, document.model.name, document.model.fingerprint, document.model.dtype)

    def save(self, path: str | os.PathLike[str], model: Source | None = None, *, force: bool = False) -> None:
        """Write the document, bound to the model; as it is where none is given. `force`: also over another file."""
        refuse_output(Path(path), is_intervention, force=force)
        bound = self if model is None else self.meant_for(model)
        content = json.dumps(bound.to_json(), indent=1, allow_nan=False) + "\n"
        try:
            with replacing(Path(path)) as beside:
                beside.write_text(content, encoding="utf-8")
        except FilesError as error:
            why = getattr(error.__cause__, "strerror", None) or error
            raise SettingError(f"{path} cannot be written ({why}); choose another file") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Intervention:
        """Read a document; `check` says whether it suits a model."""
        try:
            return cls.from_json(json.loads(read_limited(Path(path), _FILE_LIMIT).decode("utf-8-sig")))
        except FilesError as error:
            why = getattr(error.__cause__, "strerror", None) or error
            raise SettingError(f"{path} cannot be read ({why}); name an intervention's file") from error
        except (SettingError, UnknownName) as error:
            raise type(error)(f"{path}: {error}") from error
        except (ValueError, RecursionError) as error:
            advice = "name a file that `memlens trace --save` made"
            raise SettingError(f"{path} is not a JSON document; {advice}") from error


def is_intervention(head: bytes) -> bool:
    """Does a file begin as `save` writes it?"""
    return head.lstrip().startswith(f'{{\n "kind": "{KIND}"'.encode())


def check_layer(model: MemoryModel, layer: int, name: str = "") -> None:
    """Refuse a layer that the model does not have; `name`: what of it was asked for."""
    if not 0 <= layer < len(model.layers):
        missing = name or f"layer {layer}"
        raise UnknownName(f"{missing} does not exist: {model.name} has layers 0 to {len(model.layers) - 1}")


def check_memory(model: MemoryModel, memory: MemoryId) -> None:
    """Refuse a memory that the model does not have."""
    check_layer(model, memory.layer, str(memory))
    model.names.number(memory)


def memories_of(given: str | MemoryId | Iterable[str | MemoryId]) -> tuple[MemoryId, ...]:
    """One memory or several, by name or not."""
    several = [given] if isinstance(given, (str, MemoryId)) else given
    return tuple(MemoryId.parse(memory) if isinstance(memory, str) else memory for memory in several)


def _expert_of(given: Any) -> ExpertId | None:
    """An expert, by name or not."""
    if given is None or isinstance(given, ExpertId):
        return given
    expert = ExpertId.find(given)
    if expert is None:
        raise UnknownName(f"'{given}' is not an expert's name; write layer and expert like L3E5, both from 0")
    return expert


def is_whole(given: Any) -> bool:
    """A whole number of any kind, numpy's as well; True is none."""
    return isinstance(given, Integral) and not isinstance(given, bool)


def short(content: Any) -> str:
    """A few characters of whatever was given, for a message."""
    try:
        text = repr(content)
    except (RecursionError, ValueError):  # nested too deeply, or a number of too many digits
        return f"something of kind {type(content).__name__}"
    return text if len(text) <= 40 else f"{text[:39]}…"


def _digits(number: float) -> str:
    """Format a number with as few digits as people write, or with all that are needed to read the same number again."""
    return f"{number:g}" if float(f"{number:g}") == number else repr(number)


def _dtype_of(model: MemoryModel) -> str:
    return str(model.dtype).removeprefix("torch.")
