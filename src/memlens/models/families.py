"""The supported architectures, one declarative entry each: where a block keeps its keys, values and norms.

Nothing is guessed: a model type that is not listed is refused by name, and so is a configuration that cannot be read as
memories, before any weight is read. A listed one is still proven at load time (proof.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memlens.errors import UnsupportedModel
from memlens.models.lens import NormKind

Config = Any  # transformers' configuration objects share no useful static type


def _attribute(name: str) -> Callable[[Config], Any]:
    return lambda config: getattr(config, name)


def _always(value: Any) -> Callable[[Config], Any]:
    return lambda config: value


_HIDDEN_ACT, _POSITIONS = _attribute("hidden_act"), _attribute("max_position_embeddings")
_SEQUENTIAL, _NO_REASON = _always(False), _always(None)


@dataclass(frozen=True)
class Family:
    """Where the parts of one architecture lie. Paths are dotted: from the causal LM, or within one block."""

    model_type: str  # transformers' name
    title: str  # the name people use
    blocks: str
    final_norm: str  # may be absent in a checkpoint
    keys: str  # within a block; the gate of a gated one
    down: str  # within a block
    input_norms: tuple[str, ...]  # within a block: the first that exists gives the feed-forward part its input
    norm: NormKind
    up: str | None = None  # within a gated block
    post_norm: str | None = None  # within a block
    activation: Callable[[Config], str] = _HIDDEN_ACT
    parallel: Callable[[Config], bool] = _SEQUENTIAL
    context: Callable[[Config], int | None] = _POSITIONS
    refuse: Callable[[Config], str | None] = _NO_REASON


def _refuse_bidirectional(config: Config) -> str | None:
    if getattr(config, "use_bidirectional_attention", None):
        return "its attention looks both ways, so the coefficients of a prefix depend on what follows it"
    return None


def _refuse_gpt2(config: Config) -> str | None:
    if config.add_cross_attention:
        return "its blocks attend to an encoder that memlens does not run"
    return None


def _refuse_opt(config: Config) -> str | None:
    if not config.do_layer_norm_before:
        return "its norm follows the sum of stream and feed-forward output (post-norm), so o = r + y cannot hold"
    if config.word_embed_proj_dim != config.hidden_size:
        return "its embeddings have another width than its blocks, so values cannot be read through them"
    return None


def _refuse_bloom(config: Config) -> str | None:
    if config.apply_residual_connection_post_layernorm:
        return "its residual stream is taken after the norm, so r is not what the block reads"
    if config.pretraining_tp > 1 and config.slow_but_exact:
        return "slow_but_exact goes round the down projection; set it to false in config.json"
    return None


def _gated(model_type: str, title: str, **changes: Any) -> Family:
    """The layout that Llama set and most later families share."""
    layout: dict[str, Any] = {
        "blocks": "model.layers",
        "final_norm": "model.norm",
        "keys": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
        "input_norms": ("post_attention_layernorm",),
        "norm": "rms",
    }
    return Family(model_type, title, **(layout | changes))


_KNOWN = (
    Family(
        "gpt2",
        "GPT-2",
        blocks="transformer.h",
        final_norm="transformer.ln_f",
        keys="mlp.c_fc",
        down="mlp.c_proj",
        input_norms=("ln_2",),
        norm="layer",
        activation=_attribute("activation_function"),
        refuse=_refuse_gpt2,
    ),
    Family(
        "gpt_neo",
        "GPT-Neo",
        blocks="transformer.h",
        final_norm="transformer.ln_f",
        keys="mlp.c_fc",
        down="mlp.c_proj",
        input_norms=("ln_2",),
        norm="layer",
        activation=_attribute("activation_function"),
    ),
    Family(
        "gpt_neox",
        "GPT-NeoX",
        blocks="gpt_neox.layers",
        final_norm="gpt_neox.final_layer_norm",
        keys="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        input_norms=("post_attention_layernorm",),
        norm="layer",
        parallel=_attribute("use_parallel_residual"),
    ),
    Family(
        "gptj",
        "GPT-J",
        blocks="transformer.h",
        final_norm="transformer.ln_f",
        keys="mlp.fc_in",
        down="mlp.fc_out",
        input_norms=("ln_1",),
        norm="layer",
        activation=_attribute("activation_function"),
        parallel=_always(True),
    ),
    Family(
        "opt",
        "OPT",
        blocks="model.decoder.layers",
        final_norm="model.decoder.final_layer_norm",
        keys="fc1",
        down="fc2",
        input_norms=("final_layer_norm",),
        norm="layer",
        activation=_attribute("activation_function"),
        refuse=_refuse_opt,
    ),
    Family(
        "bloom",
        "BLOOM",
        blocks="transformer.h",
        final_norm="transformer.ln_f",
        keys="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        input_norms=("post_attention_layernorm",),
        norm="layer",
        activation=_always("bloom_gelu"),  # its configuration has no name for it
        context=_always(None),
        refuse=_refuse_bloom,
    ),
    Family(
        "falcon",
        "Falcon",
        blocks="transformer.h",
        final_norm="transformer.ln_f",
        keys="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        input_norms=("ln_mlp", "post_attention_layernorm", "input_layernorm"),
        norm="layer",
        activation=_attribute("activation"),
        parallel=lambda config: bool(config.new_decoder_architecture or config.parallel_attn),
        context=lambda config: None if config.alibi else config.max_position_embeddings,
    ),
    Family(
        "phi",
        "Phi",
        blocks="model.layers",
        final_norm="model.final_layernorm",
        keys="mlp.fc1",
        down="mlp.fc2",
        input_norms=("input_layernorm",),
        norm="layer",
        parallel=_always(True),
    ),
    _gated("llama", "Llama"),
    _gated("mistral", "Mistral"),
    _gated("qwen2", "Qwen2"),
    _gated("qwen3", "Qwen3"),
    _gated("gemma", "Gemma", norm="rms+1", refuse=_refuse_bidirectional),
    _gated(
        "gemma2",
        "Gemma 2",
        norm="rms+1",
        input_norms=("pre_feedforward_layernorm",),
        post_norm="post_feedforward_layernorm",
        activation=_attribute("hidden_activation"),
        refuse=_refuse_bidirectional,
    ),
    _gated(
        "gemma3_text",
        "Gemma 3",
        norm="rms+1",
        input_norms=("pre_feedforward_layernorm",),
        post_norm="post_feedforward_layernorm",
        activation=_attribute("hidden_activation"),
        refuse=_refuse_bidirectional,
    ),
    _gated("olmo2", "OLMo 2", input_norms=(), post_norm="post_feedforward_layernorm"),
    _gated(
        "stablelm",
        "StableLM",
        norm="layer",
        input_norms=("post_attention_layernorm", "input_layernorm"),
        parallel=_attribute("use_parallel_residual"),
    ),
    Family(
        "starcoder2",
        "StarCoder2",
        blocks="model.layers",
        final_norm="model.norm",
        keys="mlp.c_fc",
        down="mlp.c_proj",
        input_norms=("post_attention_layernorm",),
        norm="layer",
    ),
)

FAMILIES: dict[str, Family] = {family.model_type: family for family in _KNOWN}


_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok")
_ENCODERS = (
    *("bert", "roberta", "xlm-roberta", "distilbert", "albert", "electra", "deberta", "deberta-v2", "modernbert"),
    *("mpnet", "camembert", "longformer", "vit", "clip", "siglip", "wav2vec2", "hubert"),
)
_OTHER_HEADS = {
    "ForSequenceClassification": "a text classifier",
    "ForTokenClassification": "a token classifier",
    "ForQuestionAnswering": "a question answerer",
    "ForMultipleChoice": "a multiple choice model",
}


def family_of(config: Config, name: str) -> Family:
    """The family of a configuration, or UnsupportedModel with the reason."""
    reason = _reason_against_kind(config)
    if reason is not None:
        raise UnsupportedModel(f"{name} ({config.model_type}) cannot be read as memories: {reason}")
    family = FAMILIES.get(config.model_type)
    if family is None:
        known = ", ".join(FAMILIES)
        raise UnsupportedModel(f"{name} has the unknown model type '{config.model_type}'; memlens knows {known}")
    reason = family.refuse(config) or _reason_against_head(config)
    if reason is not None:
        raise UnsupportedModel(f"{name} ({family.title}) cannot be read as memories: {reason}")
    return family


def _reason_against_kind(config: Config) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder, whose prefixes have no coefficients of their own; use a decoder-only model"
    if config.model_type in _ENCODERS:
        return "it is an encoder and predicts no next token; use a causal language model"
    experts = [name for name in _EXPERT_COUNTS if getattr(config, name, None)]
    if experts or "moe" in config.model_type:
        return "it is a mixture of experts, where a router decides which memories a token meets; use a dense model"
    if config.model_type not in FAMILIES and getattr(config, "text_config", None) is not None:
        return "it is a model of text and other media; use a text-only checkpoint"
    if _is_quantized(config):
        return "its weights are quantized, so keys and values are not plain numbers; use the unquantized checkpoint"
    return None


def _is_quantized(config: Config) -> bool:
    settings = getattr(config, "quantization_config", None)
    if not settings:
        return False
    method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    return getattr(method, "value", method) != "gguf"  # those are unpacked as they are read


def _reason_against_head(config: Config) -> str | None:
    for architecture in getattr(config, "architectures", None) or ():
        for ending, kind in _OTHER_HEADS.items():
            if architecture.endswith(ending):
                return f"it is {kind} ({architecture}), not a causal language model"
    return None
