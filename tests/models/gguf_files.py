"""Write .gguf files of tiny networks for every architecture that transformers supports."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers.integrations import GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from memlens.testing import VOCABULARY, tiny_tokenizer

ARCHITECTURES = tuple(sorted({*GGUF_CONFIG_MAPPING, "qwen35", "qwen35moe"} - {"general", "tokenizer"}))
_IN_FILES = {"qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss", "minimax_m2": "minimax-m2"}


def write_tokenizer(writer: Any, adds_bos: bool | None) -> None:
    model = json.loads(tiny_tokenizer().backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(model["vocab"], key=model["vocab"].get))
    writer.add_token_types([2, 3] + [1] * (VOCABULARY - 2))
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    if adds_bos is not None:
        writer.add_add_bos_token(adds_bos)


def write_architecture(path: Path, architecture: str, network: Any) -> Path:
    """Write a file with the settings and tensors of a network, named as transformers expects."""
    name = _IN_FILES.get(architecture, architecture)
    writer = gguf.GGUFWriter(path, name)
    writer.add_name("tiny")
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    for key, value in _settings(architecture, network.config).items():
        adders[type(value)](f"{name}.{key}", value)
    write_tokenizer(writer, True)
    for tensor_name, tensor in _tensors(name, network):
        writer.add_tensor(tensor_name, np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _settings(architecture: str, config: Any) -> dict[str, Any]:
    if architecture.startswith("qwen35"):
        return _settings_of_qwen35(config)
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # Gemma has one per kind of layer
    names = {key: name for key, name in GGUF_CONFIG_MAPPING[architecture].items() if name not in (None, -1)}
    named = {key: rope.get(name, getattr(config, name, None)) for key, name in names.items()}
    if architecture == "lfm2":
        heads = [config.num_key_value_heads * (kind == "full_attention") for kind in config.layer_types]
        named |= {"attention.head_count_kv": heads, "attention.layer_norm_rms_epsilon": config.norm_eps}
    return {key: value for key, value in named.items() if isinstance(value, bool | int | float | list)}


def _settings_of_qwen35(config: Any) -> dict[str, Any]:
    value_heads, rope = config.linear_num_value_heads, config.rope_parameters
    named = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "full_attention_interval": 4,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": value_heads,
        "ssm.inner_size": value_heads * config.linear_value_head_dim,
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_sections": [*rope.get("mrope_section", [11, 11, 10]), 0],
        "rope.dimension_count": int(config.head_dim * rope.get("partial_rotary_factor", 1.0)),
    }
    experts = {
        "feed_forward_length": "intermediate_size",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
    }
    return named | {key: getattr(config, name) for key, name in experts.items() if hasattr(config, name)}


def _names(name: str, network: Any) -> Iterator[tuple[str, str]]:
    """Return pairs (name in the file, name in the network)."""
    if not name.startswith("qwen35"):
        processor = TENSOR_PROCESSORS.get(name, TensorProcessor)(config=network.config.to_dict())
        yield from get_gguf_hf_weights_map(network, processor).items()
        return
    arch = next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    known = gguf.get_tensor_name_map(arch, network.config.num_hidden_layers)
    for own in network.state_dict():
        if own.endswith(".dt_bias"):
            yield f"blk.{own.split('.')[2]}.ssm_dt.bias", own
        elif in_file := known.get_name(own, try_suffixes=(".weight", ".bias")):
            yield in_file, own


def _tensors(name: str, network: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the tensors in the layout of files."""
    names: dict[str, list[str]] = {}
    for in_file, own in _names(name, network):
        names.setdefault(own, []).append(in_file)
    for own, tensor in network.state_dict().items():
        block, part = ".".join(own.split(".")[2:3]), own.rsplit(".", 1)[-1]
        in_file = sorted(names.get(own, ()))
        if part == "gate_up_proj":
            in_file = [f"blk.{block}.ffn_gate_exps", f"blk.{block}.ffn_up_exps"]
        if not in_file:
            continue
        parts = tensor.detach().chunk(len(in_file), 1) if part == "gate_up_proj" else [tensor.detach()]
        for one, numbers in zip(in_file, parts, strict=False):
            if name == "gpt2" and numbers.dim() == 2 and "embd" not in one and one != "output.weight":
                numbers = numbers.T
            elif "ffn_gate_inp_shexp" in one:
                numbers = numbers[0]
            elif "shortconv.conv" in one or one.endswith("ssm_conv1d.weight"):
                numbers = numbers[:, 0]
            elif one.endswith("ssm_a"):
                numbers = -numbers.exp()
            yield one if one.endswith(("weight", "bias", "ssm_a")) else f"{one}.weight", numbers
