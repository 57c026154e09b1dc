"""Tiny networks with random weights for tests, built in memory and without network access.

    network = tiny_model("llama")                 # a transformers LlamaForCausalLM
    memlens.models.load(network, tokenizer=tiny_tokenizer())
    save_tiny(folder, "gpt2")                     # a checkpoint folder for load()

`tiny_model` builds selected families and mixtures of experts. Their sizes are unusual on purpose (3 layers, width 24,
40 memories, 97 tokens), and all weights, biases and gains are random and large, so that a transposed matrix, a missing
bias or a misread gain changes the results.

    types = causal_types()                        # "gpt2", "llama", ...
    types = composite_types()                     # "llava", "qwen2_vl", ...: multimodal models
    network = tiny_network("qwen3_moe")           # raises NotBuildable if it cannot be built
    kinds = kinds_of_memories("qwen3_moe")        # {"routed"}, or the error that states why there are none

`tiny_network` builds any model type of the installed transformers. It recognizes the sizes in the default configuration
by their names and replaces them. `_extra_settings` lists additional settings that some types need.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as RawTokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from memlens.errors import UnsupportedModel
from memlens.models.huggingface import check_config, quiet_transformers
from memlens.models.load import load, network_class, network_without_weights

LAYERS, WIDTH, MEMORIES, VOCABULARY, CONTEXT = 3, 24, 40, 97, 32

_HEADS = {"num_attention_heads": 3, "num_hidden_layers": LAYERS, "hidden_size": WIDTH}
_ROTARY = _HEADS | {"intermediate_size": MEMORIES, "max_position_embeddings": CONTEXT}
_GROUPED = _ROTARY | {"num_key_value_heads": 1, "head_dim": 8}

_SETTINGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": 3, "n_inner": MEMORIES, "n_positions": CONTEXT},
    "gpt_neo": _HEADS
    | {
        "intermediate_size": MEMORIES,
        "max_position_embeddings": CONTEXT,
        "attention_types": [[["global", "local", "global"], 1]],
        "window_size": 4,
    },
    "gpt_neox": _ROTARY,
    "gptj": {
        "n_layer": LAYERS,
        "n_embd": WIDTH,
        "n_head": 3,
        "n_inner": MEMORIES,
        "n_positions": CONTEXT,
        "rotary_dim": 4,
    },
    "opt": _HEADS | {"ffn_dim": MEMORIES, "max_position_embeddings": CONTEXT, "word_embed_proj_dim": WIDTH},
    "bloom": {"n_layer": LAYERS, "hidden_size": WIDTH, "n_head": 3},  # Bloom always has 4 * hidden_size memories
    "falcon": _HEADS | {"ffn_hidden_size": MEMORIES, "max_position_embeddings": CONTEXT, "bias": True},
    "phi": _ROTARY,
    "llama": _GROUPED | {"mlp_bias": True},
    "mistral": _GROUPED | {"sliding_window": 5},
    "qwen2": _GROUPED,
    "qwen3": _GROUPED,
    "gemma": _GROUPED,
    "gemma2": _GROUPED | {"query_pre_attn_scalar": 8, "sliding_window": 5, "final_logit_softcapping": 5.0},
    "gemma3_text": _GROUPED | {"query_pre_attn_scalar": 8, "sliding_window": 5},
    "olmo2": _GROUPED,
    "stablelm": _GROUPED | {"use_qkv_bias": True},
    "starcoder2": _GROUPED,
}

FAMILIES: tuple[str, ...] = tuple(_SETTINGS)

_EXPERTS = _GROUPED | {"num_experts_per_tok": 2, "num_local_experts": 5, "num_experts": 5}
_MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": _EXPERTS | {"intermediate_size": 20},
    "qwen2_moe": _EXPERTS
    | {"moe_intermediate_size": 20, "shared_expert_intermediate_size": 12, "mlp_only_layers": [1]},  # layer 1 is dense
    "qwen3_moe": _EXPERTS | {"moe_intermediate_size": 20},
    "olmoe": _EXPERTS | {"intermediate_size": 20},
    "gpt_oss": _EXPERTS | {"intermediate_size": 20, "sliding_window": 5, "rope_parameters": {"rope_type": "default"}},
    "deepseek_v3": _HEADS
    | {
        "intermediate_size": MEMORIES,
        "moe_intermediate_size": 20,
        "max_position_embeddings": CONTEXT,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 3,
        "q_lora_rank": None,
        "kv_lora_rank": 10,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 6,
        "v_head_dim": 8,
    },
    "granitemoe": _EXPERTS | {"intermediate_size": 20, "residual_multiplier": 0.3, "logits_scaling": 2.0},
    "jamba": _EXPERTS
    | {
        "intermediate_size": 20,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 4,
        "mamba_d_conv": 2,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
}
MIXTURES: tuple[str, ...] = tuple(_MIXTURES)


def tiny_model(family: str, seed: int = 0, **overrides: Any) -> Any:
    """Return a tiny causal LM of a family (its model_type) in evaluation mode. `overrides` change its config."""
    settings = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": None}
    config = AutoConfig.for_model(family, **(settings | (_SETTINGS | _MIXTURES)[family] | overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # some model types initialize vectors randomly (gpt-oss: its attention sinks)
        network = AutoModelForCausalLM.from_config(config)
    randomize(network, seed)
    return network.eval()


def randomize(network: Any, seed: int = 0) -> None:
    """Set large random weights. Matrices roughly preserve the norm of a state, and vectors are shifted at random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * (0.3 if parameter.dim() < 2 else 0.25)
            parameter.copy_(parameter + noise if parameter.dim() < 2 else noise)
    network.tie_weights()


_TEXT = """The river runs to the sea. The press was free in the city of Paris, and the people of the city read the news.
In 1990 a café opened near the river; it was the first of its kind. Rain fell on the hills, and the rivers rose.
The end of the war came in the spring, as the papers of the day had said it would."""


def tiny_tokenizer(adds_bos: bool = False, style: str = "bytes") -> PreTrainedTokenizerFast:
    """Return a tokenizer with 97 tokens: byte-level BPE as in GPT-2 or, with `style="spaces"`, BPE as in Llama 2."""
    raw = RawTokenizer(models.BPE(unk_token="<unk>"))
    if style == "bytes":
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        raw.decoder = decoders.ByteLevel()
    elif style == "spaces":
        raw.pre_tokenizer = pre_tokenizers.Metaspace()
        raw.decoder = decoders.Metaspace()
    else:
        raise ValueError(f"style must be 'bytes' or 'spaces', not {style!r}")
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<unk>", "<s>"], show_progress=False)
    raw.train_from_iterator([_TEXT], trainer)
    if adds_bos:
        raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", bos_token="<s>", clean_up_tokenization_spaces=False
    )


def save_tiny(
    folder: str | os.PathLike[str], family: str, seed: int = 0, *, adds_bos: bool = False, **overrides: Any
) -> Path:
    """Write a checkpoint folder with save_pretrained() and return its path."""
    path = Path(folder)
    with quiet_transformers():
        tiny_model(family, seed, **overrides).save_pretrained(path)
        tiny_tokenizer(adds_bos).save_pretrained(path)
    return path


# Every model type of transformers


@dataclass(frozen=True)
class Sizes:
    """The sizes of a tiny network."""

    width: int = 32
    memories: int = 44
    layers: int = 4
    heads: int = 4
    key_heads: int = 2
    head_width: int = 8
    experts: int = 4
    tied: bool | None = None  # True if embeddings are tied; None for the default of the model type

    @property
    def mamba_head_width(self) -> int:
        return 2 * self.width // self.heads


USUAL_SIZES = Sizes()
OTHER_SIZES = Sizes(width=48, memories=52, layers=2, heads=6, key_heads=3, head_width=16, experts=5, tied=True)
TYPE_VOCABULARY, TYPE_CONTEXT, _SCALE = 97, 64, 0.7


def _patterns(sizes: Sizes) -> tuple[tuple[str, Any], ...]:
    """Return pairs (pattern, value). A setting gets the value of the first pattern that matches its full name."""
    return (
        (r"pad_token_id", 0),
        (r"(bos|sep|cls|mask|unk|decoder_start)_token_id", 1),
        (r"eos_token_id", 2),
        (r"codebook_size", 128),
        (r"(decoder_)?vocab_size(_per_layer_input)?|audio_vocab_size|\w+_vocab_size", TYPE_VOCABULARY),
        (r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k|moe_top_k|top_k_experts|num_selected_experts", 2),
        (r"(n|num|moe_num)(_local|_routed)?_experts|zero_expert_num", sizes.experts),
        (r"n_group|topk_group|num_expert_group|n_groups|mamba_n_groups|o_groups", 1),
        (r"(.*_)?intermediate_size(_mlp)?|(decoder_|encoder_)?ffn_dim|n_inner|\w*ffn_hidden_size", sizes.memories),
        (r"dim_ff|dff|d_ff|d_inner|feed_forward_size|mlp_dim", sizes.memories),
        (r"((n|num)(_hidden|_decoder|_encoder)?_)?layers?|(de|en)coder_layers|depth|num_blocks", sizes.layers),
        (r"\w*_num_hidden_layers|num_global_layers|num_layers_per_stack", sizes.layers),
        (r".*(key_value_heads|kv_heads|query_groups|linear_num_key_heads)", sizes.key_heads),
        (r".*(attention_heads|n_heads?|num_heads|num_value_heads|index_n_heads|n_mamba_heads)", sizes.heads),
        (r"qk_head_dim", 2 * sizes.head_width),
        (r"(.*_)?head_dim|kv_channels|d_kv|d_head|dim_head", sizes.head_width),
        (r"attention_head_size|mamba_d_head|mamba_headdim", sizes.head_width),
        (r"rotary_dim", 4),
        (r"(.*_)?rank", sizes.head_width),
        (r"(original_)?max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length", TYPE_CONTEXT),
        (r"model_max_length|max_(target|source)_positions", TYPE_CONTEXT),
        (r"(.*_)?(sliding_)?window(_size)?|local_attention|attention_chunk_size", 5),
        (r"mamba_d_state|(ssm_)?state_size|.*chunk_size", sizes.head_width),
        (r"hidden_(size|dim)|d_model|n_embd|word_embed_proj_dim|embedding_size|emb(ed)?_dim", sizes.width),
        (r"embedding_dim|attention_hidden_size|lru_width|(out|backbone)_hidden_size", sizes.width),
        (r"hidden_size_global|input_embedding_size|output_embedding_size", sizes.width),
        (r"residual_multiplier|embedding_multiplier|lm_head_multiplier|logit_scale|logits_scaling", _SCALE),
        (r"mlp_multipliers", [0.6, 1.7]),
        (r"is_decoder", True),
    )


def _extra_settings(model_type: str, sizes: Sizes) -> dict[str, Any]:
    """Return settings that a model type needs in addition to those that match a pattern."""
    mamba = {"mamba_n_heads": sizes.heads, "mamba_d_head": sizes.mamba_head_width}
    sections = [sizes.head_width // 4, sizes.head_width // 8, sizes.head_width // 8]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, "mrope_section": sections}
    mrope = {"text_config": {"rope_parameters": rope}}
    several_rope_sections = (
        *("glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga", "paddleocr_vl", "qwen2_vl"),
        *("qwen2_5_vl", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"),
    )
    if model_type in several_rope_sections:
        return mrope
    linear_attention = {"layer_types": ["linear_attention"] * sizes.layers}
    settings: dict[str, dict[str, Any]] = {
        "bamba": mamba,
        "deepseek_v2": {"num_experts_per_tok": 2},
        "dots1": {"n_routed_experts": sizes.experts, "n_shared_experts": 1, "num_experts_per_tok": 2},
        "falcon_h1": mamba | {"mamba_d_ssm": 2 * sizes.width},
        "gemma3n_text": {"num_kv_shared_layers": 0},
        "gemma4": {"text_config": {"hidden_size_per_layer_input": 0}},
        "gemma4_text": {"hidden_size_per_layer_input": 0},
        "gpt_neo": {"attention_types": [[["global", "local"], sizes.layers // 2]]},
        "granitemoehybrid": mamba,
        "hunyuan_v1_dense": {"head_dim": sizes.head_width},
        "hunyuan_v1_moe": {"head_dim": sizes.head_width},
        "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"][-sizes.layers :]},
        "mamba2": {"head_dim": sizes.mamba_head_width},
        "ministral": {"head_dim": sizes.head_width},
        "moshi": {"codebook_size": 128},
        "nemotron": {"num_key_value_heads": sizes.key_heads, "head_dim": sizes.head_width},
        "qwen4_exp": {"text_config": linear_attention},
        "qwen4_exp_text": linear_attention,
        "reformer": {"axial_pos_shape": [8, 8], "axial_pos_embds_dim": [sizes.width // 2, sizes.width // 2]},
        "xmod": {"default_language": "en_XX"},
        "zaya": {"num_experts_per_tok": 1},
    }
    return settings.get(model_type, {})


class NotBuildable(Exception):  # noqa: N818
    """No tiny network of this type can be built. The one-line message gives the reason."""


def causal_types() -> tuple[str, ...]:
    """Return every model type of transformers' AutoModelForCausalLM."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def composite_types() -> tuple[str, ...]:
    """Return the multimodal model types that contain a language model and are not in `causal_types`."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    return tuple(sorted(set(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES) - set(causal_types())))


def kinds_of_memories(
    model_type: str, sizes: Sizes = USUAL_SIZES, seed: int = 0
) -> set[str] | UnsupportedModel | NotBuildable:
    """Return the kinds of memories in a tiny network of a type, or the error that states why it has none."""
    try:
        try:
            model = load(tiny_network(model_type, seed, sizes))
        except NotBuildable:
            with _not_buildable_on_error():
                default = _config_class(model_type)()
            check_config(default, model_type)  # the configuration alone may show that the type is unsupported
            raise
    except (UnsupportedModel, NotBuildable) as error:
        return error
    return {group.kind for layer in model.layers for group in layer.groups}


def tiny_network(model_type: str, seed: int = 0, sizes: Sizes = USUAL_SIZES, **overrides: Any) -> Any:
    """Return a tiny causal LM of a type with large random weights, in evaluation mode, after one test run."""
    config = tiny_config(model_type, sizes, **overrides)
    with _not_buildable_on_error(), torch.no_grad():
        outline = network_without_weights(config, model_type)
        if sum(parameter.numel() for parameter in outline.parameters()) > 10**7:
            raise NotBuildable("no pattern matches the names of some of its size settings")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = network_class(config, model_type).from_config(config)
        randomize(network, seed)
        network.eval()(input_ids=torch.arange(6).reshape(1, 6), use_cache=False)
    return network


def tiny_config(model_type: str, sizes: Sizes = USUAL_SIZES, **overrides: Any) -> Any:
    """Return the default configuration of a type with tiny sizes."""
    with _not_buildable_on_error():
        kind = _config_class(model_type)
        tied = {} if sizes.tied is None else {"tie_word_embeddings": sizes.tied}
        return kind(**_merge(_reduce(kind(), sizes), tied | _extra_settings(model_type, sizes) | overrides))


def _config_class(model_type: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


@contextmanager
def _not_buildable_on_error() -> Iterator[None]:
    """Turn errors of transformers into NotBuildable."""
    try:
        with quiet_transformers():
            yield
    except NotBuildable:
        raise
    except Exception as error:
        raise NotBuildable(" ".join(f"{type(error).__name__}: {error}".split())[:160]) from error


def _merge(settings: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    inner = {name: settings[name] | value for name, value in overrides.items() if isinstance(settings.get(name), dict)}
    return settings | overrides | inner


def _reduce(config: Any, sizes: Sizes) -> dict[str, Any]:
    """Return tiny values for the size settings of a configuration and of the configurations inside it."""
    patterns = _patterns(sizes)
    small: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        inner = config.__dict__.get(name)
        if hasattr(inner, "to_dict") and hasattr(inner, "model_type"):
            small[name] = _reduce(inner, sizes)
        elif value is not None and (not isinstance(value, bool | str) or name == "is_decoder"):
            matches = [replacement for pattern, replacement in patterns if re.fullmatch(pattern, name)]
            if matches:
                small[name] = matches[0]
    if "kv_lora_rank" in small:  # latent attention has as many key heads as query heads
        small["num_key_value_heads"] = sizes.heads
    return small
