"""One compiled call that takes a block of coefficients into all that a scan keeps of a layer's memories."""

from typing import NamedTuple

from memlens.parallel import compiled
from memlens.scanner.kernels import Totals, collect_
from memlens.scanner.lists import Candidates, FloatArray, Lists
from memlens.scanner.quadrants import Gates, Quadrants
from memlens.scanner.sample import SampleArrays, draw_


class LayerArrays(NamedTuple):
    """All that is kept of the memories of a layer, as compiled loops want it."""

    top: Lists
    bottom: Lists  # of one memory where the bottom end is not kept
    totals: Totals
    quadrants: Quadrants  # of no memories where none is gated
    sample: SampleArrays


@compiled
def take_block_(
    arrays: LayerArrays, block: FloatArray, gates: Gates, candidates: Candidates, first: int, last: int, start: int,
    keep_bottom: bool, one_a_sentence: bool, has_gates: bool,
) -> int:  # fmt: skip
    """Take in the columns [first, last) of a block [rows, memories], of which `start` numbers the first memory.

    Returns what `kernels.add_` says of the sums. One call does everything: an expert's block is small, and a dozen
    steps in Python would take longer than the loops.
    """
    status = collect_(
        block, candidates, first, last, start, arrays.top, arrays.bottom, keep_bottom, one_a_sentence, arrays.totals,
        gates, arrays.quadrants, has_gates,
    )  # fmt: skip
    draw_(arrays.sample, block, candidates, first, last, start)
    return status
