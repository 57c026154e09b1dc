"""Interventions set, scale or silence coefficients at some positions. The following document stores an intervention:

    {"kind": "memlens intervention", "schema": 1, "unit": "coefficient",
     "model": {"name": ..., "fingerprint": ..., "dtype": "float32"},
     "edits": [{"action": "set", "coefficient": 3.5, "memories": ["L3N51"], "positions": "all"},
               {"action": "scale", "factor": 2.0, "memories": ["L3N7", "L4N9"], "positions": [0, -1]},
               {"action": "silence", "layer": 3, "positions": "all"},
               {"action": "silence", "expert": "L3E5", "positions": "all"}]}

The numbers are coefficients m, which are the factors of the values, and not pre-activations. With `"model": null`, the
document applies to any model that has these memories. Edits are applied in order.
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
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from memlens.errors import FilesError, ModelError, SettingError, UnknownName
from memlens.files import read_limited, refuse_output, replacing
from memlens.memory import ExpertId, MemoryId
from memlens.text import visible

if TYPE_CHECKING:
    from memlens.models.memory_model import MemoryModel
    from memlens.tracer.prompt import Source

KIND, SCHEMA, UNIT = "memlens intervention", 1, "coefficient"
_ACTIONS = {"set": "coefficient", "scale": "factor", "silence": None}
_FILE_LIMIT = 64 << 20  # bytes; enough to edit every memory of a large model
_LAYER = re.compile(r"[Ll]([0-9]{1,9})")
_HOW = "write L3N51=3.5 to set, =x2 to scale, =0 to silence"


@dataclass(frozen=True)
class Edit:
    """A change to the coefficients of some memories, of a whole layer or of a whole expert.

    `coefficient` sets the coefficients and `factor` scales them. With neither, the edit silences the memories.
    `positions` count the prompt's tokens from 0, or from the end if they are negative. None means all positions,
    including BOS and new tokens.

    Example:
        >>> str(memlens.Edit("L3N51"))
        'L3N51=0'
        >>> pair = memlens.Edit(["L3N7", "L4N9"], factor=2.0)  # scale two memories
        >>> layer = memlens.Edit(layer=3, coefficient=0.5)  # set a whole layer
        >>> expert = memlens.Edit(expert="L3E5")  # silence an expert
    """

    memories: tuple[MemoryId, ...] = ()  # the constructor also accepts one or several names
    layer: int | None = None  # edits the whole layer instead of memories
    coefficient: float | None = None
    factor: float | None = None
    positions: tuple[int, ...] | None = None  # the constructor also accepts one position
    expert: ExpertId | None = None  # edits the whole expert instead of memories; the constructor also accepts its name

    def __post_init__(self) -> None:
        at: Any = self.positions
        fields = {
            "memories": memories_of(self.memories),
            "layer": None if self.layer is None else int(self.layer),
            "coefficient": None if self.coefficient is None else float(self.coefficient),
            "factor": None if self.factor is None else float(self.factor),
            "positions": None if at is None else tuple(int(position) for position in ([at] if is_whole(at) else at)),
            "expert": _expert_of(self.expert),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)  # the dataclass is frozen
        if [bool(self.memories), self.layer is not None, self.expert is not None].count(True) != 1:
            raise SettingError("an edit needs exactly one of: memories, a layer, an expert")
        if self.positions == ():
            raise SettingError("an edit's positions must be 'all' or a list of whole numbers, not []")
        if self.coefficient is not None and self.factor is not None:
            raise SettingError("an edit has both a coefficient and a factor; give only one, or neither to silence")
        for number in (self.coefficient, self.factor):
            if number is not None and not math.isfinite(number):
                raise SettingError(f"the number for {self.target} is {number}; it must be a finite number")

    @property
    def action(self) -> str:
        """The kind of edit: "set", "scale" or "silence"."""
        if self.coefficient is not None:
            return "set"
        return "silence" if self.factor is None else "scale"

    @property
    def target(self) -> str:
        """The names of the memories (at most three), or the name of the layer or expert."""
        if self.layer is not None or self.expert is not None:
            return str(self.expert or ExpertId(self.layer or 0))
        more = f" and {len(self.memories) - 3} more" if len(self.memories) > 3 else ""
        return ", ".join(str(memory) for memory in self.memories[:3]) + more

    def __str__(self) -> str:
        """Return the edit as text, which `parse` can read if the edit has one target and no positions."""
        amount = f"x{_digits(self.factor)}" if self.factor is not None else _digits(self.coefficient or 0.0)
        at = "" if self.positions is None else f" at {', '.join(map(str, self.positions))}"
        return f"{self.target}={amount}{at}"

    @classmethod
    def parse(cls, text: str, positions: Iterable[int] | None = None) -> Edit:
        """Read an edit from text.

        Args:
            text: `L3N51=0` silences a memory, `L3N51=3.5` sets its coefficient and `L3N51=x2` scales it. `L3` instead
                of a memory means a whole layer, and `L3E5` a whole expert.
            positions: Positions of the edit. None means every position.

        Returns:
            The edit.

        Raises:
            SettingError: The text is not an edit.

        Example:
            >>> memlens.Edit.parse("L3N51=x2").factor
            2.0
        """
        target, equals, amount = text.partition("=")
        if not equals:
            raise SettingError(f"the edit '{text}' has no '='; {_HOW}")
        whole, expert = _LAYER.fullmatch(target.strip()), ExpertId.find(target)
        unit: dict[str, Any] = {"layer": int(whole[1])} if whole else {"expert": expert} if expert else {}
        unit = unit or {"memories": (MemoryId.parse(target),)}
        amount = amount.strip()
        scales = amount[:1] in ("x", "X")
        try:
            if "_" in amount or not amount.isascii():  # float() accepts 1_0 and the digits of every script
                raise ValueError
            number = float(amount[1:] if scales else amount)
        except ValueError:
            raise SettingError(f"the edit '{text}' has no number after '='; {_HOW}") from None
        at: Any = positions
        if scales:
            return cls(**unit, factor=number, positions=at)
        return cls(**unit, coefficient=None if number == 0 else number, positions=at)

    def check(self, model: MemoryModel) -> None:
        """Raise UnknownName if the model does not have a layer, expert or memory of the edit.

        Args:
            model: A loaded model.

        Raises:
            UnknownName: A layer, expert or memory does not exist.

        Example:
            >>> memlens.Edit("L1N7").check(model)
        """
        if self.layer is not None:
            check_layer(model, self.layer)
        if self.expert is not None:
            check_layer(model, self.expert.layer, str(self.expert))
            model.names.span(self.expert)
        for memory in self.memories:
            check_memory(model, memory)

    def to_json(self) -> dict[str, Any]:
        """Return the edit as plain data.

        Returns:
            An entry of "edits" in an intervention document.

        Example:
            >>> memlens.Edit("L3N51").to_json()["action"]
            'silence'
        """
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
    """The model to which a document is bound."""

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
            raise SettingError(
                f"the action '{self.action}' does not match its numbers, which {edit.action} {edit.target}"
            )
        return edit


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    """An intervention document, as in the module's docstring."""

    kind: Literal["memlens intervention"]
    schema: Literal[1]
    unit: Literal["coefficient"]
    model: _ModelDocument | None
    edits: list[_EditDocument]


@dataclass(frozen=True)
class Intervention:
    """Edits in order, and the model that they are bound to.

    Example:
        >>> memlens.Intervention.parse("L1N7=0", "L2=x2").save(folder, model)
        >>> len(memlens.Intervention.load(folder).edits)
        2
    """

    edits: tuple[Edit, ...]  # the constructor also accepts a single edit, and edits as text
    model: str = ""  # the model's name, for messages
    fingerprint: str | None = None  # None if not bound to a model
    dtype: str | None = None  # dtype of the model, on which the fingerprint depends

    def __post_init__(self) -> None:
        edits: Any = [self.edits] if isinstance(self.edits, (Edit, str)) else self.edits
        edits = tuple(edit if isinstance(edit, Edit) else Edit.parse(edit) for edit in edits)
        object.__setattr__(self, "edits", edits)  # the dataclass is frozen

    @classmethod
    def parse(cls, *texts: str, positions: Sequence[int] | None = None) -> Intervention:
        """Read an intervention from edits such as `L3N51=0`.

        Args:
            *texts: Edits, as in `Edit.parse`.
            positions: Positions of all edits. None means every position.

        Returns:
            The intervention.

        Raises:
            SettingError: A text is not an edit.

        Example:
            >>> str(memlens.Intervention.parse("L3N51=0", "L4N9=x2"))
            'L3N51=0; L4N9=x2'
        """
        at = None if positions is None else tuple(positions)  # `positions` may be an iterator
        return cls(tuple(Edit.parse(text, at) for text in texts))

    @classmethod
    def of(cls, given: Intervention | Edit | str | Iterable[Edit | str]) -> Intervention:
        """Return an intervention with these edits. An Intervention is returned unchanged.

        Args:
            given: An Intervention, or one or several edits, each an Edit or a text like `L3N51=0`.

        Returns:
            The intervention.

        Raises:
            SettingError: A text is not an edit.

        Example:
            >>> len(memlens.Intervention.of(["L3N51=0", memlens.Edit(layer=2)]).edits)
            2
        """
        edits: Any = given
        return edits if isinstance(edits, Intervention) else cls(edits)

    def __add__(self, other: Intervention | Edit | str | Iterable[Edit | str]) -> Intervention:
        """Join the edits of two interventions. Raises ModelError if they are bound to different models."""
        other = Intervention.of(other)
        if None not in (self.fingerprint, other.fingerprint) and self.fingerprint != other.fingerprint:
            raise ModelError(
                f"one intervention is for {self.model}, the other for {other.model}; apply them separately"
            )
        bound = self if self.fingerprint is not None else other
        return replace(bound, edits=(*self.edits, *other.edits))

    def __str__(self) -> str:
        return "; ".join(str(edit) for edit in self.edits)

    def check(self, model: MemoryModel, fingerprint: str | None = None) -> None:
        """Raise an error if the intervention cannot be applied to this model.

        Args:
            model: A loaded model.
            fingerprint: The fingerprint of the model. None computes it if the intervention is bound to a model.

        Raises:
            ModelError: The intervention is bound to another model.
            UnknownName: The model does not have a memory.

        Example:
            >>> memlens.Intervention.parse("L1N7=0").check(model)
        """
        if self.fingerprint is not None and self.fingerprint != (fingerprint or model.fingerprint()):
            raise ModelError(self._why_not(model))
        for edit in self.edits:
            edit.check(model)

    def _why_not(self, model: MemoryModel) -> str:
        dtype = _dtype_of(model)
        if self.dtype is not None and self.dtype != dtype:
            return (
                f"the intervention is for {self.model} in {self.dtype}, but {model.name} is loaded in {dtype}; "
                f"load the model in {self.dtype} (--dtype {self.dtype})"
            )
        other = f" but for {self.model}" if self.model != model.name else ""
        return f"the intervention is not for {model.name}{other} (the fingerprint differs); use it with its own model"

    def meant_for(self, model: Source) -> Intervention:
        """Return the same edits, bound to this model.

        Args:
            model: A model, an argument of `load`, or an index.

        Returns:
            An intervention that is rejected for any other model.

        Raises:
            ModelError: The intervention is bound to another model.
            UnknownName: The model does not have a memory.

        Example:
            >>> memlens.Intervention.parse("L1N7=0").meant_for(model).model == model.name
            True
        """
        from memlens.tracer.prompt import open_model

        loaded, _ = open_model(model)
        fingerprint = loaded.fingerprint()
        self.check(loaded, fingerprint)
        return replace(self, model=loaded.name, fingerprint=fingerprint, dtype=_dtype_of(loaded))

    def for_any(self) -> Intervention:
        """Return the same edits, not bound to a model. Applying them then needs no fingerprint of a large model.

        Returns:
            An intervention for any model that has the memories.

        Example:
            >>> memlens.Intervention.parse("L1N7=0").for_any().fingerprint is None
            True
        """
        return Intervention(self.edits)

    def to_json(self) -> dict[str, Any]:
        """Return the document that `from_json` reads.

        Returns:
            The document as plain data.

        Example:
            >>> memlens.Intervention.parse("L1N7=0").to_json()["kind"]
            'memlens intervention'
        """
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
        """Return the schema for the JSON of the workbench, which represents an intervention by its document."""
        from pydantic_core import core_schema

        document = core_schema.plain_serializer_function_ser_schema(
            cls.to_json, return_schema=core_schema.dict_schema(core_schema.str_schema())
        )
        return core_schema.is_instance_schema(cls, serialization=document)

    @classmethod
    def from_json(cls, content: Any) -> Intervention:
        """Return the intervention that a document describes.

        Args:
            content: The document as plain data.

        Returns:
            The intervention.

        Raises:
            SettingError: The document is not valid.

        Example:
            >>> document = memlens.Intervention.parse("L1N7=0").to_json()
            >>> str(memlens.Intervention.from_json(document))
            'L1N7=0'
        """
        try:
            document = msgspec.convert(content, _Document)
        except msgspec.ValidationError as error:
            raise SettingError(f"not an intervention document ({visible(str(error))})") from error
        edits = tuple(edit.to_edit() for edit in document.edits)
        if document.model is None:
            return cls(edits)
        return cls(edits, document.model.name, document.model.fingerprint, document.model.dtype)

    def save(self, path: str | os.PathLike[str], model: Source | None = None, *, force: bool = False) -> None:
        """Write the intervention to a file as a JSON document.

        Args:
            path: The file.
            model: Bind the intervention to this model first. None writes it as it is.
            force: Overwrite the file even if it is not an intervention.

        Raises:
            OutputError: The file exists and is not an intervention.
            SettingError: The file cannot be written.

        Example:
            >>> memlens.Intervention.parse("L1N7=0").save(folder.with_name("edits.json"), model)
        """
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
        """Read an intervention from a file. Call `check` to see whether it fits a model.

        Args:
            path: A file that `save` wrote.

        Returns:
            The intervention.

        Raises:
            SettingError: The file cannot be read or is not an intervention.

        Example:
            >>> memlens.Intervention.parse("L1N7=0").save(folder.with_name("copy.json"))
            >>> str(memlens.Intervention.load(folder.with_name("copy.json")))
            'L1N7=0'
        """
        try:
            return cls.from_json(json.loads(read_limited(Path(path), _FILE_LIMIT).decode("utf-8-sig")))
        except FilesError as error:
            why = getattr(error.__cause__, "strerror", None) or error
            raise SettingError(f"{path} cannot be read ({why}); name the file of an intervention") from error
        except (SettingError, UnknownName) as error:
            raise type(error)(f"{path}: {error}") from error
        except (ValueError, RecursionError) as error:
            advice = "name a file written by `memlens trace --save`"
            raise SettingError(f"{path} is not a JSON document; {advice}") from error


def is_intervention(head: bytes) -> bool:
    """Return True if `head` is the start of a file written by `Intervention.save`."""
    return head.lstrip().startswith(f'{{\n "kind": "{KIND}"'.encode())


def check_layer(model: MemoryModel, layer: int, name: str = "") -> None:
    """Raise UnknownName if the model does not have the layer.

    `name` is the memory or expert that the message calls missing. By default, the message names the layer.
    """
    if not 0 <= layer < len(model.layers):
        missing = name or f"layer {layer}"
        raise UnknownName(f"{missing} does not exist: {model.name} has layers 0 to {len(model.layers) - 1}")


def check_memory(model: MemoryModel, memory: MemoryId) -> None:
    """Raise UnknownName if the model does not have the memory."""
    check_layer(model, memory.layer, str(memory))
    model.names.number(memory)


def memories_of(memories: str | MemoryId | Iterable[str | MemoryId]) -> tuple[MemoryId, ...]:
    """Return one or several memories, given by name or id, as a tuple of ids."""
    names = [memories] if isinstance(memories, (str, MemoryId)) else memories
    return tuple(MemoryId.parse(memory) if isinstance(memory, str) else memory for memory in names)


def _expert_of(name: Any) -> ExpertId | None:
    if name is None or isinstance(name, ExpertId):
        return name
    expert = ExpertId.find(name)
    if expert is None:
        raise UnknownName(f"'{name}' is not the name of an expert; write its layer and number, as in L3E5")
    return expert


def is_whole(number: Any) -> bool:
    """Return True for an integer, including numpy's, but not for a bool."""
    return isinstance(number, Integral) and not isinstance(number, bool)


def short(content: Any) -> str:
    """Return at most 40 characters of a value's repr, for an error message."""
    try:
        text = repr(content)
    except (RecursionError, ValueError):  # nested too deeply, or an integer with too many digits
        return f"a value of type {type(content).__name__}"
    return text if len(text) <= 40 else f"{text[:39]}…"


def _digits(number: float) -> str:
    """Format a number with the fewest digits from which the same number can be read."""
    return f"{number:g}" if float(f"{number:g}") == number else repr(number)


def _dtype_of(model: MemoryModel) -> str:
    return str(model.dtype).removeprefix("torch.")
