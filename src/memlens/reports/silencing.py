"""Silencing: a memory that one prediction depends on, measured by running the model without it.

1. Take memories whose value promotes the token that follows most of their triggers, largest share first.
2. For each, take the strongest trigger that this token follows and that tokenizes to the same tokens again.
3. Run the model on it with and without the memory. Report the memory with the largest factor between the two
   probabilities of the token.
"""

from dataclasses import dataclass
from typing import Any

from memlens.memory import MemoryId
from memlens.models.memory_model import MemoryModel
from memlens.reports.findings import Insight, Material
from memlens.text import visible
from memlens.tracer.attribution import silence_each

_CANDIDATES = 60  # memories to silence, each on one prompt
_PROMOTED = 10  # top tokens of a value to compare with next tokens
_LEAST = 5  # minimum number of triggers that the token follows
_LIKELY = 0.05  # minimum probability of the token
_LONGEST = 120  # maximum length of a prompt in characters


@dataclass(frozen=True)
class SilencedMemory:
    """A memory, a prompt that triggers it, and the probability of its token with and without it."""

    memory: MemoryId
    prompt: str
    token: str
    follows: int
    triggers: int
    p: float
    p_without: float

    @property
    def factor(self) -> float:
        return self.p / max(self.p_without, 1e-9)


def most_needed(material: Material, model: MemoryModel) -> Insight | None:
    """Return a finding about the memory with the largest effect on its token."""
    tried = [_silence(material, model, row) for row in _candidates(material)]
    likely = [trial for trial in tried if trial is not None and trial.p >= _LIKELY]
    if not likely:
        return None
    best = max(likely, key=lambda trial: trial.factor)
    token = f"'{visible(best.token)}'"
    lines = (
        f"  {visible(best.prompt)}",
        f"p of {token} is {best.p:.3f}; with {best.memory} set to 0 it is {best.p_without:.3f}",
        f"{token} follows {best.follows} of its {best.triggers} strongest triggers; largest effect of {len(likely)} "
        "memories, each silenced on one prompt",
    )
    words = [best.prompt, "--token", best.token, "--set", f"{best.memory}=0"]
    title = f"Without {best.memory}, {token} is {best.factor:.1f} times less likely"
    return Insight("silencing", title, lines, material.command("trace", *words))


def _candidates(material: Material) -> list[dict[str, Any]]:
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
    index = material.index
    memory = index.names.name(row["layer"], row["memory"])
    for trigger in index.triggers(memory):
        prompt = trigger.text
        if trigger.next_token != row["token"] or len(prompt) > _LONGEST or prompt.startswith("-"):
            continue
        read = model.tokenizer.encode([prompt])[0].ids
        if len(read) != trigger.prefix.position + 1:
            continue  # the prompt would have other tokens, because a token may end inside a word
        seen = silence_each(model, prompt, [memory], token=row["token"])
        token = index.vocabulary[row["token"]]
        without = seen.p - seen.effects[memory]
        return SilencedMemory(memory, prompt, token, row["follows"], row["triggers"], seen.p, without)
    return None
