"""The commands of the CLI as Python functions with the same option names.

    memlens.scan(model, corpus, out="index", top=50)      memlens.open_index("index")
    memlens.values("index")                               memlens.experiment("index", ["agreement", "rank"])
    memlens.patterns("index")
    memlens.report("index", out="report.html")            memlens.compare("base-index", "tuned-index")

Arguments named `index` accept an Index or the path of its folder. Each function imports its dependencies when it is
called, so lookups do not load torch. `analyze` and `demo`, which run all stages, are in pipeline.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from memlens.errors import IndexFolderError, MemlensError, SettingError, UnknownName
from memlens.files import refuse_inside_others
from memlens.index.format import REPORT, is_complete, located
from memlens.index.reader import Index, open_index
from memlens.progress import Progress, no_progress
from memlens.settings import (
    CorpusSettings,
    PatternSettings,
    RoleSettings,
    RunSettings,
    SampleSettings,
    ScanRunSettings,
    ScanSettings,
    ValueSettings,
    option_name,
    parse_layers,
    split_options,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from memlens.comparison.compare import IndexComparison
    from memlens.index.check import Check
    from memlens.index.hub import PushResult
    from memlens.index.shards import Shard
    from memlens.models.memory_model import MemoryModel
    from memlens.pool import Pool
    from memlens.tracer.intervention import Intervention

Source = str | os.PathLike[str]


@overload
def scan(
    model: MemoryModel | Source | Any, corpus: Source | Sequence[Source], *, out: Source, shard: str, **options: Any
) -> Shard: ...


@overload
def scan(
    model: MemoryModel | Source | Any,
    corpus: Source | Sequence[Source],
    *,
    out: Source,
    shard: None = None,
    **options: Any,
) -> Index: ...


def scan(
    model: MemoryModel | Source | Any,
    corpus: Source | Sequence[Source],
    *,
    out: Source,
    resume: bool = True,
    device: str = "auto",
    dtype: str = "auto",
    tokenizer: Any = None,
    progress: Progress = no_progress,
    **options: Any,
) -> Index | Shard:
    """Find the exact top triggers of every memory in one pass over a corpus.

    Args:
        model: A Hub id, folder, .gguf file, loaded transformers model, or MemoryModel.
        corpus: One or more files, folders or dataset names.
        out: Folder to write the index to.
        resume: True resumes the scan in the folder. False replaces it.
        device: Device to run the model on: "auto", "cpu", "cuda", "mps" or another torch device.
        dtype: Weight dtype of the model. "auto" is the checkpoint's dtype on a GPU and float32 on a CPU.
        tokenizer: Tokenizer to use with a loaded transformers model.
        progress: Called with the name of the step, the completed work and the total.
        **options: Fields of ScanSettings (top=50, layers="0-5,11", ...), CorpusSettings (unit, column) and
            ScanRunSettings (threads, workers, executor, shard, ...). By default, a short scan runs in one process on
            all cores, and a long scan uses one worker per core. The number of threads affects the last bits of the
            results, so the index records it, and a resumed scan uses the recorded number.

    Returns:
        The index, or a Shard if `shard` is given.

    Raises:
        MemlensError: The model, the corpus, an option or the folder cannot be used.

    Example:
        >>> index = memlens.scan(model, text, out=folder, top=5, threads=1)
        >>> index.layers
        (0, 1, 2)
    """
    from memlens.index.build import build_index
    from memlens.index.shards import open_shard
    from memlens.index.staging import recorded_threads
    from memlens.models.info import faster_dtype_note
    from memlens.models.load import load
    from memlens.pool import import_ray, usable_cores
    from memlens.scanner.resources import BATCH_TOKENS, choose_workers
    from memlens.scanner.state import ShardNumber

    folder = folder_of(out)
    scanning, cutting, running = split_options("scan", options, ScanSettings, CorpusSettings, ScanRunSettings)
    run = ScanRunSettings(**running)
    if run.executor == "ray":
        import_ray()  # report a missing package before reading the corpus
    shard = None if run.shard is None else ShardNumber.parse(run.shard)
    recorded = recorded_threads(folder) if run.threads is None and resume else None
    settings = ScanSettings.with_preset(**scanning | {"threads": run.threads or recorded})
    sources = corpus_settings(corpus, **cutting)
    load_options: dict[str, Any] = {} if run.device_map is None else {"device_map": run.device_map}
    memory_model = load(model, tokenizer=tokenizer, device=device, dtype=dtype, **load_options)
    if line := faster_dtype_note(memory_model):
        print(f"memlens: {line}", file=sys.stderr)
    if "batch_tokens" not in scanning:
        settings = replace(settings, batch_tokens=BATCH_TOKENS.get(memory_model.device.type, settings.batch_tokens))
    workers, threads = choose_workers(run, memory_model, settings, sources, recorded, is_complete(folder) and resume)
    build_index(
        memory_model,
        sources,
        replace(settings, threads=threads),
        folder,
        resume=resume,
        progress=progress,
        run=run,
        workers=workers,
        shard=shard,
        layer_budget=run.layer_budget,
        device_map=run.device_map,
        text_processes=usable_cores() if run.executor == "ray" else workers * threads,
    )
    if shard is not None:
        return open_shard(folder)
    index = Index(folder)
    # the index keeps a model that the caller loaded
    index.model = memory_model if memory_model is model else None
    return index


def merge(parts: Sequence[Source], *, out: Source, resume: bool = True, progress: Progress = no_progress) -> Index:
    """Merge the shards that `scan(shard=...)` wrote into one index.

    Args:
        parts: Folders of all shards, in any order.
        out: Folder to write the index to.
        resume: True resumes an unfinished merge in the folder. False replaces it.
        progress: Called with the name of the step, the completed work and the total.

    Returns:
        The index. It has the same bytes as the index of a single scan.

    Raises:
        IndexFolderError: A shard is missing, or the shards belong to different scans.

    Example:
        >>> parts = [folder.with_name(f"part-{number}") for number in (1, 2)]
        >>> for number, part in enumerate(parts, 1):
        ...     _ = memlens.scan(model, text, out=part, shard=f"{number}/2", threads=1)
        >>> memlens.merge(parts, out=folder.with_name("merged")).layers
        (0, 1, 2)
    """
    from memlens.index.shards import merge_shards

    if not parts:
        raise SettingError("there are no shards to merge; name the folders that `memlens scan --shard` wrote")
    folder = folder_of(out)
    merge_shards([Path(part) for part in parts], folder, resume=resume, progress=progress)
    return Index(folder)


def check(index: Index | Source, *, progress: Progress = no_progress) -> Check:
    """Verify every file of an index without changing anything.

    Args:
        index: An Index or its folder.
        progress: Called with the name of the step, the completed work and the total.

    Returns:
        A Check with one finding per file.

    Raises:
        IndexFolderError: The folder is not an index.

    Example:
        >>> memlens.check(index).is_whole
        True
    """
    from memlens.annotations.records import check_annotations
    from memlens.index.check import check_index

    folder = index.folder if isinstance(index, Index) else located(index)
    return check_index(folder, progress, check_annotations)


def chart(index: Index | Source, experiment: str) -> Any:
    """Return the figure of an experiment as an Altair chart. `index.chart(name)` does the same.

    Args:
        index: An Index or its folder.
        experiment: Name of an experiment that was run.

    Returns:
        An Altair chart. If the figure has several panels, they are placed side by side.

    Raises:
        UnknownName: No experiment has this name.
        IndexFolderError: The experiment was not run, or its table is empty.

    Example:
        >>> _ = memlens.experiment(memlens.values(index, model=model), "rank")
        >>> hasattr(memlens.chart(index, "rank"), "to_dict")
        True
    """
    import altair as alt

    from memlens.experiments.run import EXPERIMENTS

    if experiment not in EXPERIMENTS:
        raise UnknownName(f"there is no experiment '{experiment}'; known: {', '.join(EXPERIMENTS)}")
    panels = EXPERIMENTS[experiment].charts(_open_current(index))
    if not panels:
        raise IndexFolderError(f"the table of '{experiment}' is empty, so it has no chart")
    if len(panels) == 1:
        return panels[0]
    config = panels[0].config
    for panel in panels:
        panel.config = alt.Undefined  # Altair allows a config only for the combined chart
    figure = alt.hconcat(*panels)
    figure.config = config
    return figure


def push(index: Index | Source, repo: str, *, private: bool = False, progress: Progress = no_progress) -> PushResult:
    """Upload an index and its dataset card to a dataset repository on the Hugging Face Hub in one commit.

    Args:
        index: An Index or its folder.
        repo: Repository as `OWNER/NAME`. It is created if it does not exist.
        private: If the repository is created, make it private.
        progress: Called with the name of the step, the completed work and the total.

    Returns:
        The repository, the commit and its address, and the number of files and of bytes.

    Raises:
        HubError: The Hub cannot be reached or rejects the upload.

    Example:
        memlens.push("gpt2-index", "me/gpt2-index", private=True).address
    """
    from memlens.index.hub import push

    return push(_open_current(index), repo, private=private, progress=progress)


def pull(repo: str, *, out: Source | None = None, resume: bool = True, progress: Progress = no_progress) -> Index:
    """Download an index from the Hugging Face Hub and verify the checksum of every file.

    Args:
        repo: Repository as `OWNER/NAME` or `OWNER/NAME@REVISION`.
        out: Folder to write the index to. None uses the name of the repository.
        resume: True resumes an unfinished download in the folder. False replaces an index in the folder.
        progress: Called with the name of the step, the completed work and the total.

    Returns:
        The index.

    Raises:
        HubError: The Hub cannot be reached, or the repository does not hold a complete index.

    Example:
        memlens.pull("me/gpt2-index", out="gpt2-index").layers
    """
    from memlens.index.hub import Repository, pull

    folder = folder_of(Repository.parse(repo).name.partition("/")[2] if out is None else out)
    return Index(pull(repo, folder, resume=resume, progress=progress))


def values(
    index: Index | Source,
    *,
    model: MemoryModel | Source | None = None,
    progress: Progress = no_progress,
    **options: Any,
) -> Index:
    """Find the tokens that every value promotes and demotes, and write them to tables of the index.

    Args:
        index: An Index or its folder.
        model: The scanned model or its current location. None loads the model from the location that the scan used.
        progress: Called with the name of the step, the completed work and the total.
        **options: Fields of ValueSettings (top=50, reading, vocabulary="all") and RunSettings (threads, executor, ...).

    Returns:
        The index.

    Raises:
        ModelError: The model is not the scanned model, or cannot be loaded.

    Example:
        >>> memlens.values(index, model=model, top=5, threads=1).has("values")
        True
    """
    from memlens.vocab.kernels import use_threads
    from memlens.vocab.table import compute_values

    reading, running = split_options("values", options, ValueSettings, RunSettings)
    settings, run, index = ValueSettings(**reading), RunSettings(**running), _open_current(index)
    threads = _threads(run)
    with use_threads(threads):
        compute_values(
            index, _model_or_name(model), progress=progress, make_pool=_pool_maker(run, threads), **asdict(settings)
        )
    return index


def patterns(
    index: Index | Source,
    *,
    model: MemoryModel | Source | None = None,
    states: bool = True,
    progress: Progress = no_progress,
    **options: Any,
) -> Index:
    """Find what the triggers of each memory have in common, and write these patterns to tables of the index.

    Args:
        index: An Index or its folder.
        model: The scanned model or its current location. It is needed only if `states` is True. None loads it from
            where it was scanned or, if that fails, finds patterns without states.
        states: If True, also run the model on the triggers and compare its final states. This finds subjects that the
            words alone do not show.
        progress: Called with the name of the step, the completed work and the total.
        **options: Fields of PatternSettings: top, rate, background, seed.

    Returns:
        The index.

    Raises:
        SettingError: An option is unknown or invalid.

    Example:
        >>> memlens.patterns(index, rate=0.5).has("patterns")
        True
    """
    from memlens.pattern.table import compute_patterns

    (pattern_options,) = split_options("patterns", options, PatternSettings)
    index = _open_current(index)
    running = _model_of_states(index, model) if states else None
    compute_patterns(index, PatternSettings(**pattern_options), model=running, progress=progress)
    return index


def _model_of_states(index: Index, model: MemoryModel | Source | None) -> MemoryModel | None:
    if model is not None:
        return index.load_model(_model_or_name(model))
    try:
        return index.model or index.load_model()
    except MemlensError:  # the model cannot be loaded on this machine
        return None


def roles(
    index: Index | Source,
    *,
    model: MemoryModel | Source | None = None,
    progress: Progress = no_progress,
    **options: Any,
) -> Index:
    """Assign roles to every memory by fixed rules, and write the roles to a table of the index.

    Args:
        index: An Index or its folder.
        model: The scanned model or its current location. None loads the model from the location that the scan used.
        progress: Called with the name of the step, the completed work and the total.
        **options: Fields of RoleSettings: rate, seed.

    Returns:
        The index.

    Raises:
        IndexFolderError: The index has no values yet.

    Example:
        >>> memlens.roles(memlens.values(index, model=model, threads=1), model=model).has("roles")
        True
    """
    from memlens.role.table import compute_roles

    (role_options,) = split_options("roles", options, RoleSettings)
    settings, index = RoleSettings(**role_options), _open_current(index)
    compute_roles(index, _model_or_name(model), rate=settings.rate, seed=settings.seed, progress=progress)
    return index


def experiment(
    index: Index | Source,
    names: str | Sequence[str] = "all",
    *,
    validation: Source | Sequence[Source] | None = None,
    model: MemoryModel | Source | None = None,
    intervention: Intervention | None = None,
    progress: Progress = no_progress,
    skipped: Callable[[str, str], None] | None = None,
    **options: Any,
) -> dict[str, pa.Table]:
    """Run experiments and write their tables to the index.

    Args:
        index: An Index or its folder.
        names: Names of experiments. "all" runs every experiment that the index supports and then "shuffled", which
            measures the paper's claims in networks with shuffled weights as a baseline (see `null_tokens`).
        validation: Corpus to draw prefixes from. None draws them from the scanned corpus.
        model: The scanned model or its current location. None loads the model from the location that the scan used.
        intervention: Edits of coefficients, such as a saved circuit. Experiments on prefixes are run with these edits,
            in this process, and nothing is written to the index.
        progress: Called with the name of the step, the completed work and the total.
        skipped: Called for each experiment that "all" skips, with its name and the reason.
        **options: Fields of SampleSettings (seed, sample, stop_words, null_tokens), RunSettings (threads, workers,
            executor, ...) and, with `validation`, CorpusSettings (unit, column). With "all", `sample` applies only to
            experiments on prefixes. Only the pass over prefixes and the local-edits experiment use workers.

    Returns:
        The tables by name.

    Raises:
        UnknownName: No experiment has this name.
        IndexFolderError: A named experiment cannot run on this index.

    Example:
        >>> list(memlens.experiment(memlens.values(index, model=model), "rank"))
        ['rank']
    """
    from memlens.experiments.run import NULL, run, run_with_edits
    from memlens.vocab.kernels import use_threads

    drawing, cutting, running = split_options("experiment", options, SampleSettings, CorpusSettings, RunSettings)
    sample, run_options = SampleSettings(**drawing), RunSettings(**running)
    arguments: dict[str, Any] = {} if sample.stop_words is None else {"stop_words": sample.stop_words}
    if validation is not None:
        arguments["validation"] = corpus_settings(validation, **cutting)
    for name in () if validation is not None else sorted(cutting):
        raise SettingError(f"{option_name(name)} has no effect without --validation; leave it out")
    arguments |= {"seed": sample.seed, "sample": sample.sample}
    index, threads = _open_current(index), _threads(run_options)
    arguments |= {"progress": progress, "skipped": skipped}
    runs_all = "all" in ([names] if isinstance(names, str) else names)
    if intervention is not None:
        for name in sorted({"workers", "executor", "null_tokens"} & set(options)):
            raise SettingError(f"{option_name(name)} has no effect with an intervention; leave it out")
        with use_threads(threads):
            return run_with_edits(index, names, intervention, _model_or_name(model), **arguments)
    if sample.null_tokens is not None and not runs_all:
        raise SettingError("--null-tokens has no effect without `all`; to change `shuffled` alone, use --sample")
    source = _model_or_name(model)
    with use_threads(threads):
        tables = run(index, names, source, make_pool=_pool_maker(run_options, threads), **arguments)
        if runs_all and sample.null_tokens != 0:
            tables |= run(index, NULL.name, source, seed=sample.seed, sample=sample.null_tokens, progress=progress)
    return tables


def report(
    index: Index | Source,
    *,
    out: Source | None = None,
    assets: Source | None = None,
    force: bool = False,
    progress: Progress = no_progress,
) -> Path:
    """Write the report on an index as one self-contained HTML page.

    Args:
        index: An Index or its folder.
        out: File to write. None writes report.html to the index folder.
        assets: Folder to which each chart is written as SVG, PDF and CSV.
        force: Replace files that memlens did not write. Files of an index or a model are never replaced.
        progress: Called with the name of the step, the completed work and the total.

    Returns:
        The path of the page.

    Raises:
        OutputError: The page or a chart would replace a file that must not be replaced.

    Example:
        >>> memlens.report(index).name
        'report.html'
    """
    from memlens.reports.report import make_report

    index = _open_current(index)
    page = index.folder / REPORT if out is None else Path(out)
    return make_report(index, page, None if assets is None else Path(assets), progress, force=force)


def site(
    index: Index | Source,
    *,
    out: Source,
    layers: str | Sequence[int] | None = None,
    top: int = 10,
    circuits: Sequence[Source] = (),
    force: bool = False,
    progress: Progress = no_progress,
) -> Path:
    """Write a static copy of the workbench to a folder or a .zip file. This requires the extra `serve`.

    Args:
        index: An Index or its folder.
        out: Folder or .zip file to write to.
        layers: Layers to include, as a string such as "0-5,11" or as numbers. None includes all layers.
        top: Number of top triggers, and of bottom triggers, to include per memory.
        circuits: Files of saved circuits to include.
        force: Write even if memlens did not write the files in the folder, or the existing .zip file.
        progress: Called with the name of the step, the completed work and the total.

    Returns:
        The path of the start page, or of the .zip file.

    Raises:
        OutputError: The folder contains files that must not be replaced.

    Example:
        memlens.site("gpt2-index", out="gpt2-site", layers="0-5")
    """
    from memlens.web.static_site import make_site

    layer_numbers = parse_layers(layers) if isinstance(layers, str) else layers
    folder, files = _open_current(index).folder, [Path(path) for path in circuits]
    return make_site(folder, Path(out), layers=layer_numbers, top=top, circuits=files, force=force, progress=progress)


def compare(
    a: Index | Source,
    b: Index | Source,
    *,
    by: str = "triggers",
    layers: str | tuple[int, int] | None = None,
    top: int = 20,
    alike: bool | None = None,
) -> IndexComparison:
    """Find the memories that changed most, or least, between two indexes.

    Args:
        a: An Index or its folder.
        b: The Index to compare with, or its folder.
        by: What to compare: "triggers", "values", "patterns" or "roles".
        layers: A pair of layers, "3:5" or (3, 5). Each memory of layer 3 of `a` is then matched with its best
            counterpart in layer 5 of `b`. By default, memories with the same name are compared.
        top: Number of memories to list.
        alike: If True, list the least changed memories first. This is the default if `layers` is given.

    Returns:
        The changes of each layer and of each listed memory.

    Raises:
        IndexFolderError: An index lacks the table to compare.

    Example:
        >>> memlens.compare(index, index).changes[0].change
        0.0
    """
    from memlens.comparison.compare import compare_indexes

    return compare_indexes(_open_current(a), _open_current(b), by=by, layers=layers, top=top, alike=alike)


def folder_of(out: Source) -> Path:
    """Return `out` as a path after checking that an index may be written there.

    Raises:
        SettingError: The path is empty.
        OutputError: The path is inside another index or a model.
    """
    if not os.fspath(out):
        raise SettingError("-o is empty; name a folder for the index")
    refuse_inside_others(Path(out))
    return Path(out)


def corpus_settings(corpus: Source | Sequence[Source], **options: Any) -> CorpusSettings:
    """Return the settings of a corpus that has one or more sources."""
    sources = [corpus] if isinstance(corpus, (str, os.PathLike)) else list(corpus)
    return CorpusSettings(tuple(os.fspath(source) for source in sources), **options)


def _pool_maker(run: RunSettings, threads: int) -> Callable[[MemoryModel], Pool]:
    """Return a function that creates a stage's worker pool for the loaded model."""
    from memlens.models.recipe import ModelRecipe, make_pool

    workers = run.workers or (0 if run.executor == "ray" else 1)
    return lambda model: make_pool(ModelRecipe(model, threads), run, workers)


def _threads(run: RunSettings) -> int:
    """Return the number of threads per worker.

    The default is 1 on Ray, otherwise an equal share of this machine's cores.
    """
    from memlens.pool import usable_cores

    if run.threads is not None:
        return run.threads
    return 1 if run.executor == "ray" else max(1, usable_cores() // (run.workers or 1))


def _open_current(index: Index | Source) -> Index:
    """Open the folder of an index, or reload an open index to read the tables that are now on disk."""
    index = open_index(index)
    if index is index:
        index.reload()
    return index


def _model_or_name(model: MemoryModel | Source | None) -> MemoryModel | str | None:
    return os.fspath(model) if isinstance(model, os.PathLike) else model
