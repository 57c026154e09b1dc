"""Why a model cannot be seen as memories, said from its configuration alone, before any weight is read.

This module knows configurations, not weights; what only running the network can show is proof.py's matter.
"""

from __future__ import annotations

from memlens.errors import UnsupportedModel
from memlens.models.families import FAMILIES, Config, Family

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
    reason = _kind_refused(config)
    if reason is not None:
        raise UnsupportedModel(f"{name} ({config.model_type}) cannot be read as memories: {reason}")
    family = FAMILIES.get(config.model_type)
    if family is None:
        known = ", ".join(FAMILIES)
        raise UnsupportedModel(f"{name} has the unknown model type '{config.model_type}'; memlens knows {known}")
    reason = family.refuse(config) or _head_refused(config)
    if reason is not None:
        raise UnsupportedModel(f"{name} ({family.title}) cannot be read as memories: {reason}")
    return family


def _kind_refused(config: Config) -> str | None:
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


def _head_refused(config: Config) -> str | None:
    for architecture in getattr(config, "architectures", None) or ():
        for ending, kind in _OTHER_HEADS.items():
            if architecture.endswith(ending):
                return f"it is {kind} ({architecture}), not a causal language model"
    return None
