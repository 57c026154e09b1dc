"""Models that cannot be read as memories by what their configuration says, refused before any weight is read.

All other models are looked into (discover.py) and proven (proof.py). The types of _REASONS would be refused there, too:
they stand here so that the reason is told in the words of their architecture and nobody downloads weights for it.
"""

from typing import Any

from memlens.errors import UnsupportedModel

Config = Any  # transformers' configuration objects share no useful static type

_HYPER = (
    "its blocks pass on several streams that are mixed between them (hyper-connections), so there is no one r and o"
)
_ALTUP = "its blocks predict and correct several copies of the stream (AltUp), so a value is not simply added to one"
_INPUT = "its router weighs what experts read instead of what they put out, so m is not a key's match with the stream"
_MAMBA = "its blocks are state space mixers without a feed-forward part, so it has no memories"
_SHARED = "one transformer block is shared by many layers, so that a layer has no memories of its own"
_MEDIA = (
    "it runs behind an image or a recording only; load its language model by itself and pass that to memlens.load()"
)
_REASONS: dict[str, str] = {
    "axk2": "its norms are gated by a small network of their own, so x is not a norm of the stream",
    "blip": "its language model attends to an image that memlens does not read",
    "blip-2": _MEDIA,
    "blt": "it reads bytes in patches with three transformers of their own, so a prefix has no one column of memories",
    "dbrx": "its experts lie in one matrix outside the interface that transformers has for experts",
    "deepseek_v4": _HYPER,
    "falcon_mamba": _MAMBA,
    "gemma3n": _ALTUP,
    "gemma3n_text": _ALTUP,
    "hrm_text": "its blocks run in cycles, several times for each token, so a memory has no one coefficient",
    "hy_v4": _HYPER,
    "idefics": _MEDIA,
    "inkling_text": "its blocks convolve what the feed-forward part puts out over positions, so y is not what is added",
    "instructblip": _MEDIA,
    "instructblipvideo": _MEDIA,
    "jetmoe": "its experts lie in matrices outside the interface that transformers has for experts",
    "kosmos-2": _MEDIA,
    "llama4": _INPUT,
    "llama4_text": _INPUT,
    "longcat_flash": "its layers hold two feed-forward parts, with experts that add to the stream in other places",
    "mamba": _MAMBA,
    "mamba2": _MAMBA,
    "mllama": "some of its blocks attend to images and are passed over for text, so its layers are not one chain",
    "paligemma": "it reads a prompt in both directions, so that a prefix has no coefficients of its own",
    "prophetnet": "it predicts several tokens ahead with streams of their own; use a causal language model",
    "reformer": "its blocks are reversible and carry two streams, so there is no one r and o",
    "rwkv": "its channel mixing weighs the sum of values by a second gate and reads the token before, so y is not m V",
    "voxtral_realtime": _MEDIA,
    "xlnet": "it predicts tokens in any order with two streams, so prefixes have no one state",
    "zamba": _SHARED,
    "zamba2": _SHARED,
}
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


def text_config(config: Config) -> Config:
    """The settings of the language model inside a model of text and other media, or those of a text model itself."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def refuse_kind(config: Config, name: str) -> None:
    """UnsupportedModel where the configuration alone says that there are no memories to be read."""
    reason = _reason_against_kind(config) or _reason_against_head(config)
    if reason is not None:
        raise UnsupportedModel(f"{name} ({config.model_type}) cannot be read as memories: {reason}")


def refused_because(config: Config, name: str, reason: UnsupportedModel) -> UnsupportedModel:
    """The reason that discovery gives, as one line about this model."""
    return UnsupportedModel(
        f"{name} ({config.model_type}) cannot be read as memories: {reason}; docs/your-model.md says what can be done"
    )


def _reason_against_kind(config: Config) -> str | None:
    if config.model_type in _REASONS:
        return _REASONS[config.model_type]
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder, whose prefixes have no coefficients of their own; use a decoder-only model"
    if config.model_type in _ENCODERS:
        return "it is an encoder and predicts no next token; use a causal language model"
    inner = text_config(config)
    if inner.model_type in _REASONS:
        return _REASONS[inner.model_type]
    if getattr(inner, "hidden_size_per_layer_input", 0):
        return "its blocks gate per-layer embeddings by the stream after y has been added, so o lies inside the block"
    if getattr(inner, "add_cross_attention", False):
        return "its blocks attend to an encoder that memlens does not run"
    if quantization(config) not in (None, "gguf", "mxfp4"):  # those two are unpacked as they are read
        return "its weights are quantized, so keys and values are not plain numbers; use the unquantized checkpoint"
    return None


def quantization(config: Config) -> str | None:
    """The quantization of a checkpoint's weights, as its configuration names it."""
    settings = getattr(config, "quantization_config", None)
    if not settings:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    return str(getattr(method, "value", method))


def _reason_against_head(config: Config) -> str | None:
    for architecture in getattr(config, "architectures", None) or ():
        for ending, kind in _OTHER_HEADS.items():
            if architecture.endswith(ending):
                return f"it is {kind} ({architecture}), not a causal language model"
    return None
