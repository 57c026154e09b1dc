"""`demo`: everything memlens does, with a model and a corpus small enough for two minutes, and what it found.

It is `analyze` with two smaller samples, so that nobody waits (PREFIXES, EDITED). The full ones can be had in the same
folder later.
Which findings there are is report/findings' matter; nothing is printed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlens import api
from memlens.analyze import Stage, StageWatcher, analyze
from memlens.corpus.settings import BUNDLED
from memlens.errors import ModelNotFound, SettingError
from memlens.index.build import Progress, no_progress
from memlens.index.layout import is_complete
from memlens.index.reader import Index

if TYPE_CHECKING:
    from memlens.models.memory_model import MemoryModel
    from memlens.report.told import Told

FOLDER = "memlens-demo"
FINDINGS = ("memory", "settling", "right", "depth", "composition")
INSTEAD = ("dead", "rarest", "wanted", "claim-last-token", "claim-residual")  # where one of the five has no ground
PREFIXES, EDITED = 1000, 8  # prefixes of section 5; memories a layer whose triggers are edited


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
    """All stages in the folder `out`, and five findings; `options` are further ones of `scan`.

    Larger samples that the folder holds already are kept.
    """
    if taken := {"sample", "samples"} & options.keys():
        raise SettingError(f"a demo has no {min(taken)}; say prefixes= and edited=")
    if options.get("resume", True):
        prefixes, edited = _at_least(api.folder_of(out), prefixes, edited)
    samples = {"local-edits": edited}
    made = analyze(
        _load(model), corpus, out=out, sample=prefixes, samples=samples, threads=threads, progress=progress,
        watcher=watcher, **options,
    )  # fmt: skip
    return Demo(made.index, made.report, made.stages, tuple(_five(made.index)), _smaller(prefixes, samples))


def _at_least(folder: Path, prefixes: int, edited: int) -> tuple[int, int]:
    """The samples, or those in the folder where they are larger: somebody may have waited for them."""
    from memlens.experiments import find_experiments

    if not is_complete(folder):
        return prefixes, edited
    noted = api.open_index(folder).manifest.get("experiments", {})
    counts = {one.name: noted.get(one.name, {}).get("sample") or 0 for one in find_experiments(["all"])}
    on_prefixes = [counts[one.name] for one in find_experiments(["all"]) if one.on_prefixes]
    return max(prefixes, *on_prefixes), max(edited, counts["local-edits"])


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


def _smaller(sample: int, samples: dict[str, int]) -> tuple[SmallerSample, ...]:
    from memlens.experiments import find_experiments

    return tuple(
        SmallerSample(one.name, one.sample_of, here, one.sample)
        for one in find_experiments(["all"])
        if (here := samples.get(one.name, sample if one.on_prefixes else None)) is not None
        and one.sample is not None
        and here < one.sample
    )
