"""Models to trace: a tiny one of each family, and one with every weight planted, so that algebra says what happens."""

from collections.abc import Callable
from functools import lru_cache

import pytest
import torch

import memlens
from memlens.models.memory_model import MemoryModel
from memlens.testing import tiny_model, tiny_tokenizer


@lru_cache
def tiny(family: str, adds_bos: bool = False) -> MemoryModel:
    return memlens.load(tiny_model(family), tokenizer=tiny_tokenizer(adds_bos=adds_bos))


@pytest.fixture
def model() -> MemoryModel:
    """A plain GELU model that a test may change and break."""
    return memlens.load(tiny_model("gpt2"), tokenizer=tiny_tokenizer())


@pytest.fixture
def family() -> Callable[..., MemoryModel]:
    """A model of a family, shared by all tests: only look at it."""
    return tiny


@pytest.fixture(scope="session")
def planted() -> MemoryModel:
    """One layer, ReLU, no attention: memory i fires with i + 1 at every position; memories 12 and up have no value.

    The value of memory i adds 1 to axis i of the width and takes 1 from axis i + 11; every token comes in as axis 23.
    The output embedding of token t is axis t % 24, behind a LayerNorm with gain 1 and bias 0.
    """
    network = tiny_model("gpt2", n_layer=1, activation_function="relu", tie_word_embeddings=False)
    block = network.transformer.h[0]
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
        network.transformer.wte.weight[:, 23] = 1.0
        block.mlp.c_fc.bias.copy_(torch.arange(40) + 1.0)
        for memory in range(12):
            block.mlp.c_proj.weight[memory, memory] = 1.0
            block.mlp.c_proj.weight[memory, memory + 11] = -1.0
        network.transformer.ln_f.weight.fill_(1.0)
        network.lm_head.weight.copy_(torch.eye(24).repeat(5, 1)[:97])
    return memlens.load(network, tokenizer=tiny_tokenizer())
