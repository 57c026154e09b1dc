"""Multimodal models: their text stack is loaded and proven like any other model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from memlens.errors import ModelError, UnsupportedModel
from memlens.models.huggingface import quiet_transformers
from memlens.models.info import count_parameters
from memlens.models.load import load
from memlens.testing import tiny_network, tiny_tokenizer

TOKENS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


def save(network: Any, folder: Path) -> Path:
    with quiet_transformers():
        network.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    return folder


OTHERS = ("mistral3", "gemma3", "idefics3", "internvl", "qwen2_audio")


@pytest.mark.parametrize(
    "model_type", ["llava", "qwen2_vl", *(pytest.param(other, marks=pytest.mark.sweep) for other in OTHERS)]
)
def test_the_text_stack_of_a_checkpoint_matches_a_naive_computation(model_type: str, tmp_path: Path) -> None:
    network = tiny_network(model_type)
    model = load(save(network, tmp_path / "model"))
    assert model.proof is not None and (model.family, model.width, model.vocabulary) == (model_type, 32, 97)
    watched: dict[int, torch.Tensor] = {}
    with model.watch(lambda layer, block: watched.update({layer: block.everywhere()})):
        model.run_body(TOKENS)
    text, given = network.get_decoder(), {}
    for number, block in enumerate(text.layers):
        block.mlp.register_forward_pre_hook(lambda _, x, number=number: given.update({number: x[0]}))
    with torch.no_grad():
        logits = network(input_ids=TOKENS).logits
        for number, block in enumerate(text.layers):
            mlp = block.mlp
            m = mlp.act_fn(given[number] @ mlp.gate_proj.weight.T) * (given[number] @ mlp.up_proj.weight.T)
            torch.testing.assert_close(watched[number], m, rtol=1e-4, atol=1e-5)
            assert torch.equal(model.layers[number].values, mlp.down_proj.weight.T)
    torch.testing.assert_close(model.logits(TOKENS), logits)


def test_the_experts_of_a_multimodal_mixture_are_found(tmp_path: Path) -> None:
    network = tiny_network("qwen3_vl_moe")
    model = load(save(network, tmp_path / "model"))
    down = network.get_decoder().layers[1].mlp.experts.down_proj.detach()
    for group in model.layers[1].groups:
        assert group.kind == "routed" and torch.equal(group.values, down[group.expert].T)


def test_the_parameters_of_a_multimodal_model_are_counted_before_it_is_loaded(tmp_path: Path) -> None:
    network = tiny_network("llava", vision_config={"num_hidden_layers": 9, "intermediate_size": 640})
    folder = save(network, tmp_path / "model")
    assert count_parameters(folder) == sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize("model_type", ["llava", pytest.param("qwen2_audio", marks=pytest.mark.sweep)])
def test_a_configuration_without_its_text_model_is_rejected(model_type: str, tmp_path: Path) -> None:
    folder = save(tiny_network(model_type), tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    del settings["text_config"]
    (folder / "config.json").write_text(json.dumps(settings))
    assert count_parameters(folder) is None
    with pytest.raises(
        ModelError, match=r"config\.json has no text_config, so the sizes of its text model are unknown"
    ) as no:
        load(folder)
    assert "\n" not in str(no.value)


def test_a_configuration_with_top_level_sizes_of_its_text_model_is_read(tmp_path: Path) -> None:
    folder = save(tiny_network("qwen2_vl"), tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    text = settings.pop("text_config")
    (folder / "config.json").write_text(json.dumps(text | settings))  # like the first checkpoints of Qwen2-VL
    assert load(folder).width == 32


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("paligemma", "reads a prompt in both directions"),
        ("blip-2", "it needs an image or audio as input; load only its language model"),
        ("llava", "its router scales the input of experts"),  # with Llama 4 as its text model
        ("clip", "it is an encoder and does not predict the next token"),
        ("udop", "encoder-decoder"),
        ("segformer", "transformers has no language model of this type"),
    ],
)
def test_types_without_readable_memories_are_rejected_before_weights_are_read(
    model_type: str, reason: str, tmp_path: Path
) -> None:
    text = {"text_config": {"model_type": "llama4_text"}} if "router" in reason else {}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **text}))
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)
