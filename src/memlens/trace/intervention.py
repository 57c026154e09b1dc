"""Interventions: which coefficients are set, scaled or silenced where; a small document that can be saved and replayed.

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
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlens.errors import IndexFolderError, ModelError, SettingError, UnknownName
from memlens.index.files import replacing
from memlens.trace.edits import Edit, check_memory, is_whole, short

if TYPE_CHECKING:
    from memlens.models.memory_model import MemoryModel
    from memlens.trace.opening import Source

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
        from memlens.trace.opening import open_model

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
