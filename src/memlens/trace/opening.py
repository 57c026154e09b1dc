"""What a person may name as the model: a loaded one, whatever load() takes, or an index, whose own model is loaded.

Every function of this part begins here, so that all accept the same. This module runs nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from memlens.errors import ModelNotFound, SettingError
from memlens.index.layout import MANIFEST, PARTIAL
from memlens.index.reader import Index
from memlens.models import load
from memlens.models.memory_model import MemoryModel
from memlens.trace.edits import short
from memlens.trace.naming import check_index

Source = MemoryModel | Index | str | os.PathLike[str]
"""MODEL or INDEX: a MemoryModel, a name or folder of a model, an Index or its folder."""


def open_model(
    model: Source | Any,
    index: Index | str | os.PathLike[str] | None = None,
    *,
    where: str | None = None,
    device: str = "auto",
    dtype: str | None = None,
) -> tuple[MemoryModel, Index | None]:
    """The model, and the index that names its memories: the one given, or the one that stands for the model.

    `where`: the place of an index's model, if it has moved. `dtype` None: float32, or what the index was made in.
    """
    opened = None if index is None else open_index(index)
    own = _as_index(model)
    if own is None:
        if where is not None:
            raise SettingError(f"--model says where an index's model is, but {model} is not an index; leave it out")
        loaded = load(model, device=device, dtype=dtype or "float32")
    else:
        _refuse_other_dtype(own, dtype)
        loaded = own.load_model(where, device=device)
    if opened is not None:
        check_index(loaded, opened)
    return loaded, own if opened is None else opened


def open_index(index: Index | str | os.PathLike[str]) -> Index:
    """An index as it is, or by its folder."""
    if isinstance(index, Index):
        return index
    if not isinstance(index, (str, os.PathLike)):
        raise SettingError(f"{short(index)} is not an index; give an Index or the folder of one")
    return Index(Path(index))


def _as_index(model: Any) -> Index | None:
    if isinstance(model, Index):
        return model
    if not isinstance(model, (str, os.PathLike)):
        return None
    folder = Path(model)
    try:
        is_index = bool(os.fspath(model)) and ((folder / MANIFEST).is_file() or (folder / PARTIAL).is_dir())
    except OSError as error:
        raise ModelNotFound(f"{short(os.fspath(model))} cannot be a model or an index ({error.strerror})") from error
    return Index(folder) if is_index else None


def _refuse_other_dtype(index: Index, dtype: str | None) -> None:
    made_in = index.manifest["model"].get("dtype")
    if dtype is not None and made_in is not None and dtype != made_in:
        raise SettingError(
            f"{index.folder} was made with the model in {made_in}, not {dtype}; leave --dtype out, "
            "or trace the model without the index"
        )
