"""Executors: run the batches of a scan in this process, on local worker processes, or on a Ray cluster.

An executor takes a ScanJob and sees to it that every batch ends up in a part on disk. It decides where batches run and
what becomes of a lost worker; what is computed is the same everywhere.
"""

from __future__ import annotations

import pickle
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from memlens.corpus.sentences import Batch
from memlens.errors import MemlensError, ModelError, WorkerError
from memlens.models.memory_model import MemoryModel
from memlens.models.tokenizer import Tokenizer
from memlens.parallel import Mapper, Stopper
from memlens.processes import RETRIES
from memlens.scanner.scanner import ScanSentence, Worker
from memlens.scanner.state import BatchRange, PartFolder, ScanState
from memlens.settings import RunSettings, ScanSettings

KEPT = "completed work is saved"  # part of the message of a scan that fails
SAVE_SECONDS = 15.0  # at least so long between two saves,
_SAVE_RATIO = 50  # and at least so many times as long as a save takes


@dataclass(frozen=True)
class ScanJob:
    """Batches that are to be scanned for some layers, with all that is needed for it."""

    model: MemoryModel
    recipe: Callable[[], ModelRecipe]
    settings: ScanSettings
    layers: tuple[int, ...]
    ranges: Iterable[BatchRange]
    window: Callable[[int], Sequence[ScanSentence]]  # sentences by the number of their window; can be pickled
    parts: PartFolder
    on_tokens: Callable[[int], None]  # called with how many tokens were fed, batch by batch
    stop: Stopper
    save_seconds: float = SAVE_SECONDS


class Executor(Protocol):
    """Runs a job."""

    def run(self, job: ScanJob) -> None:
        """Scan every batch and save the results, or raise; what was saved stays saved."""


class SerialExecutor:
    """One batch after another in this process, with the model that is loaded already."""

    def run(self, job: ScanJob) -> None:
        worker = Worker(job.model, job.settings, job.layers)
        saver = Saver(job.parts, job.parts.new_name(), job.save_seconds)

        def after_batch(batch: Batch) -> None:
            job.on_tokens(int(batch.lengths.sum()))
            if job.stop.stopped or saver.is_due():
                saver.save(worker.state)
            job.stop.check()

        for batches in job.ranges:
            worker.scan(batches, job.window, after_batch)
        saver.save(worker.state)


def make_executor(run: RunSettings, workers: int) -> Executor:
    """`workers` 0 is as many as a Ray cluster has room for."""
    if run.executor == "ray":
        from memlens.scanner.ray import RayExecutor

        return RayExecutor(workers, run.ray_address, run.gpus_per_worker)
    from memlens.scanner.local import LocalExecutor

    return SerialExecutor() if workers == 1 else LocalExecutor(workers)


@contextmanager
def open_mapper(run: RunSettings, threads: int) -> Iterator[Callable[[MemoryModel], Mapper] | None]:
    """The Mapper that a stage is computed on, once the model is there; None for this process. Workers end with it."""
    if run.executor == "ray":
        from memlens.scanner.ray_map import RayMapper

        yield lambda model: RayMapper(model, threads, run.workers or 0, run.ray_address, run.gpus_per_worker)
    elif run.workers is None or run.workers == 1:
        yield None
    else:
        from memlens.scanner.local_map import LocalMapper

        size = run.workers
        with ExitStack() as opened:
            yield lambda model: opened.enter_context(closing(LocalMapper(model, size, threads)))


class Saver:
    """Saves a state as one part, seldom enough to cost next to nothing; does not depend on the time of day."""

    def __init__(self, parts: PartFolder, name: str, seconds: float) -> None:
        self.parts, self.name, self.seconds = parts, name, seconds
        self.next_save = time.monotonic() + seconds
        self._saved = 0  # batches

    def is_due(self) -> bool:
        return time.monotonic() >= self.next_save

    def save(self, state: ScanState, began: float | None = None) -> None:
        """Save the state, unless that very state is saved already; `began` is when collecting it began."""
        began = time.monotonic() if began is None else began
        if len(state.done) != self._saved:
            self.parts.save(self.name, state.arrays())
            self._saved = len(state.done)
        now = time.monotonic()
        self.next_save = now + max(self.seconds, _SAVE_RATIO * (now - began))


class WorkQueue:
    """Ranges that wait for a worker, and how often each was lost with one."""

    def __init__(self, ranges: Iterable[BatchRange]) -> None:
        self._fresh = iter(ranges)
        self.has_ended = False
        self._again: deque[BatchRange] = deque()
        self._lost: Counter[tuple[int, int]] = Counter()
        self._failed_starts = 0

    def take(self) -> BatchRange | None:
        """The next range to scan; None while there is none."""
        if self._again:
            return self._again.popleft()
        for batches in self._fresh:
            return batches
        self.has_ended = True
        return None

    def has_more(self) -> bool:
        batches = self.take()
        if batches is not None:
            self._again.appendleft(batches)
        return batches is not None

    def put_back(self, ranges: Iterable[BatchRange]) -> None:
        """Ranges that were assigned but not begun."""
        self._again.extend(ranges)

    def lose(self, ranges: Iterable[BatchRange], reason: str) -> None:
        """Ranges that a lost worker had not saved; they are done again, unless that has been tried often enough."""
        for batches in ranges:
            self._lost[batches.key] += 1
            if self._lost[batches.key] > RETRIES:
                raise WorkerError(
                    f"{reason}, and so did {RETRIES} before it at the same place (window {batches.window}); "
                    f"{KEPT}: mend the cause (often memory: try fewer --workers) and run the same command again"
                )
            self._again.append(batches)

    def note_start(self) -> None:
        self._failed_starts = 0

    def fail_start(self, reason: str) -> None:
        self._failed_starts += 1
        if self._failed_starts > RETRIES:
            raise WorkerError(
                f"{reason} while starting, {self._failed_starts} times in a row; {KEPT}: mend the cause "
                "(often memory: try fewer --workers) and run the same command again"
            )


@dataclass(frozen=True)
class ModelRecipe:
    """The scanned model for another process: loaded from its source, or as a copy. Can be pickled."""

    source: str = ""  # what load() takes; "" where there is only the copy
    device: str = "cpu"
    dtype: str = "float32"
    tokenizer: Any = None  # the very one; None where the model's files alone can give it
    device_map: Any = None
    fingerprint: str = ""
    copy: bytes = b""  # the pickled model

    @classmethod
    def of(cls, model: MemoryModel, fingerprint: str, device_map: Any = None) -> ModelRecipe:
        """The recipe of a loaded model; one that was made in memory is copied."""
        if not model.source:
            return cls(device=str(model.device), fingerprint=fingerprint, copy=_pickled(model))
        tokenizer = model.tokenizer if model.has_tokenizer and type(model.tokenizer) is Tokenizer else None
        _refuse_unpicklable(tokenizer)
        dtype = str(model.dtype).removeprefix("torch.")
        return cls(model.source, str(model.device), dtype, tokenizer, device_map, fingerprint)

    def as_copy(self, model: MemoryModel) -> ModelRecipe:
        """The same, for who cannot load it from its source."""
        return self if self.copy else replace(self, source="", copy=_pickled(model))

    def elsewhere(self, gpus: float) -> ModelRecipe:
        """The same for a worker on any machine: on a GPU of its own, or on the processor."""
        return replace(self, device="cuda" if gpus else "cpu")

    def load_or_none(self, number: int = 0) -> MemoryModel | None:
        """The model, or None where its source is not here or is another: then a copy is needed."""
        try:
            return self.load(number)
        except MemlensError:
            if self.copy:
                raise
            return None

    def load(self, number: int = 0) -> MemoryModel:
        """The model for worker `number`; of several GPUs each worker takes the next. Refused if it has changed."""
        from memlens.models.load import load

        device = _device_of(self.device, number)
        if self.copy:
            model: MemoryModel = pickle.loads(self.copy)
            model.network.to(device)
            return model
        loaded = load(
            self.source,
            tokenizer=self.tokenizer,
            device=device,
            dtype=self.dtype,
            prove=False,
            **({} if self.device_map is None else {"device_map": self.device_map}),
        )
        if loaded.fingerprint() != self.fingerprint:
            raise ModelError(
                f"{self.source} has changed since the scan began; put back what was there, or start over with --fresh"
            )
        return loaded


def _pickled(model: MemoryModel) -> bytes:
    try:
        return pickle.dumps(model)
    except MemlensError:
        raise
    except Exception as error:  # anything an object's parts may raise
        raise ModelError(
            f"{model.name} is a model in memory that cannot be copied to other processes ({type(error).__name__}); "
            "save it and name its folder, or use --workers 1"
        ) from error


def _refuse_unpicklable(tokenizer: Any) -> None:
    try:
        pickle.dumps(tokenizer)
    except Exception as error:
        raise ModelError(
            f"{type(tokenizer).__name__} cannot be copied to other processes ({type(error).__name__}); "
            "name the tokenizer's folder, or use --workers 1"
        ) from error


def _device_of(device: str, number: int) -> str:
    if not device.startswith("cuda"):
        return device
    import torch

    return f"cuda:{number % max(1, torch.cuda.device_count())}"
