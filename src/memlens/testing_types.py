"""A tiny random network of every causal LM type of the installed transformers, for tests and for the table in the docs.

    types = causal_types()                        # "gpt2", "llama", ...
    types = composite_types()                     # "llava", "qwen2_vl", ...: text beside images, video or sound
    network = tiny_network("qwen3_moe")           # NotBuildable where this machine or these sizes cannot make one
    kinds = kinds_of_memories("qwen3_moe")        # {"routed"}, or why there are none

No type is described here: the default settings of each are made small by the names of the settings. The few that need
more are listed in _MORE. A type that comes with a later transformers needs no change.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memlens.errors import UnsupportedModel
from memlens.models.checkpoint import network_class, network_without_numbers
from memlens.models.huggingface import quiet_transformers, refuse_config
from memlens.models.load import load

WIDTH, MEMORIES, LAYERS, VOCABULARY, CONTEXT = 32, 44, 4, 97, 64
_HEADS, _HEAD, _SCALE = 4, 8, 0.7

# the first pattern that a setting's whole name fits says what it becomes
_SMALL: tuple[tuple[str, Any], ...] = (
    (r"pad_token_id", 0),
    (r"(bos|sep|cls|mask|unk|decoder_start)_token_id", 1),
    (r"eos_token_id", 2),
    (r"codebook_size", 128),
    (r"(decoder_)?vocab_size(_per_layer_input)?|audio_vocab_size|\w+_vocab_size", VOCABULARY),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k|moe_top_k|top_k_experts|num_selected_experts", 2),
    (r"(n|num|moe_num)(_local|_routed)?_experts|zero_expert_num", 4),
    (r"n_group|topk_group|num_expert_group|n_groups|mamba_n_groups|o_groups", 1),
    (
        r"(.*_)?intermediate_size(_mlp)?|(decoder_|encoder_)?ffn_dim|n_inner|\w*ffn_hidden_size|dim_ff|dff|d_ff|d_inner",
        MEMORIES,
    ),
    (r"feed_forward_size|mlp_dim", MEMORIES),
    (
        r"((n|num)(_hidden|_decoder|_encoder)?_)?layers?|(de|en)coder_layers|depth|num_blocks|\w*_num_hidden_layers",
        LAYERS,
    ),
    (r"num_global_layers|num_layers_per_stack", LAYERS),
    (r".*(key_value_heads|kv_heads|query_groups|linear_num_key_heads)", 2),
    (r".*(attention_heads|n_heads?|num_heads|num_value_heads|index_n_heads|n_mamba_heads)", _HEADS),
    (r"qk_head_dim", 2 * _HEAD),
    (r"(.*_)?head_dim|kv_channels|d_kv|d_head|dim_head|attention_head_size|mamba_d_head|mamba_headdim", _HEAD),
    (r"rotary_dim", 4),
    (r"(.*_)?rank", _HEAD),
    (r"max_position_embeddings|original_max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length", CONTEXT),
    (r"model_max_length|max_(target|source)_positions", CONTEXT),
    (r"(.*_)?(sliding_)?window(_size)?|local_attention|attention_chunk_size", 5),
    (r"mamba_d_state|(ssm_)?state_size|.*chunk_size", _HEAD),
    (
        r"hidden_(size|dim)|d_model|n_embd|word_embed_proj_dim|embedding_size|emb(ed)?_dim|embedding_dim|attention_hidden_size",
        WIDTH,
    ),
    (r"lru_width|(out|backbone)_hidden_size|hidden_size_global|input_embedding_size|output_embedding_size", WIDTH),
    (r"residual_multiplier|embedding_multiplier|lm_head_multiplier|logit_scale|logits_scaling", _SCALE),
    (r"mlp_multipliers", [0.6, 1.7]),
    (r"is_decoder", True),
)
_MAMBA = {"mamba_n_heads": _HEADS, "mamba_d_head": 2 * WIDTH // _HEADS}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, "mrope_section": [2, 1, 1]}
_MROPE = {"text_config": {"rope_parameters": _ROPE}}
_MORE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga", "paddleocr_vl", "qwen2_vl"), _MROPE),
    **dict.fromkeys(("qwen2_5_vl", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"), _MROPE),
    "bamba": _MAMBA,
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 2 * WIDTH},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4": {"text_config": {"hidden_size_per_layer_input": 0}},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "granitemoehybrid": _MAMBA,
    "hunyuan_v1_dense": {"head_dim": _HEAD},
    "hunyuan_v1_moe": {"head_dim": _HEAD},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "mamba2": {"head_dim": 2 * WIDTH // _HEADS},
    "ministral": {"head_dim": _HEAD},
    "moshi": {"codebook_size": 128},
    "nemotron": {"num_key_value_heads": 2, "head_dim": _HEAD},
    "reformer": {"axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 16]},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}


class NotBuildable(Exception):  # noqa: N818
    """The reason why there is no tiny network of a type, in one line."""


def causal_types() -> tuple[str, ...]:
    """Every model type that transformers' AutoModelForCausalLM knows, by name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def composite_types() -> tuple[str, ...]:
    """Every other model type that transformers has a language model of: its text stack lies beside other media's."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    return tuple(sorted(set(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES) - set(causal_types())))


def kinds_of_memories(model_type: str) -> set[str] | UnsupportedModel | NotBuildable:
    """The kinds of memories that are proven in a tiny network of a type, or why there are none."""
    try:
        try:
            model = load(tiny_network(model_type))
        except NotBuildable:
            with _built():
                usual = _config_class(model_type)()
            refuse_config(usual, model_type)  # its settings alone may speak against it
            raise
    except (UnsupportedModel, NotBuildable) as error:
        return error
    return {group.kind for layer in model.layers for group in layer.groups}


def tiny_network(model_type: str, seed: int = 0, **overrides: Any) -> Any:
    """A small causal LM of a type with large random weights, in evaluation mode, that has run once."""
    config = tiny_config(model_type, **overrides)
    with _built(), torch.no_grad():
        described = network_without_numbers(config, model_type)
        if sum(parameter.numel() for parameter in described.parameters()) > 10**7:
            raise NotBuildable("some of its sizes are settings that were not made small")
        network = network_class(config, model_type).from_config(config)
        randomize(network, seed)
        network.eval()(input_ids=torch.arange(6).reshape(1, 6), use_cache=False)
    return network


def tiny_config(model_type: str, **overrides: Any) -> Any:
    """The default settings of a type, made small."""
    with _built():
        kind = _config_class(model_type)
        return kind(**_merged(_small(kind()), _MORE.get(model_type, {}) | overrides))


def _config_class(model_type: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


@contextmanager
def _built() -> Iterator[None]:
    """Around code of transformers: what it stumbles over is NotBuildable."""
    try:
        with quiet_transformers():
            yield
    except NotBuildable:
        raise
    except Exception as error:
        raise NotBuildable(" ".join(f"{type(error).__name__}: {error}".split())[:160]) from error


def randomize(network: Any, seed: int = 0) -> None:
    """Large random weights: matrices that about keep a state's size, vectors shifted around what they begin at."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * (0.3 if parameter.dim() < 2 else 0.25)
            parameter.copy_(parameter + noise if parameter.dim() < 2 else noise)
    network.tie_weights()


def _merged(settings: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    inner = {name: settings[name] | value for name, value in more.items() if isinstance(settings.get(name), dict)}
    return settings | more | inner


def _small(config: Any) -> dict[str, Any]:
    """The settings of a configuration, and of those inside it, that decide sizes."""
    small: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        inner = config.__dict__.get(name)
        if hasattr(inner, "to_dict") and hasattr(inner, "model_type"):
            small[name] = _small(inner)
        elif value is not None and (not isinstance(value, bool | str) or name == "is_decoder"):
            fitting = [becomes for pattern, becomes in _SMALL if re.fullmatch(pattern, name)]
            if fitting:
                small[name] = fitting[0]
    if "kv_lora_rank" in small:  # latent attention has as many keys as queries
        small["num_key_value_heads"] = _HEADS
    return small
