"""A shuffled network has the entries of every weight matrix in another order, and gets its own back."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import memlens
from memlens.models.memory_model import MemoryModel
from memlens.models.shuffle import shuffled_weights, weight_matrices
from memlens.testing import tiny_model, tiny_tokenizer


@pytest.fixture(params=["gpt2", "llama", "opt", "mixtral"])
def model(request: pytest.FixtureRequest) -> Iterator[MemoryModel]:
    yield memlens.load(tiny_model(request.param), tokenizer=tiny_tokenizer())


def weights(model: MemoryModel) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.network.named_parameters()}


def test_matrices_are_permuted_and_everything_else_is_kept(model: MemoryModel) -> None:
    before, matrices = weights(model), weight_matrices(model).keys()
    with shuffled_weights(model, 3):
        after = weights(model)
    embeddings = {name for name in before if "emb" in name or "wte" in name or "wpe" in name or "lm_head" in name}
    assert matrices == {name for name, weight in before.items() if weight.dim() > 1} - embeddings
    for name, weight in before.items():
        parts = zip(weight, after[name], strict=True) if weight.dim() > 2 else [(weight, after[name])]
        for own, shuffled in parts:  # experts are shuffled one by one
            assert torch.equal(own, shuffled) == (name not in matrices)
            assert torch.equal(own.flatten().sort().values, shuffled.flatten().sort().values)


def test_every_bit_is_restored_also_after_an_error(model: MemoryModel) -> None:
    before = weights(model)
    with pytest.raises(KeyboardInterrupt), shuffled_weights(model, 3):
        raise KeyboardInterrupt
    assert all(torch.equal(before[name], weight) for name, weight in weights(model).items())


def test_a_seed_determines_the_order(model: MemoryModel) -> None:
    orders = []
    for seed in (1, 1, 2):
        with shuffled_weights(model, seed):
            orders.append(weights(model))
    name = next(iter(weight_matrices(model)))
    assert torch.equal(orders[0][name], orders[1][name]) and not torch.equal(orders[0][name], orders[2][name])


def test_memories_follow_the_weights(model: MemoryModel) -> None:
    """Keys, values and the network's own blocks use the same shuffled weights."""
    tokens = torch.tensor([[5, 3, 9, 1]])
    with shuffled_weights(model, 0), model.record() as recording:
        model.run_body(tokens)
        layer = model.layers[0]
        if len(layer.groups) == 1:
            bias = layer.groups[0].value_bias
            y = recording.coefficients[0] @ layer.values + (0 if bias is None else bias)
            torch.testing.assert_close(y, recording.y[0], rtol=1e-4, atol=1e-5)
