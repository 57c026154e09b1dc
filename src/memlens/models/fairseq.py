"""The paper's model, a fairseq checkpoint with adaptive input and softmax, as a MemoryModel. fairseq is not needed.

The checkpoint is a folder with model.pt and dict.txt. Tokens are whole words. The first four tokens are special, and
line k of dict.txt, counted from 0, is token k + 4. Other words become `<unk>`. The lens is the adaptive softmax. Its
scores are log-probabilities over all words. States and values are read in the same way, because there is no final norm
and no bias.

The file has four sections: the network, the checkpoint, the words and the model.
"""

import argparse
import json
import math
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, pad, scaled_dot_product_attention

from memlens.errors import ModelError, UnknownName, UnsupportedModel
from memlens.memory import EncodedText
from memlens.models.groups import LinearGroup, MemoryLayer
from memlens.models.lens import Lens, Norm, at_least_float32
from memlens.models.memory_model import MemoryModel, fingerprint_of
from memlens.models.tokenizer import Tokenizer

# The network
#
# Adaptive input, sinusoids, pre-norm blocks, adaptive softmax. Words are sorted by frequency and split into bands.
# Rarer bands have narrower vectors. On the input side every band, including the first, has a projection. On the output
# side the first band (the head) has no projection, and the head also scores one class for each further band. The
# probability of a rare word is the probability of its class times its probability within the band (Grave et al. 2017;
# Baevski and Auli 2019).

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": gelu,
    "gelu_accurate": partial(gelu, approximate="tanh"),
    "gelu_fast": partial(gelu, approximate="tanh"),  # older name of gelu_accurate
}
_FIRST_POSITION = 2  # the padding token's id plus one
_SCORES_AT_ONCE = 1 << 24  # maximum number of intermediate values of the softmax in memory


@dataclass(frozen=True)
class Shape:
    """The sizes of a network. Each band is given by the word id at which it ends."""

    layers: int
    width: int
    memories: int
    heads: int
    activation: str
    input_ends: tuple[int, ...]
    output_ends: tuple[int, ...]
    input_factor: float
    output_factor: float
    scale: float  # factor of word vectors

    @property
    def vocabulary(self) -> int:
        return self.output_ends[-1]


def band_widths(width: int, factor: float, bands: int) -> list[int]:
    return [int(width // factor**band) for band in range(bands)]


class AdaptiveInput(nn.Module):
    """Word vectors, which are narrower for rarer words. Each band is projected to the model's width."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.ends, self.width = shape.input_ends, shape.width
        widths = band_widths(shape.width, shape.input_factor, len(self.ends))
        sizes = [end - start for start, end in zip((0, *self.ends), self.ends, strict=False)]
        self.words = nn.ModuleList(nn.Embedding(size, narrow) for size, narrow in zip(sizes, widths, strict=True))
        self.projections = nn.ModuleList(nn.Linear(narrow, shape.width, bias=False) for narrow in widths)

    def forward(self, tokens: Tensor) -> Tensor:
        flat = tokens.reshape(-1)
        some_weight = next(self.parameters())
        vectors = some_weight.new_empty(len(flat), self.width)
        start = 0
        for end, words, projection in zip(self.ends, self.words, self.projections, strict=True):
            places = ((flat >= start) & (flat < end)).nonzero().squeeze(1)
            vectors[places] = projection(words(flat[places] - start))
            start = end
        return vectors.view(*tokens.shape, self.width)

    def table(self) -> Tensor:
        """Compute the projected vectors of all words, [words, d]."""
        pieces = [projection(words.weight) for words, projection in zip(self.words, self.projections, strict=True)]
        return torch.cat(pieces)


class TailBand(nn.Module):
    """The output vectors of a band of rarer words."""

    def __init__(self, width: int, narrow: int, size: int) -> None:
        super().__init__()
        self.projection = nn.Parameter(
            torch.empty(width, narrow)
        )  # [d, narrow], like the projections of the input side
        self.words = nn.Parameter(torch.empty(size, narrow))


class AdaptiveSoftmax(nn.Module):
    """Exact log-probabilities over all words."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.ends = shape.output_ends
        widths = band_widths(shape.width, shape.output_factor, len(self.ends))
        self.words = nn.Parameter(torch.empty(self.ends[0], shape.width))
        self.classes = nn.Parameter(torch.empty(len(self.ends) - 1, shape.width))
        self.tails = nn.ModuleList(
            TailBand(shape.width, narrow, end - start)
            for start, end, narrow in zip(self.ends, self.ends[1:], widths[1:], strict=False)
        )

    def forward(self, states: Tensor) -> Tensor:
        """Return log-probabilities [..., vocabulary] of states [..., d], float32 or float64.

        Products use the dtype of `states`. Rows are processed in small blocks to limit memory.
        """
        flat = states.reshape(-1, states.shape[-1])
        result = flat.new_empty(len(flat), self.ends[-1], dtype=torch.promote_types(flat.dtype, torch.float32))
        head = torch.cat([self.words, self.classes]).to(flat.dtype)
        tails = [(tail.projection.to(flat.dtype), tail.words.to(flat.dtype)) for tail in self._each_tail()]
        rows = max(1, _SCORES_AT_ONCE // self.ends[-1])
        for first in range(0, len(flat), rows):
            self._fill_(result[first : first + rows], flat[first : first + rows], head, tails)
        return result.view(*states.shape[:-1], self.ends[-1])

    def _fill_(self, result: Tensor, states: Tensor, head: Tensor, tails: list[tuple[Tensor, Tensor]]) -> None:
        scores = at_least_float32(states @ head.T)  # [rows, head words + classes]
        scores = scores - scores.logsumexp(-1, keepdim=True)
        start = self.ends[0]
        result[:, :start] = scores[:, :start]
        for band, (projection, words) in enumerate(tails):
            end = self.ends[band + 1]
            within = at_least_float32((states @ projection) @ words.T)  # [rows, words of the band]
            # including the class's log-probability in the normalizer saves a pass over the band
            shift = within.logsumexp(-1, keepdim=True) - scores[:, self.ends[0] + band, None]
            result[:, start:end] = within - shift
            start = end

    def table(self) -> Tensor:
        """Return each word's direction, [vocabulary, d]: its score before normalization is state @ direction."""
        return torch.cat([self.words, *(tail.words @ tail.projection.T for tail in self._each_tail())])

    def rows(self, words: Tensor) -> Tensor:
        """Return the directions [n, d] of words [n]. For a rarer word, the row of its band's class is added."""
        rows = self.words.new_empty(len(words), self.words.shape[1])
        is_head = words < self.ends[0]
        rows[is_head] = self.words[words[is_head]]
        for band, tail in enumerate(self._each_tail()):
            start, end = self.ends[band : band + 2]
            is_in_band = (words >= start) & (words < end)
            rows[is_in_band] = tail.words[words[is_in_band] - start] @ tail.projection.T + self.classes[band]
        return rows

    def _each_tail(self) -> Iterator[TailBand]:
        for tail in self.tails:
            assert isinstance(tail, TailBand)
            yield tail


class CausalAttention(nn.Module):
    """Causal self-attention with one projection for queries, keys and values of all heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, states: Tensor) -> Tensor:
        batch, positions, width = states.shape
        parts = self.queries_keys_values(states).view(batch, positions, 3, self.heads, width // self.heads)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)  # each [batch, heads, pos, d / heads]
        mixed = scaled_dot_product_attention(queries, keys, values, is_causal=True)
        output: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, positions, width))
        return output


class AdaptiveBlock(nn.Module):
    """One layer: attention, then the memories, with a LayerNorm before each of the two."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = CausalAttention(shape.width, shape.heads)
        self.memory_norm = nn.LayerNorm(shape.width)
        self.keys = nn.Linear(shape.width, shape.memories)
        self.values = nn.Linear(shape.memories, shape.width)
        self.activate = ACTIVATIONS[shape.activation]

    def forward(self, states: Tensor) -> Tensor:
        states = states + self.attention(self.attention_norm(states))
        added: Tensor = self.values(self.activate(self.keys(self.memory_norm(states))))
        return states + added


class AdaptiveTransformer(nn.Module):
    """The network: tokens [batch, pos] to log-probabilities [batch, pos, vocabulary]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.scale = shape.scale
        self.input = AdaptiveInput(shape)
        self.blocks = nn.ModuleList(AdaptiveBlock(shape) for _ in range(shape.layers))
        self.output = AdaptiveSoftmax(shape)

    def forward(self, tokens: Tensor) -> Tensor:
        log_probabilities: Tensor = self.output(self.body(tokens))
        return log_probabilities

    def body(self, tokens: Tensor) -> Tensor:
        """Return the state after the last block, [batch, pos, d]. There is no final norm."""
        states: Tensor = self.scale * self.input(tokens)
        states = states + sinusoids(tokens.shape[1], states.shape[-1]).to(states)
        for block in self.blocks:
            states = block(states)
        return states


def sinusoids(positions: int, width: int) -> Tensor:
    """Return sinusoids [pos, d] for positions counted from 2: the sines of all frequencies, then the cosines."""
    half = width // 2
    frequencies = torch.exp(torch.arange(half, dtype=torch.float32) * -(math.log(10_000) / (half - 1)))
    angles = torch.arange(_FIRST_POSITION, _FIRST_POSITION + positions, dtype=torch.float32)[:, None] * frequencies
    return pad(torch.cat([angles.sin(), angles.cos()], dim=1), (0, width % 2))


# The checkpoint
#
# model.pt is a pickle. torch's reader for plain data opens it and allows only tensors, plain values and
# argparse.Namespace. Files with anything else are rejected, as are unknown settings and tensors.

Settings = Mapping[str, Any]

_REQUIRED: dict[str, tuple[Any, str]] = {
    "decoder_normalize_before": (True, "its norms follow the sums (post-norm), so o = r + y does not hold"),
    "no_decoder_final_norm": (True, "it has a norm after the last layer, which is not supported"),
    "adaptive_input": (True, "its input embedding is not adaptive"),
    "decoder_learned_pos": (False, "its positions are learned, not sinusoids"),
    "no_token_positional_embeddings": (False, "it has no positions"),
    "character_embeddings": (False, "it reads characters, not words"),
    "layernorm_embedding": (False, "it has a norm on its embedding"),
    "share_decoder_input_output_embed": (False, "its output embedding is not an adaptive softmax"),
    "decoder_layers_to_keep": (None, "some of its layers are dropped"),
}
# settings that are read below or affect only training
_KNOWN_SETTINGS = frozenset(_REQUIRED) | {
    *("decoder_layers", "decoder_embed_dim", "decoder_input_dim", "decoder_output_dim", "decoder_ffn_embed_dim"),
    *("decoder_attention_heads", "decoder_layerdrop", "decoder_final_norm", "decoder_embed_path"),
    *("adaptive_input_cutoff", "adaptive_input_factor", "adaptive_softmax_cutoff", "adaptive_softmax_factor"),
    *("adaptive_softmax_dropout", "tie_adaptive_weights", "tie_adaptive_proj"),
}
# settings with these prefixes change the network, so unknown ones are rejected if they are set
_SHAPING = ("decoder_", "adaptive_", "tie_adaptive_", "moe_", "scale_", "alibi", "base_layers", "cross_", "encoder_")
_BOOKKEEPING = re.compile(r"version|adaptive_softmax\.version|(.*\.)?_float_tensor")


def read_checkpoint(path: Path, name: str) -> tuple[Settings, dict[str, Tensor]]:
    """Return the settings and the tensors of a model.pt."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        imported = re.search(r"GLOBAL (\S+)", str(error))
        if imported is None:
            raise ModelError(f"{path} is not a readable checkpoint; download it again") from error
        raise ModelError(
            f"{path} tries to import {imported[1]}, which is not allowed; a checkpoint may contain settings and tensors"
        ) from error
    except Exception as error:  # damaged files cause all kinds of errors
        raise ModelError(f"{path} is not a readable checkpoint ({type(error).__name__}); download it again") from error
    settings = content.get("args") if isinstance(content, dict) else None
    tensors = content.get("model") if isinstance(content, dict) else None
    if not isinstance(settings, argparse.Namespace) or not isinstance(tensors, dict):
        raise ModelError(f"{path} is not a fairseq language model: its settings (args) or its model are missing")
    if not all(isinstance(key, str) and isinstance(value, Tensor) for key, value in tensors.items()):
        raise UnsupportedModel(f"{name}: its model contains something that is not a tensor")
    _check_tensors(tensors, name)
    return _with_defaults(vars(settings)), tensors


def _check_tensors(tensors: Mapping[str, Tensor], name: str) -> None:
    for key, tensor in tensors.items():
        if tensor.is_meta:
            raise ModelError(f"{name}: {key} is a tensor without data; download the checkpoint again")
        if not tensor.is_floating_point() and not _BOOKKEEPING.fullmatch(key.removeprefix("decoder.")):
            raise UnsupportedModel(f"{name}: {key} has dtype {tensor.dtype}; only floating-point weights are supported")


def _with_defaults(file_settings: Settings) -> Settings:
    """Add settings that older files omit, with the values that fairseq uses."""
    defaults = {"decoder_normalize_before": True, "no_decoder_final_norm": False, "adaptive_input": False}
    settings = defaults | dict(file_settings)
    if "no_tie_adaptive_proj" in settings:  # the file is older than fairseq's final norm
        settings["no_decoder_final_norm"] = True
        settings.setdefault("tie_adaptive_proj", not settings["no_tie_adaptive_proj"])
    if "decoder_final_norm" in settings:
        settings["no_decoder_final_norm"] = not settings["decoder_final_norm"]
    return settings


def read_shape(settings: Settings, vocabulary: int, name: str) -> Shape:
    """Return the shape of the network that the settings describe.

    Raises:
        UnsupportedModel: The settings describe another kind of network.
    """
    _check_settings(settings, name)
    width = _number(settings, "decoder_embed_dim", 512, name)
    for side in ("decoder_input_dim", "decoder_output_dim"):
        if settings.get(side) not in (None, width):
            raise UnsupportedModel(f"{name}: {side} is {settings[side]}; only the model's width {width} is supported")
    shape = Shape(
        layers=_number(settings, "decoder_layers", 6, name),
        width=width,
        memories=_number(settings, "decoder_ffn_embed_dim", 2048, name),
        heads=_number(settings, "decoder_attention_heads", 8, name),
        activation=settings.get("activation_fn", "relu"),
        input_ends=_band_ends(settings, "adaptive_input_cutoff", vocabulary, name),
        output_ends=_band_ends(settings, "adaptive_softmax_cutoff", vocabulary, name),
        input_factor=_number(settings, "adaptive_input_factor", 4, name),
        output_factor=_number(settings, "adaptive_softmax_factor", 4, name),
        scale=1.0 if settings.get("no_scale_embedding") else math.sqrt(width),
    )
    if width < 4 or width % shape.heads:
        raise UnsupportedModel(f"{name}: width {width} cannot be split into {shape.heads} heads with sinusoids")
    if settings.get("tie_adaptive_weights") and shape.input_ends != shape.output_ends:
        raise UnsupportedModel(f"{name}: tie_adaptive_weights is set although the two adaptive cutoffs differ")
    return shape


def _check_settings(settings: Settings, name: str) -> None:
    kind = settings.get("arch")
    if not isinstance(kind, str) or not kind.startswith("transformer_lm"):
        raise UnsupportedModel(f"{name}: arch is {kind!r}; only fairseq's transformer_lm architectures are supported")
    for setting, (required, reason) in _REQUIRED.items():
        value = settings.get(setting)
        if (bool(value) if isinstance(required, bool) else value) != required:
            raise UnsupportedModel(f"{name}: {setting} is {value}: {reason}")
    if settings.get("activation_fn", "relu") not in tuple(ACTIVATIONS):
        supported = ", ".join(ACTIVATIONS)
        raise UnsupportedModel(f"{name}: activation_fn is {settings['activation_fn']!r}; supported: {supported}")
    for setting in sorted(settings):
        if setting.startswith(_SHAPING) and setting not in _KNOWN_SETTINGS and settings[setting]:
            raise UnsupportedModel(f"{name}: {setting} is {settings[setting]}, which is not supported")


def _number(settings: Settings, setting: str, default: int, name: str) -> int:
    value = settings.get(setting, default)
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole or not 1 <= value < 2**31:
        raise UnsupportedModel(f"{name}: {setting} is {value!r}; it must be an integer of at least 1")
    return int(value)


def _band_ends(settings: Settings, setting: str, vocabulary: int, name: str) -> tuple[int, ...]:
    value = settings.get(setting)
    parts = value.strip("()[] ").split(",") if isinstance(value, str) else value
    try:
        ends = [int(part) for part in parts or ()]
    except (TypeError, ValueError):
        ends = []
    if ends and ends[-1] < vocabulary:
        ends.append(vocabulary)
    if not ends or ends[-1] != vocabulary or ends[0] < 1 or any(a >= b for a, b in pairwise(ends)):
        raise UnsupportedModel(f"{name}: {setting} is {value!r}, which does not split {vocabulary} words into bands")
    return tuple(ends)


def build_network(
    settings: Settings, tensors: Mapping[str, Tensor], shape: Shape, dtype: torch.dtype, name: str
) -> AdaptiveTransformer:
    """Return the network with the tensors of the checkpoint.

    Raises:
        ModelError: A tensor is missing or has the wrong shape.
        UnsupportedModel: A tensor is unknown.
    """
    if "decoder.adaptive_softmax.version" not in tensors:
        raise UnsupportedModel(f"{name}: its adaptive softmax has no version, so its head may be off by one word")
    stored_layers = sum(key.endswith(".fc1.weight") for key in tensors)
    if stored_layers != shape.layers:  # checked before the network is built, which could be huge
        raise ModelError(f"{name}: decoder_layers is {shape.layers}, but there are weights for {stored_layers} layers")
    with torch.device("meta"):
        network = AdaptiveTransformer(shape)
    tied_words = bool(settings.get("tie_adaptive_weights"))
    tied_projections = tied_words and bool(settings.get("tie_adaptive_proj"))
    weights = _rename(tensors, shape, tied_projections, name)
    for key, parameter in network.state_dict().items():
        if key not in weights:
            raise ModelError(f"{name} is incomplete: there are no weights for {key}; download the checkpoint again")
        if weights[key].shape != parameter.shape:
            actual_shape, expected_shape = list(weights[key].shape), list(parameter.shape)
            raise ModelError(f"{name}: {key} is {actual_shape}, but its settings and dict.txt require {expected_shape}")
    unknown_weights = sorted(set(weights) - set(network.state_dict()))
    if unknown_weights:
        raise UnsupportedModel(
            f"{name} has unknown weights: {unknown_weights[0]}; only the adaptive model is supported"
        )
    network.load_state_dict({key: tensor.to(dtype) for key, tensor in weights.items()}, assign=True)
    if tied_words:
        _tie_(network, tied_projections, name)
    return network.requires_grad_(False).eval()


_NAMES = (  # the name of a tensor in the checkpoint, after `decoder.`, and in the network
    (r"embed_tokens\.embeddings\.(\d+)\.0\.weight", r"input.words.\1.weight"),
    (r"embed_tokens\.embeddings\.(\d+)\.1\.weight", r"input.projections.\1.weight"),
    (r"layers\.(\d+)\.self_attn_layer_norm\.(weight|bias)", r"blocks.\1.attention_norm.\2"),
    (r"layers\.(\d+)\.self_attn\.in_proj_(weight|bias)", r"blocks.\1.attention.queries_keys_values.\2"),
    (r"layers\.(\d+)\.self_attn\.out_proj\.(weight|bias)", r"blocks.\1.attention.out.\2"),
    (r"layers\.(\d+)\.final_layer_norm\.(weight|bias)", r"blocks.\1.memory_norm.\2"),
    (r"layers\.(\d+)\.fc1\.(weight|bias)", r"blocks.\1.keys.\2"),
    (r"layers\.(\d+)\.fc2\.(weight|bias)", r"blocks.\1.values.\2"),
    (r"adaptive_softmax\.head\.word_proj\.weight", r"output.words"),
    (r"adaptive_softmax\.head\.class_proj\.weight", r"output.classes"),
    (r"adaptive_softmax\.tail\.(\d+)\.0\.weight", r"output.tails.\1.projection"),
    (r"adaptive_softmax\.tail\.(\d+)\.2\.weight", r"output.tails.\1.words"),
)


def _rename(tensors: Mapping[str, Tensor], shape: Shape, tied_projections: bool, name: str) -> dict[str, Tensor]:
    weights = {key.removeprefix("decoder."): tensor for key, tensor in tensors.items()}
    if len(weights) < len(tensors):
        raise UnsupportedModel(f"{name} has the same weights twice, with and without 'decoder.' in their names")
    weights = {key: tensor for key, tensor in weights.items() if not _BOOKKEEPING.fullmatch(key)}
    _join_attention_(weights)
    head = weights.pop("adaptive_softmax.head.weight", None)
    if head is not None:  # an untied head stores words and classes in one tensor
        words = shape.output_ends[0]
        weights["adaptive_softmax.head.word_proj.weight"] = head[:words]
        weights["adaptive_softmax.head.class_proj.weight"] = head[words:]
    renamed = {}
    for key, tensor in weights.items():
        new = next((re.sub(old, new, key) for old, new in _NAMES if re.fullmatch(old, key)), None)
        if new is None:
            raise UnsupportedModel(f"{name} has unknown weights: decoder.{key}")
        # an untied projection is stored transposed
        transposed = new.endswith(".projection") and not tied_projections
        renamed[new] = tensor.T.contiguous() if transposed else tensor
    return renamed


def _join_attention_(weights: dict[str, Tensor]) -> None:
    """Concatenate queries, keys and values of each layer into one tensor, as in older files."""
    for key in [key for key in weights if ".self_attn.q_proj." in key]:
        parts = [key.replace("q_proj", f"{part}_proj") for part in "qkv"]
        if all(part in weights for part in parts):
            joined_key = key.replace("q_proj.", "in_proj_")
            weights[joined_key] = torch.cat([weights.pop(part) for part in parts])


def _tie_(network: AdaptiveTransformer, projections: bool, name: str) -> None:
    """Share the tensors that the settings tie between input and output. Raises ModelError if two copies differ."""
    source, target = network.input, network.output
    pairs: list[tuple[nn.Module, str, nn.Parameter]] = [(target, "words", _weight(source.words[0]))]
    for band, tail in enumerate(target.tails, start=1):
        assert isinstance(tail, TailBand)
        pairs.append((tail, "words", _weight(source.words[band])))
        if projections:
            pairs.append((tail, "projection", _weight(source.projections[band])))
    for module, attribute, shared in pairs:
        if not torch.equal(getattr(module, attribute), shared):
            raise ModelError(
                f"{name}: input and output {attribute} are tied in the settings but differ in the checkpoint"
            )
        setattr(module, attribute, shared)


def _weight(module: nn.Module) -> nn.Parameter:
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    return weight


# The words

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
START, PADDING, END, UNKNOWN = range(4)
_WORD = re.compile(r"\S+")
_OVERWRITE = " #fairseq:overwrite"  # suffix of a word that replaces an earlier one


class WordTokenizer(Tokenizer):
    """A tokenizer whose tokens are the words of a dictionary."""

    def __init__(self, words: Sequence[str], bos: int = END) -> None:
        """Create a tokenizer from all words by id, special tokens first. If words are equal, the last one is used."""
        self._words = list(words)
        self._ids = {word: token for token, word in enumerate(self._words)}
        # attention ignores padding, so a text must not contain it
        self._ids[SPECIAL[PADDING]] = UNKNOWN
        self.bos = bos
        self.adds_bos = True

    @property
    def size(self) -> int:
        return len(self._words)

    def encode(self, texts: Sequence[str]) -> list[EncodedText]:
        matches = [list(_WORD.finditer(text)) for text in texts]
        return [
            EncodedText([self._ids.get(word[0], UNKNOWN) for word in words], [word.end() for word in words])
            for words in matches
        ]

    def token_text(self, token: int) -> str:
        """Return the word, without a leading space."""
        if token < 0:
            raise UnknownName(f"token {token} does not exist: tokens count from 0")
        return self._words[token] if token < self.size else f"<no token {token}>"

    def id_of(self, text: str) -> int:
        """Return the id of a word. Surrounding white space is ignored.

        Raises:
            UnknownName: The text is not exactly one word of the dictionary.
        """
        words = text.split()
        if len(words) != 1:
            split = " + ".join(repr(word) for word in words) or "empty"
            raise UnknownName(f"{text!r} is not one word but {split}; this model's tokens are whole words")
        if words[0] == SPECIAL[PADDING]:
            return PADDING
        if words[0] not in self._ids:
            raise UnknownName(f"{words[0]!r} is not in this model's dictionary and would become <unk>")
        return self._ids[words[0]]

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(self.token_text(token) for token in tokens)

    def save(self, folder: Path) -> None:
        raise ModelError(f"a word dictionary cannot be saved to {folder}; use the checkpoint's dict.txt")

    def serialized(self) -> str:
        return json.dumps({"words": self._words, "memlens": {"bos": self.bos, "adds_bos": self.adds_bos}})


def read_dictionary(path: Path) -> list[str]:
    """Return all words by id, special tokens first."""
    try:
        lines = path.read_text(encoding="utf-8-sig").rstrip("\n").split("\n")
    except (OSError, UnicodeError) as error:
        raise ModelError(f"{path} cannot be read as UTF-8 text; download the checkpoint again") from error
    words = list(SPECIAL)
    earlier_words = set(words)
    for number, line in enumerate(lines, start=1):
        entry = line.rstrip()
        is_overwriting = entry.endswith(_OVERWRITE)
        word, space, count = entry.removesuffix(_OVERWRITE).rpartition(" ")
        if not space or not word or not (count.isascii() and count.isdigit()):
            raise ModelError(
                f"{path}, line {number}: expected a word, a space and a count; download the checkpoint again"
            )
        if word in earlier_words and not is_overwriting:
            raise ModelError(f"{path}, line {number}: {word!r} occurs twice; download the checkpoint again")
        earlier_words.add(word)
        words.append(word)
    return words


# The model

FAMILY = "fairseq-adaptive"


def load_fairseq(folder: Path, device: torch.device, dtype: torch.dtype, *, name: str, source: str) -> "AdaptiveModel":
    """Load a folder with model.pt and dict.txt."""
    words = read_dictionary(folder / "dict.txt")
    settings, tensors = read_checkpoint(folder / "model.pt", name)
    shape = read_shape(settings, len(words), name)
    network = build_network(settings, tensors, shape, dtype, name).to(device)
    tokenizer = WordTokenizer(words, bos=START if settings.get("add_bos_token") else END)
    return AdaptiveModel(network, shape, tokenizer, name=name, source=source, context=_context(settings, name))


class AdaptiveModel(MemoryModel):
    """An AdaptiveTransformer with its dictionary, as a MemoryModel."""

    def __init__(
        self,
        network: AdaptiveTransformer,
        shape: Shape,
        tokenizer: WordTokenizer,
        *,
        name: str,
        source: str,
        context: int | None,
    ) -> None:
        super().__init__(
            name=name,
            source=source,
            family=FAMILY,
            network=network,
            layers=[_memory_layer(layer, block, shape.activation) for layer, block in enumerate(network.blocks)],
            lens=AdaptiveLens(network),
            tokenizer=tokenizer,
            context=context,
        )
        self._transformer = network
        self.shape = shape

    def _run_body(self, tokens: Tensor) -> Tensor:
        return self._transformer.body(tokens)

    def _logits(self, tokens: Tensor) -> Tensor:
        """Return log-probabilities, because scores of words in different bands are comparable only when normalized."""
        log_probabilities: Tensor = self._transformer(tokens)
        return log_probabilities

    def fingerprint(self) -> str:
        return fingerprint_of(str(self.shape), self._tokenizer, self.network)


class AdaptiveLens(Lens):
    """The adaptive softmax over all words. Every score is a log-probability, so the softmax of the scores is p.

    Scaling a value can change the order of words from different bands. Within a band, the scores of parts add up to the
    score of their sum, except for a constant. `embedding` contains the directions of the words.
    """

    def __init__(self, network: AdaptiveTransformer) -> None:
        post_norms = [None] * len(network.blocks)
        super().__init__(output=network.output, input_embedding=network.input, final_norm=None, post_norms=post_norms)

    @property
    def vocabulary(self) -> int:
        return int(self._output.ends[-1])

    @property
    def embedding(self) -> Tensor:
        """Each word's direction including projections, [vocabulary, d], computed at each access."""
        with torch.no_grad():
            return at_least_float32(self._output.table())

    @property
    def logit_is(self) -> str:
        return "the word's score plus the score of its band's class, before both are normalized"

    def logit_rows(self, tokens: Tensor) -> Tensor:
        """Return rows [n, d]. The product of a row with a state is log p of the word, without the normalizers.

        The row of the band's class is included. Without it, the probability within the band could rise while p falls.
        """
        with torch.no_grad():
            return at_least_float32(self._output.rows(tokens))

    @property
    def bias(self) -> None:
        return None

    @property
    def input_embedding(self) -> Tensor:
        """Each word's vector including projections but not the scale, [vocabulary, d], computed at each access."""
        with torch.no_grad():
            return at_least_float32(self._input_embedding.table())

    @property
    def tied(self) -> bool:
        return self._output.words is self._input_embedding.words[0].weight

    def folded_scores(self, vectors: Tensor, out: Tensor | None = None) -> Tensor:
        """Return log-probabilities [n, vocabulary] of values [n, d], read like the last state. `out` is ignored."""
        with torch.no_grad():
            scores: Tensor = self._output(vectors)
            return scores

    def state_logits(self, states: Tensor, gradients: bool = False) -> Tensor:
        """Return the log-probabilities that the model predicts from states [..., d]."""
        with torch.set_grad_enabled(gradients):
            scores: Tensor = self._output(states.to(self._output.words.dtype))
            return scores


def _memory_layer(number: int, block: Any, activation: str) -> MemoryLayer:
    assert isinstance(block, AdaptiveBlock)
    group = LinearGroup(
        activation=activation,
        activate=ACTIVATIONS[activation],
        key_projection=block.keys,
        down=block.values,
    )
    norm = Norm(block.memory_norm, "layer")
    return MemoryLayer.of(
        number=number, block=block, groups=[group], outputs=(block.values,), input_norm=norm, post_norm=None
    )


def _context(settings: Settings, name: str) -> int | None:
    """Return the longest input that the checkpoint was trained on. (Sinusoids themselves have no limit.)"""
    longest = settings.get("max_target_positions") or settings.get("tokens_per_sample")
    if longest is None:
        return None
    if not isinstance(longest, int) or longest < 1:
        raise ModelError(f"{name}: max_target_positions is {longest!r}; it must be an integer of at least 1")
    return longest
