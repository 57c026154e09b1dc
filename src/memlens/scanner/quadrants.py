"""Sign quadrants of gated memories: signs of gate and input, how often each pair, and its top prefixes.

A gated coefficient is f(g) u, the gate's activation times the input. Its quadrant is (sign of g, sign of u). The sign
of u is that of the coefficient over that of f(g), so that the gate's sign is all that has to be seen beside the
coefficient; where that is 0 there is no quadrant. After Gerstner and Schütze, https://arxiv.org/abs/2505.17936.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memlens.parallel import compiled_part
from memlens.scanner.lists import Candidates, FloatArray, IntArray, Lists, insert_, make_key, merge_, score_of

if TYPE_CHECKING:
    import torch  # loops are compiled in a process that has none

KEPT = 5  # prefixes of each quadrant
_SMALLEST = np.float32(1e-45)  # above 0
_WORD = 8  # bytes


class Gates(NamedTuple):
    """The gates of a block before their activation."""

    values: FloatArray  # [rows, any]
    start: int  # the column of the first memory's

    @classmethod
    def of(cls, gates: torch.Tensor) -> Gates:
        """Gates [rows, memories], which may be columns of a wider product: those are not copied."""
        gates = gates.float()
        wide, start, storage = gates.stride(0), int(gates.storage_offset()), gates.untyped_storage().nbytes() // 4
        first = start - start % wide if wide else start
        if gates.stride(1) == 1 and wide >= gates.shape[1] and first + len(gates) * wide <= storage:
            return cls(gates.as_strided((len(gates), wide), (wide, 1), first).numpy(), start - first)
        return cls(gates.contiguous().numpy(), 0)


NO_GATES = Gates(np.zeros((1, 1), np.float32), 0)  # of a block that has none


class Quadrants(NamedTuple):
    """Counts and triggers of every memory's quadrants.

    By place: gate open (above 0) and coefficient above 0, open and below, shut and above, shut and below.
    """

    counts: IntArray  # [memories, 4] int64: prefixes in each
    lists: Lists  # [4 * memories, KEPT]: row 4 m + place, sizes of coefficients
    turns: NDArray[np.bool_]  # [memories]: does a shut gate turn the sign of the input, as with SiLU and GELU?

    @classmethod
    def empty(cls, memories: int) -> Quadrants:
        return cls(np.zeros((memories, 4), np.int64), Lists.empty(4 * memories, KEPT), np.zeros(memories, np.bool_))

    def order(self) -> IntArray:
        """[memories, 4]: the places of ++, +-, -+ and -- (gate, input)."""
        return np.where(self.turns[:, None], [0, 1, 3, 2], [0, 1, 2, 3])

    def merge(self, other: Quadrants, one_a_sentence: bool) -> None:
        self.counts[:] += other.counts
        self.turns[:] |= other.turns
        merge_(self.lists, other.lists, one_a_sentence)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The state as plain arrays, to be saved."""
        own = {"quadrants.counts": self.counts, "quadrants.turns": self.turns}
        return own | {f"quadrants.{name}": array for name, array in self.lists._asdict().items()}

    def restore_(self, saved: dict[str, NDArray[Any]]) -> None:
        for name, array in self.arrays().items():
            array[:] = saved[name]

    def part(self, memories: slice) -> Quadrants:
        """Those of some memories, as views."""
        lists = self.lists.part(slice(4 * memories.start, 4 * memories.stop))
        return Quadrants(self.counts[memories], lists, self.turns[memories])


class Looks(NamedTuple):
    """Running results of some columns."""

    extremes: FloatArray  # [4, columns] of one sentence: open gates highest and lowest, shut gates highest and lowest
    counts: (
        FloatArray  # [4, columns] of the whole block: prefixes above and below 0 with open gates, and with shut ones
    )
    bars: FloatArray  # [4, columns]: what an extreme must reach, in the same order, as a size
    reached: IntArray  # [columns] uint8
    zeros: FloatArray  # [columns]


@compiled_part
def empty_looks(columns: int) -> Looks:
    shape, whole = (4, columns), (columns + _WORD - 1) // _WORD * _WORD
    extremes, counts, bars = np.empty(shape, np.float32), np.empty(shape, np.float32), np.empty(shape, np.float32)
    return Looks(extremes, counts, bars, np.zeros(whole, np.uint8), np.zeros(columns, np.float32))


@compiled_part
def begin_quadrants_(looks: Looks, lists: Lists, memory: int, width: int) -> None:
    """Before the first sentence of some columns; `memory`: the number of the memory in the first of them."""
    looks.counts[:] = 0
    looks.reached[:] = 0
    for place in range(4):
        for c in range(width):
            looks.bars[place, c] = _bar(lists, 4 * (memory + c) + place)


@compiled_part
def end_quadrants_(looks: Looks, quadrants: Quadrants, memory: int, width: int) -> None:
    """After the last sentence of some columns."""
    for c in range(width):
        for place in range(4):
            quadrants.counts[memory + c, place] += np.int64(looks.counts[place, c])


@compiled_part
def _bar(lists: Lists, row: int) -> np.float32:
    return max(score_of(lists.keys[row, lists.keys.shape[1] - 1]), _SMALLEST)


@compiled_part
def look_at_quadrants_(
    block: FloatArray,
    gates: Gates,
    candidates: Candidates,
    sentence: int,
    tile: int,
    width: int,
    memory: int,
    looks: Looks,
    lists: Lists,
    one_a_sentence: bool,
) -> None:
    """Extremes and counts of one sentence in every quadrant; its prefixes that reach a list are put there."""
    _extremes_(block, gates, candidates, sentence, tile, width, looks)
    reached = looks.reached
    _compare_(
        looks.extremes[0], looks.extremes[1], looks.extremes[2], looks.extremes[3],
        looks.bars[0], looks.bars[1], looks.bars[2], looks.bars[3], reached, width,
    )  # fmt: skip
    words = reached.view(np.uint64)
    for word in range((width + _WORD - 1) // _WORD):
        if words[word]:
            for c in range(word * _WORD, min((word + 1) * _WORD, width)):
                if reached[c]:
                    _take_(block, gates, candidates, sentence, tile, c, memory, looks, lists, one_a_sentence)


@compiled_part
def _compare_(
    high_open: FloatArray, low_open: FloatArray, high_shut: FloatArray, low_shut: FloatArray,
    bar_a: FloatArray, bar_b: FloatArray, bar_c: FloatArray, bar_d: FloatArray, reached: IntArray, width: int,
) -> None:  # fmt: skip
    for c in range(width):
        above = (high_open[c] >= bar_a[c]) | (high_shut[c] >= bar_c[c])
        reached[c] = above | (-low_open[c] >= bar_b[c]) | (-low_shut[c] >= bar_d[c])


@compiled_part
def _extremes_(
    block: FloatArray, gates: Gates, candidates: Candidates, sentence: int, tile: int, width: int, looks: Looks
) -> None:
    """Four rows at a time, as in the first look at coefficients; rows of zeros, which change nothing, fill the last."""
    start, stop = candidates.starts[sentence], candidates.starts[sentence + 1]
    looks.extremes[:] = 0
    for i in range(start, stop, 4):
        row_a, gate_a = _row(block, gates, candidates, i, stop, tile, width, looks)
        row_b, gate_b = _row(block, gates, candidates, i + 1, stop, tile, width, looks)
        row_c, gate_c = _row(block, gates, candidates, i + 2, stop, tile, width, looks)
        row_d, gate_d = _row(block, gates, candidates, i + 3, stop, tile, width, looks)
        _four_rows_(
            row_a, row_b, row_c, row_d, gate_a, gate_b, gate_c, gate_d,
            looks.extremes[0], looks.extremes[1], looks.extremes[2], looks.extremes[3],
            looks.counts[0], looks.counts[1], looks.counts[2], looks.counts[3],
        )  # fmt: skip


@compiled_part
def _row(
    block: FloatArray, gates: Gates, candidates: Candidates, i: int, stop: int, tile: int, width: int, looks: Looks
) -> tuple[FloatArray, FloatArray]:
    if i >= stop:
        return looks.zeros[:width], looks.zeros[:width]
    row, at = candidates.rows[i], gates.start + tile
    return block[row, tile : tile + width], gates.values[row, at : at + width]


@compiled_part
def _four_rows_(
    row_a: FloatArray, row_b: FloatArray, row_c: FloatArray, row_d: FloatArray,
    gate_a: FloatArray, gate_b: FloatArray, gate_c: FloatArray, gate_d: FloatArray,
    high_open: FloatArray, low_open: FloatArray, high_shut: FloatArray, low_shut: FloatArray,
    above_open: FloatArray, below_open: FloatArray, above_shut: FloatArray, below_shut: FloatArray,
) -> None:  # fmt: skip
    one, none = np.float32(1), np.float32(0)
    for c in range(row_a.shape[0]):
        v_a, v_b, v_c, v_d = row_a[c], row_b[c], row_c[c], row_d[c]
        a, b = v_a if gate_a[c] > 0 else none, v_b if gate_b[c] > 0 else none
        d, e = v_c if gate_c[c] > 0 else none, v_d if gate_d[c] > 0 else none
        high_ab, high_de, low_ab, low_de = a if a > b else b, d if d > e else e, a if a < b else b, d if d < e else e
        high, low = high_ab if high_ab > high_de else high_de, low_ab if low_ab < low_de else low_de
        high_open[c] = high if high > high_open[c] else high_open[c]
        low_open[c] = low if low < low_open[c] else low_open[c]
        above_ab, above_de = (one if a > 0 else none) + (one if b > 0 else none), (one if d > 0 else none)
        below_ab, below_de = (one if a < 0 else none) + (one if b < 0 else none), (one if d < 0 else none)
        above_open[c] += above_ab + (above_de + (one if e > 0 else none))
        below_open[c] += below_ab + (below_de + (one if e < 0 else none))
        a, b, d, e = v_a - a, v_b - b, v_c - d, v_d - e  # what is left: 0 where the gate is open
        high_ab, high_de, low_ab, low_de = a if a > b else b, d if d > e else e, a if a < b else b, d if d < e else e
        high, low = high_ab if high_ab > high_de else high_de, low_ab if low_ab < low_de else low_de
        high_shut[c] = high if high > high_shut[c] else high_shut[c]
        low_shut[c] = low if low < low_shut[c] else low_shut[c]
        above_ab, above_de = (one if a > 0 else none) + (one if b > 0 else none), (one if d > 0 else none)
        below_ab, below_de = (one if a < 0 else none) + (one if b < 0 else none), (one if d < 0 else none)
        above_shut[c] += above_ab + (above_de + (one if e > 0 else none))
        below_shut[c] += below_ab + (below_de + (one if e < 0 else none))


@compiled_part
def _take_(
    block: FloatArray,
    gates: Gates,
    candidates: Candidates,
    sentence: int,
    tile: int,
    c: int,
    memory: int,  # the number of that in the tile's first column
    looks: Looks,
    lists: Lists,
    one_a_sentence: bool,
) -> None:
    """Second look at one memory in one sentence."""
    m = tile + c
    for place in range(4):
        sign = np.float32(1 - 2 * (place % 2))
        extreme, bar = sign * looks.extremes[place, c], looks.bars[place, c]
        if extreme < bar:
            continue
        row = 4 * (memory + c) + place
        for i in range(candidates.starts[sentence], candidates.starts[sentence + 1]):
            score = sign * block[candidates.rows[i], m]
            is_open = gates.values[candidates.rows[i], gates.start + m] > 0
            if score < bar or is_open != (place < 2) or (one_a_sentence and score != extreme):
                continue
            insert_(lists, row, make_key(score, candidates.sentences[i]), candidates.positions[i], one_a_sentence)
            if one_a_sentence:
                break
        looks.bars[place, c] = _bar(lists, row)
