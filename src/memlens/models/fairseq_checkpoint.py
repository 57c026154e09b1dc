"""Reads a fairseq language model's model.pt into an AdaptiveTransformer, without fairseq and without running anything.

The file is a pickle. torch's reader of plain data opens it, and only argparse.Namespace, a bag of settings, is allowed
besides tensors and plain values; a file that wants anything else is refused. So is every setting and every tensor that
this reader does not understand, by name.
"""

import argparse
import math
import pickle
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memlens.errors import ModelError, UnsupportedModel
from memlens.models.fairseq_network import ACTIVATIONS, AdaptiveTransformer, Shape, TailBand

Settings = Mapping[str, Any]

_WANTED: dict[str, tuple[Any, str]] = {
    "decoder_normalize_before": (True, "its norms follow the sums (post-norm), so that o = r + y does not hold"),
    "no_decoder_final_norm": (True, "it has a norm behind the last layer, which this reader does not know"),
    "adaptive_input": (True, "its input embedding is not adaptive"),
    "decoder_learned_pos": (False, "its positions are learned, not sinusoids"),
    "no_token_positional_embeddings": (False, "it has no positions"),
    "character_embeddings": (False, "it reads characters, not words"),
    "layernorm_embedding": (False, "it has a norm on its embedding"),
    "share_decoder_input_output_embed": (False, "its output embedding is not an adaptive softmax"),
    "decoder_layers_to_keep": (None, "some of its layers are to be left out"),
}
# settings that are read below, or that matter in training only
_UNDERSTOOD = frozenset(_WANTED) | {
    *("decoder_layers", "decoder_embed_dim", "decoder_input_dim", "decoder_output_dim", "decoder_ffn_embed_dim"),
    *("decoder_attention_heads", "decoder_layerdrop", "decoder_final_norm", "decoder_embed_path"),
    *("adaptive_input_cutoff", "adaptive_input_factor", "adaptive_softmax_cutoff", "adaptive_softmax_factor"),
    *("adaptive_softmax_dropout", "tie_adaptive_weights", "tie_adaptive_proj"),
}
# a setting that begins so shapes the network: unknown ones are refused if they are set at all
_SHAPING = ("decoder_", "adaptive_", "tie_adaptive_", "moe_", "scale_", "alibi", "base_layers", "cross_", "encoder_")
_BOOKKEEPING = re.compile(r"version|adaptive_softmax\.version|(.*\.)?_float_tensor")


def read_checkpoint(path: Path, name: str) -> tuple[Settings, dict[str, Tensor]]:
    """The settings and the tensors of a model.pt."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL (\S+)", str(error))
        if wanted is None:
            raise ModelError(f"{path} is not a readable checkpoint; get it again") from error
        raise ModelError(
            f"{path} wants {wanted[1]} while it is read, which is refused; "
            "only a checkpoint of settings and tensors can be read"
        ) from error
    except Exception as error:  # a damaged file makes torch stumble over anything
        raise ModelError(f"{path} is not a readable checkpoint ({type(error).__name__}); get it again") from error
    settings = content.get("args") if isinstance(content, dict) else None
    tensors = content.get("model") if isinstance(content, dict) else None
    if not isinstance(settings, argparse.Namespace) or not isinstance(tensors, dict):
        raise ModelError(f"{path} is no fairseq checkpoint of this kind: it lacks its settings (args) or its model")
    if not all(isinstance(key, str) and isinstance(value, Tensor) for key, value in tensors.items()):
        raise UnsupportedModel(f"{name}: its model holds something that is not a tensor")
    _refuse_odd_tensors(tensors, name)
    return _with_defaults(vars(settings)), tensors


def _refuse_odd_tensors(tensors: Mapping[str, Tensor], name: str) -> None:
    for key, tensor in tensors.items():
        if tensor.is_meta:
            raise ModelError(f"{name}: {key} is a tensor without numbers; get the checkpoint again")
        if not tensor.is_floating_point() and not _BOOKKEEPING.fullmatch(key.removeprefix("decoder.")):
            raise UnsupportedModel(f"{name}: {key} holds {tensor.dtype}; only real floating-point weights can be read")


def _with_defaults(given: Settings) -> Settings:
    """Settings that older files leave out, as fairseq filled them in."""
    settings = {"decoder_normalize_before": True, "no_decoder_final_norm": False, "adaptive_input": False} | dict(given)
    if "no_tie_adaptive_proj" in settings:  # written before there was a final norm
        settings["no_decoder_final_norm"] = True
        settings.setdefault("tie_adaptive_proj", not settings["no_tie_adaptive_proj"])
    if "decoder_final_norm" in settings:
        settings["no_decoder_final_norm"] = not settings["decoder_final_norm"]
    return settings


def read_shape(settings: Settings, vocabulary: int, name: str) -> Shape:
    """The network that the settings describe; refused where they describe another kind."""
    _refuse_other_kinds(settings, name)
    width = _number(settings, "decoder_embed_dim", 512, name)
    for side in ("decoder_input_dim", "decoder_output_dim"):
        if settings.get(side) not in (None, width):
            raise UnsupportedModel(f"{name}: {side} is {settings[side]}; only the model's width {width} can be read")
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


def _refuse_other_kinds(settings: Settings, name: str) -> None:
    kind = settings.get("arch")
    if not isinstance(kind, str) or not kind.startswith("transformer_lm"):
        raise UnsupportedModel(f"{name}: arch is {kind!r}; only fairseq's transformer_lm kinds can be read")
    for setting, (wanted, reason) in _WANTED.items():
        value = settings.get(setting)
        if (bool(value) if isinstance(wanted, bool) else value) != wanted:
            raise UnsupportedModel(f"{name}: {setting} is {value}: {reason}")
    if settings.get("activation_fn", "relu") not in tuple(ACTIVATIONS):
        known = ", ".join(ACTIVATIONS)
        raise UnsupportedModel(f"{name}: activation_fn is {settings['activation_fn']!r}; memlens knows {known}")
    for setting in sorted(settings):
        if setting.startswith(_SHAPING) and setting not in _UNDERSTOOD and settings[setting]:
            raise UnsupportedModel(f"{name}: {setting} is {settings[setting]}, a setting that memlens does not know")


def _number(settings: Settings, setting: str, default: int, name: str) -> int:
    value = settings.get(setting, default)
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole or not 1 <= value < 2**31:
        raise UnsupportedModel(f"{name}: {setting} is {value!r}, not a whole number from 1")
    return int(value)


def _band_ends(settings: Settings, setting: str, vocabulary: int, name: str) -> tuple[int, ...]:
    given = settings.get(setting)
    parts = given.strip("()[] ").split(",") if isinstance(given, str) else given
    try:
        ends = [int(part) for part in parts or ()]
    except (TypeError, ValueError):
        ends = []
    if ends and ends[-1] < vocabulary:
        ends.append(vocabulary)
    if not ends or ends[-1] != vocabulary or ends[0] < 1 or any(a >= b for a, b in pairwise(ends)):
        raise UnsupportedModel(f"{name}: {setting} is {given!r}, which does not cut {vocabulary} words into bands")
    return tuple(ends)


def build_network(
    settings: Settings, tensors: Mapping[str, Tensor], shape: Shape, dtype: torch.dtype, name: str
) -> AdaptiveTransformer:
    """The network with every tensor of the checkpoint in its place; one missing, left over or misshapen is refused."""
    if "decoder.adaptive_softmax.version" not in tensors:
        raise UnsupportedModel(f"{name}: its adaptive softmax has no version, so its head may be off by one word")
    there = sum(key.endswith(".fc1.weight") for key in tensors)
    if there != shape.layers:  # before a network of any size is built
        raise ModelError(f"{name}: decoder_layers is {shape.layers}, but there are weights for {there} layers")
    with torch.device("meta"):
        network = AdaptiveTransformer(shape)
    tied_words = bool(settings.get("tie_adaptive_weights"))
    tied_projections = tied_words and bool(settings.get("tie_adaptive_proj"))
    given = _renamed(tensors, shape, tied_projections, name)
    for wanted, parameter in network.state_dict().items():
        if wanted not in given:
            raise ModelError(f"{name} is not whole: there are no weights for {wanted}; get the checkpoint again")
        if given[wanted].shape != parameter.shape:
            actual, right = list(given[wanted].shape), list(parameter.shape)
            raise ModelError(f"{name}: {wanted} is {actual} where its settings and dict.txt say {right}")
    unknown = sorted(set(given) - set(network.state_dict()))
    if unknown:
        raise UnsupportedModel(f"{name} has weights that its kind does not have: {unknown[0]}")
    network.load_state_dict({key: tensor.to(dtype) for key, tensor in given.items()}, assign=True)
    if tied_words:
        _tie_(network, tied_projections, name)
    return network.requires_grad_(False).eval()


_NAMES = (  # what a tensor is called in the checkpoint, behind `decoder.`, and here
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


def _renamed(tensors: Mapping[str, Tensor], shape: Shape, tied_projections: bool, name: str) -> dict[str, Tensor]:
    given = {key.removeprefix("decoder."): tensor for key, tensor in tensors.items()}
    if len(given) < len(tensors):
        raise UnsupportedModel(f"{name} has the same weights twice, with and without 'decoder.' in their names")
    given = {key: tensor for key, tensor in given.items() if not _BOOKKEEPING.fullmatch(key)}
    _join_attention_(given)
    head = given.pop("adaptive_softmax.head.weight", None)
    if head is not None:  # words and classes of an untied head lie in one tensor
        words = shape.output_ends[0]
        given["adaptive_softmax.head.word_proj.weight"] = head[:words]
        given["adaptive_softmax.head.class_proj.weight"] = head[words:]
    renamed = {}
    for key, tensor in given.items():
        new = next((re.sub(old, here, key) for old, here in _NAMES if re.fullmatch(old, key)), None)
        if new is None:
            raise UnsupportedModel(f"{name} has weights that its kind does not have: decoder.{key}")
        # a projection of its own is stored the other way round than one shared with the input side
        turned = new.endswith(".projection") and not tied_projections
        renamed[new] = tensor.T.contiguous() if turned else tensor
    return renamed


def _join_attention_(given: dict[str, Tensor]) -> None:
    """Queries, keys and values of a layer in one tensor, as older files hold them."""
    for key in [key for key in given if ".self_attn.q_proj." in key]:
        parts = [key.replace("q_proj", f"{part}_proj") for part in "qkv"]
        if all(part in given for part in parts):
            joined = key.replace("q_proj.", "in_proj_")
            given[joined] = torch.cat([given.pop(part) for part in parts])


def _tie_(network: AdaptiveTransformer, projections: bool, name: str) -> None:
    """Let input and output side share what the settings say they share; refused where the two copies differ."""
    source, target = network.input, network.output
    pairs: list[tuple[nn.Module, str, nn.Parameter]] = [(target, "words", _weight(source.words[0]))]
    for band, tail in enumerate(target.tails, start=1):
        assert isinstance(tail, TailBand)
        pairs.append((tail, "words", _weight(source.words[band])))
        if projections:
            pairs.append((tail, "projection", _weight(source.projections[band])))
    for module, attribute, shared in pairs:
        if not torch.equal(getattr(module, attribute), shared):
            raise ModelError(f"{name}: input and output {attribute} are said to be tied but differ in the checkpoint")
        setattr(module, attribute, shared)


def _weight(module: nn.Module) -> nn.Parameter:
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    return weight
