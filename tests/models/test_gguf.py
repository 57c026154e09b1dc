"""A .gguf file gives the model from which it was written."""

import gguf
import numpy as np
import pytest
import torch
from gguf_files import write_tokenizer

from memlens.errors import ModelError, UnsupportedModel
from memlens.models.info import count_parameters
from memlens.models.load import load
from memlens.testing import CONTEXT, LAYERS, MEMORIES, VOCABULARY, WIDTH, tiny_model, tiny_tokenizer

TOKENS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
INSIDE = {
    f"self_attn.{part}_proj": f"attn_{name}" for part, name in zip("qkvo", ("q", "k", "v", "output"), strict=True)
}
INSIDE |= {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
INSIDE |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}


def interleaved(weight, head=8):
    """.gguf files keep the two halves of each rotary head interleaved."""
    heads = weight.shape[0] // head
    return np.ascontiguousarray(weight.reshape(heads, 2, head // 2, -1).swapaxes(1, 2).reshape(weight.shape))


def write_gguf(path, network, adds_bos, layers=LAYERS, architecture="llama"):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    sizes = {"context_length": CONTEXT, "embedding_length": WIDTH, "block_count": layers, "vocab_size": VOCABULARY}
    sizes |= {"feed_forward_length": MEMORIES, "head_count": 3, "head_count_kv": 1, "rope_dimension_count": 8}
    sizes |= {"rope_freq_base": 10000.0, "layer_norm_rms_eps": network.config.rms_norm_eps}
    for name, size in sizes.items():
        getattr(writer, f"add_{name}")(size)
    write_tokenizer(writer, adds_bos)
    for name, tensor in network.state_dict().items():
        stem, weight = name.removesuffix(".weight"), tensor.numpy()
        if stem in OUTSIDE:
            writer.add_tensor(f"{OUTSIDE[stem]}.weight", weight)
            continue
        _, _, layer, part = stem.split(".", 3)
        weight = interleaved(weight) if part.endswith(("q_proj", "k_proj")) else weight
        writer.add_tensor(f"blk.{layer}.{INSIDE[part]}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def network():
    return tiny_model("llama", mlp_bias=False)


def test_a_gguf_file_gives_the_model_it_was_written_from(tmp_path, network, capfd):
    path = write_gguf(tmp_path / "tiny.gguf", network, adds_bos=True)
    capfd.readouterr()
    model = load(path)
    assert capfd.readouterr().err == ""
    assert (model.name, model.source, model.family) == ("tiny.gguf", str(path), "llama")
    torch.testing.assert_close(model.logits(TOKENS), network(TOKENS).logits.detach())
    assert torch.equal(model.layers[1].values, network.model.layers[1].mlp.down_proj.weight.T)
    assert model.proof is not None


@pytest.mark.parametrize("adds_bos", [True, False])
def test_the_file_states_whether_bos_is_added(tmp_path, network, adds_bos):
    tokenizer = load(write_gguf(tmp_path / "tiny.gguf", network, adds_bos), prove=False).tokenizer
    assert (tokenizer.bos, tokenizer.adds_bos) == (1, adds_bos)
    text = "The river in Paris."
    assert tokenizer.encode([text])[0].ids == tiny_tokenizer()(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.token_text(tokenizer.id_of(" river")) == " river"


def test_the_fingerprint_does_not_depend_on_the_file_name(tmp_path, network):
    first = load(write_gguf(tmp_path / "a.gguf", network, True)).fingerprint()
    assert load(write_gguf(tmp_path / "b.gguf", network, True)).fingerprint() == first
    assert load(write_gguf(tmp_path / "b.gguf", network, False)).fingerprint() != first


def test_an_unreadable_gguf_file_is_reported_in_one_line(tmp_path, network):
    path = write_gguf(tmp_path / "tiny.gguf", network, True)
    whole = path.read_bytes()
    for broken in (b"", b"not a gguf file", whole[:200], whole[: len(whole) // 2]):
        path.write_bytes(broken)
        with pytest.raises(ModelError) as caught:
            load(path)
        assert "\n" not in str(caught.value) and "tiny.gguf" in str(caught.value)


@pytest.mark.parametrize("architecture", ["rwkv6", "clip"])
def test_an_unsupported_architecture_is_reported_as_such(tmp_path, network, architecture):
    with pytest.raises(UnsupportedModel, match=f"architecture {architecture} is not supported.*safetensors"):
        load(write_gguf(tmp_path / "tiny.gguf", network, True, architecture=architecture))


@pytest.mark.parametrize("layers", [1, 4, 2**31 - 1])
def test_a_wrong_number_of_layers_is_rejected(tmp_path, network, layers):
    with pytest.raises(ModelError, match=f"declares {layers:,} layers but contains weights for 3"):
        load(write_gguf(tmp_path / "tiny.gguf", network, True, layers))


@pytest.mark.parametrize("change", [{"embedding_length": 2**20}, {"feed_forward_length": 2**30}, {"vocab_size": 2**31}])
def test_a_gguf_file_whose_settings_describe_a_larger_network_is_refused(tmp_path, network, monkeypatch, change):
    ((name, size),) = change.items()
    add = getattr(gguf.GGUFWriter, f"add_{name}")
    monkeypatch.setattr(gguf.GGUFWriter, f"add_{name}", lambda writer, _: add(writer, size))
    with pytest.raises(ModelError) as caught:
        load(write_gguf(tmp_path / "tiny.gguf", network, True))
    assert "tiny.gguf" in str(caught.value) and "\n" not in str(caught.value)


def test_the_parameters_of_a_gguf_file_are_those_of_the_dequantized_model(tmp_path, network):
    path = write_gguf(tmp_path / "tiny.gguf", network, True)
    loaded = load(path, prove=False)
    assert count_parameters(path) == sum(parameter.numel() for parameter in loaded.network.parameters())
