"""MXFP4 experts, as in gpt-oss, are dequantized exactly."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from memlens.errors import ModelError
from memlens.models.load import load
from memlens.testing import save_tiny

FOUR_BITS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FOUR_BITS = torch.cat([FOUR_BITS, -FOUR_BITS])


def packed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize [experts, inputs, outputs] and return (blocks, scales, dequantized). 32 inputs share a power of two."""
    groups = weight.transpose(1, 2).unflatten(2, (-1, 32))  # [experts, outputs, groups, 32]
    powers = groups.abs().amax(-1).log2().floor() - 2  # the largest number becomes 4 to 8 times the power
    codes = (groups / 2 ** powers[..., None]).unsqueeze(-1).sub(FOUR_BITS).abs().argmin(-1)
    blocks = codes[..., 0::2] + 16 * codes[..., 1::2]
    meant = (FOUR_BITS[codes] * 2 ** powers[..., None]).flatten(2).transpose(1, 2)
    return blocks.to(torch.uint8), (powers + 127).to(torch.uint8), meant


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a tiny gpt-oss with quantized experts."""
    return save_tiny(tmp_path / "packed", "gpt_oss", hidden_size=64, intermediate_size=96)


@pytest.fixture
def meant(folder: Path) -> dict[str, torch.Tensor]:
    """Quantize the experts in the folder and return their dequantized weights by name."""
    weights, numbers = load_file(folder / "model.safetensors"), {}
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales, numbers[name] = packed(weights.pop(name))
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, quantization_config={"quant_method": "mxfp4"})
    return numbers


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantized_experts_are_dequantized_exactly_and_proven(
    folder: Path, meant: dict[str, torch.Tensor], dtype: str
) -> None:
    model = load(folder, dtype=dtype)
    own = dict(model.network.named_parameters())
    assert len(meant) == 6 and {parameter.dtype for parameter in own.values()} == {getattr(torch, dtype)}
    for name, numbers in meant.items():
        assert torch.equal(own[name].float(), numbers), name
    for layer in model.layers:
        down = meant[f"model.layers.{layer.number}.mlp.experts.down_proj"]
        assert torch.equal(layer.values.float(), down.flatten(0, 1))  # [experts, memories, d], expert after expert
    assert model.proof is not None


def test_dequantized_weights_are_saved_as_plain_numbers(
    folder: Path, meant: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    model = load(folder)
    model.save(tmp_path / "again")
    saved = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(saved[name], numbers) for name, numbers in meant.items())
    again = load(tmp_path / "again")
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    assert torch.equal(again.logits(tokens), model.logits(tokens)) and again.fingerprint() == model.fingerprint()


@pytest.mark.usefixtures("meant")
def test_quantized_weights_of_a_smaller_network_are_rejected(folder: Path) -> None:
    change_config(folder, num_local_experts=5000)
    with pytest.raises(ModelError, match=r"config\.json describes a network of"):
        load(folder)


@pytest.mark.usefixtures("meant")
@pytest.mark.parametrize("change", [1, -1])
def test_quantized_weights_with_another_number_of_experts_are_rejected(folder: Path, change: int) -> None:
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith(("_blocks", "_scales"))]:
        more = torch.cat([weights[name], weights[name][:1]]) if change > 0 else weights[name][:-1]
        weights[name] = more.contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"do not match its config\.json: .* in the weights"):
        load(folder)
