"""How surprising a shared feature is, and how many surprises to believe.

A feature that a random prefix of the corpus has with probability f is shared by at least k of a memory's t triggers
with probability P(X >= k), X ~ Binomial(t, f). Where f differs from trigger to trigger (longer prefixes contain more),
f is the mean: the binomial with the mean has a heavier upper tail than the true sum, so that the error is on the safe
side. f itself is known from a sample; its upper 95% bound is used, again on the safe side.

Which p-values to believe is decided once for all memories (Benjamini and Hochberg): of everything that is reported, an
expected share of at most `rate` is chance. Hypotheses that were not met at all count, with p = 1.
Knows numbers only.
"""

from __future__ import annotations

from math import lgamma
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlens.compiled import compiled

_UPPER = 1.645  # standard deviations of a one-sided 95% bound


def upper_share(counts: NDArray[Any], total: int) -> NDArray[np.float64]:
    """Upper 95% bound of a share that was met `counts` times among `total`; above 0 also for what was never met."""
    counts = np.asarray(counts, np.float64)
    return np.minimum((counts + 1 + _UPPER * np.sqrt(counts + 1)) / (total + 1), 1.0)


@compiled
def _tail(k: int, t: int, f: float) -> float:
    if k <= 0 or f >= 1.0:
        return 1.0
    log_f, log_rest = np.log(f), np.log1p(-f)
    total = 0.0
    for j in range(k, t + 1):
        ways = lgamma(t + 1) - lgamma(j + 1) - lgamma(t - j + 1)
        total += np.exp(ways + j * log_f + (t - j) * log_rest)
    return min(total, 1.0)


@compiled
def _tails(k: NDArray[Any], t: NDArray[Any], f: NDArray[Any]) -> NDArray[np.float64]:
    found = np.empty(len(k))
    for i in range(len(k)):
        found[i] = _tail(k[i], t[i], f[i])
    return found


def binomial_tail(k: Any, t: Any, f: Any) -> NDArray[np.float64]:
    """P(X >= k) for X ~ Binomial(t, f), element by element."""
    k, t, f = np.broadcast_arrays(np.asarray(k, np.int64), np.asarray(t, np.int64), np.asarray(f, np.float64))
    found: NDArray[np.float64] = _tails(k.ravel(), t.ravel(), f.ravel())
    return found.reshape(k.shape)


def q_values(p: NDArray[np.float64], hypotheses: int) -> NDArray[np.float64]:
    """For each p-value the lowest rate of false discoveries at which it is still believed; unlisted ones have p = 1."""
    order = np.argsort(p, kind="stable")
    scaled = p[order] * hypotheses / np.arange(1, len(p) + 1)
    lowest = np.minimum.accumulate(scaled[::-1])[::-1]
    found = np.empty(len(p))
    found[order] = np.minimum(lowest, 1.0)
    return found
