"""Routed and shared experts against naive loops over the network's own weights."""

import pytest
import torch

import memlens
from memlens.memory import ExpertId
from memlens.models.decompose import LogitDecomposition, record_positions
from memlens.models.experts import is_experts
from memlens.models.load import load
from memlens.testing import MIXTURES, tiny_model, tiny_tokenizer

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]])
PROMPT = "The river runs to the sea."


# default: a shared expert with a gate, interleaved layout with biases, shared experts without a gate, scales
DEFAULT = ("qwen2_moe", "gpt_oss", "deepseek_v3", "granitemoe")


@pytest.fixture(
    scope="module",
    params=[pytest.param(one, marks=() if one in DEFAULT else pytest.mark.sweep) for one in MIXTURES],
)
def model(request):
    return load(tiny_model(request.param), tokenizer=tiny_tokenizer())


def calls_of(model, tokens=TOKENS):
    """Return {layer: (x [tokens, d], experts [tokens, k], weights [tokens, k])}, the inputs of its stacked experts."""
    calls, handles = {}, []
    for layer in model.layers:
        for module in filter(is_experts, layer.block.modules()):

            def note(_module, given, layer=layer.number):
                calls[layer] = [one.detach().clone() for one in given]

            handles.append(module.register_forward_pre_hook(note))
    logits = model.logits(tokens)
    for handle in handles:
        handle.remove()
    return calls, logits


def naive_m(experts, expert, x):
    """Compute m [size] of one token in one expert from the stacked weights."""
    inner, bias = experts.gate_up_proj[expert], 0
    inner = inner.T if experts.is_transposed else inner  # [2 size, d]
    if experts.has_bias:
        bias = experts.gate_up_proj_bias[expert]
    products = inner @ x + bias
    half = len(products) // 2
    gate, up = (products[:half], products[half:]) if experts.is_concatenated else (products[::2], products[1::2])
    if hasattr(experts, "limit"):  # gpt-oss
        gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
        return gate * torch.sigmoid(experts.alpha * gate) * (up + 1)
    return torch.nn.functional.silu(gate) * up


def naive_coefficients(model, layer, calls):
    """Return w m for selected experts and 0 for others, [tokens, routed memories]."""
    (experts,) = filter(is_experts, model.layers[layer].block.modules())
    x, selection, weights = calls[layer]
    size = model.layers[layer].groups[-1].size
    coefficients = torch.zeros(len(x), experts.num_experts * size)
    for token in range(len(x)):
        for place, expert in enumerate(selection[token].tolist()):
            m = naive_m(experts, expert, x[token])
            coefficients[token, expert * size : (expert + 1) * size] += weights[token, place] * m
    return coefficients.detach()


def mixtures_of(model):
    return [layer for layer in model.layers if layer.is_mixture]


def test_coefficients_are_the_routers_weight_times_m_or_zero(model):
    calls, _ = calls_of(model)
    with model.record() as recording:
        model.run_body(TOKENS)
    assert mixtures_of(model) and set(calls) == {layer.number for layer in mixtures_of(model)}
    for layer in mixtures_of(model):
        expected = naive_coefficients(model, layer.number, calls)
        actual = recording.coefficients[layer.number].flatten(0, 1)[:, -expected.shape[1] :]
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        assert (actual == 0).any() and (actual != 0).any()


def test_blocks_contain_exactly_the_tokens_sent_to_an_expert(model):
    calls, _ = calls_of(model)
    blocks = {}
    with model.watch(lambda layer, block: blocks.setdefault((layer, block.group), block)):
        model.run_body(TOKENS)
    for (layer, group), block in blocks.items():
        if group.kind != "routed":
            assert block.rows is None and len(block.coefficients) == TOKENS.numel()
            continue
        rows, places = torch.where(calls[layer][1] == group.expert)
        assert sorted(block.rows.tolist()) == rows.tolist()
        order = block.rows.argsort()
        torch.testing.assert_close(block.weights[order], calls[layer][2][rows, places].to(block.weights.dtype))
        assert block.coefficients.shape == (len(rows), group.size)


def test_run_experts_is_bit_identical_and_the_implementation_is_restored(model):
    before = model.network.get_experts_implementation()
    model.network.set_experts_implementation("eager")
    with torch.no_grad():
        own = model.network(TOKENS, use_cache=False).logits
    assert torch.equal(model.logits(TOKENS), own)
    assert set(model.network.get_experts_implementation().values()) == {"eager"}
    with pytest.raises(ZeroDivisionError), model.watch(lambda layer, block: 1 / 0):
        model.logits(TOKENS)
    assert set(model.network.get_experts_implementation().values()) == {"eager"}
    assert not any(name.startswith("_memlens") for module in model.network.modules() for name in vars(module))
    model.network.set_experts_implementation(before)


def test_edits_of_experts_change_exactly_the_edited_memory(model):
    layer = mixtures_of(model)[-1]
    group = layer.groups[-2]
    plain = model.logits(TOKENS)
    with model.edit({layer.number: lambda c, _: c}):
        assert torch.equal(model.logits(TOKENS), plain)
    with model.record() as before:
        model.run_body(TOKENS)

    def change(c, own):
        if own is not group:
            return c
        c = c.clone()
        c[..., 3] = 2.5  # also for tokens that were not sent to the expert
        return c

    with model.edit({layer.number: change}), model.record() as after:
        model.run_body(TOKENS)
    was = before.coefficients[layer.number][..., group.start + 3, None]
    assert torch.equal(after.coefficients[layer.number][..., group.start + 3], torch.full(TOKENS.shape, 2.5))
    if layer.post_norm is None:
        moved = (2.5 - was) * layer.values[group.start + 3] * (1 if layer.scale is None else layer.scale)
        torch.testing.assert_close(after.o[layer.number] - before.o[layer.number], moved, rtol=1e-3, atol=1e-4)


def test_silencing_an_expert_equals_setting_its_values_to_zero(model):
    layer = mixtures_of(model)[0]
    group = layer.groups[-1]
    name = ExpertId(layer.number, "routed", group.expert)
    compared = memlens.intervene(model, PROMPT, f"{name}=0", token=5)
    original = group.values.clone()
    with torch.no_grad():
        group.values.zero_()
        alone = memlens.trace(model, PROMPT, token=5)
        group.values.copy_(original)
    assert compared.after.logit == pytest.approx(alone.logit, abs=1e-4)
    assert memlens.trace(model, PROMPT, token=5).logit == pytest.approx(compared.before.logit, abs=1e-6)


def test_parts_of_a_mixture_sum_to_the_logit(model):
    rows = torch.tensor([0, 4, 6, 13])
    positions = record_positions(model, TOKENS, rows)
    own = model.logits(TOKENS).flatten(0, 1)[rows]
    tokens = own.argmax(1)
    accounting = LogitDecomposition(model)
    account = accounting.logit_parts(positions, tokens)
    torch.testing.assert_close(account.logit, own.gather(1, tokens[:, None])[:, 0], rtol=1e-4, atol=1e-4)
    direction = accounting.direction(tokens, positions.o[len(model.layers) - 1])
    for layer in range(len(model.layers)):
        used = positions.used(layer)
        summed = accounting.memories(layer, used, direction).sum(1) + accounting.block_bias(layer, used, direction)
        torch.testing.assert_close(summed, account.ffn[layer], rtol=1e-4, atol=1e-4)


def test_a_trace_names_memories_of_experts_and_its_parts_are_exact(model):
    trace = memlens.trace(model, PROMPT, top=200)
    ids = torch.tensor([model.tokenizer.encode([PROMPT])[0].ids])
    assert trace.logit == pytest.approx(float(model.logits(ids)[0, -1].max()), abs=1e-4)
    kinds = {one.memory.kind for one in trace.memories}
    assert kinds == {group.kind for layer in model.layers for group in layer.groups}
    for one in trace.memories:
        value = model.layers[one.memory.layer].values_of([model.names.number(one.memory)])[0]
        assert one.size == pytest.approx(abs(one.coefficient) * float(value.norm()), rel=1e-4)


def test_silencing_each_memory_equals_an_intervention_on_it(model):
    layer = mixtures_of(model)[0]
    names = [str(model.names.name(layer.number, number)) for number in (0, layer.memories // 2, layer.memories - 1)]
    result = memlens.silence_each(model, PROMPT, names, token=5)
    for name in names:
        effect = memlens.intervene(model, PROMPT, f"{name}=0", token=5)
        moved = effect.before.token.p - effect.after.token.p
        assert result.effects[memlens.MemoryId.parse(name)] == pytest.approx(moved, abs=1e-6)


def test_integrated_effects_of_a_mixture_sum_to_the_effect_of_its_layer(model):
    layer = mixtures_of(model)[-1].number
    result = memlens.integrate(model, PROMPT, layers=[layer], token=5, steps=40)
    if model.layers[layer].post_norm is None:
        assert abs(result.gap) < 1e-4
    assert len(result.effects) == model.layers[layer].memories
