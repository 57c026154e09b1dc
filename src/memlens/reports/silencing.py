"""Silencing: find a memory on which a prediction depends, by running the model without it.

1. Select memories whose value promotes a token that follows many of their triggers, largest share first.
2. For each memory, take the strongest trigger that is followed by this token and that the tokenizer splits into the
   same tokens again.
3. Run the model on this trigger with and without the memory. Report the memory with the largest ratio of the two
   probabilities of the token.
"""

from dataclasses import dataclass
from typing import Any

from memlens.memory import MemoryId
from memlens.models.memory_model import MemoryModel
from memlens.reports.findings import Insight, Material
from memlens.text import visible
from memlens.tracer.attribution import silence_each

_CANDIDATES = 60  # number of memories to silence, each on one prompt
_PROMOTED = 10  # number of top tokens of a value to compare with next tokens
_LEAST = 5  # minimum number of triggers that are followed by the token
_LIKELY = 0.05  # minimum probability of the token
_LONGEST = 120  # maximum length of a prompt in characters


@dataclass(frozen=True)
class SilencedMemory:
    """A memory, a prompt that triggers it, and the probability of its token with and without it."""

    memory: MemoryId
    prompt: str
    token: str
    follows: int  # number of triggers that are followed by the token
    triggers: int  # number of all triggers that have a next token
    p: float
    p_without: float

    @property
    def factor(self) -> float:
        return self.p / max(self.p_without, 1e-9)


def most_needed(material: Material, model: MemoryModel) -> Insight | None:
    """Return a finding about the memory with the largest effect on its token."""
    trials = [_silence(material, model, row) for row in _candidates(material)]
    likely = [trial for trial in trials if trial is not None and trial.p >= _LIKELY]
    if not likely:
        return None
    best = max(likely, key=lambda trial: trial.factor)
    token = f"'{visible(best.token)}'"
    lines = (
        f"  {visible(best.prompt)}",
        f"p of {token} is {best.p:.3f}; with {best.memory} set to 0 it is {best.p_without:.3f}",
        f"{token} follows {best.follows} of its {best.triggers} strongest triggers; its effect is the largest of "
        f"{len(likely)} memories, each silenced on one prompt",
    )
    words = [best.prompt, "--token", best.token, "--set", f"{best.memory}=0"]
    title = f"Without {best.memory}, {token} is {best.factor:.1f} times less likely"
    return Insight("silencing", title, lines, material.command("trace", *words))


def _candidates(material: Material) -> list[dict[str, Any]]:
    """Return memories and tokens that the value promotes and that follow many triggers."""
    index = material.index
    if not index.has("values"):
        return []
    rows = index.sql(
        """WITH followed AS (
               SELECT layer, memory, t.next_token AS token, count(*) AS follows,
                      sum(count(*)) OVER (PARTITION BY layer, memory) AS triggers
               FROM {triggers} t JOIN {values} v USING (layer, memory)
               WHERE t."end" = 'top' AND t.next_token IS NOT NULL GROUP BY layer, memory, t.next_token
           )
           SELECT layer, memory, token, follows, triggers FROM followed JOIN {values} v USING (layer, memory)
           WHERE list_contains(v.tokens[1:$1], token) AND follows >= $2
           ORDER BY follows / triggers DESC, layer, memory, token""",
        [_PROMOTED, _LEAST],
    )
    return ([row for row in rows if material.is_word(row["token"])] or rows)[:_CANDIDATES]


def _silence(material: Material, model: MemoryModel, row: dict[str, Any]) -> SilencedMemory | None:
    """Silence a candidate on its strongest suitable trigger, or return None if it has no suitable trigger."""
    index = material.index
    memory = index.names.name(row["layer"], row["memory"])
    for trigger in index.triggers(memory):
        prompt = trigger.text
        if trigger.next_token != row["token"] or len(prompt) > _LONGEST or prompt.startswith("-"):
            continue
        tokens = model.tokenizer.encode([prompt])[0].ids
        if len(tokens) != trigger.prefix.position + 1:
            continue  # a trigger may end inside a word, and its text then has other tokens
        attribution = silence_each(model, prompt, [memory], token=row["token"])
        token = index.vocabulary[row["token"]]
        p_without = attribution.p - attribution.effects[memory]
        return SilencedMemory(memory, prompt, token, row["follows"], row["triggers"], attribution.p, p_without)
    return None
