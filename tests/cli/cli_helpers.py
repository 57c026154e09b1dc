"""Helpers of the command line's tests: results of a command, refusals, triggers row by row, interruptions."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pyarrow.parquet as pq

from memlens.pipeline import STAGES, Analysis, Demo, StageWatcher


@dataclass(frozen=True)
class Ran:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


Run = Callable[..., Ran]
Paths = dict[str, Path]


def is_refused(ran: Ran, *words: str) -> bool:
    """Exit code 2, nothing on stdout, one line on stderr with these words in it."""
    assert ran.code == 2, ran
    assert ran.out == ""
    assert ran.err.startswith("memlens: ") and ran.err.count("\n") == 1 and ran.err.endswith("\n"), ran.err
    missing = [word for word in words if word not in ran.err]
    assert not missing, (missing, ran.err)
    return True


@lru_cache
def triggers_by_end(folder: Path) -> dict[tuple[str, str], list[tuple[str, str]]]:
    """(memory's name, end) -> prefix and last token of each trigger, best first, worked out row by row."""
    corpus = {row["sentence"]: row for row in pq.read_table(folder / "corpus.parquet").to_pylist()}
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for row in pq.read_table(folder / "triggers.parquet").to_pylist():
        text, ends, position = corpus[row["sentence"]]["text"], corpus[row["sentence"]]["ends"], row["position"]
        prefix, shorter = text[: ends[position]], text[: ends[position - 1]] if position else ""
        key = (f"L{row['layer']}N{row['memory']}", row["end"])
        assert row["rank"] == len(found.setdefault(key, []))
        found[key].append((prefix, prefix[len(shorter) :]))
    return found


def checksums(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def tables(folder: Path) -> dict[str, str]:
    return {name: digest for name, digest in checksums(folder).items() if name.endswith(".parquet")}


def outcomes(analysis: Analysis | Demo) -> dict[str, str]:
    return {stage.name: stage.outcome for stage in analysis.stages}


class Stops(StageWatcher):
    """Somebody presses Ctrl-C when a stage begins."""

    def __init__(self, at: str) -> None:
        self.at = at

    def begins(self, number: int, name: str) -> None:
        assert STAGES[number] == name
        if name == self.at:
            raise KeyboardInterrupt
