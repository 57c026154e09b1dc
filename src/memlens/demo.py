"""`demo`: everything memlens does, with a model and a corpus small enough for two minutes, and what it found.

The folder is one that `analyze` could have made, in the same stages, continued where it stopped; only two samples are
smaller, so that nobody waits (PREFIXES, EDITED). The full ones can be had in the same folder later.
Which findings there are is report/findings' matter; nothing is printed here.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlens import api
from memlens.analyze import KEPT, MADE, Stage, StageWatcher
from memlens.corpus.settings import BUNDLED
from memlens.errors import ModelNotFound
from memlens.index.build import Progress, no_progress
from memlens.index.reader import Index

if TYPE_CHECKING:
    from memlens.experiments import Experiment
    from memlens.models.memory_model import MemoryModel
    from memlens.report.told import Told

FOLDER = "memlens-demo"
STAGES = ("scan", "values", "patterns", "experiments", "report")
FINDINGS = ("memory", "settling", "right", "depth", "composition")
INSTEAD = ("dead", "rarest", "wanted", "claim-last-token", "claim-residual")  # where one of the five has no ground
PREFIXES, EDITED = 1000, 4  # prefixes of section 5; memories a layer whose triggers are edited


@dataclass(frozen=True)
class SmallerSample:
    """An experiment that looked at less than it does by default."""

    experiment: str
    counts: str  # what the sample counts
    here: int
    default: int


@dataclass(frozen=True)
class Demo:
    """What a demo leaves behind."""

    index: Index
    report: Path
    stages: tuple[Stage, ...]
    findings: tuple[Told, ...]
    smaller: tuple[SmallerSample, ...]


def demo(
    model: MemoryModel | api.Source | Any = BUNDLED,
    corpus: api.Source = BUNDLED,
    *,
    out: api.Source = FOLDER,
    prefixes: int = PREFIXES,
    edited: int = EDITED,
    threads: int | None = None,
    progress: Progress = no_progress,
    watcher: StageWatcher | None = None,
    **options: Any,
) -> Demo:
    """All stages in the folder `out`, and five findings; `options` are further ones of `scan`."""
    work = _Work(_load(model), Path(out), threads, progress, prefixes, edited)
    watcher = watcher or StageWatcher()
    stages = []
    for number, name in enumerate(STAGES):
        watcher.begins(number, name)
        began = time.monotonic()
        made = work.scan(corpus, options) if name == "scan" else getattr(work, name)()
        which = made if isinstance(made, tuple) else ()
        stages.append(Stage(name, MADE if made else KEPT, time.monotonic() - began, which))
        watcher.ended(stages[-1])
    return Demo(work.index, work.page, tuple(stages), tuple(_five(work.index)), work.smaller())


def _load(model: Any) -> MemoryModel:
    try:
        return api.load(model)
    except ModelNotFound as error:
        if model != BUNDLED:
            raise
        raise ModelNotFound(
            "this memlens holds no bundled model, which the demo needs; install a release that has one, "
            "or run `memlens analyze` with a model of yours"
        ) from error


def _five(index: Index) -> list[Told]:
    from memlens.report.findings import find

    told = find(index, *FINDINGS)
    return told if len(told) == len(FINDINGS) else (told + find(index, *INSTEAD))[: len(FINDINGS)]


class _Work:
    """The stages, each of which does what is left to do and says what it made: nothing where all was there."""

    def __init__(
        self, model: MemoryModel, folder: Path, threads: int | None, progress: Progress, prefixes: int, edited: int
    ) -> None:
        self.model, self.folder, self.threads, self.progress = model, folder, threads, progress
        self.prefixes, self.edited = prefixes, edited
        self.page = folder

    @property
    def index(self) -> Index:
        return Index(self.folder)

    def scan(self, corpus: api.Source, options: dict[str, Any]) -> bool:
        reached = set()

        def progress(stage: str, done: int, total: int | None) -> None:
            reached.add(stage)
            self.progress(stage, done, total)

        api.scan(self.model, corpus, out=self.folder, threads=self.threads, progress=progress, **options)
        return bool(reached)  # a complete one reports no progress

    def values(self) -> bool:
        from memlens.values import values_are_made

        if values_are_made(self.index, self.model, top=50, reading=None):
            return False
        api.values(self.index, model=self.model, threads=self.threads, progress=self.progress)
        return True

    def patterns(self) -> bool:
        from memlens.patterns import PatternSettings, compute_patterns, patterns_are_made

        if patterns_are_made(self.index, PatternSettings()):
            return False
        compute_patterns(self.index, progress=self.progress)
        return True

    def experiments(self) -> tuple[str, ...]:
        from memlens.experiments import find_experiments, is_made

        index = self.index
        left: dict[int | None, list[str]] = {}
        for one in find_experiments(["all"]):
            if one.obstacle(index) is None and not is_made(index, one, sample=self._sample(one)):
                left.setdefault(self._sample(one), []).append(one.name)
        for sample, names in left.items():
            api.experiment(index, names, sample=sample, model=self.model, threads=self.threads, progress=self.progress)
        return tuple(name for names in left.values() for name in names)

    def report(self) -> bool:
        self.page = api.report(self.index, progress=self.progress)
        return True

    def smaller(self) -> tuple[SmallerSample, ...]:
        from memlens.experiments import find_experiments

        return tuple(
            SmallerSample(one.name, one.sample_of, here, one.sample)
            for one in find_experiments(["all"])
            if (here := self._sample(one)) is not None and one.sample is not None and here < one.sample
        )

    def _sample(self, experiment: Experiment) -> int | None:
        """None is the experiment's own default."""
        if experiment.name == "local-edits":
            return self.edited
        return self.prefixes if experiment.on_prefixes else None
