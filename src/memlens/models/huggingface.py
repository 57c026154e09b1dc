"""A Hugging Face causal language model as a MemoryModel: discovers its memories and its lens, and runs it."""

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memlens.errors import ModelError, UnsupportedModel
from memlens.models import hooks
from memlens.models.activations import in_blocks, stepwise
from memlens.models.blocks import Probe, find_blocks, note_runs, outside, probe_tokens
from memlens.models.discover import discover_layers
from memlens.models.experts import is_experts, own_experts
from memlens.models.find_lens import find_lens
from memlens.models.groups import MemoryLayer
from memlens.models.lens import Lens
from memlens.models.memory_model import MemoryModel, fingerprint_of
from memlens.models.proof import refuse_broken_weights
from memlens.models.refusals import Config, refused_because, text_config
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
            found = find_lens(network, probe, lambda: self._logits(tokens), _soft_caps(self.config))
        self._latest_probe = replace(probe, logits=found.logits)
        lens = Lens(
            output=found.output,
            input_embedding=embedding,
            final_norm=found.final_norm,
            post_norms=[layer.post_norm for layer in layers],
            soft_cap=found.soft_cap,
            state_scale=found.state_scale,
            logit_scale=found.logit_scale,
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
