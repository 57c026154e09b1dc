"""Memories worth looking at: the most predictive values, the clearest patterns, the ones that never fire.

Each gallery is a list of plain records for the template. Works from the index alone; a gallery whose table is missing
is None, and the page names the command that makes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memlens.index.reader import Index
from memlens.index.trigger_list import trigger_of
from memlens.memory import MemoryId, Trigger
from memlens.report.tables import Row, Tables
from memlens.report.text import head, tail, token, visible

SHOWN = 24
_TRIGGERS, _TOKENS, _PER_LAYER, _DEAD_NAMES = 4, 8, 3, 12
_CHANGES, _PUSHERS = 12, 3
_BEFORE, _AFTER = 110, 24
_PATTERN_TRIGGERS = 25  # the paper's number of prefixes a memory


@dataclass(frozen=True)
class Example:
    """One trigger: the prefix with its last token apart, and what came next."""

    before: str
    token: str
    next: str
    rest: str
    is_predicted: bool  # is the next token what the value promotes most?
    coefficient: float


@dataclass(frozen=True)
class ValueCard:
    memory: str
    layer: int
    max_p: float
    token: str
    precision: float | None
    promoted: list[tuple[str, float]]
    examples: list[Example]


@dataclass(frozen=True)
class Change:
    """A prediction that the last layer made of something else."""

    text: str
    before: str
    after: str
    cosine: float | None
    memories: list[str]  # that pushed most


@dataclass(frozen=True)
class PatternCard:
    memory: str
    layer: int
    kind: str
    description: str
    confidence: float | None
    prefixes: int
    examples: list[Example]


@dataclass(frozen=True)
class DeadLayer:
    layer: int
    memories: int
    dead: int
    names: list[str]  # the first few

    @property
    def share(self) -> float:
        return self.dead / self.memories if self.memories else 0.0


def predictive_values(index: Index, tables: Tables) -> list[ValueCard] | None:
    """The most confident values, those that predict best first."""
    rows = tables.rows("predictive-values")
    if rows is None:
        return None
    rows = [row for row in rows if row["precision"]]
    rows = sorted(rows, key=lambda row: (-row["precision"], -row["max_p"], row["layer"], row["memory"]))[:SHOWN]
    promoted, triggers_of = _promoted(index, rows), _triggers(index, rows)
    cards = []
    for row in rows:
        name = MemoryId(row["layer"], row["memory"])
        # triggers that the value predicts first, so that a card shows what its precision means
        predicted = [trigger for trigger in triggers_of[name] if trigger.next_token == row["token"]]
        triggers = predicted + [trigger for trigger in triggers_of[name] if trigger.next_token != row["token"]]
        examples = [_example(index, trigger, row["token"]) for trigger in triggers[:_TRIGGERS]]
        cards.append(
            ValueCard(
                str(name),
                row["layer"],
                row["max_p"],
                token(index.vocabulary[row["token"]]),
                row["precision"],
                promoted.get((row["layer"], row["memory"]), []),
                examples,
            )
        )
    return cards


def _triggers(index: Index, rows: list[Row]) -> dict[MemoryId, list[Trigger]]:
    """The top triggers of several memories, best first, in one look at each table."""
    names = [MemoryId(row["layer"], row["memory"]) for row in rows]
    found: dict[MemoryId, list[Trigger]] = {name: [] for name in names}
    if not names:
        return found
    wanted = ", ".join(f"({name.layer}, {name.memory})" for name in found)
    triggers = index.sql(
        f"SELECT * FROM {{triggers}} WHERE \"end\" = 'top' AND (layer, memory) IN ({wanted}) "
        "ORDER BY layer, memory, rank"
    )
    sentences = index.sentences(sorted({row["sentence"] for row in triggers}))
    for row in triggers:
        found[MemoryId(row["layer"], row["memory"])].append(trigger_of(row, sentences[row["sentence"]]))
    return found


def _promoted(index: Index, rows: list[Row]) -> dict[tuple[int, int], list[tuple[str, float]]]:
    if not rows or not index.has("values"):
        return {}
    wanted = ", ".join(f"({int(row['layer'])}, {int(row['memory'])})" for row in rows)
    found = index.sql(
        f"SELECT layer, memory, tokens[:{_TOKENS}] AS tokens, p[:{_TOKENS}] AS p FROM {{values}} "
        f"WHERE (layer, memory) IN ({wanted})"
    )
    return {
        (row["layer"], row["memory"]): [
            (token(index.vocabulary[t]), p) for t, p in zip(row["tokens"], row["p"], strict=True)
        ]
        for row in found
    }


def last_layer_changes(tables: Tables) -> list[Change]:
    """The first few of the sampled compositions of the last layer; empty where there is no table of them."""
    needed = ("layer", "text", "residual_text", "output_text", "cosine", "memories")
    table = tables.table("last-layer")
    if table is None or not set(needed) <= set(table.column_names):
        return []
    return [
        Change(
            tail(row["text"] or "", _BEFORE),
            token(row["residual_text"]),
            token(row["output_text"]),
            row["cosine"],
            [str(MemoryId(row["layer"], memory)) for memory in (row["memories"] or [])[:_PUSHERS]],
        )
        for row in table.slice(0, _CHANGES).to_pylist()
    ]


def clearest_patterns(index: Index) -> list[PatternCard] | None:
    """The patterns of highest confidence, one a memory and few a layer, by depth."""
    if not index.has("patterns"):
        return None
    rows = index.sql(
        f"""
        WITH best AS (
            SELECT * FROM {{patterns}}
            QUALIFY row_number() OVER (
                PARTITION BY layer, memory ORDER BY confidence DESC NULLS LAST, len(prefixes) DESC, pattern
            ) = 1
        ), few AS (
            SELECT * FROM best
            QUALIFY row_number() OVER (
                PARTITION BY layer ORDER BY confidence DESC NULLS LAST, len(prefixes) DESC, memory
            ) <= {_PER_LAYER}
        )
        SELECT * FROM few ORDER BY confidence DESC NULLS LAST, len(prefixes) DESC, layer, memory LIMIT {SHOWN}
        """
    )
    cards, triggers_of = [], _triggers(index, rows)
    for row in sorted(rows, key=lambda row: (row["layer"], row["memory"])):
        name = MemoryId(row["layer"], row["memory"])
        ranks = set(row["prefixes"] or ())
        examples = [_example(index, trigger, None) for trigger in triggers_of[name] if trigger.rank in ranks]
        cards.append(
            PatternCard(
                str(name),
                row["layer"],
                row["kind"],
                visible(str(row["description"] or row["pattern"])),
                row["confidence"],
                len(ranks),
                examples[:_TRIGGERS],
            )
        )
    return cards


def pattern_shares(index: Index) -> list[Row] | None:
    """By layer, which kinds of pattern the strongest trigger prefixes contain (the paper's Figure 2)."""
    if not index.has("patterns"):
        return None
    noted = index.manifest.get("patterns")
    top = int(noted.get("top", _PATTERN_TRIGGERS)) if isinstance(noted, dict) else _PATTERN_TRIGGERS
    return index.sql(
        """
        WITH listed AS (SELECT layer, memory, kind, unnest(prefixes) AS rank FROM {patterns}),
        kinds AS (
            SELECT layer, memory, rank, bool_or(kind = 'shallow') AS shallow, bool_or(kind = 'semantic') AS semantic
            FROM listed GROUP BY ALL
        )
        SELECT t.layer,
            count(*) AS prefixes,
            count(DISTINCT CASE WHEN k.rank IS NOT NULL THEN t.memory END) AS patterned_memories,
            count(*) FILTER (k.shallow AND NOT k.semantic) AS shallow,
            count(*) FILTER (k.semantic AND NOT k.shallow) AS semantic,
            count(*) FILTER (k.shallow AND k.semantic) AS "both",
            count(*) FILTER (k.rank IS NULL OR NOT (k.shallow OR k.semantic)) AS "not covered"
        FROM {triggers} t LEFT JOIN kinds k USING (layer, memory, rank)
        WHERE t."end" = 'top' AND t.rank < $1
        GROUP BY t.layer ORDER BY t.layer
        """,
        [top],
    )


def dead_memories(index: Index) -> list[DeadLayer]:
    """By layer, the memories that no prefix of the corpus triggers."""
    rows = index.sql(
        f"""
        SELECT layer, count(*) AS memories, count(*) FILTER (dead) AS dead,
               (list(memory ORDER BY memory) FILTER (dead))[:{_DEAD_NAMES}] AS names
        FROM {{memories}} GROUP BY layer ORDER BY layer
        """
    )
    return [
        DeadLayer(
            row["layer"],
            row["memories"],
            row["dead"],
            [str(MemoryId(row["layer"], memory)) for memory in row["names"] or []],
        )
        for row in rows
    ]


def _example(index: Index, trigger: Trigger, promoted: int | None) -> Example:
    following: Any = trigger.next_token
    shown = "" if following is None else index.vocabulary[following]
    # An unknown token has a name that is not in the text; then the text itself is shown.
    is_in_text = trigger.after.startswith(shown)
    return Example(
        tail(trigger.before, _BEFORE),
        visible(trigger.token) or "∅",
        visible(shown) if is_in_text else "",
        head(trigger.after[len(shown) :] if is_in_text else trigger.after, _AFTER),
        following is not None and following == promoted,
        trigger.coefficient,
    )
