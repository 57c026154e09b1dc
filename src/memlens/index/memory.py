"""Records of what an index contains about memories, experts, values and texts. Only coefficients need the model.

    read_memory(index, "L3N51")     statistics, summary, patterns, value, key, triggers and ordinary prefixes
    read_expert(index, "L3E5")      one expert of a mixture: how often it is chosen, its tokens and memories
    summarize_values(index)         how many values agree with their target, and the most confident of them
    read_coefficients(...)          coefficients at every token of a text, which needs the model

`memlens show --json` and the workbench write the record of a memory. Each part of the record can be read separately.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memlens.errors import IndexFolderError, SettingError, UnknownName
from memlens.index.format import QUADRANT_SIGNS
from memlens.index.reader import Index
from memlens.memory import ROLE_NUMBERS, ExpertId, MemoryId, Trigger
from memlens.progress import Progress, no_progress
from memlens.text import head, percent, tail, visible

if TYPE_CHECKING:
    from memlens.corpus.sentences import Batch
    from memlens.models.groups import CoefficientBlock
    from memlens.models.memory_model import MemoryModel

ENDS = ("top", "bottom")


@dataclass(frozen=True)
class TokenNumber:
    """A token with its text and a number: a probability, a share, or how well it matches a key."""

    token: int
    text: str
    number: float
    score: float | None = None  # for a value, ln(p V), which is above 0 if the token is more likely than average
    trained: bool = True  # False if the token is undertrained according to tokens.parquet


CLEAR = 0.99  # a list of promoted tokens is clear if at least this share of random directions is less coherent


@dataclass(frozen=True)
class MemoryValue:
    """The tokens that a value promotes and demotes, and the tokens whose embeddings match the key."""

    reading: str
    vocabulary: str  # tokens over which the value is read, "all" or "trained"
    max_p: float
    entropy: float  # entropy of the value's distribution, in nats
    norm: float
    agrees: bool | None  # True if the top token follows the top trigger; None if the sentence ends there
    target: int | None  # the token that follows the top trigger; None if the sentence ends there
    target_text: str | None
    target_rank: int | None  # rank of the target by probability, from 1
    promotes: tuple[TokenNumber, ...]  # promoted tokens, highest probability first
    demotes: tuple[TokenNumber, ...]  # demoted tokens, lowest probability first
    histogram: tuple[int, ...] | None  # number of tokens by score, in equal bins; None if not stored
    key: tuple[TokenNumber, ...]  # matching tokens, best match first; empty without a keys table
    coherence: float  # share of random directions whose top tokens are less similar to each other
    times_uniform: float  # max p divided by the uniform probability of a token

    @property
    def is_clear(self) -> bool:
        """True if the list of promoted tokens is clearer than that of a random direction."""
        return self.coherence >= CLEAR


@dataclass(frozen=True)
class MemoryPattern:
    """A regularity that some of a memory's triggers share, from a row of patterns.parquet."""

    pattern: str
    kind: str
    description: str
    prefixes: tuple[int, ...]  # ranks of the triggers that share the pattern
    confidence: float
    share: float  # upper bound of the share of random prefixes that have the pattern
    q: float  # lowest false discovery rate at which the pattern is reported
    sense: int = 0  # number of the sense; patterns of one sense cover mostly the same triggers
    auroc: float | None = None  # AUROC of held-out triggers against random prefixes
    auroc_same_token: float | None = None  # AUROC of held-out triggers against prefixes with the same last tokens
    precision: float | None = None  # share of the ten strongest held-out triggers that have the pattern


@dataclass(frozen=True)
class MemorySummary:
    """The one-line name of a memory and the counts that support it, from a row of names.parquet."""

    name: str
    confidence: float
    triggers: int
    patterns: int
    covered: int  # number of triggers with at least one pattern
    follows: tuple[int, ...]  # tokens that often follow the triggers
    follows_times: tuple[int, ...]
    promotes: tuple[int, ...]
    agrees: bool | None
    evidence: float | None = None  # held-out AUROC of the best pattern in the name; None if no pattern is clear


@dataclass(frozen=True)
class MemoryRoles:
    """The roles of a memory and the numbers that determine them, from a row of roles.parquet."""

    roles: tuple[str, ...]  # names of the roles; empty if no rule applies
    numbers: dict[str, float]

    @property
    def behind(self) -> dict[str, float]:
        """The numbers that determine the memory's roles."""
        names = dict.fromkeys(name for role in self.roles for name in ROLE_NUMBERS.get(role, ()))
        return {name: self.numbers[name] for name in names if name in self.numbers}


@dataclass(frozen=True)
class MemoryQuadrant:
    """The prefixes at which the gate and the input of a memory have the signs of one quadrant."""

    quadrant: str  # sign of the gate, then of the input: ++, +-, -+ or --
    prefixes: int
    share: float  # share of the prefixes that reached the memory
    triggers: tuple[Trigger, ...]  # prefixes with the largest absolute coefficients


@dataclass(frozen=True, repr=False)
class MemoryRecord:
    """Everything that an index says about one memory. Parts that were not computed are None."""

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
    patterns: tuple[MemoryPattern, ...] | None  # patterns, highest confidence first
    value: MemoryValue | None
    triggers: dict[str, tuple[Trigger, ...]]  # end -> triggers, best first
    ordinary: tuple[Trigger, ...]  # random prefixes on which the memory is active
    seen: int  # number of prefixes that reached the memory: all prefixes, or those routed to its expert
    roles: MemoryRoles | None
    quadrants: tuple[MemoryQuadrant, ...] | None  # prefixes by sign quadrant; None if the memory has no gate
    lower_patterns: tuple[MemoryPattern, ...] | None  # patterns of the bottom triggers; None if not stored

    def __repr__(self) -> str:
        name = f" {visible(self.summary.name)}" if self.summary else ""
        activity = "never active" if self.dead else f"active on {percent(self.frequency)} of prefixes"
        return f"<{self.name} of {self.model}:{name} ({activity}, max {self.max:.4g})>"

    def patterns_at(self, end: str) -> tuple[MemoryPattern, ...]:
        """Return the patterns of the top or the bottom triggers."""
        return (self.patterns if end == "top" else self.lower_patterns) or ()

    def patterns_of(self, rank: int, end: str = "top") -> list[int]:
        """Return the positions in `patterns_at(end)` of the patterns that the trigger of this rank has."""
        return [place for place, pattern in enumerate(self.patterns_at(end)) if rank in pattern.prefixes]


def read_memory(
    index: Index, memory: str | MemoryId, ends: Sequence[str] = ENDS, top: int | None = None
) -> MemoryRecord:
    """Return the record of a memory. Raises UnknownName if the index has no such memory.

    Args:
        index: The index to read.
        memory: The memory, like "L3N51".
        ends: The ends whose triggers are read: "top", "bottom" or both.
        top: The number of triggers at each end, or None for all.
    """
    name = index.check(memory)
    row = _row(index, "memories", name)
    if row is None:
        raise IndexFolderError(f"{index.folder} has no row for {name}; run `memlens check {index.folder}`")
    return MemoryRecord(
        name,
        name.layer,
        index.names.number(name),
        index.manifest.model.name,
        row["max"],
        row["min"],
        row["mean"],
        row["frequency"],
        row["dead"],
        tuple(row["histogram"]),
        index.manifest.histogram_edges,
        read_summary(index, name),
        read_patterns(index, name),
        read_value(index, name),
        {end: tuple(index.triggers(name, end, top)) for end in ends},
        tuple(index.ordinary(name)),
        _count_reaching_prefixes(index, name),
        read_roles(index, name),
        read_quadrants(index, name),
        read_patterns(index, name, "lower_patterns"),
    )


def _count_reaching_prefixes(index: Index, name: MemoryId) -> int:
    if name.kind != "routed":
        return index.manifest.counts.prefixes
    rows = index.sql("SELECT chosen FROM {experts} WHERE layer = $1 AND expert = $2", [name.layer, name.expert])
    return int(rows[0]["chosen"])


def read_value(index: Index, memory: str | MemoryId) -> MemoryValue | None:
    """Return the value of a memory, or None if values were not computed."""
    row = _row(index, "values", memory)
    if row is None:
        return None
    key = _row(index, "keys", memory) if index.has("keys") else None
    target = row["target"]
    rare = find_undertrained(index, [*row["tokens"], *row["bottom_tokens"], *(key["tokens"] if key else ())])
    return MemoryValue(
        index.manifest.values.reading,
        index.manifest.values.vocabulary,
        row["max_p"],
        row["entropy"],
        row["norm"],
        None if target is None else row["argmax"] == target,
        target,
        None if target is None else index.vocabulary[target],
        row["target_rank"],
        _scored_tokens(index, row["tokens"], row["p"], rare),
        _scored_tokens(index, row["bottom_tokens"], row["bottom_p"], rare),
        tuple(row["histogram"]) if row.get("histogram") else None,  # absent if scores were not stored
        () if key is None else _tokens(index, key["tokens"], key["scores"], rare),
        row["coherence"],
        row["max_p"] * index.manifest.value_tokens,
    )


def read_roles(index: Index, memory: str | MemoryId) -> MemoryRoles | None:
    """Return the roles of a memory, or None if roles were not computed."""
    row = _row(index, "roles", memory)
    if row is None:
        return None
    return MemoryRoles(tuple(row["roles"]), {name: number for name, number in row.items() if isinstance(number, float)})


def read_quadrants(index: Index, memory: str | MemoryId) -> tuple[MemoryQuadrant, ...] | None:
    """Return the sign quadrants of a memory, or None if it has no gate."""
    counts = _row(index, "counts", memory)
    if counts is None or counts["quadrants"] is None or not index.has("quadrants"):
        return None
    name, seen = index.check(memory), max(sum(counts["prefixes"]), 1)
    rows = index.rows_of("quadrants", [name], order="quadrant, rank")[name]
    triggers = list(zip(rows, index.with_text(rows), strict=True))
    return tuple(
        MemoryQuadrant(signs, count, count / seen, tuple(text for row, text in triggers if row["quadrant"] == signs))
        for signs, count in zip(QUADRANT_SIGNS, counts["quadrants"], strict=True)
    )


def read_summary(index: Index, memory: str | MemoryId) -> MemorySummary | None:
    """Return the summary of a memory, or None if patterns were not computed or it has no triggers."""
    row = _row(index, "names", memory)
    return None if row is None else MemorySummary(**_without_name(row))


def read_patterns(index: Index, memory: str | MemoryId, table: str = "patterns") -> tuple[MemoryPattern, ...] | None:
    """Return the patterns of a memory, highest confidence first, or None if `table` was not computed."""
    name = index.check(memory)
    if not (index.has(table) and index.has("names")):
        return None
    rows = index.rows_of(table, [name], order="confidence DESC, pattern")[name]
    return tuple(MemoryPattern(**_without_name(row)) for row in rows)


def read_summaries(index: Index, memories: Sequence[MemoryId]) -> dict[MemoryId, str]:
    """Return one line per memory: its name, or its promoted tokens if patterns were not computed."""
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


def find_undertrained(index: Index, tokens: Sequence[int]) -> frozenset[int]:
    """Return the tokens among these that the model hardly saw in training, from tokens.parquet."""
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
    """Return counts over all values and the `count` most confident values, ready for JSON."""
    whole = index.sql(
        """SELECT count(*) AS memories, count(target) AS with_target, count(*) FILTER (argmax = target) AS agree,
                  median(max_p) AS median_max_p FROM {values}"""
    )[0]
    clear = index.sql(
        f"""SELECT layer, count(*) AS memories, count(*) FILTER (coherence >= {CLEAR}) AS clear FROM {{values}}
           GROUP BY layer ORDER BY layer"""
    )
    best = index.sql(
        """SELECT layer, memory, argmax, max_p, argmax = target AS agrees FROM {values}
           ORDER BY max_p DESC, layer, memory LIMIT $1""",
        [count],
    )
    note = index.manifest.values
    rare = find_undertrained(index, [row["argmax"] for row in best])
    return {
        "index": str(index.folder),
        "model": index.manifest.model.name,
        "reading": note.reading,
        "vocabulary": note.vocabulary,
        "top": note.top,
        **whole,
        "max_p_times_uniform": whole["median_max_p"] * index.manifest.value_tokens,
        "clear": clear,
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
    """Return the number of values whose top token is undertrained, or None if tokens.parquet is missing."""
    if not index.has("tokens"):
        return None
    query = "SELECT count(*) AS n FROM {values} v JOIN {tokens} t ON v.argmax = t.token WHERE NOT t.trained"
    return int(index.sql(query)[0]["n"])


def token_counts(index: Index) -> NDArray[Any]:
    """Return the number of occurrences of each token in the corpus. [vocabulary]"""
    query = "SELECT token, count(*) AS times FROM (SELECT unnest(tokens) AS token FROM {corpus}) GROUP BY token"
    rows = index.arrays(query)
    tokens = np.asarray(rows["token"], np.int64)
    counts = np.zeros(max(index.manifest.model.vocabulary, int(tokens.max(initial=-1)) + 1), np.int64)
    counts[tokens] = np.asarray(rows["times"], np.int64)
    return counts


def summarize(index: Index) -> dict[str, Any]:
    """Return summary counts of an index, ready for JSON. `dead` holds the number of dead memories by layer."""
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


# The text around a sentence

_AROUND = """
SELECT sentence, text, source FROM {corpus} WHERE sentence BETWEEN $1 - $2 AND $1 + $2
AND source = (SELECT source FROM {corpus} WHERE sentence = $1) ORDER BY sentence
"""


@dataclass(frozen=True)
class SentenceContext:
    """A sentence with its neighbors in the same document."""

    sentence: int
    source: str  # file with line or row
    before: tuple[str, ...]
    text: str
    after: tuple[str, ...]


def read_context(index: Index, sentence: int, around: int = 2) -> SentenceContext:
    """Return a sentence with up to `around` neighbors per side. Raises UnknownName if the sentence does not exist."""
    rows = index.sql(_AROUND, [sentence, around])
    place = next((place for place, row in enumerate(rows) if row["sentence"] == sentence), None)
    if place is None:
        raise UnknownName(f"the corpus has no sentence {sentence}; it has 0 to {index.manifest.counts.sentences - 1}")
    texts = [row["text"] for row in rows]
    return SentenceContext(
        sentence, rows[place]["source"], tuple(texts[:place]), texts[place], tuple(texts[place + 1 :])
    )


# Experts

_STRONGEST = 20
RARELY = 0.1  # an expert is rarely chosen if its share is below this fraction of an even share


@dataclass(frozen=True)
class ExpertMemory:
    """One of the strongest memories of an expert."""

    name: MemoryId
    max: float
    frequency: float
    summary: str | None


@dataclass(frozen=True)
class ExpertRecord:
    """One expert of a mixture. For a shared expert, which has no router, the routing facts are None or empty."""

    name: ExpertId
    layer: int
    kind: str  # "shared" or "routed"
    expert: int
    model: str
    memories: int
    dead: int  # number of dead memories
    chosen: int | None = None  # number of prefixes routed to the expert
    share: float | None = None  # share of all prefixes that are routed to the expert
    weight: float | None = None  # mean router weight on these prefixes
    top_k: float | None = None  # mean number of experts per prefix in this layer
    drawn: int = 0  # number of random prefixes routed to the expert
    tokens: tuple[TokenNumber, ...] = ()  # last tokens of the random prefixes with their shares
    heaviest: tuple[Trigger, ...] = ()  # prefixes with the largest router weights, which are stored as `coefficient`
    router: tuple[TokenNumber, ...] = ()  # tokens whose embeddings match the router row; empty without values
    strongest: tuple[ExpertMemory, ...] = ()  # memories of the expert with the largest coefficients


@dataclass(frozen=True)
class LayerRouting:
    """The distribution of a layer's prefixes over its experts.

    Memories that no prefix reached do not count as dead, because their coefficients were never computed.
    """

    layer: int
    experts: int
    top_k: float  # mean number of experts per prefix
    unreached: int  # number of memories in experts that are never chosen by the router
    never: tuple[ExpertId, ...]  # experts that the router never chooses
    rarely: tuple[ExpertId, ...]  # experts with less than a tenth of an even share
    busiest: ExpertId
    busiest_share: float  # share of all prefixes that are routed to the busiest expert


def read_routing(index: Index) -> list[LayerRouting]:
    """Return the routing of every layer that has a router."""
    if not index.has("experts"):
        return []
    layers: dict[int, list[tuple[ExpertId, float]]] = {}
    for row in index.sql("SELECT layer, expert, share FROM {experts} ORDER BY layer, expert"):
        layers.setdefault(row["layer"], []).append((ExpertId(row["layer"], "routed", row["expert"]), row["share"]))
    by_layer = []
    for layer, experts in layers.items():
        top_k = sum(share for _, share in experts)
        never = tuple(expert for expert, share in experts if share == 0)
        rarely = tuple(expert for expert, share in experts if 0 < share < RARELY * top_k / len(experts))
        unreached = sum(len(index.names.span(expert)) for expert in never)
        busiest = max(experts, key=lambda item: item[1])
        by_layer.append(LayerRouting(layer, len(experts), top_k, unreached, never, rarely, *busiest))
    return by_layer


def find_expert(index: Index, name: str | ExpertId) -> ExpertId:
    """Return the expert of that name. Raises UnknownName if the index has no such expert."""
    expert = ExpertId.find(name) if isinstance(name, str) else name
    if expert is None:
        raise UnknownName(f"'{name}' is not an expert's name; write layer and expert like L3E5, both from 0")
    index.memories(expert.layer)  # raises UnknownName for a layer that was not scanned
    index.names.span(expert)
    return expert


def read_expert(index: Index, name: str | ExpertId, top: int | None = None) -> ExpertRecord:
    """Return the record of an expert with at most `top` prefixes, tokens and memories.

    Raises:
        UnknownName: The index has no such expert.
    """
    if top is not None and top < 1:
        raise SettingError(f"--top is {top}; it must be 1 or more")
    expert = find_expert(index, name)
    span = index.names.span(expert)
    inside = f"layer = {expert.layer} AND memory >= {span.start} AND memory < {span.stop}"
    dead = index.sql(f"SELECT count(*) AS n FROM {{memories}} WHERE dead AND {inside}")[0]["n"]
    return ExpertRecord(
        expert,
        expert.layer,
        expert.kind,
        expert.expert,
        index.manifest.model.name,
        len(span),
        dead,
        **(_read_routing_of(index, expert, top) if expert.kind == "routed" else {}),
        strongest=_strongest(index, expert.layer, inside, top or _STRONGEST),
    )


def _read_routing_of(index: Index, expert: ExpertId, top: int | None) -> dict[str, Any]:
    """Return the fields of an ExpertRecord that only a routed expert has."""
    query = "SELECT expert, chosen, share, weight, sum(share) OVER () AS top_k FROM {experts} WHERE layer = $1"
    facts = next(row for row in index.sql(query, [expert.layer]) if row.pop("expert") == expert.expert)
    place = [expert.layer, expert.expert]
    query = """SELECT * FROM {routing} WHERE layer = $1 AND expert = $2 AND "list" = 'heaviest' ORDER BY rank"""
    heaviest = [row | {"coefficient": row["weight"]} for row in index.sql(query, place)[:top]]
    query = """SELECT CASE WHEN r.position >= 0 THEN c.tokens[r.position + 1] END AS token
               FROM {routing} r JOIN {corpus} c USING (sentence)
               WHERE r.layer = $1 AND r.expert = $2 AND r."list" = 'drawn'"""
    drawn = index.sql(query, place)
    counts = Counter(row["token"] for row in drawn if row["token"] is not None)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    query = "SELECT tokens, scores FROM {routers} WHERE layer = $1 AND expert = $2"
    rows = index.sql(query, place) if index.has("routers") else []
    matches = [pair for row in rows for pair in zip(row["tokens"], row["scores"], strict=True)]
    return facts | {
        "drawn": len(drawn),
        "tokens": tuple(TokenNumber(token, index.vocabulary[token], n / len(drawn)) for token, n in ordered[:top]),
        "heaviest": tuple(index.with_text(heaviest)),
        "router": tuple(TokenNumber(token, index.vocabulary[token], score) for token, score in matches[:top]),
    }


def _strongest(index: Index, layer: int, inside: str, count: int) -> tuple[ExpertMemory, ...]:
    query = f"SELECT memory, max, frequency FROM {{memories}} WHERE {inside} ORDER BY max DESC, memory LIMIT {count}"
    rows = index.sql(query)
    names = [index.names.name(layer, row["memory"]) for row in rows]
    summaries = read_summaries(index, names)
    return tuple(
        ExpertMemory(name, row["max"], row["frequency"], summaries.get(name))
        for name, row in zip(names, rows, strict=True)
    )


# Coefficients at every token

_BATCH_TOKENS = 4096
_SENTENCES = 4096  # sentences read at a time


@dataclass(frozen=True, eq=False)
class Excerpts:
    """Parts of sentences, each with the memory whose coefficients are computed. All arrays are [n]."""

    layer: NDArray[np.int64]
    memory: NDArray[np.int64]  # number of the memory in its layer
    sentence: NDArray[np.int64]
    first: NDArray[np.int64]  # position of the first token; -1 is BOS
    stop: NDArray[np.int64]  # position after the last token

    @property
    def longest(self) -> int:
        return int((self.stop - self.first).max(initial=0))


def read_coefficients(
    index: Index,
    model: MemoryModel,
    excerpts: Excerpts,
    into: NDArray[np.float32] | None = None,
    progress: Progress = no_progress,
) -> NDArray[np.float32]:
    """Return coefficients [n, longest], one column per token. Columns after an excerpt's end are unused.

    Each sentence runs once, up to the end of its last excerpt. The result is written to `into` if it is given.
    """
    from memlens.corpus.sentences import cut_batches  # imported here to keep lookups fast

    coefficients = np.zeros((len(excerpts.layer), excerpts.longest), np.float32) if into is None else into
    if not len(coefficients):
        return coefficients
    order = np.argsort(excerpts.sentence, kind="stable")
    sentences, starts = np.unique(excerpts.sentence[order], return_index=True)
    stops = np.append(starts[1:], len(order))
    reach = np.maximum.reduceat(excerpts.stop[order], starts)
    bos, done = index.manifest.model.bos, 0
    for first in range(0, len(sentences), _SENTENCES):
        places = range(first, min(first + _SENTENCES, len(sentences)))
        rows = index.sentences(sentences[first : places.stop].tolist())
        fed = [(place, np.asarray(rows[sentences[place]]["tokens"][: reach[place]], np.int64)) for place in places]
        for batch in cut_batches(fed, _BATCH_TOKENS, bos):
            in_batch = np.concatenate([order[starts[place] : stops[place]] for place in batch.sentences])
            row = np.repeat(np.arange(len(batch.sentences)), (stops - starts)[batch.sentences])
            _read_batch(model, batch, excerpts, in_batch, row, 0 if bos is None else 1, coefficients)
            done += len(batch.sentences)
            progress("coefficients", done, len(sentences))
    return coefficients


def _read_batch(
    model: MemoryModel,
    batch: Batch,
    excerpts: Excerpts,
    in_batch: NDArray[np.int64],  # [k] numbers of the excerpts in this batch
    row: NDArray[np.int64],  # [k] row of each excerpt in the batch
    shift: int,
    coefficients: NDArray[np.float32],
) -> None:
    import torch

    layers = excerpts.layer[in_batch]
    by_layer = {layer: np.flatnonzero(layers == layer) for layer in np.unique(layers).tolist()}

    def copy(layer: int, block: CoefficientBlock) -> None:
        columns, places = block.group.columns, by_layer[layer]
        memory = excerpts.memory[in_batch[places]]
        places = places[(memory >= columns.start) & (memory < columns.stop)]
        if not len(places):
            return
        numbers = in_batch[places]
        position = excerpts.first[numbers][:, None] + shift + np.arange(coefficients.shape[1])
        position = position.clip(max=batch.tokens.shape[1] - 1)  # columns after the end of a short excerpt
        cells = (row[places][:, None], position, excerpts.memory[numbers][:, None] - columns.start)
        coefficients[numbers] = block.everywhere()[tuple(map(torch.from_numpy, cells))].float().cpu().numpy()

    with torch.inference_mode(), model.watch(copy, list(by_layer)):
        model.run_body(torch.from_numpy(batch.tokens))


def token_texts(sentence: dict[str, Any], first: int, stop: int) -> list[str]:
    """Return the text of each token of an excerpt, which is empty for BOS and for continuation bytes."""
    text, ends = sentence["text"], sentence["ends"]
    edges: Sequence[int] = [0, *ends] if first <= 0 else ends[first - 1 :]
    texts = [text[begin:end] for begin, end in zip(edges, ends[max(first, 0) : stop], strict=False)]
    return ["", *texts] if first < 0 else texts


@dataclass(frozen=True)
class TriggerCoefficients:
    """The tokens of a trigger's sentence with the memory's coefficient at each token."""

    rank: int
    position: int
    tokens: list[str]
    coefficients: list[float]


def shade_triggers(
    index: Index, model: MemoryModel, name: MemoryId, end: str, limit: int | None = None
) -> list[TriggerCoefficients]:
    """Return coefficients at every token of the sentences of a memory's triggers, up to one token past the trigger."""
    triggers = index.triggers(name, end, limit)
    sentences = index.sentences(sorted({trigger.prefix.sentence for trigger in triggers}))
    places = [(trigger.prefix.sentence, trigger.prefix.position + 2) for trigger in triggers]
    sentence = np.array([number for number, _ in places], np.int64)
    stop = np.array([min(reach, len(sentences[number]["tokens"])) for number, reach in places], np.int64)
    zeros = np.zeros_like(stop)
    excerpts = Excerpts(zeros + name.layer, zeros + index.names.number(name), sentence, zeros, stop)
    coefficients = read_coefficients(index, model, excerpts).tolist()
    return [
        TriggerCoefficients(
            trigger.rank,
            trigger.prefix.position,
            token_texts(sentences[trigger.prefix.sentence], 0, count),
            coefficients[number][:count],
        )
        for number, (trigger, count) in enumerate(zip(triggers, stop.tolist(), strict=True))
    ]


# A memory in a notebook

_TRIGGERS_SHOWN, _PATTERNS_SHOWN, _TOKENS_SHOWN = 10, 3, 10
_CHARACTERS_BEFORE, _CHARACTERS_AFTER, _TOKENS_SHADED = 160, 40, 40
_HUES = ("255,176,32", "80,140,255")  # colors of positive and negative coefficients
_TEXT = "text-align:left;white-space:pre-wrap;unicode-bidi:isolate"
_MARK = "border-bottom:2px solid"


@dataclass(frozen=True, repr=False)
class ShownMemory(MemoryRecord):
    """The record of a memory that a notebook shows as a page. Triggers are shaded if `index.model` is set."""

    shading: tuple[TriggerCoefficients, ...] = ()

    def _repr_html_(self) -> str:
        by_rank = {shading.rank: shading for shading in self.shading}
        strongest = max((abs(m) for shading in self.shading for m in shading.coefficients), default=0.0)
        rows = "".join(
            f'<tr><td>{trigger.coefficient:.4g}</td><td style="{_TEXT}">'
            + (
                _shade_tokens(by_rank[trigger.rank], strongest)
                if trigger.rank in by_rank
                else f"{escape(tail(trigger.before, _CHARACTERS_BEFORE))}"
                f'<span style="{_MARK}">{escape(visible(trigger.token))}</span>'
            )
            + f'<span style="opacity:.6">{escape(head(trigger.after, _CHARACTERS_AFTER))}</span></td></tr>'
            for trigger in self.triggers["top"]
        )
        name = f": {visible(self.summary.name)}" if self.summary else ""
        activity = "dead" if self.dead else f"active on {percent(self.frequency)} of prefixes, max {self.max:.4g}"
        patterns = "".join(
            f"<li>{escape(visible(pattern.description))} ({len(pattern.prefixes)} triggers)</li>"
            for pattern in (self.patterns or ())[:_PATTERNS_SHOWN]
        )
        note = "" if self.shading else "<div>to shade tokens, load the model: index.model = index.load_model()</div>"
        ends = () if self.value is None else (("promotes", self.value.promotes), ("demotes", self.value.demotes))
        tokens = "".join(f"<div>{name} {_token_list(tokens)}</div>" for name, tokens in ends)
        return (
            f"<div><b>{self.name}</b>{escape(name)}<br>{activity}</div><ul>{patterns}</ul>"
            f"<table><tr><th>m</th><th>triggers</th></tr>{rows}</table>{note}{tokens}"
        )


def show_memory(index: Index, name: str | MemoryId) -> ShownMemory:
    """Return the record of a memory with its strongest top triggers, shaded if `index.model` is set."""
    record = read_memory(index, name, ("top",), _TRIGGERS_SHOWN)
    model = index.model
    shading = () if model is None else shade_triggers(index, model, record.name, "top", _TRIGGERS_SHOWN)
    return ShownMemory(**vars(record), shading=tuple(shading))


def _shade_tokens(trigger: TriggerCoefficients, strongest: float) -> str:
    first = max(0, trigger.position - _TOKENS_SHADED)
    parts = ["…"] if first else []
    for place in range(first, trigger.position + 1):
        m = trigger.coefficients[place]
        shade = f"rgba({_HUES[m < 0]},{0.8 * abs(m) / strongest if strongest else 0:.2f})"
        mark = f";{_MARK}" if place == trigger.position else ""
        text = escape(visible(trigger.tokens[place]))
        parts.append(f'<span title="{m:.4g}" style="background:{shade}{mark}">{text}</span>')
    return "".join(parts)


def _token_list(tokens: Sequence[TokenNumber]) -> str:
    return " ".join(
        f'<code title="p {token.number:.3g}" style="white-space:pre">{escape(visible(token.text))}</code>'
        for token in tokens[:_TOKENS_SHOWN]
    )
