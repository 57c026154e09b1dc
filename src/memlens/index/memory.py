"""One memory as a record, and an index and its values in a few numbers: what tables say, without a model.

    read_memory(index, "L3N51")     statistics, summary, patterns, value, key, triggers and ordinary prefixes
    summarize_values(index)         how many values agree with their target, and the most confident of them

`memlens show --json` and the workbench write the record of a memory; each of its parts can be read alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memlens.index.layout import QUADRANT_SIGNS
from memlens.index.reader import Index
from memlens.memory import ROLE_NUMBERS, MemoryId, Trigger

if TYPE_CHECKING:
    from numpy.typing import NDArray

ENDS = ("top", "bottom")


@dataclass(frozen=True)
class TokenNumber:
    """A token with its text and its number: a probability, or the score of a key."""

    token: int
    text: str
    number: float
    score: float | None = None  # of a value: ln(p V), above 0 as far as it is more likely than all V tokens alike
    trained: bool = True  # False where tokens.parquet says that the model hardly met it


@dataclass(frozen=True)
class MemoryValue:
    """The tokens that one value promotes and pushes down, and the tokens that its key alone matches."""

    reading: str
    vocabulary: str  # that it was read over: all tokens, or those that were trained
    max_p: float
    entropy: float  # nats
    norm: float
    agrees: bool | None  # is its top token the one after the top trigger? None where nothing follows it
    target: int | None  # the token after the top trigger; None where there is none
    target_text: str | None
    target_rank: int | None  # its place among all tokens, 1 is the top
    promotes: tuple[TokenNumber, ...]  # most probable first
    demotes: tuple[TokenNumber, ...]  # least probable first
    histogram: tuple[int, ...] | None  # tokens by score, in equal bins from the lowest to the highest; None if not kept
    key: tuple[TokenNumber, ...]  # best match first; empty where the index has no keys table


@dataclass(frozen=True)
class MemoryPattern:
    """A regularity that some of the triggers share; a row of patterns.parquet."""

    pattern: str
    kind: str
    description: str
    prefixes: tuple[int, ...]  # ranks of the triggers
    confidence: float
    share: float  # upper bound of the share of random prefixes that have it
    q: float  # lowest rate of false discoveries at which it is believed
    sense: int = 0  # patterns of one sense hold for much the same prefixes
    auroc: float | None = None  # triggers that were held out against random prefixes
    auroc_same_token: float | None = None  # the same against prefixes with the same last tokens


@dataclass(frozen=True)
class MemorySummary:
    """A memory in one line, and the counts behind it; a row of names.parquet."""

    name: str
    confidence: float
    triggers: int
    patterns: int
    covered: int  # triggers with at least one pattern
    follows: tuple[int, ...]  # typical next tokens
    follows_times: tuple[int, ...]
    promotes: tuple[int, ...]
    agrees: bool | None


@dataclass(frozen=True)
class MemoryRoles:
    """The roles of a memory, and the numbers that decide them; a row of roles.parquet."""

    roles: tuple[str, ...]  # empty where no rule holds
    numbers: dict[str, float]

    @property
    def behind(self) -> dict[str, float]:
        """The numbers that decided its roles."""
        names = dict.fromkeys(name for role in self.roles for name in ROLE_NUMBERS.get(role, ()))
        return {name: self.numbers[name] for name in names if name in self.numbers}


@dataclass(frozen=True)
class MemoryQuadrant:
    """A gated memory where gate and input have these signs."""

    quadrant: str  # of the gate, then of the input: ++, +-, -+ or --
    prefixes: int
    share: float  # of the prefixes that reached the memory
    triggers: tuple[Trigger, ...]  # the largest coefficients in size


@dataclass(frozen=True)
class MemoryRecord:
    """Everything that an index says about one memory; None where a later stage has still to say it."""

    name: MemoryId
    layer: int
    memory: int
    model: str
    max: float
    min: float
    mean: float
    frequency: float
    dead: bool
    histogram: tuple[int, ...]
    histogram_edges: tuple[float, ...]
    summary: MemorySummary | None
    patterns: tuple[MemoryPattern, ...] | None  # the surest first
    value: MemoryValue | None
    triggers: dict[str, tuple[Trigger, ...]]  # by end, best first
    ordinary: tuple[Trigger, ...]  # random prefixes it fires on
    seen: int  # prefixes that reached it: all, or of an expert those that its router sent there
    roles: MemoryRoles | None
    quadrants: tuple[MemoryQuadrant, ...] | None  # None without a gate, and in an older index
    lower_patterns: tuple[MemoryPattern, ...] | None  # of the most negative triggers; None where these are not kept

    def patterns_at(self, end: str) -> tuple[MemoryPattern, ...]:
        """Those of the strongest triggers, or of the most negative ones."""
        return (self.patterns if end == "top" else self.lower_patterns) or ()

    def patterns_of(self, rank: int, end: str = "top") -> list[int]:
        """Places of the patterns that the trigger of a rank at an end contains."""
        return [place for place, pattern in enumerate(self.patterns_at(end)) if rank in pattern.prefixes]


def read_memory(
    index: Index, memory: str | MemoryId, ends: Sequence[str] = ENDS, top: int | None = None
) -> MemoryRecord:
    """Refused if the index has no such memory. `ends` and `top`: which triggers, and how many of each end."""
    facts = index.facts(memory)
    name = facts.id
    return MemoryRecord(
        name,
        name.layer,
        index.names.number(name),
        index.manifest.model.name,
        facts.max,
        facts.min,
        facts.mean,
        facts.frequency,
        facts.dead,
        tuple(facts.histogram),
        tuple(index.manifest.histogram_edges),
        read_summary(index, name),
        read_patterns(index, name),
        read_value(index, name),
        {end: tuple(index.triggers(name, end, top)) for end in ends},
        tuple(index.ordinary(name)),
        _seen(index, name),
        read_roles(index, name),
        read_quadrants(index, name),
        read_patterns(index, name, "lower_patterns"),
    )


def _seen(index: Index, name: MemoryId) -> int:
    if name.kind != "routed":
        return index.manifest.counts.prefixes
    rows = index.sql("SELECT chosen FROM {experts} WHERE layer = $1 AND expert = $2", [name.layer, name.expert])
    return int(rows[0]["chosen"])


def read_value(index: Index, memory: str | MemoryId) -> MemoryValue | None:
    """None where the index has no values yet."""
    row = _row(index, "values", memory)
    if row is None:
        return None
    key = _row(index, "keys", memory) if index.has("keys") else None
    target = row["target"]
    rare = hardly_trained(index, [*row["tokens"], *row["bottom_tokens"], *(key["tokens"] if key else ())])
    return MemoryValue(
        index.manifest.values.reading,
        index.manifest.values.vocabulary,
        row["max_p"],
        row["entropy"],
        row["norm"],
        None if target is None else row["tokens"][0] == target,
        target,
        None if target is None else index.vocabulary[target],
        row["target_rank"],
        _scored_tokens(index, row["tokens"], row["p"], rare),
        _scored_tokens(index, row["bottom_tokens"], row["bottom_p"], rare),
        tuple(row["histogram"]) if row.get("histogram") else None,  # tables of earlier versions lack it
        () if key is None else _tokens(index, key["tokens"], key["scores"], rare),
    )


def read_roles(index: Index, memory: str | MemoryId) -> MemoryRoles | None:
    """None where the index has no roles yet."""
    row = _row(index, "roles", memory)
    if row is None:
        return None
    return MemoryRoles(tuple(row["roles"]), {name: number for name, number in row.items() if isinstance(number, float)})


def read_quadrants(index: Index, memory: str | MemoryId) -> tuple[MemoryQuadrant, ...] | None:
    """None for a memory without a gate, and in an index of a scan that did not keep them."""
    counted = _row(index, "counts", memory)
    if counted is None or counted["quadrants"] is None or not index.has("quadrants"):
        return None
    name, seen = index.check(memory), max(sum(counted["prefixes"]), 1)
    rows = index.rows_of("quadrants", [name], order="quadrant, rank")[name]
    triggers = list(zip(rows, index.with_text(rows), strict=True))
    return tuple(
        MemoryQuadrant(signs, count, count / seen, tuple(text for row, text in triggers if row["quadrant"] == signs))
        for signs, count in zip(QUADRANT_SIGNS, counted["quadrants"], strict=True)
    )


def read_summary(index: Index, memory: str | MemoryId) -> MemorySummary | None:
    """None where the index has no patterns yet, and for a memory without triggers."""
    row = _row(index, "names", memory)
    return None if row is None else MemorySummary(**_without_name(row))


def read_patterns(index: Index, memory: str | MemoryId, table: str = "patterns") -> tuple[MemoryPattern, ...] | None:
    """The surest first; None where the index has no patterns yet, or none of the lower end ("lower_patterns")."""
    name = index.check(memory)
    if not (index.has(table) and index.has("names")):
        return None
    rows = index.rows_of(table, [name], order="confidence DESC, pattern")[name]
    return tuple(MemoryPattern(**_without_name(row)) for row in rows)


def read_summaries(index: Index, memories: Sequence[MemoryId]) -> dict[MemoryId, str]:
    """Memories in one line each, where there are names; else by what they promote most."""
    if not memories or not (index.has("names") or index.has("values")):
        return {}
    if index.has("names"):
        return {memory: rows[0]["name"] for memory, rows in index.rows_of("names", memories, "name").items() if rows}
    return {
        memory: "promotes " + ", ".join(f'"{index.vocabulary[token].strip()}"' for token in rows[0]["tokens"])
        for memory, rows in index.rows_of("values", memories, "tokens[:4] AS tokens").items()
        if rows
    }


def _row(index: Index, table: str, memory: str | MemoryId) -> dict[str, Any] | None:
    name = index.check(memory)
    if not index.has(table):
        return None
    rows = index.rows_of(table, [name])[name]
    return rows[0] if rows else None


def _without_name(row: dict[str, Any]) -> dict[str, Any]:
    fields = {column: value for column, value in row.items() if column not in ("layer", "memory")}
    return {column: tuple(value) if isinstance(value, list) else value for column, value in fields.items()}


def hardly_trained(index: Index, tokens: Sequence[int]) -> frozenset[int]:
    """Those of the tokens that tokens.parquet calls undertrained; none where the index has no such table."""
    if not index.has("tokens"):
        return frozenset()
    query = "SELECT token FROM {tokens} WHERE NOT trained AND token IN (SELECT unnest($1::INTEGER[]))"
    return frozenset(row["token"] for row in index.sql(query, [list(tokens)]))


def _tokens(
    index: Index, tokens: Sequence[int], numbers: Sequence[float], rare: frozenset[int]
) -> tuple[TokenNumber, ...]:
    pairs = zip(tokens, numbers, strict=True)
    return tuple(
        TokenNumber(token, index.vocabulary[token], number, trained=token not in rare) for token, number in pairs
    )


def _scored_tokens(
    index: Index, tokens: Sequence[int], p: Sequence[float], rare: frozenset[int]
) -> tuple[TokenNumber, ...]:
    size = index.manifest.value_tokens
    scores = [math.log(share * size) if share > 0 else -math.inf for share in p]
    return tuple(
        replace(token, score=score) for token, score in zip(_tokens(index, tokens, p, rare), scores, strict=True)
    )


def summarize_values(index: Index, count: int = 10) -> dict[str, Any]:
    """The values in a few numbers, ready for JSON, with the `count` most confident of them."""
    whole = index.sql(
        """SELECT count(*) AS memories, count(target) AS with_target, count(*) FILTER (argmax = target) AS agree,
                  median(max_p) AS median_max_p FROM {values}"""
    )[0]
    best = index.sql(
        """SELECT layer, memory, argmax, max_p, argmax = target AS agrees FROM {values}
           ORDER BY max_p DESC, layer, memory LIMIT $1""",
        [count],
    )
    noted = index.manifest.values
    rare = hardly_trained(index, [row["argmax"] for row in best])
    return {
        "index": str(index.folder),
        "model": index.manifest.model.name,
        "reading": noted.reading,
        "vocabulary": noted.vocabulary,
        "top": noted.top,
        **whole,
        "undertrained_on_top": _undertrained_on_top(index),
        "most_confident": [
            {
                "name": str(index.names.name(row["layer"], row["memory"])),
                "layer": row["layer"],
                "memory": row["memory"],
                "token": row["argmax"],
                "text": index.vocabulary[row["argmax"]],
                "p": row["max_p"],
                "agrees": row["agrees"],
                "trained": row["argmax"] not in rare,
            }
            for row in best
        ],
    }


def _undertrained_on_top(index: Index) -> int | None:
    """Count values whose top token the model hardly met in training; None where the index has no table of tokens."""
    if not index.has("tokens"):
        return None
    query = "SELECT count(*) AS n FROM {values} v JOIN {tokens} t ON v.argmax = t.token WHERE NOT t.trained"
    return int(index.sql(query)[0]["n"])


def token_counts(index: Index) -> NDArray[Any]:
    """Occurrences of each token in the corpus. [vocabulary]"""
    import numpy as np

    query = "SELECT token, count(*) AS times FROM (SELECT unnest(tokens) AS token FROM {corpus}) GROUP BY token"
    rows = index.arrays(query)
    tokens = np.asarray(rows["token"], np.int64)
    counts = np.zeros(max(index.manifest.model.vocabulary, int(tokens.max(initial=-1)) + 1), np.int64)
    counts[tokens] = np.asarray(rows["times"], np.int64)
    return counts


def summarize(index: Index) -> dict[str, Any]:
    """Counts of an index, ready for JSON; `dead` counts by layer the memories without any trigger."""
    counts = index.manifest.counts
    rows = index.sql(
        "SELECT layer, count(*) AS memories, count(*) FILTER (dead) AS dead FROM {memories} GROUP BY ALL ORDER BY layer"
    )
    return {
        "index": str(index.folder),
        "model": index.manifest.model.name,
        "layers": list(index.layers),
        "memories": sum(row["memories"] for row in rows),
        "dead": {str(row["layer"]): row["dead"] for row in rows},
        "sentences": counts.sentences,
        "tokens": counts.tokens,
        "prefixes": counts.prefixes,
        "repeated_prefixes": counts.repeated_prefixes,
        "cut_sentences": counts.cut_sentences,
        "cut_tokens": counts.cut_tokens,
        "settings": dict(sorted(index.manifest.settings.to_json().items())),
    }
