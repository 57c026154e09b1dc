"""The token with the highest score of each row, in one branch-free look; also of a weighted sum of two rows.

Lanes (tokens that lie LANES apart) are what the compiler turns into vectors; only lanes that reach the highest score
are looked at again, so that of equal scores the lowest token id is found. Knows arrays only.

The most likely tokens of r, y and o of a layer, and how likely a given token is in r, block by block.

States are scored by the model's own lens; a block of scores is looked at while it is warm and then dropped. Since
o = r + y, and the lens is linear but for the final norm's scale and its biases, the scores of o are a weighted sum of
those of r and y: a third of the products need not be made. That this holds is tried on the first states (an adaptive
softmax or a coarse dtype does not pass), and where two tokens are closer than rounding can tell, or r and y all but
cancel, o is scored itself. Ties go to the lower token id. This module knows a lens and states, not their origin.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memlens.errors import ModelError
from memlens.models.decompose import norm_scale
from memlens.models.lens import Lens, at_least_float32
from memlens.parallel import compiled
from memlens.vocab.kernels import Ends, FloatArray, IntArray, read_softmax

LANES = 256  # the highest of all lanes fit the first-level cache
_ONE, _ZERO = np.float32(1), np.float32(0)


@compiled
def _top_of(row: FloatArray, best: FloatArray) -> int:
    """The lowest token with the highest score; -1 where there is none, since scores are not finite."""
    lanes = best.shape[0]
    best[:] = row[:lanes]
    for start in range(lanes, row.shape[0], lanes):
        part = row[start : min(start + lanes, row.shape[0])]
        for c in range(part.shape[0]):
            best[c] = part[c] if part[c] > best[c] else best[c]
    most = best[0]
    for c in range(lanes):
        most = best[c] if best[c] > most else most
    if not np.isfinite(most):
        return -1
    lowest = row.shape[0]
    for c in range(lanes):
        if best[c] == most:
            token = c
            while row[token] != most:
                token += lanes
            lowest = min(lowest, token)
    return lowest


@compiled
def find_top_(scores: FloatArray, first: int, last: int, tokens: IntArray) -> None:
    """Fill tokens [rows] from first to last for scores [rows, vocabulary] float32."""
    best = np.empty(min(LANES, scores.shape[1]), np.float32)
    for r in range(first, last):
        tokens[r] = _top_of(scores[r], best)


@compiled
def find_top_of_sum_(
    left: FloatArray,  # [rows, vocabulary]
    right: FloatArray,  # [rows, vocabulary]
    constant: FloatArray,  # [vocabulary]
    weights: FloatArray,  # [rows, 3]
    first: int,
    last: int,
    tolerance: float,  # of the sum's highest number in size
    tokens: IntArray,  # [rows] out; -1 where another token is within the tolerance of the highest
) -> None:
    vocabulary = left.shape[1]
    best, total = np.empty(min(LANES, vocabulary), np.float32), np.empty(vocabulary, np.float32)
    for r in range(first, last):
        a, b = left[r], right[r]
        u, v, w = weights[r, 0], weights[r, 1], weights[r, 2]
        for c in range(vocabulary):
            total[c] = a[c] * u + b[c] * v + constant[c] * w
        token = _top_of(total, best)
        if token >= 0:
            size = max(abs(total[token]), abs(a[token] * u), abs(b[token] * v))
            bar = np.float32(total[token] - np.float32(tolerance) * size)
            close = _ZERO
            for c in range(vocabulary):
                close += _ONE if total[c] >= bar else _ZERO
            token = token if close < 2 else -1
        tokens[r] = token


_BLOCK_BYTES = 64 << 20  # measured: with fewer rows the product is slower, with more the block is cold when looked at
_LEAST_ROWS, _MOST_ROWS = 128, 1024
TRIED = 16  # states on which sums are compared with scores
_TOLERANCE = 1e-5  # of the largest score; a product in float32 is off by a tenth of that
_MOST_WEIGHT = 4.0  # where a part is so much larger than the sum, its rounding is as well


class Likelihood(NamedTuple):
    """How a given token stands in the distribution of each state."""

    p: NDArray[np.float64]  # [n]
    rank: IntArray  # [n]; 1 + tokens with a strictly higher score


class LayerTops(NamedTuple):
    """The top tokens of a layer's states, and how likely the final token is in r. All [n]."""

    residual: NDArray[np.int32]
    ffn: NDArray[np.int32]
    output: NDArray[np.int32]
    final: Likelihood


def rows_at_once(lens: Lens) -> int:
    """How many states make one block."""
    return min(max(_BLOCK_BYTES // (4 * lens.vocabulary), _LEAST_ROWS), _MOST_ROWS)


class Unembedding:
    """Reads states through a lens; `rows` of them at a time."""

    def __init__(self, lens: Lens, pool: ThreadPoolExecutor | None = None, threads: int = 1) -> None:
        self._lens, self._pool, self._threads = lens, pool, threads
        self.rows = rows_at_once(lens)
        self._constant = _constant_scores(lens)
        self._adds_up: bool | None = None  # not tried yet

    def use_pool(self, pool: ThreadPoolExecutor | None) -> None:
        """Compute on another pool from here on."""
        self._pool = pool

    def top(self, states: Tensor) -> NDArray[np.int32]:
        """top(h) of states [n, d]."""
        return np.concatenate([self._top(self._scores(states[part])) for part in self._parts(len(states))])

    def layer(self, r: Tensor, y: Tensor, o: Tensor, final: NDArray[np.int32], last: bool) -> LayerTops:
        """Tops of r, y and o [n, d]; in the last layer top(o) is the final token [n], which is known."""
        if self._adds_up is None:
            self._adds_up = self._try_sums(r[:TRIED], y[:TRIED], o[:TRIED])
        parts = [self._layer_part(r[part], y[part], o[part], final[part], last) for part in self._parts(len(r))]
        residual, ffn, output = (np.concatenate([part[i] for part in parts]) for i in range(3))
        likelihood = (np.concatenate(column) for column in zip(*(part.final for part in parts), strict=True))
        return LayerTops(residual, ffn, output, Likelihood(*likelihood))

    def _layer_part(self, r: Tensor, y: Tensor, o: Tensor, final: NDArray[np.int32], last: bool) -> LayerTops:
        residual_scores = self._scores(r)
        residual = self._top(residual_scores)
        likelihood = self._likelihood(residual_scores, residual, final)
        ffn_scores = self._scores(y)
        ffn = self._top(ffn_scores)
        if last:
            return LayerTops(residual, ffn, final, likelihood)
        if not self._adds_up:
            del residual_scores, ffn_scores
            return LayerTops(residual, ffn, self._top(self._scores(o)), likelihood)
        output = self._top_of_sum(residual_scores, ffn_scores, self._weights(r, y, o))
        unsure = np.flatnonzero(output < 0)
        if len(unsure):
            output[unsure] = self._top(self._scores(o[torch.from_numpy(unsure).to(o.device)]))
        return LayerTops(residual, ffn, output, likelihood)

    def _parts(self, count: int) -> list[slice]:
        return [slice(first, first + self.rows) for first in range(0, count, self.rows)]

    def _scores(self, states: Tensor) -> Tensor:
        """[rows, vocabulary] float32, before soft-capping."""
        return self._lens.state_logits(states).to("cpu", torch.float32).contiguous()

    def _top(self, scores: Tensor) -> NDArray[np.int32]:
        array = scores.numpy()
        tokens = np.empty(len(array), np.int32)
        self._in_pieces(len(array), lambda first, last: find_top_(array, first, last, tokens))
        if (tokens < 0).any():
            raise ModelError(
                "a state has scores that are NaN or infinite; the dtype is too small for this model: try float32"
            )
        return tokens

    def _weights(self, r: Tensor, y: Tensor, o: Tensor) -> NDArray[np.float32]:
        """[n, 3]: scores(o) = scores(r) w0 + scores(y) w1 + constant w2."""
        norm = self._lens.final_norm
        if norm is None:
            left = right = torch.ones(len(o), 1)
        else:
            scale = norm_scale(norm, o)
            left, right = norm_scale(norm, r) / scale, norm_scale(norm, y) / scale
        return torch.cat([left, right, 1 - left - right], dim=1).to("cpu", torch.float32).numpy()

    def _top_of_sum(self, left: Tensor, right: Tensor, weights: NDArray[np.float32]) -> NDArray[np.int32]:
        """-1 where the sum is not exact enough to tell."""
        a, b, constant = left.numpy(), right.numpy(), self._constant
        tokens = np.empty(len(a), np.int32)
        self._in_pieces(
            len(a), lambda first, last: find_top_of_sum_(a, b, constant, weights, first, last, _TOLERANCE, tokens)
        )
        tokens[np.abs(weights).max(1) > _MOST_WEIGHT] = -1
        return tokens

    def _try_sums(self, r: Tensor, y: Tensor, o: Tensor) -> bool:
        """Are sums of scores the scores of sums, for this lens?"""
        weights = self._weights(r, y, o)[:, :, None]
        left, right, direct = (self._scores(states).numpy() for states in (r, y, o))
        added = left * weights[:, 0] + right * weights[:, 1] + self._constant * weights[:, 2]
        allowed = _TOLERANCE * np.abs(direct).max(1) * np.maximum(np.abs(weights).max((1, 2)), 1)
        return bool((np.abs(added - direct).max(1) <= allowed).all())

    def _likelihood(self, scores: Tensor, tops: NDArray[np.int32], tokens: NDArray[np.int32]) -> Likelihood:
        # a cap keeps the order, so that the tops stay what they are and only their scores change
        array = self._lens.capped(scores).numpy()
        rows = np.arange(len(array))
        highest = array[rows, tops][:, None]
        nothing = np.empty((len(array), 0), np.int32), np.empty((len(array), 0), np.float32)
        softmax = read_softmax(array, Ends(tops[:, None], highest, *nothing), tokens, self._pool)
        return Likelihood(softmax.p(array[rows, tokens][:, None])[:, 0], softmax.above + 1)

    def _in_pieces(self, rows: int, work: Callable[[int, int], None]) -> None:
        if self._pool is None:
            work(0, rows)
            return
        edges = np.linspace(0, rows, self._threads + 1).astype(int).tolist()
        list(self._pool.map(work, edges[:-1], edges[1:]))


def _constant_scores(lens: Lens) -> NDArray[np.float32]:
    """[vocabulary]: what is in the scores whatever the state is."""
    constant = torch.zeros(lens.vocabulary)
    if lens.final_norm is not None and lens.final_norm.bias is not None:
        constant = constant + (lens.embedding @ lens.final_norm.bias).cpu()
    if lens.bias is not None:
        constant = constant + at_least_float32(lens.bias).cpu()
    return constant.to(torch.float32).numpy()
