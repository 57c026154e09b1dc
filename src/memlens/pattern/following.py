"""Next tokens that recur after the triggers of a memory.

 1. The next token is treated as a feature of its prefix (see features). It is typical of a memory if it follows at
    least three triggers, and more often than random prefixes explain (see shallow).
 2. A typical token is a pattern if the last tokens of the triggers do not explain it: replace every trigger by TIMES
    prefixes of other documents with the same last token. p = P(X >= k) with X ~ Binomial(t, (s + 1) / (n + 1)), for
    k of t triggers and s of n different swapped prefixes that the token follows. One cutoff for all memories controls
    the false discovery rate.
 3. A memory agrees with its value if one of its typical tokens is among the value's first PROMOTED tokens.

Patterns are scored on held-out triggers like endings (score).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow.parquet as pq

from memlens.index.reader import Index
from memlens.pattern.features import key_shares
from memlens.pattern.score import same_last_tokens
from memlens.pattern.shallow import Candidate, Texts
from memlens.pattern.topics import LastTokens, effective_size
from memlens.pattern.words import TriggerRows
from memlens.stats import binomial_tail, q_values

PROMOTED = 10  # number of top tokens of a value to compare with typical next tokens


@dataclass(frozen=True)
class FollowingTokens:
    """Tokens that follow the triggers of one memory, and those that its value promotes."""

    typical: tuple[tuple[int, int], ...] = ()  # (token, number of triggers before it), most frequent first
    promoted: tuple[int, ...] = ()  # first tokens of the value

    @property
    def agrees(self) -> bool | None:
        """Whether a typical next token is among the value's first tokens; None without either."""
        if not (self.typical and self.promoted):
            return None
        return any(token in self.promoted for token, _ in self.typical)

    @classmethod
    def of(cls, typical: Sequence[Candidate], promoted: tuple[int, ...]) -> FollowingTokens:
        counted = sorted((-candidate.size, candidate.token) for candidate in typical)
        return cls(tuple((token, -size) for size, token in counted), promoted)


def drop_explained(
    typical: Sequence[Sequence[Candidate]],
    triggers: TriggerRows,
    texts: Texts,
    tokens: LastTokens,
    seed: int,
    rate: float,
) -> list[list[Candidate]]:
    """Return the next tokens of each memory that the last tokens of its triggers do not explain."""
    keys = np.array([candidate.key for own in typical for candidate in own], np.int64)
    sizes = np.array([candidate.size for own in typical for candidate in own], np.int64)
    owner = np.repeat(np.arange(len(typical)), [len(own) for own in typical])
    offsets = np.searchsorted(owner, np.arange(len(typical) + 1)).astype(np.int64)
    swapped = same_last_tokens(triggers.rows, tokens, seed)
    shares = key_shares(swapped, keys, offsets, texts.prefixes, texts.spelled)
    drawn = np.array([effective_size(swapped[m]) if typical[m] else 0.0 for m in range(len(typical))])[owner]
    p = binomial_tail(sizes, triggers.filled[owner], (shares * drawn + 1) / (drawn + 1))
    kept = iter((q_values(p, len(p)) <= rate).tolist())
    return [[candidate for candidate in own if next(kept)] for own in typical]


def read_promoted(index: Index) -> dict[tuple[int, int], tuple[int, ...]]:
    """Return the first tokens of every value by (layer, memory), or an empty dict without values."""
    return dict(_promoted_tokens(index)) if index.has("values") else {}


def _promoted_tokens(index: Index) -> Iterator[tuple[tuple[int, int], tuple[int, ...]]]:
    with pq.ParquetFile(index.path("values")) as file:
        for batch in file.iter_batches(4096, columns=["layer", "memory", "tokens"]):
            for row in batch.to_pylist():
                yield (row["layer"], row["memory"]), tuple((row["tokens"] or ())[:PROMOTED])
