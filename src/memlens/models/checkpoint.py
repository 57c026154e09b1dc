"""Reads a checkpoint, from a folder or from the Hub, into a HuggingFaceModel; every failure is one line.

No remote code, no pickles: weights come from safetensors, or from a .bin by torch's reader of plain tensors.

A .gguf file, as llama.cpp uses them, read into plain weights by transformers.

Whether BOS goes before a text stands in the file's own metadata. Quantized weights are unpacked: the model is read as
the file holds it, rounding included. This module knows the container, not the architectures in it.
"""

from __future__ import annotations

import contextlib
import io
import json
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlens.errors import MemlensError, ModelError, ModelNotFound, SettingError, UnsupportedModel
from memlens.models.families import Config, family_of
from memlens.models.huggingface import HuggingFaceModel, quiet_transformers
from memlens.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential", "cpu")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "spiece.model", "vocab.txt")


def load_folder(
    folder: Path,
    tokenizer: Tokenizer | None,
    device: torch.device,
    dtype: torch.dtype,
    device_map: Any = None,
    *,
    name: str,
    source: str,
) -> HuggingFaceModel:
    """The checkpoint of a local folder."""
    _check_config_file(folder)
    if tokenizer is None and not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        raise ModelError(f"{folder} holds no tokenizer (such as tokenizer.json); add it or pass tokenizer=")
    return _load(str(folder), tokenizer, device, dtype, device_map, name=name, source=source)


def load_hub(
    name: str, tokenizer: Tokenizer | None, device: torch.device, dtype: torch.dtype, device_map: Any = None
) -> HuggingFaceModel:
    """The checkpoint of a Hub id, from the cache where it is there already."""
    _find_on_hub(name)
    return _load(name, tokenizer, device, dtype, device_map, name=name, source=name)


def read_tokenizer(place: str, **options: Any) -> Tokenizer:
    """The tokenizer of a folder or Hub id."""
    from transformers import AutoTokenizer

    adds_bos = options.pop("adds_bos", None)
    try:
        with quiet_transformers():
            fast = AutoTokenizer.from_pretrained(place, trust_remote_code=False, **options)
    except Exception as error:  # the reader raises whatever the broken file made it stumble over
        raise ModelError(f"the tokenizer of {place} cannot be read ({one_line(error)})") from error
    return Tokenizer(fast, adds_bos)


def _load(
    place: str,
    tokenizer: Tokenizer | None,
    device: torch.device,
    dtype: torch.dtype,
    device_map: Any,
    *,
    name: str,
    source: str,
) -> HuggingFaceModel:
    config = read_config(place, name)
    family_of(config, name)
    if device_map is None:
        network = read_network(place, name, dtype, config=config).to(device)
    else:
        network = read_network(place, name, dtype, config=config, device_map=_checked_map(device_map))
    return HuggingFaceModel(network, tokenizer or read_tokenizer(place), name=name, source=source)


def _checked_map(device_map: Any) -> Any:
    """Refuse what transformers would stumble over, and say what is missing."""
    if isinstance(device_map, str) and device_map not in DEVICE_MAPS:
        raise SettingError(f"--device-map is '{device_map}'; choose one of: {', '.join(DEVICE_MAPS)}")
    try:
        import_module("accelerate")
    except ModuleNotFoundError as error:
        raise SettingError('--device-map needs the package accelerate: pip install "memlens[gguf]"') from error
    return device_map


def read_config(place: str, name: str, **options: Any) -> Config:
    from transformers import AutoConfig

    try:
        with quiet_transformers():
            return AutoConfig.from_pretrained(place, trust_remote_code=False, **options)
    except ValueError as error:
        model_type = _model_type_on_disk(place)
        if model_type is not None:
            raise UnsupportedModel(
                f"{name} is of the model type '{model_type}', which cannot be loaded ({one_line(error)})"
            ) from error
        raise ModelError(f"the configuration of {name} cannot be read ({one_line(error)})") from error
    except Exception as error:
        raise ModelError(f"the configuration of {name} cannot be read ({one_line(error)})") from error


def read_network(place: str, name: str, dtype: torch.dtype, **options: Any) -> Any:
    """The network with every weight from the checkpoint, none made up, no gradients."""
    from transformers import AutoModelForCausalLM

    try:
        with quiet_transformers():
            network, report = AutoModelForCausalLM.from_pretrained(
                place, dtype=dtype, trust_remote_code=False, weights_only=True, output_loading_info=True, **options
            )
    except MemlensError:
        raise
    except Exception as error:  # a damaged file makes its reader raise almost anything
        raise ModelError(
            f"the weights of {name} cannot be read ({one_line(error)}); get the checkpoint again"
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ModelError(f"{name} is not a whole causal language model: its weights lack {shown}")
    network.requires_grad_(False)
    return network


def _check_config_file(folder: Path) -> None:
    path = folder / "config.json"
    if not path.is_file():
        gguf = sorted(file.name for file in folder.glob("*.gguf"))
        advice = f"name the file itself: {folder / gguf[0]}" if gguf else "give a folder as save_pretrained() writes it"
        raise ModelNotFound(f"{folder} holds no config.json; {advice}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not readable JSON ({one_line(error)}); get the checkpoint again") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(f"{path} names no model_type; give a folder as save_pretrained() writes it")


def _find_on_hub(name: str) -> None:
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id
    from transformers.utils import cached_file

    try:
        validate_repo_id(name)
        with quiet_transformers():
            cached_file(name, "config.json")
    except HFValidationError as error:
        raise ModelNotFound(f"'{name}' is no folder or file here and no possible Hub id; check the name") from error
    except OSError as error:
        if constants.HF_HUB_OFFLINE:
            advice = "HF_HUB_OFFLINE is set and it is not in the cache; download it first or unset that"
        else:
            advice = f"the Hub did not give it ({one_line(error)}); check the name, the network or your access"
        raise ModelNotFound(f"'{name}' is no folder or file here, and {advice}") from error


def _model_type_on_disk(place: str) -> str | None:
    path = Path(place) / "config.json"
    if not path.is_file():
        return None
    model_type: str | None = json.loads(path.read_text(encoding="utf-8")).get("model_type")
    return model_type


def one_line(error: Exception) -> str:
    """The beginning of an error's text, on one line and not too long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."


_ADDS_BOS = "tokenizer.ggml.add_bos_token"


def load_gguf(path: Path, tokenizer: Tokenizer | None, device: torch.device, dtype: torch.dtype) -> HuggingFaceModel:
    """The model and the tokenizer of one .gguf file."""
    fields = _read_fields(path)
    folder, file = str(path.resolve().parent), path.name
    config = read_config(folder, file, gguf_file=file)
    family_of(config, file)
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that no setting of transformers reaches
        network = read_network(folder, file, dtype, gguf_file=file)
    if tokenizer is None:
        adds_bos = _value(fields[_ADDS_BOS]) if _ADDS_BOS in fields else None
        tokenizer = read_tokenizer(folder, gguf_file=file, adds_bos=adds_bos)
    return HuggingFaceModel(network.to(device), tokenizer, name=file, source=str(path.resolve()))


def _read_fields(path: Path) -> dict[str, Any]:
    try:
        import_module("accelerate")  # transformers reads .gguf files with it
        from gguf import GGUFReader
    except ModuleNotFoundError as error:
        raise ModelError(f'{path} needs the package {error.name}: pip install "memlens[gguf]"') from error
    try:
        return dict(GGUFReader(path).fields)
    except Exception as error:  # a damaged file makes the reader stumble over anything
        raise ModelError(f"{path} is not a readable .gguf file ({one_line(error)}); get it again") from error


def _value(field: Any) -> bool:
    return bool(field.parts[field.data[0]][0])
