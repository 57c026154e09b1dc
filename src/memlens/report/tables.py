"""The experiments' tables of an index, as far as they are there.

Any of them may be missing; a table that is there but lacks a column of the contract is refused by name. This module
knows names and columns of tables, not what they mean.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pyarrow as pa

from memlens.errors import IndexFolderError
from memlens.experiments import EXPERIMENTS as REGISTRY
from memlens.experiments import Experiment, is_outdated, origin
from memlens.index.layout import EXPERIMENTS
from memlens.index.reader import Index

Row = dict[str, Any]

_QUARTILES = ("layer", "q1", "median", "q3")

_ON_PREFIXES = tuple(name for name, experiment in REGISTRY.items() if experiment.on_prefixes)
_WORKING = {"prefixes", "prefix-layers"}  # what other tables are read from

COLUMNS: dict[str, tuple[str, ...]] = {
    "patterns": ("layer", "prefixes", "patterned_memories", "shallow", "semantic", "both", "not_covered"),
    "local-edits": ("layer", "edit", "change", "low", "high"),
    "agreement": ("layer", "memories", "agree", "rate", "low", "high", "baseline"),
    "rank": _QUARTILES,
    "predictive-values": ("layer", "memory", "max_p", "token", "precision"),
    "predictive-values-bins": ("from_p", "to_p", "memories", "agree", "rate", "low", "high"),
    "active": _QUARTILES,
    "composition": ("layer", "prefixes", "zero", "rate", "zero_active"),
    "refinement": ("layer", "prefixes", "match", "rate"),
    "confidence": _QUARTILES,
    "cases": ("layer", "residual", "ffn", "agreement", "composition", "reversal"),
}


class Tables:
    """Experiment tables by name, each read once."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.layers = len(index.manifest["model"]["memories"])  # of the model, scanned or not
        self.vocabulary = int(index.manifest["model"]["vocabulary"])
        self.table = cache(self._read)

    def names(self) -> list[str]:
        """The experiments that have a table, sorted."""
        found = {path.stem for path in (self.index.folder / EXPERIMENTS).glob("*.parquet")}
        return sorted(found - _WORKING)

    def rows(self, name: str) -> list[Row] | None:
        """The rows of a table in its own order; None where the experiment was not run."""
        table = self.table(name)
        if table is None:
            return None
        rows: list[Row] = table.to_pylist()
        return rows

    def notes(self, name: str) -> dict[str, Any]:
        """What the manifest says about how a table was made; empty where it says nothing."""
        owner = self.owner(name)
        return dict(self.index.manifest.get("experiments", {}).get(owner.name, {})) if owner else {}

    def owner(self, name: str) -> Experiment | None:
        """The experiment that makes a table; None for a table that no experiment of this version makes."""
        return next((one for one in REGISTRY.values() if name in one.table_names), None)

    def origin(self, name: str) -> str:
        """Where the prefixes of a table of section 5 come from, in words; empty for other tables."""
        return origin(self.index, REGISTRY[name]) if name in REGISTRY else ""

    def passes(self) -> list[tuple[str, list[str]]]:
        """The passes over prefixes that tables of section 5 come from, in words, and the tables of each."""
        found: dict[tuple[str, ...], list[str]] = {}
        for name in _ON_PREFIXES:
            if self.table(name) is not None and self.origin(name):
                noted = self.notes(name)
                settings = tuple(str(noted.get(key)) for key in ("sample", "seed", "validation", "stop_words"))
                found.setdefault(settings, []).append(name)
        return [(f"{self.origin(names[0])}, stop words {settings[-1]}", names) for settings, names in found.items()]

    def is_stale(self, name: str) -> bool:
        """Has something that the table was made from changed since?"""
        owner = self.owner(name)
        return owner is not None and is_outdated(self.index, owner)

    def checksum(self, table: str) -> str | None:
        """SHA-256 of a table's file (`experiments/agreement`, `patterns`), as the manifest has it."""
        entry = self.index.manifest["files"].get(f"{table}.parquet")
        return entry["sha256"] if entry else None

    def _read(self, name: str) -> pa.Table | None:
        if not self.index.has(f"{EXPERIMENTS}/{name}"):
            return None
        table = self.index.table(f"{EXPERIMENTS}/{name}")
        for column in COLUMNS.get(name, ()):
            if column not in table.column_names:
                raise IndexFolderError(
                    f"the table '{EXPERIMENTS}/{name}' of {self.index.folder} has no column '{column}'; "
                    f"run `memlens experiment {self.index.folder} {name}` again"
                )
        return table
