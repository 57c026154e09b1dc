"""The parts of a logit add up to the model's own logit, in every family."""

import pytest
import torch

import memlens
from family_list import sweep_others
from memlens.models.decompose import LogitDecomposition, PositionStates, record_positions
from memlens.models.memory_model import MemoryModel
from memlens.testing import FAMILIES, tiny_model, tiny_tokenizer

TOKENS = torch.tensor([[5, 17, 80, 3, 44, 9], [60, 2, 33, 71, 12, 90]])
ROWS = torch.tensor([2, 5, 6, 10])


def run(family: str) -> tuple[MemoryModel, PositionStates, torch.Tensor, torch.Tensor]:
    """Return a model, its recording, the most likely tokens and the logits before the cap, [n, vocabulary]."""
    model = memlens.load(tiny_model(family), tokenizer=tiny_tokenizer())
    own = model.logits(TOKENS).flatten(0, 1)[ROWS]
    if model.lens.soft_cap is not None:
        own = torch.atanh(own / model.lens.soft_cap) * model.lens.soft_cap
    return model, record_positions(model, TOKENS, ROWS), own.argmax(1), own


@pytest.mark.parametrize("family", sweep_others(FAMILIES))
def test_parts_sum_to_the_models_logit_and_memories_and_biases_to_their_block(family: str) -> None:
    model, positions, tokens, own = run(family)
    if model.lens.soft_cap is not None:  # near the cap a capped logit is imprecise, so use another token
        tokens = own.abs().argmin(1)
    accounting = LogitDecomposition(model)
    account = accounting.logit_parts(positions, tokens)
    assert torch.allclose(account.logit, own[torch.arange(len(ROWS)), tokens], rtol=1e-4, atol=1e-4)
    assert account.attention.abs().min() > 0 and account.ffn.abs().min() > 0
    direction = accounting.direction(tokens, positions.o[2])
    for layer in range(3):
        used = positions.used(layer)
        summed = accounting.memories(layer, used, direction).sum(1) + accounting.block_bias(layer, used, direction)
        assert torch.allclose(summed, account.ffn[layer], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "phi"])
def test_relative_parts_sum_to_the_logit_minus_the_mean_logit(family: str) -> None:
    model, positions, tokens, _ = run(family)
    logits = model.lens.state_logits(positions.o[2])
    expected = logits[torch.arange(len(ROWS)), tokens] - logits.mean(1)
    account = LogitDecomposition(model).logit_parts(positions, tokens, relative=True)
    assert torch.allclose(account.logit, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", sweep_others(FAMILIES))
def test_selected_positions_match_a_full_recording(family: str) -> None:
    model = run(family)[0]
    positions = record_positions(model, TOKENS, ROWS, layers=[0, 2])
    with model.record() as recording:
        model.run_body(TOKENS)
    assert sorted(positions.coefficients) == [0, 2]
    for layer in range(3):
        for name in ("r", "y", "o"):
            whole = getattr(recording, name)[layer].flatten(0, 1)
            assert torch.equal(getattr(positions, name)[layer], whole[ROWS])
    assert torch.equal(positions.coefficients[2], recording.coefficients[2].flatten(0, 1)[ROWS])
    assert recording.embedding is not None
    assert torch.equal(positions.embedding, recording.embedding.flatten(0, 1)[ROWS])
