"""The fairseq checkpoint with adaptive input and softmax."""

import argparse
import math
import os
import shutil

import pytest
import torch

from memlens.errors import ModelError, SettingError, UnknownName, UnsupportedModel
from memlens.models import fairseq
from memlens.models.fairseq import WordTokenizer, read_dictionary
from memlens.models.load import load

LAYERS, WIDTH, MEMORIES, HEADS, FACTOR = 3, 12, 20, 3, 2
ENDS = (11, 23, 37)
WORDS = [f"word{number}" for number in range(ENDS[-1] - 4)]
TOKENS = torch.tensor([[2, 5, 30, 11, 22, 36, 10], [2, 23, 4, 4, 12, 3, 7]])
VARIANTS = {
    "tied": (True, True),
    "own projections": (True, False),
    "untied": (False, False),
    "untied although projections are said to be tied": (False, True),
}


def settings(tied_words, tied_projections, **changed):
    values = {
        **{"arch": "transformer_lm_wiki103", "activation_fn": "relu", "max_target_positions": 16, "lr": [0.1]},
        **{"decoder_layers": LAYERS, "decoder_embed_dim": WIDTH, "decoder_input_dim": WIDTH},
        **{"decoder_output_dim": WIDTH, "decoder_ffn_embed_dim": MEMORIES, "decoder_attention_heads": HEADS},
        **{"adaptive_input": True, "adaptive_input_cutoff": "11,23", "adaptive_softmax_cutoff": "11,23"},
        **{"adaptive_input_factor": FACTOR, "adaptive_softmax_factor": FACTOR, "no_decoder_final_norm": True},
        **{"tie_adaptive_weights": tied_words, "tie_adaptive_proj": tied_projections},
    }
    return argparse.Namespace(**(values | changed))


def make_tensors(tied_words=True, tied_projections=True):
    torch.manual_seed(8)
    tensors = {"decoder.version": torch.tensor([3.0]), "decoder.adaptive_softmax.version": torch.tensor([1])}
    sizes = [end - start for start, end in zip((0, *ENDS), ENDS, strict=False)]
    for band, size in enumerate(sizes):
        narrow = WIDTH // FACTOR**band
        tensors[f"decoder.embed_tokens.embeddings.{band}.0.weight"] = torch.randn(size, narrow)
        tensors[f"decoder.embed_tokens.embeddings.{band}.1.weight"] = torch.randn(WIDTH, narrow) / 2
    for layer in range(LAYERS):
        shapes = {f"self_attn.{part}_proj": (WIDTH, WIDTH) for part in ("q", "k", "v", "out")}
        shapes |= {"fc1": (MEMORIES, WIDTH), "fc2": (WIDTH, MEMORIES)}
        shapes |= {"self_attn_layer_norm": (WIDTH,), "final_layer_norm": (WIDTH,)}
        for part, shape in shapes.items():
            tensors[f"decoder.layers.{layer}.{part}.weight"] = torch.randn(shape) / 2
            tensors[f"decoder.layers.{layer}.{part}.bias"] = torch.randn(shape[0]) / 2
    output = "decoder.adaptive_softmax"
    if tied_words:
        tensors[f"{output}.head.word_proj.weight"] = tensors["decoder.embed_tokens.embeddings.0.0.weight"]
        tensors[f"{output}.head.class_proj.weight"] = torch.randn(2, WIDTH)
    else:
        tensors[f"{output}.head.weight"] = torch.randn(ENDS[0] + 2, WIDTH)
    for tail, size in enumerate(sizes[1:]):
        narrow = WIDTH // FACTOR ** (tail + 1)
        embedding = f"decoder.embed_tokens.embeddings.{tail + 1}"
        shared = tensors[f"{embedding}.1.weight"]
        own = torch.randn(narrow, WIDTH) / 2
        tensors[f"{output}.tail.{tail}.0.weight"] = shared if tied_words and tied_projections else own
        words = tensors[f"{embedding}.0.weight"] if tied_words else torch.randn(size, narrow)
        tensors[f"{output}.tail.{tail}.2.weight"] = words
    return tensors


def write(folder, args, tensors, words=WORDS):
    folder.mkdir(exist_ok=True)
    torch.save({"args": args, "model": tensors, "extra_state": {"epoch": 3}}, folder / "model.pt")
    (folder / "dict.txt").write_text("".join(f"{word} 9\n" for word in words), encoding="utf-8")
    return folder


def refused(folder, words, kind=ModelError, **options):
    with pytest.raises(kind, match=words) as refusal:
        load(folder, **options)
    assert "\n" not in str(refusal.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("adaptive") / "tied", settings(True, True), make_tensors())


@pytest.fixture(scope="module")
def model(folder):
    return load(folder)


def naive_log_probabilities(t, tokens, tied_projections, scale):
    """Compute one sequence, position and head at a time in float64 from the checkpoint's tensors."""
    t = {name.removeprefix("decoder."): tensor.double() for name, tensor in t.items()}
    starts = (0, *ENDS)
    states = []
    for place, token in enumerate(tokens, start=2):
        band = next(band for band in range(3) if token < ENDS[band])
        embedding = f"embed_tokens.embeddings.{band}"
        vector = t[f"{embedding}.1.weight"] @ t[f"{embedding}.0.weight"][token - starts[band]] * scale
        angles = [place * 10_000 ** (-i / (WIDTH // 2 - 1)) for i in range(WIDTH // 2)]
        states.append(vector + torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles]).double())
    x = torch.stack(states)

    def affine(x, part):
        return x @ t[f"{part}.weight"].T + t[f"{part}.bias"]

    def norm(x, part):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * t[f"{part}.weight"] + t[f"{part}.bias"]

    for layer in (f"layers.{number}" for number in range(LAYERS)):
        h = norm(x, f"{layer}.self_attn_layer_norm")
        q, k, v = (affine(h, f"{layer}.self_attn.{part}_proj") for part in "qkv")
        mixed = torch.zeros_like(x)
        for head in range(HEADS):
            part = slice(head * WIDTH // HEADS, (head + 1) * WIDTH // HEADS)
            for i in range(len(tokens)):
                weights = torch.softmax(k[: i + 1, part] @ q[i, part] / math.sqrt(WIDTH / HEADS), 0)
                mixed[i, part] = weights @ v[: i + 1, part]
        x = x + affine(mixed, f"{layer}.self_attn.out_proj")
        h = norm(x, f"{layer}.final_layer_norm")
        x = x + affine(torch.relu(affine(h, f"{layer}.fc1")), f"{layer}.fc2")

    a = "adaptive_softmax"
    head = t.get(f"{a}.head.weight")
    if head is None:
        head = torch.cat([t[f"{a}.head.word_proj.weight"], t[f"{a}.head.class_proj.weight"]])
    top = torch.log_softmax(x @ head.T, -1)
    pieces = [top[:, : ENDS[0]]]
    for tail in range(2):
        projection = t[f"{a}.tail.{tail}.0.weight"]
        narrow = x @ (projection if tied_projections else projection.T)
        within = torch.log_softmax(narrow @ t[f"{a}.tail.{tail}.2.weight"].T, -1)
        pieces.append(within + top[:, ENDS[0] + tail, None])
    return torch.cat(pieces, 1)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("unscaled", [False, True])
def test_every_variant_matches_naive_arithmetic(tmp_path, variant, unscaled):
    tied_words, tied_projections = VARIANTS[variant]
    tensors = make_tensors(tied_words, tied_projections)
    args = settings(tied_words, tied_projections, no_scale_embedding=unscaled)
    model = load(write(tmp_path, args, tensors), dtype="float64")
    scale = 1.0 if unscaled else math.sqrt(WIDTH)
    for tokens, read in zip(TOKENS.tolist(), model.logits(TOKENS), strict=True):
        expected = naive_log_probabilities(tensors, tokens, tied_words and tied_projections, scale)
        torch.testing.assert_close(read, expected, atol=1e-5, rtol=0)  # sinusoids are float32
    assert model.lens.tied is tied_words


def test_tied_tensors_are_shared(model, tmp_path):
    untied = load(write(tmp_path, settings(False, False), make_tensors(False, False)))
    shared = sum(size * (WIDTH // FACTOR**band) for band, size in enumerate((11, 12, 14))) + WIDTH * (6 + 3)
    tied, apart = (sum(one.numel() for one in each.network.parameters()) for each in (model, untied))
    assert apart - tied == shared


def test_older_files_give_the_same_model(model, tmp_path):
    tensors = make_tensors()
    for layer in range(LAYERS):
        at = f"decoder.layers.{layer}.self_attn"
        for kind in ("weight", "bias"):
            tensors[f"{at}.in_proj_{kind}"] = torch.cat([tensors.pop(f"{at}.{part}_proj.{kind}") for part in "qkv"])
    args = settings(True, True, no_tie_adaptive_proj=False)
    del args.tie_adaptive_proj, args.no_decoder_final_norm
    old = load(write(tmp_path, args, tensors))
    torch.testing.assert_close(old.logits(TOKENS), model.logits(TOKENS), atol=0, rtol=0)
    assert old.fingerprint() == model.fingerprint()


def test_it_supports_recording_and_editing(model):
    assert (model.family, model.width, model.vocabulary, model.context) == ("fairseq-adaptive", WIDTH, ENDS[-1], 16)
    assert model.proof is not None and model.proof.coefficients < 1e-5
    assert [layer.memories for layer in model.layers] == [MEMORIES] * LAYERS
    coefficients = {}
    with (
        model.watch(lambda layer, block: coefficients.__setitem__(layer, block.everywhere().clone())),
        model.record() as recording,
    ):
        last = model.run_body(TOKENS)
    for layer, memories in enumerate(model.layers):
        m = recording.coefficients[layer]
        assert torch.equal(coefficients[layer], m) and (m >= 0).all() and (m > 0).any()
        y = m @ memories.values + memories.groups[0].value_bias
        torch.testing.assert_close(recording.y[layer], y, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(recording.o[layer], recording.r[layer] + y, atol=1e-5, rtol=1e-5)
    assert torch.equal(recording.o[LAYERS - 1], last)
    with model.edit({1: lambda m, _: torch.zeros_like(m)}), model.record() as silent:
        model.run_body(TOKENS)
    torch.testing.assert_close(silent.y[1], model.layers[1].groups[0].value_bias.expand_as(silent.y[1]))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.network.modules())


def test_the_context_comes_from_the_checkpoint_and_right_padding_has_no_effect(model, tmp_path):
    padded = torch.cat([TOKENS, torch.zeros(2, 5, dtype=torch.int64)], dim=1)
    torch.testing.assert_close(model.run_body(padded)[:, :7], model.run_body(TOKENS), atol=1e-5, rtol=1e-5)
    with pytest.raises(SettingError, match="more than tied reads at once"):
        model.run_body(torch.zeros(1, 17, dtype=torch.int64))
    args = settings(True, True)
    del args.max_target_positions
    endless = load(write(tmp_path, args, make_tensors()))
    assert endless.context is None
    assert endless.run_body(torch.zeros(1, 300, dtype=torch.int64)).isfinite().all()


def test_scores_are_log_probabilities_for_states_and_values(model):
    states = model.run_body(TOKENS)
    scores = model.lens.state_logits(states)
    torch.testing.assert_close(scores, model.logits(TOKENS))
    torch.testing.assert_close(scores.exp().sum(-1), torch.ones(2, 7))
    torch.testing.assert_close(model.lens.probabilities(scores), scores.exp())
    values = model.layers[1].values
    torch.testing.assert_close(model.lens.value_scores(values, 1, "raw"), model.lens.state_logits(values))
    assert model.lens.readings == ("raw",) and model.lens.bias is None
    with pytest.raises(SettingError, match="folded"):
        model.lens.value_scores(values, 1, "folded")


def test_within_a_band_the_embedding_gives_the_scores_up_to_a_constant(model, monkeypatch):
    values = model.layers[2].values
    whole = model.lens.value_scores(values, 2)
    monkeypatch.setattr(fairseq, "_SCORES_AT_ONCE", 1)
    torch.testing.assert_close(model.lens.value_scores(values, 2), whole)
    difference = whole - values @ model.lens.embedding.T
    for start, end in zip((0, *ENDS), ENDS, strict=False):
        band = difference[:, start:end]
        torch.testing.assert_close(band, band[:, :1].expand_as(band), atol=1e-4, rtol=0)
    words = torch.arange(ENDS[-1])[None]
    torch.testing.assert_close(model.network.input(words)[0], model.lens.input_embedding)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_precisions_pass_the_proof(folder, dtype):
    model = load(folder, dtype=dtype)
    assert str(model.dtype) == f"torch.{dtype}"
    scores = model.lens.value_scores(model.layers[0].values, 0)
    assert scores.dtype == (torch.float64 if dtype == "float64" else torch.float32)


@pytest.mark.parametrize("activation", ["gelu", "gelu_accurate"])
def test_the_checkpoints_variant_of_gelu_is_used(tmp_path, activation):
    model = load(write(tmp_path, settings(True, True, activation_fn=activation), make_tensors()))
    with model.record() as recording:
        model.run_body(TOKENS)
    x = torch.nn.functional.layer_norm(recording.r[0], (WIDTH,), *model.layers[0].input_norm.module.parameters())
    raw = x @ model.layers[0].keys.T + model.layers[0].groups[0].key_bias
    approximate = "none" if activation == "gelu" else "tanh"
    expected = torch.nn.functional.gelu(raw, approximate=approximate)
    torch.testing.assert_close(recording.coefficients[0], expected, atol=1e-5, rtol=1e-5)


MUST_BE_SET = ("decoder_normalize_before", "no_decoder_final_norm", "adaptive_input")
MUST_NOT_BE_SET = (
    *("decoder_learned_pos", "no_token_positional_embeddings", "character_embeddings", "layernorm_embedding"),
    *("share_decoder_input_output_embed", "decoder_relative_attention", "scale_heads"),
)
REFUSED_SETTINGS = [
    *((name, False, name) for name in MUST_BE_SET),
    *((name, True, name) for name in MUST_NOT_BE_SET),
    *(("activation_fn", value, "activation_fn") for value in ("swish", ["relu"])),
    *(("decoder_layers", value, "decoder_layers") for value in (2.5, 10**30)),
    *(("decoder_embed_dim", value, "decoder_embed_dim") for value in (math.nan, math.inf)),
    ("decoder_layers", 10**9, "weights for 3 layers"),
    ("decoder_layers_to_keep", "0,2", "decoder_layers_to_keep"),
    ("decoder_output_dim", 6, "decoder_output_dim"),
    ("decoder_attention_heads", 5, "heads"),
    ("arch", "transformer_wmt_en_de", "arch"),
    ("moe_freq", 2, "moe_freq"),
    ("adaptive_input_cutoff", "23,11", "adaptive_input_cutoff"),
    ("adaptive_softmax_cutoff", None, "adaptive_softmax_cutoff"),
]


@pytest.mark.parametrize(("setting", "value", "words"), REFUSED_SETTINGS)
def test_an_unsupported_setting_is_named(tmp_path, setting, value, words):
    kind = ModelError if value == 10**9 else UnsupportedModel
    refused(write(tmp_path, settings(True, True, **{setting: value}), make_tensors()), words, kind)


def convert(name, kind):
    return lambda t: t.update({name: t[name].to(kind)})


FC2 = "decoder.layers.1.fc2.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("decoder.layers.1.fc1.bias"), r"no weights for blocks\.1\.keys\.bias"),
        (lambda t: t.pop("decoder.layers.1.self_attn.v_proj.bias"), r"self_attn\.q_proj\.bias"),
        (lambda t: t.update({"decoder.layers.3.fc1.bias": torch.ones(MEMORIES)}), r"blocks\.3\.keys\.bias"),
        (lambda t: t.update({"decoder.layers.0.moe.gate": torch.ones(3)}), r"decoder\.layers\.0\.moe\.gate"),
        (lambda t: t.update({"decoder.layers.0.fc2.bias": torch.ones(5)}), r"\[5\], but .* require \[12\]"),
        (
            lambda t: t.update({"decoder.adaptive_softmax.tail.1.2.weight": torch.ones(14, 3)}),
            "tied in the settings but differ",
        ),
        (lambda t: t.pop("decoder.adaptive_softmax.version"), "no version"),
        (lambda t: t["decoder.layers.2.fc2.weight"].fill_(math.nan), r"blocks\.2\.values\.weight contains NaN"),
        (lambda t: t.update({"decoder.layers.0.fc2.bias": "text"}), "not a tensor"),
        (lambda t: t.update({"decoder.layer_norm.weight": torch.ones(WIDTH)}), r"decoder\.layer_norm\.weight"),
        (lambda t: t.update({"layers.1.fc2.weight": t[FC2] * 2}), "twice"),
        (convert(FC2, torch.complex64), r"fc2\.weight"),
        (convert(FC2, torch.int64), r"fc2\.weight"),
        (convert(FC2, "meta"), r"fc2\.weight"),
    ],
)
def test_mismatched_weights_are_named(tmp_path, change, words):
    tensors = make_tensors()
    change(tensors)
    refused(write(tmp_path, settings(True, True), tensors), words)


class Trap:
    """A class whose pickle runs a command when loaded without restrictions."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_checkpoint_with_code_is_rejected_and_nothing_runs(tmp_path):
    sprung = tmp_path / "sprung"
    args = settings(True, True, anything=Trap(sprung))
    refused(write(tmp_path / "trap", args, make_tensors()), r"tries to import \w+\.mkdir, which is not allowed")
    assert not sprung.exists()


def test_a_file_that_is_not_a_checkpoint_is_rejected(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for content in (b"", b"not a checkpoint", b"PK\x03\x04 broken"):
        (tmp_path / "model.pt").write_bytes(content)
        refused(tmp_path, "not a readable checkpoint")
    torch.save({"args": None, "model": {}}, tmp_path / "model.pt")
    refused(tmp_path, "its settings \(args\) or its model are missing")


def test_a_wrong_dictionary_and_another_tokenizer_are_rejected(folder, tmp_path):
    refused(folder, r"dict\.txt", SettingError, tokenizer="gpt2")
    other = write(tmp_path, settings(True, True), make_tensors(), words=WORDS[:-1])
    refused(other, r"but its settings and dict\.txt require")


def test_the_fingerprint_depends_on_weights_words_and_settings_only(folder, model, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    assert load(tmp_path / "copy").fingerprint() == model.fingerprint()
    nudged = make_tensors()
    nudged["decoder.layers.2.fc2.bias"].add_(1e-6)
    variants = [
        load(write(tmp_path / "weights", settings(True, True), nudged)),
        load(write(tmp_path / "words", settings(True, True), make_tensors(), words=["other", *WORDS[1:]])),
        load(write(tmp_path / "scale", settings(True, True, no_scale_embedding=True), make_tensors())),
        load(write(tmp_path / "bos", settings(True, True, add_bos_token=True), make_tensors())),
    ]
    assert len({model.fingerprint(), *(variant.fingerprint() for variant in variants)}) == 5


def test_words_are_split_at_white_space(model):
    text = "  word0 word7\tnowhere\u2003word32 </s> <pad>"
    encoded = model.tokenizer.encode([text, ""])
    assert encoded[0].ids == [4, 11, 3, 36, 2, 3]
    assert [text[:end].split()[-1] for end in encoded[0].ends] == text.split()
    assert encoded[1].ids == [] == encoded[1].ends


def test_the_tokenizer_knows_bos_and_the_text_of_tokens(model, tmp_path):
    tokenizer = model.tokenizer
    assert (tokenizer.bos, tokenizer.adds_bos, tokenizer.size) == (2, True, ENDS[-1])
    texts = [tokenizer.token_text(token) for token in (0, 1, 2, 3, 4, 36, 37)]
    assert texts == ["<s>", "<pad>", "</s>", "<unk>", "word0", "word32", "<no token 37>"]
    assert [tokenizer.id_of(text) for text in ("word0", " word32", "<unk>", "<pad>")] == [4, 36, 3, 1]
    for text, message in (("nowhere", "not in this model's dictionary"), ("word0 word1", "'word0' \\+ 'word1'")):
        with pytest.raises(UnknownName, match=message):
            tokenizer.id_of(text)
    for token in (-1, -5):
        with pytest.raises(UnknownName):
            tokenizer.token_text(token)
    assert load(write(tmp_path, settings(True, True, add_bos_token=True), make_tensors())).tokenizer.bos == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "line 1"),
        (b"word 1\nalone\n", "line 2: expected a word"),
        (b"word 1\nword many\n", "line 2: expected a word"),
        (b"word 1\nword 1\n", "line 2: 'word' occurs twice"),
        (b"<unk> 1\n", "line 1: '<unk>' occurs twice"),
        (b"\xff\xfe 1\n", "UTF-8"),
    ],
)
def test_a_damaged_dictionary_is_rejected_with_the_line(tmp_path, content, words):
    (tmp_path / "dict.txt").write_bytes(content)
    with pytest.raises(ModelError, match=words):
        read_dictionary(tmp_path / "dict.txt")


def test_overwriting_words_and_a_byte_order_mark_are_supported(tmp_path):
    (tmp_path / "dict.txt").write_text("\ufeffword 1\nlong dash 2\nword 3 #fairseq:overwrite\n", encoding="utf-8")
    words = read_dictionary(tmp_path / "dict.txt")
    assert words[4:] == ["word", "long dash", "word"]
    assert WordTokenizer(words).id_of("word") == 6
