"""Where a scan runs, as the person wants it: in this process, on local workers, or on a Ray cluster.

Validated once, here; none of it changes the result but the number of threads. Knows the executors and nothing of work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memlens.corpus import CorpusSettings
from memlens.errors import SettingError
from memlens.models.memory_model import MemoryModel
from memlens.scan.alone import Alone
from memlens.scan.estimate import usable_cores
from memlens.scan.local import MOST_WORKERS, LocalWorkers
from memlens.scan.mapping import Mapper
from memlens.scan.settings import ScanSettings
from memlens.scan.split import Split, bytes_of_worker, choose_split, tokens_about
from memlens.scan.work import Executor

EXECUTORS = ("local", "ray")


@dataclass(frozen=True)
class HowToRun:
    """The options of a scan that say where it runs; None where the person has not said."""

    executor: str = "local"
    workers: int | None = None
    threads: int | None = None
    ray_address: str | None = None
    gpus_per_worker: float = 0

    def __post_init__(self) -> None:
        if self.executor not in EXECUTORS:
            raise SettingError(f"--executor is '{self.executor}'; choose one of: {', '.join(EXECUTORS)}")
        if self.workers is not None and not 1 <= self.workers <= MOST_WORKERS:
            raise SettingError(f"--workers is {self.workers}; it must be 1 to {MOST_WORKERS:,}")
        if self.threads is not None and self.threads < 1:
            raise SettingError(f"--threads is {self.threads}; it must be 1 or more")
        if not 0 <= self.gpus_per_worker <= 64:
            raise SettingError(f"--gpus-per-worker is {self.gpus_per_worker}; it must be 0 to 64")
        if self.executor != "ray":
            for option, value in (("--ray-address", self.ray_address), ("--gpus-per-worker", self.gpus_per_worker)):
                if value:
                    raise SettingError(f"{option} counts for --executor ray only; add that or leave it out")

    def split(
        self,
        model: MemoryModel,
        settings: ScanSettings,
        corpus: CorpusSettings,
        recorded: int | None,
        is_complete: bool,
    ) -> Split:
        """Workers and threads; of a scan that is continued the `recorded` threads count, to keep its bytes the same."""
        if self.executor == "ray":
            return Split(self.workers or 0, self.threads or recorded or 1)  # 0: as many as the cluster has room for
        if is_complete or (self.threads is not None and self.workers is None):
            return Split(1, self.threads or recorded or usable_cores())
        return choose_split(
            model,
            0 if self.workers else tokens_about(corpus, settings.max_tokens),
            bytes_of_worker(model, settings),
            workers=self.workers,
            threads=self.threads or recorded,
        )

    def mapper(self) -> Callable[[MemoryModel], Mapper] | None:
        """Where sections 4 and 5 run, once the model is there; None in this process."""
        if self.executor != "ray":
            return None
        from memlens.scan.ray_mapping import RayMapper

        return lambda model: RayMapper(
            model, self.workers or 0, self.threads or 1, self.ray_address, self.gpus_per_worker
        )

    def make_executor(self, split: Split) -> Executor:
        if self.executor == "ray":
            from memlens.scan.on_ray import RayWorkers

            return RayWorkers(split.workers, self.ray_address, self.gpus_per_worker)
        return Alone() if split.workers == 1 else LocalWorkers(split.workers)
