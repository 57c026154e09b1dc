"""Reads the settings and the tensors' shapes of a checkpoint before it is loaded, and refuses those that do not fit.

Weights and settings must fit each other in full: nothing is left over, made up or rounded to whole numbers, and what
could not fit is refused before memory is taken for it.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from memlens.errors import FilesError, ModelError, ModelNotFound, UnsupportedModel
from memlens.files import read_limited
from memlens.models.huggingface import quiet_transformers
from memlens.models.refusals import Config, quantization, text_config

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # in the order in which transformers looks for them
_REAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_IMPLEMENTATIONS = (None, "eager", "sdpa", "batched_mm", "grouped_mm")  # parts of transformers itself
_COUNTS_LAYERS = re.compile(r"(n|num)_(hidden_|decoder_)?layers?|attention_types")
_MOST_LAYERS = 4096  # many times what any model has
_CONFIG_LIMIT = 16 << 20  # bytes of a configuration or of the index of weight files
_MOST_BUFFERS = 1 << 30  # bytes of masks and sinusoids, which no file holds


def check_config_file(folder: Path) -> None:
    path = folder / "config.json"
    if not path.is_file():
        gguf = sorted(file.name for file in folder.glob("*.gguf"))
        advice = f"name the file itself: {folder / gguf[0]}" if gguf else "give a folder as save_pretrained() writes it"
        raise ModelNotFound(f"{folder} holds no config.json; {advice}")
    try:
        config = json.loads(read_limited(path, _CONFIG_LIMIT))
    except (FilesError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not readable JSON ({one_line(error)}); get the checkpoint again") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(f"{path} names no model_type; give a folder as save_pretrained() writes it")


def refuse_adapter(place: str, name: str) -> None:
    """Refuse what only changes another model."""
    if _file_of(place, "adapter_config.json"):
        raise UnsupportedModel(
            f"{name} is an adapter (it has an adapter_config.json), not a whole model; merge it into its base model "
            "first (merge_and_unload() of peft) and name the folder of the result"
        )


def read_config(place: str, name: str, **options: Any) -> Config:
    """The configuration of a folder or Hub id."""
    from transformers import AutoConfig

    _refuse_many_layers(_settings(place, name), name)
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(place, trust_remote_code=False, **options)
    except Exception as error:
        if "gguf_file" in options and not isinstance(error, (ImportError, OSError, MemoryError)):  # its head is whole
            raise unsupported_gguf(name, one_line(error)) from error
        path = Path(place) / "config.json"
        if isinstance(error, ValueError) and path.is_file():
            content = json.loads(path.read_text(encoding="utf-8"))
            model_type = content.get("model_type") if isinstance(content, dict) else None
            raise UnsupportedModel(
                f"{name} is of the model type '{model_type}', which cannot be loaded ({one_line(error)})"
            ) from error
        raise ModelError(f"the configuration of {name} cannot be read ({one_line(error)})") from error
    for part in ("_attn_implementation", "_experts_implementation"):
        if getattr(config, part, None) not in _IMPLEMENTATIONS:
            # a checkpoint may name a program on the Hub here, which would be fetched and run
            setattr(config, part, None)
    return config


def unsupported_gguf(name: str, reason: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{name} cannot be read: transformers knows no such .gguf file ({reason}); name the folder or Hub id of the "
        "safetensors checkpoint that it was made from"
    )


def _settings(place: str, name: str) -> Any:
    """The settings in config.json; None where there is no such file, as beside a .gguf file."""
    path = _file_of(place, "config.json")
    try:
        return json.loads(read_limited(path, _CONFIG_LIMIT)) if path else None
    except (FilesError, ValueError, RecursionError) as error:
        raise ModelError(f"the configuration of {name} cannot be read ({one_line(error)})") from error


def refuse_untold_text(place: str, config: Config, name: str) -> None:
    """Refuse the configuration of a model of several parts that says nothing of its text model.

    transformers would take the sizes of some model of that type, which are not this one's.
    """
    settings, inner = _settings(place, name), text_config(config)
    if not isinstance(settings, dict) or inner is config:
        return
    width = getattr(inner, "hidden_size", None)
    for key in getattr(config, "sub_configs", {}):
        # older files tell the text model's sizes beside those of the other parts
        if getattr(config, key, None) is inner and not settings.get(key) and settings.get("hidden_size") != width:
            raise ModelError(
                f"{name}: config.json has no {key}, so nothing tells the sizes of its text model; get the "
                "configuration that belongs to its weights"
            )


def _refuse_many_layers(settings: Any, name: str) -> None:
    """A configuration makes lists as long as the layers it counts, so an absurd count is refused before it is made."""
    left = [("", settings)]
    while left:
        key, value = left.pop()
        if isinstance(value, dict):
            left += [(str(inner), below) for inner, below in value.items()]
        elif isinstance(value, list):
            left += [(key, below) for below in value]
        elif isinstance(value, int | float) and value > _MOST_LAYERS and _COUNTS_LAYERS.fullmatch(key):
            raise ModelError(f"{name}: {key} is {value} in config.json, more layers than a model has; mend it")


def refuse_misfit(name: str, config: Config, stored: Mapping[str, torch.Tensor], size: int) -> None:
    """Compare what the settings describe with the shapes of the stored tensors, before either takes memory.

    `size` is the bytes that the numbers take in their files.
    """
    if not stored:
        return  # reading them will say what is missing
    layers = getattr(text_config(config), "num_hidden_layers", 0)
    if layers > len(stored):
        raise ModelError(
            f"{name}: config.json says {layers:,} layers, but its weights are only {len(stored):,} "
            "tensors; get the configuration that belongs to them"
        )
    network = network_without_numbers(config, name)
    wanted = sum(parameter.numel() for parameter in network.parameters())
    if quantization(config) == "mxfp4":  # two numbers in a byte
        room = min(sum(tensor.numel() * (1 + (tensor.dtype == torch.uint8)) for tensor in stored.values()), 2 * size)
    else:
        room = min(sum(tensor.numel() for tensor in stored.values()), size // 2)  # a number takes two bytes at least
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in network.buffers())
    if wanted > 2 * room or buffers > _MOST_BUFFERS + size:  # twice: tied embeddings may be stored once
        raise ModelError(
            f"the weights of {name} hold {room:,} numbers, but its config.json describes a network of {wanted:,} and "
            f"{buffers:,} bytes of tables; get the configuration that belongs to them"
        )
    body = f"{network.base_model_prefix}."
    for parameter, _ in network.named_parameters():
        for key in (parameter, parameter.removeprefix(body)):
            if key in stored and stored[key].dtype not in _REAL:
                kind = str(stored[key].dtype).removeprefix("torch.")
                raise UnsupportedModel(
                    f"the weights of {name} are {kind} in {key}, as if quantized; use the unquantized checkpoint"
                )


def stored_tensors(place: str, name: str) -> tuple[dict[str, torch.Tensor], int]:
    """The tensors of a checkpoint by name, without their numbers, and the bytes of its files; none where none is."""
    from transformers.modeling_utils import load_state_dict

    tensors: dict[str, torch.Tensor] = {}
    size = 0
    try:
        for path in _weight_files(place):
            size += path.stat().st_size
            with quiet_transformers():
                tensors |= load_state_dict(path, map_location="meta")
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
            raise ValueError("something in them is not a tensor")
    except Exception as error:  # a damaged file makes its reader raise almost anything
        raise unreadable_weights(name, error) from error
    return tensors, size


def _weight_files(place: str) -> list[Path]:
    """The files that transformers will read: one, or those that an index names."""
    for file in _WEIGHTS:
        if path := _file_of(place, file):
            return [path]
        if index := _file_of(place, f"{file}.index.json"):
            names = sorted(set(json.loads(read_limited(index, _CONFIG_LIMIT))["weight_map"].values()))
            return [path for shard in names if (path := _file_of(place, shard))]
    return []


def _file_of(place: str, file: str) -> Path | None:
    """A file of a folder or Hub id; None where it has none of that name."""
    from transformers.utils import cached_file

    try:
        with quiet_transformers():
            path = cached_file(
                place, file, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
            )
    except (OSError, ValueError):
        return None  # loading will say why
    return Path(path) if path else None


def network_class(config: Config, name: str) -> Any:
    """The class of transformers that makes the network with its head: of text alone, or of text beside other media."""
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    for kind in (AutoModelForCausalLM, AutoModelForMultimodalLM):
        if type(config) in kind._model_mapping:
            return kind
    raise UnsupportedModel(
        f"{name} ({config.model_type}) cannot be read as memories: transformers has no language model of this type"
    )


def network_without_numbers(config: Config, name: str) -> Any:
    """The network that a configuration describes, its weights being shapes only."""
    from transformers.initialization import no_init_weights

    kind = network_class(config, name)
    try:
        with quiet_transformers(), torch.device("meta"), no_init_weights():
            network = kind.from_config(config)
            network.tie_weights()
            return network
    except Exception as error:  # settings that contradict each other fail wherever they meet
        raise ModelError(f"config.json of {name} describes no network ({one_line(error)}); mend it") from error


def unreadable_weights(name: str, error: Exception) -> ModelError:
    return ModelError(f"the weights of {name} cannot be read ({one_line(error)}); get the checkpoint again")


def one_line(error: Exception) -> str:
    """The beginning of an error's text, on one line and not too long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."
