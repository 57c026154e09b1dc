"""A Hugging Face causal language model as a MemoryModel: discovers its memories and its lens, and runs it.

Another package may bring the memories of a model type, by an entry point of the group `memlens.models`:

    [project.entry-points."memlens.models"]
    mytype = "mypackage:adapt"          # the model_type of a configuration, and a function

adapt(network, tokenizer, name=..., source=...) returns a MemoryModel, most easily a subclass of HuggingFaceModel. It is
asked before memlens looks by itself, also for types that memlens refuses, and what it returns is proven like any other.
"""

import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memlens.errors import ModelError, UnsupportedModel
from memlens.models import hooks
from memlens.models.activations import in_blocks, stepwise
from memlens.models.blocks import (
    ModuleCall,
    Probe,
    errors_of_the_network,
    find_blocks,
    in_float32,
    note_runs,
    outside,
    passed_over,
    probe_tokens,
    record_calls,
)
from memlens.models.discover import discover_layers
from memlens.models.experts import is_experts, own_experts
from memlens.models.groups import MemoryLayer
from memlens.models.lens import Lens, Norm
from memlens.models.match import NEAR, deviation, ratio, recognised_norm
from memlens.models.memory_model import MemoryModel, fingerprint_of
from memlens.models.proof import refuse_broken_weights
from memlens.models.refusals import Config, refuse_kind, refused_because, text_config
from memlens.models.tokenizer import Tokenizer


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' reports and progress bars off the screen; every setting is restored afterwards."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hub_bars = not are_progress_bars_disabled()
    # disable_progress_bar() of transformers silences the Hub's bars too; a download's bar is wanted on a terminal
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


# what a configuration says about files, versions and loading, not about the model
_NOT_OF_THE_MODEL = (
    *("_name_or_path", "name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"),
    "quantization_config",
)


class HuggingFaceModel(MemoryModel):
    """A `PreTrainedModel` with a language modelling head, in evaluation mode."""

    def __init__(self, network: Any, tokenizer: Tokenizer | None, *, name: str, source: str) -> None:
        self.config: Config = network.config
        _refuse_unreadable_weights(network, name)
        self.network = network.eval()
        self._has_experts = any(is_experts(module) for module in network.modules())
        context = context_of(self.config)
        try:
            layers, lens = self._discover(context)
        except UnsupportedModel as error:
            refuse_broken_weights(network, name)  # which would look like anything
            raise refused_because(self.config, name, error) from error
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
        self._refuse_foreign_tokenizer()

    def _discover(self, context: int | None) -> tuple[list[MemoryLayer], Lens]:
        network: Any = self.network
        embedding = network.get_input_embeddings()
        tokens = probe_tokens(embedding.weight.shape[0], context).to(embedding.weight.device)

        with torch.no_grad(), self.running():
            with note_runs(network) as ran:
                calls = find_blocks(network, tokens, lambda: self._body(tokens))
            body = set(network.base_model.modules())
            ran |= {module for module in network.modules() if module not in body}  # the head, which did not run
            layers = discover_layers(calls, activations_of(self.config))
            probe = Probe(tokens, calls, outside(ran, [call.block for call in calls]))
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
        with self.running(), in_blocks(self._stepwise), hooks.on_output(self.layers[-1].block, last.append):
            self._body(tokens)
        return last[-1]

    @cached_property
    def _stepwise(self) -> list[nn.Module]:
        return stepwise(self.network)

    def _body(self, tokens: Tensor) -> None:
        # by name: images come first in some models of text and images
        self.network.base_model(input_ids=tokens, attention_mask=self._mask(tokens), use_cache=False)  # type: ignore[operator]

    def _logits(self, tokens: Tensor) -> Tensor:
        with self.running():
            output: Tensor = self.network(input_ids=tokens, attention_mask=self._mask(tokens), use_cache=False).logits
        return output

    def running(self) -> AbstractContextManager[None]:
        """Experts are run by our own function in every pass, watched or not, so that all passes give the same bits."""
        return own_experts(self.network) if self._has_experts else nullcontext()

    def _mask(self, tokens: Tensor) -> Tensor | None:
        """None, unless a padding token is named: then all ones, since transformers warns of padding without a mask."""
        return None if getattr(text_config(self.config), "pad_token_id", None) is None else torch.ones_like(tokens)

    def fingerprint(self) -> str:
        config = {key: value for key, value in self.config.to_diff_dict().items() if key not in _NOT_OF_THE_MODEL}
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

    def _refuse_foreign_tokenizer(self) -> None:
        embedding: Any = self.network.get_input_embeddings()  # type: ignore[operator]
        rows = embedding.weight.shape[0]
        if self.has_tokenizer and self.tokenizer.adds_bos and not 0 <= (self.tokenizer.bos or 0) < rows:
            raise ModelError(
                f"{self.name}: BOS is token {self.tokenizer.bos} but the model has only {rows}; use its own tokenizer"
            )


def activations_of(config: Config) -> list[str]:
    """The activations that a configuration names."""
    from transformers.activations import ACT2FN

    settings = text_config(config).to_dict().items()
    return [value for name, value in settings if "act" in name and isinstance(value, str) and value in ACT2FN]


def context_of(config: Config) -> int | None:
    """The longest input that a configuration allows; None where it knows no limit."""
    settings = text_config(config)
    if getattr(settings, "alibi", False):  # positions are told by distances, which have no end
        return None
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "context_length"):
        longest = getattr(settings, name, None)
        if isinstance(longest, int):
            return longest
    return None


def _soft_caps(config: Config) -> list[float]:
    settings = text_config(config).to_dict().items()
    return [float(value) for name, value in settings if "cap" in name and isinstance(value, int | float) and value > 0]


def _refuse_unreadable_weights(network: nn.Module, name: str) -> None:
    for parameter_name, parameter in network.named_parameters():
        if parameter.is_meta:
            raise ModelError(f"{name}: {parameter_name} is not in memory (offloaded); load the model onto one device")
        if not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
            raise UnsupportedModel(f"{name}: {parameter_name} is quantized ({parameter.dtype}); use plain weights")
        kind = type(parameter)
        if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # operations would be its own, whatever run
            raise UnsupportedModel(f"{name}: {parameter_name} is no plain tensor ({kind.__name__}); use plain weights")


# The lens


@dataclass(frozen=True, eq=False)
class LensParts:
    """logits = cap(logit_scale * (state_scale * norm(state) E^T + b))"""

    output: nn.Module
    final_norm: Norm | None
    state_scale: float
    logit_scale: float
    soft_cap: float | None
    logits: Tensor  # of the probe's last states


def find_lens(network: Any, probe: Probe, run: Callable[[], Tensor], soft_caps: Sequence[float]) -> LensParts:
    """The lens between the last block and the logits, found by running that part alone, in float32 on any states.

    `run` gives the logits of the probe; `soft_caps` are numbers of the configuration that may be one.
    """
    states, around = probe.calls[-1].states, probe.around
    calls: list[ModuleCall] = []
    with in_float32(*around, deep=False):
        with passed_over(probe.calls, states), record_calls(around, calls.append), errors_of_the_network():
            logits = run()
        head = _head(network, calls, logits)
        final_norm, normed = None, states
        for call in calls:
            if call.given.shape == states.shape and torch.equal(call.given, states):
                final_norm = recognised_norm(call)
                if final_norm is not None:
                    normed = call.output
                    break
    state_scale = ratio(head.given, normed) if head.given.shape == normed.shape else None
    if state_scale is None:
        raise UnsupportedModel("between its last block and its output embedding lies more than a norm")
    return LensParts(head.module, final_norm, state_scale, *_scale_and_cap(logits, head.output, soft_caps), logits)


def _head(network: Any, calls: Sequence[ModuleCall], logits: Tensor) -> ModuleCall:
    known = network.get_output_embeddings()
    for call in reversed(calls):
        if (known is None or call.module is known) and call.output.shape == logits.shape:
            return call
    raise UnsupportedModel("its logits do not come from one output embedding")


def _scale_and_cap(logits: Tensor, scores: Tensor, soft_caps: Sequence[float]) -> tuple[float, float | None]:
    """(scale, cap) that are nearest to logits = cap * tanh(scale * scores / cap), or without a cap."""
    candidates: list[tuple[float, float, float | None]] = []
    if (scale := ratio(logits, scores)) is not None:
        candidates.append((deviation(scores * scale, logits), scale, None))
    for cap in soft_caps:
        clear = (logits / cap).abs() < 0.9  # elsewhere too little is left of a score
        within = torch.where(clear, torch.atanh((logits / cap).clamp(-0.9, 0.9)) * cap, 0)
        if (scale := ratio(within, torch.where(clear, scores, 0))) is not None:
            candidates.append((deviation(torch.tanh(scores * scale / cap) * cap, logits), scale, cap))
    candidates = [candidate for candidate in candidates if candidate[0] < NEAR]
    if not candidates:
        raise UnsupportedModel("its logits are neither its output embedding's scores nor these scaled or soft-capped")
    return min(candidates, key=lambda candidate: candidate[0])[1:]


# Adapters of other packages

GROUP = "memlens.models"


@cache
def _entries(_where: tuple[str, ...]) -> EntryPoints:
    return entry_points(group=GROUP)


def _adapters(model_type: str) -> EntryPoints:
    """Entry points for a model type; packages are looked through once, and again where there are others to find."""
    return _entries(tuple(sys.path)).select(name=model_type)


def refuse_config(config: Config, name: str) -> None:
    """UnsupportedModel where the configuration speaks against the model and nobody brings an adapter for it."""
    if not _adapters(config.model_type):
        refuse_kind(config, name)


def as_memories(network: Any, tokenizer: Tokenizer | None, *, name: str, source: str) -> MemoryModel:
    """A transformers' network as a MemoryModel: by an adapter for its type, else by discovery."""
    adapt: Callable[..., Any] = HuggingFaceModel
    for entry in _adapters(network.config.model_type):
        try:
            adapt = entry.load()
        except Exception as error:
            package = "a package" if entry.dist is None else entry.dist.name
            raise ModelError(f"the adapter {entry.value} of {package} cannot be imported ({error}); mend it") from error
    model = adapt(network, tokenizer, name=name, source=source)
    if not isinstance(model, MemoryModel):
        raise ModelError(f"the adapter for '{network.config.model_type}' gave no MemoryModel; mend it")
    return model
