"""Run experiments and keep their tables in the index: INDEX/experiments/NAME.parquet.

The same index, model and seed give the same bytes, wherever the model runs. The pass over prefixes is kept in the index
and used again as long as it is the same one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from memlens.annotations.store import history_mark
from memlens.errors import IndexFolderError, SettingError, UnknownName
from memlens.experiments.experiment import PREFIX_OPTIONS, SAMPLE, Experiment, ResultTable, Row
from memlens.index.format import EXPERIMENTS as FOLDER
from memlens.index.history import OLD_TABLES
from memlens.index.reader import Index
from memlens.parallel import Progress, no_progress
from memlens.pool import Pool
from memlens.settings import CorpusSettings

if TYPE_CHECKING:
    from memlens.models.memory_model import MemoryModel

MODULES = (
    "agreement", "rank", "predictive_values", "local_edits", "patterns", "active", "composition", "refinement",
    "confidence", "cases", "last_layer", "contributions", "vetoes", "promotion", "suppression",
)  # fmt: skip


def _load(module: str) -> Experiment:
    experiment: Experiment = import_module(f"memlens.experiments.{module}").EXPERIMENT
    return experiment


EXPERIMENTS: dict[str, Experiment] = {experiment.name: experiment for experiment in map(_load, MODULES)}


def find_experiments(names: Sequence[str]) -> list[Experiment]:
    """Experiments by name, each once, in the registry's order; `all` stands for every one. Unknown ones are refused."""
    for name in names:
        if name not in EXPERIMENTS and name != "all":
            raise UnknownName(f"there is no experiment '{name}'; known: {', '.join(EXPERIMENTS)}, or all")
    return [experiment for experiment in EXPERIMENTS.values() if experiment.name in names or "all" in names]


def in_paper_order() -> list[Experiment]:
    """The experiments by the number of their first figure, then those that have none."""

    def figure(experiment: Experiment) -> float:
        match = re.match(r"Figure (\d+)", experiment.figure)
        return int(match[1]) if match else float("inf")

    return sorted(EXPERIMENTS.values(), key=figure)


def all_tables() -> Iterator[tuple[Experiment, ResultTable]]:
    """Every table of every experiment, in the order of the paper."""
    for experiment in in_paper_order():
        for table in experiment.tables:
            yield experiment, table


STOP_WORDS = "en"
_ORIGIN = ("origin", "validation_corpus")  # where the prefixes of an experiment come from, in words and as options
_READING_OF_Y = {"y": "as values"}  # of tables on prefixes: those that read y as a state are old


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
    """Compute and keep the tables of experiments; they come back by name.

    `model` (the one that was scanned, or where it is) is loaded only where an experiment uses it. `sample` None is each
    experiment's own default; a number counts for the experiments that were named and for those on prefixes, so that
    with `all` the others keep their defaults (their samples count other things). `options` go to the experiments that
    name them in the registry. What this index cannot have is refused before anything is computed; where only `all`
    asked for it, it is left out and `skipped` told its name and the reason (without values `all` is refused, too: next
    to nothing would be left). `make_pool` makes the pool on which the model runs; None is this process.
    """
    from memlens.vocab.table import checked_model

    asked = [names] if isinstance(names, str) else list(names)
    chosen = _possible(index, find_experiments(asked), asked, skipped)
    _refuse_unused(chosen, options)
    # A model that was named is looked at in any case: another one than was scanned must not pass unnoticed.
    is_used = model is not None or any(experiment.uses_model for experiment in chosen)
    loaded = checked_model(index, model) if is_used else None
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
        # After the pass over prefixes the manifest says which text and stop words it was made with; the next pass will
        # overwrite that, so each experiment keeps its own.
        seen = index.manifest.prefix_pass.content if experiment.on_prefixes else {}
        passed = {name: seen[name] for name in PREFIX_OPTIONS if name in experiment.options}
        origin = {name: seen[name] for name in _ORIGIN if name in seen}
        computed |= _keep(index, experiment, tables, {"seed": seed, "sample": size, **passed}, origin)
    return computed


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
    """The rows of each table of an experiment."""
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
    """Does the index hold this very experiment, whole, and made from the tables it has now?"""
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
    noted = {name: value for name, value in content.items() if name not in _ORIGIN}  # names of what the settings say
    whole = all(index.is_whole(f"{FOLDER}/{name}") for name in experiment.table_names)
    return whole and noted == _note(index, experiment, settings)


def is_outdated(index: Index, experiment: Experiment) -> bool:
    """Has something that the experiment's tables were made from changed since?"""
    noted = index.manifest.experiments.get(experiment.name)
    if noted is None:
        return False
    is_read_otherwise = experiment.on_prefixes and not _READING_OF_Y.items() <= noted.content.items()
    return is_read_otherwise or noted.made_from != _sources(index, experiment)


def origin(index: Index, experiment: Experiment) -> str:
    """The corpus of the prefixes of an experiment's tables, in words; empty for one that is not on prefixes."""
    noted = index.manifest.experiment(experiment.name)
    if not experiment.on_prefixes or noted.seed is None:
        return ""
    text = "another corpus" if noted.validation else "the scanned corpus"
    return noted.origin or f"up to {noted.sample:,} random prefixes of {text}, seed {noted.seed}"


def _possible(
    index: Index, chosen: Sequence[Experiment], asked: Sequence[str], skipped: Callable[[str, str], None] | None
) -> list[Experiment]:
    """The experiments that this index can have; one that was asked for by its own name is refused otherwise."""
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
    """Write an experiment's tables; what they were made with goes into the files and the manifest.

    The origin goes into the manifest alone: it names files, and where they lie must not change a table's bytes.
    """
    note = _note(index, experiment, settings)
    metadata = {"memlens": json.dumps(note, sort_keys=True)}
    noted = {name: table.replace_schema_metadata(metadata) for name, table in tables.items()}
    written = {f"{FOLDER}/{name}": (table.schema, [table]) for name, table in noted.items()}
    entry = {experiment.name: {**note, **origin}}
    index.write(written, lambda: {"experiments": {**index.manifest.content.get("experiments", {}), **entry}})
    return noted


def _note(index: Index, experiment: Experiment, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest's note of an experiment; the checksums of its sources tell when it is outdated."""
    return {**settings, **(_READING_OF_Y if experiment.on_prefixes else {}), "from": _sources(index, experiment)}


def _sources(index: Index, experiment: Experiment) -> dict[str, str]:
    """Checksums of the tables that an experiment is made from, and of what people have said."""
    used = {table: checksum for table in experiment.needs if (checksum := index.manifest.sha256(table))}
    mark = history_mark(index, experiment.people) if experiment.people else None
    return used if mark is None else used | {OLD_TABLES[experiment.people]: mark}
