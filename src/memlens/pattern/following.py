"""Next tokens that recur after the triggers of a memory.

 1. The next token is treated as a feature of its prefix (see features). A next token is typical of a memory if it
    follows at least three triggers, and follows triggers significantly more often than random prefixes (see shallow).
 2. A typical token is a pattern if the last tokens of the triggers do not explain it. To test this, replace every
    trigger by TIMES prefixes from other documents with the same last token. If the next token follows k of t triggers
    and s of n different swapped prefixes, p = P(X >= k) with X ~ Binomial(t, (s + 1) / (n + 1)). One cutoff for all
    memories controls the false discovery rate.
 3. A memory agrees with its value if one of its typical tokens is among the PROMOTED top tokens of the value.

Patterns of next tokens are scored on held-out triggers in the same way as endings (score).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memlens.index.reader import Index
from memlens.pattern.features import key_shares
from memlens.pattern.matched import LastTokens, effective_size, same_last_tokens
from memlens.pattern.shallow import Candidate, Texts
from memlens.pattern.words import TriggerRows
from memlens.stats import binomial_tail, q_values

PROMOTED = 10  # number of top tokens of a value to compare with typical next tokens


@dataclass(frozen=True)
class FollowingTokens:
    """The tokens that typically follow the triggers of one memory, and the tokens that the memory's value promotes."""

    typical: tuple[tuple[int, int], ...] = ()  # (token, number of triggers that it follows), most frequent first
    promoted: tuple[int, ...] = ()  # top tokens of the value

    @property
    def agrees(self) -> bool | None:
        """Whether a typical next token is among the top tokens of the value. None if there are no tokens to compare."""
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
    keys = np.array([candidate.key for of_memory in typical for candidate in of_memory], np.int64)
    sizes = np.array([candidate.size for of_memory in typical for candidate in of_memory], np.int64)
    owner = np.repeat(np.arange(len(typical)), list(map(len, typical)))
    offsets = np.searchsorted(owner, np.arange(len(typical) + 1)).astype(np.int64)
    swapped = same_last_tokens(triggers.rows, tokens, seed)
    shares = key_shares(swapped, keys, offsets, texts.prefixes, texts.spelled)
    drawn = np.array([effective_size(swapped[m]) if typical[m] else 0.0 for m in range(len(typical))])[owner]
    p = binomial_tail(sizes, triggers.filled[owner], (shares * drawn + 1) / (drawn + 1))
    kept = iter((q_values(p, len(p)) <= rate).tolist())
    return [[candidate for candidate in of_memory if next(kept)] for of_memory in typical]


def read_promoted(index: Index) -> dict[tuple[int, int], tuple[int, ...]]:
    """Return the top tokens of every value by layer and memory, or {} if the index has no values table."""
    if not index.has("values"):
        return {}
    rows = index.stream(f"SELECT layer, memory, tokens[:{PROMOTED}] AS tokens FROM {{values}}")
    return {(row["layer"], row["memory"]): tuple(row["tokens"]) for row in rows}
