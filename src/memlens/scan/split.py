"""How this machine's cores are best shared out: so many workers with so many threads each, found by a short probe.

The probe runs bare forward passes on the loaded model, several at a time where several workers are tried, so that what
they take from each other is measured, too. It is worth it only for long scans: starting workers costs seconds. This
module starts no process and knows no file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from memlens.corpus import CorpusSettings
from memlens.corpus.settings import is_hub_source
from memlens.corpus.sources import list_files
from memlens.models.memory_model import MemoryModel
from memlens.scan.estimate import usable_cores
from memlens.scan.settings import ScanSettings

WORTH_SECONDS = 120.0  # a scan that one process does faster than this has no workers by default
_LENGTH, _ROWS = 32, 16  # of a probe batch, unless the model reads less
_MARGIN = 1.05  # more workers take more memory: they must be faster by so much
_SPARE = 0.8  # share of the free memory that workers may take
_BYTES_A_TOKEN, _PACKED = 4, 4  # of plain text; and how much larger packed text is
_SLOW = 1e10  # operations a second that any machine does
_PROGRAM_BYTES = 700 << 20  # libraries and buffers of a process


@dataclass(frozen=True)
class Split:
    """A way to share out the cores."""

    workers: int
    threads: int  # of each worker


def choose_split(
    model: MemoryModel,
    tokens: int,
    worker_bytes: int,
    *,
    workers: int | None = None,
    threads: int | None = None,
    seconds: float = 1.0,
) -> Split:
    """The split for a scan of about so many tokens; what is given stays, the rest is found.

    `worker_bytes` is the memory that one more worker takes.
    """
    cores = usable_cores()
    if workers is not None:
        return Split(workers, threads or max(1, cores // workers))
    if model.device.type != "cpu" or cores == 1:
        return Split(1, threads or cores)
    possible = [s for s in _splits(cores) if s.workers == 1 or s.workers * worker_bytes <= _SPARE * free_memory()]
    possible = [split for split in possible if threads in (None, split.threads)] or [Split(1, threads or cores)]
    together = Split(1, threads or cores)
    if (len(possible) == 1 and possible[0].workers == 1) or _is_short_anywhere(model, tokens):
        return together
    began = time.monotonic()
    rate = measure(model, together, seconds / (1 + len(possible)))
    if tokens / rate < WORTH_SECONDS:
        return together
    left = seconds - (time.monotonic() - began)
    return fastest(possible, lambda split: measure(model, split, left / len(possible)))


def _is_short_anywhere(model: MemoryModel, tokens: int) -> bool:
    """Would even a slow machine be done soon? Then not even the probe is worth it."""
    operations = 2 * tokens * sum(weight.numel() for weight in model.network.parameters())
    return operations / _SLOW < WORTH_SECONDS


def fastest(possible: list[Split], rate: Callable[[Split], float]) -> Split:
    """Of splits in the order of their workers the fastest; a little more speed is not worth more workers."""
    best, best_rate = possible[0], rate(possible[0])
    for split in possible[1:]:
        found = rate(split)
        if found > best_rate * _MARGIN:
            best, best_rate = split, found
    return best


def _splits(cores: int) -> list[Split]:
    """Ways that use every core, few workers first."""
    return [Split(cores // threads, threads) for threads in range(cores, 0, -1) if cores % threads == 0]


def measure(model: MemoryModel, split: Split, seconds: float) -> float:
    """Tokens a second of the bare body under a split, all workers together."""
    length = min(_LENGTH, model.context or _LENGTH)
    tokens = torch.arange(_ROWS * length).reshape(_ROWS, length) % model.vocabulary
    before = torch.get_num_threads()

    def work(deadline: float) -> int:
        torch.set_num_threads(split.threads)
        passes = 0
        while passes == 0 or time.monotonic() < deadline:
            model.run_body(tokens)
            passes += 1
        return passes

    try:
        with ThreadPoolExecutor(split.workers) as pool:
            list(pool.map(work, [0.0] * split.workers))  # the first pass makes threads and memory
            began = time.monotonic()
            passes = sum(pool.map(work, [began + max(seconds, 0.0)] * split.workers))
            took = time.monotonic() - began
    finally:
        torch.set_num_threads(before)
    return passes * tokens.numel() / max(took, 1e-9)


def free_memory() -> int:
    """Bytes that could be used now; a very large number where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:  # noqa: PTH123 - not a file of ours
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 1 << 62


def tokens_about(corpus: CorpusSettings, most: int | None) -> int:
    """About how many tokens a corpus has, from the sizes of its files; one on the Hub counts as large."""
    size = 0.0
    for source in corpus.sources:
        if is_hub_source(source):
            size += 1e12
            continue
        for file in list_files(source):
            size += file.path.stat().st_size * (_PACKED if file.compression or file.kind == ".parquet" else 1)
    return int(min(size / _BYTES_A_TOKEN, most or size))


def bytes_of_worker(model: MemoryModel, settings: ScanSettings) -> int:
    """About the memory that one worker takes: weights, lists and samples, and the program itself."""
    weights = sum(weight.numel() * weight.element_size() for weight in model.network.parameters())
    memories = sum(block.memories for block in model.layers)
    return weights + memories * (24 * settings.top + 600) + _PROGRAM_BYTES
