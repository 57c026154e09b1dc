"""Memories that are all but the same, as cards: by their triggers, and by the tokens that their values promote.

Which are alike is decided in patterns/duplicates; here they are only chosen and put into words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.patterns.duplicates import TOKENS, DuplicateGroup, duplicate_groups, token_sets, trigger_sets
from memlens.report.galleries import Example, example_of, triggers_of
from memlens.report.text import token

ALIKE_TRIGGERS, ALIKE_TOKENS = 0.5, 0.8  # least Jaccard index: of 25 triggers 17 are equal, of 10 tokens 9
_SHOWN, _NAMES, _EXAMPLES = 6, 12, 3


@dataclass(frozen=True)
class DuplicateCard:
    memories: list[str]  # the first few
    count: int
    layers: int
    least: float
    examples: list[Example]  # triggers that the first two share
    tokens: list[str]  # that the first promotes


@dataclass(frozen=True)
class DuplicateGallery:
    """Groups of one kind: how many there are, and the largest."""

    groups: int
    memories: int
    cards: list[DuplicateCard]


def same_triggers(index: Index) -> DuplicateGallery:
    groups = duplicate_groups(trigger_sets(index), ALIKE_TRIGGERS)
    shown = groups[:_SHOWN]
    triggers = triggers_of(index, [memory for group in shown for memory in group.memories[:2]])
    cards = []
    for group in shown:
        one, other = group.memories[:2]
        theirs = {trigger.prefix for trigger in triggers[other]}
        shared = [trigger for trigger in triggers[one] if trigger.prefix in theirs][:_EXAMPLES]
        cards.append(_card(group, [example_of(index, trigger, None) for trigger in shared], []))
    return _gallery(groups, cards)


def same_values(index: Index) -> DuplicateGallery | None:
    """None where the index has no values."""
    if not index.has("values"):
        return None
    groups = duplicate_groups(token_sets(index), ALIKE_TOKENS)
    cards = [_card(group, [], _promoted(index, group.memories[0])) for group in groups[:_SHOWN]]
    return _gallery(groups, cards)


def _promoted(index: Index, memory: MemoryId) -> list[str]:
    query = "SELECT tokens FROM {values} WHERE layer = $1 AND memory = $2"
    (row,) = index.sql(query, [memory.layer, memory.memory])
    return [token(index.vocabulary[number]) for number in row["tokens"][:TOKENS]]


def _card(group: DuplicateGroup, examples: list[Example], tokens: list[str]) -> DuplicateCard:
    names = [str(memory) for memory in group.memories[:_NAMES]]
    layers = len({memory.layer for memory in group.memories})
    return DuplicateCard(names, len(group.memories), layers, group.least, examples, tokens)


def _gallery(groups: Sequence[DuplicateGroup], cards: list[DuplicateCard]) -> DuplicateGallery:
    return DuplicateGallery(len(groups), sum(len(group.memories) for group in groups), cards)
