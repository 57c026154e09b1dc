"""The verbs of the command line as Python functions, with the same option names.

    memlens.scan(model, corpus, out="index", top=50)      memlens.open_index("index")
    memlens.values("index")                               memlens.experiment("index", ["agreement", "rank"])
    memlens.report("index", out="report.html")

An index is an Index or its folder. `analyze`, which does all of these in turn, has a module of its own.

This module only wires parts together; it computes nothing and prints nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlens.corpus import CorpusSettings
from memlens.errors import SettingError
from memlens.index.build import Progress, build_index, no_progress
from memlens.index.layout import REPORT
from memlens.index.reader import Index
from memlens.index.staging import recorded_threads
from memlens.models import load
from memlens.scan.estimate import usable_cores
from memlens.scan.settings import ScanSettings, parse_layers

if TYPE_CHECKING:
    import pyarrow as pa

    from memlens.models.memory_model import MemoryModel

Source = str | os.PathLike[str]


def scan(
    model: MemoryModel | Source | Any,
    corpus: Source | Sequence[Source],
    *,
    out: Source,
    resume: bool = True,
    unit: str = "sentence",
    column: str = "text",
    device: str = "auto",
    dtype: str = "float32",
    tokenizer: Any = None,
    layers: str | Sequence[int] | None = None,
    preset: str | None = None,
    threads: int | None = None,
    progress: Progress = no_progress,
    **options: Any,
) -> Index:
    """The exact top triggers of every memory, in one pass; `options` are the fields of ScanSettings (top=50, ...).

    The number of threads changes last bits, so it is recorded: None continues with what the folder was begun with, and
    uses all cores for a new one.
    """
    chosen = parse_layers(layers) if isinstance(layers, str) else tuple(layers) if layers is not None else None
    if threads is None:
        threads = (recorded_threads(Path(out)) if resume else None) or usable_cores()
    settings = ScanSettings.with_preset(preset, layers=chosen, threads=threads, **options)
    sources = corpus_settings(corpus, unit, column)
    loaded = load(model, tokenizer=tokenizer, device=device, dtype=dtype)
    build_index(loaded, sources, settings, Path(out), resume=resume, progress=progress)
    return Index(Path(out))


def open_index(folder: Source) -> Index:
    """An index that a scan has completed."""
    return Index(Path(folder))


def values(
    index: Index | Source,
    *,
    top: int = 50,
    reading: str | None = None,
    model: MemoryModel | Source | None = None,
    threads: int | None = None,
    progress: Progress = no_progress,
) -> Index:
    """What every value promotes and pushes down, and which tokens every key matches, as tables of the index.

    `reading` (folded or raw) None is the model's own, but raw for an index made with a preset of the paper. `model` is
    the one that was scanned, or where it is now; None takes it from where it was.
    """
    from memlens.values.blocks import use_threads
    from memlens.values.table import compute_values

    opened = _opened(index)
    with use_threads(usable_cores() if threads is None else threads):
        compute_values(opened, _model_or_name(model), top=top, reading=reading, progress=progress)
    return opened


def experiment(
    index: Index | Source,
    names: str | Sequence[str] = "all",
    *,
    seed: int = 0,
    sample: int | None = None,
    validation: Source | Sequence[Source] | None = None,
    unit: str = "sentence",
    column: str = "text",
    stop_words: str | None = None,
    model: MemoryModel | Source | None = None,
    threads: int | None = None,
    progress: Progress = no_progress,
    skipped: Callable[[str, str], None] | None = None,
) -> dict[str, pa.Table]:
    """Run experiments and keep their tables in the index; they come back by name.

    `sample` None is each experiment's own default; with "all" a number counts for those on prefixes only. `validation`
    is a corpus to draw prefixes from, cut by `unit` and `column`; None draws them from the scanned one. What this index
    cannot have is refused if it was named and left out if only "all" asked for it; `skipped` is told name and reason.
    """
    from memlens.experiments import run
    from memlens.values.blocks import use_threads

    options: dict[str, Any] = {} if stop_words is None else {"stop_words": stop_words}
    if validation is not None:
        options["validation"] = corpus_settings(validation, unit, column)
    with use_threads(usable_cores() if threads is None else threads):
        return run(
            _opened(index),
            names,
            _model_or_name(model),
            seed=seed,
            sample=sample,
            progress=progress,
            skipped=skipped,
            **options,
        )


def report(
    index: Index | Source,
    *,
    out: Source | None = None,
    assets: Source | None = None,
    progress: Progress = no_progress,
) -> Path:
    """One self-contained page about the index; its path comes back.

    `out` None is report.html in the index folder. `assets` is a folder for SVG, PDF and CSV of each chart.
    """
    from memlens.report import make_report

    opened = _opened(index)
    page = opened.folder / REPORT if out is None else Path(out)
    for option, path in (("-o", page), ("--assets", None if assets is None else Path(assets))):
        _refuse_inside(opened, option, path)
    return make_report(opened, page, None if assets is None else Path(assets), progress)


def corpus_settings(corpus: Source | Sequence[Source], unit: str = "sentence", column: str = "text") -> CorpusSettings:
    """One source or several, as the settings of a corpus."""
    sources = [corpus] if isinstance(corpus, (str, os.PathLike)) else list(corpus)
    return CorpusSettings(tuple(os.fspath(source) for source in sources), unit=unit, column=column)


def _opened(index: Index | Source) -> Index:
    return index if isinstance(index, Index) else Index(Path(index))


def _model_or_name(model: MemoryModel | Source | None) -> MemoryModel | str | None:
    return os.fspath(model) if isinstance(model, os.PathLike) else model


def _refuse_inside(index: Index, option: str, path: Path | None) -> None:
    """The index folder holds nothing but the index and its own report."""
    if path is None or not path.resolve().is_relative_to(index.folder.resolve()):
        return
    if path.resolve() != (index.folder / REPORT).resolve() or option != "-o":
        raise SettingError(f"{option} {path} lies inside the index; name a place elsewhere")
