"""Passages of a Hub dataset, streamed by the optional package `datasets`.

This module knows nothing of files on disk; what the package raises becomes one line with the dataset's name.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from memlens.corpus.readers import Passage, check_text, pick_column
from memlens.corpus.settings import HubSpec
from memlens.corpus.sources import printable
from memlens.errors import CorpusError


def read_hub(spec: HubSpec, column: str) -> Iterator[Passage]:
    """Each record of the split."""
    datasets = _import_datasets(spec)
    try:
        records = iter(datasets.load_dataset(spec.name, spec.config, split=spec.split, streaming=True))
    except Exception as problem:  # the package raises its own, the network's and the file formats' errors
        raise _refuse(spec, problem) from problem
    number = 0
    while True:
        number += 1
        try:
            record: dict[str, Any] = next(records)
        except StopIteration:
            return
        except Exception as problem:
            raise _refuse(spec, problem, f" record {number}") from problem
        place = f"'{spec}' record {number}"
        if text := check_text(pick_column(record, column, place), column, place):
            yield Passage(text, f"{spec}:{number}")


def hub_fingerprint(spec: HubSpec) -> str:
    """Changes when the dataset does: the Hub's commit, or for a local folder the package's hash of its files."""
    datasets = _import_datasets(spec)
    try:
        builder = datasets.load_dataset_builder(spec.name, spec.config)
    except Exception as problem:
        raise _refuse(spec, problem) from problem
    return f"{builder.hash} {builder.config_id}"


def _import_datasets(spec: HubSpec) -> ModuleType:
    try:
        import datasets
    except ImportError:
        raise CorpusError(
            f"corpus '{spec}' needs the package datasets, which is not installed; pip install \"memlens[datasets]\""
        ) from None
    module: ModuleType = datasets
    return module


def _refuse(spec: HubSpec, problem: Exception, place: str = "") -> CorpusError:
    reason = printable(str(problem).strip().split("\n")[0])[:300]
    what = f"corpus '{spec}'{place} cannot be read: {type(problem).__name__}: {reason}"
    return CorpusError(f"{what}; check name, config, split and network")
