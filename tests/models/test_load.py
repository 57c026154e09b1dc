"""Loading models, and one-line errors for everything that can be wrong with them."""

import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, GPT2ForSequenceClassification, GPT2Model
from transformers.utils import logging

from fake_device import FakeDevices
from memlens.errors import ModelError, ModelNotFound, SettingError, UnsupportedModel
from memlens.models import info, load as loading
from memlens.models.huggingface import quiet_transformers
from memlens.models.load import load
from memlens.testing import save_tiny, tiny_model, tiny_tokenizer

TOKENS = torch.tensor([[3, 1, 4, 1, 5]])


@pytest.fixture
def folder(tiny_gpt2, tmp_path):
    return shutil.copytree(tiny_gpt2, tmp_path / "tiny-gpt2")


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def refused(kind, model, *words, **options):
    with pytest.raises(kind) as caught:
        load(model, **options)
    message = str(caught.value)
    assert type(caught.value) is kind, message
    assert "\n" not in message and len(message) < 600
    for word in words:
        assert word in message, message


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3_text"])
def test_a_folder_gives_the_model_that_was_saved_in_it(tmp_path, family):
    path = save_tiny(tmp_path / "checkpoint", family, adds_bos=True)
    model = load(path)
    assert (model.name, model.source, model.family) == ("checkpoint", str(path), family)
    assert torch.equal(model.logits(TOKENS), tiny_model(family)(TOKENS).logits)
    assert model.tokenizer.adds_bos and model.tokenizer.encode(["The river"])[0].ids == [49, 59]
    assert model.proof is not None
    assert not any(parameter.requires_grad for parameter in model.network.parameters())
    assert load(model.source).fingerprint() == model.fingerprint()


def test_a_loaded_model_does_not_change_when_its_files_do(folder, tmp_path):
    model = load(folder)
    expected = model.logits(TOKENS).clone()
    other = save_tiny(tmp_path / "other", "gpt2", seed=1) / "model.safetensors"
    (folder / "model.safetensors").write_bytes(other.read_bytes())  # like `cp`: the same file with other bytes
    assert torch.equal(model.logits(TOKENS), expected)
    (folder / "model.safetensors").write_bytes(b"")
    assert torch.equal(model.logits(TOKENS), expected)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_checkpoint_that_changes_while_it_is_read_is_refused(folder, monkeypatch, file):
    read = loading._read_network

    def meanwhile(*arguments, **options):
        network = read(*arguments, **options)
        content = (folder / file).read_bytes()
        (folder / file).write_bytes(content)
        return network

    monkeypatch.setattr(loading, "_read_network", meanwhile)
    refused(ModelError, folder, "changed while it was being read")


def test_a_relative_name_and_a_path_object_mean_the_same_folder(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    for name in ("tiny-gpt2", "./tiny-gpt2", Path("tiny-gpt2")):
        model = load(name, prove=False)
        assert (model.name, model.source) == ("tiny-gpt2", str(folder))


def test_a_loaded_network_is_only_switched_to_evaluation_mode():
    network = tiny_model("llama").to(torch.bfloat16).train()
    model = load(network, tokenizer=tiny_tokenizer())
    assert model.network is network and model.source == "" and model.name == "LlamaForCausalLM"
    assert model.dtype == torch.bfloat16 and not network.training
    assert all(parameter.requires_grad for parameter in network.parameters())
    assert load(model) is model


def test_dtype_and_device_are_respected(folder):
    model = load(folder, dtype="bfloat16", device="cpu")
    assert (model.dtype, model.device.type) == (torch.bfloat16, "cpu")
    assert load(folder, dtype=torch.float64).dtype == torch.float64
    refused(SettingError, folder, "'int8'", "float32", dtype="int8")
    refused(SettingError, folder, "'abacus'", "cpu", device="abacus")


def test_automatic_dtypes_are_float32_on_a_cpu_and_the_checkpoints_on_a_gpu(tmp_path):
    tiny_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    model = load(tmp_path, tokenizer=tiny_tokenizer())
    assert (model.dtype, model.stored_dtype) == (torch.float32, torch.bfloat16)
    with FakeDevices():
        model = load(tmp_path, tokenizer=tiny_tokenizer(), device="mps", prove=False)
        assert (model.dtype, model.stored_dtype, model.device.type) == (torch.bfloat16, torch.bfloat16, "mps")


@pytest.mark.parametrize("works", [True, False])
def test_a_mac_uses_its_gpu_only_after_a_self_check(folder, monkeypatch, capsys, works):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    if not works:
        monkeypatch.setattr(torch, "searchsorted", Mock(side_effect=NotImplementedError("no such operation")))
    with FakeDevices():
        device = loading._device("auto")
    assert device.type == ("mps" if works else "cpu")
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and ("runs on the GPU" in message) == works


def test_fast_bfloat16_is_reported_for_a_bfloat16_checkpoint(tmp_path, monkeypatch):
    tiny_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    model = load(tmp_path, tokenizer=tiny_tokenizer())
    for gain in (0.3, 1.77):
        monkeypatch.setattr(info, "bfloat16_gain", lambda _matrix, gain=gain: gain)
        assert ("1.8 times as fast" in (info.faster_dtype_note(model) or "")) == (gain > 1)
    model.stored_dtype = torch.float32
    assert info.faster_dtype_note(model) is None
    assert info.bfloat16_gain(torch.ones(40, 24)) > 0


def test_a_dtype_that_the_device_does_not_support_is_rejected(folder, monkeypatch):
    def fail(*_sizes, **_options):
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype")

    monkeypatch.setattr(torch, "zeros", fail)
    refused(SettingError, folder, "device 'cpu' does not support float64; use float32", dtype="float64", device="cpu")


def test_another_tokenizer_can_be_given_by_object_or_by_place(folder, tmp_path):
    tiny_tokenizer(adds_bos=True).save_pretrained(tmp_path / "other")
    for replacement in (tiny_tokenizer(adds_bos=True), str(tmp_path / "other")):
        assert load(folder, tokenizer=replacement, prove=False).tokenizer.adds_bos
    assert not load(folder, prove=False).tokenizer.adds_bos


def test_the_bundled_model_is_found_by_its_name(monkeypatch, folder, tmp_path):
    monkeypatch.setattr(loading, "_BUNDLED", folder)
    model = load("bundled")
    assert (model.name, model.source) == ("bundled", "bundled")
    monkeypatch.setattr(loading, "_BUNDLED", tmp_path / "nowhere")
    refused(ModelNotFound, "bundled", "no bundled model")


@pytest.mark.parametrize("bars", [True, False])
def test_nothing_is_printed_and_no_setting_of_transformers_is_left_changed(folder, capfd, bars):
    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    capfd.readouterr()
    try:
        logging.set_verbosity(logging.INFO)
        (logging.enable_progress_bar if bars else logging.disable_progress_bar)()
        load(folder)
        assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (logging.INFO, bars)
    finally:
        logging.set_verbosity(verbosity)
        (logging.enable_progress_bar if had_bars else logging.disable_progress_bar)()
    assert capfd.readouterr() == ("", "")


def test_missing_folders_and_hub_ids_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("./nothing", str(tmp_path / "nothing"), Path("nothing"), "nothing.gguf", "a/b/c", ""):
        refused(ModelNotFound, name, "no such folder or file", str(name))

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused(ModelNotFound, "memlens-tests/no-such-model", "HF_HUB_OFFLINE")
    refused(ModelNotFound, "not a hub id", "'not a hub id'", "Hub id")


def test_a_folder_without_a_valid_configuration_is_rejected(folder, tmp_path):
    refused(ModelNotFound, tmp_path, "config.json")
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")
    refused(ModelNotFound, tmp_path, "weights.gguf")
    refused(ModelError, folder / "model.safetensors", "not a .gguf file")
    for text in ("{", "[]", "{}", '{"model_type": 3}'):
        (folder / "config.json").write_text(text)
        refused(ModelError, folder, "config.json")


def test_a_tensor_with_another_shape_than_the_settings_is_named(folder):
    change_config(folder, n_inner=41)
    words = "transformer.h.0.mlp.c_fc.weight is (24, 40) in the weights and (24, 41) in the configuration"
    refused(ModelError, folder, "the weights of tiny-gpt2 do not match its config.json", words)


def test_a_size_of_zero_is_named(folder, tiny_llama, tmp_path):
    change_config(folder, n_head=0)
    refused(ModelError, folder, "config.json of tiny-gpt2 does not describe a network: n_head is 0")
    llama = shutil.copytree(tiny_llama, tmp_path / "llama")  # transformers divides while it reads the configuration
    change_config(llama, num_attention_heads=0)
    refused(ModelError, llama, "config.json of llama does not describe a network: num_attention_heads is 0")


def test_weights_without_read_permission_are_reported_as_such(folder, monkeypatch):
    path_open = Path.open

    def deny(path, *arguments, **options):
        if path.name == "model.safetensors":  # tests may run as root, who can read every file
            raise PermissionError(13, "Permission denied", str(path))
        return path_open(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", deny)
    refused(ModelError, folder, "weights of tiny-gpt2 cannot be read", "model.safetensors: Permission denied")


def test_a_missing_entry_of_a_tokenizer_is_named(folder):
    content = json.loads((folder / "tokenizer.json").read_text())
    del content["added_tokens"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    refused(ModelError, folder, "cannot be read (it has no entry 'added_tokens')")


def test_a_panic_while_a_tokenizer_is_read_is_one_line(folder, capfd):
    content = json.loads((folder / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    refused(ModelError, folder, "tokenizer of", "cannot be read (Precompiled: ", "check its tokenizer.json")
    assert capfd.readouterr().err == "", "Rust's own report is dropped"


def test_an_id_far_beyond_the_number_of_tokens_is_rejected(folder):
    """The library lists all unused ids when it writes a tokenizer, which fills gigabytes for an id of 2**31."""
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["beyond"] = 1 << 24
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"has 98 tokens but an id of 16,777,216; fix the ids in its tokenizer\.json"):
        load(folder).fingerprint()


def test_damaged_weights_are_rejected(folder):
    change_config(folder, n_inner=40)
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for broken in (whole[: len(whole) // 2], b"", b"not weights at all"):
        path.write_bytes(broken)
        refused(ModelError, folder, "weights of tiny-gpt2 cannot be read")
    path.unlink()
    refused(ModelError, folder, "weights of tiny-gpt2 cannot be read")
    change_config(folder, n_layer="three")
    refused(ModelError, folder, "tiny-gpt2")


def test_missing_weights_and_nan_are_named(folder):
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["transformer.ln_f.bias"][3] = float("nan")
    save_file(weights, path, metadata={"format": "pt"})
    refused(ModelError, folder, "transformer.ln_f.bias", "NaN")
    del weights["transformer.h.1.mlp.c_fc.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    refused(ModelError, folder, "lack transformer.h.1.mlp.c_fc.weight")


def rewrite(folder, weights, kind="safetensors", **settings):
    """Replace the weights and settings of a saved checkpoint."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    if kind == "bin":
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize(("family", "count"), [("gpt2", "n_layer"), ("llama", "num_hidden_layers")])
def test_unused_weights_are_rejected(tmp_path, family, count, kind):
    folder = save_tiny(tmp_path / "three-layers", family)
    weights = load_file(folder / "model.safetensors")
    rewrite(folder, weights, kind, **{count: 1})
    refused(ModelError, folder, "three-layers do not match its config.json", "has no", "more", "use the config")
    rewrite(folder, weights, kind, **{count: 4})
    refused(ModelError, folder, "three-layers", "lack")


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_buffers_in_old_checkpoints_are_accepted(tmp_path, kind):
    old = {
        "gpt2": {"transformer.h.0.attn.bias": torch.ones(1, 1, 32, 32, dtype=torch.uint8).tril()}
        | {"transformer.h.1.attn.masked_bias": torch.tensor(-1e4)},
        "llama": {"model.layers.2.self_attn.rotary_emb.inv_freq": torch.ones(4)},
        "gptj": {"transformer.h.0.attn.bias": torch.ones(1, 1, 32, 32, dtype=torch.bool).tril()},
        "gpt_neox": {"gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 32, 32, dtype=torch.uint8).tril()}
        | {"gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9)}
        | {"gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(1)},
        "gemma": {},
    }
    for family, extra in old.items():
        folder = save_tiny(tmp_path / family, family)
        weights = load_file(folder / "model.safetensors") | extra
        words = {"gpt2": "transformer.wte.weight", "gemma": "model.embed_tokens.weight"}.get(family)
        if words:  # tied but stored twice
            weights["lm_head.weight"] = weights[words].clone()
        rewrite(folder, weights, kind)
        assert torch.equal(load(folder).logits(TOKENS), tiny_model(family)(TOKENS).logits)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn])
def test_quantized_weights_are_rejected(folder, kind, dtype):
    whole = load_file(folder / "model.safetensors")
    name = "transformer.h.2.mlp.c_fc.weight"
    rewrite(folder, whole | {name: whole[name].mul(40).to(dtype)}, kind)
    refused(UnsupportedModel, folder, "tiny-gpt2", str(dtype).removeprefix("torch."), name, "unquantized")
    bare = {key.removeprefix("transformer."): value for key, value in whole.items()}  # the names of GPT2Model
    rewrite(folder, bare | {"wte.weight": whole["transformer.wte.weight"].to(dtype)}, kind)
    refused(UnsupportedModel, folder, "wte.weight", "unquantized")


def test_an_adapter_is_rejected_with_advice(folder):
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "gpt2"}')
    refused(UnsupportedModel, folder, "tiny-gpt2 is an adapter", "merge it")


ABSURD = [
    ("gpt2", {"n_layer": 10**9}, "more layers than any model has"),
    ("qwen2", {"num_hidden_layers": 10**9}, "more layers than any model has"),
    ("gpt_neo", {"attention_types": [[["global"], 10**9]], "num_layers": 3}, "more layers than any model has"),
    ("gpt2", {"n_layer": 4000}, "4,000 layers", "tensors"),
    ("gpt2", {"n_embd": 3 * 10**6}, "config.json describes a network of"),
    ("llama", {"vocab_size": 10**10}, "config.json describes a network of"),
    ("gpt2", {"n_positions": 10**6}, "config.json describes a network of"),
    ("gpt_neo", {"max_position_embeddings": 10**5}, "bytes of tables"),
    ("llama", {"intermediate_size": 10**15}, "config.json"),
    ("llama", {"hidden_size": -24}, "config.json"),
]


@pytest.mark.parametrize(("family", "settings", "words"), [(family, given, words) for family, given, *words in ABSURD])
def test_absurd_sizes_are_rejected_before_memory_is_allocated(tmp_path, family, settings, words):
    resource = pytest.importorskip("resource", reason="this system has no limit on memory")
    folder = save_tiny(tmp_path / "absurd", family)
    rewrite(folder, load_file(folder / "model.safetensors"), **settings)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 30), hard))
    try:
        refused(ModelError, folder, "absurd", *words)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_a_tensor_in_a_bin_file_that_is_larger_than_the_file_is_refused(folder):
    weights = load_file(folder / "model.safetensors")
    huge = 10**8
    rewrite(folder, weights | {"transformer.wte.weight": torch.zeros(1, 24).expand(huge, 24)}, "bin", vocab_size=huge)
    refused(ModelError, folder, "config.json describes a network of")


def test_sharded_weights_are_checked_together(tmp_path):
    folder = tmp_path / "shards"
    save_tiny(folder, "gpt2")
    (folder / "model.safetensors").unlink()
    with quiet_transformers():
        tiny_model("gpt2").save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert torch.equal(load(folder).logits(TOKENS), tiny_model("gpt2")(TOKENS).logits)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"n_layer": 2}))
    refused(ModelError, folder, "whose network has no")


def test_code_in_a_checkpoint_is_not_run(folder, tmp_path):
    mark = tmp_path / "mark"
    (folder / "own.py").write_text(f"open({str(mark)!r}, 'w')\nclass Own: pass\n")
    change_config(folder, model_type="own", auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"})
    refused(UnsupportedModel, folder, "'own'")
    assert not mark.exists()


def test_a_damaged_or_missing_tokenizer_is_reported(folder):
    (folder / "tokenizer.json").write_text('{"version": ')
    refused(ModelError, folder, "tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    refused(ModelError, folder, "no tokenizer", "tokenizer=")
    assert load(folder, tokenizer=tiny_tokenizer()).tokenizer.size == 97


def test_a_bos_beyond_the_embedding_is_refused():
    fast = tiny_tokenizer(adds_bos=True)
    refused(ModelError, tiny_model("gpt2", vocab_size=1, bos_token_id=0, eos_token_id=0), "BOS", tokenizer=fast)


REFUSED_KINDS = [
    ("t5", {}, "encoder-decoder"),
    ("bert", {}, "encoder and does not predict the next token"),
    ("gpt2", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized"),
    ("gpt2", {"add_cross_attention": True}, "encoder"),
    ("mamba", {}, "without a feed-forward part"),
    ("rwkv", {}, "gates the sum of values"),
    ("zamba2", {}, "many layers share one"),
    ("deepseek_v4", {}, "hyper-connections"),
    ("gemma3n_text", {}, "AltUp"),
    ("llama4_text", {}, "router scales the input of experts"),
    ("dbrx", {}, "outside the interface"),
    ("jetmoe", {}, "outside the interface"),
    ("longcat_flash", {}, "two feed-forward parts"),
]


@pytest.mark.parametrize(("model_type", "settings", "reason"), REFUSED_KINDS)
def test_unsupported_types_are_rejected_before_weights_are_read(tmp_path, model_type, settings, reason):
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    change_config(tmp_path, **settings)
    tiny_tokenizer().save_pretrained(tmp_path)
    refused(UnsupportedModel, tmp_path, tmp_path.name, f"({model_type}) cannot be read as memories", reason)


REFUSED_NETWORKS = [
    ("opt", {"do_layer_norm_before": False}, "post-norm"),
    ("opt", {"word_embed_proj_dim": 12}, "more than a norm"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "causality"),
    ("bloom", {"pretraining_tp": 2, "slow_but_exact": True}, "no feed-forward part"),
]


@pytest.mark.parametrize(("family", "settings", "reason"), REFUSED_NETWORKS)
def test_unsupported_networks_are_rejected_with_the_reason(family, settings, reason):
    refused(UnsupportedModel, tiny_model(family, **settings), "ForCausalLM", reason)


def test_models_without_a_causal_head_are_rejected(tmp_path):
    refused(ModelError, 7, "int is not a model")
    refused(ModelError, torch.nn.Linear(2, 2), "Linear is not a model")
    refused(UnsupportedModel, GPT2Model(tiny_model("gpt2").config), "no language modeling head")
    bert = AutoConfig.for_model("bert", num_hidden_layers=1, hidden_size=24, num_attention_heads=3)
    refused(UnsupportedModel, AutoModel.from_config(bert), "encoder")
    classifier = GPT2ForSequenceClassification(tiny_model("gpt2").config)
    refused(UnsupportedModel, classifier, "head")
    classifier.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    refused(UnsupportedModel, tmp_path, "a text classifier (GPT2ForSequenceClassification)")


def test_the_fingerprint_is_the_same_for_copies_and_for_the_loaded_object(tiny_gpt2, folder):
    first = load(tiny_gpt2).fingerprint()
    fast = tiny_tokenizer()
    model = load(tiny_model("gpt2"), tokenizer=fast)
    assert load(folder).fingerprint() == model.fingerprint() == first and len(first) == 64
    fast("The river rose", truncation=True, max_length=2)  # a fast tokenizer stores the options of its latest call
    model.logits(TOKENS)
    assert model.fingerprint() == first


def test_the_fingerprint_depends_on_weights_settings_tokenizer_and_dtype():
    def fingerprint(network, **options):
        return load(network, tokenizer=tiny_tokenizer(**options), prove=False).fingerprint()

    network = tiny_model("gpt2")
    with torch.no_grad():
        network.transformer.h[2].mlp.c_proj.bias[0] += 1e-6
    prints = [
        fingerprint(tiny_model("gpt2")),
        fingerprint(network),
        fingerprint(tiny_model("gpt2", activation_function="relu")),
        fingerprint(tiny_model("gpt2"), adds_bos=True),
        fingerprint(tiny_model("gpt2"), style="spaces"),
        fingerprint(tiny_model("gpt2").to(torch.bfloat16)),
        load(tiny_model("gpt2")).fingerprint(),
    ]
    assert len(set(prints)) == len(prints)
