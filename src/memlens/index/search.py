"""Which memories have triggers with a given text in them, or a pattern that is described with given words.

Sentences are filtered first and joined with the triggers afterwards: the corpus is read once, and a text that is
rare costs next to nothing. Patterns are what `memlens patterns` wrote. What values promote is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass

from memlens.errors import SettingError
from memlens.index.reader import Index, trigger_of
from memlens.memory import MemoryId, Trigger


@dataclass(frozen=True)
class MemoryMatch:
    """One end of a memory, some of whose triggers match."""

    memory: MemoryId
    end: str
    matches: int
    best: Trigger  # the matching trigger of lowest rank


@dataclass(frozen=True)
class TriggerSearch:
    """The best matches, and how many there are in all."""

    found: tuple[MemoryMatch, ...]
    total: int


# A prefix is the text up to the end of its last token; position -1 is BOS alone, which has no text.
_PREFIX = "left(hit.text, CASE WHEN t.position < 0 THEN 0 ELSE hit.ends[t.position + 1] END)"

_QUERY = """
WITH hit AS MATERIALIZED (
    SELECT sentence, text, ends FROM {{corpus}} WHERE contains({text}, {wanted})
), matching AS (
    SELECT t.layer, t.memory, t."end", t.rank,
           {{{{'rank': t.rank, 'coefficient': t.coefficient, 'sentence': t.sentence, 'position': t.position,
             'next_token': t.next_token}}}} AS trigger
    FROM {{triggers}} t JOIN hit ON t.sentence = hit.sentence
    WHERE {matches}({prefix}, {wanted})
)
SELECT layer, memory, "end", count(*) AS matches, min(rank) AS best_rank, arg_min(trigger, rank) AS best,
       count(*) OVER () AS total
FROM matching GROUP BY layer, memory, "end"
ORDER BY matches DESC, best_rank, layer, memory, "end" DESC
LIMIT $2
"""


def search_triggers(
    index: Index, text: str, *, ends: bool = False, ignore_case: bool = False, limit: int = 20
) -> TriggerSearch:
    """Memories by the number of their triggers whose prefix contains the text (or ends with it), then by best rank."""
    if not text:
        raise SettingError("the text to search for is empty; give at least one character")
    if limit < 1:
        raise SettingError(f"--limit is {limit}; it must be 1 or more")
    query = _QUERY.format(
        text="lower(text)" if ignore_case else "text",
        wanted="lower($1)" if ignore_case else "$1",
        matches="suffix" if ends else "contains",
        prefix=f"lower({_PREFIX})" if ignore_case else _PREFIX,
    )
    rows = index.sql(query, [text, limit])
    sentences = index.sentences(sorted({row["best"]["sentence"] for row in rows}))
    found = tuple(
        MemoryMatch(
            MemoryId(row["layer"], row["memory"]),
            row["end"],
            row["matches"],
            trigger_of(row["best"], sentences[row["best"]["sentence"]]),
        )
        for row in rows
    )
    return TriggerSearch(found, rows[0]["total"] if rows else 0)


@dataclass(frozen=True)
class PatternMatch:
    """A memory, some of whose patterns match, with the surest of these."""

    memory: MemoryId
    matches: int
    description: str
    kind: str
    confidence: float
    prefixes: int
    name: str  # the memory in one line


@dataclass(frozen=True)
class PatternSearch:
    """The best matches, and how many there are in all."""

    found: tuple[PatternMatch, ...]
    total: int


# A word is what stands between spaces, quotes, commas and colons: ends with "press" has three of them.
_WORDS = """regexp_extract_all(lower({text}), '[^\\s",:]+')"""

_PATTERNS = """
WITH wanted AS (SELECT {words_wanted} AS words),
matching AS (SELECT p.* FROM {{patterns}} p, wanted WHERE len(wanted.words) > 0 AND {matches}),
best AS (
    SELECT *, len(prefixes) AS size, count(*) OVER (PARTITION BY layer, memory) AS matches FROM matching
    QUALIFY row_number() OVER (PARTITION BY layer, memory ORDER BY confidence DESC, size DESC, pattern) = 1
)
SELECT best.layer, best.memory, best.matches, best.description, best.kind, best.confidence, best.size, names.name,
       count(*) OVER () AS total
FROM best LEFT JOIN {{names}} names ON names.layer = best.layer AND names.memory = best.memory
ORDER BY best.confidence DESC, best.size DESC, best.layer, best.memory LIMIT $2
"""


def search_patterns(index: Index, text: str, *, substring: bool = False, limit: int = 20) -> PatternSearch:
    """Memories that have a pattern whose description or name has every word of the text (or, within words, contains
    it); capitals do not matter. The surest patterns first."""
    if limit < 1:
        raise SettingError(f"--limit is {limit}; it must be 1 or more")
    said = "p.description || ' ' || p.pattern"
    whole_words = f"list_has_all({_WORDS.format(text=said)}, wanted.words)"
    query = _PATTERNS.format(
        words_wanted=_WORDS.format(text="$1"),
        matches=f"contains(lower({said}), lower($1))" if substring else whole_words,
    )
    rows = index.sql(query, [text, limit])
    if not rows and not text.replace('"', " ").replace(",", " ").replace(":", " ").strip():
        raise SettingError("the text to search for has no word in it; give at least one")
    found = tuple(
        PatternMatch(
            MemoryId(row["layer"], row["memory"]),
            row["matches"],
            row["description"],
            row["kind"],
            row["confidence"],
            row["size"],
            row["name"] or "",
        )
        for row in rows
    )
    return PatternSearch(found, rows[0]["total"] if rows else 0)
