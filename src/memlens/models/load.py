"""From what a person names (a Hub id, a folder, a .gguf file, a loaded object) to a proven MemoryModel.

Only safetensors, or a .bin read as plain tensors, comes in: no code of a checkpoint is run, no object unpickled.
This module finds and reads; what a model is made of is hugging_face.py's matter.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlens.errors import ModelError, ModelNotFound, SettingError, UnsupportedModel
from memlens.models.memory_model import MemoryModel

if TYPE_CHECKING:
    import torch

    from memlens.models.tokenizer import Tokenizer

DTYPES = ("float32", "bfloat16", "float16", "float64")
_BUNDLED = Path(__file__).parent.parent / "bundled" / "model"


def load(
    model: str | os.PathLike[str] | MemoryModel | Any,
    *,
    tokenizer: Any = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "float32",
    device_map: Any = None,
    prove: bool = True,
) -> MemoryModel:
    """A language model as memories, proven to be what it is taken for.

    `model`: a Hub id, a local folder, a .gguf file, "bundled", or a loaded transformers causal LM. A loaded one stays
    on its device and in its dtype, is put into evaluation mode, and needs `tokenizer` to work with text. Elsewhere
    `tokenizer` (a tokenizer, or the name of one) replaces the checkpoint's own. A MemoryModel comes back as it is.
    `device_map` ("auto", "balanced", ...) spreads the layers of a checkpoint over devices, as transformers takes it;
    `device` then does not count.
    """
    if isinstance(model, MemoryModel):
        return model
    if isinstance(model, (str, os.PathLike)):
        is_path = isinstance(model, os.PathLike) or _looks_like_a_path(model)
        loaded = _load_named(os.fspath(model), is_path, tokenizer, _device(device), _dtype(dtype), device_map)
    else:
        loaded = _wrap_object(model, tokenizer)
    if prove:
        from memlens.models.proof import prove as prove_memories

        loaded.proof = prove_memories(loaded)
    return loaded


def _expanded(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError as error:  # "~somebody" who has no account here
        raise ModelNotFound(f"'{name}': there is no such home folder; give the whole path") from error


def _load_named(
    name: str, is_path: bool, tokenizer: Any, device: torch.device, dtype: torch.dtype, device_map: Any
) -> MemoryModel:
    if name == "bundled":
        if not _BUNDLED.is_dir():
            raise ModelNotFound("'bundled': this installation holds no bundled model; name a Hub id or a folder")
        return _load_folder(_BUNDLED, tokenizer, device, dtype, device_map, name="bundled", source="bundled")
    path = _expanded(name)
    if path.is_dir() and name:
        source = str(path.resolve())
        return _load_folder(path, tokenizer, device, dtype, device_map, name=path.resolve().name, source=source)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{name} is a file but no .gguf; name a .gguf file or a folder with config.json")
        from memlens.models.checkpoint import load_gguf

        _refuse_device_map(device_map, name)
        return load_gguf(path, _named_tokenizer(tokenizer), device, dtype)
    if is_path:
        raise ModelNotFound(
            f"no such folder or file: '{name}'; give a folder with config.json, a .gguf file or a Hub id"
        )
    from memlens.models.checkpoint import load_hub

    return load_hub(name, _named_tokenizer(tokenizer), device, dtype, device_map)


def bundled_folder() -> Path:
    """Where the bundled model lies, if this installation has it."""
    return _BUNDLED


def _load_folder(
    folder: Path, tokenizer: Any, device: torch.device, dtype: torch.dtype, device_map: Any, *, name: str, source: str
) -> MemoryModel:
    if (folder / "model.pt").is_file() and (folder / "dict.txt").is_file():
        from memlens.models.fairseq import load_adaptive

        if tokenizer is not None:
            raise SettingError(f"{name} has its own words in dict.txt; leave tokenizer= out")
        _refuse_device_map(device_map, name)
        return load_adaptive(folder, device, dtype, name=name, source=source)
    from memlens.models.checkpoint import load_folder

    return load_folder(folder, _named_tokenizer(tokenizer), device, dtype, device_map, name=name, source=source)


def _refuse_device_map(device_map: Any, name: str) -> None:
    if device_map is not None:
        raise SettingError(f"{name} cannot be spread over devices; --device-map is for safetensors checkpoints")


def _wrap_object(network: Any, tokenizer: Any) -> MemoryModel:
    from transformers import PreTrainedModel

    if not isinstance(network, PreTrainedModel):
        raise ModelError(
            f"{type(network).__name__} is not a model; give a Hub id, a folder, a .gguf file or a loaded causal LM"
        )
    from memlens.models.families import family_of
    from memlens.models.huggingface import HuggingFaceModel

    name = getattr(network.config, "_name_or_path", "") or type(network).__name__
    family_of(network.config, name)
    if network.get_output_embeddings() is None:
        raise UnsupportedModel(
            f"{type(network).__name__} has no language modelling head; load it with AutoModelForCausalLM"
        )
    return HuggingFaceModel(network, _named_tokenizer(tokenizer), name=name, source="")


def _named_tokenizer(tokenizer: Any) -> Tokenizer | None:
    from memlens.models.tokenizer import Tokenizer

    if tokenizer is None or isinstance(tokenizer, Tokenizer):
        return tokenizer
    if isinstance(tokenizer, (str, os.PathLike)):
        from memlens.models.checkpoint import read_tokenizer

        return read_tokenizer(os.fspath(tokenizer))
    return Tokenizer(tokenizer)


def _looks_like_a_path(name: str) -> bool:
    """A Hub id is NAME or OWNER/NAME; all else can only have been meant as a path."""
    return (
        not name
        or name.startswith((".", "~", os.sep))
        or name.count("/") > 1
        or "\\" in name
        or name.lower().endswith(".gguf")
    )


def _device(device: str | torch.device) -> torch.device:
    import torch

    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().split("\n")[0]
        raise SettingError(f"device '{device}' cannot be used here ({reason}); try auto or cpu") from error
    return chosen


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    import torch

    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise SettingError(f"dtype '{dtype}' is not one a model can be read in; use {', '.join(DTYPES)}")
    chosen: torch.dtype = getattr(torch, name)
    return chosen
