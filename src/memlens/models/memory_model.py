"""One short text for one model: the same wherever its files lie, another as soon as anything that counts differs.

This module knows no architecture; what of a configuration belongs to the model, the caller says.

What a forward pass does at a few chosen positions, layer by layer, without keeping the others.

`MemoryModel.record` copies whole batches; a sample of prefixes needs one position of a sentence in twenty. Here a hook
picks the chosen rows out of [batch * pos] as a layer is reached, so that memory grows with the sample and not with the
text around it. This module knows nothing of sentences.

A language model seen as memories: the one class that the rest of memlens works with.

Anything that yields coefficients and values can be a MemoryModel. This base class does the watching, recording and
editing, which need nothing but the modules named by `FeedForward`; a subclass knows how to run its network.
It knows no architecture, no files and no corpus.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memlens.errors import ModelError, SettingError, UnknownName
from memlens.models import hooks
from memlens.models.feed_forward import FeedForward
from memlens.models.lens import at_least_float32
from memlens.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from memlens.models.lens import Lens
    from memlens.models.proof import Proof


def fingerprint_of(config: str, tokenizer: Tokenizer | None, network: nn.Module) -> str:
    """sha256 over the configuration, the tokenizer and each parameter's name, dtype, shape and bytes."""
    digest = hashlib.sha256()
    digest.update(config.encode())
    digest.update(b"no tokenizer" if tokenizer is None else tokenizer.serialized().encode())
    for name, parameter in sorted(network.named_parameters()):
        digest.update(f"{name} {parameter.dtype} {list(parameter.shape)}".encode())
        data: Any = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(data)
    return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Positions:
    """What every layer did at n positions; o = r + y. All are copies, float32 or finer."""

    embedding: Tensor  # [n, d], the input of the first layer
    r: dict[int, Tensor]  # [n, d]
    y: dict[int, Tensor]  # [n, d]
    o: dict[int, Tensor]  # [n, d]
    coefficients: dict[int, Tensor]  # [n, memories], of the layers asked for

    def __len__(self) -> int:
        return len(self.embedding)

    def attention(self, layer: int) -> Tensor:
        """What a layer added to the stream besides its memories, [n, d]."""
        before = self.embedding if layer == 0 else self.o[layer - 1]
        return self.r[layer] - before

    def __getitem__(self, part: slice) -> Positions:
        def cut(store: dict[int, Tensor]) -> dict[int, Tensor]:
            return {layer: tensor[part] for layer, tensor in store.items()}

        return Positions(self.embedding[part], cut(self.r), cut(self.y), cut(self.o), cut(self.coefficients))

    def copy(self) -> Positions:
        """The same numbers, so that a small part need not keep the whole in memory."""
        return Positions.join([self, self[:0]])

    @staticmethod
    def join(parts: list[Positions]) -> Positions:
        """The positions of several passes, one after another."""

        def joined(stores: list[dict[int, Tensor]]) -> dict[int, Tensor]:
            return {layer: torch.cat([store[layer] for store in stores]) for layer in stores[0]}

        return Positions(
            torch.cat([part.embedding for part in parts]),
            joined([part.r for part in parts]),
            joined([part.y for part in parts]),
            joined([part.o for part in parts]),
            joined([part.coefficients for part in parts]),
        )


def record_positions(
    model: MemoryModel, tokens: Tensor, rows: Tensor, layers: Collection[int] | None = None
) -> Positions:
    """Run tokens [batch, pos] and keep the chosen rows of the flattened [batch * pos], [n] int64.

    States are kept of all layers, coefficients of `layers` (None = all).
    """
    rows = rows.to(model.device)
    embedding: dict[int, Tensor] = {}
    y: dict[int, Tensor] = {}
    o: dict[int, Tensor] = {}
    coefficients: dict[int, Tensor] = {}

    def keep(store: dict[int, Tensor], layer: int) -> Callable[[Tensor], None]:
        def pick(states: Tensor) -> None:  # [batch, pos, ...]
            # advanced indexing copies, so that later in-place changes do not reach what is kept
            store[layer] = at_least_float32(states.detach().flatten(0, 1)[rows])

        return pick

    with ExitStack() as stack:
        stack.enter_context(hooks.on_input(model.layers[0].block, keep(embedding, 0)))
        for layer, memories in enumerate(model.layers):
            if layers is None or layer in layers:
                stack.enter_context(hooks.watching(memories, keep(coefficients, layer)))
            stack.enter_context(hooks.watching_addition(memories, keep(y, layer)))
            stack.enter_context(hooks.on_output(memories.block, keep(o, layer)))
        model.run_body(tokens)
    return Positions(embedding[0], {layer: o[layer] - y[layer] for layer in o}, y, o, coefficients)


@dataclass
class Recording:
    """What the latest forward pass did, layer by layer. All are copies: later in-place changes do not reach them.

    o = r + y in every layer: y is what the feed-forward block adds to the residual stream (after its post-norm where
    it has one), o the layer's output, r what the stream holds without y. States are float32 or finer.
    """

    coefficients: dict[int, Tensor] = field(default_factory=dict)  # [batch, pos, memories]
    y: dict[int, Tensor] = field(default_factory=dict)  # [batch, pos, d]
    o: dict[int, Tensor] = field(default_factory=dict)  # [batch, pos, d]
    r: dict[int, Tensor] = field(default_factory=dict)  # [batch, pos, d], o - y
    embedding: Tensor | None = None  # [batch, pos, d], the input of the first layer


class MemoryModel(ABC):
    """A causal language model with its tokenizer, its layers of memories and a lens onto its vocabulary."""

    def __init__(
        self,
        *,
        name: str,
        source: str,
        family: str,
        network: nn.Module,
        layers: Sequence[FeedForward],
        lens: Lens,
        tokenizer: Tokenizer | None,
        context: int | None,
    ) -> None:
        self.name = name  # as the user gave it: a folder's name or a Hub id
        self.source = source  # what load() takes to get this model again; "" for a loaded object
        self.family = family
        self.network = network
        self.layers = layers
        self.lens = lens
        self.context = context  # the longest input, BOS included; None where there is no limit
        self.proof: Proof | None = None
        self._tokenizer = tokenizer

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ModelError(f"{self.name} was given without a tokenizer; pass tokenizer= to load() to work with text")
        return self._tokenizer

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    @property
    def width(self) -> int:
        return self.layers[0].values.shape[1]

    @property
    def vocabulary(self) -> int:
        """Rows of the output embedding."""
        return self.lens.vocabulary

    @property
    def device(self) -> torch.device:
        return self.layers[0].values.device

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0].values.dtype

    def run_body(self, tokens: Tensor, gradients: bool = False) -> Tensor:
        """The state after the last block and before the final norm, [batch, pos, d], for tokens [batch, pos] int64.

        No vocabulary scores are computed. Rows may be padded on the right with any token: attention is causal.
        `gradients`: let it be differentiated, by coefficients that an edit has put in.
        """
        with torch.set_grad_enabled(gradients):
            return self._run_body(self._checked(tokens))

    def logits(self, tokens: Tensor) -> Tensor:
        """The model's own scores, [batch, pos, vocabulary], soft-capping included."""
        with torch.no_grad():
            return self._logits(self._checked(tokens))

    @abstractmethod
    def _run_body(self, tokens: Tensor) -> Tensor: ...

    @abstractmethod
    def _logits(self, tokens: Tensor) -> Tensor: ...

    @abstractmethod
    def fingerprint(self) -> str:
        """sha256 of configuration, tokenizer and every parameter; the same wherever the model's folder lies."""

    def save(self, folder: Path) -> None:
        """Write the weights as they are now, with configuration and tokenizer, as a safetensors checkpoint."""
        raise ModelError(
            f"{self.name} ({self.family}) cannot be saved as a safetensors checkpoint; use a Hugging Face checkpoint"
        )

    @contextmanager
    def watch(
        self, on_coefficients: Callable[[int, Tensor], None], layers: Sequence[int] | None = None
    ) -> Iterator[None]:
        """Within, each forward pass calls on_coefficients(layer, m [batch, pos, memories]) as a layer is reached.

        Nothing is stored or copied: what is to outlive the call, the callee copies.
        """
        with ExitStack() as stack:
            for layer in self._chosen(layers):
                stack.enter_context(hooks.watching(self.layers[layer], _with_layer(on_coefficients, layer)))
            yield

    @contextmanager
    def record(
        self, layers: Sequence[int] | None = None, coefficients: bool = True, states: bool = True
    ) -> Iterator[Recording]:
        """Within, each forward pass fills the Recording anew, for the chosen layers."""
        recording = Recording()

        def keep_embedding(embedding: Tensor) -> None:
            recording.embedding = _copied(embedding)

        with ExitStack() as stack:
            if states:
                stack.enter_context(hooks.on_input(self.layers[0].block, keep_embedding))
            for layer in self._chosen(layers):
                memories = self.layers[layer]
                if coefficients:
                    keep = _keep_as_is(recording.coefficients, layer)
                    stack.enter_context(hooks.watching(memories, keep))
                if states:
                    stack.enter_context(hooks.watching_addition(memories, _keep(recording.y, layer)))
                    stack.enter_context(hooks.on_output(memories.block, _keep_output(recording, layer)))
            yield recording

    @contextmanager
    def edit(self, edits: Mapping[int, Callable[[Tensor], Tensor]]) -> Iterator[None]:
        """Within, each layer named uses its function of m [batch, pos, memories]; nested edits run outer first."""
        with ExitStack() as stack:
            for layer in self._chosen(list(edits)):
                stack.enter_context(hooks.editing(self.layers[layer], edits[layer]))
            yield

    def _chosen(self, layers: Sequence[int] | None) -> Sequence[int]:
        if layers is None:
            return range(len(self.layers))
        for layer in layers:
            if not 0 <= layer < len(self.layers):
                raise UnknownName(f"layer {layer} does not exist: {self.name} has layers 0 to {len(self.layers) - 1}")
        return sorted(set(layers))

    def _checked(self, tokens: Tensor) -> Tensor:
        if tokens.dim() != 2 or tokens.shape[1] == 0:
            raise SettingError(f"tokens must be [batch, pos] with at least one position, not {list(tokens.shape)}")
        if self.context is not None and tokens.shape[1] > self.context:
            raise SettingError(
                f"{tokens.shape[1]} tokens are more than {self.name} reads at once ({self.context}); cut the input"
            )
        return tokens.to(self.device)

    def __repr__(self) -> str:
        first = self.layers[0]
        kind = f"gated {first.activation}" if first.gated else first.activation
        return (
            f"<MemoryModel {self.name}: {self.family}, {len(self.layers)} layers x {first.memories} memories, {kind}>"
        )

    def _repr_html_(self) -> str:
        first = self.layers[0]
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


def _with_layer(use: Callable[[int, Tensor], None], layer: int) -> Callable[[Tensor], None]:
    return lambda coefficients: use(layer, coefficients)


def _keep(store: dict[int, Tensor], layer: int) -> Callable[[Tensor], None]:
    def keep(states: Tensor) -> None:
        store[layer] = _copied(states)

    return keep


def _keep_output(recording: Recording, layer: int) -> Callable[[Tensor], None]:
    def keep(output: Tensor) -> None:
        recording.o[layer] = _copied(output)
        recording.r[layer] = recording.o[layer] - recording.y[layer]  # a block adds y before it is done

    return keep


def _keep_as_is(store: dict[int, Tensor], layer: int) -> Callable[[Tensor], None]:
    def keep(coefficients: Tensor) -> None:
        store[layer] = coefficients.detach().clone()

    return keep


def _copied(states: Tensor) -> Tensor:
    copy = at_least_float32(states.detach())
    return copy.clone() if copy.dtype == states.dtype else copy
