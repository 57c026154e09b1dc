"""The main job: scan, values, patterns, experiments and report of a model and a corpus, in turn, in one folder.

It can be interrupted anywhere and called again. A stage that is complete for this very index is not done again:

    scan          the manifest is there and its plan is the same
    values        made with the same number of tokens and reading, and the files are whole
    patterns      made with the same settings, from the values that are there now, and the files are whole
    experiments   each one: same seed, sample and validation text, made from the values that are there now, whole
    report        always made again, which takes seconds

This module decides what is left to do; what a stage does is elsewhere, and nothing is printed here.

`demo`: everything memlens does, with a model and a corpus small enough for two minutes, and what it found.

It is `analyze` with two smaller samples, so that nobody waits (PREFIXES, EDITED). The full ones can be had in the same
folder later.
Which findings there are is report/findings' matter; nothing is printed here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlens import api
from memlens.corpus.sentences import corpus_fingerprint
from memlens.corpus.settings import BUNDLED, CorpusSettings
from memlens.errors import ModelNotFound, SettingError
from memlens.index.layout import is_complete
from memlens.index.reader import Index
from memlens.parallel import Progress, no_progress

if TYPE_CHECKING:
    from memlens.experiments.registry import Experiment
    from memlens.models.memory_model import MemoryModel
    from memlens.reports.memory_findings import Told

MADE, KEPT = "made", "kept"
STAGES = ("scan", "values", "patterns", "experiments", "report")


@dataclass(frozen=True)
class Stage:
    """What became of one stage."""

    name: str
    outcome: str  # MADE, or KEPT where it was complete already
    seconds: float
    made: tuple[str, ...] = ()  # experiments that were run
    skipped: tuple[tuple[str, str], ...] = ()  # experiments that this index cannot have, and why


@dataclass(frozen=True)
class Analysis:
    """A complete analysis."""

    index: Index
    report: Path
    stages: tuple[Stage, ...]


class StageWatcher:
    """Told when a stage begins and what became of it; does nothing unless a subclass does."""

    def begins(self, number: int, name: str) -> None:
        """Stage `number` of STAGES, from 0."""

    def ended(self, stage: Stage) -> None:
        """The stage is complete."""


def analyze(
    model: MemoryModel | api.Source | Any,
    corpus: api.Source | Sequence[api.Source],
    *,
    out: api.Source,
    resume: bool = True,
    unit: str = "sentence",
    column: str = "text",
    device: str = "auto",
    dtype: str = "float32",
    tokenizer: Any = None,
    threads: int | None = None,
    seed: int = 0,
    tokens: int = 50,
    reading: str | None = None,
    sample: int | None = None,
    samples: Mapping[str, int] | None = None,
    validation: api.Source | Sequence[api.Source] | None = None,
    stop_words: str | None = None,
    progress: Progress = no_progress,
    watcher: StageWatcher | None = None,
    **options: Any,
) -> Analysis:
    """Everything there is to know about a model and a corpus, in the folder `out`, with its report.html.

    `tokens` and `reading` are of the values (their `top` and `reading`), `sample`, `validation` and `stop_words` of the
    experiments on prefixes, `samples` of single experiments by name ({"local-edits": 10}; the others keep their own),
    `seed` of scan, patterns and experiments; `options` are the further ones of `scan` (top=50, layers=...).
    """
    folder = api.folder_of(out)
    _refuse_wrong(seed, tokens, sample, samples or {}, stop_words)
    text = None if validation is None else api.corpus_settings(validation, unit, column)
    if text is not None:
        corpus_fingerprint(text)  # reads it once: a file that is not there is refused now, not after hours
    loaded = api.load(model, tokenizer=tokenizer, device=device, dtype=dtype)
    if reading is not None:
        loaded.lens.checked_reading(reading)
    work = _Work(loaded, folder, threads, progress)
    drawn = _Drawn(seed, sample, samples or {}, stop_words, text)
    todo: dict[str, Callable[[], Stage]] = {
        "scan": lambda: work.scan(corpus, resume=resume, unit=unit, column=column, seed=seed, **options),
        "values": lambda: work.values(tokens, reading),
        "patterns": lambda: work.patterns(seed),
        "experiments": lambda: work.experiments(drawn),
        "report": work.report,
    }
    watcher = watcher or StageWatcher()
    stages = []
    for number, name in enumerate(STAGES):
        watcher.begins(number, name)
        stages.append(todo[name]())
        watcher.ended(stages[-1])
    return Analysis(work.index, work.page, tuple(stages))


def _refuse_wrong(
    seed: int, tokens: int, sample: int | None, samples: Mapping[str, int], stop_words: str | None
) -> None:
    """What later stages would refuse must not cost a scan first."""
    from memlens.experiments.registry import find_experiments
    from memlens.experiments.targets import check_stop_words

    find_experiments(list(samples))
    numbers = [("seed", seed, 0), ("tokens", tokens, 1), ("sample", sample, 1)]
    for option, number, least in [*numbers, *(("sample", own, 1) for own in samples.values())]:
        if number is not None and number < least:
            raise SettingError(f"--{option} is {number}; it must be {least} or more")
    if stop_words is not None:
        check_stop_words(stop_words)


@dataclass(frozen=True)
class _Drawn:
    """What experiments look at; those that look at no prefixes know neither stop words nor validation text."""

    seed: int
    sample: int | None
    samples: Mapping[str, int]
    stop_words: str | None
    text: CorpusSettings | None

    def sample_of(self, experiment: Experiment) -> int | None:
        """None is the experiment's own."""
        return self.samples.get(experiment.name, self.sample if experiment.on_prefixes else None)

    def settings(self, experiment: Experiment) -> dict[str, Any]:
        own: dict[str, Any] = {"seed": self.seed, "sample": self.sample_of(experiment)}
        if experiment.on_prefixes and self.stop_words is not None:
            own["stop_words"] = self.stop_words
        return own

    def validation(self) -> dict[str, Any]:
        if self.text is None:
            return {}
        return {"validation": self.text.sources, "unit": self.text.unit, "column": self.text.column}


class _Work:
    """The stages of one analysis, each of which does what is left to do."""

    def __init__(self, model: MemoryModel, folder: Path, threads: int | None, progress: Progress) -> None:
        self.model, self.folder, self.threads, self.progress = model, folder, threads, progress
        self.page = folder
        self._index: Index | None = None

    @property
    def index(self) -> Index:
        if self._index is None:
            self._index = Index(self.folder)
        return self._index

    def scan(self, corpus: api.Source | Sequence[api.Source], **options: Any) -> Stage:
        began = time.monotonic()
        reached = set()

        def progress(stage: str, done: int, total: int | None) -> None:
            reached.add(stage)
            self.progress(stage, done, total)

        self._index = api.scan(self.model, corpus, out=self.folder, threads=self.threads, progress=progress, **options)
        return _stage("scan", MADE if reached else KEPT, began)  # a complete one reports no progress

    def values(self, top: int, reading: str | None) -> Stage:
        from memlens.vocab.table import values_are_made

        began = time.monotonic()
        if values_are_made(self.index, self.model, top=top, reading=reading):
            return _stage("values", KEPT, began)
        api.values(self.index, top=top, reading=reading, model=self.model, threads=self.threads, progress=self.progress)
        return _stage("values", MADE, began)

    def patterns(self, seed: int) -> Stage:
        from memlens.pattern.table import compute_patterns, patterns_are_made
        from memlens.pattern.words import PatternSettings

        began = time.monotonic()
        settings = PatternSettings(seed=seed)
        if patterns_are_made(self.index, settings):
            return _stage("patterns", KEPT, began)
        compute_patterns(self.index, settings, progress=self.progress)
        return _stage("patterns", MADE, began)

    def experiments(self, drawn: _Drawn) -> Stage:
        from memlens.experiments.registry import find_experiments
        from memlens.experiments.run import is_made

        began = time.monotonic()
        known = find_experiments(["all"])
        obstacles = [(one.name, one.obstacle(self.index)) for one in known]
        skipped = tuple((name, reason) for name, reason in obstacles if reason is not None)
        left_out = {name for name, _reason in skipped}
        left: dict[tuple[bool, int | None], list[str]] = {}  # what can be run together
        for one in known:
            text = drawn.text if one.on_prefixes else None
            if one.name not in left_out and not is_made(self.index, one, validation=text, **drawn.settings(one)):
                left.setdefault((one.on_prefixes, drawn.sample_of(one)), []).append(one.name)
        for (on_prefixes, _sample), names in sorted(left.items(), key=lambda item: item[0][0]):
            (one, *_others) = find_experiments(names)
            own = drawn.settings(one) | (drawn.validation() if on_prefixes else {})
            api.experiment(self.index, names, model=self.model, threads=self.threads, progress=self.progress, **own)
        made = tuple(name for names in left.values() for name in names)
        return _stage("experiments", MADE if made else KEPT, began, made, skipped)

    def report(self) -> Stage:
        began = time.monotonic()
        self.page = api.report(self.index, progress=self.progress)
        return _stage("report", MADE, began)


def _stage(
    name: str, outcome: str, began: float, made: tuple[str, ...] = (), skipped: tuple[tuple[str, str], ...] = ()
) -> Stage:
    return Stage(name, outcome, time.monotonic() - began, made, skipped)


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
    from memlens.experiments.registry import find_experiments

    if not is_complete(folder):
        return prefixes, edited
    manifest = api.open_index(folder).manifest
    counts = {one.name: manifest.experiment(one.name).sample or 0 for one in find_experiments(["all"])}
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
    from memlens.reports.findings import find

    told = find(index, *FINDINGS)
    return told if len(told) == len(FINDINGS) else (told + find(index, *INSTEAD))[: len(FINDINGS)]


def _smaller(sample: int, samples: dict[str, int]) -> tuple[SmallerSample, ...]:
    from memlens.experiments.registry import find_experiments

    return tuple(
        SmallerSample(one.name, one.sample_of, here, one.sample)
        for one in find_experiments(["all"])
        if (here := samples.get(one.name, sample if one.on_prefixes else None)) is not None
        and one.sample is not None
        and here < one.sample
    )
