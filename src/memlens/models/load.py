"""Loads what a person names (a Hub id, a folder, a .gguf file, a loaded object) as a proven MemoryModel.

Weights come from safetensors, from a .gguf file (unpacked, rounding included) or from a .bin by torch's reader of plain
tensors: no code of a checkpoint is run, no object unpickled. Every failure is one line.
"""

import contextlib
import io
import os
import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from memlens.errors import MemlensError, ModelError, ModelNotFound, SettingError, UnsupportedModel, needing
from memlens.files import FileStamp, file_stamp
from memlens.models.checkpoint import (
    check_config_file,
    network_class,
    network_without_numbers,
    one_line,
    read_config,
    refuse_adapter,
    refuse_misfit,
    refuse_untold_text,
    stored_tensors,
    unreadable_weights,
    unsupported_gguf,
)
from memlens.models.gguf_file import read_head
from memlens.models.huggingface import as_memories, quiet_transformers, refuse_config
from memlens.models.memory_model import MemoryModel
from memlens.models.proof import prove as prove_memories
from memlens.models.refusals import Config, quantization
from memlens.models.tokenizer import Tokenizer

DTYPES = ("float32", "bfloat16", "float16", "float64")
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential", "cpu")
_BUNDLED = Path(__file__).parent.parent / "bundled" / "model"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "spiece.model", "vocab.txt")
_READ = {".safetensors", ".bin", ".pt", ".gguf", ".json", ".txt", ".model"}
_OLD_TABLES = re.compile(
    r"(attn|attention)\.(masked_)?bias$|\.(rotary_emb|maybe_rotary)\.inv_freq$"
)  # once saved along


@dataclass(frozen=True)
class _Options:
    """The arguments of load() beside the model's name."""

    tokenizer: Any
    device: torch.device
    dtype: torch.dtype
    device_map: Any


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
        options = _Options(tokenizer, _device(device), _dtype(dtype), device_map)
        is_path = isinstance(model, os.PathLike) or _looks_like_a_path(model)
        before = _stamps(os.fspath(model))
        loaded = _load_named(os.fspath(model), is_path, options)
        if before != _stamps(os.fspath(model)):
            raise ModelError(f"{model} changed while it was read; run the same command again when it is at rest")
    else:
        loaded = _wrap_object(model, _tokenizer(tokenizer))
    if prove:
        loaded.proof = prove_memories(loaded)
    else:
        loaded.forget_probe()
    return loaded


def _stamps(name: str) -> dict[str, FileStamp | None]:
    """Stamps of a file, or of the files of a folder; none for a model on the Hub, whose files keep their content."""
    try:
        path = Path(name).expanduser()
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        return {file.name: file_stamp(file) for file in files if file.suffix in _READ}  # training may write others
    except (OSError, RuntimeError):
        return {}


def _own_weights_(network: Any) -> None:
    """Copy weights that are still those of a mapped file: they would change, or be gone, whenever that file does."""
    for weights in (*network.parameters(), *network.buffers()):
        if weights.device.type == "cpu":
            weights.data = weights.data.clone()


def refuse_missing(name: str) -> None:
    """Refuse a model that is not there, without loading it."""
    if name == "bundled":
        if not _BUNDLED.is_dir():
            raise ModelNotFound("'bundled': this installation holds no bundled model; name a Hub id or a folder")
    elif not (path := _expanded(name)).exists() or not name:
        if _looks_like_a_path(name):
            raise _no_such_path(name)
        _find_on_hub(name)
    elif path.is_dir() and not ((path / "model.pt").is_file() and (path / "dict.txt").is_file()):
        check_config_file(path)


def is_here(name: str) -> bool:
    """Can the model be loaded without a network? From this package, a folder or file, or what the Hub's cache holds."""
    if name == "bundled":
        return _BUNDLED.is_dir()
    if not name or _expanded(name).exists():
        return bool(name)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        return False


def _expanded(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError as error:  # "~somebody" who has no account here
        raise ModelNotFound(f"'{name}': there is no such home folder; give the whole path") from error


def _no_such_path(name: str) -> ModelNotFound:
    return ModelNotFound(f"no such folder or file: '{name}'; give a folder with config.json, a .gguf file or a Hub id")


def bundled_folder() -> Path:
    """The folder of the bundled model, if this installation has it."""
    return _BUNDLED


def _load_named(name: str, is_path: bool, options: _Options) -> MemoryModel:
    if name == "bundled":
        refuse_missing(name)
        return _load_folder(_BUNDLED, options, name="bundled", source="bundled")
    path = _expanded(name)
    if path.is_dir() and name:
        return _load_folder(path, options, name=path.resolve().name, source=str(path.resolve()))
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{name} is a file but no .gguf; name a .gguf file or a folder with config.json")
        _refuse_device_map(options, name)
        return _load_gguf(path, options)
    if name and path.exists():
        raise ModelError(f"{name} is not a regular file; name a .gguf file or a folder with config.json")
    if is_path:
        raise _no_such_path(name)
    _find_on_hub(name)
    return _load_checkpoint(name, options, name=name, source=name)


def _load_folder(folder: Path, options: _Options, *, name: str, source: str) -> MemoryModel:
    if (folder / "model.pt").is_file() and (folder / "dict.txt").is_file():
        from memlens.models.fairseq import load_fairseq

        if options.tokenizer is not None:
            raise SettingError(f"{name} has its own words in dict.txt; leave tokenizer= out")
        _refuse_device_map(options, name)
        return load_fairseq(folder, options.device, options.dtype, name=name, source=source)
    check_config_file(folder)
    if options.tokenizer is None and not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        raise ModelError(f"{folder} holds no tokenizer (such as tokenizer.json); add it or pass tokenizer=")
    return _load_checkpoint(str(folder), options, name=name, source=source)


def _load_checkpoint(place: str, options: _Options, *, name: str, source: str) -> MemoryModel:
    """The checkpoint of a local folder or a Hub id."""
    tokenizer = _tokenizer(options.tokenizer)
    refuse_adapter(place, name)
    config = read_config(place, name)
    refuse_config(config, name)
    refuse_untold_text(place, config, name)
    stored, size = stored_tensors(place, name)
    refuse_misfit(name, config, stored, size)
    if options.device_map is None:
        network = _read_network(place, name, config, options.dtype).to(options.device)
    else:
        network = _read_network(place, name, config, options.dtype, device_map=_device_map(options.device_map))
    if any(tensor.dtype == options.dtype for tensor in stored.values()):  # all others were copied to change their dtype
        _own_weights_(network)
    return as_memories(network, tokenizer or _read_tokenizer(place), name=name, source=source)


def _load_gguf(path: Path, options: _Options) -> MemoryModel:
    """The model and the tokenizer of one .gguf file; its own metadata say whether BOS goes before a text."""
    tokenizer = _tokenizer(options.tokenizer)
    with needing("gguf", str(path), ModelError):  # transformers reads .gguf files with them
        import_module("gguf")
        import_module("accelerate")
    head = read_head(path)
    folder, file = str(path.resolve().parent), path.name
    config = read_config(folder, file, gguf_file=file)
    refuse_config(config, file)
    try:
        refuse_misfit(file, config, head.tensors, sum(4 * tensor.numel() for tensor in head.tensors.values()))
    except ModelError as error:
        raise unsupported_gguf(file, "of its settings it makes a network that its tensors do not fit") from error
    # without it numbers may stay packed on some devices
    unpacking = getattr(import_module("transformers"), "GgufConfig", None)
    plain = {} if unpacking is None else {"quantization_config": unpacking(dequantize=True)}
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that no setting of transformers reaches
        network = _read_network(folder, file, config, options.dtype, gguf_file=file, **plain)
    if tokenizer is None:
        tokenizer = _read_tokenizer(folder, head.adds_bos, gguf_file=file)
    return as_memories(network.to(options.device), tokenizer, name=file, source=str(path.resolve()))


def _wrap_object(network: Any, tokenizer: Tokenizer | None) -> MemoryModel:
    from transformers import PreTrainedModel

    if not isinstance(network, PreTrainedModel):
        raise ModelError(
            f"{type(network).__name__} is not a model; give a Hub id, a folder, a .gguf file or a loaded causal LM"
        )
    name = getattr(network.config, "_name_or_path", "") or type(network).__name__
    refuse_config(network.config, name)
    if network.get_output_embeddings() is None:
        raise UnsupportedModel(
            f"{type(network).__name__} has no language modelling head; load it with AutoModelForCausalLM"
        )
    return as_memories(network, tokenizer, name=name, source="")


def _refuse_other_shapes(network: Any, config: Config, name: str) -> None:
    """Numbers that were unpacked have the shape that their file gives them, whatever the configuration says."""
    shapes = {key: weight.shape for key, weight in network_without_numbers(config, name).named_parameters()}
    for key, weight in network.named_parameters():
        if weight.shape != shapes[key]:
            shape, wanted = tuple(weight.shape), tuple(shapes[key])
            raise ModelError(
                f"{name} does not fit its config.json: {key} is {shape} and should be {wanted}; get it again"
            )


def _read_network(place: str, name: str, config: Config, dtype: torch.dtype, **options: Any) -> Any:
    """The network with every weight from the checkpoint, none made up, no gradients."""
    kind = network_class(config, name)
    packed = quantization(config) == "mxfp4"
    if packed:
        config.quantization_config["dequantize"] = True  # also where the device could run packed numbers
    try:
        with quiet_transformers():
            network, report = kind.from_pretrained(
                place,
                config=config,
                dtype=dtype,
                trust_remote_code=False,
                weights_only=True,
                output_loading_info=True,
                **options,
            )
    except MemlensError:
        raise
    except Exception as error:  # a damaged file makes its reader raise almost anything
        # said of tensors that its network has no place for
        if isinstance(error, NotImplementedError) and "gguf_file" in options:
            raise unsupported_gguf(name, one_line(error)) from error
        raise unreadable_weights(name, error) from error
    if missing := sorted(report["missing_keys"]):
        if "gguf_file" in options:
            raise unsupported_gguf(name, f"it finds no {_first_of(missing)} in it")
        raise ModelError(f"{name} is not a whole causal language model: its weights lack {_first_of(missing)}")
    # transformers has left out what its families may pass over
    if unused := sorted(key for key in report["unexpected_keys"] if not _OLD_TABLES.search(key)):
        raise ModelError(
            f"the weights of {name} do not fit its config.json, whose network has no place for {_first_of(unused)}; "
            "get the configuration that belongs to them"
        )
    network.requires_grad_(False)
    if packed:
        _refuse_other_shapes(network, config, name)
        network._weight_conversions = None  # else unpacked numbers would be saved by the names of packed ones
        network.to(dtype)  # they are bfloat16, which holds each of them exactly
    return network


def _read_tokenizer(place: str, adds_bos: bool | None = None, **options: Any) -> Tokenizer:
    """The tokenizer of a folder or Hub id."""
    from transformers import AutoTokenizer

    try:
        with quiet_transformers():
            fast = AutoTokenizer.from_pretrained(place, trust_remote_code=False, **options)
    except Exception as error:  # the reader raises whatever the broken file made it stumble over
        raise ModelError(f"the tokenizer of {place} cannot be read ({one_line(error)})") from error
    return Tokenizer(fast, adds_bos)


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


def _looks_like_a_path(name: str) -> bool:
    """A Hub id is NAME or OWNER/NAME; all else can only have been meant as a path."""
    return (
        not name
        or name.startswith((".", "~", os.sep))
        or name.count("/") > 1
        or "\\" in name
        or name.lower().endswith(".gguf")
    )


def _tokenizer(tokenizer: Any) -> Tokenizer | None:
    if tokenizer is None or isinstance(tokenizer, Tokenizer):
        return tokenizer
    return _read_tokenizer(os.fspath(tokenizer)) if isinstance(tokenizer, (str, os.PathLike)) else Tokenizer(tokenizer)


def _device(device: str | torch.device) -> torch.device:
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
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise SettingError(f"dtype '{dtype}' is not one a model can be read in; use {', '.join(DTYPES)}")
    chosen: torch.dtype = getattr(torch, name)
    return chosen


def _device_map(device_map: Any) -> Any:
    if isinstance(device_map, str) and device_map not in DEVICE_MAPS:
        raise SettingError(f"--device-map is '{device_map}'; choose one of: {', '.join(DEVICE_MAPS)}")
    with needing("gguf", "--device-map"):
        import_module("accelerate")
    return device_map


def _refuse_device_map(options: _Options, name: str) -> None:
    if options.device_map is not None:
        raise SettingError(f"{name} cannot be spread over devices; --device-map is for safetensors checkpoints")


def _first_of(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
