"""Facts about a model, sizes before loading, and device maps."""

from pathlib import Path

import pytest

import memlens
from memlens.errors import SettingError
from memlens.models.info import describe, sizes_before_loading
from memlens.scanner.resources import estimate_scan, memory_before_loading
from memlens.scanner.state import ScanState
from memlens.settings import ScanSettings
from memlens.testing import save_tiny, tiny_model, tiny_tokenizer


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_sizes_from_the_configuration_are_those_of_the_loaded_model(tmp_path: Path, family: str) -> None:
    folder = save_tiny(tmp_path, family)
    loaded = memlens.load(folder, prove=False)
    (folder / "model.safetensors").unlink()  # the weights are not needed
    sizes = sizes_before_loading(folder)
    assert sizes is not None
    assert sizes.parameters == sum(parameter.numel() for parameter in loaded.network.parameters())
    assert sizes.memories == tuple(layer.memories for layer in loaded.layers)
    assert (sizes.width, sizes.gated) == (loaded.width, loaded.layers[0].gated)
    settings = ScanSettings(top=7)
    state = ScanState.start(loaded, range(3), settings)
    list_bytes = sum(a.nbytes for name, a in state.arrays().items() if name[0].isdigit())
    assert memory_before_loading(sizes, settings, 4)["lists"] == list_bytes


def test_a_batch_takes_the_memory_of_one_expert_at_a_time(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "mixtral")
    sizes, model = sizes_before_loading(folder), memlens.load(folder)
    settings = ScanSettings(top=1, batch_tokens=64)
    assert sizes is not None and max(sizes.memories) > sizes.widest
    assert sizes.widest == max(group.size for layer in model.layers for group in layer.groups)
    assert memory_before_loading(sizes, settings, 4)["a batch"] == estimate_scan(model, settings).batch_bytes


def test_other_files_have_no_sizes(tmp_path: Path) -> None:
    assert sizes_before_loading(tmp_path) is None
    (tmp_path / "model.gguf").write_bytes(b"\0" * 400)
    assert sizes_before_loading(tmp_path / "model.gguf") is None


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
