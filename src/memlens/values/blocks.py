"""Vocabulary scores in blocks of rows, so that no matrix [memories, vocabulary] ever exists.

This module knows how large a block may be and on how many threads it is worked on; what is scored is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from memlens.errors import SettingError

_BLOCK_BYTES = 32 << 20  # such a block is still in the last cache when it is looked at, and its memory is used again
_LEAST_ROWS = 128  # with fewer, reading the whole embedding costs more than multiplying with it


def rows_a_block(vocabulary: int) -> int:
    """How many rows of float32 scores make one block."""
    return max(_LEAST_ROWS, _BLOCK_BYTES // (4 * vocabulary))


def score_blocks(
    vectors: torch.Tensor, score: Callable[[torch.Tensor], torch.Tensor], vocabulary: int
) -> Iterator[tuple[slice, NDArray[np.float32]]]:
    """Which rows, and their scores [rows, vocabulary]; a caller that drops a block before the next holds one only."""
    step = rows_a_block(vocabulary)
    for first in range(0, len(vectors), step):
        part = slice(first, min(first + step, len(vectors)))
        yield part, _scored(vectors[part], score)  # no name here: it would keep the block alive


@torch.inference_mode()
def _scored(vectors: torch.Tensor, score: Callable[[torch.Tensor], torch.Tensor]) -> NDArray[np.float32]:
    scores: NDArray[np.float32] = score(vectors).to("cpu", torch.float32).contiguous().numpy()
    return scores


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Let torch, and with it the compiled code, compute on so many threads; restored afterwards."""
    if count < 1:
        raise SettingError(f"--threads is {count}; it must be 1 or more")
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def thread_pool() -> Iterator[ThreadPoolExecutor | None]:
    """As many threads for the compiled code as torch has; None for one."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield None
        return
    with ThreadPoolExecutor(threads) as pool:
        yield pool
