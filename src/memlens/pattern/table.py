"""What follows a memory's triggers, and whether it is what the memory's value promotes: "fires on X, promotes Y".

A next token is typical if it follows at least three of the triggers and more often than its share of all tokens of the
corpus allows; the cut is Benjamini and Hochberg's over all memories and all tokens, at the same rate as patterns.
Values are read from values.parquet where it is there; without it nothing is said about what is promoted.

patterns.parquet and names.parquet: what every memory's triggers have in common, and every memory in one line.

    patterns   one row a pattern: layer, memory, pattern, kind, description, prefixes (trigger ranks), confidence, ...
    names      one row a memory with triggers: name, confidence, coverage, what follows, what is promoted

`pattern` is equal for equal patterns of different memories ("ending:press"). The rate of false discoveries and how many
hypotheses it holds for are noted in the manifest. Knows columns and files; how patterns are found is in find.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.parallel import Progress, no_progress
from memlens.pattern.features import GROUNDED
from memlens.pattern.find import Found, Pattern, find_patterns
from memlens.pattern.words import TriggerRows
from memlens.settings import PatternSettings
from memlens.stats import binomial_tail, q_values, upper_share

PROMOTED = 3  # tokens of a value that are named
_LOOKED_AT = 10  # tokens of a value that a typical next token is looked for in


@dataclass(frozen=True)
class Following:
    """Tokens after the triggers of one memory."""

    typical: tuple[tuple[int, int], ...] = ()  # token, triggers it follows; the most frequent first
    promoted: tuple[int, ...] = ()  # the value's top tokens
    agrees: bool | None = None  # is a typical next token among the value's top tokens? None: cannot be said


def what_follows(index: Index, triggers: TriggerRows, rate: float) -> list[Following]:
    """For each row of TriggerRows."""
    typical = _typical(index, triggers, rate)
    promoted = dict(_promoted(index)) if index.has("values") else {}
    found = []
    names = zip(triggers.layer.tolist(), triggers.memory.tolist(), strict=True)
    for own, name in zip(typical, names, strict=True):
        tokens = promoted.get(name, ())
        agrees = any(token in tokens for token, _ in own) if own and tokens else None
        found.append(Following(tuple(own), tuple(tokens[:PROMOTED]), agrees))
    return found


def _typical(index: Index, triggers: TriggerRows, rate: float) -> list[list[tuple[int, int]]]:
    counts = _token_counts(index)
    memory, rank = np.nonzero(triggers.following >= 0)
    pairs, times = np.unique(
        memory.astype(np.int64) << 32 | triggers.following[memory, rank].astype(np.int64), return_counts=True
    )
    kept = times >= GROUNDED
    pairs, times = pairs[kept], times[kept]
    owner, token = pairs >> 32, pairs & 0xFFFFFFFF
    shares = upper_share(counts[token], int(counts.sum()))
    followed = (triggers.following >= 0).sum(1)
    q = q_values(binomial_tail(times, followed[owner], shares), max(len(counts) * len(followed), len(times)))
    found: list[list[tuple[int, int]]] = [[] for _ in followed]
    for m, t, k in zip(owner[q <= rate].tolist(), token[q <= rate].tolist(), times[q <= rate].tolist(), strict=True):
        found[m].append((t, k))
    return [sorted(own, key=lambda pair: (-pair[1], pair[0])) for own in found]


def _token_counts(index: Index) -> NDArray[np.int64]:
    """How often each token is in the corpus."""
    query = "SELECT token, count(*) AS times FROM (SELECT unnest(tokens) AS token FROM read_parquet($1)) GROUP BY token"
    with closing(duckdb.connect(config={"threads": 1})) as database:
        rows = database.execute(query, [str(index.path("corpus"))]).fetchnumpy()
    tokens = np.asarray(rows["token"], np.int64)
    counts = np.zeros(max(index.manifest.model.vocabulary, int(tokens.max(initial=-1)) + 1), np.int64)
    counts[tokens] = np.asarray(rows["times"], np.int64)
    return counts


def _promoted(index: Index) -> Iterator[tuple[tuple[int, int], tuple[int, ...]]]:
    with pq.ParquetFile(index.path("values")) as file:
        for batch in file.iter_batches(4096, columns=["layer", "memory", "tokens"]):
            for row in batch.to_pylist():
                yield (row["layer"], row["memory"]), tuple((row["tokens"] or ())[:_LOOKED_AT])


NAMES = "names.parquet"
UNNAMED = "no pattern found"
_MEMORIES_A_GROUP = 4096
_NAMED = 2  # patterns in a memory's name
_TOKENS_IN_NAME = 3

PATTERNS_SCHEMA = pa.schema(
    [
        ("layer", pa.int32()),
        ("memory", pa.int32()),
        ("pattern", pa.string()),
        ("kind", pa.string()),
        ("description", pa.string()),
        ("prefixes", pa.list_(pa.int32())),  # trigger ranks
        ("confidence", pa.float64()),
        ("share", pa.float64()),  # upper bound of the share of random prefixes that have it
        ("q", pa.float64()),  # lowest rate of false discoveries at which it is believed
    ]
)
NAMES_SCHEMA = pa.schema(
    [
        ("layer", pa.int32()),
        ("memory", pa.int32()),
        ("name", pa.string()),
        ("confidence", pa.float64()),  # of its most telling pattern; 0 without one
        ("triggers", pa.int32()),
        ("patterns", pa.int32()),
        ("covered", pa.int32()),  # triggers with at least one pattern
        ("follows", pa.list_(pa.int32())),  # typical next tokens
        ("follows_times", pa.list_(pa.int32())),
        ("promotes", pa.list_(pa.int32())),  # the value's top tokens
        ("agrees", pa.bool_()),
    ]
)


def compute_patterns(
    index: Index, settings: PatternSettings | None = None, *, progress: Progress = no_progress, **options: Any
) -> None:
    """Write both tables; `options` are the fields of PatternSettings (top=25, rate=0.01, ...)."""
    settings = settings or PatternSettings(**options)
    found = find_patterns(index, settings, progress)
    following = what_follows(index, found.triggers, settings.rate)
    rows = name_rows(found, following, index.vocabulary)
    notes = {"settings": asdict(settings), "from": _sources(index), "top": settings.top, "rate": settings.rate}
    notes |= {"seed": settings.seed, **found.notes}
    tables = {
        "patterns": (PATTERNS_SCHEMA, _in_groups(pattern_rows(found), PATTERNS_SCHEMA)),
        "names": (NAMES_SCHEMA, _in_groups(rows, NAMES_SCHEMA)),
    }
    index.write(tables, lambda: {"patterns": notes})


def patterns_are_made(index: Index, settings: PatternSettings) -> bool:
    """Does the index hold these very tables, whole, and made from the values it has now?"""
    noted = index.manifest.patterns
    if noted is None or noted.settings != asdict(settings) or noted.made_from != _sources(index):
        return False
    return index.is_whole("patterns") and index.is_whole("names")


def _sources(index: Index) -> dict[str, str]:
    """Names say what values promote: they are made from them, where they are there."""
    checksum = index.manifest.sha256("values") if index.has("values") else None
    return {"values": checksum} if checksum else {}


def pattern_rows(found: Found) -> Iterator[dict[str, Any]]:
    for layer, memory, filled, patterns in _memories(found):
        for pattern in patterns:
            yield {
                "layer": layer,
                "memory": memory,
                "pattern": pattern.name,
                "kind": pattern.kind,
                "description": pattern.description,
                "prefixes": pattern.ranks,
                "confidence": pattern.confidence(filled),
                "share": pattern.share,
                "q": pattern.q,
            }


def name_rows(found: Found, following: Sequence[Following], vocabulary: Sequence[str]) -> Iterator[dict[str, Any]]:
    for (layer, memory, filled, patterns), own in zip(_memories(found), following, strict=True):
        covered = 0
        for pattern in patterns:
            covered |= pattern.members
        yield {
            "layer": layer,
            "memory": memory,
            "name": one_line(patterns, own, vocabulary),
            "confidence": patterns[0].confidence(filled) if patterns else 0.0,
            "triggers": filled,
            "patterns": len(patterns),
            "covered": covered.bit_count(),
            "follows": [token for token, _ in own.typical],
            "follows_times": [times for _, times in own.typical],
            "promotes": list(own.promoted),
            "agrees": own.agrees,
        }


def one_line(patterns: Sequence[Pattern], following: Following, vocabulary: Sequence[str]) -> str:
    """`ends with "press", about: news, papers → followed by "conference"; promotes "release", "office"`."""
    parts = [", ".join(pattern.description for pattern in patterns[:_NAMED]) or UNNAMED]
    for words, tokens in (
        ("followed by", [token for token, _ in following.typical[:_TOKENS_IN_NAME]]),
        ("promotes", list(following.promoted)),
    ):
        if tokens:
            parts.append(f"{words} " + ", ".join(f'"{vocabulary[token].strip()}"' for token in tokens))
    return parts[0] + (" → " + "; ".join(parts[1:]) if len(parts) > 1 else "")


def memory_name(index: Index, memory: str | MemoryId) -> dict[str, Any] | None:
    """The row of names.parquet of one memory; None where it has no triggers."""
    wanted = index.check(memory)
    rows = index.sql("SELECT * FROM {names} WHERE layer = $1 AND memory = $2", [wanted.layer, wanted.memory])
    return rows[0] if rows else None


def memory_patterns(index: Index, memory: str | MemoryId) -> list[dict[str, Any]]:
    """The rows of patterns.parquet of one memory, the surest first."""
    wanted = index.check(memory)
    query = "SELECT * FROM {patterns} WHERE layer = $1 AND memory = $2 ORDER BY confidence DESC, pattern"
    return index.sql(query, [wanted.layer, wanted.memory])


def prefix_patterns(index: Index, memory: str | MemoryId) -> dict[int, list[str]]:
    """Trigger rank -> descriptions of the patterns that the prefix contains, for the prefixes that contain any."""
    found: dict[int, list[str]] = {}
    for row in memory_patterns(index, memory):
        for rank in row["prefixes"]:
            found.setdefault(rank, []).append(row["description"])
    return dict(sorted(found.items()))


def _memories(found: Found) -> Iterator[tuple[int, int, int, list[Pattern]]]:
    triggers = found.triggers
    columns = (triggers.layer.tolist(), triggers.memory.tolist(), triggers.filled.tolist(), found.patterns)
    yield from zip(*columns, strict=True)


def _in_groups(rows: Iterator[dict[str, Any]], schema: pa.Schema) -> Iterator[pa.Table]:
    group: list[dict[str, Any]] = []
    for row in rows:
        group.append(row)
        if len(group) == _MEMORIES_A_GROUP:
            yield pa.Table.from_pylist(group, schema)
            group = []
    yield pa.Table.from_pylist(group, schema)
