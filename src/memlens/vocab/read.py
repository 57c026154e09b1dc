"""What values.parquet and keys.parquet say, for people: one memory's value, and the index as a whole.

Reads the index alone: no model, no torch. This module prints nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memlens.index.reader import Index
from memlens.memory import MemoryId


@dataclass(frozen=True)
class TokenNumber:
    """A token with its text and its number: a probability, or the score of a key."""

    token: int
    text: str
    number: float


@dataclass(frozen=True)
class MemoryValue:
    """What one value promotes and pushes down, and which tokens its key matches on its own."""

    memory: MemoryId
    reading: str
    max_p: float
    entropy: float  # nats
    norm: float
    promotes: tuple[TokenNumber, ...]  # most probable first
    demotes: tuple[TokenNumber, ...]  # least probable first
    key: tuple[TokenNumber, ...]  # best match first; empty where the index has no keys table
    target: int | None  # the token after the top trigger; None where there is none
    target_text: str | None
    target_rank: int | None  # its place among all tokens, 1 is the top

    @property
    def agrees(self) -> bool | None:
        """Is the value's top token the one after the top trigger? None where nothing follows it."""
        return None if self.target is None else self.promotes[0].token == self.target


def read_value(index: Index, memory: str | MemoryId) -> MemoryValue | None:
    """Of one memory; None where the index has no values yet."""
    name = index.check(memory)
    if not index.has("values"):
        return None
    where = "WHERE layer = $1 AND memory = $2"
    row = index.sql(f"SELECT * FROM {{values}} {where}", [name.layer, name.memory])[0]
    keys = index.sql(f"SELECT * FROM {{keys}} {where}", [name.layer, name.memory]) if index.has("keys") else []
    return MemoryValue(
        name,
        index.manifest.values.reading,
        row["max_p"],
        row["entropy"],
        row["norm"],
        _tokens(index, row["tokens"], row["p"]),
        _tokens(index, row["bottom_tokens"], row["bottom_p"]),
        _tokens(index, keys[0]["tokens"], keys[0]["scores"]) if keys else (),
        row["target"],
        None if row["target"] is None else index.vocabulary[row["target"]],
        row["target_rank"],
    )


def summarize_values(index: Index, count: int = 10) -> dict[str, Any]:
    """The values in a few numbers, ready for JSON, with the `count` most confident of them."""
    whole = index.sql(
        """SELECT count(*) AS memories, count(target) AS with_target, count(*) FILTER (argmax = target) AS agree,
                  median(max_p) AS median_max_p FROM {values}"""
    )[0]
    best = index.sql(
        """SELECT layer, memory, argmax, max_p, argmax = target AS agrees FROM {values}
           ORDER BY max_p DESC, layer, memory LIMIT $1""",
        [count],
    )
    noted = index.manifest.values
    return {
        "index": str(index.folder),
        "model": index.manifest.model.name,
        "reading": noted.reading,
        "top": noted.top,
        **whole,
        "most_confident": [
            {
                "name": str(MemoryId(row["layer"], row["memory"])),
                "layer": row["layer"],
                "memory": row["memory"],
                "token": row["argmax"],
                "text": index.vocabulary[row["argmax"]],
                "p": row["max_p"],
                "agrees": row["agrees"],
            }
            for row in best
        ],
    }


def _tokens(index: Index, tokens: Sequence[int], numbers: Sequence[float]) -> tuple[TokenNumber, ...]:
    return tuple(
        TokenNumber(token, index.vocabulary[token], number) for token, number in zip(tokens, numbers, strict=True)
    )
