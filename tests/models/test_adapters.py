"""Adapters for model types from entry points. Their models are proven like any other."""

import json

import pytest

from memlens.errors import ModelError, UnsupportedModel
from memlens.models.load import load
from memlens.testing import save_tiny, tiny_model

ADAPTER = """
from memlens.models.huggingface import HuggingFaceModel

class Adapted(HuggingFaceModel):
    pass

def adapt(network, tokenizer, *, name, source):
    return Adapted(network, tokenizer, name=name, source=source)

def wrong(network, tokenizer, *, name, source):
    model = adapt(network, tokenizer, name=name, source=source)
    model.layers[1] = model.layers[0]
    return model

def nothing(network, tokenizer, *, name, source):
    return network
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a function that installs a package with an entry point, such as "gpt2 = stand_in:adapt"."""

    def install(entry):
        info = tmp_path / "site" / "stand_in-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stand-in\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[memlens.models]\n{entry}\n")
        (tmp_path / "site" / "stand_in.py").write_text(ADAPTER)
        monkeypatch.syspath_prepend(tmp_path / "site")

    return install


def test_an_adapter_is_used_for_its_type_only_and_its_model_is_proven(installed, tmp_path):
    installed("gpt2 = stand_in:adapt")
    model = load(save_tiny(tmp_path / "tiny", "gpt2"))
    assert type(model).__name__ == "Adapted" and model.proof is not None
    assert type(load(tiny_model("llama"))).__name__ == "HuggingFaceModel"


def test_an_adapter_overrides_a_rejection_by_configuration(installed, tmp_path):
    folder = save_tiny(tmp_path / "tiny", "gpt2")
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"is_encoder_decoder": True}))
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        load(folder)
    installed("gpt2 = stand_in:adapt")
    assert load(folder).proof is not None


@pytest.mark.parametrize(
    ("entry", "kind", "words"),
    [
        ("gpt2 = stand_in:wrong", UnsupportedModel, "cannot be proven"),
        ("gpt2 = stand_in:nothing", ModelError, "did not return a MemoryModel"),
        ("gpt2 = stand_in:missing", ModelError, "of stand-in cannot be imported"),
    ],
)
def test_a_broken_adapter_is_reported_in_one_line(installed, entry, kind, words):
    installed(entry)
    with pytest.raises(kind, match=words) as caught:
        load(tiny_model("gpt2"))
    assert "\n" not in str(caught.value)
