"""What follows a memory's triggers, and whether it is what the memory's value promotes: "fires on X, promotes Y".

A next token is typical if it follows at least three of the triggers and more often than its share of all tokens of the
corpus allows; the cut is Benjamini and Hochberg's over all memories and all tokens, at the same rate as patterns.
Values are read from values.parquet where it is there; without it nothing is said about what is promoted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import duckdb
import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from memlens.index.reader import Index
from memlens.patterns.background import GROUNDED
from memlens.patterns.significance import binomial_tail, q_values, upper_share
from memlens.patterns.trigger_rows import TriggerRows

PROMOTED = 3  # tokens of a value that are named
_LOOKED_AT = 10  # tokens of a value that a typical next token is looked for in


@dataclass(frozen=True)
class Following:
    """Tokens after the triggers of one memory."""

    typical: tuple[tuple[int, int], ...] = ()  # token, triggers it follows; the most frequent first
    promoted: tuple[int, ...] = ()  # the value's top tokens
    agrees: bool | None = None  # is a typical next token among the value's top tokens? None: cannot be said


def what_follows(index: Index, triggers: TriggerRows, rate: float) -> list[Following]:
    """For each row of TriggerRows."""
    typical = _typical(index, triggers, rate)
    promoted = dict(_promoted(index)) if index.has("values") else {}
    found = []
    names = zip(triggers.layer.tolist(), triggers.memory.tolist(), strict=True)
    for own, name in zip(typical, names, strict=True):
        tokens = promoted.get(name, ())
        agrees = any(token in tokens for token, _ in own) if own and tokens else None
        found.append(Following(tuple(own), tuple(tokens[:PROMOTED]), agrees))
    return found


def _typical(index: Index, triggers: TriggerRows, rate: float) -> list[list[tuple[int, int]]]:
    counts = _token_counts(index)
    memory, rank = np.nonzero(triggers.following >= 0)
    pairs, times = np.unique(
        memory.astype(np.int64) << 32 | triggers.following[memory, rank].astype(np.int64), return_counts=True
    )
    kept = times >= GROUNDED
    pairs, times = pairs[kept], times[kept]
    owner, token = pairs >> 32, pairs & 0xFFFFFFFF
    shares = upper_share(counts[token], int(counts.sum()))
    followed = (triggers.following >= 0).sum(1)
    q = q_values(binomial_tail(times, followed[owner], shares), max(len(counts) * len(followed), len(times)))
    found: list[list[tuple[int, int]]] = [[] for _ in followed]
    for m, t, k in zip(owner[q <= rate].tolist(), token[q <= rate].tolist(), times[q <= rate].tolist(), strict=True):
        found[m].append((t, k))
    return [sorted(own, key=lambda pair: (-pair[1], pair[0])) for own in found]


def _token_counts(index: Index) -> NDArray[np.int64]:
    """How often each token is in the corpus."""
    query = "SELECT token, count(*) AS times FROM (SELECT unnest(tokens) AS token FROM read_parquet($1)) GROUP BY token"
    with closing(duckdb.connect(config={"threads": 1})) as database:
        rows = database.execute(query, [str(index.path("corpus"))]).fetchnumpy()
    tokens = np.asarray(rows["token"], np.int64)
    counts = np.zeros(max(int(index.manifest["model"]["vocabulary"]), int(tokens.max(initial=-1)) + 1), np.int64)
    counts[tokens] = np.asarray(rows["times"], np.int64)
    return counts


def _promoted(index: Index) -> Iterator[tuple[tuple[int, int], tuple[int, ...]]]:
    with pq.ParquetFile(index.path("values")) as file:
        for batch in file.iter_batches(4096, columns=["layer", "memory", "tokens"]):
            for row in batch.to_pylist():
                yield (row["layer"], row["memory"]), tuple((row["tokens"] or ())[:_LOOKED_AT])
