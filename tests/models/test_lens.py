"""The lens on values and states against its formulas."""

import pytest
import torch

from memlens.errors import SettingError
from memlens.models.load import load
from memlens.testing import LAYERS, WIDTH, tiny_model


def centred(vectors):
    return vectors - vectors.mean(-1, keepdim=True)


def naive_folded(family, network, values, layer):
    """Compute (v * gain) E for one family of each kind."""
    if family in ("gpt2", "gptj"):
        return centred(values) * network.transformer.ln_f.weight
    if family == "llama":
        return values * network.model.norm.weight
    block = network.model.layers[layer]
    if family == "olmo2":
        return values * block.post_feedforward_layernorm.weight * network.model.norm.weight
    return values * (1 + block.post_feedforward_layernorm.weight) * (1 + network.model.norm.weight)


@pytest.mark.parametrize("family", ["gpt2", "gptj", "llama", "olmo2", "gemma2"])
def test_a_value_is_read_by_the_formula(family):
    network = tiny_model(family)
    model = load(network)
    E = network.get_output_embeddings().weight.detach()
    for layer in range(LAYERS):
        values = model.layers[layer].values
        folded = naive_folded(family, network, values, layer).detach()
        torch.testing.assert_close(model.lens.folded(values, layer), folded)
        for reading, expected in (((), folded), (("folded",), folded), (("raw",), values)):
            torch.testing.assert_close(model.lens.value_scores(values, layer, *reading), expected @ E.T)
    assert model.lens.readings == ("folded", "raw")
    with pytest.raises(SettingError, match="folded or raw"):
        model.lens.value_scores(values, 0, "logit")


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])
def test_folding_is_the_final_norm_without_its_scale_and_bias(family):
    model = load(tiny_model(family))
    norm = model.lens.final_norm
    state = model.run_body(torch.tensor([[3, 1, 4, 1, 5, 9]]))[0, -1]
    size = ((centred(state) if norm.centers else state).square().mean() + norm.epsilon).sqrt()
    rebuilt = norm.folded(state) / size + (0 if norm.bias is None else norm.bias)
    torch.testing.assert_close(rebuilt, norm.module(state).detach())


def test_the_output_bias_belongs_to_states_and_never_to_values():
    network = tiny_model("phi")
    model = load(network)
    bias = network.lm_head.bias.detach()
    assert bias.abs().max() > 0.1
    states = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    expected = network.model.final_layernorm(states).detach() @ network.lm_head.weight.T.detach() + bias
    torch.testing.assert_close(model.lens.state_logits(states), expected)
    assert model.lens.value_scores(torch.zeros(1, WIDTH), 0).abs().max() == 0


def test_soft_capping_affects_probabilities_but_not_state_logits():
    model = load(tiny_model("gemma2"))
    tokens = torch.tensor([[3, 1, 4]])
    logits = model.lens.state_logits(model.run_body(tokens))
    assert not torch.allclose(logits, model.logits(tokens))
    torch.testing.assert_close(model.lens.probabilities(logits), model.logits(tokens).softmax(-1))
    capped = 5.0 * torch.tanh(logits / 5.0)
    torch.testing.assert_close(model.lens.probabilities(logits), capped.softmax(-1))


def test_without_a_final_norm_there_is_only_the_raw_reading():
    network = tiny_model("opt", _remove_final_layer_norm=True)
    model = load(network)
    assert model.lens.readings == ("raw",)
    values = model.layers[0].values
    torch.testing.assert_close(model.lens.value_scores(values, 0), values @ network.lm_head.weight.T.detach())
    with pytest.raises(SettingError, match="'folded' is not"):
        model.lens.value_scores(values, 0, "folded")


def test_untied_embeddings_differ_and_are_float32_in_half_precision():
    model = load(tiny_model("gpt2").to(torch.bfloat16))
    assert model.lens.value_scores(model.layers[0].values, 0).dtype == torch.float32
    assert model.lens.embedding.dtype == model.lens.input_embedding.dtype == torch.float32
    tied, untied = load(tiny_model("gpt2")), load(tiny_model("gptj"))
    assert tied.lens.tied and torch.equal(tied.lens.embedding, tied.lens.input_embedding)
    assert not untied.lens.tied and not torch.equal(untied.lens.embedding, untied.lens.input_embedding)
