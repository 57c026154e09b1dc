"""Batches contain every sentence of a window once, with little padding."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from memlens.corpus.sentences import Batch, cut_batches

Window = list[tuple[int, np.ndarray]]


def windows() -> st.SearchStrategy[Window]:
    sentences = st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=9), max_size=20)
    return sentences.map(lambda all_: [(7 + at, np.array(tokens)) for at, tokens in enumerate(all_)])


@given(windows(), st.integers(1, 60), st.none() | st.integers(0, 99))
def test_every_sentence_is_in_one_batch_within_the_limit_from_long_to_short_and_no_token_is_lost(window, limit, bos):
    rows, order, start = {}, [], int(bos is not None)
    for batch in cut_batches(window, limit, bos):
        assert batch.tokens.size <= limit or len(batch.sentences) == 1
        assert batch.tokens.shape == (len(batch.sentences), batch.lengths.max() + start)
        assert {batch.tokens.dtype, batch.sentences.dtype, batch.lengths.dtype} == {np.dtype(np.int64)}
        for row, sentence, length in zip(batch.tokens, batch.sentences.tolist(), batch.lengths.tolist(), strict=True):
            assert sentence not in rows and row[:start].tolist() == [bos][:start] and not row[start + length :].any()
            rows[sentence] = row[start : start + length].tolist()
            order.append((-length, sentence))
    assert rows == {sentence: tokens.tolist() for sentence, tokens in window} and order == sorted(order)


def test_a_batch_may_have_exactly_the_allowed_number_of_places() -> None:
    assert [len(batch.sentences) for batch in cut_batches([(0, np.ones(3)), (1, np.ones(3))], 6, None)] == [2]


@given(windows(), st.integers(1, 60), st.randoms(use_true_random=False))
def test_batches_do_not_depend_on_the_order_of_the_window(window: Window, limit: int, random: object) -> None:
    shuffled = list(window)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    batches, expected = cut_batches(shuffled, limit, 1), cut_batches(window, limit, 1)
    assert [batch.tokens.tolist() for batch in batches] == [batch.tokens.tolist() for batch in expected]
    assert [batch.sentences.tolist() for batch in batches] == [batch.sentences.tolist() for batch in expected]


def fill_share(batches: list[Batch]) -> float:
    """Return the share of places that hold a token or BOS instead of padding."""
    return sum(int(batch.lengths.sum()) + len(batch.lengths) for batch in batches) / sum(b.tokens.size for b in batches)


@pytest.mark.parametrize("limit", [2048, 8192, 16384])
def test_windows_of_realistic_sentences_need_little_padding(limit: int) -> None:
    lengths = np.random.default_rng(3).lognormal(mean=3.1, sigma=0.55, size=4096).astype(int) + 1
    window = [(at, np.ones(length, dtype=np.int64)) for at, length in enumerate(lengths)]
    batches = cut_batches(window, limit, bos=0)
    assert fill_share(batches) > 0.95
    # little padding must not mean tiny batches: on average, they have at least a fifth of the allowed places
    assert np.mean([batch.tokens.size for batch in batches]) > limit / 5
