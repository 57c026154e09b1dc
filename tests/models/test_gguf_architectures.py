"""Every architecture of .gguf files that transformers reads is proven or rejected as unsupported."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import ARCHITECTURES, write_architecture

from memlens.errors import UnsupportedModel
from memlens.models.load import load
from memlens.testing import tiny_network

# files do not contain these settings, so transformers uses its defaults
UNNAMED: dict[str, dict[str, Any]] = {
    "gpt_oss": {"head_dim": 64},
    "qwen2_moe": {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_hidden_layers": 2},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"moe_intermediate_size": 768, "head_dim": 8},
}
REFUSED = {
    "deci": "does not recognize this architecture",
    "gemma4": "its blocks add gated per-layer embeddings",
    "gpt_oss": "are missing",
    "mamba": "state space mixers",
    "mistral": "Unknown gguf model_type: mistral",
    "t5": "encoder-decoder",
    "umt5": "encoder-decoder",
}
NETWORKS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
} | dict.fromkeys(("deci", "mistral", "t5", "umt5"), "llama")


def written(architecture: str, folder: Path) -> tuple[Path, Any]:
    network = tiny_network(NETWORKS.get(architecture, architecture), **UNNAMED.get(architecture, {}))
    return write_architecture(folder / f"{architecture}.gguf", architecture, network), network


def sweep_except(architectures: Iterable[str], *default: str) -> list[Any]:
    return [pytest.param(one, marks=() if one in default else pytest.mark.sweep) for one in architectures]


@pytest.mark.parametrize(
    "architecture", sweep_except((one for one in ARCHITECTURES if one not in REFUSED), "gpt2", "qwen3_moe")
)
def test_a_supported_file_has_the_values_that_were_written(architecture: str, tmp_path: Path) -> None:
    path, network = written(architecture, tmp_path)
    model = load(path)
    assert model.proof is not None
    for layer, own in zip(model.layers, load(network, prove=False).layers, strict=True):
        assert [group.kind for group in layer.groups] == [group.kind for group in own.groups]
        assert torch.equal(layer.values, own.values) and torch.equal(layer.keys, own.keys)


@pytest.mark.parametrize("architecture", sweep_except([*REFUSED, "command-r", "rwkv6"], "gpt_oss", "mistral", "rwkv6"))
def test_other_architectures_are_reported_as_unsupported(architecture: str, tmp_path: Path, monkeypatch: Any) -> None:
    if architecture not in ARCHITECTURES:
        from gguf_files import GGUF_CONFIG_MAPPING

        settings = GGUF_CONFIG_MAPPING["llama"]
        monkeypatch.setitem(GGUF_CONFIG_MAPPING, architecture, settings)
        path = write_architecture(tmp_path / "tiny.gguf", architecture, tiny_network("llama"))
        monkeypatch.undo()
    else:
        path, _ = written(architecture, tmp_path)
    with pytest.raises(UnsupportedModel, match=REFUSED.get(architecture, "is not supported")) as caught:
        load(path)
    assert "\n" not in str(caught.value) and path.name in str(caught.value)
