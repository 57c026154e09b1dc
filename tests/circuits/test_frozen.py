"""The frozen network: sums that hold exactly, and relevance equal to removing a write from a replayed network."""

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import memlens
from memlens.circuits.frozen import _FROZEN, FrozenPass, Gradients, check_conservation, constant_relevance, frozen_pass
from memlens.errors import UnsupportedModel
from memlens.models.memory_model import MemoryModel
from memlens.testing import tiny_model

TOKENS = torch.tensor([[3, 1, 4, 15, 9, 26, 5]])
BLOCKS = ("gpt2", "llama", "gpt_neox", "gemma2", "qwen2_moe", "gpt_oss")  # plain to experts with biases


def difference(logits: torch.Tensor) -> torch.Tensor:
    return logits[7] - logits[11]


def load(family: str, dtype: torch.dtype = torch.float64) -> MemoryModel:
    return memlens.load(tiny_model(family).to(dtype))


def amount_of_leaves(frozen: FrozenPass, gradients: Gradients) -> float:
    embedding = float((frozen.embedding.detach() * gradients.embedding).sum())
    return embedding + gradients.bias + constant_relevance(frozen, gradients)


@pytest.mark.parametrize("family", BLOCKS)
@pytest.mark.parametrize("gate", ["value", "half"])
def test_embeddings_and_biases_sum_to_the_target(family: str, gate: Any) -> None:
    model = load(family)
    with frozen_pass(model, TOKENS, difference, gate=gate) as frozen:
        gradients = frozen.gradients([frozen.target])
        assert amount_of_leaves(frozen, gradients) == pytest.approx(float(frozen.target.detach()), abs=1e-9)


@pytest.mark.parametrize("family", BLOCKS)
def test_the_target_is_the_models_own(family: str) -> None:
    model = load(family, torch.float32)
    logits = model.lens.state_logits(model.run_body(TOKENS)[0, -1:])[0]
    with frozen_pass(model, TOKENS, difference) as frozen:
        assert float(frozen.target.detach()) == pytest.approx(float(difference(logits)), abs=1e-4)


@pytest.mark.parametrize("family", BLOCKS)
@pytest.mark.parametrize("gate", ["value", "half"])
def test_edges_in_and_out_sum_to_the_relevance(family: str, gate: Any) -> None:
    model = load(family)
    with (
        frozen_pass(model, TOKENS, difference, gate=gate) as full,
        frozen_pass(model, TOKENS, difference, gate=gate, cut=True) as cut,
    ):
        total = full.gradients([full.target])
        direct = cut.gradients([cut.target])
        outgoing = {layer: graph.coefficients * direct.coefficients[layer] for layer, graph in cut.layers.items()}
        for layer, graph in cut.layers.items():
            weights = total.coefficients[layer]
            into = cut.gradients(graph.linear, torch.split(weights, [part.shape[1] for part in graph.linear], 1))
            incoming = float((cut.embedding.detach() * into.embedding).sum()) + into.bias
            incoming += float((torch.cat(graph.constant, 1) * weights).sum())
            for earlier, other in cut.layers.items():
                edges = other.coefficients * into.coefficients[earlier]
                outgoing[earlier] += edges
                incoming += float(edges.sum())
            assert incoming == pytest.approx(float((graph.coefficients * weights).sum()), abs=1e-9)
        for layer, graph in full.layers.items():
            torch.testing.assert_close(
                outgoing[layer], graph.coefficients * total.coefficients[layer], rtol=0, atol=1e-9
            )


class Replay(TorchFunctionMode):
    """Record the outputs of frozen functions in a first pass and return the same tensors in later passes."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[torch.Tensor] = []
        self.position: int | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func not in _FROZEN and func not in (torch.Tensor.var, torch.var):
            return output
        if self.position is None:
            self.recorded.append(output)
            return output
        self.position += 1
        return self.recorded[self.position - 1]


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_relevance_is_what_is_lost_without_a_write_in_the_replayed_network(family: str) -> None:
    """An oracle without autograd: attention, norms and gates are replayed while one memory's write is removed."""
    network = tiny_model(family).to(torch.float32)
    network.set_attn_implementation("eager")
    model = memlens.load(network)
    layer, row, number = 1, 3, 5
    with frozen_pass(model, TOKENS, difference) as frozen:
        gradients = frozen.gradients([frozen.target])
        relevance = float(frozen.layers[layer].coefficients[row, number] * gradients.coefficients[layer][row, number])

    gates: dict[int, torch.Tensor] = {}

    def freeze_gate(m: torch.Tensor, group: Any, at: int, silence: bool) -> torch.Tensor:
        ups = group.matches(inputs[at])[1][None]
        gates.setdefault(at, m / ups)
        m = gates[at] * ups
        if silence and at == layer:
            m = m.clone()
            m[0, row, number] = 0
        return m

    inputs: dict[int, torch.Tensor] = {}
    replay = Replay()

    def run(silence: bool) -> float:
        hooks = [
            block.groups[0].reader.register_forward_pre_hook(
                lambda _module, arguments, at=at: inputs.__setitem__(at, arguments[0][0])
            )
            for at, block in enumerate(model.layers)
        ]
        edits = {at: (lambda m, group, at=at: freeze_gate(m, group, at, silence)) for at in range(len(model.layers))}
        with replay, model.edit(edits):
            states = model.run_body(TOKENS)
            logits = model.lens.state_logits(states[0, -1:])[0]
        for hook in hooks:
            hook.remove()
        return float(difference(logits))

    before = run(silence=False)
    replay.position = 0
    assert before - run(silence=True) == pytest.approx(relevance, abs=1e-5)


def test_a_network_with_another_mixer_is_rejected() -> None:
    model = memlens.load(tiny_model("jamba"))
    with frozen_pass(model, TOKENS, difference) as frozen, pytest.raises(UnsupportedModel, match="not linear"):
        check_conservation(model, frozen, frozen.gradients([frozen.target]))


def test_flags_of_parameters_are_restored() -> None:
    model = load("llama")
    before = [parameter.requires_grad for parameter in model.network.parameters()]
    with frozen_pass(model, TOKENS, difference):
        pass
    assert [parameter.requires_grad for parameter in model.network.parameters()] == before
