"""`analyze` and `demo` run all stages in one folder: scan, values, patterns, roles, experiments and report.

`repair` runs the stages whose tables are damaged. All three functions can be interrupted, and resume when they are
called again. A stage is skipped if its result is already complete:

    scan          the manifest exists and has the same plan
    values        the tables are intact and have the same settings
    patterns      the tables are intact, have the same settings, and were computed from the current values
    roles         the table is intact, has the same settings, and was computed from the current tables
    experiments   the tables of each experiment are intact, have the same settings, and were computed from the current
                  values
    report        never skipped, because writing it takes only seconds

With more than one thread, patterns are computed in a second process, because they use only one core. At the same time,
this process runs the experiments that do not need patterns.

`demo` runs `analyze` on the bundled model and the first READ tokens of the bundled text. To save time, it uses smaller
samples (PREFIXES, EDITED). A later `analyze` in the same folder can enlarge the samples.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from memlens import api
from memlens.corpus.sentences import corpus_fingerprint
from memlens.errors import IndexFolderError, ModelNotFound, SettingError
from memlens.experiments.experiment import Experiment
from memlens.experiments.prefixes import LAYERS, PREFIXES as PREFIX_TABLE, check_stop_words
from memlens.experiments.run import EXPERIMENTS as ALL_EXPERIMENTS, NULL, find_experiments, is_made
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
from memlens.pattern.table import compute_patterns, find_patterns_beside, patterns_are_made
from memlens.pool import usable_cores
from memlens.progress import Progress, no_progress
from memlens.reports.findings import Finding, count_verdicts, select_findings
from memlens.reports.sections import Tables
from memlens.role.table import roles_are_made
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
STAGES = ("scan", "values", "patterns", "roles", "experiments", "report")


@dataclass(frozen=True)
class Stage:
    """The outcome of one stage."""

    name: str
    outcome: str  # MADE, or KEPT if the stage was already complete
    seconds: float = 0.0
    made: tuple[str, ...] = ()  # names of the experiments that were run
    skipped: tuple[tuple[str, str], ...] = ()  # experiments that cannot run on this index, with the reasons


@dataclass(frozen=True)
class Analysis:
    """The result of `analyze`."""

    index: Index
    report: Path
    stages: tuple[Stage, ...]
    findings: tuple[Finding, ...] = ()  # the best supported findings, at most five
    verdicts: dict[str, int] = field(default_factory=dict)  # {verdict: number of claims of the paper that were tested}


class StageWatcher:
    """A base class for progress displays. Its methods do nothing."""

    def begins(self, number: int, name: str) -> None:
        """Announce the start of stage `number` of STAGES, counted from 0."""

    def ended(self, stage: Stage) -> None:
        """Announce the end of a stage."""


def analyze(
    model: MemoryModel | api.Source | Any,
    corpus: api.Source | Sequence[api.Source],
    *,
    out: api.Source,
    resume: bool = True,
    device: str = "auto",
    dtype: str = "auto",
    tokenizer: Any = None,
    tokens: int = ValueSettings.top,
    reading: str | None = None,
    vocabulary: str = "all",
    states: bool = True,
    samples: Mapping[str, int] | None = None,
    validation: api.Source | Sequence[api.Source] | None = None,
    progress: Progress = no_progress,
    watcher: StageWatcher | None = None,
    **options: Any,
) -> Analysis:
    """Run all stages on a model and a corpus: scan, values, patterns, roles, experiments and report.

    Args:
        model: A Hub id, folder, .gguf file, loaded transformers model, or MemoryModel.
        corpus: One or more files, folders or dataset names.
        out: Folder to write the index and report.html to.
        resume: True resumes the work in the folder. False replaces it.
        device: Device to run the model on: "auto", "cpu", "cuda", "mps" or another torch device.
        dtype: Weight dtype of the model. "auto" is the checkpoint's dtype on a GPU and float32 on a CPU.
        tokenizer: Tokenizer to use with a loaded transformers model.
        tokens: Number of top tokens to store per value.
        reading: How to project values onto the vocabulary, "folded" or "raw". None uses the model's default.
        vocabulary: Tokens to rank: "all", or "trained" to leave out undertrained tokens.
        states: If True, run the model on the triggers again to find subjects by its final states (see `patterns`).
        samples: Sample sizes of individual experiments by name, for example {"local-edits": 10}.
        validation: Corpus to draw prefixes from. None draws them from the scanned corpus.
        progress: Called with the name of the step, the completed work and the total.
        watcher: A StageWatcher, whose methods are called when a stage starts and when it ends.
        **options: Fields of SampleSettings (seed, sample, stop_words) and options of `scan` (top=50, layers=...).

    Returns:
        The index, the path of the report, the outcome of each stage, the best supported findings, and the number of
        claims of the paper by verdict.

    Raises:
        MemlensError: The model, a corpus, an option or the folder cannot be used.

    Example:
        memlens.analyze("gpt2", "my-texts/", out="gpt2-index", max_tokens=200_000).report
    """
    folder = api.folder_of(out)
    if tokens < 1:
        raise SettingError(f"--tokens is {tokens}; it must be 1 or more")
    drawing, scanning, cutting, running = split_options(
        "analyze", options, SampleSettings, ScanSettings, CorpusSettings, ScanRunSettings
    )
    text = None if validation is None else api.corpus_settings(validation, **cutting)
    sampling = _Sampling(SampleSettings(**drawing), samples or {}, text)
    sampling.check()  # find invalid options before the long scan
    memory_model = load(model, tokenizer=tokenizer, device=device, dtype=dtype)
    if reading is not None:
        memory_model.lens.checked_reading(reading)
    scan_options = {"corpus": corpus, "resume": resume, **scanning, **cutting, **running}
    watcher = watcher or StageWatcher()
    work = _Work(
        memory_model, folder, scan_options, ValueSettings(tokens, reading, vocabulary), states, sampling, progress
    )
    stages = []
    for number, name in enumerate(STAGES):
        watcher.begins(number, name)
        start = time.monotonic()
        stage: Stage = getattr(work, name)()
        stages.append(replace(stage, seconds=stage.seconds or time.monotonic() - start))
        watcher.ended(stages[-1])
    tables = Tables(work.index)
    findings, verdicts = tuple(select_findings(work.index, tables)), count_verdicts(tables)
    return Analysis(work.index, work.page, tuple(stages), findings, verdicts)


@dataclass(frozen=True)
class _Sampling:
    """Sampling options of the experiments. Stop words and validation text apply only to experiments on prefixes."""

    settings: SampleSettings
    samples: Mapping[str, int]  # sample sizes of individual experiments by name
    text: CorpusSettings | None

    def check(self) -> None:
        """Raise an error for an unknown experiment or stop word list, an invalid sample size, or a missing text."""
        find_experiments(list(self.samples))
        for sample in self.samples.values():
            replace(self.settings, sample=sample)
        if self.settings.stop_words is not None:
            check_stop_words(self.settings.stop_words)
        if self.text is not None:
            corpus_fingerprint(self.text)  # open the text, so that a missing file is reported before the scan

    def sample_of(self, experiment: Experiment) -> int | None:
        """Return the sample size of an experiment, or None for its default."""
        return self.samples.get(experiment.name, self.settings.sample if experiment.on_prefixes else None)

    def options(self, experiment: Experiment) -> dict[str, Any]:
        options: dict[str, Any] = {"seed": self.settings.seed, "sample": self.sample_of(experiment)}
        if experiment.on_prefixes and self.settings.stop_words is not None:
            options["stop_words"] = self.settings.stop_words
        return options

    def validation(self) -> dict[str, Any]:
        if self.text is None:
            return {}
        return {"validation": self.text.sources, "unit": self.text.unit, "column": self.text.column}


@dataclass
class _Work:
    """The work of `analyze`. Each stage is a method that computes only what is not complete yet."""

    model: MemoryModel
    folder: Path
    scan_options: dict[str, Any]
    reading: ValueSettings
    states: bool
    sampling: _Sampling
    progress: Progress
    made: list[str] = field(default_factory=list)  # names of the experiments that were run
    experiment_seconds: float = 0.0  # time spent on experiments while patterns were computed
    index: Index = field(init=False)
    page: Path = field(init=False)

    @property
    def threads(self) -> int | None:
        return self.scan_options.get("threads")

    def scan(self) -> Stage:
        reached: set[str] = set()

        def progress(stage: str, done: int, total: int | None) -> None:
            reached.add(stage)
            self.progress(stage, done, total)

        self.index = api.scan(self.model, out=self.folder, progress=progress, **self.scan_options)
        return Stage("scan", MADE if reached else KEPT)  # no progress is reported if the scan was already complete

    def values(self) -> Stage:
        reading = asdict(self.reading)
        if values_are_made(self.index, self.model, **reading):
            return Stage("values", KEPT)
        api.values(self.index, model=self.model, threads=self.threads, progress=self.progress, **reading)
        return Stage("values", MADE)

    def patterns(self) -> Stage:
        settings = PatternSettings(seed=self.sampling.settings.seed)
        if patterns_are_made(self.index, settings, states=self.states):
            return Stage("patterns", KEPT)
        if self.threads == 1 or usable_cores() == 1:
            compute_patterns(self.index, settings, model=self.model if self.states else None, progress=self.progress)
            return Stage("patterns", MADE)
        from memlens.pattern.states import find_state_subjects

        start = time.monotonic()
        subjects = find_state_subjects(self.index, self.model, settings, self.progress) if self.states else None
        states_seconds = time.monotonic() - start
        with find_patterns_beside(self.index.folder, settings, subjects) as wait_for_tables:
            start = time.monotonic()
            self._run_experiments(lambda experiment: PATTERNS.removesuffix(".parquet") not in experiment.needs)
            self.experiment_seconds = time.monotonic() - start
            tables, seconds = wait_for_tables(self.progress)
        tables.write(self.index)
        return Stage("patterns", MADE, states_seconds + seconds)

    def roles(self) -> Stage:
        if roles_are_made(self.index, self.model, seed=self.sampling.settings.seed):
            return Stage("roles", KEPT)
        api.roles(self.index, model=self.model, progress=self.progress, seed=self.sampling.settings.seed)
        return Stage("roles", MADE)

    def experiments(self) -> Stage:
        start = time.monotonic() - self.experiment_seconds
        skipped = self._run_experiments(lambda experiment: True)
        self._run_null()
        by_kind = [*sorted(ALL_EXPERIMENTS.values(), key=lambda experiment: experiment.on_prefixes), NULL]
        names = tuple(experiment.name for experiment in by_kind if experiment.name in self.made)
        outcome = MADE if names else KEPT
        return Stage("experiments", outcome, time.monotonic() - start, made=names, skipped=tuple(skipped.items()))

    def _run_experiments(self, is_selected: Callable[[Experiment], bool]) -> dict[str, str]:
        """Run the selected experiments that are not complete.

        Returns {name: reason} for the experiments that cannot run.
        """
        skipped: dict[str, str] = {}
        pending: dict[tuple[bool, int | None], list[Experiment]] = {}  # groups of experiments that run together
        for experiment in filter(is_selected, find_experiments(["all"])):
            text = self.sampling.text if experiment.on_prefixes else None
            if (reason := experiment.obstacle(self.index)) is not None:
                skipped[experiment.name] = reason
            elif not is_made(self.index, experiment, validation=text, **self.sampling.options(experiment)):
                pending.setdefault((experiment.on_prefixes, self.sampling.sample_of(experiment)), []).append(experiment)
        for (on_prefixes, _sample), group in sorted(pending.items(), key=lambda item: item[0][0]):
            options = self.sampling.options(group[0]) | (self.sampling.validation() if on_prefixes else {})
            names = [experiment.name for experiment in group]
            api.experiment(self.index, names, model=self.model, threads=self.threads, progress=self.progress, **options)
            self.made += names
        return skipped

    def _run_null(self) -> None:
        """Measure the paper's claims in shuffled networks, unless this is already done or `null_tokens` is 0."""
        settings = self.sampling.settings
        options: dict[str, Any] = {"seed": settings.seed, "sample": settings.null_tokens}
        if settings.null_tokens == 0 or is_made(self.index, NULL, **options):
            return
        api.experiment(self.index, NULL.name, model=self.model, threads=self.threads, progress=self.progress, **options)
        self.made.append(NULL.name)

    def report(self) -> Stage:
        self.page = api.report(self.index, progress=self.progress)
        return Stage("report", MADE)


FOLDER = "memlens-demo"
# text for the experiments of the paper's section 5, on which the model was not trained
HELD_OUT = f"{BUNDLED}:held-out"
READ = 200_000  # number of tokens of the bundled text to read
PREFIXES = 1000  # number of prefixes for the experiments of the paper's section 5
EDITED = 8  # number of memories per layer in the local-edits experiment


@dataclass(frozen=True)
class SmallerSample:
    """An experiment whose sample in the demo is smaller than its default."""

    experiment: str
    counts: str  # what is sampled, such as "prefixes"
    here: int
    default: int


@dataclass(frozen=True)
class Demo(Analysis):
    """The result of `demo`."""

    smaller: tuple[SmallerSample, ...] = ()


def demo(
    model: MemoryModel | api.Source | Any = BUNDLED,
    corpus: api.Source = BUNDLED,
    *,
    out: api.Source = FOLDER,
    prefixes: int = PREFIXES,
    edited: int = EDITED,
    **options: Any,
) -> Demo:
    """Analyze the bundled model with small samples.

    Larger samples that are already in the folder are kept.

    Args:
        model: A model as in `analyze`. The default is the bundled model.
        corpus: A corpus. The default is the bundled text.
        out: Folder to write the index and report.html to.
        prefixes: Number of prefixes for the experiments of the paper's section 5.
        edited: Number of memories per layer in the local-edits experiment.
        **options: Further options of `analyze`.

    Returns:
        The result of `analyze`, and the samples that are smaller than their defaults.

    Raises:
        ModelNotFound: This installation has no bundled model.

    Example:
        for finding in memlens.demo(out="memlens-demo").findings:
            print(finding.title, finding.command)
    """
    if fixed_options := {"sample", "samples"} & options.keys():
        raise SettingError(f"demo has no option {min(fixed_options)}; set prefixes and edited instead")
    if options.get("resume", True):
        prefixes, edited = _at_least(api.folder_of(out), prefixes, edited)
    samples = {experiment.name: edited for experiment in find_experiments(["all"]) if experiment.tokens_run}
    if (model, corpus) != (BUNDLED, BUNDLED) or "max_tokens" in options:
        # measuring shuffled networks takes most of the time; results for the bundled model are shipped with memlens
        options = {"null_tokens": 0, **options}
    options = {"states": False, **options}  # patterns with states would make the demo a third slower
    if corpus == BUNDLED:
        options = {"validation": HELD_OUT, "max_tokens": READ, **options}
    memory_model = _load(model)
    analysis = analyze(memory_model, corpus, out=out, sample=prefixes, samples=samples, **options)
    smaller = _smaller(prefixes, samples)
    return Demo(analysis.index, analysis.report, analysis.stages, analysis.findings, analysis.verdicts, smaller)


def _at_least(folder: Path, prefixes: int, edited: int) -> tuple[int, int]:
    """Return both sample sizes. A larger sample that the index in the folder already has takes precedence."""
    if not is_complete(folder):
        return prefixes, edited
    manifest, experiments = open_index(folder).manifest, find_experiments(["all"])
    counts = {experiment.name: manifest.experiment(experiment.name).sample or 0 for experiment in experiments}
    on_prefixes = [counts[experiment.name] for experiment in experiments if experiment.on_prefixes]
    run_again = [counts[experiment.name] for experiment in experiments if experiment.tokens_run]
    return max(prefixes, *on_prefixes), max(edited, *run_again)


def _load(model: Any) -> MemoryModel:
    try:
        return load(model)
    except ModelNotFound as error:
        if model != BUNDLED:
            raise
        raise ModelNotFound(
            "the demo needs the bundled model, which is missing from this installation of memlens; install a release, "
            "or run `memlens analyze` with your own model"
        ) from error


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
    """Restore a damaged manifest, and recompute damaged or outdated tables with their recorded settings.

    The tables of the scan and the annotations cannot be recomputed.

    Args:
        index: An Index or its folder.
        model: The scanned model or its current location. None loads the model from the location that the scan used.
        progress: Called with the name of the step, the completed work and the total.

    Returns:
        The names of the files that were written.

    Raises:
        IndexFolderError: A table of the scan or the annotation file is damaged. The message says what to do.

    Example:
        >>> memlens.repair(index)  # nothing is damaged
        []
    """
    folder = index.folder if isinstance(index, Index) else located(index)
    restored = [MANIFEST] if restore_manifest(folder) else []
    wrong = api.check(folder, progress=progress).tables_to_rebuild()
    index = open_index(folder)
    manifest = index.manifest
    if {VALUES, KEYS, ROUTERS, TOKENS} & {*wrong}:
        settings = {
            name: getattr(manifest.values, name) for name in ("top", "reading", "vocabulary", "untrained", "threads")
        }
        api.values(index, model=model, progress=progress, **settings)
    if {PATTERNS, NAMES} & {*wrong} and manifest.patterns is not None:
        has_states = "states" in manifest.patterns.content
        api.patterns(index, model=model, states=has_states, progress=progress, **manifest.patterns.settings)
    for name in _experiments_of(manifest, wrong):
        note = manifest.experiments[name]
        if note.validation and note.validation_corpus is None:
            raise IndexFolderError(
                f"'{name}' used prefixes of another corpus, which is not recorded in {index.folder}; "
                f"run `memlens experiment {index.folder} {name} --validation CORPUS`"
            )
        options: dict[str, Any] = {"seed": note.seed, "sample": note.sample, "stop_words": note.stop_words}
        if note.validation_corpus is not None:
            corpus = dict(note.validation_corpus)
            options |= {"validation": corpus.pop("sources"), **corpus}
        # the number of threads affects the last bits of results
        options["threads"] = manifest.prefix_pass.content.get("threads")
        arguments: dict[str, Any] = {option: value for option, value in options.items() if value is not None}
        api.experiment(index, name, model=model, progress=progress, **arguments)
    return restored + wrong


def _experiments_of(manifest: Manifest, files: Sequence[str]) -> list[str]:
    """Return the names of the experiments that wrote these files.

    Several experiments share a pass over prefixes. If the files include the tables of this pass, one of these
    experiments is included.
    """
    tables = {file.removesuffix(".parquet") for file in files}
    known = (*ALL_EXPERIMENTS.values(), NULL)
    experiments = [experiment for experiment in known if experiment.name in manifest.experiments]
    writers = [
        experiment
        for experiment in experiments
        if tables & {f"{EXPERIMENTS}/{table.name}" for table in experiment.tables}
    ]
    needs_pass = tables & {PREFIX_TABLE, LAYERS}
    if needs_pass and not any(experiment.on_prefixes for experiment in writers):
        writers += [experiment for experiment in experiments if experiment.on_prefixes][:1]
    return [experiment.name for experiment in writers]
