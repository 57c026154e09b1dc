"""MemoryModel: a language model as layers of memories, with methods to run, observe, record and edit them.

groups.py defines the layers. Subclasses run the network (huggingface.py, fairseq.py).
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from html import escape
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memlens.errors import ModelError, SettingError, UnknownName
from memlens.memory import MemoryNames
from memlens.models import hooks
from memlens.models.blocks import (
    BlockCall,
    ModuleCall,
    Probe,
    collect_running,
    modules_outside,
    probe_tokens,
    record_calls,
)
from memlens.models.groups import CoefficientBlock, MemoryLayer
from memlens.models.lens import at_least_float32
from memlens.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from memlens.models.lens import Lens
    from memlens.models.proof import Proof


@dataclass
class Recording:
    """Coefficients and states of the latest forward pass, by layer. All tensors are copies.

    In every layer o = r + y: y is what the feed-forward block adds to the residual stream (after its post-norm, if it
    has one), o is the layer's output, and r is the stream without y. States are float32 or float64.
    """

    coefficients: dict[int, Tensor] = field(default_factory=dict)  # [batch, pos, memories]
    y: dict[int, Tensor] = field(default_factory=dict)  # [batch, pos, d]
    o: dict[int, Tensor] = field(default_factory=dict)  # [batch, pos, d]
    r: dict[int, Tensor] = field(default_factory=dict)  # [batch, pos, d], o - y
    embedding: Tensor | None = None  # [batch, pos, d], the input of the first layer

    # The following methods are listed in the order in which a pass calls them.

    def set_embedding(self, states: Tensor) -> None:
        self.embedding = _copy(states)

    def clear_coefficients(self, layer: MemoryLayer, states: Tensor) -> None:
        if len(layer.groups) != 1:  # the coefficients of experts that are not selected stay 0
            self.coefficients[layer.number] = at_least_float32(states.new_zeros(*states.shape[:2], layer.memories))

    def add_coefficients(self, layer: MemoryLayer, block: CoefficientBlock) -> None:
        coefficients = block.everywhere().detach()
        if len(layer.groups) == 1:
            self.coefficients[layer.number] = coefficients.clone()
        else:
            self.coefficients[layer.number][..., block.group.columns] = coefficients

    def set_y(self, layer: int, states: Tensor) -> None:
        self.y[layer] = _copy(states)

    def set_o(self, layer: int, states: Tensor) -> None:
        self.o[layer] = _copy(states)
        self.r[layer] = self.o[layer] - self.y[layer]


class _StopPassError(Exception):
    """Raised in a hook to stop a forward pass early."""


class MemoryModel(ABC):
    """A causal language model with its tokenizer, its layers of memories and a lens onto its vocabulary.

    `memlens.load` returns a MemoryModel.

    Example:
        >>> tokens = torch.tensor([[1, 2, 3]])
        >>> with model.record([1]) as recording, model.edit({1: lambda c, group: c * 0}):
        ...     logits = model.logits(tokens)
        >>> logits.shape[:2], recording.coefficients[1].shape
        (torch.Size([1, 3]), torch.Size([1, 3, 40]))
    """

    stored_dtype: torch.dtype | None = None  # dtype of the checkpoint's files; None for other models
    _latest_probe: Probe | None = None  # the probe that discovery made, which the proof reuses

    def __init__(
        self,
        *,
        name: str,
        source: str,
        family: str,
        network: nn.Module,
        layers: Sequence[MemoryLayer],
        lens: "Lens",
        tokenizer: Tokenizer | None,
        context: int | None,
    ) -> None:
        self.name = name  # a Hub id, or the name of a folder or file
        self.source = source  # argument of load() that loads this model again; "" for a loaded object
        self.family = family
        self.network = network
        self.layers = layers
        self.lens = lens
        self.context = context  # the longest input, including BOS; None if there is no limit
        self.proof: Proof | None = None
        self._tokenizer = tokenizer

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ModelError(f"{self.name} has no tokenizer; pass tokenizer= to load() to work with text")
        return self._tokenizer

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    @cached_property
    def names(self) -> MemoryNames:
        """The converter between names and numbers of memories."""
        return MemoryNames({layer.number: layer.shape for layer in self.layers}, self.name)

    @property
    def first(self) -> MemoryLayer:
        """The first layer that has memories."""
        return next(layer for layer in self.layers if layer.groups)

    @property
    def width(self) -> int:
        return self.first.groups[0].values.shape[1]

    @property
    def vocabulary(self) -> int:
        """The number of rows of the output embedding."""
        return self.lens.vocabulary

    @property
    def device(self) -> torch.device:
        return self.first.groups[0].values.device

    @property
    def dtype(self) -> torch.dtype:
        return self.first.groups[0].values.dtype

    def run_body(self, tokens: Tensor, gradients: bool = False) -> Tensor:
        """Return the state after the last block, before the final norm: [batch, pos, d].

        Args:
            tokens: [batch, pos] int64. Rows may be padded on the right with any token, because attention is causal.
            gradients: Record gradients, so that results can be differentiated with respect to coefficients that an edit
                inserts.
        """
        with torch.set_grad_enabled(gradients):
            return self._run_body(self._check_tokens(tokens))

    def run_to(self, layer: int, tokens: Tensor) -> None:
        """Run the blocks up to and including a layer. Observers see these blocks run.

        Args:
            layer: The layer, counted from 0.
            tokens: [batch, pos] int64.
        """

        def stop(_output: Tensor) -> None:
            raise _StopPassError

        with suppress(_StopPassError), hooks.on_output(self.layers[layer].block, stop), torch.no_grad():
            self._run_body(self._check_tokens(tokens))

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the model's own logits, after soft-capping.

        Args:
            tokens: [batch, pos] int64.

        Returns:
            The logits, [batch, pos, vocabulary].
        """
        with torch.no_grad():
            return self._logits(self._check_tokens(tokens))

    def probe(self) -> Probe:
        """Run a few random tokens for the proof."""
        highest = min(self.vocabulary, self.tokenizer.size) if self.has_tokenizer else self.vocabulary
        tokens = probe_tokens(highest, self.context)
        calls: list[ModuleCall] = []
        blocks = [layer.block for layer in self.layers]
        with record_calls(blocks, calls.append), collect_running(self.network) as modules:
            self.logits(tokens)
        return Probe(tokens, [BlockCall(call) for call in calls], modules_outside(modules, blocks))

    def forget_probe(self) -> None:
        """Free the probe that discovery made. It is needed only for a proof."""
        self._latest_probe = None

    def running(self) -> AbstractContextManager[None]:
        """Return a context for passes through all or part of the network. Passes inside it give the same bits."""
        return nullcontext()

    @abstractmethod
    def _run_body(self, tokens: Tensor) -> Tensor: ...

    @abstractmethod
    def _logits(self, tokens: Tensor) -> Tensor: ...

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a SHA-256 of configuration, tokenizer and parameters.

        Returns:
            The checksum. It does not depend on the location of the model.
        """

    def save(self, folder: "Path") -> None:
        """Write the current weights, the configuration and the tokenizer as a safetensors checkpoint.

        Args:
            folder: Folder to write to.

        Raises:
            ModelError: Models of this kind cannot be saved.
        """
        raise ModelError(
            f"{self.name} ({self.family}) cannot be saved as a safetensors checkpoint; use a Hugging Face checkpoint"
        )

    @contextmanager
    def watch(
        self, on_coefficients: Callable[[int, Any], None], layers: Sequence[int] | None = None, split: bool = True
    ) -> Iterator[None]:
        """Call a function with the coefficients of every forward pass inside the context.

        Args:
            on_coefficients: Called with the layer and a block of coefficients, for every group of memories that is
                used. The block of a routed expert contains only the tokens that are routed to it. Tensors are not
                copied, so the function must copy the data that it keeps.
            layers: Layers to watch. None watches all.
            split: Call the function for each routed expert with a CoefficientBlock. Otherwise, call it once for all
                experts behind a router, with a RoutedBlock.

        Returns:
            A context manager.
        """
        with ExitStack() as stack:
            for layer in self.layer_numbers(layers):
                use = partial(on_coefficients, layer)
                stack.enter_context(hooks.watch_coefficients(self.layers[layer], use, split))
            yield

    @contextmanager
    def record(
        self, layers: Sequence[int] | None = None, coefficients: bool = True, states: bool = True
    ) -> Iterator[Recording]:
        """Record layers. Each forward pass inside the context overwrites the previous recording.

        Args:
            layers: Layers to record. None records all.
            coefficients: Record coefficients.
            states: Record states of the stream.

        Returns:
            A context manager, whose value is the Recording.
        """
        recording = Recording()
        with ExitStack() as stack:
            if states:
                stack.enter_context(hooks.on_input(self.layers[0].block, recording.set_embedding))
            for layer in self.layer_numbers(layers):
                memories = self.layers[layer]
                if coefficients:
                    stack.enter_context(hooks.on_input(memories.block, partial(recording.clear_coefficients, memories)))
                    add = partial(recording.add_coefficients, memories)
                    stack.enter_context(hooks.watch_coefficients(memories, add))
                if states:
                    stack.enter_context(hooks.watch_addition(memories, partial(recording.set_y, layer)))
                    stack.enter_context(hooks.on_output(memories.block, partial(recording.set_o, layer)))
            yield recording

    @contextmanager
    def edit(self, edits: Mapping[int, hooks.Change]) -> Iterator[None]:
        """Replace the coefficients of layers inside the context. Edits of an outer context are applied first.

        Args:
            edits: {layer: function}. The function receives the coefficients [batch, pos, size] and their group, and
                returns the new coefficients. For routed experts, the coefficients cover all tokens, with zeros for
                tokens that are not routed to the expert.

        Returns:
            A context manager.
        """
        with ExitStack() as stack:
            for layer in self.layer_numbers(list(edits)):
                stack.enter_context(hooks.edit_coefficients(self.layers[layer], edits[layer]))
            yield

    def layer_numbers(self, layers: Sequence[int] | None) -> Sequence[int]:
        """Return the layers in ascending order. None means all layers.

        Raises:
            UnknownName: A layer does not exist.
        """
        if layers is None:
            return range(len(self.layers))
        for layer in layers:
            if not 0 <= layer < len(self.layers):
                raise UnknownName(f"layer {layer} does not exist: {self.name} has layers 0 to {len(self.layers) - 1}")
        return sorted(set(layers))

    def _check_tokens(self, tokens: Tensor) -> Tensor:
        if tokens.dim() != 2 or tokens.shape[1] == 0:
            raise SettingError(f"tokens must be [batch, pos] with at least one position, not {list(tokens.shape)}")
        if self.context is not None and tokens.shape[1] > self.context:
            raise SettingError(
                f"{tokens.shape[1]} tokens are more than {self.name} reads at once ({self.context}); cut the input"
            )
        return tokens.to(self.device)

    def __repr__(self) -> str:
        first = self.first
        kind = f"gated {first.activation}" if first.gated else first.activation
        return (
            f"<MemoryModel {self.name}: {self.family}, {len(self.layers)} layers x {first.memories} memories, {kind}>"
        )

    def _repr_html_(self) -> str:
        first = self.first
        facts = {
            "family": self.family,
            "layers": str(len(self.layers)),
            "memories": f"{sum(layer.memories for layer in self.layers):,}",
            "activation": f"{'gated ' if first.gated else ''}{first.activation}",
            "vocabulary": f"{self.vocabulary:,}",
            "context": "no limit" if self.context is None else f"{self.context:,}",
        }
        rows = "".join(f"<tr><th>{name}</th><td>{escape(fact)}</td></tr>" for name, fact in facts.items())
        return f"<table><caption>MemoryModel {escape(self.name)}</caption>{rows}</table>"


def _copy(states: Tensor) -> Tensor:
    copy = at_least_float32(states.detach())
    return copy.clone() if copy.dtype == states.dtype else copy


def fingerprint_of(config: str, tokenizer: Tokenizer | None, network: nn.Module) -> str:
    """Return a SHA-256 of configuration, tokenizer, and name, dtype, shape and bytes of each parameter."""
    digest = hashlib.sha256()
    digest.update(config.encode())
    digest.update(b"no tokenizer" if tokenizer is None else tokenizer.serialized().encode())
    for name, parameter in sorted(network.named_parameters()):
        digest.update(f"{name} {parameter.dtype} {list(parameter.shape)}".encode())
        data: Any = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(data)
    return digest.hexdigest()
