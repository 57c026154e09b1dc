"""How long a scan will take here and how much memory, from a probe of about a second.

The probe is a real scan of random tokens, so it needs no corpus. This module knows nothing of files.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace

import numpy as np

from memlens.models.memory_model import MemoryModel
from memlens.models.sizes import ModelSizes
from memlens.scan.layer import LayerScan
from memlens.scan.scanner import Scanner, WindowSentence
from memlens.scan.settings import ScanSettings
from memlens.scan.state import ScanState

_LENGTH = 32  # tokens of a probe sentence, about an ordinary sentence's
_ENOUGH = 512  # tokens of which matrix products are about as fast as they get


@dataclass(frozen=True)
class ScanEstimate:
    """What a scan with these settings costs on this machine, about."""

    threads: int
    tokens_per_second: float
    probe_tokens: int  # from how many tokens that was measured
    weights_bytes: int
    lists_bytes: int  # triggers, statistics and samples of all memories
    batch_bytes: int  # coefficients and states of the layer at work

    @property
    def seconds_per_million(self) -> float:
        return 1e6 / self.tokens_per_second

    @property
    def memory_bytes(self) -> int:
        return self.weights_bytes + self.lists_bytes + self.batch_bytes


def usable_cores() -> int:
    """The cores this process may use; the default number of threads."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def estimate_scan(model: MemoryModel, settings: ScanSettings, seconds: float = 1.0) -> ScanEstimate:
    """Scan random tokens for about so many seconds and work out what a real scan takes."""
    if not model.has_tokenizer:
        settings = replace(settings, bos="no")
    state = ScanState.start(model, range(len(model.layers)), settings)
    rate, tokens = _measure(model, settings, state, seconds)
    return ScanEstimate(
        threads=settings.threads,
        tokens_per_second=rate,
        probe_tokens=tokens,
        weights_bytes=sum(weight.numel() * weight.element_size() for weight in model.network.parameters()),
        lists_bytes=sum(array.nbytes for array in state.arrays().values()),
        batch_bytes=_batch_bytes(model, settings),
    )


def memory_before_loading(sizes: ModelSizes, settings: ScanSettings, bytes_a_number: int) -> dict[str, int]:
    """Bytes of weights, lists and one batch, from a model's sizes alone."""
    bottom = settings.bottom == "yes" or (settings.bottom == "auto" and sizes.gated)
    two, one = (sum(a.nbytes for a in LayerScan(0, n, bottom, settings).arrays().values()) for n in (2, 1))
    wide = (3 if sizes.gated else 2) * max(sizes.memories, default=0) + 8 * sizes.width
    return {
        "weights": sizes.parameters * bytes_a_number,
        "lists": sum(sizes.memories) * (two - one),
        "a batch": settings.batch_tokens * wide * bytes_a_number,
    }


def _measure(model: MemoryModel, settings: ScanSettings, state: ScanState, seconds: float) -> tuple[float, int]:
    """Tokens a second and tokens seen, in windows that grow until one is a whole batch or the time is up."""
    scanner = Scanner(model, settings, state)
    draw = np.random.default_rng(settings.seed)
    length = min(_LENGTH, (model.context or _LENGTH + 1) - 1) or 1
    used = min(model.vocabulary, model.tokenizer.size) if model.has_tokenizer else model.vocabulary
    most = max(1, settings.batch_tokens // (length + 1))
    scanner.scan_window(0, [WindowSentence(0, draw.integers(0, used, length))])  # loads the compiled pass
    rows, number, sentence = 1, 1, 1
    best_rate, tokens, goes_on = 0.0, 0, True
    deadline = time.monotonic() + seconds
    while goes_on or time.monotonic() < deadline:
        window = [WindowSentence(sentence + i, draw.integers(0, used, length)) for i in range(rows)]
        began = time.monotonic()
        scanner.scan_window(number, window)
        took = max(time.monotonic() - began, 1e-9)
        best_rate = max(best_rate, rows * length / took)  # the first, small windows tell too little of the speed
        tokens += rows * length
        sentence, number = sentence + rows, number + 1
        # One sentence is far slower than many together; only a model that needs seconds for it is measured on that.
        goes_on = rows < min(most, _ENOUGH // length) and took < seconds
        if goes_on or took < seconds / 8:
            rows = min(rows * 4, most)
    return best_rate, tokens


def _batch_bytes(model: MemoryModel, settings: ScanSettings) -> int:
    """Coefficients before and after the activation (and the gate), and some states, of one layer at a time."""
    widest = max(layer.memories for layer in model.layers)
    wide = 3 if model.layers[0].gated else 2
    return settings.batch_tokens * (wide * widest + 8 * model.width) * model.layers[0].values.element_size()
