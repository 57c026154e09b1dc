"""The rules by which a memory has a role: numbers in, roles out, with false discoveries controlled.

    dead             no prefix of the corpus triggers it
    token            at most 3 last tokens make up 90% of its triggers                       (Voita et al. 2023)
    n-gram           so do at most 3 endings of two tokens, and the token before matters     (Voita et al. 2023)
    positional       position explains at least a quarter of when it fires                     (Voita et al. 2023)
    entropy          among the longest tenth of its layer's values, and far more of it than of a random direction
                     lies in the directions that the unembedding hardly reads                (Stolfo et al. 2024)
    token-frequency  the scores of its value follow how frequent tokens are, r at least 0.5  (Stolfo et al. 2024)
    prediction       the scores of its value have heavy tails, the heavier one above         (Gurnee et al. 2024)
    suppression      the same, the heavier one below                                         (Gurnee et al. 2024)
    partition        no heavy tails, but scores that spread far more than a random direction's do (Gurnee et al. 2024)
    enrichment       gated blocks: its value points along the weights it reads by, cosine at least 0.5
    depletion        the same, against them                                       (Gerstner and Schütze 2025)

Each rule but the first has a null hypothesis: triggers drawn from the corpus, a rate of firing that does not depend on
the position (positions.py), or a value in a random direction. A
memory has the role if the size that the rule names is reached and the hypothesis is rejected at a rate of false
discoveries over all memories that may have the role: by Benjamini and Hochberg where the chance is known, else, for
heavy tails, by as many values in random directions as there are memories. Sizes are memlens' choice, the ideas
are the authors'.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlens.stats import binomial_tail, decoy_q_values, q_values, upper_share

FEWEST = 10  # triggers of a memory that has a role by them
COVERED, TOKENS = 0.9, 3
LONGEST = 0.9  # quantile of the norms of a layer
FREQUENCY, ALONG = 0.5, 0.5
EXPLAINED = 0.25  # of the entropy of firing, by position
Numbers = Mapping[str, NDArray[Any]]


def p_of_cosine(cosine: NDArray[Any], d: int) -> NDArray[np.float64]:
    """p-value of a cosine at least so large in size between a vector and a random direction of d dimensions."""
    return p_of_part(np.asarray(cosine, np.float64) ** 2, 1, d)


def p_of_part(part: NDArray[Any], directions: int, d: int) -> NDArray[np.float64]:
    """p-value of so large a part of a random direction's squared length in some of d dimensions (beta distribution)."""
    from scipy.special import betainc

    if d <= directions:  # they are all there is, so that any part is as expected
        return np.ones(len(part))
    p: NDArray[np.float64] = betainc((d - directions) / 2, directions / 2, np.clip(1 - part, 0, 1))
    return p


def p_of_spread(spread: NDArray[Any], eigenvalues: NDArray[Any]) -> NDArray[np.float64]:
    """p-value of v G v at least so large [n] for a random direction v, where G has these eigenvalues [d].

    It is P(sum of (eigenvalue - spread) z^2 >= 0) for normal z, by the saddlepoint of Lugannani and Rice
    (https://doi.org/10.2307/1426607), which is exact to a few percent far into the tail.
    """
    from scipy.special import ndtr

    w = np.asarray(eigenvalues, np.float64)[None] - np.asarray(spread, np.float64)[:, None]  # [n, d]
    possible = (w.max(1) > 0) & (w.min(1) < 0)
    p_values = np.where(w.max(1) > 0, 1.0, 0.0)
    w = w[possible]
    low, high = 0.5 / w.min(1), 0.5 / w.max(1)
    for _ in range(60):  # the point where the slope of the cumulants' function is 0, which grows between the two
        t = (low + high) / 2
        rises = (w / (1 - 2 * w * t[:, None])).sum(1) > 0
        low, high = np.where(rises, low, t), np.where(rises, t, high)
    factors = 1 - 2 * w * t[:, None]
    r = np.sign(t) * np.sqrt(np.maximum(np.log(factors).sum(1), 1e-300))
    u = t * np.sqrt((2 * (w / factors) ** 2).sum(1))
    with np.errstate(divide="ignore", invalid="ignore"):
        p = ndtr(-(r + np.log(u / r) / r))
    p_values[possible] = np.where(np.abs(r) < 1e-4, 0.5, p)  # at its mean, where the formula has a gap
    return p_values


def p_of_endings(numbers: Numbers, tokens: int, prefixes: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """p-values of the commonest last token of a memory's triggers, and of the commonest pair among triggers with it.

    `tokens`: different ones of the corpus, any of which might have been the commonest, or have come before any of the
    memory's last tokens; `prefixes`: those that might have been triggers.
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
    """Decide which of n memories have each role; returns one mask per role, and the q of each hypothesis.

    `numbers` and `p` are columns over memories, `decoys` numbers of the same name of values in random directions.
    """
    alive = ~numbers["dead"]
    q = {name: _among(alive, numbers[name], partial(decoy_q_values, decoys=column)) for name, column in decoys.items()}
    heavy = (q["kurtosis"] <= rate) & alive
    # a rate holds for the memories that were asked about, not for a part that is cut out of them afterwards
    asked = {"weak": alive & numbers["is_long"], "variance": alive & ~heavy, "along": alive & numbers["gated"]}
    q |= {name: _among(asked.get(name, alive), column, _q_of_p) for name, column in p.items()}
    sure = {name: (column <= rate) & alive for name, column in q.items()}
    enough = numbers["triggers"] >= FEWEST
    few_tokens = enough & (numbers["token_cover"] >= COVERED) & sure["token"]
    few_pairs = enough & (numbers["pair_cover"] >= COVERED) & sure["n-gram"]
    roles = {
        "dead": ~alive,
        "token": few_tokens & ~few_pairs,
        "n-gram": few_pairs,
        "positional": sure["position"] & (numbers["position"] >= EXPLAINED),
        "entropy": sure["weak"],
        "token-frequency": sure["frequency"] & (np.abs(numbers["frequency"]) >= FREQUENCY),
        "prediction": heavy & (numbers["skew"] > 0),
        "suppression": heavy & (numbers["skew"] < 0),
        "partition": sure["variance"],
        "enrichment": sure["along"] & (numbers["cos_in_out"] >= ALONG),
        "depletion": sure["along"] & (numbers["cos_in_out"] <= -ALONG),
    }
    return roles, q


def _q_of_p(p: NDArray[Any]) -> NDArray[np.float64]:
    return q_values(p, len(p))


def _among(asked: NDArray[np.bool_], numbers: NDArray[Any], q: Callable[[NDArray[Any]], Any]) -> NDArray[np.float64]:
    """q-values over the memories that a hypothesis is asked about; 1 for the others."""
    q_values = np.ones(len(numbers))
    q_values[asked] = q(numbers[asked])
    return q_values
