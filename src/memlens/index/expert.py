"""Experts of a mixture as records: how often each layer's are chosen, and one with its memories and its tokens."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from memlens.errors import SettingError, UnknownName
from memlens.index.memory import TokenNumber, read_summaries
from memlens.index.reader import Index
from memlens.memory import ExpertId, MemoryId, Trigger

_STRONGEST = 20
RARELY = 0.1  # of an even share of the prefixes: an expert that sees less has lists of few triggers


@dataclass(frozen=True)
class ExpertMemory:
    """A memory of an expert, in short."""

    name: MemoryId
    max: float
    frequency: float
    summary: str | None


@dataclass(frozen=True)
class ExpertRecord:
    """One expert; of a shared expert, which no router chooses, `chosen` and what follows from it is None or empty."""

    name: ExpertId
    layer: int
    kind: str  # "shared" or "routed"
    expert: int
    model: str
    memories: int
    dead: int  # memories that no prefix triggers, although some reached the expert
    chosen: int | None  # prefixes of the corpus that were sent to it
    share: float | None  # of all prefixes
    weight: float | None  # the router's, on average over those
    top_k: float | None  # experts that a prefix is sent to in this layer, on average
    drawn: int  # prefixes drawn at random among those sent to it
    tokens: tuple[TokenNumber, ...]  # the last tokens of those drawn, with their share, most frequent first
    heaviest: tuple[Trigger, ...]  # the prefixes with the largest weights; a trigger's coefficient is the weight here
    router: tuple[TokenNumber, ...]  # tokens whose embedding alone matches the router's row best; needs `values`
    strongest: tuple[ExpertMemory, ...]  # the memories with the largest coefficients


@dataclass(frozen=True)
class LayerRouting:
    """The use of one layer's experts: how evenly its router sends the prefixes of the corpus to them.

    A memory that no prefix reached is not dead: nothing was computed there.
    """

    layer: int
    experts: int
    top_k: float  # experts that a prefix is sent to, on average
    unreached: int  # memories of experts that are never chosen
    never: tuple[ExpertId, ...]  # experts that no prefix is sent to
    rarely: tuple[ExpertId, ...]  # those that see less than a tenth of an even share
    busiest: ExpertId
    busiest_share: float  # of all prefixes


def read_routing(index: Index) -> list[LayerRouting]:
    """Every layer that has a router; none in an index of a dense model."""
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
    """The expert of that name, refused if it is not in the index."""
    expert = ExpertId.find(name) if isinstance(name, str) else name
    if expert is None:
        raise UnknownName(f"'{name}' is not an expert's name; write layer and expert like L3E5, both from 0")
    index.memories(expert.layer)  # refuses a layer that is not there
    index.names.span(expert)
    return expert


def read_expert(index: Index, name: str | ExpertId, top: int | None = None) -> ExpertRecord:
    """Refused if the index has no such expert. `top`: prefixes, tokens and memories to list."""
    if top is not None and top < 1:
        raise SettingError(f"--top is {top}; it must be 1 or more")
    expert = find_expert(index, name)
    span = index.names.span(expert)
    inside = f"layer = {expert.layer} AND memory >= {span.start} AND memory < {span.stop}"
    dead = index.sql(f"SELECT count(*) AS n FROM {{memories}} WHERE dead AND {inside}")[0]["n"]
    facts = _facts(index, expert)
    drawn, tokens = _last_tokens(index, expert)
    return ExpertRecord(
        expert,
        expert.layer,
        expert.kind,
        expert.expert,
        index.manifest.model.name,
        len(span),
        dead,
        *facts,
        drawn,
        tokens[:top],
        tuple(_heaviest(index, expert, top)),
        _router(index, expert)[:top],
        _strongest(index, expert.layer, inside, top or _STRONGEST),
    )


def _facts(index: Index, expert: ExpertId) -> tuple[int | None, float | None, float | None, float | None]:
    if expert.kind != "routed":
        return None, None, None, None
    query = "SELECT expert, chosen, share, weight, sum(share) OVER () AS top_k FROM {experts} WHERE layer = $1"
    row = next(row for row in index.sql(query, [expert.layer]) if row["expert"] == expert.expert)
    return row["chosen"], row["share"], row["weight"], row["top_k"]


def _rows(index: Index, expert: ExpertId, which: str) -> list[dict[str, object]]:
    if expert.kind != "routed":
        return []
    query = 'SELECT * FROM {routing} WHERE layer = $1 AND expert = $2 AND "list" = $3 ORDER BY rank'
    return index.sql(query, [expert.layer, expert.expert, which])


def _heaviest(index: Index, expert: ExpertId, top: int | None) -> Sequence[Trigger]:
    rows = [row | {"coefficient": row["weight"]} for row in _rows(index, expert, "heaviest")[:top]]
    return index.with_text(rows)


def _last_tokens(index: Index, expert: ExpertId) -> tuple[int, tuple[TokenNumber, ...]]:
    query = """SELECT CASE WHEN r.position >= 0 THEN c.tokens[r.position + 1] END AS token
               FROM {routing} r JOIN {corpus} c USING (sentence)
               WHERE r.layer = $1 AND r.expert = $2 AND r."list" = 'drawn'"""
    rows = index.sql(query, [expert.layer, expert.expert]) if expert.kind == "routed" else []
    counts = Counter(row["token"] for row in rows if row["token"] is not None)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return len(rows), tuple(TokenNumber(token, index.vocabulary[token], n / len(rows)) for token, n in ordered)


def _router(index: Index, expert: ExpertId) -> tuple[TokenNumber, ...]:
    if expert.kind != "routed" or not index.has("routers"):
        return ()
    query = "SELECT tokens, scores FROM {routers} WHERE layer = $1 AND expert = $2"
    rows = index.sql(query, [expert.layer, expert.expert])
    pairs = [pair for row in rows for pair in zip(row["tokens"], row["scores"], strict=True)]
    return tuple(TokenNumber(token, index.vocabulary[token], score) for token, score in pairs)


def _strongest(index: Index, layer: int, inside: str, count: int) -> tuple[ExpertMemory, ...]:
    query = f"SELECT memory, max, frequency FROM {{memories}} WHERE {inside} ORDER BY max DESC, memory LIMIT {count}"
    rows = index.sql(query)
    names = [index.names.name(layer, row["memory"]) for row in rows]
    summaries = read_summaries(index, names)
    return tuple(
        ExpertMemory(name, row["max"], row["frequency"], summaries.get(name))
        for name, row in zip(names, rows, strict=True)
    )
