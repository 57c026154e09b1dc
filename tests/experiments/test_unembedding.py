"""Top tokens and probabilities of r, y and o are those of the model's lens."""

from pathlib import Path

import numpy as np
import pytest
import torch

import memlens
from memlens.errors import ModelError
from memlens.experiments.prefix_pass import Unembedding, ValueReading
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
    tops = unembedding.layer(1, r, y, o, final, is_last=False)
    for state, found in ((r, tops["residual_token"]), (o, tops["output_token"])):
        assert found.tolist() == model.lens.state_logits(state).argmax(1).tolist()
    assert tops["ffn_token"].tolist() == model.lens.addition_scores(y, 1, reading).argmax(1).tolist()
    p = model.lens.probabilities(model.lens.state_logits(r)).numpy()[np.arange(300), final]
    np.testing.assert_allclose(tops["p_final"], p, rtol=1e-4)
    scores = model.lens.state_logits(r).numpy()
    assert tops["rank_final"].tolist() == (1 + (scores > scores[np.arange(300), final][:, None]).sum(1)).tolist()


@pytest.mark.parametrize("family", ["gpt2", "llama", "adaptive softmax"])
def test_tops_of_a_layer_are_those_of_the_lens(family: str) -> None:
    is_tiny = family in FAMILIES
    model = memlens.load(tiny_model(family), tokenizer=tiny_tokenizer()) if is_tiny else memlens.load(str(GOLDEN))
    compare(model, Unembedding(model.lens))
    compare(model, Unembedding(model.lens, ValueReading("raw")), "raw")


def test_of_equal_scores_the_lowest_token_is_the_top() -> None:
    model = memlens.load(tiny_model("gpt2"), tokenizer=tiny_tokenizer())
    state = torch.zeros(1, model.width)
    scores = model.lens.state_logits(state)[0]
    assert Unembedding(model.lens).top(state)[0] == np.flatnonzero(scores == scores.max())[0]


def test_scores_that_are_not_finite_are_refused() -> None:
    model = memlens.load(tiny_model("gpt2"), tokenizer=tiny_tokenizer())
    with pytest.raises(ModelError, match="NaN or infinite"):
        Unembedding(model.lens).top(torch.full((3, model.width), torch.nan))
