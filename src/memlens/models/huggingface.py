"""HuggingFaceModel: a transformers causal language model as a MemoryModel, with its memories and lens discovered.

Other packages can provide the memories of a model type with an entry point of the group `memlens.models`:

    [project.entry-points."memlens.models"]
    mytype = "mypackage:adapt"          # the model_type of a configuration, and a function

adapt(network, tokenizer, name=..., source=...) returns a MemoryModel, usually a subclass of HuggingFaceModel. The
adapter takes precedence over discovery and over the rejections below, and the model that it returns is proven like any
other model.
"""

import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memlens.errors import ModelError, UnsupportedModel
from memlens.models import hooks
from memlens.models.blocks import (
    RUNNING,
    ModuleCall,
    Probe,
    collect_running,
    find_blocks,
    in_float32,
    is_same,
    modules_outside,
    probe_tokens,
    record_calls,
    reject_on_error,
    skip_blocks,
)
from memlens.models.discover import discover_layers
from memlens.models.experts import is_experts, replace_experts
from memlens.models.groups import MemoryLayer
from memlens.models.lens import Lens, Norm
from memlens.models.match import NEAR, deviation, ratio, recognized_norm
from memlens.models.memory_model import MemoryModel, fingerprint_of
from memlens.models.proof import check_finite_weights
from memlens.models.tokenizer import Tokenizer

Config = Any  # transformers' configuration objects share no useful static type


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' logging and progress bars inside the context, and restore the settings afterwards."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hub_bars = not are_progress_bars_disabled()
    # transformers' disable_progress_bar() also disables the Hub's progress bars, which a terminal should show
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    if sys.stderr.isatty() and hub_bars:
        enable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
        if hub_bars:
            enable_progress_bars()
        else:
            disable_progress_bars()


# Rejections by configuration
#
# Discovery and proof would reject these types as well. This list gives the reason in terms of the architecture, before
# any weights are downloaded.

_HYPER = "its blocks pass on several mixed streams (hyper-connections), so there is no single residual stream"
_ALTUP = "its blocks predict and correct several copies of the stream (AltUp), so a value is not simply added to one"
_INPUT = "its router scales the input of experts instead of their output, so m is not a key's match with the stream"
_MAMBA = "its blocks are state space mixers without a feed-forward part, so it has no memories"
_SHARED = "many layers share one transformer block, so a layer does not have its own memories"
_MEDIA = "it needs an image or audio as input; load only its language model and pass that to memlens.load()"
_REASONS: dict[str, str] = {
    "axk2": "a small network gates its norms, so x is not a norm of the stream",
    "blip": "its language model attends to an image that memlens does not read",
    "blip-2": _MEDIA,
    "blt": "it reads patches of bytes with three transformers, so a prefix has no single set of memories",
    "dbrx": "its experts are one matrix, outside the interface that transformers has for experts",
    "deepseek_v4": _HYPER,
    "falcon_mamba": _MAMBA,
    "gemma3n": _ALTUP,
    "gemma3n_text": _ALTUP,
    "hrm_text": "its blocks run several times per token, so a memory has no single coefficient",
    "hy_v4": _HYPER,
    "idefics": _MEDIA,
    "inkling_text": "its blocks convolve the feed-forward output over positions, so y is not what is added",
    "instructblip": _MEDIA,
    "instructblipvideo": _MEDIA,
    "jetmoe": "its experts are matrices outside the interface that transformers has for experts",
    "kosmos-2": _MEDIA,
    "llama4": _INPUT,
    "llama4_text": _INPUT,
    "longcat_flash": "its layers have two feed-forward parts, and experts that add to the stream at other points",
    "mamba": _MAMBA,
    "mamba2": _MAMBA,
    "mllama": "some of its blocks attend to images and are skipped for text, so its layers are not a chain",
    "paligemma": "it reads a prompt in both directions, so the coefficients of a prefix depend on later tokens",
    "prophetnet": "it predicts several tokens ahead with separate streams; use a causal language model",
    "reformer": "its blocks are reversible and carry two streams, so there is no single residual stream",
    "rwkv": "its channel mixing gates the sum of values and reads the previous token, so y is not m V",
    "voxtral_realtime": _MEDIA,
    "xlnet": "it predicts tokens in any order with two streams, so a prefix has no single state",
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
    """Return the configuration of the language model, which may be part of a multimodal model."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def check_kind(config: Config, name: str) -> None:
    """Raise UnsupportedModel if the configuration alone shows that the model has no readable memories."""
    reason = _reason_against_kind(config) or _reason_against_head(config)
    if reason is not None:
        raise UnsupportedModel(f"{name} ({config.model_type}) cannot be read as memories: {reason}")


def _reason_against_kind(config: Config) -> str | None:
    if config.model_type in _REASONS:
        return _REASONS[config.model_type]
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder, so coefficients depend on more than the prefix; use a decoder-only model"
    if config.model_type in _ENCODERS:
        return "it is an encoder and does not predict the next token; use a causal language model"
    inner = text_config(config)
    if inner.model_type in _REASONS:
        return _REASONS[inner.model_type]
    if getattr(inner, "hidden_size_per_layer_input", 0):
        return "its blocks add gated per-layer embeddings after y, so o is inside the block"
    if getattr(inner, "add_cross_attention", False):
        return "its blocks attend to an encoder that memlens does not run"
    if quantization(config) not in (None, "gguf", "mxfp4"):  # gguf and mxfp4 are dequantized while loading
        return "its weights are quantized, so keys and values are not plain numbers; use the unquantized checkpoint"
    return None


def quantization(config: Config) -> str | None:
    """Return the quantization method that a configuration names, or None."""
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


# The model

# settings of files, versions and loading, which do not change the model
_EXCLUDED_FROM_FINGERPRINT = (
    *("_name_or_path", "name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"),
    "quantization_config",
)


class HuggingFaceModel(MemoryModel):
    """A `PreTrainedModel` with a language modeling head, in evaluation mode."""

    def __init__(self, network: Any, tokenizer: Tokenizer | None, *, name: str, source: str) -> None:
        self.config: Config = network.config
        _check_plain_weights(network, name)
        self.network = network.eval()
        self._has_experts = any(is_experts(module) for module in network.modules())
        try:
            with reject_on_error("its blocks cannot be found"):
                context = context_of(self.config)
                layers, lens = self._discover(context)
        except UnsupportedModel as error:
            check_finite_weights(network, name)  # report NaNs first, because they can cause any failure
            raise UnsupportedModel(
                f"{name} ({self.config.model_type}) cannot be read as memories: {error}; see docs/your-model.md"
            ) from error
        super().__init__(
            name=name,
            source=source,
            family=self.config.model_type,
            network=network,
            layers=layers,
            lens=lens,
            tokenizer=tokenizer,
            context=context,
        )
        self._check_tokenizer()

    def _discover(self, context: int | None) -> tuple[list[MemoryLayer], Lens]:
        network: Any = self.network
        with reject_on_error("its input embedding is not one matrix"):
            embedding = network.get_input_embeddings()
            tokens = probe_tokens(embedding.weight.shape[0], context).to(embedding.weight.device)
        with torch.no_grad(), self.running():
            with collect_running(network) as modules:
                calls = find_blocks(network, tokens, lambda: self._body(tokens))
            body = set(network.base_model.modules())
            modules |= {module for module in network.modules() if module not in body}  # the head has not run yet
            layers = discover_layers(calls, activations_of(self.config))
            probe = Probe(tokens, calls, modules_outside(modules, [call.block for call in calls]))
            with reject_on_error("its lens cannot be found"):
                head = find_lens(network, probe, lambda: self._logits(tokens), _soft_caps(self.config))
        self._latest_probe = replace(probe, logits=head.logits)
        lens = Lens(
            output=head.output,
            input_embedding=embedding,
            final_norm=head.final_norm,
            post_norms=[layer.post_norm for layer in layers],
            soft_cap=head.soft_cap,
            state_scale=head.state_scale,
            logit_scale=head.logit_scale,
            layer_scales=[layer.scale for layer in layers],
        )
        return layers, lens

    def probe(self) -> Probe:
        probe, self._latest_probe = self._latest_probe, None
        return super().probe() if probe is None else probe

    def _run_body(self, tokens: Tensor) -> Tensor:
        last: list[Tensor] = []
        with self.running(), hooks.on_output(self.layers[-1].block, last.append):
            self._body(tokens)
        return last[-1]

    def _body(self, tokens: Tensor) -> None:
        # pass tokens by name, because some multimodal models take images as the first argument
        self.network.base_model(input_ids=tokens, attention_mask=self._mask(tokens), use_cache=False)  # type: ignore[operator]

    def _logits(self, tokens: Tensor) -> Tensor:
        with self.running():
            output: Tensor = self.network(input_ids=tokens, attention_mask=self._mask(tokens), use_cache=False).logits
        return output

    def running(self) -> AbstractContextManager[None]:
        """Run experts with `run_experts` even in passes without observers, so that all passes give the same bits."""
        return replace_experts(self.network) if self._has_experts else nullcontext()

    def _mask(self, tokens: Tensor) -> Tensor | None:
        """Return a mask of ones if the model has a padding token, otherwise None.

        If the mask were missing, transformers would warn about the padding token.
        """
        return None if getattr(text_config(self.config), "pad_token_id", None) is None else torch.ones_like(tokens)

    def fingerprint(self) -> str:
        config = {
            key: value for key, value in self.config.to_diff_dict().items() if key not in _EXCLUDED_FROM_FINGERPRINT
        }
        return fingerprint_of(json.dumps(config, sort_keys=True, default=str), self._tokenizer, self.network)

    def save(self, folder: Path) -> None:
        if self.source.lower().endswith(".gguf"):
            raise ModelError(
                f"{self.name} is a .gguf file and cannot be saved as a safetensors checkpoint; edit the checkpoint it "
                "was made from"
            )
        with quiet_transformers():
            self.network.save_pretrained(folder)  # type: ignore[operator]
        if self.has_tokenizer:
            self.tokenizer.save(folder)

    def _check_tokenizer(self) -> None:
        """Raise ModelError if BOS is not a token of the model."""
        embedding: Any = self.network.get_input_embeddings()  # type: ignore[operator]
        rows = embedding.weight.shape[0]
        if self.has_tokenizer and self.tokenizer.adds_bos and not 0 <= (self.tokenizer.bos or 0) < rows:
            raise ModelError(
                f"{self.name}: BOS is token {self.tokenizer.bos} but the model has only {rows}; use its own tokenizer"
            )


def activations_of(config: Config) -> list[str]:
    """Return the names of the activations in a configuration."""
    from transformers.activations import ACT2FN

    settings = text_config(config).to_dict().items()
    return [value for name, value in settings if "act" in name and isinstance(value, str) and value in ACT2FN]


def context_of(config: Config) -> int | None:
    """Return the longest input that a configuration allows, or None if it has no limit."""
    settings = text_config(config)
    if getattr(settings, "alibi", False):  # relative positions do not limit the length
        return None
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "context_length"):
        longest = getattr(settings, name, None)
        if isinstance(longest, int):
            return longest
    return None


def _soft_caps(config: Config) -> list[float]:
    settings = text_config(config).to_dict().items()
    return [float(value) for name, value in settings if "cap" in name and isinstance(value, int | float) and value > 0]


def _check_plain_weights(network: nn.Module, name: str) -> None:
    """Raise an error if a parameter is offloaded, quantized or not a plain tensor."""
    for parameter_name, parameter in network.named_parameters():
        if parameter.is_meta:
            raise ModelError(f"{name}: {parameter_name} is not in memory (offloaded); load the model onto one device")
        if not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
            raise UnsupportedModel(f"{name}: {parameter_name} is quantized ({parameter.dtype}); use plain weights")
        kind = type(parameter)
        if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # the subclass may redefine any operation
            raise UnsupportedModel(
                f"{name}: {parameter_name} is not a plain tensor ({kind.__name__}); use plain weights"
            )


# The lens


@dataclass(frozen=True, eq=False)
class LensParts:
    """The parts of logits = cap(logit_scale * (state_scale * norm(state) E^T + b))."""

    output: nn.Module
    final_norm: Norm | None
    state_scale: float
    logit_scale: float
    soft_cap: float | None
    logits: Tensor  # for the last block's probe states


def find_lens(network: Any, probe: Probe, run: Callable[[], Tensor], soft_caps: Sequence[float]) -> LensParts:
    """Find the lens between the last block and the logits by running only that part, in float32.

    Args:
        network: The network with its head.
        probe: A pass through the blocks.
        run: Computes the logits of the probe's tokens.
        soft_caps: Numbers in the configuration that may be the soft cap of the logits.
    """
    states, around = probe.calls[-1].states, probe.around
    calls: list[ModuleCall] = []
    with in_float32(*around, deep=False):
        with skip_blocks(probe.calls, states), record_calls(around, calls.append), reject_on_error(RUNNING):
            logits = run()
        head = _head(network, calls, logits)
        final_norm, normed = None, states
        for call in calls:
            if is_same(call.inputs, states):
                final_norm = recognized_norm(call)
                if final_norm is not None:
                    normed = call.output
                    break
    state_scale = ratio(head.inputs, normed) if head.inputs.shape == normed.shape else None
    if state_scale is None:
        raise UnsupportedModel("there is more than a norm between its last block and its output embedding")
    return LensParts(head.module, final_norm, state_scale, *_scale_and_cap(logits, head.output, soft_caps), logits)


def _head(network: Any, calls: Sequence[ModuleCall], logits: Tensor) -> ModuleCall:
    head = network.get_output_embeddings()
    for call in reversed(calls):
        if (head is None or call.module is head) and call.output.shape == logits.shape:
            return call
    raise UnsupportedModel("its logits do not come from one output embedding")


def _scale_and_cap(logits: Tensor, scores: Tensor, soft_caps: Sequence[float]) -> tuple[float, float | None]:
    """Return the (scale, cap) that best fit logits = cap * tanh(scale * scores / cap), without tanh if cap is None."""
    candidates: list[tuple[float, float, float | None]] = []
    scores = scores.to(logits.device)
    if (scale := ratio(logits, scores)) is not None:
        candidates.append((deviation(scores * scale, logits), scale, None))
    for cap in soft_caps:
        clear = (logits / cap).abs() < 0.9  # a logit near the cap is too insensitive to the score
        within = torch.where(clear, torch.atanh((logits / cap).clamp(-0.9, 0.9)) * cap, 0)
        if (scale := ratio(within, torch.where(clear, scores, 0))) is not None:
            candidates.append((deviation(torch.tanh(scores * scale / cap) * cap, logits), scale, cap))
    candidates = [candidate for candidate in candidates if candidate[0] < NEAR]
    if not candidates:
        raise UnsupportedModel("its logits are not the scores of its output embedding, scaled or soft-capped")
    return min(candidates, key=lambda candidate: candidate[0])[1:]


# Adapters from other packages

GROUP = "memlens.models"


@cache
def _entries(_where: tuple[str, ...]) -> EntryPoints:
    return entry_points(group=GROUP)


def _adapters(model_type: str) -> EntryPoints:
    """Return the entry points for a model type. The search is repeated only when sys.path changes."""
    return _entries(tuple(sys.path)).select(name=model_type)


def check_config(config: Config, name: str) -> None:
    """Raise UnsupportedModel if the configuration rules the model out and no adapter exists for its type."""
    if not _adapters(config.model_type):
        check_kind(config, name)


def as_memories(network: Any, tokenizer: Tokenizer | None, *, name: str, source: str) -> MemoryModel:
    """Return a transformers network as a MemoryModel, by an adapter for its type or by discovery."""
    adapt: Callable[..., Any] = HuggingFaceModel
    for entry in _adapters(network.config.model_type):
        try:
            adapt = entry.load()
        except Exception as error:
            package = "a package" if entry.dist is None else entry.dist.name
            raise ModelError(f"the adapter {entry.value} of {package} cannot be imported ({error})") from error
    model = adapt(network, tokenizer, name=name, source=source)
    if not isinstance(model, MemoryModel):
        raise ModelError(f"the adapter for '{network.config.model_type}' did not return a MemoryModel")
    return model
