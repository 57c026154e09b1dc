"""Galleries of the report: predictive values, clear patterns, last-layer changes, duplicates and dead memories.

If the table of a gallery is missing, the gallery is None, and the page names the command that computes the table. Weak
examples are excluded by the same limits for every model: LEAST_PRECISION for values and LEAST_AUROC for patterns.
Patterns are ordered by their precision on held-out triggers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memlens.annotations.records import CHOICES
from memlens.experiments.experiment import THIRDS, Row
from memlens.index.memory import find_undertrained
from memlens.index.reader import Index
from memlens.memory import MemoryId, Trigger
from memlens.pattern.related import TOKENS, DuplicateGroup, duplicate_groups, token_sets, trigger_sets
from memlens.pattern.words import KINDS
from memlens.reports.sections import Tables
from memlens.text import head, tail, token, visible

VALUES_SHOWN = 6
LEAST_PRECISION = 0.2  # minimum precision of a value: its top token follows one trigger in five
LEAST_AUROC = 0.75  # minimum held-out AUROC of a pattern, if it was measured (0.5 is chance)
_TRIGGERS, _TOKENS, _DEAD_NAMES = 3, 8, 12
_CHANGES, _PUSHERS = 6, 3
_BEFORE, _AFTER = 110, 24


@dataclass(frozen=True)
class TriggerExample:
    """One trigger: its text without the last token, this token, the next token, and the following text."""

    before: str
    token: str
    next: str
    rest: str
    is_predicted: bool  # True if the next token is the value's top token
    coefficient: float


@dataclass(frozen=True)
class ValueCard:
    """A value that predicts the next token of its triggers."""

    memory: str
    layer: int
    max_p: float
    token: str
    precision: float | None
    promoted: list[tuple[str, float, bool]]  # token, probability, and True if the token was trained
    examples: list[TriggerExample]


@dataclass(frozen=True)
class ChangeCard:
    """A prediction that the last layer changed."""

    text: str
    before: str
    after: str
    cosine: float | None
    memories: list[str]  # memories with the largest effects
    verdicts: str = ""  # numbers of people who judged the two tokens related and distant


@dataclass(frozen=True)
class PatternCard:
    """A pattern of a memory, with its scores and examples."""

    memory: str
    layer: int
    kind: str
    description: str
    confidence: float | None
    prefixes: int
    auroc: float | None  # AUROC of held-out triggers against random prefixes
    auroc_same_token: float | None  # AUROC of held-out triggers against prefixes with the same last tokens
    others: list[str]  # best pattern of each of the memory's other senses
    examples: list[TriggerExample]


@dataclass(frozen=True)
class DeadLayer:
    """The dead memories of one layer."""

    layer: int
    memories: int
    dead: int
    names: list[str]  # the first few dead memories

    @property
    def share(self) -> float:
        return self.dead / self.memories if self.memories else 0.0


def predictive_values(index: Index, tables: Tables) -> list[ValueCard] | None:
    """Return the most confident values with a precision of at least LEAST_PRECISION, highest precision first."""
    rows = tables.rows("predictive-values")
    if rows is None:
        return None
    rows = [row for row in rows if (row["precision"] or 0) >= LEAST_PRECISION]
    rows = sorted(rows, key=lambda row: (-row["precision"], -row["max_p"], row["layer"], row["memory"]))[:VALUES_SHOWN]
    names = _names(index, rows)
    promoted, triggers = _promoted(index, names, _TOKENS), index.triggers_of(names)
    cards = []
    for row in rows:
        name = index.names.name(row["layer"], row["memory"])
        # triggers whose next token is the value's top token come first, to illustrate the precision
        ordered = sorted(triggers[name], key=lambda trigger: trigger.next_token != row["token"])
        examples = [example_of(index, trigger, row["token"]) for trigger in ordered[:_TRIGGERS]]
        cards.append(
            ValueCard(
                str(name),
                row["layer"],
                row["max_p"],
                token(index.vocabulary[row["token"]]),
                row["precision"],
                promoted.get(name, []),
                examples,
            )
        )
    return cards


def _names(index: Index, rows: list[Row]) -> list[MemoryId]:
    return [index.names.name(row["layer"], row["memory"]) for row in rows]


def _promoted(index: Index, names: Sequence[MemoryId], most: int) -> dict[MemoryId, list[tuple[str, float, bool]]]:
    """Return the top tokens of each memory's value, as (token, probability, True if the token was trained)."""
    if not index.has("values"):
        return {}
    by_memory = index.rows_of("values", names, "tokens, p")
    rare = find_undertrained(index, [n for rows in by_memory.values() for row in rows for n in row["tokens"][:most]])
    return {
        name: [
            (token(index.vocabulary[n]), p, n not in rare)
            for row in rows
            for n, p in zip(row["tokens"][:most], row["p"][:most], strict=True)
        ]
        for name, rows in by_memory.items()
    }


def last_layer_changes(index: Index, tables: Tables) -> list[ChangeCard]:
    """Return the first sampled compositions of the last layer, or an empty list if the table is missing."""
    table = tables.table("last-layer")
    if table is None:
        return []
    return [
        ChangeCard(
            tail(row["text"] or "", _BEFORE),
            token(row["residual_text"]),
            token(row["output_text"]),
            row["cosine"],
            [str(index.names.name(row["layer"], memory)) for memory in (row["memories"] or [])[:_PUSHERS]],
            ", ".join(f"{row[choice]} {choice}" for choice in CHOICES if row.get(choice)),
        )
        for row in table.slice(0, _CHANGES).to_pylist()
    ]


def clearest_patterns(index: Index) -> list[PatternCard] | None:
    """Return the best pattern of each kind in the lower, middle and upper third of the layers, each pattern once."""
    if not index.has("patterns"):
        return None
    rows = _select_patterns(index)
    names = _names(index, rows)
    cards, triggers = [], index.triggers_of(names)
    every = index.rows_of("patterns", names, order="confidence DESC, pattern")
    for row in rows:
        name = index.names.name(row["layer"], row["memory"])
        ranks = set(row["prefixes"] or ())
        examples = [example_of(index, trigger, None) for trigger in triggers[name] if trigger.rank in ranks]
        cards.append(
            PatternCard(
                str(name),
                row["layer"],
                row["kind"],
                visible(str(row["description"] or row["pattern"])),
                row["confidence"],
                len(ranks),
                row.get("auroc"),
                row.get("auroc_same_token"),
                _other_senses(every[name], row.get("sense")),
                examples[:_TRIGGERS],
            )
        )
    return cards


def _other_senses(patterns: Sequence[Row], sense: int | None) -> list[str]:
    descriptions: dict[int, str] = {}
    for row in patterns:
        descriptions.setdefault(row.get("sense") or 0, visible(str(row["description"] or row["pattern"])))
    return [description for other, description in descriptions.items() if other != (sense or 0)]


def _select_patterns(index: Index) -> list[Row]:
    """Return the clearest pattern of each kind in each third of the layers. Ties go to the rarer pattern."""
    columns, layers = index.schema_names("patterns"), len(index.manifest.model.memories)
    condition = f"coalesce(auroc, 1) >= {LEAST_AUROC}" if "auroc" in columns else "true"
    condition += f" AND kind IN {KINDS}"
    precision = "precision DESC NULLS LAST, " * ("precision" in columns)
    order = f"{precision}confidence DESC NULLS LAST, {'share, ' * ('share' in columns)}"
    order += "len(prefixes) DESC, layer, memory, pattern"
    candidates = index.sql(  # up to three per kind and third, because one pattern may be the clearest in all thirds
        f"""
        WITH clearest AS (
            SELECT *, least(floor(3 * (layer + 0.5) / {layers}), 2) AS place FROM {{patterns}} WHERE {condition}
            QUALIFY row_number() OVER (PARTITION BY place, kind, pattern ORDER BY {order}) = 1
        )
        SELECT * FROM clearest QUALIFY row_number() OVER (PARTITION BY place, kind ORDER BY {order}) <= {len(THIRDS)}
        ORDER BY {order}
        """
    )
    selected: dict[tuple[int, str], Row] = {}
    for row in candidates:
        used = {(other["pattern"], other["kind"]) for other in selected.values()}
        if (row["place"], row["kind"]) not in selected and (row["pattern"], row["kind"]) not in used:
            selected[row["place"], row["kind"]] = row
    return sorted(selected.values(), key=lambda row: (row["place"], KINDS.index(row["kind"])))


def dead_memories(index: Index) -> list[DeadLayer]:
    """Return the number of dead memories of each layer, with the names of the first few."""
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
            [str(index.names.name(row["layer"], memory)) for memory in row["names"] or []],
        )
        for row in rows
    ]


def tied_share(index: Index) -> float | None:
    """Return the share of full trigger lists whose last two coefficients are equal, or None if no list is full.

    The last entries of a tied list are an arbitrary choice among equal coefficients. bfloat16 makes ties frequent.
    """
    (row,) = index.sql(
        """
        SELECT avg((last = before)::INT) AS share FROM (
            SELECT max(coefficient) FILTER (rank = $1) AS last, max(coefficient) FILTER (rank = $1 - 1) AS before
            FROM {triggers} WHERE rank >= $1 - 1 GROUP BY layer, memory, "end"
        ) WHERE last IS NOT NULL
        """,
        [index.manifest.settings.top - 1],
    )
    share: float | None = row["share"]
    return share


def example_of(index: Index, trigger: Trigger, promoted: int | None) -> TriggerExample:
    """Return a trigger as an example. `promoted` is the value's top token, or None to mark no token as predicted."""
    next_token: Any = trigger.next_token
    text = "" if next_token is None else index.vocabulary[next_token]
    # the text does not contain the name of an unknown token, so the text itself is shown
    is_in_text = trigger.after.startswith(text)
    return TriggerExample(
        tail(trigger.before, _BEFORE),
        visible(trigger.token) or "∅",
        visible(text) if is_in_text else "",
        head(trigger.after[len(text) :] if is_in_text else trigger.after, _AFTER),
        next_token is not None and next_token == promoted,
        trigger.coefficient,
    )


ALIKE_TRIGGERS, ALIKE_TOKENS = 0.5, 0.8  # minimum Jaccard index: 17 of 25 triggers or 9 of 10 tokens are shared
_SHOWN, _NAMES, _EXAMPLES = 2, 12, 3


@dataclass(frozen=True)
class DuplicateCard:
    """A group of memories with mostly the same triggers or top tokens."""

    memories: list[str]  # the first few memories of the group
    count: int
    layers: int
    least: float  # lowest Jaccard index with the first memory
    examples: list[TriggerExample]  # triggers that the first two memories share
    tokens: list[str]  # top tokens of the first memory


@dataclass(frozen=True)
class DuplicateGallery:
    """The number of groups, the number of memories in them, and cards of the largest groups."""

    groups: int
    memories: int
    cards: list[DuplicateCard]


def same_triggers(index: Index) -> DuplicateGallery:
    """Return groups of memories with mostly the same triggers."""
    groups = duplicate_groups(trigger_sets(index), ALIKE_TRIGGERS)
    shown = groups[:_SHOWN]
    triggers = index.triggers_of([memory for group in shown for memory in group.memories[:2]])
    cards = []
    for group in shown:
        first, second = group.memories[:2]
        theirs = {trigger.prefix for trigger in triggers[second]}
        shared = [trigger for trigger in triggers[first] if trigger.prefix in theirs][:_EXAMPLES]
        cards.append(_card(group, [example_of(index, trigger, None) for trigger in shared], []))
    return _gallery(groups, cards)


def same_values(index: Index) -> DuplicateGallery | None:
    """Return groups of memories with mostly the same top tokens, or None without a values table."""
    if not index.has("values"):
        return None
    groups = duplicate_groups(token_sets(index), ALIKE_TOKENS)
    promoted = _promoted(index, [group.memories[0] for group in groups[:_SHOWN]], TOKENS)
    cards = [_card(group, [], [text for text, _, _ in promoted[group.memories[0]]]) for group in groups[:_SHOWN]]
    return _gallery(groups, cards)


def _card(group: DuplicateGroup, examples: list[TriggerExample], tokens: list[str]) -> DuplicateCard:
    names = [str(memory) for memory in group.memories[:_NAMES]]
    layers = len({memory.layer for memory in group.memories})
    return DuplicateCard(names, len(group.memories), layers, group.least, examples, tokens)


def _gallery(groups: Sequence[DuplicateGroup], cards: list[DuplicateCard]) -> DuplicateGallery:
    return DuplicateGallery(len(groups), sum(len(group.memories) for group in groups), cards)
