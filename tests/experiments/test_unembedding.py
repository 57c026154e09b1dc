"""Tops of r, y and o through sums of scores are those of the model's own scores."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import arrays

import memlens
from memlens.errors import ModelError
from memlens.experiments.layer_look import Unembedding, ValueReading, find_top_
from memlens.models.memory_model import MemoryModel
from memlens.testing import FAMILIES, tiny_model, tiny_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "fixture"


def states(model: MemoryModel) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    r, y = (torch.randn(300, model.width, generator=generator) for _ in range(2))
    y[100:200] *= 1e-3
    y[200:250] = -r[200:250] + y[200:250] * 1e-3  # what is left is small
    return r, y, r + y


def compare(model: MemoryModel, unembedding: Unembedding, reading: str | None = None) -> None:
    r, y, o = states(model)
    final = model.lens.state_logits(o).argmax(1).numpy().astype(np.int32)[::-1].copy()
    tops = unembedding.layer(1, r, y, o, final, last=False)
    for state, found in ((r, tops.residual), (o, tops.output)):
        assert found.tolist() == model.lens.state_logits(state).argmax(1).tolist()
    assert tops.ffn.tolist() == model.lens.addition_scores(y, 1, reading).argmax(1).tolist()
    p = model.lens.probabilities(model.lens.state_logits(r)).numpy()[np.arange(300), final]
    np.testing.assert_allclose(tops.final.p, p, rtol=1e-4)
    scores = model.lens.state_logits(r).numpy()
    assert tops.final.rank.tolist() == (1 + (scores > scores[np.arange(300), final][:, None]).sum(1)).tolist()


@pytest.mark.parametrize("family", [*FAMILIES, "adaptive softmax"])
def test_scores_of_o_are_sums_but_of_an_adaptive_softmax_and_tops_are_exact(family: str) -> None:
    adds_up = family in FAMILIES
    model = memlens.load(tiny_model(family), tokenizer=tiny_tokenizer()) if adds_up else memlens.load(str(GOLDEN))
    unembedding = Unembedding(model.lens)
    compare(model, unembedding)
    assert unembedding._adds_up == adds_up
    raw = Unembedding(model.lens, values=ValueReading("raw"))  # a raw y and a normed o do not add up
    compare(model, raw, "raw")
    assert not raw._adds_up


def test_a_coarse_dtype_is_read_directly() -> None:
    model = memlens.load(tiny_model("llama").to(torch.bfloat16), tokenizer=tiny_tokenizer(), dtype="bfloat16")
    unembedding = Unembedding(model.lens)
    r, y, o = states(model)
    output = unembedding.layer(0, r, y, o, np.zeros(300, np.int32), last=False).output
    assert output.tolist() == model.lens.state_logits(o).argmax(1).tolist()
    assert not unembedding._adds_up


@settings(max_examples=50, deadline=None)
@given(arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 700)), elements=st.sampled_from([-1.0, 0, 2, 3])))
def test_of_equal_scores_the_lowest_token_is_the_top(scores: np.ndarray) -> None:
    tokens = np.empty(len(scores), np.int32)
    find_top_(scores, 0, len(scores), tokens)
    assert tokens.tolist() == scores.argmax(1).tolist()


def test_scores_that_are_not_finite_are_refused() -> None:
    model = memlens.load(tiny_model("gpt2"), tokenizer=tiny_tokenizer())
    with pytest.raises(ModelError, match="NaN or infinite"):
        Unembedding(model.lens).top(torch.full((3, model.width), torch.nan))
