"""Rules that assign roles to memories, with a bound on the false discovery rate.

    dead             no prefix of the corpus activates the memory
    token            at most 3 last tokens cover 90% of its triggers, and it is not an n-gram memory (Voita et al. 2023)
    n-gram           at most 3 two-token endings cover 90%, and the second-to-last token matters     (Voita et al. 2023)
    positional       position explains at least a quarter of the entropy of being active             (Voita et al. 2023)
    entropy          the value is among the longest tenth of its layer and lies in directions that the unembedding
                     hardly reads                                                                   (Stolfo et al. 2024)
    token-frequency  the scores of the value follow the log frequency of tokens, |r| >= 0.5         (Stolfo et al. 2024)
    prediction       the scores of the value have heavy tails and positive skew                     (Gurnee et al. 2024)
    suppression      the scores of the value have heavy tails and negative skew                     (Gurnee et al. 2024)
    partition        the scores have no heavy tails but a larger variance than random directions    (Gurnee et al. 2024)
    enrichment       gated blocks: cosine of value and input weights >= 0.5                 (Gerstner and Schütze 2025)
    depletion        gated blocks: cosine of value and input weights <= -0.5                (Gerstner and Schütze 2025)

Every rule except the first has a null hypothesis: the triggers are random prefixes of the corpus, the activation
frequency does not depend on position (positions.py), or the value has a random direction. A memory has a role if it
meets the threshold in the rule and its null hypothesis is rejected. The false discovery rate holds over all memories
that are tested for the role. The rate is controlled by the method of Benjamini and Hochberg if the null distribution is
known. For heavy tails, the rate is estimated with values in random directions. The ideas are from the cited papers. The
thresholds were chosen for memlens.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlens.stats import binomial_tail, decoy_q_values, q_values, upper_share

FEWEST = 10  # minimum number of triggers for the token and n-gram roles
COVERED, TOKENS = 0.9, 3
LONGEST = 0.9  # a value is long if its norm is at least this quantile of the norms in its layer
FREQUENCY, ALONG = 0.5, 0.5
EXPLAINED = 0.25  # minimum share of the entropy of being active that position explains
Numbers = Mapping[str, NDArray[Any]]


def p_of_cosine(cosine: NDArray[Any], d: int) -> NDArray[np.float64]:
    """Return the p-value of |cosine| between a vector and a random direction in d dimensions."""
    return p_of_part(np.asarray(cosine, np.float64) ** 2, 1, d)


def p_of_part(part: NDArray[Any], directions: int, d: int) -> NDArray[np.float64]:
    """Return the p-value of `part`, the share of a vector's squared length in some of d dimensions.

    The null hypothesis is a random direction. `directions` is the number of these dimensions.
    """
    from scipy.special import betainc

    if d <= directions:  # the share in all dimensions is always 1
        return np.ones(len(part))
    p: NDArray[np.float64] = betainc((d - directions) / 2, directions / 2, np.clip(1 - part, 0, 1))
    return p


def p_of_spread(spread: NDArray[Any], eigenvalues: NDArray[Any]) -> NDArray[np.float64]:
    """Return the p-value [n] of v G v >= spread for a random direction v, where G has these eigenvalues [d].

    This is P(sum of (eigenvalue - spread) z^2 >= 0) for normal z, computed with the saddlepoint approximation of
    Lugannani and Rice (https://doi.org/10.2307/1426607). The relative error of the approximation is a few percent, even
    far in the tail.
    """
    from scipy.special import ndtr

    w = np.asarray(eigenvalues, np.float64)[None] - np.asarray(spread, np.float64)[:, None]  # [n, d]
    possible = (w.max(1) > 0) & (w.min(1) < 0)
    p_values = np.where(w.max(1) > 0, 1.0, 0.0)
    w = w[possible]
    low, high = 0.5 / w.min(1), 0.5 / w.max(1)
    for _ in range(60):  # bisection: the slope of the cumulant generating function increases with t
        t = (low + high) / 2
        rises = (w / (1 - 2 * w * t[:, None])).sum(1) > 0
        low, high = np.where(rises, low, t), np.where(rises, t, high)
    factors = 1 - 2 * w * t[:, None]
    r = np.sign(t) * np.sqrt(np.maximum(np.log(factors).sum(1), 1e-300))
    u = t * np.sqrt((2 * (w / factors) ** 2).sum(1))
    with np.errstate(divide="ignore", invalid="ignore"):
        p = ndtr(-(r + np.log(u / r) / r))
    p_values[possible] = np.where(np.abs(r) < 1e-4, 0.5, p)  # the formula is not defined at the mean
    return p_values


def p_of_endings(numbers: Numbers, tokens: int, prefixes: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the p-values of the triggers' most common last token, and of their most common last two tokens.

    Both p-values are corrected for the selection of the most common ending. `tokens` is the number of distinct tokens
    in the corpus, any of which could be the last or second-to-last token. `prefixes` is the number of prefixes that
    could be triggers.
    """
    t, share = numbers["triggers"], upper_share(numbers["token_count"], prefixes)
    token = np.where(t > 0, binomial_tail(numbers["token_triggers"], t, share), 1.0)
    with_token = numbers["pair_token_triggers"]
    given = np.minimum((numbers["pair_count"] + 1) / (numbers["pair_token_count"] + 1), 1.0)
    pair = np.where(with_token > 0, binomial_tail(numbers["pair_triggers"], np.maximum(with_token, 1), given), 1.0)
    return np.minimum(token * tokens, 1.0), np.minimum(pair * tokens * numbers["last_tokens"], 1.0)


def assign(
    numbers: Numbers, p: Numbers, decoys: Numbers, rate: float
) -> tuple[dict[str, NDArray[np.bool_]], dict[str, NDArray[Any]]]:
    """Return a mask [n] of the memories with each role, and the q-values [n] of each hypothesis.

    Columns of `numbers` and `p` have one number per memory. Columns of `decoys` have one number per random direction.
    """
    alive = ~numbers["dead"]
    q = {name: _among(alive, numbers[name], partial(decoy_q_values, decoys=column)) for name, column in decoys.items()}
    heavy = (q["kurtosis"] <= rate) & alive
    # the false discovery rate holds for the tested memories, so memories must be excluded before the test
    tested = {"weak": alive & numbers["is_long"], "variance": alive & ~heavy, "along": alive & numbers["gated"]}
    q |= {name: _among(tested.get(name, alive), column, lambda p: q_values(p, len(p))) for name, column in p.items()}
    is_significant = {name: (column <= rate) & alive for name, column in q.items()}
    enough = numbers["triggers"] >= FEWEST
    few_tokens = enough & (numbers["token_cover"] >= COVERED) & is_significant["token"]
    few_pairs = enough & (numbers["pair_cover"] >= COVERED) & is_significant["n-gram"]
    roles = {
        "dead": ~alive,
        "token": few_tokens & ~few_pairs,
        "n-gram": few_pairs,
        "positional": is_significant["position"] & (numbers["position"] >= EXPLAINED),
        "entropy": is_significant["weak"],
        "token-frequency": is_significant["frequency"] & (np.abs(numbers["frequency"]) >= FREQUENCY),
        "prediction": heavy & (numbers["skew"] > 0),
        "suppression": heavy & (numbers["skew"] < 0),
        "partition": is_significant["variance"],
        "enrichment": is_significant["along"] & (numbers["cos_in_out"] >= ALONG),
        "depletion": is_significant["along"] & (numbers["cos_in_out"] <= -ALONG),
    }
    return roles, q


def _among(tested: NDArray[np.bool_], numbers: NDArray[Any], q: Callable[[NDArray[Any]], Any]) -> NDArray[np.float64]:
    """Return the q-values of the tested memories, and 1 for all other memories."""
    column = np.ones(len(numbers))
    column[tested] = q(numbers[tested])
    return column
