"""Run experiments and write their tables to the index: INDEX/experiments/NAME.parquet.

The same index, model and seed give the same bytes, wherever the model runs. The index stores the pass over prefixes and
reuses it as long as its settings stay the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from memlens.annotations.records import Annotations
from memlens.errors import IndexFolderError, SettingError, UnknownName
from memlens.experiments.experiment import SAMPLE, SHUFFLED, Experiment, ResultTable, Row
from memlens.index.format import EXPERIMENTS as FOLDER
from memlens.index.reader import Index
from memlens.pool import Pool
from memlens.progress import Progress, no_progress
from memlens.settings import CorpusSettings

if TYPE_CHECKING:
    from memlens.models.memory_model import MemoryModel
    from memlens.tracer.intervention import Intervention

MODULES = (
    "agreement", "rank", "predictive_values", "local_edits", "patterns", "active", "composition", "refinement",
    "confidence", "cases", "last_layer", "contributions", "vetoes", "promotion", "suppression", "silencing",
)  # fmt: skip


def _load(module: str) -> Experiment:
    experiment: Experiment = import_module(f"memlens.experiments.{module}").EXPERIMENT
    return experiment


EXPERIMENTS: dict[str, Experiment] = {experiment.name: experiment for experiment in map(_load, MODULES)}
NULL = _load(SHUFFLED)  # runs the experiments again on shuffled networks; not part of "all"


def find_experiments(names: Sequence[str]) -> list[Experiment]:
    """Return experiments by name, without repeats, in the order of MODULES. `all` means all experiments except NULL.

    Raises:
        UnknownName: There is no such experiment.
    """
    experiments = {**EXPERIMENTS, NULL.name: NULL}
    for name in names:
        if name not in experiments and name != "all":
            raise UnknownName(f"there is no experiment '{name}'; known: {', '.join(experiments)}, or all")
    return [one for name, one in experiments.items() if name in names or ("all" in names and name in EXPERIMENTS)]


def in_paper_order() -> list[Experiment]:
    """Return the experiments in the order of their figures in the paper. Experiments without a figure come last."""

    def figure(experiment: Experiment) -> float:
        match = re.match(r"Figure (\d+)", experiment.figure)
        return int(match[1]) if match else float("inf")

    return sorted(EXPERIMENTS.values(), key=figure)


def all_tables() -> Iterator[tuple[Experiment, ResultTable]]:
    """Yield every table of every experiment in the order of the paper, and the table of NULL last."""
    for experiment in [*in_paper_order(), NULL]:
        for table in experiment.tables:
            yield experiment, table


STOP_WORDS = "en"
_ORIGIN = ("origin", "validation_corpus")  # fields of the manifest that describe the source of the prefixes
_READING_OF_Y = {"y": "as values"}  # how the pass reads y, recorded with every table on prefixes


def run(
    index: Index,
    names: str | Sequence[str] = "all",
    model: MemoryModel | str | None = None,
    *,
    seed: int = 0,
    sample: int | None = None,
    validation: CorpusSettings | None = None,
    stop_words: str | None = None,
    progress: Progress = no_progress,
    skipped: Callable[[str, str], None] | None = None,
    make_pool: Callable[[MemoryModel], Pool] | None = None,
) -> dict[str, pa.Table]:
    """Run experiments and write their tables. Returns the tables by name.

    Args:
        index: The index to read and write.
        names: Experiments to run. `all` runs every experiment that this index supports.
        model: The scanned model or its location. It is loaded only if an experiment uses it.
        seed: Seed of all random draws.
        sample: Sample size of the named experiments and of all experiments on prefixes. None for their defaults.
        validation: Corpus to draw prefixes from. None draws them from the scanned corpus.
        stop_words: Language of the stop words, or "frequent". None for the default.
        progress: Called with stage, done and total.
        skipped: Called with name and reason for each experiment that `all` leaves out.
        make_pool: Makes the pool on which the model runs. None runs the model in this process.

    Raises:
        IndexFolderError: A named experiment needs a table that is missing, or the index has no values.
        SettingError: `validation` or `stop_words` is given, but no experiment is on prefixes.
    """
    requested = [names] if isinstance(names, str) else list(names)
    experiments = _supported(index, find_experiments(requested), requested, skipped)
    prefix_options = {"validation": validation, "stop_words": stop_words}
    prefix_options = {name: value for name, value in prefix_options.items() if value is not None}
    if prefix_options and not any(experiment.on_prefixes for experiment in experiments):
        option = min(prefix_options)
        raise SettingError(f"none of the chosen experiments takes the option '{option}'; leave it out")
    # check a named model even if no experiment uses it, so that a wrong model does not go unnoticed
    is_used = model is not None or any(experiment.uses_model for experiment in experiments)
    loaded = index.load_model(model) if is_used else None
    pool = None if make_pool is None or loaded is None else make_pool(loaded)
    computed: dict[str, pa.Table] = {}
    for experiment in experiments:
        takes_sample = experiment.on_prefixes or experiment.name in requested
        size = sample if sample is not None and takes_sample else experiment.sample
        rows = _compute(index, experiment, loaded, pool, seed, size, progress, prefix_options)
        tables = {
            table.name: pa.Table.from_pylist(table_rows, table.schema)
            for table, table_rows in zip(experiment.tables, rows, strict=True)
        }
        settings, source = {"seed": seed, "sample": size}, {}
        if experiment.on_prefixes:
            # each experiment records the settings of its pass, because the next pass overwrites this note
            note = index.manifest.prefix_pass.content
            settings |= {name: note[name] for name in ("validation", "stop_words")}
            source = {name: note[name] for name in _ORIGIN if name in note}
        computed |= _write(index, experiment, tables, settings, source)
    return computed


def run_with_edits(
    index: Index,
    names: str | Sequence[str],
    edits: Intervention,
    model: MemoryModel | str | None = None,
    *,
    seed: int = 0,
    sample: int | None = None,
    validation: CorpusSettings | None = None,
    stop_words: str | None = None,
    progress: Progress = no_progress,
    skipped: Callable[[str, str], None] | None = None,
) -> dict[str, pa.Table]:
    """Compute experiments on prefixes while the model runs with edited coefficients. Nothing is written.

    Args:
        index: The index.
        names: Experiments on prefixes. `all` runs all of them.
        edits: Edits at all positions, such as a saved circuit.
        model: The scanned model or its location.
        seed: Seed of all random draws.
        sample: Number of prefixes. None for the default.
        validation: Corpus to draw prefixes from. None draws them from the scanned corpus.
        stop_words: Language of the stop words, or "frequent". None for the default.
        progress: Called with stage, done and total.
        skipped: Called with name and reason for each experiment that `all` leaves out.

    Raises:
        SettingError: A named experiment does not run the model on prefixes, or an edit names positions.
        ModelError: The edits are for another model.
    """
    from memlens.experiments.prefix_pass import run_prefixes
    from memlens.tracer.intervene import apply_edits

    requested = [names] if isinstance(names, str) else list(names)
    on_prefixes = []
    for experiment in find_experiments(requested):
        if experiment.on_prefixes:
            on_prefixes.append(experiment)
        elif experiment.name in requested:
            others = ", ".join(other.name for other in EXPERIMENTS.values() if other.on_prefixes)
            raise SettingError(f"--file has no effect on {experiment.name}; use it with {others}")
        elif skipped is not None:
            skipped(experiment.name, "it does not run the model on prefixes")
    experiments = _supported(index, on_prefixes, requested, skipped)
    loaded, stops = index.load_model(model), stop_words or STOP_WORDS
    with apply_edits(loaded, edits):
        prefixes = run_prefixes(index, loaded, sample or SAMPLE, seed, validation, stops, progress)
    return {
        table.name: pa.Table.from_pylist(table.compute(prefixes, seed), table.schema)
        for experiment in experiments
        for table in experiment.tables
    }


def _compute(
    index: Index,
    experiment: Experiment,
    model: MemoryModel | None,
    pool: Pool | None,
    seed: int,
    sample: int | None,
    progress: Progress,
    prefix_options: Mapping[str, Any],
) -> list[list[Row]]:
    """Return the rows of each table of an experiment."""
    if not experiment.on_prefixes:
        options = {"seed": seed, "sample": sample, "progress": progress, **({"pool": pool} if experiment.maps else {})}
        return [table.compute(index, model, **options) for table in experiment.tables]
    from memlens.experiments.prefix_pass import read_prefixes

    assert model is not None
    sample = sample or SAMPLE
    tables = read_prefixes(index, model, sample=sample, seed=seed, progress=progress, pool=pool, **prefix_options)
    return [table.compute(tables, seed) for table in experiment.tables]


def is_made(
    index: Index,
    experiment: Experiment,
    *,
    seed: int = 0,
    sample: int | None = None,
    validation: CorpusSettings | None = None,
    stop_words: str = STOP_WORDS,
) -> bool:
    """Return True if the index holds complete, up-to-date tables of this experiment with these settings."""
    from memlens.corpus.sentences import corpus_fingerprint

    if experiment.obstacle(index) is not None:
        return False
    settings: dict[str, Any] = {"seed": seed, "sample": experiment.sample if sample is None else sample}
    if experiment.on_prefixes:
        fingerprint = None if validation is None else corpus_fingerprint(validation)
        settings |= {"validation": fingerprint, "stop_words": stop_words}
    content = index.manifest.experiment(experiment.name).content
    note = {name: value for name, value in content.items() if name not in _ORIGIN}  # file names may differ
    is_whole = all(index.is_whole(f"{FOLDER}/{table.name}") for table in experiment.tables)
    return is_whole and note == _note(index, experiment, settings)


def is_outdated(index: Index, experiment: Experiment) -> bool:
    """Return True if a table or annotation from which the tables were computed has changed."""
    note = index.manifest.experiments.get(experiment.name)
    return note is not None and note.made_from != _sources(index, experiment)


def origin(index: Index, experiment: Experiment) -> str:
    """Describe the corpus from which the prefixes of an experiment were drawn, or return "" if it uses no prefixes."""
    note = index.manifest.experiment(experiment.name)
    if not experiment.on_prefixes or note.seed is None:
        return ""
    text = "another corpus" if note.validation else "the scanned corpus"
    return note.origin or f"up to {note.sample:,} random prefixes of {text}, seed {note.seed}"


def _supported(
    index: Index, experiments: Sequence[Experiment], names: Sequence[str], skipped: Callable[[str, str], None] | None
) -> list[Experiment]:
    """Return the experiments that can run on this index.

    Raises:
        IndexFolderError: An experiment that is listed in `names` cannot run, or the index has no values.
    """
    supported = []
    for experiment in experiments:
        reason = experiment.obstacle(index)
        if reason is None:
            supported.append(experiment)
        elif experiment.name in names or ("values" in experiment.needs and not index.has("values")):
            raise IndexFolderError(reason)
        elif skipped is not None:
            skipped(experiment.name, reason)
    return supported


def _write(
    index: Index,
    experiment: Experiment,
    tables: Mapping[str, pa.Table],
    settings: Mapping[str, Any],
    source: Mapping[str, Any],
) -> dict[str, pa.Table]:
    """Write an experiment's tables, with its settings in the files and in the manifest.

    Only the manifest records the source of the prefixes, because the location of its files must not change the bytes of
    a table.
    """
    note = _note(index, experiment, settings)
    metadata = {"memlens": json.dumps(note, sort_keys=True)}
    tables = {name: table.replace_schema_metadata(metadata) for name, table in tables.items()}
    files = {f"{FOLDER}/{name}": (table.schema, [table]) for name, table in tables.items()}
    entry = {experiment.name: {**note, **source}}
    index.write(files, lambda: {"experiments": {**index.manifest.content.get("experiments", {}), **entry}})
    return tables


def _note(index: Index, experiment: Experiment, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest's note on an experiment. Checksums of its sources show when the results are outdated."""
    return {**settings, **(_READING_OF_Y if experiment.on_prefixes else {}), "from": _sources(index, experiment)}


def _sources(index: Index, experiment: Experiment) -> dict[str, str]:
    """Return checksums of the tables and annotations from which an experiment is computed."""
    sources = {table: checksum for table in experiment.needs if (checksum := index.manifest.sha256(table))}
    mark = Annotations(index).mark(experiment.people) if experiment.people else None
    return sources if mark is None else sources | {experiment.people: mark}
