"""Section 5 against the recorded outputs of the paper's released program, at the very positions it drew."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import memlens
from memlens.experiments.prefix_pass import Aggregate, look_at_prefixes
from memlens.experiments.prefixes import Prefixes
from memlens.vocab.table import compute_values

FIXTURE = Path(__file__).parent / "fixture"
Golden = tuple[Aggregate, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    """What memlens sees at the recorded positions, and the recorded rows."""
    model = memlens.load(str(FIXTURE))
    index = memlens.scan(
        model, FIXTURE / "ffninfo_valid.txt", out=tmp_path_factory.mktemp("golden") / "index", unit="line", top=1
    )
    compute_values(index, model, top=1)
    rows = pq.read_table(FIXTURE / "ffn_layer.parquet").to_pylist()
    with gzip.open(FIXTURE / "ffninfo_inputs.jsonl.gz", "rt", encoding="utf-8") as lines:
        sentences = [json.loads(line)["ids"] for line in lines]
    # the program's positions count the </s> in front, memlens' do not
    positions = [row["random_pos"] - 1 for row in rows]
    bos = index.manifest.model.bos
    assert bos == 2
    return look_at_prefixes(index, model, Prefixes.given(sentences, positions, bos)), rows


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("residual_token", "residual_argmax"),
        ("ffn_token", "ffn_argmax"),
        ("output_token", "layer_output_argmax"),
    ],
)
def test_tops_are_those_of_the_released_program(golden: Golden, ours: str, theirs: str) -> None:
    seen, rows = golden
    for layer, columns in seen.by_layer():
        assert columns[ours].tolist() == [row[theirs][layer] for row in rows]


def test_probability_and_rank_of_the_final_token_in_the_residual_are_the_same(golden: Golden) -> None:
    seen, rows = golden
    for layer, columns in seen.by_layer():
        expected = [row["residual_output_prob"][layer] for row in rows]
        np.testing.assert_allclose(columns["p_final"], expected, rtol=1e-4, atol=1e-7)
        assert (columns["rank_final"] - 1).tolist() == [row["residual_output_rank"][layer] for row in rows]


def test_the_same_memories_are_active(golden: Golden) -> None:
    seen, rows = golden
    for layer, columns in seen.by_layer():
        # the program counts the residual as well
        assert columns["active"].tolist() == [row["coeffs_l0"][layer] - 1 for row in rows]
