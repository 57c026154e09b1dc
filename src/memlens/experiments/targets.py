"""Is the token that follows a prefix (part of) a stop word?

A token may be a piece of a word, so the whole word around it in the sentence is looked up where the text is known. A
language without a list here falls back on the most frequent tokens of the scanned corpus ("frequent").
This module knows texts and counts, no model.

Values beside the tokens that follow their top-1 triggers: what agreement, rank and Figure 6 count.

A memory without a top trigger, or whose top-1 trigger ends its sentence, has no target: it takes no part and is
counted. This module knows the values table, but no model.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from memlens.errors import SettingError
from memlens.experiments.prefixes import Prefixes, SampledSentence
from memlens.index.reader import Index
from memlens.stats import draw

FREQUENT = "frequent"
_MOST_FREQUENT = 100
_JOINS = "'’_"
_WORD = re.compile(r"\w+(?:['’]\w+)*")

_ENGLISH = """
a an the this that these those such each every either neither both all any some no none another other others same own
i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his himself she her hers herself
it its itself they them their theirs themselves one oneself who whom whose which what whatever whoever
am is are was were be been being do does did done doing have has had having can could may might must shall should will
would ought need
and or but nor so yet if then else than because since although though while whereas unless until whether as
of in on at by for from to into onto upon with within without about above across after against along among around before
behind below beneath beside besides between beyond during except inside near off out outside over past per through
throughout toward towards under up down via
not only also too very just even still again ever never always often once here there where when why how now more most
less least much many few little several enough rather quite almost already however therefore thus hence further
don't doesn't didn't isn't aren't wasn't weren't hasn't haven't hadn't can't couldn't won't wouldn't shouldn't it's
i'm i've i'll you're we're they're that's there's let's he's she's s t d ll m re ve
"""
_LISTS = {"en": frozenset(_ENGLISH.split())}


def languages() -> tuple[str, ...]:
    """Languages that have a list of their own."""
    return tuple(sorted(_LISTS))


def check_stop_words(words: str) -> None:
    """Refuse what is neither a language with a list nor "frequent"."""
    if words != FREQUENT and words not in _LISTS:
        raise SettingError(
            f"there is no list of stop words for '{words}'; choose {', '.join(languages())} or {FREQUENT}"
        )


def stop_targets(index: Index, prefixes: Prefixes, words: str = "en") -> list[bool | None]:
    """For each prefix: is its target a stop word? None where the sentence ends with it."""
    check_stop_words(words)
    targets = prefixes.targets.tolist()
    if words == FREQUENT:
        frequent = frequent_tokens(index)
        return [None if target < 0 else target in frequent for target in targets]
    found: list[bool | None] = []
    for target, row, position in zip(targets, prefixes.rows.tolist(), prefixes.positions.tolist(), strict=True):
        if target < 0:
            found.append(None)
            continue
        word = word_at(prefixes.sentences[row], position + 1) or index.vocabulary[target].strip()
        found.append(word.lower().replace("’", "'") in _LISTS[words])
    return found


def frequent_tokens(index: Index, count: int = _MOST_FREQUENT) -> Collection[int]:
    """The most frequent tokens of the scanned corpus; of equally frequent ones the lower ids."""
    rows = index.sql(
        "SELECT token FROM (SELECT unnest(tokens) AS token FROM {corpus}) GROUP BY token "
        "ORDER BY count(*) DESC, token LIMIT $1",
        [count],
    )
    return {row["token"] for row in rows}


def word_at(sentence: SampledSentence, position: int) -> str | None:
    """The whole word that a token is a piece of; None where the text is not known or the token is not in a word."""
    if sentence.text is None:
        return None
    begin = sentence.ends[position - 1] if position else 0
    piece = sentence.text[begin : sentence.ends[position]]
    begin += len(piece) - len(piece.lstrip())
    first = begin
    while first > 0 and (sentence.text[first - 1].isalnum() or sentence.text[first - 1] in _JOINS):
        first -= 1
    for match in _WORD.finditer(sentence.text, first):
        if match.end() > begin:
            return match[0] if match.start() <= begin else None
    return None


@dataclass(frozen=True, eq=False)
class Targets:
    """Memories of one layer that have a target, and how many have none."""

    layer: int
    memories: NDArray[Any]  # [n] ids
    max_p: NDArray[Any]  # [n]
    argmax: NDArray[Any]  # [n] token
    target: NDArray[Any]  # [n] token
    rank: NDArray[Any]  # [n] of the target in p(v), from 1
    no_trigger: int
    no_next: int

    @property
    def agrees(self) -> NDArray[np.bool_]:
        """Is the value's top token the target? [n]"""
        agrees: NDArray[np.bool_] = self.argmax == self.target
        return agrees


_COLUMNS = ("memory", "max_p", "argmax", "target", "target_rank")


def read_targets(
    index: Index, layer: int, sample: int | None = None, random: np.random.Generator | None = None
) -> Targets:
    """All memories of a layer, or `sample` of those that have a target."""
    table = index.table("values", [*_COLUMNS, "trigger_p"], [("layer", "=", layer)])
    memory, max_p, argmax, target, rank = (table.column(name).fill_null(-1).to_numpy() for name in _COLUMNS)
    triggers = pc.list_value_length(table.column("trigger_p")).to_numpy()
    chosen = np.flatnonzero(target >= 0)
    if random is not None:
        chosen = draw(chosen, sample, random)
    return Targets(
        layer,
        memory[chosen],
        max_p[chosen],
        argmax[chosen],
        target[chosen],
        rank[chosen],
        no_trigger=int((triggers == 0).sum()),
        no_next=int(((triggers > 0) & (target < 0)).sum()),
    )
