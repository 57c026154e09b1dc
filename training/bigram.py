"""The baseline a language model must beat: an interpolated Kneser-Ney bigram model on the same tokens."""

import numpy as np
from data import BOS_ID, Text


class Bigram:
    """Interpolated Kneser-Ney: absolute discounting, backing off to how many different tokens a token follows."""

    def __init__(self, text: Text, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        keys, counts = np.unique(self.pairs(text), return_counts=True)
        self.keys, self.counts = keys, counts
        before, after = keys // vocabulary, keys % vocabulary
        self.discount = self.estimate(counts)
        self.total = np.bincount(before, weights=counts, minlength=vocabulary)
        self.followers = np.bincount(before, minlength=vocabulary)
        # The continuation probability is discounted in turn and backs off to the uniform distribution.
        preceded = np.bincount(after, minlength=vocabulary)
        discount = self.estimate(preceded)
        spare = discount * np.count_nonzero(preceded) / preceded.sum()
        self.continuation = np.maximum(preceded - discount, 0) / preceded.sum() + spare / vocabulary

    @staticmethod
    def estimate(counts: np.ndarray) -> float:
        """The usual estimate of the discount from how many counts are one and how many two."""
        ones, twos = np.count_nonzero(counts == 1), np.count_nonzero(counts == 2)
        return ones / (ones + 2 * twos) if ones else 0.5

    def pairs(self, text: Text) -> np.ndarray:
        """Pairs of neighbours in an article, and of BOS and the first token of a sentence, as single numbers."""
        tokens = text.tokens.astype(np.int64)
        inside = np.ones(len(tokens), dtype=bool)
        inside[text.sentence_starts[text.article_starts[:-1]]] = False  # the article's first token has none before
        neighbours = np.roll(tokens, 1)[inside] * self.vocabulary + tokens[inside]
        return np.concatenate([neighbours, BOS_ID * self.vocabulary + tokens[text.sentence_starts[:-1]]])

    def log_probability(self, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """Natural logarithm of P(after | before), for arrays of tokens."""
        key = before.astype(np.int64) * self.vocabulary + after
        place = np.minimum(np.searchsorted(self.keys, key), len(self.keys) - 1)
        count = np.where(self.keys[place] == key, self.counts[place], 0)
        total = np.maximum(self.total[before], 1)
        # A token never seen in front of another backs off wholly.
        spare = np.where(self.total[before] > 0, self.discount * self.followers[before] / total, 1.0)
        return np.log(np.maximum(count - self.discount, 0) / total + spare * self.continuation[after])
