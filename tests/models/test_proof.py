"""A wrongly described model must be refused, with the layer, the check and the size of the deviation."""

import dataclasses

import pytest
import torch

from memlens.errors import ModelError, UnsupportedModel
from memlens.models import families
from memlens.models.lens import Norm
from memlens.models.load import load
from memlens.models.proof import prove
from memlens.testing import FAMILIES, tiny_model


def refused_with(model, layer, *words, **changes):
    """A model whose layer is described another way is refused by its proof."""
    if changes:
        group = dataclasses.replace(model.layers[layer].groups[0], **changes)
        model.layers[layer] = dataclasses.replace(model.layers[layer], groups=(group,), outputs=(group.down,))
    with pytest.raises(UnsupportedModel) as caught:
        prove(model)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


class Perturbed(torch.nn.Module):
    """Hands out weights that differ from those the network runs with."""

    def __init__(self, linear, weight):
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(weight), linear.bias
        self.linear = linear

    def register_forward_hook(self, *arguments, **named):
        return self.linear.register_forward_hook(*arguments, **named)

    def register_forward_pre_hook(self, *arguments, **named):
        return self.linear.register_forward_pre_hook(*arguments, **named)


@pytest.mark.parametrize("family", ["gpt_neox", "llama", "olmo2", "falcon"])
def test_values_that_are_slightly_off_are_refused(family):
    model = load(tiny_model(family), prove=False)
    down = model.layers[1].groups[0].down
    weight = down.weight.detach().clone()
    weight[3, 5] += 0.01
    refused_with(model, 1, "layer 1", "output", "off by", down=Perturbed(down, weight))


def test_values_in_another_order_and_keys_that_are_slightly_off_are_refused():
    model = load(tiny_model("llama"), prove=False)
    down = model.layers[2].groups[0].down
    refused_with(model, 2, "layer 2", "output", down=Perturbed(down, down.weight.detach().flip(1)))
    model = load(tiny_model("phi"), prove=False)
    keys = model.layers[0].groups[0].key_projection
    changed = Perturbed(keys, keys.weight.detach() * 1.01)
    refused_with(model, 0, "layer 0", "coefficients", key_projection=changed)


def always(answer):
    return lambda config: answer


WRONG_DESCRIPTIONS = {
    "gate and up projection swapped": (["llama"], {"keys": "mlp.up_proj", "up": "mlp.gate_proj"}, "0, .*coefficients"),
    "a wrong activation": (FAMILIES, {"activation": always("tanh")}, "coefficients"),
    "gelu for gelu_new": (["gpt2"], {"activation": always("gelu")}, "coefficients: off by"),
    "a down projection in the attention": (["llama"], {"down": "self_attn.o_proj"}, "layer 0"),
    "a part that is not there": (["llama"], {"down": "mlp.second"}, r"no mlp\.second"),
    "an overlooked post-norm": (["gemma2", "gemma3_text", "olmo2"], {"post_norm": None}, "addition"),
    "a post-norm that is not one": (["llama"], {"post_norm": "input_layernorm"}, "norms|addition"),
    "parallel taken for sequential": (["gpt_neox", "gptj", "falcon", "phi"], {"parallel": always(False)}, "stream"),
    "sequential taken for parallel": (["gpt2"], {"parallel": always(True)}, "stream"),
    "a gain without its one": (["gemma", "gpt2"], {"norm": "rms"}, "norms"),
    "a gain with one too many": (["llama"], {"norm": "rms+1"}, "norms"),
    "an RMSNorm taken for a LayerNorm": (["llama"], {"norm": "layer"}, "norms"),
}


@pytest.mark.parametrize(
    ("mistake", "family"), [(mistake, family) for mistake, row in WRONG_DESCRIPTIONS.items() for family in row[0]]
)
def test_a_family_described_wrongly_is_refused(monkeypatch, mistake, family):
    _, changes, check = WRONG_DESCRIPTIONS[mistake]
    monkeypatch.setitem(families.FAMILIES, family, dataclasses.replace(families.FAMILIES[family], **changes))
    with pytest.raises(UnsupportedModel, match=check):
        load(tiny_model(family))


def test_a_part_that_never_runs_is_refused():
    model = load(tiny_model("gpt2"), prove=False)
    refused_with(model, 1, "never run", "layer 1", down=torch.nn.Linear(40, 24))


def test_a_lens_without_or_with_another_final_norm_or_without_its_soft_cap_is_refused():
    network = tiny_model("llama")
    model = load(network, prove=False)
    for norm in (None, Norm(network.model.layers[0].input_layernorm, "rms")):
        model.lens.final_norm = norm
        refused_with(model, None, "prediction")
    model = load(tiny_model("gemma2"), prove=False)
    model.lens.soft_cap = None
    refused_with(model, None, "prediction")


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_named(number):
    network = tiny_model("gpt2")
    with torch.no_grad():
        network.transformer.h[1].mlp.c_fc.weight[2, 3] = number
    with pytest.raises(ModelError, match=r"transformer\.h\.1\.mlp\.c_fc\.weight .*NaN or infinite"):
        load(network)


def test_large_weights_whose_sum_overflows_are_still_numbers():
    network = tiny_model("gpt2")
    with torch.no_grad():
        network.transformer.wpe.weight[-2:] = 3e38  # positions that the probe does not reach
    assert load(network).proof is not None
