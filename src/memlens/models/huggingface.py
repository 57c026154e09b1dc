"""A Hugging Face causal language model as a MemoryModel: finds the modules that its family names, and runs them."""

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memlens.errors import ModelError, UnsupportedModel
from memlens.models import hooks
from memlens.models.experts import own_experts
from memlens.models.families import Config, Family, family_of
from memlens.models.groups import LinearGroup, MemoryLayer
from memlens.models.lens import Lens, Norm
from memlens.models.memory_model import MemoryModel, fingerprint_of
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
        family = family_of(self.config, name)
        _refuse_unreadable_weights(network, name)
        network.eval()
        layers = memory_layers(network, family, self.config, name)
        if not layers:
            raise UnsupportedModel(f"{name} has no layers, so it has no memories")
        final_norm = _optional_part(network, family.final_norm)
        lens = Lens(
            output=network.get_output_embeddings(),
            input_embedding=network.get_input_embeddings(),
            final_norm=None if final_norm is None else Norm(final_norm, family.norm),
            post_norms=[layer.post_norm for layer in layers],
            soft_cap=getattr(self.config, "final_logit_softcapping", None),
        )
        super().__init__(
            name=name,
            source=source,
            family=family.model_type,
            network=network,
            layers=layers,
            lens=lens,
            tokenizer=tokenizer,
            context=family.context(self.config),
        )
        self._refuse_foreign_tokenizer()

    def _run_body(self, tokens: Tensor) -> Tensor:
        last: list[Tensor] = []
        with self._running(), hooks.on_output(self.layers[-1].block, last.append):
            self.network.base_model(tokens, attention_mask=self._mask(tokens), use_cache=False)  # type: ignore[operator]
        return last[-1]

    def _logits(self, tokens: Tensor) -> Tensor:
        with self._running():
            output: Tensor = self.network(tokens, attention_mask=self._mask(tokens), use_cache=False).logits
        return output

    def _running(self) -> AbstractContextManager[None]:
        """Experts are run by our own function in every pass, watched or not, so that all passes give the same bits."""
        return own_experts(self.network) if any(layer.is_mixture for layer in self.layers) else nullcontext()

    def _mask(self, tokens: Tensor) -> Tensor | None:
        """None, unless a padding token is named: then all ones, since transformers warns of padding without a mask."""
        return None if getattr(self.config, "pad_token_id", None) is None else torch.ones_like(tokens)

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


def memory_layers(network: Any, family: Family, config: Config, name: str) -> list[MemoryLayer]:
    """The memories of every layer."""
    blocks: Any = _part(network, family.blocks, name)
    return [_memory_layer(family, config, number, block, name) for number, block in enumerate(blocks)]


def _memory_layer(family: Family, config: Config, number: int, block: nn.Module, name: str) -> MemoryLayer:
    norms = [_optional_part(block, path) for path in family.input_norms]
    input_norm = next((norm for norm in norms if norm is not None), None)
    if family.input_norms and input_norm is None:
        raise UnsupportedModel(f"{name} ({family.title}) has no {' or '.join(family.input_norms)} in layer {number}")
    post_norm = None if family.post_norm is None else _part(block, family.post_norm, name)
    activation, down = family.activation(config), _part(block, family.down, name)
    group = LinearGroup(
        activation=activation,
        activate=activation_function(activation),
        key_projection=_part(block, family.keys, name),
        up_projection=None if family.up is None else _part(block, family.up, name),
        down=down,
    )
    return MemoryLayer.of(
        number=number,
        block=block,
        groups=[group],
        outputs=(down,),
        input_norm=None if input_norm is None else Norm(input_norm, family.norm),
        post_norm=None if post_norm is None else Norm(post_norm, family.norm),
        parallel=bool(family.parallel(config)),
    )


def activation_function(activation: str) -> Any:
    """The function behind an activation's name, apart from any model's own module."""
    if activation == "bloom_gelu":
        return partial(nn.functional.gelu, approximate="tanh")
    from transformers.activations import ACT2FN

    if activation not in ACT2FN:
        raise UnsupportedModel(f"the activation '{activation}' is not one that transformers knows")
    return ACT2FN[activation]


def _part(module: nn.Module, path: str, name: str) -> nn.Module:
    part = _optional_part(module, path)
    if part is None:
        raise UnsupportedModel(f"{name} has no {path} in its {type(module).__name__}, where its family keeps it")
    return part


def _optional_part(module: nn.Module, path: str) -> nn.Module | None:
    part: Any = module
    for step in path.split("."):
        part = getattr(part, step, None)
    return part


def _refuse_unreadable_weights(network: nn.Module, name: str) -> None:
    for parameter_name, parameter in network.named_parameters():
        if parameter.is_meta:
            raise ModelError(f"{name}: {parameter_name} is not in memory (offloaded); load the model onto one device")
        if not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
            raise UnsupportedModel(f"{name}: {parameter_name} is quantized ({parameter.dtype}); use plain weights")
