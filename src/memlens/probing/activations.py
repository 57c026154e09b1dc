"""Coefficients of memories and residual states, at the last token of each text or pooled over its tokens."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memlens.errors import SettingError
from memlens.models.groups import CoefficientBlock
from memlens.models.hooks import on_output
from memlens.models.lens import at_least_float32
from memlens.models.memory_model import MemoryModel
from memlens.progress import Progress, no_progress

_BATCH_TOKENS = 4096
_BYTES_AT_ONCE = 1 << 30  # maximum size in bytes of the activations that one pass stores
Layer = tuple[int, NDArray[np.float32], NDArray[np.float32]]  # layer, m [texts, memories], states [texts, d]


def encode_texts(
    model: MemoryModel, texts: Sequence[str], max_length: int | None = None
) -> tuple[list[list[int]], int]:
    """Return the tokens of each text without BOS, and the number of truncated texts.

    Texts longer than the model's context or `max_length` are truncated at the start, because a probe reads the last
    token.
    """
    before = int(model.tokenizer.adds_bos)
    limits = [limit for limit in (model.context and model.context - before, max_length) if limit is not None]
    longest = min(limits) if limits else None
    encoded = [text.ids for text in model.tokenizer.encode(texts)]
    for place, ids in enumerate(encoded):
        if not ids:
            raise SettingError(f"text {place} ({texts[place][:40]!r}) has no tokens; give it at least one word")
    cut = 0 if longest is None else sum(len(ids) > longest for ids in encoded)
    return ([ids[-longest:] for ids in encoded] if longest else encoded), cut


def read_activations(
    model: MemoryModel,
    encoded: Sequence[Sequence[int]],
    at: str,
    layers: Sequence[int],
    progress: Progress = no_progress,
) -> Iterator[Layer]:
    """Yield the coefficients and residual states of all texts, layer by layer.

    `at` selects the last token, or the mean or maximum over tokens. States are taken after the block. One pass reads as
    many layers as fit in RAM.
    """
    selected = [layer for layer in layers if model.layers[layer].groups]
    row = 4 * max(model.layers[layer].memories + model.width for layer in selected)
    at_once = max(_BYTES_AT_ONCE // (row * len(encoded)), 1)
    for first in range(0, len(selected), at_once):
        group = selected[first : first + at_once]
        m = {layer: np.zeros((len(encoded), model.layers[layer].memories), np.float32) for layer in group}
        states = {layer: np.zeros((len(encoded), model.width), np.float32) for layer in group}
        for done, texts in _batches(encoded):
            progress("texts", done + first * len(encoded), len(encoded) * len(selected))
            _run(model, [encoded[text] for text in texts], texts, at, m, states)
        for layer in group:
            yield layer, m.pop(layer), states.pop(layer)


def _batches(encoded: Sequence[Sequence[int]]) -> Iterator[tuple[int, list[int]]]:
    """Yield batches of texts of similar length, each with the number of texts in earlier batches."""
    batch: list[int] = []
    done = 0
    for text in sorted(range(len(encoded)), key=lambda place: len(encoded[place])):
        if batch and (len(batch) + 1) * len(encoded[text]) > _BATCH_TOKENS:
            yield done, batch
            done, batch = done + len(batch), []
        batch.append(text)
    yield done, batch


def _run(
    model: MemoryModel,
    tokens: Sequence[Sequence[int]],
    texts: list[int],
    at: str,
    m: dict[int, NDArray[np.float32]],
    states: dict[int, NDArray[np.float32]],
) -> None:
    """Run a batch of texts and store its rows of `m` and `states`."""
    bos = [model.tokenizer.bos] if model.tokenizer.adds_bos else []
    longest = max(map(len, tokens))
    # attention is causal, so the padding after a text does not change its activations
    fed = torch.tensor([[*bos, *ids, *[ids[0]] * (longest - len(ids))] for ids in tokens])
    pool = TokenPool(at, [len(ids) for ids in tokens], len(bos), model.device)

    def keep(layer: int, block: CoefficientBlock) -> None:
        coefficients = pool.rows(block) if at == "last" else pool(block.everywhere())
        m[layer][texts, block.group.columns] = coefficients

    def keep_state(layer: int, output: Tensor) -> None:
        states[layer][texts] = pool(output)

    with ExitStack() as stack:
        stack.enter_context(model.watch(keep, list(m)))
        for layer in states:
            stack.enter_context(on_output(model.layers[layer].block, partial(keep_state, layer)))
        model.run_body(fed)


class TokenPool:
    """A reduction of the rows of all tokens of a text to one row per text."""

    def __init__(self, at: str, lengths: Sequence[int], shift: int, device: torch.device) -> None:
        self.at = at
        ends = torch.tensor(lengths, device=device) + shift
        places = torch.arange(max(lengths) + shift, device=device)
        self.last = ends - 1
        self.own = (places >= shift) & (places < ends[:, None])  # [batch, pos]: False for BOS and padding

    def rows(self, block: CoefficientBlock) -> NDArray[Any]:
        """Return the rows of the last tokens without copying the rows of other tokens."""
        batch = torch.arange(len(self.last), device=self.last.device)
        return _array(block.at(batch * block.shape[1] + self.last)[0])

    def __call__(self, numbers: Tensor) -> NDArray[Any]:
        """Reduce an array [batch, pos, n] over the tokens of each text to [batch, n]."""
        numbers = at_least_float32(numbers.detach())
        if self.at == "last":
            return _array(numbers[torch.arange(len(self.last), device=numbers.device), self.last])
        mask = self.own[..., None]
        if self.at == "max":
            return _array(numbers.masked_fill(~mask, -torch.inf).amax(1))
        return _array((numbers * mask).sum(1) / mask.sum(1))


def _array(tensor: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = tensor.detach().float().cpu().numpy()
    return array
