"""Run experiments and write their tables to the index: INDEX/experiments/NAME.parquet.

The same index, model and seed give the same bytes, wherever the model runs. The pass over prefixes is stored in the
index and reused as long as its settings stay the same.
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
from memlens.experiments.experiment import PREFIX_OPTIONS, SAMPLE, SHUFFLED, Experiment, ResultTable, Row
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
    "confidence", "cases", "last_layer", "contributions", "vetoes", "promotion", "suppression",
)  # fmt: skip


def _load(module: str) -> Experiment:
    experiment: Experiment = import_module(f"memlens.experiments.{module}").EXPERIMENT
    return experiment


EXPERIMENTS: dict[str, Experiment] = {experiment.name: experiment for experiment in map(_load, MODULES)}
NULL = _load(SHUFFLED)  # judges the claims in shuffled networks by running experiments again; not part of "all"


def find_experiments(names: Sequence[str]) -> list[Experiment]:
    """Return experiments by name, without repeats, in the order of MODULES. `all` means every one but NULL.

    Raises:
        UnknownName: There is no such experiment.
    """
    known = {**EXPERIMENTS, NULL.name: NULL}
    for name in names:
        if name not in known and name != "all":
            raise UnknownName(f"there is no experiment '{name}'; known: {', '.join(known)}, or all")
    return [one for name, one in known.items() if name in names or ("all" in names and name in EXPERIMENTS)]


def in_paper_order() -> list[Experiment]:
    """Return the experiments by the number of their first figure, followed by those without a figure."""

    def figure(experiment: Experiment) -> float:
        match = re.match(r"Figure (\d+)", experiment.figure)
        return int(match[1]) if match else float("inf")

    return sorted(EXPERIMENTS.values(), key=figure)


def all_tables() -> Iterator[tuple[Experiment, ResultTable]]:
    """Yield every table of every experiment, in the order of the paper, and that of NULL."""
    for experiment in [*in_paper_order(), NULL]:
        for table in experiment.tables:
            yield experiment, table


STOP_WORDS = "en"
_ORIGIN = ("origin", "validation_corpus")  # names of notes on the source of the prefixes
_READING_OF_Y = {"y": "as values"}  # recorded with tables on prefixes


def run(
    index: Index,
    names: str | Sequence[str] = "all",
    model: MemoryModel | str | None = None,
    *,
    seed: int = 0,
    sample: int | None = None,
    progress: Progress = no_progress,
    skipped: Callable[[str, str], None] | None = None,
    make_pool: Callable[[MemoryModel], Pool] | None = None,
    **options: Any,
) -> dict[str, pa.Table]:
    """Compute experiments and write their tables. Returns the tables by name.

    Args:
        index: The index to read and write.
        names: Experiments to run. `all` runs every experiment that this index allows.
        model: The scanned model or its location; loaded only if an experiment uses it.
        seed: Seed of all random draws.
        sample: Sample size of the named experiments and of those on prefixes; None for each experiment's default.
        progress: Called with stage, done and total.
        skipped: Called with name and reason for each experiment that `all` leaves out.
        make_pool: Makes the pool on which the model runs. None runs the model in this process.
        options: Passed to the experiments that take them.

    Raises:
        IndexFolderError: A named experiment needs a table that is missing, or the index has no values.
        SettingError: No chosen experiment takes an option.
    """
    asked = [names] if isinstance(names, str) else list(names)
    chosen = _possible(index, find_experiments(asked), asked, skipped)
    _refuse_unused(chosen, options)
    # check a named model even if no experiment uses it, so that a wrong model does not go unnoticed
    is_used = model is not None or any(experiment.uses_model for experiment in chosen)
    loaded = index.load_model(model) if is_used else None
    pool = None if make_pool is None or loaded is None else make_pool(loaded)
    computed: dict[str, pa.Table] = {}
    for experiment in chosen:
        takes_sample = experiment.on_prefixes or experiment.name in asked
        size = sample if sample is not None and takes_sample else experiment.sample
        taken = {name: value for name, value in options.items() if name in experiment.options}
        rows = _compute(index, experiment, loaded, pool, seed, size, progress, taken)
        tables = {
            table.name: pa.Table.from_pylist(own_rows, table.schema)
            for table, own_rows in zip(experiment.tables, rows, strict=True)
        }
        # each experiment records the text and stop words of its pass, because the next pass overwrites the note
        seen = index.manifest.prefix_pass.content if experiment.on_prefixes else {}
        passed = {name: seen[name] for name in PREFIX_OPTIONS if name in experiment.options}
        origin = {name: seen[name] for name in _ORIGIN if name in seen}
        computed |= _keep(index, experiment, tables, {"seed": seed, "sample": size, **passed}, origin)
    return computed


def run_with_edits(
    index: Index,
    names: str | Sequence[str],
    edits: Intervention,
    model: MemoryModel | str | None = None,
    *,
    seed: int = 0,
    sample: int | None = None,
    progress: Progress = no_progress,
    skipped: Callable[[str, str], None] | None = None,
    **options: Any,
) -> dict[str, pa.Table]:
    """Compute experiments on prefixes while the model runs with edited coefficients, and write nothing.

    Args:
        index: The index.
        names: Experiments on prefixes. `all` runs all of them.
        edits: Edits at all positions, such as a saved circuit.
        model: The scanned model or its location.
        seed: Seed of all random draws.
        sample: Number of prefixes; None for the default.
        progress: Called with stage, done and total.
        skipped: Called with name and reason for each experiment that `all` leaves out.
        options: Options of the pass over prefixes.

    Raises:
        SettingError: A named experiment does not run the model on prefixes, or an edit names positions.
        ModelError: The edits are for another model.
    """
    from memlens.experiments.prefix_pass import run_prefixes
    from memlens.tracer.intervene import apply_edits

    asked = [names] if isinstance(names, str) else list(names)
    chosen = find_experiments(asked)
    for experiment in [one for one in chosen if not one.on_prefixes]:
        if experiment.name in asked:
            known = ", ".join(one.name for one in EXPERIMENTS.values() if one.on_prefixes)
            raise SettingError(f"--file has no effect on {experiment.name}; use it with {known}")
        if skipped is not None:
            skipped(experiment.name, "it does not run the model on prefixes")
    chosen = _possible(index, [one for one in chosen if one.on_prefixes], asked, skipped)
    _refuse_unused(chosen, options)
    loaded = index.load_model(model)
    with apply_edits(loaded, edits):
        seen = run_prefixes(index, loaded, sample or SAMPLE, seed, progress=progress, **options)
    return {
        table.name: pa.Table.from_pylist(table.compute(seen, seed), table.schema)
        for experiment in chosen
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
    options: Mapping[str, Any],
) -> list[list[Row]]:
    """Return the rows of each table of an experiment."""
    if not experiment.on_prefixes:
        given = {"seed": seed, "sample": sample, "progress": progress, **({"pool": pool} if experiment.maps else {})}
        return [table.compute(index, model, **given) for table in experiment.tables]
    from memlens.experiments.prefix_pass import read_prefixes

    assert model is not None
    seen = read_prefixes(index, model, sample=sample or SAMPLE, seed=seed, progress=progress, pool=pool, **options)
    return [table.compute(seen, seed) for table in experiment.tables]


def is_made(
    index: Index,
    experiment: Experiment,
    *,
    seed: int = 0,
    sample: int | None = None,
    validation: CorpusSettings | None = None,
    stop_words: str = STOP_WORDS,
) -> bool:
    """Return True if the index holds the complete tables of this experiment, made from its current tables."""
    from memlens.corpus.sentences import corpus_fingerprint

    if experiment.obstacle(index) is not None:
        return False
    given = {"validation": None if validation is None else corpus_fingerprint(validation), "stop_words": stop_words}
    settings = {
        "seed": seed,
        "sample": experiment.sample if sample is None else sample,
        **{name: given[name] for name in PREFIX_OPTIONS if name in experiment.options},
    }
    content = index.manifest.experiment(experiment.name).content
    noted = {name: value for name, value in content.items() if name not in _ORIGIN}  # without names of files
    whole = all(index.is_whole(f"{FOLDER}/{name}") for name in experiment.table_names)
    return whole and noted == _note(index, experiment, settings)


def is_outdated(index: Index, experiment: Experiment) -> bool:
    """Return True if a table or annotation that the tables were made from has changed."""
    noted = index.manifest.experiments.get(experiment.name)
    if noted is None:
        return False
    is_read_otherwise = experiment.on_prefixes and not _READING_OF_Y.items() <= noted.content.items()
    return is_read_otherwise or noted.made_from != _sources(index, experiment)


def origin(index: Index, experiment: Experiment) -> str:
    """Describe the corpus of an experiment's prefixes; empty for an experiment that is not on prefixes."""
    noted = index.manifest.experiment(experiment.name)
    if not experiment.on_prefixes or noted.seed is None:
        return ""
    text = "another corpus" if noted.validation else "the scanned corpus"
    return noted.origin or f"up to {noted.sample:,} random prefixes of {text}, seed {noted.seed}"


def _possible(
    index: Index, chosen: Sequence[Experiment], asked: Sequence[str], skipped: Callable[[str, str], None] | None
) -> list[Experiment]:
    """Return the experiments that this index allows. Raises IndexFolderError for one that was named explicitly."""
    possible = []
    for experiment in chosen:
        reason = experiment.obstacle(index)
        if reason is None:
            possible.append(experiment)
        elif experiment.name in asked or ("values" in experiment.needs and not index.has("values")):
            raise IndexFolderError(reason)
        elif skipped is not None:
            skipped(experiment.name, reason)
    return possible


def _refuse_unused(chosen: Sequence[Experiment], options: Mapping[str, Any]) -> None:
    known = {option for experiment in chosen for option in experiment.options}
    for name in sorted(set(options) - known):
        raise SettingError(f"none of the chosen experiments takes the option '{name}'; leave it out")


def _keep(
    index: Index,
    experiment: Experiment,
    tables: Mapping[str, pa.Table],
    settings: Mapping[str, Any],
    origin: Mapping[str, Any],
) -> dict[str, pa.Table]:
    """Write an experiment's tables, with its settings in the files and in the manifest.

    The origin is written only to the manifest. It names files, whose location must not change the bytes of a table.
    """
    note = _note(index, experiment, settings)
    metadata = {"memlens": json.dumps(note, sort_keys=True)}
    noted = {name: table.replace_schema_metadata(metadata) for name, table in tables.items()}
    written = {f"{FOLDER}/{name}": (table.schema, [table]) for name, table in noted.items()}
    entry = {experiment.name: {**note, **origin}}
    index.write(written, lambda: {"experiments": {**index.manifest.content.get("experiments", {}), **entry}})
    return noted


def _note(index: Index, experiment: Experiment, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest's note of an experiment. Its checksums of sources show when the tables are outdated."""
    return {**settings, **(_READING_OF_Y if experiment.on_prefixes else {}), "from": _sources(index, experiment)}


def _sources(index: Index, experiment: Experiment) -> dict[str, str]:
    """Return checksums of the tables and annotations that an experiment is made from."""
    used = {table: checksum for table in experiment.needs if (checksum := index.manifest.sha256(table))}
    mark = Annotations(index).mark(experiment.people) if experiment.people else None
    return used if mark is None else used | {experiment.people: mark}
