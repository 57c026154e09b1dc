"""One memory as the page and its JSON show it: statistics, patterns, both ends of its value, triggers, people's labels.

Every part comes from the functions that `memlens show` uses; this module only puts them side by side. It knows no HTML.
"""

from __future__ import annotations

from pydantic import BaseModel, Field

from memlens.annotations.store import LABELS, Annotations, Label, history_mark
from memlens.errors import IndexFolderError
from memlens.memory import MemoryId, Trigger
from memlens.vocab.read import MemoryValue, TokenNumber, read_value
from memlens.web.served_index import ServedIndex

ENDS = ("top", "bottom")


class TokenView(BaseModel):
    """A token with its text and its number: a probability, or the score of a key."""

    token: int
    text: str
    number: float


class ValueView(BaseModel):
    """What the value promotes and pushes down, and which tokens the key matches alone."""

    reading: str
    max_p: float
    entropy: float
    norm: float
    agrees: bool | None
    target: int | None
    target_text: str | None
    target_rank: int | None
    promotes: list[TokenView]
    demotes: list[TokenView]
    key: list[TokenView]


class PatternView(BaseModel):
    """What some of the triggers have in common; `prefixes` are their ranks."""

    pattern: str
    kind: str
    description: str
    prefixes: list[int]
    confidence: float


class TriggerView(BaseModel):
    """A prefix that drives the memory far, and what comes after it in the corpus."""

    rank: int
    coefficient: float
    sentence: int
    position: int
    before: str
    token: str
    next_token: int | None
    next_text: str | None
    after: str
    patterns: list[int]


class LabelView(BaseModel):
    """What one person says the triggers have in common."""

    annotator: str
    patterns: list[PatternView]


class MemoryView(BaseModel):
    """Everything that the index knows of one memory."""

    name: str
    layer: int
    memory: int
    model: str
    max: float
    min: float
    mean: float
    frequency: float
    dead: bool
    histogram: list[int]
    histogram_edges: list[float]
    summary: str | None
    patterns: list[PatternView] | None
    value: ValueView | None
    triggers: dict[str, list[TriggerView]]
    labels: list[LabelView]
    unfinished: str | None = Field(description="Who looks, if they still label and so see only their own labels.")


class RelatedView(BaseModel):
    """Another memory and what it shares."""

    name: str
    triggers: int
    tokens: int | None
    patterns: list[str]
    summary: str | None


def read_memory(
    index: ServedIndex, name: str | MemoryId, ends: tuple[str, ...] = ENDS, viewer: str | None = None
) -> MemoryView:
    """Refused if the index has no such memory. The viewer is the annotator who looks, if it is one."""
    facts = index.facts(name)
    summary, patterns = _patterns(index, facts.id)
    value = read_value(index, facts.id)
    labels, may_see_all = read_labels(index, viewer)
    return MemoryView(
        name=str(facts.id),
        layer=facts.id.layer,
        memory=facts.id.memory,
        model=index.manifest.model.name,
        max=facts.max,
        min=facts.min,
        mean=facts.mean,
        frequency=facts.frequency,
        dead=facts.dead,
        histogram=facts.histogram,
        histogram_edges=index.manifest.histogram_edges,
        summary=summary,
        patterns=patterns,
        value=None if value is None else _value(value),
        triggers={end: _triggers(index, facts.id, end, patterns or []) for end in ends},
        labels=[_label(label) for label in labels if label.memory == facts.id],
        unfinished=None if may_see_all else viewer,
    )


def read_related(index: ServedIndex, name: str | MemoryId, limit: int = 12) -> list[RelatedView]:
    """Memories with the same triggers, patterns or promoted tokens, the most alike first."""
    from memlens.pattern.related import related_memories

    found = related_memories(index, name, limit)
    summaries = read_summaries(index, [one.memory for one in found])
    return [
        RelatedView(
            name=str(one.memory),
            triggers=one.triggers,
            tokens=one.tokens,
            patterns=list(one.patterns),
            summary=summaries.get(one.memory),
        )
        for one in found
    ]


def read_summaries(index: ServedIndex, memories: list[MemoryId]) -> dict[MemoryId, str]:
    """Memories in one line each, where there are names; else by what they promote most."""
    if not memories or not (index.has("names") or index.has("values")):
        return {}
    pairs = ", ".join(f"({memory.layer}, {memory.memory})" for memory in memories)
    where = f"WHERE (layer, memory) IN (VALUES {pairs})"
    if index.has("names"):
        rows = index.sql(f"SELECT layer, memory, name FROM {{names}} {where}")
        return {MemoryId(row["layer"], row["memory"]): row["name"] for row in rows}
    rows = index.sql(f"SELECT layer, memory, tokens[:4] AS tokens FROM {{values}} {where}")
    return {
        MemoryId(row["layer"], row["memory"]): "promotes "
        + ", ".join(f'"{index.vocabulary[token].strip()}"' for token in row["tokens"])
        for row in rows
    }


def read_labels(index: ServedIndex, viewer: str | None) -> tuple[list[Label], bool]:
    """The labels this viewer may see, and whether these are all of those who have finished. Never makes the file."""

    def read() -> tuple[list[Label], bool]:
        with Annotations(index) as notes:
            return notes.labels(viewer), viewer is None or viewer in notes.annotators(finished=True)

    try:
        mark = history_mark(index, LABELS)
        return ([], True) if mark is None else index.remember((), ("labels", mark, viewer), read)
    except IndexFolderError:  # a folder that cannot be written holds labels that cannot be opened
        return [], True


def _label(label: Label) -> LabelView:
    return LabelView(
        annotator=label.annotator,
        patterns=[
            PatternView(pattern="", kind=p.kind, description=p.description, prefixes=list(p.prefixes), confidence=1)
            for p in label.patterns
        ],
    )


def _patterns(index: ServedIndex, name: MemoryId) -> tuple[str | None, list[PatternView] | None]:
    if not (index.has("patterns") and index.has("names")):
        return None, None
    from memlens.pattern.table import memory_name, memory_patterns

    named = memory_name(index, name)
    rows = memory_patterns(index, name)
    return (None if named is None else named["name"]), [
        PatternView(**{column: row[column] for column in PatternView.model_fields}) for row in rows
    ]


def _triggers(index: ServedIndex, name: MemoryId, end: str, patterns: list[PatternView]) -> list[TriggerView]:
    of_rank: dict[int, list[int]] = {}
    if end == "top":  # patterns are of these
        for number, pattern in enumerate(patterns):
            for rank in pattern.prefixes:
                of_rank.setdefault(rank, []).append(number)
    return [_trigger(index, trigger, of_rank.get(trigger.rank, [])) for trigger in index.triggers(name, end)]


def _trigger(index: ServedIndex, trigger: Trigger, patterns: list[int]) -> TriggerView:
    following = trigger.next_token
    return TriggerView(
        rank=trigger.rank,
        coefficient=trigger.coefficient,
        sentence=trigger.prefix.sentence,
        position=trigger.prefix.position,
        before=trigger.before,
        token=trigger.token,
        next_token=following,
        next_text=None if following is None else index.vocabulary[following],
        after=trigger.after,
        patterns=patterns,
    )


def _value(value: MemoryValue) -> ValueView:
    def tokens(found: tuple[TokenNumber, ...]) -> list[TokenView]:
        return [TokenView(token=one.token, text=one.text, number=one.number) for one in found]

    return ValueView(
        reading=value.reading,
        max_p=value.max_p,
        entropy=value.entropy,
        norm=value.norm,
        agrees=value.agrees,
        target=value.target,
        target_text=value.target_text,
        target_rank=value.target_rank,
        promotes=tokens(value.promotes),
        demotes=tokens(value.demotes),
        key=tokens(value.key),
    )
