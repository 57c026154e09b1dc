"""The verbs of the command line as Python functions, with the same option names.

    memlens.scan(model, corpus, out="index", top=50)      memlens.open_index("index")

This module only wires parts together; it computes nothing and prints nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlens.corpus import CorpusSettings
from memlens.index.build import Progress, build_index, no_progress, recorded_threads
from memlens.index.reader import Index
from memlens.models import load
from memlens.scan.estimate import usable_cores
from memlens.scan.settings import ScanSettings, parse_layers

if TYPE_CHECKING:
    from memlens.models.memory_model import MemoryModel


def scan(
    model: MemoryModel | str | os.PathLike[str] | Any,
    corpus: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    out: str | os.PathLike[str],
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
    sources = [corpus] if isinstance(corpus, (str, os.PathLike)) else list(corpus)
    corpus_settings = CorpusSettings(tuple(os.fspath(source) for source in sources), unit=unit, column=column)
    loaded = load(model, tokenizer=tokenizer, device=device, dtype=dtype)
    build_index(loaded, corpus_settings, settings, Path(out), resume=resume, progress=progress)
    return Index(Path(out))


def open_index(folder: str | os.PathLike[str]) -> Index:
    """An index that a scan has completed."""
    return Index(Path(folder))
