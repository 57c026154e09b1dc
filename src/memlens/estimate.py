"""Estimate of an analysis' time, from a measured warm-up and the sizes of what it computes, and of the time left.

Measured here: the speed of a scan of random tokens, and of a product with the output embedding. The rest is counted:

    scan          the tokens of the corpus, from the sizes of its files
    values        one product of every value with the output embedding, and VALUE_SECONDS per memory
    patterns      PATTERN_SECONDS per memory and end of it that is kept
    experiments   tokens of passes of their own, and two products per layer and one more for every sampled prefix
    report        REPORT_SECONDS
    compiling     what the scan's loops have taken to be made or loaded before, times LOOPS_LEFT

What it takes to read the model is not in it. Compiling is told where it takes MENTIONED seconds or more, which it does
where loops are not kept from an earlier run; a folder of kept loops that has those of a scan alone is not noticed.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from memlens.index.build import layers_to_scan, longest_sentence
from memlens.models.memory_model import MemoryModel
from memlens.parallel import seconds_compiling
from memlens.scanner.ahead import seconds_ahead
from memlens.scanner.autotune import estimate_scan, tokens_about
from memlens.scanner.state import shapes_of
from memlens.settings import CorpusSettings, ScanSettings, is_hub_source
from memlens.text import duration

# Seen with the bundled model on two busy cores; machines differ by a factor of two or so.
VALUE_SECONDS, PATTERN_SECONDS = 0.0005, 0.002  # per memory, and per end of one
REPORT_SECONDS = 7.0
PREFIX_TOKENS = 24  # that are run for a sampled prefix
# Loops of later stages take so many times as long to compile as a scan's (14 s and 9 s by the compiler's events).
LOOPS_LEFT = 1.5
MENTIONED = 2.0  # seconds
_ROWS, _COLUMNS = 256, 8192  # of the measured product


@dataclass(frozen=True)
class AnalysisEstimate:
    """The estimated seconds of every stage, in the order of the stages."""

    seconds: Mapping[str, float]
    compiling: float = 0.0  # seconds, of loops that are not compiled yet, on a first run

    def in_words(self) -> str:
        stages = ", ".join(f"{name} {duration(seconds)}" for name, seconds in self.seconds.items())
        words = f"this takes about {duration(sum(self.seconds.values()))} here ({stages})"
        if self.compiling < MENTIONED:
            return words
        return f"{words}, and about {duration(self.compiling)} more for compiling, this once"


def estimate_analysis(
    model: MemoryModel,
    settings: ScanSettings,
    corpus: CorpusSettings,
    *,
    prefixes: int,
    tokens_per_layer: int,
    layer_budget: int | None = None,
) -> AnalysisEstimate | None:
    """Estimate the seconds of all stages from the start; None where nobody knows how long the corpus is.

    `prefixes` are those of section 5, `tokens_per_layer` those that experiments run in passes of their own. No more
    layers are held at once than the scan will hold, and what the scan will refuse is refused here in the same words.
    """
    longest_sentence(model, settings)
    layers = layers_to_scan(model, settings)
    if settings.max_tokens is None and any(is_hub_source(source) for source in corpus.sources):
        return None
    together = min(max(layer_budget or len(layers), 1), len(layers))
    before = seconds_compiling()
    rate = estimate_scan(model, replace(settings, max_tokens=None), layers=layers[:together]).tokens_per_second
    compiling = max(seconds_compiling() - before, seconds_ahead())
    shapes = shapes_of(model, layers, settings).values()
    memories = sum(shape.memories for shape in shapes)
    ends = sum(shape.memories * (2 if shape.bottom else 1) for shape in shapes)
    products = _seconds_of_product(model)
    again = len(layers) * tokens_per_layer + prefixes * PREFIX_TOKENS
    return AnalysisEstimate(
        {
            "scan": tokens_about(corpus, settings.max_tokens) / rate * math.ceil(len(layers) / together),
            "values": memories * (products + VALUE_SECONDS),
            "patterns": ends * PATTERN_SECONDS,
            "experiments": again / rate + prefixes * (2 * len(layers) + 1) * products,
            "report": REPORT_SECONDS,
        },
        compiling * LOOPS_LEFT,
    )


def _seconds_of_product(model: MemoryModel) -> float:
    """Seconds that the product of one vector with the output embedding takes, computed among many."""
    columns = min(model.vocabulary, _COLUMNS)
    kind = {"device": model.device, "dtype": torch.float32}
    left, right = torch.ones(_ROWS, model.width, **kind), torch.ones(model.width, columns, **kind)  # type: ignore[call-overload]
    took = []
    for _ in range(3):  # the first makes threads and memory
        began = time.monotonic()
        float((left @ right)[0, 0])
        took.append(time.monotonic() - began)
    return min(took) / _ROWS * model.vocabulary / columns


class TimeLeft:
    """The time left of an analysis: its estimate, scaled by what the finished stages have really taken."""

    def __init__(self, estimate: AnalysisEstimate, clock: Callable[[], float] = time.monotonic) -> None:
        self.expected, self.clock = dict(estimate.seconds), clock
        self._spent = self._foreseen = 0.0  # of stages that are done
        self._stage, self._began = "", clock()

    def begin(self, stage: str) -> None:
        self._stage, self._began = stage, self.clock()

    def join(self, stage: str) -> None:
        """Note that another stage runs together with the current one: both take what was estimated for the two."""
        self.expected[self._stage] = self.expected.get(self._stage, 0.0) + self.expected.pop(stage, 0.0)

    def end(self, kept: bool = False) -> None:
        """Note the end of the stage; one that was complete already says nothing of the speed."""
        foreseen = self.expected.pop(self._stage, 0.0)
        if not kept:
            self._spent += self.clock() - self._began
            self._foreseen += foreseen
        self._stage = ""

    def seconds(self, share: float | None = None) -> float:
        """The seconds left, estimated; `share` is the part of the current stage that is done, if that is known."""
        factor = self._spent / self._foreseen if self._foreseen else 1.0
        left = {stage: seconds * factor for stage, seconds in self.expected.items()}
        if self._stage in left:
            gone = self.clock() - self._began
            left[self._stage] = gone / share - gone if share else max(left[self._stage] - gone, 0.0)
        return sum(left.values())
