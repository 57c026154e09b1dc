"""Segments: their size is a function of the plan, and their states merge to the state of one process."""

import numpy as np
import pytest

import memlens
from memlens.corpus.sentences import ScanSentence
from memlens.models.memory_model import MemoryModel
from memlens.scanner.scan import Scanner, SegmentScan, bos_to_feed, candidate_range, plan_batches, segment_size
from memlens.scanner.state import ScanState
from memlens.settings import ScanSettings
from memlens.testing import tiny_model, tiny_tokenizer

SETTINGS = ScanSettings(top=3, batch_tokens=64, threads=1)


@pytest.fixture(scope="module")
def model() -> MemoryModel:
    return memlens.load(tiny_model("llama"), tokenizer=tiny_tokenizer(), prove=False)


def test_segments_of_any_partition_merge_to_the_same_state(model: MemoryModel) -> None:
    random = np.random.default_rng(0)
    sentences = [ScanSentence(i, random.integers(0, 97, random.integers(2, 20)), i % 2) for i in range(60)]
    batches = plan_batches(0, sentences, SETTINGS, bos_to_feed(model, SETTINGS))
    whole = ScanState.start(model, (0, 2), SETTINGS)
    Scanner(model, SETTINGS, whole).scan(batches)
    merged = ScanState.start(model, (0, 2), SETTINGS)
    for segment in (batches[5:], batches[:2], batches[2:5]):
        state = ScanState.start(model, (0, 2), SETTINGS)
        state.restore_(SegmentScan(SETTINGS, (0, 2))(model, segment))
        merged.merge(state)
    expected = whole.arrays()
    for name, array in merged.arrays().items():
        assert np.array_equal(array, expected[name]), name


def test_a_repeated_sentence_has_no_prefix_of_bos_alone() -> None:
    settings = ScanSettings(bos_prefix=True, dedup="sentence")
    assert candidate_range(5, 0, settings, bos=1)[0] == -1
    assert candidate_range(5, 5, settings, bos=1)[0] == 5


@pytest.mark.parametrize(("batches", "least", "most"), [(1, 1, 1), (100, 12, 50), (10**9, 1000, 10**5)])
def test_a_short_corpus_has_smaller_segments(model: MemoryModel, batches: int, least: int, most: int) -> None:
    state = ScanState.start(model, (0,), SETTINGS)
    assert least <= segment_size(model, SETTINGS, state, batches) <= most
    on_gpus = segment_size(model, SETTINGS, state, 10**9, True)  # a GPU computes more batches in the same time
    assert on_gpus >= segment_size(model, SETTINGS, state, 10**9)
