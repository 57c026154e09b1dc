"""Memories that several paraphrases of one question have in common: what they know rather than how they are worded."""

from __future__ import annotations

from collections.abc import Sequence
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
    attributions = [attributions] if isinstance(attributions, Attribution) else list(attributions)
    if not all(isinstance(one, Attribution) for one in attributions):
        raise SettingError("what prompts have in common is found from attributions; make them with silence_each")
    if not attributions:
        raise SettingError("no attributions were given; make one for each paraphrase")
    for name, value in (("threshold", threshold), ("share", share)):
        if not 0 < check_number(value, name) <= 1:
            raise SettingError(f"{name} is {value}; it must be above 0 and at most 1")
    if len({attribution.method for attribution in attributions}) > 1:
        raise SettingError("exact and integrated attributions cannot be compared; use one method for all prompts")
    counts: dict[MemoryId, int] = {}
    for attribution in attributions:
        bar = threshold * max(attribution.effects.values(), default=0.0)
        for memory, effect in attribution.effects.items():
            if effect > 0 and effect >= bar:
                counts[memory] = counts.get(memory, 0) + 1
    found = [
        CommonMemory(memory, count, sum(one.effects.get(memory, 0.0) for one in attributions) / len(attributions))
        for memory, count in counts.items()
        if count >= share * len(attributions)
    ]
    return sorted(found, key=lambda one: (-one.prompts, -one.effect, one.memory))
