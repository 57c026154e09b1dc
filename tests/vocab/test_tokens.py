"""tokens.parquet: counts, norms, tokens that were hardly trained, and classes, against plain loops."""

from pathlib import Path

import numpy as np
import pytest

import memlens
from memlens.vocab.tokens import CLASSES, k_means, undertrained, whole_numbers


def test_counts_and_norms_are_those_of_corpus_and_embedding(tiny_gpt2: Path, tiny_text: Path, tmp_path: Path) -> None:
    index = memlens.scan(tiny_gpt2, tiny_text, out=tmp_path / "index", layers="0")
    rows = memlens.values(index).table("tokens").to_pylist()
    tokens = [token for row in index.table("corpus").to_pylist() for token in row["tokens"]]
    for row, vector in zip(rows, index.load_model().lens.embedding.numpy(), strict=True):
        assert row["count"] == tokens.count(row["token"])
        assert row["norm"] == pytest.approx(float(np.sqrt((vector**2).sum())), rel=1e-5)
        assert all((row[name] is None) == (row["count"] == 0) for name in CLASSES)


@pytest.mark.parametrize("how", ["pushed", "shrunk", "none"])
def test_tokens_that_were_hardly_trained_are_told_by_their_embeddings(how: str) -> None:
    random = np.random.default_rng(3)
    embedding = random.standard_normal((1000, 37)).astype(np.float32)
    counts = random.integers(10, 1000, 1000)
    counts[:200] = 0  # half of those that never occur were trained on other text
    if how == "pushed":
        embedding[:100] = 3 * random.standard_normal(37) + 0.2 * random.standard_normal((100, 37))
        counts[:5] = 13  # an occurrence or two does not train an embedding
    if how == "shrunk":
        embedding[:100] *= 0.1
    assert np.flatnonzero(undertrained(embedding, counts)).tolist() == ([] if how == "none" else list(range(100)))


def test_classes_are_planted_ones_and_do_not_depend_on_the_order_of_sums() -> None:
    random = np.random.default_rng(5)
    centres = random.standard_normal((12, 33))
    truth = np.repeat(np.arange(12), 20)
    vectors = whole_numbers((centres[truth] + 0.3 * random.standard_normal((240, 33))).astype(np.float32))
    found = k_means(vectors, 40)
    assert sum(len(set(truth[found == cluster])) > 1 for cluster in set(found)) <= 2
    turned = random.permutation(33)  # another order of additions: equal, since every sum is exact
    assert (found == k_means(vectors[:, turned], 40)).all()
