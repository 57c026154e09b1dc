"""The proof rejects a wrong description of a model with the layer, the check and the deviation."""

import dataclasses

import pytest
import torch

from family_list import DEFAULT
from memlens.errors import ModelError, UnsupportedModel
from memlens.models.groups import LinearGroup
from memlens.models.lens import Norm
from memlens.models.load import load
from memlens.models.proof import _Worst, prove
from memlens.testing import tiny_model


def refused_with(model, layer, *words, **changes):
    """Assert that the proof rejects a model whose layer has these changes."""
    if changes:
        group = dataclasses.replace(model.layers[layer].groups[0], **changes)
        model.layers[layer] = dataclasses.replace(model.layers[layer], groups=(group,), outputs=(group.down,))
    with pytest.raises(UnsupportedModel) as caught:
        prove(model)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


def showing(group, **tensors):
    """Return the group with other tensors than those of the network."""
    kind = type("Showing", (LinearGroup,), {name: property(lambda _, own=own: own) for name, own in tensors.items()})
    return kind(**{field.name: getattr(group, field.name) for field in dataclasses.fields(group)})


def refused_layer(model, layer, *words):
    model.layers[layer.number] = layer
    refused_with(model, None, f"layer {layer.number}", *words)


@pytest.mark.parametrize("family", ["gpt_neox", "llama", "olmo2", "falcon"])
def test_slightly_wrong_values_are_rejected(family):
    model = load(tiny_model(family), prove=False)
    layer = model.layers[1]
    values = layer.groups[0].values.clone()
    values[3, 5] += 0.01
    group = showing(layer.groups[0], values=values)
    refused_layer(model, dataclasses.replace(layer, groups=(group,)), "output", "the deviation is")


def test_values_in_another_order_and_slightly_wrong_keys_are_rejected():
    model = load(tiny_model("llama"), prove=False)
    layer = model.layers[2]
    group = showing(layer.groups[0], values=layer.groups[0].values.flip(0))
    refused_layer(model, dataclasses.replace(layer, groups=(group,)), "output")
    model = load(tiny_model("phi"), prove=False)
    layer = model.layers[0]
    group = showing(layer.groups[0], keys=layer.groups[0].keys * 1.001)
    refused_layer(model, dataclasses.replace(layer, groups=(group,)), "coefficients")


def group_with(**changes):
    """Return a function that changes attributes of a layer's group."""

    def describe(layer):
        facts = {name: fact(layer.block) if callable(fact) else fact for name, fact in changes.items()}
        return dataclasses.replace(layer, groups=(dataclasses.replace(layer.groups[0], **facts),))

    return describe


def layer_with(**changes):
    return lambda layer: dataclasses.replace(
        layer, **{name: change(layer) if callable(change) else change for name, change in changes.items()}
    )


def input_norm(kind):
    return layer_with(input_norm=lambda layer: dataclasses.replace(layer.input_norm, kind=kind))


WRONG_DESCRIPTIONS = {
    "gate and up projection swapped": (
        ["llama"],
        group_with(key_projection=lambda block: block.mlp.up_proj, up_projection=lambda block: block.mlp.gate_proj),
        "coefficients",
    ),
    "a wrong activation": (DEFAULT, group_with(activate=lambda block: torch.tanh), "coefficients"),
    "gelu for gelu_new": (
        ["gpt2"],
        group_with(activate=lambda block: torch.nn.functional.gelu),
        "coefficients: the deviation is",
    ),
    "an overlooked post-norm": (["gemma2", "gemma3_text", "olmo2"], layer_with(post_norm=None), "addition"),
    "a post-norm that is not one": (
        ["llama"],
        layer_with(post_norm=lambda layer: Norm(layer.block.input_layernorm, "rms")),
        "norms|addition",
    ),
    "parallel taken for sequential": (["gpt_neox", "gptj", "falcon", "phi"], layer_with(parallel=False), "stream"),
    "sequential taken for parallel": (["gpt2"], layer_with(parallel=True), "stream"),
    "a gain without its one": (["gemma", "gpt2"], input_norm("rms"), "norms"),
    "a gain with one too many": (["llama"], input_norm("rms+1"), "norms"),
    "an RMSNorm taken for a LayerNorm": (["llama"], input_norm("layer"), "norms"),
    "a scale that is not there": (["llama"], layer_with(scale=1.001), "addition"),
    "a scale that is not there, of a group": (["llama"], group_with(scale=1.001), "output"),
}


@pytest.mark.parametrize(
    ("mistake", "family"), [(mistake, family) for mistake, row in WRONG_DESCRIPTIONS.items() for family in row[0]]
)
def test_a_wrong_description_of_a_layer_is_rejected(mistake, family):
    _, describe, check = WRONG_DESCRIPTIONS[mistake]
    model = load(tiny_model(family), prove=False)
    model.layers[1] = describe(model.layers[1])
    with pytest.raises(UnsupportedModel, match=f"layer 1.*({check})"):
        prove(model)


def test_not_a_number_is_rejected():
    with pytest.raises(UnsupportedModel, match="layer 0, check of output: the deviation is nan"):
        _Worst("model", 1e-5).compare("output", "layer 0", torch.tensor([[torch.nan]]), torch.ones(1, 1))


def test_a_deviation_is_relative_to_the_largest_number_at_its_position():
    expected, difference = torch.tensor([[1e-3, 1e-4], [1e3, 1.0]]), torch.tensor([[0.0, 1e-4], [0.0, 0.0]])
    assert _Worst.deviation(expected + difference, expected) == pytest.approx(0.1)


def test_a_part_that_never_runs_is_rejected():
    model = load(tiny_model("gpt2"), prove=False)
    refused_with(model, 1, "does not run", "layer 1", down=torch.nn.Linear(40, 24))


def test_a_lens_with_a_wrong_final_norm_or_without_its_soft_cap_is_rejected():
    network = tiny_model("llama")
    model = load(network, prove=False)
    for norm in (None, Norm(network.model.layers[0].input_layernorm, "rms")):
        model.lens.final_norm = norm
        refused_with(model, None, "prediction")
    model = load(tiny_model("gemma2"), prove=False)
    model.lens.soft_cap = None
    refused_with(model, None, "prediction")


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_tensor_with_nan_or_infinity_is_named(number):
    network = tiny_model("gpt2")
    with torch.no_grad():
        network.transformer.h[1].mlp.c_fc.weight[2, 3] = number
    with pytest.raises(ModelError, match=r"transformer\.h\.1\.mlp\.c_fc\.weight .*NaN or infinity"):
        load(network)


def test_large_weights_whose_sum_overflows_are_accepted():
    network = tiny_model("gpt2")
    with torch.no_grad():
        network.transformer.wpe.weight[-2:] = 3e38  # positions that the probe does not reach
    assert load(network).proof is not None
