"""`analyze`, `demo` and `repair`: scan, values, patterns, experiments and report in turn, in one folder.

Both can be interrupted anywhere and called again. A stage that is complete for this very index is not done again:

    scan          the manifest is there and its plan is the same
    values        made with the same number of tokens and reading, and the files are whole
    patterns      made with the same settings, from the values that are there now, and the files are whole
    experiments   each one: same seed, sample and validation text, made from the values that are there now, whole
    report        always made again, which takes seconds

With more than one thread patterns are found in a process of their own (they keep one core busy), while experiments
that do not need them run here.

`demo` is `analyze` of the bundled model over the first READ tokens of its text, with two smaller samples (PREFIXES,
EDITED), so that nobody waits, and the five findings to begin with. Full samples can be had in the same folder later.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from memlens import api
from memlens.corpus.sentences import corpus_fingerprint
from memlens.errors import IndexFolderError, ModelNotFound, SettingError
from memlens.experiments import prefix_pass
from memlens.experiments.experiment import APPEARS, VERDICTS, Experiment
from memlens.experiments.prefixes import check_stop_words
from memlens.experiments.run import EXPERIMENTS as KNOWN, find_experiments, is_made
from memlens.index.check import restore_manifest
from memlens.index.format import (
    EXPERIMENTS,
    KEYS,
    MANIFEST,
    NAMES,
    PATTERNS,
    ROUTERS,
    TOKENS,
    VALUES,
    Manifest,
    is_complete,
    located,
)
from memlens.index.reader import Index, open_index
from memlens.models.load import load
from memlens.models.memory_model import MemoryModel
from memlens.pattern.beside import find_patterns_beside
from memlens.pattern.table import compute_patterns, patterns_are_made
from memlens.pool import usable_cores
from memlens.progress import Progress, no_progress
from memlens.reports.findings import Insight, Material, find
from memlens.reports.sections import Tables
from memlens.reports.silencing import most_needed
from memlens.settings import (
    BUNDLED,
    CorpusSettings,
    PatternSettings,
    SampleSettings,
    ScanRunSettings,
    ScanSettings,
    ValueSettings,
    split_options,
)
from memlens.vocab.table import values_are_made

MADE, KEPT = "made", "kept"
STAGES = ("scan", "values", "patterns", "experiments", "report")


@dataclass(frozen=True)
class Stage:
    """The outcome of one stage."""

    name: str
    outcome: str  # MADE, or KEPT where it was complete already
    seconds: float = 0.0
    made: tuple[str, ...] = ()  # experiments that were run
    skipped: tuple[tuple[str, str], ...] = ()  # experiments that this index cannot have, and why


@dataclass(frozen=True)
class Analysis:
    """A complete analysis."""

    index: Index
    report: Path
    stages: tuple[Stage, ...]


class StageWatcher:
    """Called when a stage begins and when it has ended; does nothing unless a subclass does."""

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
    device: str = "auto",
    dtype: str = "float32",
    tokenizer: Any = None,
    tokens: int = ValueSettings.top,
    reading: str | None = None,
    vocabulary: str = "all",
    samples: Mapping[str, int] | None = None,
    validation: api.Source | Sequence[api.Source] | None = None,
    progress: Progress = no_progress,
    watcher: StageWatcher | None = None,
    **options: Any,
) -> Analysis:
    """Everything there is to know about a model and a corpus, in the folder `out`, with its report.html.

    `tokens`, `reading` and `vocabulary` are of the values (`tokens` is their `top`), `validation` is a corpus to draw
    prefixes from, `samples` are those of single experiments by name ({"local-edits": 10}; the others keep their own).
    `options` are the fields of SampleSettings (sample, stop_words; `seed` is of scan, patterns and experiments) and
    those of `scan` (top=50, layers=...).
    """
    folder = api.folder_of(out)
    if tokens < 1:
        raise SettingError(f"--tokens is {tokens}; it must be 1 or more")
    drawing, scanning, cutting, running = split_options(
        "analyze", options, SampleSettings, ScanSettings, CorpusSettings, ScanRunSettings
    )
    text = None if validation is None else api.corpus_settings(validation, **cutting)
    drawn = _Samples(SampleSettings(**drawing), samples or {}, text)
    drawn.refuse_wrong()  # what a later stage would refuse must not cost a scan first
    loaded = load(model, tokenizer=tokenizer, device=device, dtype=dtype)
    if reading is not None:
        loaded.lens.checked_reading(reading)
    asked = {"corpus": corpus, "resume": resume, **scanning, **cutting, **running}
    watcher = watcher or StageWatcher()
    work = _Work(loaded, folder, asked, ValueSettings(tokens, reading, vocabulary), drawn, progress)
    stages = []
    for number, name in enumerate(STAGES):
        watcher.begins(number, name)
        began = time.monotonic()
        stage: Stage = getattr(work, name)()
        stages.append(replace(stage, seconds=stage.seconds or time.monotonic() - began))
        watcher.ended(stages[-1])
    return Analysis(work.index, work.page, tuple(stages))


@dataclass(frozen=True)
class _Samples:
    """The samples of the experiments; those that look at no prefixes take neither stop words nor validation text."""

    settings: SampleSettings
    samples: Mapping[str, int]  # of single experiments
    text: CorpusSettings | None

    def refuse_wrong(self) -> None:
        find_experiments(list(self.samples))
        for sample in self.samples.values():
            replace(self.settings, sample=sample)
        if self.settings.stop_words is not None:
            check_stop_words(self.settings.stop_words)
        if self.text is not None:
            corpus_fingerprint(self.text)  # reads it once: a file that is not there is refused now, not after hours

    def sample_of(self, experiment: Experiment) -> int | None:
        """None is the experiment's own."""
        return self.samples.get(experiment.name, self.settings.sample if experiment.on_prefixes else None)

    def options(self, experiment: Experiment) -> dict[str, Any]:
        chosen: dict[str, Any] = {"seed": self.settings.seed, "sample": self.sample_of(experiment)}
        if experiment.on_prefixes and self.settings.stop_words is not None:
            chosen["stop_words"] = self.settings.stop_words
        return chosen

    def validation(self) -> dict[str, Any]:
        if self.text is None:
            return {}
        return {"validation": self.text.sources, "unit": self.text.unit, "column": self.text.column}


@dataclass
class _Work:
    """The stages of one analysis, in the order of STAGES; each does what is left to do."""

    model: MemoryModel
    folder: Path
    asked: dict[str, Any]  # of the scan
    reading: ValueSettings
    drawn: _Samples
    progress: Progress
    made: list[str] = field(default_factory=list)  # experiments
    experimenting: float = 0.0  # seconds, of experiments that were run while patterns were found
    index: Index = field(init=False)
    page: Path = field(init=False)

    @property
    def threads(self) -> int | None:
        return self.asked.get("threads")

    def scan(self) -> Stage:
        reached: set[str] = set()

        def progress(stage: str, done: int, total: int | None) -> None:
            reached.add(stage)
            self.progress(stage, done, total)

        self.index = api.scan(self.model, out=self.folder, progress=progress, **self.asked)
        return Stage("scan", MADE if reached else KEPT)  # a complete one reports no progress

    def values(self) -> Stage:
        chosen = asdict(self.reading)
        if values_are_made(self.index, self.model, **chosen):
            return Stage("values", KEPT)
        api.values(self.index, model=self.model, threads=self.threads, progress=self.progress, **chosen)
        return Stage("values", MADE)

    def patterns(self) -> Stage:
        settings = PatternSettings(seed=self.drawn.settings.seed)
        if patterns_are_made(self.index, settings):
            return Stage("patterns", KEPT)
        if self.threads == 1 or usable_cores() == 1:
            compute_patterns(self.index, settings, progress=self.progress)
            return Stage("patterns", MADE)
        with find_patterns_beside(self.index.folder, settings) as search:
            began = time.monotonic()
            self._run_experiments(lambda experiment: PATTERNS.removesuffix(".parquet") not in experiment.needs)
            self.experimenting = time.monotonic() - began
            tables, seconds = search.wait(self.progress)
        tables.write(self.index)
        return Stage("patterns", MADE, seconds)

    def experiments(self) -> Stage:
        began = time.monotonic() - self.experimenting
        skipped = self._run_experiments(lambda experiment: True)
        order = {
            experiment.name: place
            for place, experiment in enumerate(sorted(KNOWN.values(), key=lambda experiment: experiment.on_prefixes))
        }
        names = tuple(sorted(self.made, key=lambda name: order[name]))
        outcome = MADE if names else KEPT
        return Stage("experiments", outcome, time.monotonic() - began, made=names, skipped=tuple(skipped.items()))

    def _run_experiments(self, is_chosen: Callable[[Experiment], bool]) -> dict[str, str]:
        """Run what is not made yet, of those that are chosen; the names of those that cannot be come back, and why."""
        skipped: dict[str, str] = {}
        left: dict[tuple[bool, int | None], list[Experiment]] = {}  # those that can be run together
        for experiment in filter(is_chosen, find_experiments(["all"])):
            text = self.drawn.text if experiment.on_prefixes else None
            if (reason := experiment.obstacle(self.index)) is not None:
                skipped[experiment.name] = reason
            elif not is_made(self.index, experiment, validation=text, **self.drawn.options(experiment)):
                left.setdefault((experiment.on_prefixes, self.drawn.sample_of(experiment)), []).append(experiment)
        for (on_prefixes, _sample), group in sorted(left.items(), key=lambda item: item[0][0]):
            chosen = self.drawn.options(group[0]) | (self.drawn.validation() if on_prefixes else {})
            names = [experiment.name for experiment in group]
            api.experiment(self.index, names, model=self.model, threads=self.threads, progress=self.progress, **chosen)
            self.made += names
        return skipped

    def report(self) -> Stage:
        self.page = api.report(self.index, progress=self.progress)
        return Stage("report", MADE)


FOLDER = "memlens-demo"
# Trends, those first that the paper saw and this model shows; then what is told where one of the five has no ground.
TRENDS = ("depth", "settling", "claim-agreement", "composition", "claim-last-token", "claim-residual")
INSTEAD = ("dead", "rarest", "wanted")
HELD_OUT = f"{BUNDLED}:held-out"  # where prefixes of section 5 come from: not trained on, as in the paper
READ = 200_000  # tokens of the bundled text
PREFIXES, EDITED = 1000, 8  # prefixes of section 5; memories per layer that are run again (local edits)


@dataclass(frozen=True)
class SmallerSample:
    """An experiment that looked at less than it does by default."""

    experiment: str
    counts: str  # what the sample counts
    here: int
    default: int


@dataclass(frozen=True)
class Demo:
    """A complete demo."""

    index: Index
    report: Path
    stages: tuple[Stage, ...]
    findings: tuple[Insight, ...]
    smaller: tuple[SmallerSample, ...]
    verdicts: dict[str, int]  # how many claims of the paper have which


def demo(
    model: MemoryModel | api.Source | Any = BUNDLED,
    corpus: api.Source = BUNDLED,
    *,
    out: api.Source = FOLDER,
    prefixes: int = PREFIXES,
    edited: int = EDITED,
    **options: Any,
) -> Demo:
    """All stages in the folder `out`, and five findings; `options` are further ones of `analyze`.

    Larger samples that the folder holds already are kept.
    """
    if taken := {"sample", "samples"} & options.keys():
        raise SettingError(f"a demo has no {min(taken)}; say prefixes= and edited=")
    if options.get("resume", True):
        prefixes, edited = _at_least(api.folder_of(out), prefixes, edited)
    samples = {experiment.name: edited for experiment in find_experiments(["all"]) if experiment.tokens_run}
    if corpus == BUNDLED:
        options = {"validation": HELD_OUT, "max_tokens": READ, **options}
    loaded = _load(model)
    analysis = analyze(loaded, corpus, out=out, sample=prefixes, samples=samples, **options)
    findings, smaller = tuple(_five(analysis.index, loaded)), _smaller(prefixes, samples)
    return Demo(analysis.index, analysis.report, analysis.stages, findings, smaller, _verdicts(analysis.index))


def _at_least(folder: Path, prefixes: int, edited: int) -> tuple[int, int]:
    """The samples, or those in the folder where they are larger: somebody may have waited for them."""
    if not is_complete(folder):
        return prefixes, edited
    manifest, known = open_index(folder).manifest, find_experiments(["all"])
    counts = {experiment.name: manifest.experiment(experiment.name).sample or 0 for experiment in known}
    on_prefixes = [counts[experiment.name] for experiment in known if experiment.on_prefixes]
    run_again = [counts[experiment.name] for experiment in known if experiment.tokens_run]
    return max(prefixes, *on_prefixes), max(edited, *run_again)


def _load(model: Any) -> MemoryModel:
    try:
        return load(model)
    except ModelNotFound as error:
        if model != BUNDLED:
            raise
        raise ModelNotFound(
            "this memlens holds no bundled model, which the demo needs; install a release that has one, "
            "or run `memlens analyze` with a model of yours"
        ) from error


def _five(index: Index, model: MemoryModel) -> list[Insight]:
    """A memory with a subject, one that the model needs, and three trends."""
    needed = most_needed(Material(index), model)
    insights = [*find(index, "memory"), *([needed] if needed else find(index, "right"))]
    trends = sorted(find(index, *TRENDS), key=lambda trend: trend.verdict != APPEARS)  # of equals the first stays first
    return [*insights, *trends[:3], *find(index, *INSTEAD)][:5]


def _verdicts(index: Index) -> dict[str, int]:
    judged = Counter(claim.judgement.verdict for claim in Tables(index).judge() if claim.judgement is not None)
    return {verdict: judged[verdict] for verdict in VERDICTS if judged[verdict]}


def _smaller(sample: int, samples: dict[str, int]) -> tuple[SmallerSample, ...]:
    return tuple(
        SmallerSample(experiment.name, experiment.sample_of, here, experiment.sample)
        for experiment in find_experiments(["all"])
        if (here := samples.get(experiment.name, sample if experiment.on_prefixes else None)) is not None
        and experiment.sample is not None
        and here < experiment.sample
    )


def repair(
    index: Index | api.Source, *, model: MemoryModel | api.Source | None = None, progress: Progress = no_progress
) -> list[str]:
    """Restore a damaged manifest, and make damaged and outdated tables of later stages again with their settings.

    The scan's tables and people's annotations cannot be computed from anything else. If one of them is damaged, an
    error says what to do.

    Returns:
        The names of the files that were written.
    """
    folder = index.folder if isinstance(index, Index) else located(index)
    restored = [MANIFEST] if restore_manifest(folder) else []
    wrong = api.check(folder, progress=progress).to_make_again()
    opened = open_index(folder)
    noted = opened.manifest
    if {VALUES, KEYS, ROUTERS, TOKENS} & {*wrong}:
        was = noted.values
        api.values(
            opened,
            model=model,
            progress=progress,
            top=was.top,
            reading=was.reading,
            vocabulary=was.vocabulary,
            threads=was.threads,
        )
    if {PATTERNS, NAMES} & {*wrong} and noted.patterns is not None:
        api.patterns(opened, progress=progress, **noted.patterns.settings)
    for name in _experiments_of(noted, wrong):
        note = noted.experiments[name]
        if note.validation and note.validation_corpus is None:
            raise IndexFolderError(
                f"'{name}' was made from prefixes of another corpus, which {opened.folder} does not hold; "
                f"run `memlens experiment {opened.folder} {name} --validation CORPUS`"
            )
        options: dict[str, Any] = {"seed": note.seed, "sample": note.sample, "stop_words": note.stop_words}
        if note.validation_corpus is not None:
            corpus = dict(note.validation_corpus)
            options |= {"validation": corpus.pop("sources"), **corpus}
        options["threads"] = noted.prefix_pass.content.get("threads")  # which last bits depend on
        given: dict[str, Any] = {option: value for option, value in options.items() if value is not None}
        api.experiment(opened, name, model=model, progress=progress, **given)
    return restored + wrong


def _experiments_of(noted: Manifest, files: Sequence[str]) -> list[str]:
    """The experiments that made these files; the pass over prefixes is made again by any experiment on prefixes."""
    tables = {file.removesuffix(".parquet") for file in files}
    present = [known for known in KNOWN.values() if known.name in noted.experiments]
    again = [known for known in present if tables & {f"{EXPERIMENTS}/{table.name}" for table in known.tables}]
    if tables & {prefix_pass.PREFIXES, prefix_pass.LAYERS} and not any(known.on_prefixes for known in again):
        again += [known for known in present if known.on_prefixes][:1]
    return [known.name for known in again]
