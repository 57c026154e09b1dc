"""Every family against naive computations with its own modules. One family per kind of block runs by default."""

import pytest
import torch

from family_list import sweep_others
from memlens.models.load import load
from memlens.testing import CONTEXT, FAMILIES, LAYERS, MEMORIES, VOCABULARY, WIDTH, tiny_model

GATED = {"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo2", "stablelm"}
WITHOUT_BIAS = GATED - {"llama"}  # the tiny Llama is built with mlp_bias
POST_NORM = {"gemma2", "gemma3_text", "olmo2"}
# settings that change the parts of a family
VARIANTS = [
    ("gpt2", {"activation_function": "relu"}),
    ("gpt2", {"tie_word_embeddings": False}),
    ("gpt_neox", {"use_parallel_residual": False}),
    ("opt", {"enable_bias": False}),
    ("opt", {"layer_norm_elementwise_affine": False}),
    ("opt", {"_remove_final_layer_norm": True}),
    ("falcon", {"parallel_attn": False}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 1}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 1, "num_ln_in_parallel_attn": 1}),
    ("falcon", {"alibi": True, "bias": False}),
    ("stablelm", {"use_parallel_residual": True}),
    ("llama", {"mlp_bias": False, "tie_word_embeddings": True}),
    ("starcoder2", {"use_bias": False}),
]
CASES = [(family, {}) for family in FAMILIES] + VARIANTS


@pytest.fixture(
    scope="module",
    params=[pytest.param(case.values, marks=case.marks) for case in sweep_others(CASES)],
    ids=[family + "".join(f"-{key}" for key in changes) for family, changes in CASES],
)
def case(request):
    family, changes = request.param
    return family, changes, load(tiny_model(family, **changes))


@pytest.fixture
def model(case):
    return case[2]


def tokens(batch=2, length=7, seed=1):
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def close(given, expected):
    return torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)


def hook_count(network):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in network.modules())


def test_layers_have_the_structure_of_the_architecture(case):
    family, changes, model = case
    memories = 4 * WIDTH if family == "bloom" else MEMORIES
    assert [layer.number for layer in model.layers] == list(range(LAYERS))
    assert model.family == family
    assert (model.width, model.vocabulary) == (WIDTH, VOCABULARY)
    for layer in model.layers:
        assert layer.gated == layer.signed == (family in GATED)
        assert layer.keys.shape == layer.values.shape == (layer.memories, WIDTH) == (memories, WIDTH)
        assert (layer.groups[0].up is None) == (family not in GATED)
        without_bias = family in WITHOUT_BIAS or changes.keys() & {"enable_bias", "bias", "mlp_bias", "use_bias"}
        assert (layer.groups[0].key_bias is None) == (layer.groups[0].value_bias is None) == bool(without_bias)
        assert (layer.post_norm is not None) == (family in POST_NORM)
    unlimited = family == "bloom" or changes.get("alibi")
    assert model.context == (None if unlimited else CONTEXT)


def test_the_proof_holds_and_is_tight(model):
    names = ("coefficients", "output", "addition", "stream", "norms", "causality", "prediction")
    assert max(getattr(model.proof, name) for name in names) < 5e-6 and model.proof.positions == 16


PRECISIONS = [(family, dtype) for family in FAMILIES for dtype in (torch.bfloat16, torch.float64, torch.float16)]


@pytest.mark.parametrize(("family", "dtype"), sweep_others(PRECISIONS))
def test_the_proof_holds_in_other_precisions(family, dtype):
    model = load(tiny_model(family).to(dtype))
    assert model.dtype == dtype and model.proof is not None


def test_a_recording_matches_a_naive_computation_and_the_hidden_states_of_transformers(model):
    with model.record() as recording:
        last = model.run_body(tokens())
        own = model.network(tokens(), output_hidden_states=True, use_cache=False)
    assert set(recording.coefficients) == set(recording.y) == set(recording.o) == set(recording.r) == set(range(LAYERS))
    for layer in model.layers:
        m = recording.coefficients[layer.number]
        assert m.shape == (2, 7, layer.memories)
        y = torch.einsum("bpm,md->bpd", m, layer.values)
        y = y if layer.groups[0].value_bias is None else y + layer.groups[0].value_bias
        y = y if layer.post_norm is None else layer.post_norm.module(y)
        close(recording.y[layer.number], y)
        close(recording.o[layer.number], recording.r[layer.number] + recording.y[layer.number])
    close(recording.embedding, own.hidden_states[0])
    for layer in range(LAYERS - 1):
        close(recording.o[layer], own.hidden_states[layer + 1])
    close(recording.o[LAYERS - 1], last)
    final_norm = model.lens.final_norm
    close(last if final_norm is None else final_norm.module(last), own.hidden_states[-1])
    assert torch.equal(model.logits(tokens()), own.logits)
    assert torch.equal(model.lens.capped(model.lens.state_logits(last)), own.logits)


def test_watching_and_recording_agree_and_an_edit_without_change_keeps_every_bit(model):
    watched, before = [], model.logits(tokens())
    keep = lambda layer, block: watched.append((layer, block.everywhere().clone()))  # noqa: E731
    with model.record(states=False) as recording, model.watch(keep):
        model.run_body(tokens())
    assert [layer for layer, _ in watched] == list(range(LAYERS))
    assert all(torch.equal(m, recording.coefficients[layer]) for layer, m in watched)
    with model.edit({layer: lambda m, _: m.clone() for layer in range(LAYERS)}):
        assert torch.equal(model.logits(tokens()), before)


def test_silencing_a_layer_leaves_only_its_bias(model):
    before = model.logits(tokens())
    memories = model.layers[1].groups[0]
    outputs = []
    handle = memories.down.register_forward_hook(lambda module, given, output: outputs.append(output.clone()))
    with model.edit({1: lambda m, _: torch.zeros_like(m)}), model.record() as recording:
        after = model.logits(tokens())
    handle.remove()
    bias = torch.zeros(WIDTH) if memories.value_bias is None else memories.value_bias
    assert torch.equal(outputs[0].reshape(2, 7, WIDTH), bias.expand(2, 7, WIDTH))
    assert recording.coefficients[1].abs().max() == 0
    assert not torch.allclose(before, after)


@pytest.mark.parametrize(("family", "changes"), sweep_others(CASES))
def test_where_a_block_adds_one_value_its_top_token_is_that_of_the_value(family, changes):
    model = load(tiny_model(family, **changes), prove=False)  # a new one, because its biases are removed
    for layer in model.layers:
        if layer.groups[0].value_bias is not None:
            layer.groups[0].value_bias.zero_()

    def one_memory_each(m, _group):  # memory i at position i, stronger in the second sentence
        return torch.stack([torch.eye(7, m.shape[-1]), 1.7 * torch.eye(7, m.shape[-1])]).to(m)

    with model.edit(dict.fromkeys(range(LAYERS), one_memory_each)), model.record() as recording:
        model.run_body(tokens())
    assert set(model.lens.readings) == ({"raw"} if "_remove_final_layer_norm" in changes else {"folded", "raw"})
    for reading in model.lens.readings:
        for layer, memories in enumerate(model.layers):
            expected = model.lens.value_scores(memories.values[:7], layer, reading).argmax(-1).tolist()
            for y in recording.y[layer]:  # [pos, d]
                assert model.lens.addition_scores(y, layer, reading).argmax(-1).tolist() == expected


def test_padding_on_the_right_does_not_affect_earlier_tokens(model):
    short = tokens(length=5)
    padded = torch.cat([short, torch.zeros(2, 4, dtype=torch.int64)], dim=1)
    close(model.run_body(padded)[:, :5], model.run_body(short))


@pytest.mark.parametrize("family", sweep_others(FAMILIES))
def test_no_hook_outlives_its_context_even_after_an_error(family):
    model = load(
        tiny_model(family), prove=False
    )  # a new one, because output_hidden_states leaves hooks of transformers
    counts = [hook_count(model.network)]
    failing = model.watch(lambda layer, m: 1 / 0)
    with pytest.raises(ZeroDivisionError), model.record(), model.edit({0: lambda m, _: m}), failing:
        model.run_body(tokens())
    counts.append(hook_count(model.network))
    model.logits(tokens())
    assert [*counts, hook_count(model.network)] == [0, 0, 0]
