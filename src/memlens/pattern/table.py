"""patterns.parquet and names.parquet: what the triggers of each memory share, and a name for each memory.

    patterns         one row per pattern: layer, memory, pattern, kind, description, prefixes (trigger ranks), ...
    names            one row per memory with triggers: name, confidence, coverage, next tokens, promoted tokens
    lower_patterns   like patterns, for the most negative coefficients of gated blocks

Patterns and names describe the triggers with the largest coefficients, as in the paper. The column `pattern` is equal
for equal patterns of different memories ("ending:press"). The manifest records the false discovery rate, the number of
hypotheses, and how many memories have patterns at each end. Reading the tables imports no compiled code.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from memlens.index.format import PatternsNote
from memlens.index.reader import Index
from memlens.progress import Progress, no_progress
from memlens.settings import PatternSettings
from memlens.text import percent

if TYPE_CHECKING:
    from memlens.models.memory_model import MemoryModel
    from memlens.pattern.find import PatternResult
    from memlens.pattern.naming import Pattern
    from memlens.pattern.states import StateSubjects

_ROWS_PER_GROUP = 4096
_PROMOTED = 3  # number of top tokens of a value to record

PATTERNS_SCHEMA = pa.schema(
    [
        ("layer", pa.int32()),
        ("memory", pa.int32()),
        ("pattern", pa.string()),
        ("kind", pa.string()),
        ("description", pa.string()),
        ("prefixes", pa.list_(pa.int32())),  # trigger ranks
        ("confidence", pa.float64()),
        ("share", pa.float64()),  # upper bound of the share of random prefixes with the pattern
        ("q", pa.float64()),  # lowest false discovery rate at which the pattern is significant
        ("sense", pa.int32()),  # patterns of one sense share most of their prefixes
        ("auroc", pa.float64()),  # AUROC of held-out triggers against random prefixes; null without held-out triggers
        ("auroc_same_token", pa.float64()),  # AUROC against prefixes with the same last tokens
        ("precision", pa.float64()),  # share of the ten strongest held-out triggers that have the pattern
    ]
)
NAMES_SCHEMA = pa.schema(
    [
        ("layer", pa.int32()),
        ("memory", pa.int32()),
        ("name", pa.string()),
        ("confidence", pa.float64()),  # confidence of the best pattern; 0 without a pattern
        ("triggers", pa.int32()),
        ("patterns", pa.int32()),
        ("covered", pa.int32()),  # number of triggers with at least one pattern
        ("follows", pa.list_(pa.int32())),  # typical next tokens
        ("follows_times", pa.list_(pa.int32())),
        ("promotes", pa.list_(pa.int32())),  # the value's top tokens
        ("agrees", pa.bool_()),
        ("evidence", pa.float64()),  # held-out AUROC of the best pattern in the name; null if no pattern is clear
    ]
)


@dataclass(frozen=True)
class PatternTables:
    """The tables by name, as groups of rows, and notes for the manifest."""

    tables: dict[str, list[pa.Table]]
    notes: dict[str, Any]

    def write(self, index: Index) -> None:
        tables = {
            name: (NAMES_SCHEMA if name == "names" else PATTERNS_SCHEMA, groups) for name, groups in self.tables.items()
        }
        index.write(tables, lambda: {"patterns": self.notes})


def compute_patterns(
    index: Index,
    settings: PatternSettings | None = None,
    *,
    model: MemoryModel | None = None,
    progress: Progress = no_progress,
    **options: Any,
) -> None:
    """Find the patterns of all memories and write the tables of patterns and names.

    Args:
        index: The index.
        settings: The settings, or None to take them from `options`.
        model: The scanned model, which is run to find subjects in its states, or None to leave out these subjects.
        progress: Called with the name of the step, the completed work and the total.
        **options: Fields of PatternSettings (top=25, rate=0.01, ...).
    """
    settings, subjects = settings or PatternSettings(**options), None
    if model is not None:
        from memlens.pattern.states import find_state_subjects

        subjects = find_state_subjects(index, model, settings, progress)
    make_patterns(index, settings, progress, subjects).write(index)


@contextmanager
def find_patterns_beside(
    folder: Path, settings: PatternSettings, subjects: StateSubjects | None = None
) -> Iterator[Callable[[Progress], tuple[PatternTables, float]]]:
    """Find the patterns of an index in a worker process, which ends with this context.

    Finding patterns needs no model and uses one core, so experiments that do not need patterns can run at the same
    time. Yields a function that waits for the tables and returns them with the computing time in seconds. The worker
    only reads the index.
    """
    from memlens.pool import POLL_SECONDS, PickledSource, ProcessPool

    is_over = threading.Event()

    def check_stop() -> None:
        if is_over.is_set():
            raise CancelledError

    def search() -> tuple[PatternTables, float]:
        (result,) = ProcessPool(PickledSource((settings, subjects)), 1, check_stop=check_stop).map(
            _time_patterns, [folder]
        )
        return result

    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(search)

        def wait_for_tables(progress: Progress) -> tuple[PatternTables, float]:
            while not wait([future], POLL_SECONDS).done:
                progress("shallow", 0, None)
            return future.result()

        try:
            yield wait_for_tables
        finally:
            is_over.set()


def _time_patterns(source: tuple[PatternSettings, StateSubjects | None], folder: Path) -> tuple[PatternTables, float]:
    (settings, subjects), start = source, time.monotonic()
    return make_patterns(Index(folder), settings, subjects=subjects), time.monotonic() - start


def make_patterns(
    index: Index, settings: PatternSettings, progress: Progress = no_progress, subjects: StateSubjects | None = None
) -> PatternTables:
    """Return the tables without writing them. `subjects` are the subjects that were found in the model's states."""
    from memlens.pattern.find import find_patterns

    upper = find_patterns(index, settings, progress, subjects=subjects.by_memory if subjects else {})
    lower = find_patterns(index, settings, progress, "bottom")
    rows = _name_rows(upper, index.vocabulary)
    notes = {"settings": asdict(settings), "from": _sources(index), "top": settings.top, "rate": settings.rate}
    notes |= {"seed": settings.seed, **upper.notes} | ({"states": subjects.notes} if subjects else {})
    tables = {"patterns": _in_groups(_pattern_rows(upper), PATTERNS_SCHEMA), "names": _in_groups(rows, NAMES_SCHEMA)}
    if lower.patterns:
        notes |= {"ends": _ends(index, upper, lower), "lower_families": lower.notes["families"]}
        tables["lower_patterns"] = _in_groups(_pattern_rows(lower), PATTERNS_SCHEMA)
    return PatternTables({name: list(groups) for name, groups in tables.items()}, notes)


def _ends(index: Index, upper: PatternResult, lower: PatternResult) -> dict[str, dict[str, float]]:
    """Return the statistics of _shares for the top end, the bottom end, and each memory's end of larger magnitude."""
    rows = index.sql("SELECT layer, memory FROM {memories} WHERE -min > max")
    stronger_below = {(row["layer"], row["memory"]) for row in rows}
    ends = {"top": upper.coverage(), "bottom": lower.coverage()}
    parts = []
    for result, counts, is_lower in ((upper, ends["top"], False), (lower, ends["bottom"], True)):
        is_stronger = [(name in stronger_below) == is_lower for name in result.triggers.names()]
        parts.append(counts[np.array(is_stronger, np.bool_)])
    ends["stronger"] = np.concatenate(parts)
    return {end: _shares(counts) for end, counts in ends.items()}


def _shares(counts: NDArray[np.int64]) -> dict[str, float]:
    """Return the shares of memories and triggers with patterns, from the counts of PatternResult.coverage."""
    memories, (patterns, covered, triggers) = max(len(counts), 1), counts.sum(0).tolist()
    shares = {"patterned": int((counts[:, 0] > 0).sum()) / memories, "patterns": patterns / memories}
    return {"memories": len(counts), **shares, "covered": covered / max(triggers, 1)}


def patterns_are_made(index: Index, settings: PatternSettings, *, states: bool = False) -> bool:
    """Return True if the index holds complete tables with these settings, made from its current values table.

    With `states`, the tables must contain subjects that were found in the model's states.
    """
    note = index.manifest.patterns
    if note is None or note.settings != asdict(settings) or note.made_from != _sources(index):
        return False
    if states and "states" not in note.content:
        return False
    return index.is_whole("patterns") and index.is_whole("names")


def describe_chance(note: PatternsNote) -> list[str]:
    """Return sentences about the number of patterns that are expected by chance."""
    families = ", ".join(f"{name} ({count:,} hypotheses)" for name, count in note.families.items())
    sentences = [
        f"A share of at most {note.rate:.2g} of the patterns of each family is expected by chance"
        + (f": {families}." if families else ".")
    ]
    swapped = list(note.content.get("swapped", {}).values())
    if swapped:
        share = percent(sum(swapped) / len(swapped))
        sentences.append(
            f"If triggers are swapped for prefixes with their last tokens, {share} of memories have a topic."
        )
    if states := note.content.get("states"):
        sentences.append(
            f"By the model's states, {states['subjects']:,} of {states['tested']:,} memories have a subject. "
            f"With swapped triggers, {percent(states['swapped'])} of memories have one."
        )
    return sentences


def describe_ends(note: PatternsNote) -> list[str]:
    """Return a sentence that compares the patterns at both ends, if the index has patterns at the negative end."""
    ends = note.content.get("ends")
    if not ends:
        return []
    names = {"top": "largest coefficients", "bottom": "most negative coefficients", "stronger": "larger of both ends"}
    parts = [
        f"{names[end]}: {percent(shares['patterned'])} of memories have a pattern ({shares['patterns']:.2f} per "
        f"memory), {percent(shares['covered'])} of triggers are covered"
        for end, shares in ends.items()
    ]
    return [f"Patterns by end. {'; '.join(parts).capitalize()}. The table above shows the largest coefficients."]


def _sources(index: Index) -> dict[str, str]:
    """Return the checksum of the values table from which names are made, if the index has this table."""
    checksum = index.manifest.sha256("values") if index.has("values") else None
    return {"values": checksum} if checksum else {}


def _pattern_rows(result: PatternResult) -> Iterator[dict[str, Any]]:
    for layer, memory, triggers, patterns in _memories(result):
        for pattern in patterns:
            yield {
                "layer": layer,
                "memory": memory,
                "pattern": pattern.name,
                "kind": pattern.kind,
                "description": pattern.description,
                "prefixes": pattern.ranks,
                "confidence": pattern.confidence(triggers),
                "share": pattern.share,
                "q": pattern.q,
                "sense": pattern.sense,
                "auroc": pattern.scores.auroc,
                "auroc_same_token": pattern.scores.same_token,
                "precision": pattern.scores.precision,
            }


def _name_rows(result: PatternResult, vocabulary: Sequence[str]) -> Iterator[dict[str, Any]]:
    from memlens.pattern.naming import name_memory

    held_out = (result.triggers.held >= 0).sum(1).tolist()
    columns = (result.following, result.endings, result.coverage().tolist(), held_out)
    for (layer, memory, triggers, patterns), following, endings, (of_prefixes, covered, _), held in zip(
        _memories(result), *columns, strict=True
    ):
        name, evidence = name_memory(patterns, following, endings, vocabulary, triggers, held)
        yield {
            "layer": layer,
            "memory": memory,
            "name": name,
            "confidence": patterns[0].confidence(triggers) if patterns else 0.0,
            "triggers": triggers,
            "patterns": of_prefixes,
            "covered": covered,
            "follows": [token for token, _ in following.typical],
            "follows_times": [times for _, times in following.typical],
            "promotes": list(following.promoted[:_PROMOTED]),
            "agrees": following.agrees,
            "evidence": evidence,
        }


def _memories(result: PatternResult) -> Iterator[tuple[int, int, int, list[Pattern]]]:
    """Yield the layer, number, number of triggers and patterns of each memory."""
    triggers = result.triggers
    columns = (triggers.layer.tolist(), triggers.memory.tolist(), triggers.filled.tolist(), result.patterns)
    yield from zip(*columns, strict=True)


def _in_groups(rows: Iterator[dict[str, Any]], schema: pa.Schema) -> Iterator[pa.Table]:
    group: list[dict[str, Any]] = []
    for row in rows:
        group.append(row)
        if len(group) == _ROWS_PER_GROUP:
            yield pa.Table.from_pylist(group, schema)
            group = []
    yield pa.Table.from_pylist(group, schema)
