"""Which memories promote (or, at the bottom, push down) a token? Works from the index alone.

A token is found by its text in vocabulary.parquet, so no tokenizer is needed; " Paris" and "Paris" are two tokens. Only
the tokens that values.parquet lists for a value can be found. This module prints nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memlens.errors import SettingError, UnknownName
from memlens.index.reader import Index
from memlens.memory import MemoryId

if TYPE_CHECKING:
    from memlens.models.tokenizer import Tokenizer

MODES = ("token", "substring")
_ENDS = {"top": ("tokens", "p"), "bottom": ("bottom_tokens", "bottom_p")}


@dataclass(frozen=True)
class FoundToken:
    """One of the tokens searched for, in a memory's list."""

    token: int
    text: str
    rank: int  # place in the list, from 0
    p: float


@dataclass(frozen=True)
class Promotion:
    """A memory whose value lists at least one of the tokens."""

    memory: MemoryId
    p: float  # of all tokens found, added up
    found: tuple[FoundToken, ...]  # by rank

    @property
    def rank(self) -> int:
        """The best place among the tokens found, from 0."""
        return self.found[0].rank


def search_values(
    index: Index,
    query: str | Sequence[str],
    mode: str = "token",
    *,
    end: str = "top",
    limit: int | None = 20,
    tokenizer: Tokenizer | None = None,
) -> list[Promotion]:
    """Memories whose value promotes the query, strongest first.

    mode "token": each text must be exactly one token; of several, memories that list more of them come first.
    mode "substring": every token whose text contains one of the texts. Then by the probability of what was found (at
    the bottom end by best place), then layer and memory. A text that is not one token is refused with its split: just
    as the model splits it where its `tokenizer` is given, else into the fewest tokens of the vocabulary.
    """
    if mode not in MODES:
        raise UnknownName(f"values can be searched by {' or '.join(MODES)}, not by '{mode}'")
    if end not in _ENDS:
        raise UnknownName(f"a value has the ends 'top' and 'bottom', not '{end}'")
    if limit is not None and limit < 1:
        raise SettingError(f"--limit is {limit}; it must be 1 or more")
    texts = [query] if isinstance(query, str) else list(query)
    if not texts or "" in texts:
        raise SettingError("the query is empty; give the text of a token, like ' Paris'")
    index.path("values")  # says which command to run where it is missing, before anything about tokens
    tokens = _tokens_containing(index, texts) if mode == "substring" else _tokens_reading(index, texts, tokenizer)
    found = _find(index, sorted(tokens), end)
    counted = mode == "token" and len(texts) > 1
    found.sort(key=lambda one: _order(one, end, counted))
    return found[:limit]


def _order(one: Promotion, end: str, counted: bool) -> tuple[float, ...]:
    texts = len({token.text for token in one.found}) if counted else 0
    by_place = (float(one.rank), one.p) if end == "bottom" else (-one.p, float(one.rank))
    return (-texts, *by_place, one.memory.layer, one.memory.memory)


def _find(index: Index, tokens: list[int], end: str) -> list[Promotion]:
    names, numbers = _ENDS[end]
    rows = index.sql(
        f"""
        SELECT layer, memory, list(token ORDER BY place) AS tokens, list(place ORDER BY place) AS places,
               list(p ORDER BY place) AS p
        FROM (SELECT layer, memory, unnest({names}) AS token, unnest({numbers}) AS p,
                     unnest(range(len({names}))) AS place FROM {{values}})
        WHERE token IN (SELECT unnest($1::INTEGER[])) GROUP BY layer, memory
        """,
        [tokens],
    )
    return [_promotion(index, row["layer"], row["memory"], row["tokens"], row["places"], row["p"]) for row in rows]


def _promotion(
    index: Index, layer: int, memory: int, tokens: list[int], places: list[int], p: list[float]
) -> Promotion:
    found = tuple(
        FoundToken(token, index.vocabulary[token], place, one)
        for token, place, one in zip(tokens, places, p, strict=True)
    )
    return Promotion(MemoryId(layer, memory), sum(p), found)


def _tokens_containing(index: Index, texts: list[str]) -> set[int]:
    found: set[int] = set()
    for text in texts:
        matching = [token for token, own in enumerate(index.vocabulary) if text in own]
        if not matching:
            raise UnknownName(f"no token of this model contains {text!r}; try a shorter text")
        found.update(matching)
    return found


def _tokens_reading(index: Index, texts: list[str], tokenizer: Tokenizer | None) -> set[int]:
    """Every token that reads exactly one of the texts."""
    readings: dict[str, list[int]] = {}
    for token, text in enumerate(index.vocabulary):
        readings.setdefault(text, []).append(token)
    for text in texts:
        if text not in readings:
            raise UnknownName(_not_one_token(text, set(readings) - {""}, tokenizer))
    return {token for text in texts for token in readings[text]}


def _not_one_token(text: str, readings: set[str], tokenizer: Tokenizer | None) -> str:
    advice = "name one of its tokens, or search for a substring"
    if tokenizer is not None:
        pieces: list[str] | None = [tokenizer.token_text(token) for token in tokenizer.encode([text])[0].ids]
        words = "but"
    else:
        pieces, words = _fewest_pieces(text, readings), "but can be written as"
    if not pieces:
        return f"{text!r} is not one token of this model, nor made of several; {advice}"
    return f"{text!r} is not one token of this model {words} {' + '.join(repr(piece) for piece in pieces)}; {advice}"


def _fewest_pieces(text: str, readings: set[str]) -> list[str] | None:
    """The text as the fewest tokens, longer ones first; a tokenizer may split it otherwise."""
    longest = max((len(reading) for reading in readings), default=0)
    best: list[list[str] | None] = [None] * len(text) + [[]]
    for first in range(len(text) - 1, -1, -1):
        for last in range(min(first + longest, len(text)), first, -1):
            rest = best[last]
            if rest is not None and text[first:last] in readings:
                current = best[first]
                if current is None or len(rest) + 1 < len(current):
                    best[first] = [text[first:last], *rest]
    return best[0]
