"""`load` turns a Hub id, a folder, a .gguf file or a loaded object into a proven MemoryModel.

Weights come from safetensors, from a .gguf file (dequantized) or from a .bin file through torch's reader for plain
tensors. No code of a checkpoint is run and no object is unpickled. Configuration and weights must match completely:
no tensor is unused, missing or rounded to integers, and a mismatch is detected before memory is allocated.
Every failure is a one-line error.
"""

import contextlib
import io
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from memlens.errors import (
    FilesError,
    MemlensError,
    ModelError,
    ModelNotFound,
    SettingError,
    UnsupportedModel,
    needing,
)
from memlens.files import FileStamp, file_stamp, read_limited
from memlens.models.gguf import read_head
from memlens.models.huggingface import (
    Config,
    as_memories,
    check_config,
    quantization,
    quiet_transformers,
    text_config,
)
from memlens.models.memory_model import MemoryModel
from memlens.models.proof import prove as prove_memories
from memlens.models.tokenizer import Tokenizer, explain_panics

DTYPES = ("float32", "bfloat16", "float16", "float64")
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential", "cpu")
_BUNDLED = Path(__file__).parent.parent / "bundled" / "model"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "spiece.model", "vocab.txt")
_READ = {".safetensors", ".bin", ".pt", ".gguf", ".json", ".txt", ".model"}
# masks and frequencies that older versions of transformers stored
_OLD_TABLES = re.compile(r"(attn|attention)\.(masked_)?bias$|\.(rotary_emb|maybe_rotary)\.inv_freq$")


@dataclass(frozen=True)
class _Options:
    """The arguments of load(), except for the model."""

    tokenizer: Any
    device: torch.device
    dtype: torch.dtype | None  # None for the checkpoint's dtype on a GPU and float32 on a CPU
    device_map: Any

    def dtype_for(self, stored: torch.dtype = torch.float32) -> torch.dtype:
        """Return the dtype in which weights are loaded if the checkpoint has the dtype `stored`."""
        if self.dtype is not None:
            return self.dtype
        is_default = self.device.type == "cpu" or stored == torch.float64 or not _has_dtype(self.device, stored)
        return torch.float32 if is_default else stored


def load(
    model: str | os.PathLike[str] | MemoryModel | Any,
    *,
    tokenizer: Any = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    device_map: Any = None,
    prove: bool = True,
) -> MemoryModel:
    """Load a language model as memories, and prove that the memories are what the network computes.

    Args:
        model: A Hub id, a local folder, a .gguf file, "bundled", or a loaded transformers causal LM. A loaded model
            keeps its device and dtype and is switched to evaluation mode. A MemoryModel is returned unchanged.
        tokenizer: A tokenizer or the name of one. It replaces the checkpoint's own tokenizer. A loaded model needs
            a tokenizer to work with text.
        device: "auto", "cpu", "cuda", "mps" or another torch device. "auto" is a GPU if there is one that works.
        dtype: "float32", "bfloat16", "float16", "float64", or "auto": the checkpoint's dtype on a GPU and float32 on a
            CPU.
        device_map: Distributes the layers of a checkpoint over devices, as in transformers ("auto", "balanced", ...).
            Overrides `device`.
        prove: Run the proof. Without it, a wrongly recognized model goes unnoticed.

    Returns:
        The model.

    Raises:
        ModelNotFound: There is no such folder, file or Hub id.
        ModelError: The checkpoint is incomplete, damaged or inconsistent.
        UnsupportedModel: The model has no memories that memlens can read.
        SettingError: The device, dtype or device map is not available.

    Example:
        >>> loaded = memlens.load(model)
        >>> len(loaded.layers), loaded.layers[0].values.shape[0]
        (3, 40)
    """
    if isinstance(model, MemoryModel):
        return model
    if isinstance(model, (str, os.PathLike)):
        options = _Options(tokenizer, _device(device), None if dtype == "auto" else _dtype(dtype), device_map)
        _check_dtype_on_device(options)
        is_path = isinstance(model, os.PathLike) or _looks_like_a_path(model)
        before = _stamps(os.fspath(model))
        memory_model = _load_by_name(os.fspath(model), is_path, options)
        if before != _stamps(os.fspath(model)):
            raise ModelError(f"{model} changed while it was being read; run the command again when it is complete")
    else:
        memory_model = _wrap_object(model, _tokenizer(tokenizer))
    if prove:
        memory_model.proof = prove_memories(memory_model)
    else:
        memory_model.forget_probe()
    return memory_model


def _stamps(name: str) -> dict[str, FileStamp | None]:
    """Return the stamps of a file or of the files in a folder.

    A Hub id has no stamps, because its cached files never change.
    """
    try:
        path = Path(name).expanduser()
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        return {file.name: file_stamp(file) for file in files if file.suffix in _READ}  # training may write others
    except (OSError, RuntimeError):
        return {}


def _copy_mapped_weights_(network: Any) -> None:
    """Copy weights that are still mapped from a file, so that changes to the file do not affect them."""
    for weights in (*network.parameters(), *network.buffers()):
        if weights.device.type == "cpu":
            weights.data = weights.data.clone()


def check_model_exists(name: str) -> None:
    """Raise ModelNotFound if the model does not exist, without loading it."""
    if name == "bundled":
        if not _BUNDLED.is_dir():
            raise ModelNotFound("'bundled': this installation has no bundled model; use a Hub id or a folder")
    elif not (path := _expanded(name)).exists() or not name:
        if _looks_like_a_path(name):
            raise _no_such_path(name)
        _find_on_hub(name)
    elif path.is_dir() and not ((path / "model.pt").is_file() and (path / "dict.txt").is_file()):
        check_config_file(path)


def is_available_offline(name: str) -> bool:
    """Return True if the model can be loaded offline: from this package, a folder, a file or the Hub's cache."""
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
    except RuntimeError as error:  # raised for "~name" if there is no such user
        raise ModelNotFound(f"'{name}': no such home folder; use the full path") from error


def _no_such_path(name: str) -> ModelNotFound:
    return ModelNotFound(f"no such folder or file: '{name}'; use a folder with config.json, a .gguf file or a Hub id")


def bundled_folder() -> Path:
    """Return the folder of the bundled model, which may be missing from an installation."""
    return _BUNDLED


def _load_by_name(name: str, is_path: bool, options: _Options) -> MemoryModel:
    if name == "bundled":
        check_model_exists(name)
        return _load_folder(_BUNDLED, options, name="bundled", source="bundled")
    path = _expanded(name)
    if path.is_dir() and name:
        return _load_folder(path, options, name=path.resolve().name, source=str(path.resolve()))
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{name} is not a .gguf file; use a .gguf file or a folder with config.json")
        _check_no_device_map(options, name)
        return _load_gguf(path, options)
    if name and path.exists():
        raise ModelError(f"{name} is not a regular file; use a .gguf file or a folder with config.json")
    if is_path:
        raise _no_such_path(name)
    _find_on_hub(name)
    return _load_checkpoint(name, options, name=name, source=name)


def _load_folder(folder: Path, options: _Options, *, name: str, source: str) -> MemoryModel:
    if (folder / "model.pt").is_file() and (folder / "dict.txt").is_file():
        from memlens.models.fairseq import load_fairseq

        if options.tokenizer is not None:
            raise SettingError(f"{name} uses the words in its dict.txt; tokenizer= has no effect")
        _check_no_device_map(options, name)
        return load_fairseq(folder, options.device, options.dtype_for(), name=name, source=source)
    check_config_file(folder)
    if options.tokenizer is None and not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        raise ModelError(f"{folder} contains no tokenizer (such as tokenizer.json); add it or pass tokenizer=")
    return _load_checkpoint(str(folder), options, name=name, source=source)


def _load_checkpoint(place: str, options: _Options, *, name: str, source: str) -> MemoryModel:
    """Load the checkpoint of a local folder or a Hub id."""
    tokenizer = _tokenizer(options.tokenizer)
    _check_no_adapter(place, name)
    config = read_config(place, name)
    check_config(config, name)
    check_text_config(place, config, name)
    tensors, size = stored_tensors(place, name)
    _check_sizes(name, config, tensors, size)
    stored = _stored_dtype(tensors)
    dtype = options.dtype_for(stored)
    if options.device_map is None:
        network = _read_network(place, name, config, dtype).to(options.device)
    else:
        network = _read_network(place, name, config, dtype, device_map=_device_map(options.device_map))
    if any(tensor.dtype == dtype for tensor in tensors.values()):  # conversion has already copied other dtypes
        _copy_mapped_weights_(network)
    model = as_memories(network, tokenizer or _read_tokenizer(place), name=name, source=source)
    model.stored_dtype = stored
    return model


def _stored_dtype(tensors: Mapping[str, torch.Tensor]) -> torch.dtype:
    """Return the dtype of most numbers in a checkpoint, or float32 if that dtype is not one of `_REAL`."""
    counts = Counter[torch.dtype]()
    for tensor in tensors.values():
        counts[tensor.dtype] += tensor.numel()
    return next((dtype for dtype, _ in counts.most_common(1) if dtype in _REAL), torch.float32)


def _load_gguf(path: Path, options: _Options) -> MemoryModel:
    """Load the model and the tokenizer of a .gguf file. The metadata of the file state whether texts start with BOS."""
    tokenizer = _tokenizer(options.tokenizer)
    with needing("gguf", str(path), ModelError):  # transformers needs both packages to read .gguf files
        import_module("gguf")
        import_module("accelerate")
    head = read_head(path)
    folder, file = str(path.resolve().parent), path.name
    config = read_config(folder, file, gguf_file=file)
    check_config(config, file)
    try:
        _check_sizes(file, config, head.tensors, sum(4 * tensor.numel() for tensor in head.tensors.values()))
    except ModelError as error:
        raise _unsupported_gguf(file, "its tensors do not match the network of its settings") from error
    # without this, weights may stay quantized on some devices
    gguf_config = getattr(import_module("transformers"), "GgufConfig", None)
    dequantized = {} if gguf_config is None else {"quantization_config": gguf_config(dequantize=True)}
    with contextlib.redirect_stderr(io.StringIO()):  # hide a progress bar that transformers cannot switch off
        network = _read_network(folder, file, config, options.dtype_for(), gguf_file=file, **dequantized)
    if tokenizer is None:
        tokenizer = _read_tokenizer(folder, head.adds_bos, gguf_file=file)
    return as_memories(network.to(options.device), tokenizer, name=file, source=str(path.resolve()))


def _wrap_object(network: Any, tokenizer: Tokenizer | None) -> MemoryModel:
    from transformers import PreTrainedModel

    if not isinstance(network, PreTrainedModel):
        raise ModelError(
            f"{type(network).__name__} is not a model; use a Hub id, a folder, a .gguf file or a loaded causal LM"
        )
    name = getattr(network.config, "_name_or_path", "") or type(network).__name__
    check_config(network.config, name)
    if network.get_output_embeddings() is None:
        raise UnsupportedModel(
            f"{type(network).__name__} has no language modeling head; load it with AutoModelForCausalLM"
        )
    return as_memories(network, tokenizer, name=name, source="")


def _shape_mismatch(tensors: Mapping[str, torch.Tensor], config: Config, name: str) -> ModelError | None:
    """Return an error that names the first tensor whose shape does not match the configuration, if there is one."""
    network = network_without_weights(config, name)
    body = f"{network.base_model_prefix}."
    for key, parameter in network.named_parameters():
        tensor = tensors.get(key, tensors.get(key.removeprefix(body)))
        if tensor is not None and tensor.shape != parameter.shape:
            return ModelError(
                f"the weights of {name} do not match its config.json: {key} is {tuple(tensor.shape)} in the weights "
                f"and {tuple(parameter.shape)} in the configuration; use the configuration that belongs to them"
            )
    return None


def _read_network(place: str, name: str, config: Config, dtype: torch.dtype, **options: Any) -> Any:
    """Return the network with every weight from the checkpoint and without gradients."""
    kind = network_class(config, name)
    is_mxfp4 = quantization(config) == "mxfp4"
    if is_mxfp4:
        config.quantization_config["dequantize"] = True  # dequantize even if the device could run quantized weights
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
    except Exception as error:  # damaged files cause many types of exceptions
        # raised by transformers for tensors that the network does not have
        if isinstance(error, NotImplementedError) and "gguf_file" in options:
            raise _unsupported_gguf(name, one_line(error)) from error
        if "ignore_mismatched_sizes" in str(error):  # transformers logs the details instead of adding them to the error
            mismatch = None if "gguf_file" in options else _shape_mismatch(stored_tensors(place, name)[0], config, name)
            raise mismatch or ModelError(
                f"the weights of {name} do not match its config.json: the shapes of some tensors differ; "
                "use the configuration that belongs to them"
            ) from error
        raise _unreadable_weights(name, error) from error
    if missing := sorted(report["missing_keys"]):
        if "gguf_file" in options:
            raise _unsupported_gguf(name, f"{_list_first(missing)} are missing")
        raise ModelError(f"{name} is not a complete causal language model: its weights lack {_list_first(missing)}")
    # `unexpected_keys` already excludes tensors that transformers ignores for the model type
    if unused := sorted(key for key in report["unexpected_keys"] if not _OLD_TABLES.search(key)):
        raise ModelError(
            f"the weights of {name} do not match its config.json, whose network has no {_list_first(unused)}; "
            "use the configuration that belongs to them"
        )
    network.requires_grad_(False)
    if is_mxfp4:
        # dequantized weights have the shapes of their file, regardless of the configuration
        if mismatch := _shape_mismatch(dict(network.named_parameters()), config, name):
            raise mismatch
        network._weight_conversions = None  # otherwise save() would use the names of quantized tensors
        network.to(dtype)  # dequantized numbers are exact in bfloat16, so this loses nothing
    return network


def _read_tokenizer(place: str, adds_bos: bool | None = None, **options: Any) -> Tokenizer:
    """Return the tokenizer of a folder or Hub id."""
    from transformers import AutoTokenizer

    try:
        with quiet_transformers(), explain_panics(ModelError, f"the tokenizer of {place} cannot be read"):
            fast = AutoTokenizer.from_pretrained(place, trust_remote_code=False, **options)
    except MemlensError:
        raise
    except Exception as error:  # damaged files cause many types of exceptions
        reason = f"it has no entry {error}" if isinstance(error, KeyError) else one_line(error)
        raise ModelError(f"the tokenizer of {place} cannot be read ({reason})") from error
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
        raise ModelNotFound(f"'{name}' is not a local folder or file and not a valid Hub id; check the name") from error
    except OSError as error:
        if constants.HF_HUB_OFFLINE:
            advice = "HF_HUB_OFFLINE is set and it is not in the cache; download it first or unset the variable"
        else:
            advice = f"the Hub does not provide it ({one_line(error)}); check the name, the network and your access"
        raise ModelNotFound(f"'{name}' is not a local folder or file, and {advice}") from error


def _looks_like_a_path(name: str) -> bool:
    """Return True if a name cannot be a Hub id, which is NAME or OWNER/NAME."""
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
        if not torch.backends.mps.is_available():
            return torch.device("cpu")
        works = computes_like_cpu(torch.device("mps"))
        place = "the GPU of this Mac (mps)" if works else "the CPU, because the GPU (mps) failed a self-check"
        print(f"memlens: the model runs on {place}; --device selects another device", file=sys.stderr)
        return torch.device("mps" if works else "cpu")
    try:
        device = torch.device(device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().split("\n")[0]
        raise SettingError(f"device '{device}' is not available ({reason}); use auto or cpu") from error
    return device


def computes_like_cpu(device: torch.device) -> bool:
    """Return True if operations that memlens needs give the same results on a device as on the CPU."""
    inputs = torch.randn(2, 40, 40, generator=torch.Generator().manual_seed(0))
    numbers = torch.arange(1600) * 7 % 11
    try:
        on_device, on_cpu = (
            _compute_example(inputs.to(place), numbers.to(place)) for place in (device, torch.device("cpu"))
        )
        return all(
            torch.allclose(one.cpu(), other, rtol=1e-4, atol=1e-4) for one, other in zip(on_device, on_cpu, strict=True)
        )
    except (RuntimeError, TypeError):  # operations that the device does not have
        return False


def _compute_example(inputs: torch.Tensor, numbers: torch.Tensor) -> list[torch.Tensor]:
    """Return the results of some operations that networks and scans use."""
    states = torch.nn.functional.silu(inputs[0] @ inputs[1])
    places, order = torch.sort(numbers, stable=True)
    flat = states.reshape(-1)
    totals = torch.zeros(11, device=flat.device).index_add_(0, numbers, flat)
    extremes = torch.zeros(11, device=flat.device).scatter_reduce_(0, numbers, flat, "amax")
    return [torch.softmax(states, -1), order, torch.searchsorted(places, numbers), totals, extremes, numbers.cumsum(0)]


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise SettingError(f"dtype '{dtype}' is not supported; use auto, {', '.join(DTYPES)}")
    torch_dtype: torch.dtype = getattr(torch, name)
    return torch_dtype


def _check_dtype_on_device(options: _Options) -> None:
    """Raise SettingError if the device does not support the dtype, such as float64 on MPS."""
    if options.dtype is not None and not _has_dtype(options.device, options.dtype):
        name = str(options.dtype).removeprefix("torch.")
        raise SettingError(f"device '{options.device}' does not support {name}; use float32 or device cpu")


def _has_dtype(device: torch.device, dtype: torch.dtype) -> bool:
    try:
        torch.zeros(1, device=device, dtype=dtype)
    except (TypeError, RuntimeError):
        return False
    return True


def _device_map(device_map: Any) -> Any:
    if isinstance(device_map, str) and device_map not in DEVICE_MAPS:
        raise SettingError(f"--device-map is '{device_map}'; choose one of: {', '.join(DEVICE_MAPS)}")
    with needing("gguf", "--device-map"):
        import_module("accelerate")
    return device_map


def _check_no_device_map(options: _Options, name: str) -> None:
    if options.device_map is not None:
        raise SettingError(f"{name} cannot be distributed over devices; --device-map needs a safetensors checkpoint")


def _list_first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# Reading a checkpoint

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # in transformers' order of preference
_REAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_IMPLEMENTATIONS = (None, "eager", "sdpa", "batched_mm", "grouped_mm")  # implementations in transformers itself
_COUNTS_LAYERS = re.compile(r"(n|num)_(hidden_|decoder_)?layers?|attention_types")
_MOST_LAYERS = 4096  # far more layers than any model has
_CONFIG_LIMIT = 16 << 20  # maximum bytes of a configuration or of the index of weight files
_MOST_BUFFERS = 1 << 30  # maximum bytes of masks and sinusoids, which files do not contain


def check_config_file(folder: Path) -> None:
    """Raise an error if a folder has no config.json that names a model type."""
    path = folder / "config.json"
    if not path.is_file():
        gguf = sorted(file.name for file in folder.glob("*.gguf"))
        advice = f"use the file itself: {folder / gguf[0]}" if gguf else "use a folder written by save_pretrained()"
        raise ModelNotFound(f"{folder} contains no config.json; {advice}")
    try:
        config = json.loads(read_limited(path, _CONFIG_LIMIT))
    except (FilesError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not readable JSON ({one_line(error)}); download the checkpoint again") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(f"{path} has no model_type; use a folder written by save_pretrained()")


def _check_no_adapter(place: str, name: str) -> None:
    """Raise UnsupportedModel for an adapter, which only modifies another model."""
    if _file_of(place, "adapter_config.json"):
        raise UnsupportedModel(
            f"{name} is an adapter (it has an adapter_config.json), not a complete model; merge it into its base model "
            "first (merge_and_unload() in peft) and use the resulting folder"
        )


def read_config(place: str, name: str, **options: Any) -> Config:
    """Return the configuration of a folder or Hub id."""
    from transformers import AutoConfig

    _check_layer_counts(_read_settings(place, name), name)
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(place, trust_remote_code=False, **options)
    except Exception as error:
        if "gguf_file" in options and not isinstance(
            error, (ImportError, OSError, MemoryError)
        ):  # the head of a .gguf file was already checked
            raise _unsupported_gguf(name, one_line(error)) from error
        if isinstance(error, ZeroDivisionError):
            content = _read_settings(place, name) or {}
            zeros = [key for key, value in content.items() if type(value) is int and value == 0 and "_id" not in key]
            raise ModelError(f"config.json of {name} does not describe a network: {_list_first(zeros)} is 0") from error
        path = Path(place) / "config.json"
        if isinstance(error, ValueError) and path.is_file():
            content = json.loads(path.read_text(encoding="utf-8"))
            model_type = content.get("model_type") if isinstance(content, dict) else None
            raise UnsupportedModel(
                f"{name} has the model type '{model_type}', which cannot be loaded ({one_line(error)})"
            ) from error
        raise ModelError(f"the configuration of {name} cannot be read ({one_line(error)})") from error
    for part in ("_attn_implementation", "_experts_implementation"):
        if getattr(config, part, None) not in _IMPLEMENTATIONS:
            # a checkpoint could name code on the Hub here, which transformers would download and run
            setattr(config, part, None)
    return config


def _unsupported_gguf(name: str, reason: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{name} cannot be read: transformers does not support this .gguf file ({reason}); use the safetensors "
        "checkpoint that it was made from"
    )


def _read_settings(place: str, name: str) -> Any:
    """Return the content of config.json, or None if there is no such file (a .gguf file needs none)."""
    path = _file_of(place, "config.json")
    try:
        return json.loads(read_limited(path, _CONFIG_LIMIT)) if path else None
    except (FilesError, ValueError, RecursionError) as error:
        raise ModelError(f"the configuration of {name} cannot be read ({one_line(error)})") from error


def check_text_config(place: str, config: Config, name: str) -> None:
    """Raise ModelError if the configuration of a multimodal model does not describe its text model.

    In that case, transformers would use default sizes, which differ from the sizes of this model.
    """
    settings, inner = _read_settings(place, name), text_config(config)
    if not isinstance(settings, dict) or inner is config:
        return
    width = getattr(inner, "hidden_size", None)
    for key in getattr(config, "sub_configs", {}):
        # older configurations store the sizes of the text model at the top level
        if getattr(config, key, None) is inner and not settings.get(key) and settings.get("hidden_size") != width:
            raise ModelError(
                f"{name}: config.json has no {key}, so the sizes of its text model are unknown; use the configuration "
                "that belongs to its weights"
            )


def _check_layer_counts(settings: Any, name: str) -> None:
    """Raise ModelError for absurdly large layer counts, because transformers creates lists of that length."""
    entries = [("", settings)]
    while entries:
        key, value = entries.pop()
        if isinstance(value, dict):
            entries += [(str(inner), below) for inner, below in value.items()]
        elif isinstance(value, list):
            entries += [(key, below) for below in value]
        elif isinstance(value, int | float) and value > _MOST_LAYERS and _COUNTS_LAYERS.fullmatch(key):
            raise ModelError(f"{name}: {key} is {value} in config.json, more layers than any model has")


def _check_sizes(name: str, config: Config, tensors: Mapping[str, torch.Tensor], size: int) -> None:
    """Raise ModelError if the stored tensors do not fit the configuration, before memory is allocated.

    Args:
        name: Name of the model in error messages.
        config: The configuration.
        tensors: The stored tensors, without data.
        size: The size of the weight files in bytes.
    """
    if not tensors:
        return  # a missing file is reported when the model is loaded
    layers = getattr(text_config(config), "num_hidden_layers", 0)
    if layers > len(tensors):
        raise ModelError(
            f"{name}: config.json describes {layers:,} layers, but there are only {len(tensors):,} tensors; "
            "use the configuration that belongs to them"
        )
    network = network_without_weights(config, name)
    required = sum(parameter.numel() for parameter in network.parameters())
    if quantization(config) == "mxfp4":  # two weights per byte
        available = min(
            sum(tensor.numel() * (1 + (tensor.dtype == torch.uint8)) for tensor in tensors.values()), 2 * size
        )
    else:
        available = min(sum(tensor.numel() for tensor in tensors.values()), size // 2)  # at least two bytes per number
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in network.buffers())
    if required > 2 * available or buffers > _MOST_BUFFERS + size:  # tied embeddings are stored once
        raise ModelError(
            f"the weights of {name} contain {available:,} numbers, but its config.json describes a network of "
            f"{required:,} numbers and {buffers:,} bytes of tables; use the configuration that belongs to them"
        )
    body = f"{network.base_model_prefix}."
    for parameter, _ in network.named_parameters():
        for key in (parameter, parameter.removeprefix(body)):
            if key in tensors and tensors[key].dtype not in _REAL:
                kind = str(tensors[key].dtype).removeprefix("torch.")
                raise UnsupportedModel(
                    f"the weights of {name} are quantized ({kind} in {key}); use the unquantized checkpoint"
                )


def stored_tensors(place: str, name: str) -> tuple[dict[str, torch.Tensor], int]:
    """Return the tensors of a checkpoint by name, without data, and the size of its files in bytes."""
    from transformers.modeling_utils import load_state_dict

    tensors: dict[str, torch.Tensor] = {}
    size = 0
    try:
        for path in _weight_files(place):
            size += path.stat().st_size
            with path.open("rb"):  # safetensors reports "No such file" if permission is denied
                pass
            with quiet_transformers():
                tensors |= load_state_dict(path, map_location="meta")
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
            raise ValueError("they contain something that is not a tensor")
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.strerror else one_line(error)
        raise ModelError(f"the weights of {name} cannot be read ({reason})") from error
    except Exception as error:  # damaged files cause many types of exceptions
        raise _unreadable_weights(name, error) from error
    return tensors, size


def _weight_files(place: str) -> list[Path]:
    """Return the weight files that transformers will read: a single file, or the files that an index file names."""
    for file in _WEIGHTS:
        if path := _file_of(place, file):
            return [path]
        if index := _file_of(place, f"{file}.index.json"):
            names = sorted(set(json.loads(read_limited(index, _CONFIG_LIMIT))["weight_map"].values()))
            return [path for shard in names if (path := _file_of(place, shard))]
    return []


def _file_of(place: str, file: str) -> Path | None:
    """Return a file of a folder or Hub id, or None if it does not exist."""
    from transformers.utils import cached_file

    try:
        with quiet_transformers():
            path = cached_file(
                place, file, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
            )
    except (OSError, ValueError):
        return None  # the reason is reported when the model is loaded
    return Path(path) if path else None


def network_class(config: Config, name: str) -> Any:
    """Return the transformers class that builds the network with its head, for text-only or multimodal models."""
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    for kind in (AutoModelForCausalLM, AutoModelForMultimodalLM):
        if type(config) in kind._model_mapping:
            return kind
    raise UnsupportedModel(
        f"{name} ({config.model_type}) cannot be read as memories: transformers has no language model of this type"
    )


def network_without_weights(config: Config, name: str) -> Any:
    """Return the network of a configuration on the meta device, without weights."""
    from transformers.initialization import no_init_weights

    kind = network_class(config, name)
    try:
        with quiet_transformers(), torch.device("meta"), no_init_weights():
            network = kind.from_config(config)
            network.tie_weights()
            return network
    except ZeroDivisionError as error:
        settings, defaults = text_config(config).to_dict(), type(text_config(config))().to_dict()
        zeros = [key for key, value in settings.items() if type(value) is int and value == 0 and defaults.get(key)]
        raise ModelError(f"config.json of {name} does not describe a network: {_list_first(zeros)} is 0") from error
    except Exception as error:  # contradictory settings can fail anywhere
        raise ModelError(f"config.json of {name} does not describe a network ({one_line(error)})") from error


def _unreadable_weights(name: str, error: Exception) -> ModelError:
    return ModelError(f"the weights of {name} cannot be read ({one_line(error)}); download the checkpoint again")


def one_line(error: Exception) -> str:
    """Return the text of an error on one line, truncated to 160 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."
