"""Facts about a model, its parameters before it is loaded, and device maps."""

from pathlib import Path

import pytest

import memlens
from memlens.errors import SettingError
from memlens.models.info import count_parameters, describe
from memlens.testing import save_tiny, tiny_model, tiny_tokenizer


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_parameters_of_a_configuration_are_those_of_the_loaded_model(tmp_path: Path, family: str) -> None:
    folder = save_tiny(tmp_path, family)
    loaded = memlens.load(folder, prove=False)
    (folder / "model.safetensors").unlink()  # the weights are not needed
    assert count_parameters(folder) == sum(parameter.numel() for parameter in loaded.network.parameters())


def test_the_parameters_of_other_files_are_unknown(tmp_path: Path) -> None:
    assert count_parameters(tmp_path) is None
    (tmp_path / "model.gguf").write_bytes(b"\0" * 400)
    assert count_parameters(tmp_path / "model.gguf") is None
    assert count_parameters("~nobody-has-this-name/model") is None


def test_a_device_map_gives_the_same_model(tiny_llama: Path, tmp_path: Path) -> None:
    distributed = memlens.load(tiny_llama, device_map={"": "cpu"})
    assert distributed.fingerprint() == memlens.load(tiny_llama).fingerprint()
    (tmp_path / "other.gguf").touch()
    for model, given, words in (
        (tiny_llama, "sideways", "--device-map is 'sideways'; choose one of: auto"),
        (tmp_path / "other.gguf", "auto", "cannot be distributed over devices"),
    ):
        with pytest.raises(SettingError, match=words):
            memlens.load(model, device_map=given)


def test_the_description_states_what_the_model_is() -> None:
    info = describe(memlens.load(tiny_model("gemma2"), tokenizer=tiny_tokenizer(adds_bos=True)))
    assert (info.layers, info.memories, info.total_memories) == (3, (40, 40, 40), 120)
    assert (info.activation, info.gated, info.signed, info.parallel) == ("gelu_pytorch_tanh", True, True, False)
    assert (info.input_norm, info.post_norm, info.final_norm) == ("RMSNorm",) * 3
    assert (info.tied, info.soft_cap, info.bos, info.adds_bos) == (True, 5.0, "<s>", True)
    assert info.parameters == sum(parameter.numel() for parameter in tiny_model("gemma2").parameters())
    assert info.proof is not None and (info.dtype, info.device) == ("float32", "cpu")
    info = describe(memlens.load(tiny_model("gptj"), prove=False))
    assert (info.parallel, info.tied, info.post_norm, info.final_norm) == (True, False, None, "LayerNorm")
    assert info.proof is None and info.bos is None and info.adds_bos is None
