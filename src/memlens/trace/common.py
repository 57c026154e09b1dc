"""Memories that several paraphrases of one question have in common: what they know rather than how they are worded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memlens.errors import SettingError
from memlens.memory import MemoryId
from memlens.trace.attribution import Attribution
from memlens.trace.prompt import check_number


@dataclass(frozen=True)
class CommonMemory:
    """A memory that counts in many of the prompts."""

    memory: MemoryId
    prompts: int  # in how many it counts
    effect: float  # mean over all prompts


def in_common(
    attributions: Attribution | Sequence[Attribution], *, threshold: float = 0.2, share: float = 0.7
) -> list[CommonMemory]:
    """Memories that count in at least `share` of the prompts, those in most prompts first, then by effect.

        memlens.in_common([memlens.integrate(model, prompt, token=" Paris") for prompt in paraphrases])

    A memory counts in a prompt if its effect there is at least `threshold` of the largest of that prompt. Only memories
    that support the answer count; a prompt in which none does has none.
    """
    attributions = _listed(attributions)
    for name, value in (("threshold", threshold), ("share", share)):
        if not 0 < check_number(value, name) <= 1:
            raise SettingError(f"{name} is {value}; it must be above 0 and at most 1")
    _refuse_unlike(attributions)
    counts: dict[MemoryId, int] = {}
    for attribution in attributions:
        bar = threshold * max(attribution.effects.values(), default=0.0)
        for memory, effect in attribution.effects.items():
            if effect > 0 and effect >= bar:
                counts[memory] = counts.get(memory, 0) + 1
    found = [
        CommonMemory(memory, count, sum(one.effects.get(memory, 0.0) for one in attributions) / len(attributions))
        for memory, count in counts.items()
        if count / len(attributions) >= share  # as a product 0.28 * 25 would be a little more than 7
    ]
    return sorted(found, key=lambda one: (-one.prompts, -one.effect, one.memory))


def _listed(attributions: Attribution | Sequence[Attribution]) -> list[Attribution]:
    if isinstance(attributions, Attribution):
        return [attributions]
    listed = list(attributions) if isinstance(attributions, Iterable) else [attributions]
    if not all(isinstance(one, Attribution) for one in listed):
        raise SettingError("what prompts have in common is found from attributions; make them with silence_each")
    if not listed:
        raise SettingError("no attributions were given; make one for each paraphrase")
    return listed


def _refuse_unlike(attributions: list[Attribution]) -> None:
    """Effects on other tokens, of other memories or measured in another way say nothing about each other."""
    first = attributions[0]
    for other in attributions[1:]:
        if other.method != first.method:
            raise SettingError("exact and integrated attributions cannot be compared; use one method for all prompts")
        if other.token.id != first.token.id:
            raise SettingError(
                f"one prompt was asked for {first.token.text!r}, another for {other.token.text!r}; give all one token="
            )
        if other.effects.keys() != first.effects.keys():
            raise SettingError("the attributions are of different memories; use the same layers or memories for all")
