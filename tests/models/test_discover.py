"""Discovery finds the parts that an architecture's code names, and they compute what the network computes."""

import pytest
import torch
from torch.nn.functional import gelu, relu, silu

from family_list import PLACES, VARIANTS, sweep_others
from memlens.errors import UnsupportedModel
from memlens.models.groups import LinearGroup
from memlens.models.load import load
from memlens.testing import FAMILIES, VOCABULARY, tiny_model, tiny_network

CASES = [(family, {}, {}) for family in PLACES] + [
    (family, {name: value}, changed) for (family, name, value), changed in VARIANTS.items()
]


def part(module, path):
    for step in path.split("."):
        module = getattr(module, step, None)
    return module


def test_every_tiny_family_is_in_the_list():
    assert set(PLACES) == set(FAMILIES)


@pytest.mark.parametrize(("family", "changes", "changed_places"), sweep_others(CASES))
def test_discovery_finds_the_listed_parts(family, changes, changed_places):
    more = {"num_kv_heads": 1} if "new_decoder_architecture" in changes else {}
    network = tiny_model(family, **changes, **more)
    place = PLACES[family]._replace(**changed_places)
    model = load(network, prove=False)
    blocks = part(network, place.blocks)
    assert [layer.block for layer in model.layers] == list(blocks)
    assert model.lens.final_norm.module is part(network, place.final_norm)
    for layer, block in zip(model.layers, blocks, strict=True):
        (group,) = layer.groups
        assert isinstance(group, LinearGroup) and group.kind == "dense"
        assert (group.key_projection, group.down) == (part(block, place.keys), part(block, place.down))
        assert group.up_projection is (None if place.up is None else part(block, place.up))
        norms = [norm for path in place.input_norms if (norm := part(block, path)) is not None]
        assert (None if layer.input_norm is None else layer.input_norm.module) is (norms[0] if norms else None)
        assert (None if layer.post_norm is None else layer.post_norm.module) is (
            None if place.post_norm is None else part(block, place.post_norm)
        )
        assert (layer.parallel, layer.scale, group.scale, group.token_scale) == (place.parallel, None, None, None)


def rms(x, norm, plus=0.0):
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * (norm.weight + plus)


def plain(block, r):  # GPT-2
    return gelu(block.ln_2(r) @ block.mlp.c_fc.weight + block.mlp.c_fc.bias, approximate="tanh")


def gated(block, r):  # Llama
    x = rms(r, block.post_attention_layernorm)
    return silu(x @ block.mlp.gate_proj.weight.T) * (x @ block.mlp.up_proj.weight.T)


def fused(block, r):  # Phi-3
    gate, up = (rms(r, block.post_attention_layernorm) @ block.mlp.gate_up_proj.weight.T).chunk(2, -1)
    return silu(gate) * up


def normed(block, r):  # BitNet
    x = rms(r, block.post_attention_layernorm)
    m = relu(x @ block.mlp.gate_proj.weight.T).square() * (x @ block.mlp.up_proj.weight.T)
    return rms(m, block.mlp.ffn_sub_norm)


def scaled_gate(block, r):  # Falcon-H1
    x = rms(r, block.pre_ff_layernorm)
    return silu(0.6 * (x @ block.feed_forward.gate_proj.weight.T)) * (x @ block.feed_forward.up_proj.weight.T)


def post_normed(block, r):  # Gemma 2
    x = rms(r, block.pre_feedforward_layernorm, 1)
    return gelu(x @ block.mlp.gate_proj.weight.T, approximate="tanh") * (x @ block.mlp.up_proj.weight.T)


def parallel(block, h):  # GPT-J, from the block's input
    return gelu(block.mlp.fc_in(block.ln_1(h)), approximate="tanh")


def hybrid(block, r):  # Nemotron-H, one layer of it
    x = rms(r, block.norm)
    return relu(x @ block.mixer.up_proj.weight.T).square()


BRUTE = {
    "plain": ("gpt2", plain, lambda block, m: block.mlp.c_proj(m)),
    "gated": ("llama", gated, lambda block, m: m @ block.mlp.down_proj.weight.T),
    "fused": ("phi3", fused, lambda block, m: m @ block.mlp.down_proj.weight.T),
    "normed": ("bitnet", normed, lambda block, m: m @ block.mlp.down_proj.weight.T),
    "scaled": ("granite", gated, lambda block, m: m @ block.mlp.down_proj.weight.T * 0.7),
    "scaled twice": ("falcon_h1", scaled_gate, lambda block, m: m @ block.feed_forward.down_proj.weight.T * 1.7),
    "post-norm": (
        "gemma2",
        post_normed,
        lambda block, m: rms(m @ block.mlp.down_proj.weight.T, block.post_feedforward_layernorm, 1),
    ),
    "parallel": ("gptj", parallel, lambda block, m: block.mlp.fc_out(m)),
    "hybrid": ("nemotron_h", hybrid, lambda block, m: m @ block.mixer.down_proj.weight.T),
}


@pytest.mark.parametrize("kind", BRUTE)
def test_coefficients_and_additions_match_a_naive_computation(kind):
    model_type, coefficients, addition = BRUTE[kind]
    model = load(tiny_network(model_type))
    tokens = torch.randint(0, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), model.record() as recording:
        own = model.logits(tokens)
        last = model.run_body(tokens)
    checked = 0
    for layer in model.layers:
        if [group.kind for group in layer.groups] != ["dense"]:
            continue
        before = recording.embedding if layer.number == 0 else recording.o[layer.number - 1]
        with torch.no_grad():
            m = coefficients(layer.block, before if layer.parallel else recording.r[layer.number])
            y = addition(layer.block, m)
        torch.testing.assert_close(recording.coefficients[layer.number], m, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(recording.y[layer.number], y, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(recording.o[layer.number] - recording.r[layer.number], y, rtol=1e-4, atol=1e-4)
        checked += 1
    assert checked >= 1 and (checked == len(model.layers) or kind == "hybrid")
    torch.testing.assert_close(model.lens.capped(model.lens.state_logits(last)), own, rtol=1e-5, atol=1e-5)


class Clamped(torch.nn.Module):
    """A feed-forward part of a Llama with the gated product of gpt-oss and MiniMax M3."""

    def __init__(self, mlp, limit=7.0, reach=7.0):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.slope, self.limit, self.reach = 1.702, limit, [reach]  # discovery does not try constants in lists

    def coefficients(self, x):
        gate, up = self.gate_proj(x).clamp(max=self.limit), self.up_proj(x).clamp(-self.reach[0], self.reach[0])
        return (up + 1) * gate * torch.sigmoid(self.slope * gate)

    def forward(self, x):
        return self.down_proj(self.coefficients(x))


def clamped_llama(**limits):
    network = tiny_model("llama")
    for block in network.model.layers:
        block.mlp = Clamped(block.mlp, **limits)
    return network


@pytest.mark.parametrize("limit", [7.0, 0.8])  # above and below what the probe reaches
def test_a_clamped_product_of_gate_and_up_is_found(limit):
    network = clamped_llama(limit=limit, reach=limit)
    model = load(network)
    with torch.no_grad(), model.record() as recording:
        model.run_body(torch.arange(14).reshape(2, 7))
    for layer, block in zip(model.layers, network.model.layers, strict=True):
        (group,) = layer.groups
        assert (group.key_projection, group.up_projection) == (block.mlp.gate_proj, block.mlp.up_proj)
        x = rms(recording.r[layer.number], block.post_attention_layernorm)
        with torch.no_grad():
            m = block.mlp.coefficients(x)
        torch.testing.assert_close(recording.coefficients[layer.number], m, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [0.3, 0.1])
def test_a_clamp_that_the_probe_does_not_reach_is_found(scale):
    network = clamped_llama()
    with torch.no_grad():
        for block in network.model.layers:
            block.mlp.gate_proj.weight.mul_(scale)
            block.mlp.up_proj.weight.mul_(scale)
    load(network)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_clamp_with_different_limits_is_rejected(dtype):
    with pytest.raises(UnsupportedModel, match="check of"):
        load(clamped_llama(limit=50.0, reach=60.0).to(dtype))


@pytest.mark.parametrize(("model_type", "scale"), [("granite", 1 / 0.7), ("cohere", 0.7), ("minicpm3", None)])
def test_the_lens_includes_constants_around_the_output_embedding(model_type, scale):
    network = tiny_network(model_type)
    model = load(network)
    states = torch.randn(5, model.width, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        normed = model.lens.final_norm.module(states)
        scale = network.config.dim_model_base / network.config.hidden_size if scale is None else scale
        naive = normed @ network.get_output_embeddings().weight.T * scale
    torch.testing.assert_close(normed @ model.lens.embedding.T, naive, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.lens.state_logits(states), naive, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.lens.logit_rows(torch.tensor([3, 7])), model.lens.embedding[[3, 7]])


def test_coefficients_include_the_gate_of_a_shared_expert():
    model = load(tiny_network("qwen2_moe"))
    (shared,) = [group for group in model.layers[1].groups if group.kind == "shared"]
    mlp, tokens = model.layers[1].block.mlp, torch.arange(10).reshape(2, 5)
    blocks = []
    handle = mlp.register_forward_hook(lambda module, given, output: blocks.append(given[0].detach().clone()))
    with model.record() as recording:
        model.run_body(tokens)
    handle.remove()
    x = blocks[0]
    m = silu(mlp.shared_expert.gate_proj(x)) * mlp.shared_expert.up_proj(x)
    expected = torch.sigmoid(mlp.shared_expert_gate(x)) * m
    torch.testing.assert_close(recording.coefficients[1][..., shared.columns], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model_type", ["gemma3", "gemma4"])
def test_the_text_stack_of_a_multimodal_model_is_read(model_type):
    model = load(tiny_network(model_type))
    language = model.network.model.language_model
    assert [layer.block for layer in model.layers] == list(language.layers) and model.proof is not None


@pytest.mark.parametrize("model_type", ["granitemoehybrid", "doge"])
def test_types_with_optional_experts_load_without_them(model_type):
    without = {"num_local_experts": 0} if model_type == "granitemoehybrid" else {"is_moe": False}
    model = load(tiny_network(model_type, **without))
    assert all([group.kind for group in layer.groups] == ["dense"] for layer in model.layers)


def scale_mlp(block, factor):
    forward = block.mlp.forward
    block.mlp.forward = lambda x: forward(x) * factor


def test_layers_of_the_same_structure_may_have_different_scales_and_activations():
    network = tiny_model("gptj")  # parallel: the input of a block does not depend on what it adds
    for number, block in enumerate(network.transformer.h):
        scale_mlp(block, 0.5 + number)
    model = load(network)
    assert [layer.scale or 1.0 for layer in model.layers] == [0.5 + number for number in range(len(model.layers))]
    network = tiny_model("llama")
    for number, block in enumerate(network.model.layers):
        del block.mlp.act_fn
        block.mlp.act_fn = relu if number else silu
    assert [layer.activation for layer in load(network).layers] == ["silu"] + ["relu"] * (len(network.model.layers) - 1)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ZeroDivisionError("no"), UnsupportedModel, "does not run on tokens alone .ZeroDivisionError: no"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), MemoryError, "can't allocate"),
        (torch.OutOfMemoryError("CUDA out of memory"), MemoryError, "out of memory"),
    ],
)
def test_an_error_of_the_network_is_a_rejection_but_lack_of_memory_is_not(error, kind, words):
    network = tiny_model("llama")

    def fail(_module, _given):
        raise error

    network.model.layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(kind, match=words):
        load(network)


STEPS = {
    "discover.match_keys": "layer 0: its keys and values cannot be found",
    "discover.ratio": "layer 0: the path of its memories to the stream cannot be found",
    "discover.map_to_stream": "layer 0: the input of its memories cannot be found",
    "discover._Discovery._silence": "layer 0: its memories cannot be silenced",
    "discover._Discovery._possible_outputs": "layer 0: the output of its memories cannot be found",
    "discover._Discovery.from_template": "layer 1: it cannot be compared with the layer before it",
    "huggingface._head": "its lens cannot be found",
    "huggingface.context_of": "its blocks cannot be found",
    "proof.code_of": "layer 0: the proof cannot be computed",
    "proof._prove_prediction": "the proof cannot be computed",
}


@pytest.mark.parametrize("function", STEPS)
def test_an_unexpected_error_in_any_step_is_a_rejection_that_names_it(function, monkeypatch):
    def fail(*_arguments):
        raise TypeError("unexpected")

    monkeypatch.setattr(f"memlens.models.{function}", fail)
    with pytest.raises(UnsupportedModel, match=rf"{STEPS[function]} \(TypeError: unexpected\)"):
        load(tiny_model("llama"))


def test_an_input_embedding_of_several_matrices_is_rejected():
    from transformers import MusicgenForCausalLM  # takes two seconds, and every test process imports this file
    from transformers.models.musicgen.configuration_musicgen import MusicgenDecoderConfig

    sizes = {"num_hidden_layers": 2, "ffn_dim": 40, "hidden_size": 24, "num_attention_heads": 3}
    config = MusicgenDecoderConfig(vocab_size=97, max_position_embeddings=32, num_codebooks=2, **sizes)
    with pytest.raises(UnsupportedModel, match="its input embedding is not one matrix"):
        load(MusicgenForCausalLM(config).eval())


def test_a_stream_wider_than_the_feed_forward_part_is_rejected():
    with pytest.raises(UnsupportedModel, match=r"layer 0: .* width 32 and its stream has width 128, as"):
        load(tiny_network("qwen4_exp_text"))
