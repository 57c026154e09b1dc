"""Silencing: the finding that a model needs one memory for one prediction, measured by running it without that memory.

1. Take memories whose value promotes the token that follows most of their triggers, those with the largest share first.
2. Take of each the strongest trigger that this token follows in the corpus and that is read as the same tokens again.
3. Run the model on it with and without the memory. The one without which the token loses most, as a factor, is told.
"""

from dataclasses import dataclass
from typing import Any

from memlens.memory import MemoryId
from memlens.models.memory_model import MemoryModel
from memlens.reports.findings import Insight, Material
from memlens.text import visible
from memlens.tracer.attribution import silence_each

_CANDIDATES = 60  # memories that are silenced, each on one prompt
_PROMOTED = 10  # first tokens of a value that may be the one that follows
_LEAST = 5  # triggers that the token follows
_LIKELY = 0.05  # a token less likely than this is no prediction
_LONGEST = 120  # characters of a prompt that a person pastes


@dataclass(frozen=True)
class SilencedMemory:
    """A memory, a prompt that triggers it, and p of its token with and without it."""

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
    """The memory without which its token loses most."""
    tried = [_silence(material, model, row) for row in _candidates(material)]
    likely = [trial for trial in tried if trial is not None and trial.p >= _LIKELY]
    if not likely:
        return None
    best = max(likely, key=lambda trial: trial.factor)
    token = f"'{visible(best.token)}'"
    lines = (
        f"  {visible(best.prompt)}",
        f"p of {token} is {best.p:.3f} there; with {best.memory} set to 0 it is {best.p_without:.3f}",
        f"{token} follows {best.follows} of its {best.triggers} strongest triggers; of {len(likely)} memories like it, "
        "each silenced on one prompt, this one matters most",
    )
    words = [best.prompt, "--token", best.token, "--set", f"{best.memory}=0"]
    title = f"Without {best.memory} alone, {token} is {best.factor:.1f} times less likely"
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
            continue  # it would be read as other tokens: a token may end within a word
        seen = silence_each(model, prompt, [memory], token=row["token"])
        token = index.vocabulary[row["token"]]
        without = seen.p - seen.effects[memory]
        return SilencedMemory(memory, prompt, token, row["follows"], row["triggers"], seen.p, without)
    return None
