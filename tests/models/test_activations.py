"""Activations in blocks: the numbers of the whole, the module as it was afterwards, gradients as ever."""

import copy
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from transformers.activations import ACT2FN

from memlens.models import activations
from memlens.models.activations import in_blocks, stepwise
from memlens.models.load import load
from memlens.testing import tiny_model, tiny_tokenizer
from memlens.vocab.kernels import use_threads

NAMES = ("gelu_new", "gelu_fast", "quick_gelu", "gelu_accurate", "relu2")


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(activations, "BLOCK", 64)


@pytest.mark.parametrize("name", NAMES)
def test_blocks_have_the_numbers_of_the_whole(name, small_blocks):
    module = ACT2FN[name]
    assert stepwise(torch.nn.Sequential(module)) == [module]
    given = torch.randn(7, 5, 33, generator=torch.Generator().manual_seed(0)) * 4
    with torch.no_grad():
        whole = module(given)
        with in_blocks([module]):
            blocks = module(given)
    torch.testing.assert_close(blocks, whole, rtol=1e-6, atol=1e-7)
    assert blocks.shape == given.shape and blocks.is_contiguous()
    assert "forward" not in vars(module)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_with_one_thread_blocks_are_the_whole_bit_for_bit(name, dtype, small_blocks):
    module = ACT2FN[name]
    given = (torch.randn(3, 7, 33, generator=torch.Generator().manual_seed(1)) * 4).to(dtype)
    with torch.no_grad(), use_threads(1):
        whole = module(given)
        with in_blocks([module]):
            assert torch.equal(module(given), whole)
    assert whole.numel() > 64 and whole.numel() % 64


def test_a_block_is_a_multiple_of_every_vectors_width():
    assert activations.BLOCK % 64 == 0  # two vectors of 512 bits with numbers of 16 bits


def test_only_large_inputs_without_gradients_are_cut(small_blocks):
    module, sizes = ACT2FN["gelu_new"], []
    plain = module.forward
    module.forward = lambda x: (sizes.append(x.numel()), plain(x))[1]  # as somebody else's change: left alone
    assert stepwise(torch.nn.Sequential(module)) == []
    del module.forward

    class Counted(type(module)):
        def forward(self, x):
            sizes.append(x.numel())
            return super().forward(x)

    counted = Counted()
    block = 64 * torch.get_num_threads()
    with in_blocks([counted]):
        with torch.no_grad():
            counted(torch.ones(block))
            counted(torch.ones(2 * block + 1))
            counted(torch.ones(3, block).T)
        given = torch.ones(3 * block, requires_grad=True)
        counted(given).sum().backward()
    assert sizes == [block, block, block, 1, 3 * block, 3 * block]
    assert given.grad is not None and torch.equal(given.grad, given.grad[:1].expand_as(given.grad))


def test_the_module_is_as_it_was_after_an_error_and_within_itself(small_blocks):
    module = ACT2FN["gelu_new"]
    with pytest.raises(ZeroDivisionError), in_blocks([module]):
        with in_blocks([module]):
            pass
        assert "forward" in vars(module)
        raise ZeroDivisionError
    assert "forward" not in vars(module)


def test_threads_that_run_one_network_do_not_take_its_forward_away_from_each_other(small_blocks):
    modules = [ACT2FN["gelu_new"] for _ in range(50)]

    def run():
        for _ in range(200):
            with in_blocks(modules):
                pass

    with ThreadPoolExecutor(4) as pool:
        for answer in [pool.submit(run) for _ in range(4)]:
            answer.result()
    assert all("forward" not in vars(module) for module in modules)


def test_a_pass_gives_the_states_of_the_network_itself(small_blocks):
    network = tiny_model("gpt2", activation_function="gelu_new")
    model = load(copy.deepcopy(network), tokenizer=tiny_tokenizer())
    assert len(model._stepwise) == len(model.layers)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, model.vocabulary, (6, 9)))
    with torch.no_grad():
        expected = network.transformer(tokens).last_hidden_state
        found = network.transformer.ln_f(model.run_body(tokens))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert all("forward" not in vars(module) for module in model.network.modules())
