"""The paper's transformer as torch modules: adaptive input, sinusoids, pre-norm blocks, adaptive softmax.

Words are sorted by frequency and cut into bands; rarer bands have narrower vectors. On the way in every band, the
first one too, goes through its own projection. On the way out the first band, the head, is scored without one, and
beside its words stands one class for each further band; a rare word's probability is its class's times its share
within the band (Grave et al. 2017; Baevski and Auli 2019).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, pad, scaled_dot_product_attention

from memlens.models.lens import at_least_float32

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": gelu,
    "gelu_accurate": partial(gelu, approximate="tanh"),
    "gelu_fast": partial(gelu, approximate="tanh"),  # an older name of the same
}
_FIRST_POSITION = 2  # positions count from the padding token's id plus one
_SCORES_AT_ONCE = 1 << 24  # numbers that the softmax works on at a time, beside its result


@dataclass(frozen=True)
class Shape:
    """The sizes and kinds of a network; bands are given as the word ids at which each ends."""

    layers: int
    width: int
    memories: int
    heads: int
    activation: str
    input_ends: tuple[int, ...]
    output_ends: tuple[int, ...]
    input_factor: float
    output_factor: float
    scale: float  # what word vectors are multiplied with

    @property
    def vocabulary(self) -> int:
        return self.output_ends[-1]


def band_widths(width: int, factor: float, bands: int) -> list[int]:
    return [int(width // factor**band) for band in range(bands)]


class AdaptiveInput(nn.Module):
    """Word vectors, narrower for rarer words, each band projected to the model's width."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.ends, self.width = shape.input_ends, shape.width
        widths = band_widths(shape.width, shape.input_factor, len(self.ends))
        sizes = [end - start for start, end in zip((0, *self.ends), self.ends, strict=False)]
        self.words = nn.ModuleList(nn.Embedding(size, narrow) for size, narrow in zip(sizes, widths, strict=True))
        self.projections = nn.ModuleList(nn.Linear(narrow, shape.width, bias=False) for narrow in widths)

    def forward(self, tokens: Tensor) -> Tensor:
        flat = tokens.reshape(-1)
        some_weight = next(self.parameters())
        vectors = some_weight.new_empty(len(flat), self.width)
        start = 0
        for end, words, projection in zip(self.ends, self.words, self.projections, strict=True):
            where = ((flat >= start) & (flat < end)).nonzero().squeeze(1)
            vectors[where] = projection(words(flat[where] - start))
            start = end
        return vectors.view(*tokens.shape, self.width)

    def table(self) -> Tensor:
        """All words' projected vectors, [words, d], computed at each call."""
        pieces = [projection(words.weight) for words, projection in zip(self.words, self.projections, strict=True)]
        return torch.cat(pieces)


class TailBand(nn.Module):
    """The words of one rarer band on the output side."""

    def __init__(self, width: int, narrow: int, size: int) -> None:
        super().__init__()
        self.projection = nn.Parameter(torch.empty(width, narrow))  # [d, narrow], as the input side stores its own
        self.words = nn.Parameter(torch.empty(size, narrow))


class AdaptiveSoftmax(nn.Module):
    """Log-probabilities over all words, exact: no band is left out or approximated."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.ends = shape.output_ends
        widths = band_widths(shape.width, shape.output_factor, len(self.ends))
        self.words = nn.Parameter(torch.empty(self.ends[0], shape.width))
        self.classes = nn.Parameter(torch.empty(len(self.ends) - 1, shape.width))
        self.tails = nn.ModuleList(
            TailBand(shape.width, narrow, end - start)
            for start, end, narrow in zip(self.ends, self.ends[1:], widths[1:], strict=False)
        )

    def forward(self, states: Tensor) -> Tensor:
        """[..., vocabulary] for states [..., d], float32 or finer, computed in the dtype of `states`.

        Only the result has the size of the vocabulary: rows go through in small blocks, each written into its place.
        """
        flat = states.reshape(-1, states.shape[-1])
        result = flat.new_empty(len(flat), self.ends[-1], dtype=torch.promote_types(flat.dtype, torch.float32))
        head = torch.cat([self.words, self.classes]).to(flat.dtype)
        tails = [(tail.projection.to(flat.dtype), tail.words.to(flat.dtype)) for tail in self._each_tail()]
        rows = max(1, _SCORES_AT_ONCE // self.ends[-1])
        for first in range(0, len(flat), rows):
            self._fill_(result[first : first + rows], flat[first : first + rows], head, tails)
        return result.view(*states.shape[:-1], self.ends[-1])

    def _fill_(self, result: Tensor, states: Tensor, head: Tensor, tails: list[tuple[Tensor, Tensor]]) -> None:
        scores = at_least_float32(states @ head.T)  # [rows, head words + classes]
        scores = scores - scores.logsumexp(-1, keepdim=True)
        start = self.ends[0]
        result[:, :start] = scores[:, :start]
        for band, (projection, words) in enumerate(tails):
            end = self.ends[band + 1]
            within = at_least_float32((states @ projection) @ words.T)  # [rows, words of the band]
            # the class's log-probability joins the normaliser, so that the band is gone over once
            shift = within.logsumexp(-1, keepdim=True) - scores[:, self.ends[0] + band, None]
            if within.requires_grad:  # what is written into its place by hand cannot be differentiated
                result[:, start:end] = within - shift
            else:
                torch.sub(within, shift, out=result[:, start:end])
            start = end

    def table(self) -> Tensor:
        """Each word's own direction, [vocabulary, d]: its score is state @ direction before it is normalised."""
        return torch.cat([self.words, *(tail.words @ tail.projection.T for tail in self._each_tail())])

    def rows(self, words: Tensor) -> Tensor:
        """[n, d] for words [n]: each word's own direction, and for a rarer word the row of its band's class added."""
        rows = self.words.new_empty(len(words), self.words.shape[1])
        is_head = words < self.ends[0]
        rows[is_head] = self.words[words[is_head]]
        for band, tail in enumerate(self._each_tail()):
            start, end = self.ends[band : band + 2]
            where = (words >= start) & (words < end)
            rows[where] = tail.words[words[where] - start] @ tail.projection.T + self.classes[band]
        return rows

    def _each_tail(self) -> Iterator[TailBand]:
        for tail in self.tails:
            assert isinstance(tail, TailBand)
            yield tail


class CausalAttention(nn.Module):
    """Causal self-attention; queries, keys and values of all heads from one projection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, states: Tensor) -> Tensor:
        batch, positions, width = states.shape
        parts = self.queries_keys_values(states).view(batch, positions, 3, self.heads, width // self.heads)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)  # each [batch, heads, pos, d / heads]
        mixed = scaled_dot_product_attention(queries, keys, values, is_causal=True)
        output: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, positions, width))
        return output


class AdaptiveBlock(nn.Module):
    """One layer: attention, then the memories; a LayerNorm before each."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = CausalAttention(shape.width, shape.heads)
        self.memory_norm = nn.LayerNorm(shape.width)
        self.keys = nn.Linear(shape.width, shape.memories)
        self.values = nn.Linear(shape.memories, shape.width)
        self.activate = ACTIVATIONS[shape.activation]

    def forward(self, states: Tensor) -> Tensor:
        states = states + self.attention(self.attention_norm(states))
        added: Tensor = self.values(self.activate(self.keys(self.memory_norm(states))))
        return states + added


class AdaptiveTransformer(nn.Module):
    """Tokens [batch, pos] to log-probabilities [batch, pos, vocabulary]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.scale = shape.scale
        self.input = AdaptiveInput(shape)
        self.blocks = nn.ModuleList(AdaptiveBlock(shape) for _ in range(shape.layers))
        self.output = AdaptiveSoftmax(shape)

    def forward(self, tokens: Tensor) -> Tensor:
        log_probabilities: Tensor = self.output(self.body(tokens))
        return log_probabilities

    def body(self, tokens: Tensor) -> Tensor:
        """The state after the last block, [batch, pos, d]; there is no final norm."""
        states: Tensor = self.scale * self.input(tokens)
        states = states + sinusoids(tokens.shape[1], states.shape[-1]).to(states)
        for block in self.blocks:
            states = block(states)
        return states


def sinusoids(positions: int, width: int) -> Tensor:
    """[pos, d] for positions counted from 2: sines of all frequencies, then their cosines."""
    half = width // 2
    frequencies = torch.exp(torch.arange(half, dtype=torch.float32) * -(math.log(10_000) / (half - 1)))
    angles = torch.arange(_FIRST_POSITION, _FIRST_POSITION + positions, dtype=torch.float32)[:, None] * frequencies
    return pad(torch.cat([angles.sin(), angles.cos()], dim=1), (0, width % 2))
