"""Small real models for tests: families and mixtures of experts with random weights, built in memory, without network.

    network = tiny_model("llama")                 # a transformers LlamaForCausalLM
    memlens.models.load(network, tokenizer=tiny_tokenizer())
    save_tiny(folder, "gpt2")                     # a checkpoint folder that load() takes

Sizes are odd on purpose (3 layers, width 24, 40 memories, 97 tokens) and all weights, biases and gains are random and
large, so that a transposed matrix, a forgotten bias or a gain read wrongly changes the numbers. Texts mean nothing.
"""

import os
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as RawTokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from memlens.models.huggingface import quiet_transformers

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
    "bloom": {"n_layer": LAYERS, "hidden_size": WIDTH, "n_head": 3},  # always 4 * width memories
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
    | {"moe_intermediate_size": 20, "shared_expert_intermediate_size": 12, "mlp_only_layers": [1]},  # dense in layer 1
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
    """A small transformers causal LM of a family (its model_type), in evaluation mode; overrides go to its config."""
    settings = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": None}
    config = AutoConfig.for_model(family, **(settings | (_SETTINGS | _MIXTURES)[family] | overrides))
    network = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            # matrices at about the scale that keeps a state's size; vectors are shifts around what they begin at
            spread = 0.3 if parameter.dim() < 2 else 0.25
            noise = torch.randn(parameter.shape, generator=generator) * spread
            parameter.copy_(parameter + noise if parameter.dim() < 2 else noise)
    network.tie_weights()
    return network.eval()


_TEXT = """The river runs to the sea. The press was free in the city of Paris, and the people of the city read the news.
In 1990 a café opened near the river; it was the first of its kind. Rain fell on the hills, and the rivers rose.
The end of the war came in the spring, as the papers of the day had said it would."""


def tiny_tokenizer(adds_bos: bool = False, style: str = "bytes") -> PreTrainedTokenizerFast:
    """97 tokens of byte-level BPE (as in GPT-2), or of sentencepiece-like BPE (`style="spaces"`, as in Llama 2)."""
    raw = RawTokenizer(models.BPE(unk_token="<unk>"))
    if style == "bytes":
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        raw.decoder = decoders.ByteLevel()
    elif style == "spaces":
        raw.pre_tokenizer = pre_tokenizers.Metaspace()
        raw.decoder = decoders.Metaspace()
    else:
        raise ValueError(f"style is 'bytes' or 'spaces', not {style!r}")
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
    """A whole checkpoint folder, as save_pretrained() writes it; the folder's path comes back."""
    path = Path(folder)
    with quiet_transformers():
        tiny_model(family, seed, **overrides).save_pretrained(path)
        tiny_tokenizer(adds_bos).save_pretrained(path)
    return path
