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
from memlens.models.norm import at_least_float32

_BLOCK_BYTES = 104 << 20  # large enough for the product to run at full speed; the same memory serves every block
_LEAST_ROWS = 128  # with fewer, reading the whole embedding costs more than multiplying with it


def rows_a_block(vocabulary: int) -> int:
    """How many rows of float32 scores make one block."""
    return max(_LEAST_ROWS, _BLOCK_BYTES // (4 * vocabulary))


Score = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # vectors [rows, d], a place for the scores -> the scores


def score_blocks(vectors: torch.Tensor, score: Score, vocabulary: int) -> Iterator[tuple[slice, NDArray[np.float32]]]:
    """Which rows, and their scores [rows, vocabulary], which are good until the next block is asked for."""
    step = min(rows_a_block(vocabulary), len(vectors))
    place = torch.empty(step, vocabulary, device=vectors.device, dtype=at_least_float32(vectors[:0]).dtype)
    for first in range(0, len(vectors), step):
        part = slice(first, min(first + step, len(vectors)))
        yield part, _scored(vectors[part], score, place[: part.stop - part.start])


@torch.inference_mode()
def _scored(vectors: torch.Tensor, score: Score, place: torch.Tensor) -> NDArray[np.float32]:
    scores: NDArray[np.float32] = score(vectors, place).to("cpu", torch.float32).contiguous().numpy()
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
