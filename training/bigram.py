"""An interpolated Kneser-Ney bigram model, the baseline for perplexity."""

import numpy as np
from data import BOS_ID, Text


class Bigram:
    """Absolute discounting that backs off to the number of distinct tokens that precede a token."""

    def __init__(self, text: Text, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        keys, counts = np.unique(self.pairs(text), return_counts=True)
        self.keys, self.counts = keys, counts
        before, after = keys // vocabulary, keys % vocabulary
        self.discount = self.estimate(counts)
        self.total = np.bincount(before, weights=counts, minlength=vocabulary)
        self.followers = np.bincount(before, minlength=vocabulary)
        # The continuation probability is also discounted and backs off to the uniform distribution.
        preceded = np.bincount(after, minlength=vocabulary)
        discount = self.estimate(preceded)
        spare = discount * np.count_nonzero(preceded) / preceded.sum()
        self.continuation = np.maximum(preceded - discount, 0) / preceded.sum() + spare / vocabulary

    @staticmethod
    def estimate(counts: np.ndarray) -> float:
        """Estimate the discount from the numbers of counts that are 1 and 2."""
        ones, twos = np.count_nonzero(counts == 1), np.count_nonzero(counts == 2)
        return ones / (ones + 2 * twos) if ones else 0.5

    def pairs(self, text: Text) -> np.ndarray:
        """Return the pairs of adjacent tokens, and of BOS and first tokens of sentences, as single numbers."""
        tokens = text.tokens.astype(np.int64)
        inside = np.ones(len(tokens), dtype=bool)
        inside[text.sentence_starts[text.article_starts[:-1]]] = (
            False  # the first token of an article has no predecessor
        )
        neighbors = np.roll(tokens, 1)[inside] * self.vocabulary + tokens[inside]
        return np.concatenate([neighbors, BOS_ID * self.vocabulary + tokens[text.sentence_starts[:-1]]])

    def log_probability(self, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """Return ln P(after | before) for arrays of tokens."""
        key = before.astype(np.int64) * self.vocabulary + after
        place = np.minimum(np.searchsorted(self.keys, key), len(self.keys) - 1)
        count = np.where(self.keys[place] == key, self.counts[place], 0)
        total = np.maximum(self.total[before], 1)
        # A token that never precedes another backs off completely.
        spare = np.where(self.total[before] > 0, self.discount * self.followers[before] / total, 1.0)
        return np.log(np.maximum(count - self.discount, 0) / total + spare * self.continuation[after])
