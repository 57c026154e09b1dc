"""Readings of one layer at sampled prefixes: top tokens of r, y and o, active memories, contributions to the logit.

r and o are scored by the model's own lens, y as the values table reads values; a block of scores is looked at while it
is in the cache and then dropped. Since o = r + y, and the lens is linear but for the final norm's scale and its biases,
the scores of o are a weighted sum of those of r and y: a third of the products need not be made. That this holds is
tried on the first states (an adaptive softmax, a coarse dtype or raw values do not pass), and where two tokens are
closer than rounding can tell, or r and y all but cancel, o is scored itself. Ties go to the lower token id. The token
that a value promotes is looked up in the values table.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memlens.errors import ModelError
from memlens.experiments.experiment import kind_columns
from memlens.models.decompose import LayerUse, LogitDecomposition, PositionStates, norm_scale
from memlens.models.lens import Lens, at_least_float32
from memlens.models.memory_model import MemoryModel
from memlens.parallel import compiled, compiled_part
from memlens.vocab.kernels import Ends, FloatArray, IntArray, read_softmax

Columns = dict[str, Any]  # name -> [n] array, or [n] list of lists (None where there is nothing to list)

TOP_MEMORIES = (1, 10, 100)  # how many of the strongest memories are added up
LISTED = 10  # memories that are named where a composition happens
LANES = 256  # tokens that lie so far apart make one vector lane; the highest of all lanes fit the first-level cache
_ONE, _ZERO = np.float32(1), np.float32(0)
_BLOCK_BYTES = 64 << 20  # measured: with fewer rows the product is slower, with more the block is cold when looked at
_LEAST_ROWS, _MOST_ROWS = 128, 1024
TRIED = 16  # states on which sums are compared with scores
_TOLERANCE = 1e-5  # of the largest score; a product in float32 is off by a tenth of that
_MOST_WEIGHT = 4.0  # where a part is so much larger than the sum, its rounding is as well


@compiled_part
def _top_of(row: FloatArray, best: FloatArray) -> int:
    """The lowest token with the highest score; -1 where there is none, since scores are not finite."""
    lanes = best.shape[0]
    for c in range(lanes):  # an assignment of arrays takes far longer to compile
        best[c] = row[c]
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


class Likelihood(NamedTuple):
    """The probability and the rank of a given token in the distribution of each state."""

    p: NDArray[np.float64]  # [n]
    rank: IntArray  # [n]; 1 + tokens with a strictly higher score


class ValueReading(NamedTuple):
    """The reading with which the values of an index were made; y is read in the same way."""

    reading: str | None = None  # None: the model's own
    kept: NDArray[np.int64] | None = None  # the tokens they were read over, in order; None for all


class LayerTops(NamedTuple):
    """The top tokens of a layer's states, and how likely the final token is in r. All [n]."""

    residual: NDArray[np.int32]
    ffn: NDArray[np.int32]
    output: NDArray[np.int32]
    final: Likelihood


def rows_at_once(lens: Lens) -> int:
    """The number of states in one block."""
    return min(max(_BLOCK_BYTES // (4 * lens.vocabulary), _LEAST_ROWS), _MOST_ROWS)


class Unembedding:
    """Reads states through a lens, `rows` of them at a time; y as `values` says, None for the model's own reading."""

    def __init__(
        self,
        lens: Lens,
        pool: ThreadPoolExecutor | None = None,
        threads: int = 1,
        values: ValueReading | None = None,
    ) -> None:
        self._lens, self._pool, self._threads = lens, pool, threads
        self._reading = lens.checked_reading(values.reading if values else None)
        self._kept = values.kept if values else None
        self.rows = rows_at_once(lens)
        self._constant = _constant_scores(lens)
        self._adds_up: bool | None = None  # not tried yet

    def use_pool(self, pool: ThreadPoolExecutor | None) -> None:
        """Compute on another pool from here on."""
        self._pool = pool

    def top(self, states: Tensor) -> NDArray[np.int32]:
        """top(h) of states [n, d]."""
        return np.concatenate([self._top(self._scores(states[part])) for part in self._parts(len(states))])

    def layer(self, layer: int, r: Tensor, y: Tensor, o: Tensor, final: NDArray[np.int32], last: bool) -> LayerTops:
        """Tops of r, y and o [n, d]; in the last layer top(o) is the final token [n], which is known."""
        if self._adds_up is None:
            self._adds_up = self._try_sums(layer, r[:TRIED], y[:TRIED], o[:TRIED])
        parts = [self._layer_part(layer, r[part], y[part], o[part], final[part], last) for part in self._parts(len(r))]
        residual, ffn, output = (np.concatenate([part[i] for part in parts]) for i in range(3))
        likelihood = (np.concatenate(column) for column in zip(*(part.final for part in parts), strict=True))
        return LayerTops(residual, ffn, output, Likelihood(*likelihood))

    def _layer_part(
        self, layer: int, r: Tensor, y: Tensor, o: Tensor, final: NDArray[np.int32], last: bool
    ) -> LayerTops:
        residual_scores = self._scores(r)
        residual = self._top(residual_scores)
        likelihood = self._likelihood(residual_scores, residual, final)
        ffn_scores = self._scores_of_addition(layer, y)
        ffn = self._top_of_addition(ffn_scores)
        if last:
            return LayerTops(residual, ffn, final, likelihood)
        if not self._adds_up:
            del residual_scores, ffn_scores
            return LayerTops(residual, ffn, self._top(self._scores(o)), likelihood)
        output = self._top_of_sum(residual_scores, ffn_scores, self._weights(r, o))
        unsure = np.flatnonzero(output < 0)
        if len(unsure):
            output[unsure] = self._top(self._scores(o[torch.from_numpy(unsure).to(o.device)]))
        return LayerTops(residual, ffn, output, likelihood)

    def _parts(self, count: int) -> list[slice]:
        return [slice(first, first + self.rows) for first in range(0, count, self.rows)]

    def _scores(self, states: Tensor) -> Tensor:
        """[rows, vocabulary] float32, before soft-capping."""
        return self._lens.state_logits(states).to("cpu", torch.float32).contiguous()

    def _scores_of_addition(self, layer: int, y: Tensor) -> Tensor:
        """[rows, vocabulary] float32, as values are read."""
        return self._lens.addition_scores(y, layer, self._reading).to("cpu", torch.float32).contiguous()

    def _top_of_addition(self, scores: Tensor) -> NDArray[np.int32]:
        if self._kept is None:
            return self._top(scores)
        return self._kept[self._top(scores.index_select(1, torch.from_numpy(self._kept)))].astype(np.int32)

    def _top(self, scores: Tensor) -> NDArray[np.int32]:
        array = scores.numpy()
        tokens = np.empty(len(array), np.int32)
        self._in_pieces(len(array), lambda first, last: find_top_(array, first, last, tokens))
        if (tokens < 0).any():
            raise ModelError(
                "a state has scores that are NaN or infinite; the dtype is too small for this model: try float32"
            )
        return tokens

    def _weights(self, r: Tensor, o: Tensor) -> NDArray[np.float32]:
        """[n, 3]: scores(o) = scores(r) w0 + scores(y) w1 + constant w2."""
        norm = self._lens.final_norm
        if norm is None:
            left, right = torch.ones(len(o), 1), torch.ones(len(o), 1)
        else:
            right = 1 / norm_scale(norm, o)
            left = norm_scale(norm, r) * right
        return torch.cat([left, right, 1 - left], dim=1).to("cpu", torch.float32).numpy()

    def _top_of_sum(self, left: Tensor, right: Tensor, weights: NDArray[np.float32]) -> NDArray[np.int32]:
        """-1 where the sum is not exact enough to tell."""
        a, b, constant = left.numpy(), right.numpy(), self._constant
        tokens = np.empty(len(a), np.int32)
        self._in_pieces(
            len(a), lambda first, last: find_top_of_sum_(a, b, constant, weights, first, last, _TOLERANCE, tokens)
        )
        tokens[weights[:, 0] > _MOST_WEIGHT] = -1
        return tokens

    def _try_sums(self, layer: int, r: Tensor, y: Tensor, o: Tensor) -> bool:
        """Are sums of scores the scores of sums, for this lens and reading?"""
        weights = self._weights(r, o)[:, :, None]
        left, right, direct = (
            scores.numpy() for scores in (self._scores(r), self._scores_of_addition(layer, y), self._scores(o))
        )
        added = left * weights[:, 0] + right * weights[:, 1] + self._constant * weights[:, 2]
        allowed = _TOLERANCE * np.abs(direct).max(1) * np.maximum(weights[:, 0, 0], 1)
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


class LayerLook:
    """Looks at positions, layer by layer."""

    def __init__(
        self,
        model: MemoryModel,
        promoted: Mapping[int, NDArray[np.int32]],  # layer -> [memories], the top token of each value
        unembedding: Unembedding,
    ) -> None:
        self.model, self.promoted, self.unembedding = model, promoted, unembedding
        self.accounting = LogitDecomposition(model)
        self.last = len(model.layers) - 1
        self.is_mixture = any(layer.is_mixture for layer in model.layers)
        self.norms = {layer: model.layers[layer].lengths() for layer in promoted}
        # a yes or no for every token, so that most prefixes need no look at single memories
        self.promotes = {layer: np.zeros(model.vocabulary, bool) for layer in promoted}
        for layer, tokens in promoted.items():
            self.promotes[layer][tokens] = True

    def look(self, positions: PositionStates) -> tuple[Columns, dict[int, Columns]]:
        """Columns with one row per prefix, and for each layer columns with one row per prefix."""
        final = self.unembedding.top(positions.o[self.last])
        tokens = self._tensor(final)
        account = self.accounting.logit_parts(positions, tokens)
        relative = self.accounting.logit_parts(positions, tokens, relative=True)
        whole = {
            "final_token": final,
            "logit": _numbers(account.logit),
            "logit_embedding": _numbers(account.embedding),
            "logit_constant": _numbers(account.constant),
            "above_mean": _numbers(relative.logit),
            "embedding": _numbers(relative.embedding),
            "constant": _numbers(relative.constant),
        }
        direction = self.accounting.direction(tokens, positions.o[self.last], relative=True)
        layers = {}
        for layer in self.promoted:
            columns = self._read(layer, positions, final)
            columns |= self._count(layer, positions.coefficients[layer], columns["ffn_token"])
            columns |= {
                "ffn_logit": _numbers(account.ffn[layer]),
                "attention_logit": _numbers(account.attention[layer]),
                "ffn_above": _numbers(relative.ffn[layer]),
                "attention_above": _numbers(relative.attention[layer]),
            }
            columns |= self._added(layer, positions.used(layer), direction)
            columns |= self._name_memories(layer, positions, columns)
            layers[layer] = columns
        return whole, layers

    def _read(self, layer: int, positions: PositionStates, final: NDArray[np.int32]) -> Columns:
        r, y, o = positions.r[layer], positions.y[layer], positions.o[layer]
        tops = self.unembedding.layer(layer, r, y, o, final, layer == self.last)
        return {
            "residual_token": tops.residual,
            "ffn_token": tops.ffn,
            "output_token": tops.output,
            "p_final": tops.final.p,
            "rank_final": tops.final.rank,
        }

    def _count(self, layer: int, coefficients: Tensor, ffn: NDArray[np.int32]) -> Columns:
        """Active and effective memories; does any memory promote the token that the layer promotes?"""
        sizes = coefficients.abs() * self.norms[layer]
        total, length = sizes.sum(1).double(), torch.linalg.vector_norm(sizes, dim=1).double()
        effective = (total / length.clamp_min(torch.finfo(torch.float32).tiny)).square()  # 0 where all are silent
        active = coefficients > 0  # [n, memories]
        is_promoted = self.promotes[layer][ffn]
        found_active = np.zeros(len(ffn), bool)
        for row in np.flatnonzero(is_promoted):
            same = np.flatnonzero(self.promoted[layer] == ffn[row])
            found_active[row] = bool(active[row, self._tensor(same)].any())
        return {
            "active": active.sum(1).cpu().numpy(),
            "effective": _numbers(effective),
            "promoted": is_promoted,
            "promoted_active": found_active,
        }

    def _added(self, layer: int, used: LayerUse, direction: Tensor) -> Columns:
        """The sum that memories added to the final token's logit: by kind, and by the 1, 10 and 100 that added most.

        Fewer where fewer added at all.
        """
        added = self.accounting.memories(layer, used, direction)  # [n, memories]
        most = min(TOP_MEMORIES[-1], added.shape[1])
        running = added.topk(most, dim=1).values.clamp_min(0).double().cumsum(1)
        strongest = {f"top{count}": _numbers(running[:, min(count, most) - 1]) for count in TOP_MEMORIES}
        return strongest | self._by_kind(layer, used, added)

    def _by_kind(self, layer: int, used: LayerUse, added: Tensor) -> Columns:
        """The share with m > 0 of the memories that a prefix reaches, and what they added, by kind of a mixture."""
        columns: Columns = {name: [None] * len(added) for name in kind_columns("active", "given")}
        groups = self.model.layers[layer].groups
        for kind in {group.kind for group in groups} if self.is_mixture else ():
            places = [place for place, group in enumerate(groups) if group.kind == kind]
            span = slice(groups[places[0]].start, groups[places[-1]].columns.stop)
            sizes = torch.tensor([groups[place].size for place in places], device=added.device)
            reached = ((used.weights[:, places] != 0) * sizes).sum(1).clamp_min(1)
            columns[f"{kind}_active"] = _numbers((used.coefficients[:, span] > 0).sum(1) / reached)
            columns[f"{kind}_given"] = _numbers(added[:, span].double().sum(1))
        return columns

    def _name_memories(self, layer: int, positions: PositionStates, columns: Columns) -> Columns:
        """Name the memories that veto where r, layer and o have three tokens, and in the last layer those that push.

        A veto is what a memory took from the residual's token, beside the mean of all tokens; a push what it gave to
        the output's token over the residual's. Both at the scale of the final norm for this layer's output.
        """
        output, residual, ffn = columns["output_token"], columns["residual_token"], columns["ffn_token"]
        rows = np.flatnonzero((output != residual) & (output != ffn) & (residual != ffn))
        named: Columns = {
            name: [None] * len(output)
            for name in ("vetoes", "veto_pushes", "pushers", "pushes", "cosine", "cosine_shuffled")
        }
        if not len(rows):
            return named
        where = self._tensor(rows)
        states, used = positions.o[layer][where], positions.used(layer).at(where)
        before, after = self._tensor(residual[rows]), self._tensor(output[rows])
        down = self.accounting.direction(before, states, relative=True)
        _list_(named, ("vetoes", "veto_pushes"), rows, self.accounting.memories(layer, used, down), -1)
        if layer == self.last:
            up = self.accounting.direction(after, states) - self.accounting.direction(before, states)
            _list_(named, ("pushers", "pushes"), rows, self.accounting.memories(layer, used, up), 1)
            # chance: the token before beside that after the next change of the same chunk
            for name, others in (("cosine", after), ("cosine_shuffled", after.roll(-1))):
                for row, cosine in zip(rows, self.accounting.cosine(before, others).tolist(), strict=True):
                    named[name][row] = cosine
        return named

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self.model.device)


def _list_(named: Columns, names: tuple[str, str], rows: NDArray[np.int64], added: Tensor, sign: int) -> None:
    """Put the strongest memories of one sign, and what they added, where they belong."""
    amounts, memories = (added * sign).topk(min(LISTED, added.shape[1]), dim=1)
    for row, amount, memory in zip(rows, amounts.tolist(), memories.tolist(), strict=True):
        pushes = [(i, sign * x) for i, x in zip(memory, amount, strict=True) if x > 0]
        named[names[0]][row] = [i for i, _ in pushes]
        named[names[1]][row] = [x for _, x in pushes]


def _numbers(tensor: Tensor) -> NDArray[np.float64]:
    return tensor.double().cpu().numpy()
