"""The frozen network: sums that hold exactly, and the gradients of a naively frozen network of transformers."""

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch.overrides import TorchFunctionMode

import memlens
from memlens import testing
from memlens.circuits.frozen import check_conservation, constant_relevance, frozen_pass
from memlens.errors import UnsupportedModel
from memlens.models.memory_model import MemoryModel
from memlens.testing import tiny_model, tiny_network

SWEEP = pytest.mark.sweep
TOKENS = torch.tensor([[3, 1, 4, 15, 9, 26, 5]])
FAMILIES = {
    "plain": "gpt2",
    "gated": "llama",
    "fused": "phi3",
    "parallel": "gpt_neox",
    "post-norm": "gemma2",
    "post-norm only": "olmo2",
    "Gemma": "gemma",
    "Gemma 3": "gemma3_text",
    "norms in float32": "olmo",
    "experts": "qwen2_moe",
    "experts with biases": "gpt_oss",
}
DOUBLE, SINGLE = torch.float64, torch.float32
# every kind of block in float64; one network per other setting, and the rest of the table in the sweeps
CASES = [
    pytest.param(family, dtype, gate, marks=[] if (dtype is DOUBLE and gate == "value") or family == "llama" else SWEEP)
    for family in FAMILIES.values()
    for dtype in (DOUBLE, SINGLE)
    for gate in ("value", "half")
]
CASES += [
    pytest.param(family, DOUBLE, "value", marks=SWEEP)
    for family in (*testing.FAMILIES, *testing.MIXTURES)
    if family not in FAMILIES.values() and family != "jamba"  # test_a_network_with_another_mixer_is_rejected
]


def difference(logits: torch.Tensor) -> torch.Tensor:
    return logits[7] - logits[11]


def load(family: str, dtype: torch.dtype = DOUBLE) -> MemoryModel:
    return memlens.load((tiny_network if family in ("phi3", "olmo") else tiny_model)(family).to(dtype))


class Sums(NamedTuple):
    """Both sides of the conservation equalities, and the largest gap that is allowed between them."""

    target: float
    leaves: float  # embeddings and biases together
    relevance: dict[int, torch.Tensor]  # layer -> [pos, memories]
    incoming: dict[int, float]  # edges into all memories of a layer
    outgoing: dict[int, torch.Tensor]  # edges out of every memory, [pos, memories]
    tolerance: float


@cache
def sum_edges(family: str, dtype: torch.dtype, gate: Any) -> Sums:
    model = load(family, dtype)
    with (
        frozen_pass(model, TOKENS, difference, gate=gate) as full,
        frozen_pass(model, TOKENS, difference, gate=gate, cut=True) as cut,
    ):
        total, direct = full.gradients([full.target]), cut.gradients([cut.target])
        leaves = float((full.embedding.detach() * total.embedding).sum()) + total.bias + constant_relevance(full, total)
        relevance = {layer: graph.coefficients * total.coefficients[layer] for layer, graph in full.layers.items()}
        outgoing = {layer: graph.coefficients * direct.coefficients[layer] for layer, graph in cut.layers.items()}
        incoming = {}
        for layer, graph in cut.layers.items():
            weights = total.coefficients[layer]
            into = cut.gradients(graph.linear, torch.split(weights, [part.shape[1] for part in graph.linear], 1))
            incoming[layer] = float((cut.embedding.detach() * into.embedding).sum()) + into.bias
            incoming[layer] += float((torch.cat(graph.constant, 1) * weights).sum())
            for earlier, other in cut.layers.items():
                edges = other.coefficients * into.coefficients[earlier]
                outgoing[earlier] += edges
                incoming[layer] += float(edges.sum())
    target = float(full.target.detach())
    scale = max(abs(target), *(float(one.abs().max()) for one in relevance.values()))
    return Sums(target, leaves, relevance, incoming, outgoing, 1e-9 if dtype is DOUBLE else 1e-4 * scale)


@pytest.mark.parametrize(("family", "dtype", "gate"), CASES)
def test_embeddings_and_biases_sum_to_the_target(family: str, dtype: torch.dtype, gate: str) -> None:
    sums = sum_edges(family, dtype, gate)
    assert sums.leaves == pytest.approx(sums.target, abs=sums.tolerance)


@pytest.mark.parametrize(("family", "dtype", "gate"), CASES)
def test_edges_into_memories_sum_to_their_relevance(family: str, dtype: torch.dtype, gate: str) -> None:
    sums = sum_edges(family, dtype, gate)
    expected = {layer: float(relevance.sum()) for layer, relevance in sums.relevance.items()}
    assert sums.incoming == pytest.approx(expected, abs=sums.tolerance)


@pytest.mark.parametrize(("family", "dtype", "gate"), CASES)
def test_edges_out_of_every_memory_sum_to_its_relevance(family: str, dtype: torch.dtype, gate: str) -> None:
    sums = sum_edges(family, dtype, gate)
    for layer, relevance in sums.relevance.items():
        torch.testing.assert_close(sums.outgoing[layer], relevance, rtol=0, atol=sums.tolerance)


@pytest.mark.parametrize("family", FAMILIES.values())
def test_the_target_is_the_models_own(family: str) -> None:
    model = load(family, SINGLE)
    logits = model.lens.state_logits(model.run_body(TOKENS)[0, -1:])[0]
    with frozen_pass(model, TOKENS, difference) as frozen:
        assert float(frozen.target.detach()) == pytest.approx(float(difference(logits)), abs=1e-4)


class NaiveFreeze(TorchFunctionMode):
    """Within, the output of every softmax, root and sigmoid is a constant; LayerNorm is written out."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.layer_norm:
            return self.normalize(*args, **(kwargs or {}))
        output = func(*args, **(kwargs or {}))
        names = ("softmax", "sqrt", "rsqrt", "sigmoid")
        return output.detach() if getattr(func, "__name__", "") in names else output

    def normalize(self, x: Any, _shape: Any, weight: Any, bias: Any, eps: float) -> torch.Tensor:
        centered = x - x.mean(-1, keepdim=True)
        return centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt().detach() * weight + bias


@pytest.mark.parametrize("family", ["gpt2", "llama", "phi3", "gpt_neox", "gemma2", "olmo2", "gemma3_text", "qwen2_moe"])
def test_relevance_and_edges_are_those_of_autograd_on_the_transformers_network(family: str) -> None:
    """An oracle that uses only the network of transformers: its norms, attention and activations become constants."""
    model = load(family)
    network: Any = model.network
    network.set_attn_implementation("eager")
    network.set_experts_implementation("eager")
    network.config.final_logit_softcapping = None  # the target is the logit before soft-capping
    gated = model.layers[1].groups[0].gated
    blocks = [module for name, module in network.named_modules() if name.endswith(".mlp")]
    inputs: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []

    def run(is_cut: bool) -> torch.Tensor:
        def keep(_module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
            inputs.append(arguments[0])
            outputs.append(output.detach().requires_grad_() if is_cut else output)
            return outputs[-1]

        def freeze(_module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
            return output.detach() if gated else arguments[0] * (output / arguments[0]).detach()

        activations = [
            module for name, module in network.named_modules() if name.endswith((".act", ".act_fn", ".activation_fn"))
        ]
        hooks = [module.register_forward_hook(freeze) for module in activations]
        hooks += [block.register_forward_hook(keep) for block in blocks]
        inputs.clear(), outputs.clear()
        with NaiveFreeze(), torch.enable_grad():
            logits = network(TOKENS).logits[0, -1]
        for hook in hooks:
            hook.remove()
        return difference(logits)

    gradients = [gradient[0] for gradient in torch.autograd.grad(run(is_cut=False), outputs)]  # [pos, d] per layer
    with model.record(states=False) as recording:
        model.run_body(TOKENS)
    m = {layer: recording.coefficients[layer][0] for layer in range(3)}
    values = [torch.cat([group.values for group in layer.groups]) for layer in model.layers]
    with (
        frozen_pass(model, TOKENS, difference) as full,
        frozen_pass(model, TOKENS, difference, cut=True) as cut,
    ):
        total = full.gradients([full.target])
        for layer in range(3):
            expected = m[layer] * (gradients[layer] @ values[layer].T)
            torch.testing.assert_close(m[layer] * total.coefficients[layer], expected, rtol=0, atol=1e-5)
        # edges from all memories of layer 0 to the most relevant memory of layer 1 at the last position
        (group,), row = model.layers[1].groups, len(TOKENS[0]) - 1
        number = int((m[1] * total.coefficients[1])[row].abs().argmax())
        run(is_cut=True)
        x = inputs[1].reshape(-1, model.width)[row]
        products, ups = group.matches(x)
        match, key = (products, group.keys) if ups is None or group.up is None else (ups, group.up)
        part = m[1][row, number] / match[number].detach() * (x @ key[number]) * (gradients[1][row] @ values[1][number])
        (at_output,) = torch.autograd.grad(part, outputs[0])
        single = torch.zeros_like(total.coefficients[1])
        single[row, number] = total.coefficients[1][row, number]
        edges = m[0] * cut.gradients(cut.layers[1].linear, [single]).coefficients[0]
        torch.testing.assert_close(edges, m[0] * (at_output[0] @ values[0].T), rtol=0, atol=1e-5)
        assert float(edges.abs().max()) > 1e-4


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
