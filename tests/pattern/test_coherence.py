"""Pairs of swapped prefixes: words of a memory's own patterns are left out, and a prefix without a last token stays."""

import numpy as np

from memlens.pattern.matched import LastTokens, swap_prefixes
from memlens.pattern.topics import Coherence, ExcludedWords, VectorWords, WordVectors

WORDS, PREFIXES, LENGTH = 30, 60, 5


def made() -> tuple[VectorWords, LastTokens, WordVectors]:
    """Prefixes of random words in a document each; all end with token 0, but the first, which has no last token."""
    random = np.random.default_rng(3)
    vectors = random.normal(size=(WORDS, 8)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    numbers, ones = np.arange(WORDS), np.ones(WORDS, np.float32)
    own = WordVectors(numbers.astype(np.int32), numbers, vectors, ones, np.full(WORDS, 1 / WORDS))
    rows = np.concatenate([random.choice(WORDS, LENGTH, replace=False) for _ in range(PREFIXES)]).astype(np.int32)
    offsets = np.arange(0, PREFIXES * LENGTH + 1, LENGTH)
    words = VectorWords(rows, np.zeros(len(rows), np.bool_), offsets)
    half = PREFIXES // 2  # the second half are samples of token 0: a quarter for its mean, a quarter to swap for
    tokens, documents = np.zeros(PREFIXES, np.int32), np.arange(PREFIXES)
    tokens[0] = -1
    places = (np.zeros(1, np.int32), np.array([half, PREFIXES]), np.array([half + half // 2]))
    return words, LastTokens(tokens, documents, *places), own


def test_a_prefix_without_a_last_token_is_swapped_for_nothing() -> None:
    _, tokens, _ = made()
    swapped = swap_prefixes(np.array([[0, 1, -1]]), tokens, np.random.default_rng(0))
    assert swapped[0, 0] == swapped[0, 2] == -1 and tokens.middles[0] <= swapped[0, 1] < tokens.offsets[1]


def test_pairs_leave_out_the_words_of_the_memory_they_are_drawn_from() -> None:
    words, tokens, vectors = made()
    rows = np.full((2, 25), -1)
    rows[0, :1], rows[1, 1:] = 1, np.arange(2, 26)
    moments = []
    for left_out in (
        np.zeros(0, np.int32),
        np.arange(WORDS, dtype=np.int32),
    ):  # of the first memory, which has one trigger
        excluded = ExcludedWords(left_out, np.array([0, len(left_out), len(left_out)]), np.zeros(2, np.uint64))
        moments.append(Coherence.calibrate(rows, words, tokens, excluded, vectors, seed=0).variances)
    assert (moments[0] < 0.9).all()  # 1.0 is what stands there before a pair was seen
    np.testing.assert_allclose(moments[0], moments[1], rtol=0.1)
