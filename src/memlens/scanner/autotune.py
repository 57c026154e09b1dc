"""Time and memory that a scan takes on this machine, and the number of workers and threads that is fastest.

Both come from short probes: a scan of random tokens, which needs no corpus, and bare forward passes on the loaded
model, several at a time where several workers are tried, so that what they take from each other is measured, too.
Starting workers costs seconds, so they are tried for long scans only.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch

from memlens.corpus.files import list_files
from memlens.errors import SettingError
from memlens.models.info import ModelSizes
from memlens.models.memory_model import MemoryModel
from memlens.processes import usable_cores
from memlens.scanner.layer import LayerScan
from memlens.scanner.scanner import ScanSentence, Worker
from memlens.scanner.state import BatchRange, LayerShape, shapes_of
from memlens.settings import CorpusSettings, ScanRunSettings, ScanSettings, is_hub_source

_LENGTH = 32  # tokens of a probe sentence, about an ordinary sentence's
_BYTES_A_TRIGGER = 24  # its key and position, and once more while they are saved, merged or written
_ENOUGH = 512  # tokens of which matrix products are about as fast as they get
_LARGEST = 2048  # tokens of a probe's batch: larger ones take longer and are hardly faster
_SETTLED = 0.05  # two batches whose speeds differ by less than this share tell the speed


@dataclass(frozen=True)
class ScanEstimate:
    """About what a scan with these settings costs on this machine."""

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


def estimate_scan(
    model: MemoryModel, settings: ScanSettings, seconds: float = 1.0, layers: Sequence[int] | None = None
) -> ScanEstimate:
    """Scan random tokens for about so many seconds and work out what a real scan takes, of all layers or of some."""
    if not model.has_tokenizer:
        settings = replace(settings, bos="no")
    own = range(len(model.layers)) if layers is None else layers
    refuse_large_lists(shapes_of(model, own, settings), settings)
    worker = Worker(model, settings, own)
    rate, tokens = _probe_scan(worker, seconds)
    return ScanEstimate(
        threads=settings.threads,
        tokens_per_second=rate,
        probe_tokens=tokens,
        weights_bytes=sum(weight.numel() * weight.element_size() for weight in model.network.parameters()),
        lists_bytes=sum(array.nbytes for array in worker.state.arrays().values()),
        batch_bytes=_batch_bytes(model, settings),
    )


def refuse_large_lists(shapes: Mapping[int, LayerShape], settings: ScanSettings, together: int | None = None) -> None:
    """Refuse a --top whose lists would take more than half of the free memory; `together` layers are held at once."""
    places = sorted((shape.memories * (2 if shape.bottom else 1) for shape in shapes.values()), reverse=True)
    needed = sum(places[:together]) * settings.top * _BYTES_A_TRIGGER
    if needed > free_memory() // 2:
        raise SettingError(
            f"--top is {settings.top}: lists of so many triggers take {needed / 1e9:,.1f} GB, more than half of the "
            f"{free_memory() / 1e9:,.1f} GB that are free; use a lower --top, fewer --layers or --layer-budget"
        )


def memory_before_loading(sizes: ModelSizes, settings: ScanSettings, bytes_a_number: int) -> dict[str, int]:
    """Bytes of weights, lists and one batch, and what a file to be unpacked takes beyond these, from sizes alone."""
    bottom = settings.bottom == "yes" or (settings.bottom == "auto" and sizes.gated)
    two, one = (
        sum(a.nbytes for a in LayerScan(0, n, bottom, gated=sizes.gated, settings=settings).arrays().values())
        for n in (2, 1)
    )
    wide = (3 if sizes.gated else 2) * sizes.widest + 8 * sizes.width
    lists = sum(sizes.memories) * (two - one) + len(sizes.memories) * (2 * one - two)  # a layer has counts of its own
    batch = settings.batch_tokens * wide * bytes_a_number
    return {
        "weights": sizes.parameters * bytes_a_number,
        "lists": lists,
        "a batch": batch,
        "unpacking": max(0, sizes.unpacked - lists - batch),  # over before there are lists
    }


def _probe_scan(worker: Worker, seconds: float) -> tuple[float, int]:
    """Tokens per second and tokens seen, with ever more sentences, until two batches agree or the time is up.

    All sentences are one: lists that hold it so often take in nothing more, as those of a long scan hardly do.
    """
    model, settings = worker.model, worker.settings
    length = min(_LENGTH, (model.context or _LENGTH + 1) - 1) or 1
    used = min(model.vocabulary, model.tokenizer.size) if model.has_tokenizer else model.vocabulary
    tokens = np.random.default_rng(settings.seed).integers(0, used, length)
    most = max(1, min(settings.batch_tokens, _LARGEST) // (length + 1))
    _scan_all(worker, 0, [ScanSentence(0, tokens)])  # loads the compiled pass
    rows, number, sentence = 1, 1, 1
    rate, best_rate, goes_on = 0.0, 0.0, True
    deadline = time.monotonic() + seconds
    while goes_on or time.monotonic() < deadline:
        sentences = [ScanSentence(sentence + i, tokens) for i in range(rows)]
        began = time.monotonic()
        _scan_all(worker, number, sentences)
        took = max(time.monotonic() - began, 1e-9)
        rate_before, rate = rate, rows * length / took
        best_rate = max(best_rate, rate)  # the first few sentences tell too little of the speed
        sentence, number = sentence + rows, number + 1
        # One sentence is far slower than many together; only a model that needs seconds for it is measured on that.
        goes_on = rows < min(most, _ENOUGH // length) and took < seconds
        if not goes_on and abs(rate - rate_before) < _SETTLED * rate:
            break
        if goes_on or took < seconds / 8:
            rows = min(rows * 4, most)
    return best_rate, (sentence - 1) * length


def _scan_all(worker: Worker, number: int, sentences: list[ScanSentence]) -> None:
    worker.scan(BatchRange(number, 0, worker.plan(number, sentences)), lambda _: sentences)


def _batch_bytes(model: MemoryModel, settings: ScanSettings) -> int:
    """Coefficients before and after the activation (and the gate), and some states, of one layer at a time."""
    widest = max(group.size for layer in model.layers for group in layer.groups)
    wide = 3 if model.first.gated else 2
    return settings.batch_tokens * (wide * widest + 8 * model.width) * model.dtype.itemsize


WORTH_SECONDS = 120.0  # a scan that one process does faster than this has no workers by default
_ROWS = 16  # of a batch of bare forward passes
_MARGIN = 1.05  # more workers take more memory: they must be faster by so much
_SPARE = 0.8  # of the free memory, which workers may take
_BYTES_A_TOKEN, _PACKED = 4, 4  # of plain text; how much larger packed text is
_SLOW = 1e10  # operations per second that any machine does
_PROGRAM_BYTES = 700 << 20  # libraries and buffers of a process


@dataclass(frozen=True)
class WorkerCount:
    """Workers, and threads of each."""

    workers: int
    threads: int


def choose_workers(
    run: ScanRunSettings,
    model: MemoryModel,
    settings: ScanSettings,
    corpus: CorpusSettings,
    recorded: int | None,
    is_complete: bool,
) -> WorkerCount:
    """Workers and threads for a scan; one that is continued keeps its `recorded` threads, and so its bytes."""
    if run.executor == "ray":
        return WorkerCount(run.workers or 0, run.threads or recorded or 1)  # 0: as many as the cluster has room for
    if is_complete or (run.threads is not None and run.workers is None):
        return WorkerCount(1, run.threads or recorded or usable_cores())
    tokens = 0 if run.workers else tokens_about(corpus, settings.max_tokens)
    return fastest_workers(
        model, tokens, bytes_of_worker(model, settings), workers=run.workers, threads=run.threads or recorded
    )


def text_processes(run: ScanRunSettings, chosen: WorkerCount) -> int:
    """Processes that cut and tokenize a long text before a scan: one for each core that the scan has here."""
    return usable_cores() if run.executor == "ray" else chosen.workers * chosen.threads


def fastest_workers(
    model: MemoryModel,
    tokens: int,
    worker_bytes: int,
    *,
    workers: int | None = None,
    threads: int | None = None,
    seconds: float = 1.0,
) -> WorkerCount:
    """The fastest workers and threads for a scan of about so many tokens; what is given stays, the rest is found.

    `worker_bytes` is the memory that one more worker takes.
    """
    cores = usable_cores()
    if workers is not None:
        return WorkerCount(workers, threads or max(1, cores // workers))
    if model.device.type != "cpu" or cores == 1:
        return WorkerCount(1, threads or cores)
    together = WorkerCount(1, threads or cores)
    room = max(1, int(_SPARE * free_memory()) // worker_bytes)
    every_core = [WorkerCount(cores // each, each) for each in range(cores, 0, -1) if cores % each == 0]
    possible = [count for count in every_core if count.workers <= room and threads in (None, count.threads)]
    if not any(count.workers > 1 for count in possible) or _is_short_anywhere(model, tokens):
        return together
    each = seconds / (1 + len(possible))
    rates = {together: _probe_body(model, together, each)}
    if tokens / rates[together] < WORTH_SECONDS:
        return together
    return fastest(possible, lambda count: rates.get(count) or _probe_body(model, count, each))


def _is_short_anywhere(model: MemoryModel, tokens: int) -> bool:
    """Would even a slow machine be done soon? Then not even the probe is worth it."""
    operations = 2 * tokens * sum(weight.numel() for weight in model.network.parameters())
    return operations / _SLOW < WORTH_SECONDS


def fastest(possible: list[WorkerCount], rate: Callable[[WorkerCount], float]) -> WorkerCount:
    """The fastest of some counts in ascending order; a little more speed is not worth more workers."""
    best, best_rate = possible[0], rate(possible[0])
    for count in possible[1:]:
        measured = rate(count)
        if measured > best_rate * _MARGIN:
            best, best_rate = count, measured
    return best


def _probe_body(model: MemoryModel, count: WorkerCount, seconds: float) -> float:
    """Tokens per second of the bare body, all workers together."""
    length = min(_LENGTH, model.context or _LENGTH)
    tokens = torch.arange(_ROWS * length).reshape(_ROWS, length) % model.vocabulary
    before = torch.get_num_threads()

    def work(deadline: float) -> int:
        torch.set_num_threads(count.threads)
        passes = 0
        while passes == 0 or time.monotonic() < deadline:
            model.run_body(tokens)
            passes += 1
        return passes

    try:
        with ThreadPoolExecutor(count.workers) as pool:
            list(pool.map(work, [0.0] * count.workers))  # the first pass makes threads and memory
            began = time.monotonic()
            passes = sum(pool.map(work, [began + max(seconds, 0.0)] * count.workers))
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
