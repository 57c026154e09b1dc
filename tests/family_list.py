"""The parts of eighteen architectures by their paths in the code, which discovery must find without this list."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest


class Place(NamedTuple):
    """Dotted paths from the causal LM (blocks, final_norm) or within a block."""

    blocks: str
    final_norm: str
    keys: str
    down: str
    input_norms: tuple[str, ...]  # the first one that exists in a block
    up: str | None = None
    post_norm: str | None = None
    parallel: bool = False


def _plain(blocks, final_norm, keys, down, *input_norms, parallel=False):
    return Place(blocks, final_norm, keys, down, input_norms, parallel=parallel)


def _gated(*input_norms, post_norm=None):
    paths = ("mlp.gate_proj", "mlp.down_proj", input_norms, "mlp.up_proj", post_norm)
    return Place("model.layers", "model.norm", *paths)


_TRANSFORMER = ("transformer.h", "transformer.ln_f")
_FOUR = ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
_AFTER_ATTENTION = "post_attention_layernorm"
_AROUND = "pre_feedforward_layernorm", "post_feedforward_layernorm"

PLACES = {
    "gpt2": _plain(*_TRANSFORMER, "mlp.c_fc", "mlp.c_proj", "ln_2"),
    "gpt_neo": _plain(*_TRANSFORMER, "mlp.c_fc", "mlp.c_proj", "ln_2"),
    "gpt_neox": _plain("gpt_neox.layers", "gpt_neox.final_layer_norm", *_FOUR, _AFTER_ATTENTION, parallel=True),
    "gptj": _plain(*_TRANSFORMER, "mlp.fc_in", "mlp.fc_out", "ln_1", parallel=True),
    "opt": _plain("model.decoder.layers", "model.decoder.final_layer_norm", "fc1", "fc2", "final_layer_norm"),
    "bloom": _plain(*_TRANSFORMER, *_FOUR, _AFTER_ATTENTION),
    "falcon": _plain(*_TRANSFORMER, *_FOUR, "ln_mlp", _AFTER_ATTENTION, "input_layernorm", parallel=True),
    "phi": _plain("model.layers", "model.final_layernorm", "mlp.fc1", "mlp.fc2", "input_layernorm", parallel=True),
    "llama": _gated(_AFTER_ATTENTION),
    "mistral": _gated(_AFTER_ATTENTION),
    "qwen2": _gated(_AFTER_ATTENTION),
    "qwen3": _gated(_AFTER_ATTENTION),
    "gemma": _gated(_AFTER_ATTENTION),
    "gemma2": _gated(_AROUND[0], post_norm=_AROUND[1]),
    "gemma3_text": _gated(_AROUND[0], post_norm=_AROUND[1]),
    "olmo2": _gated(post_norm=_AROUND[1]),
    "stablelm": _gated(_AFTER_ATTENTION, "input_layernorm"),
    "starcoder2": _plain("model.layers", "model.norm", "mlp.c_fc", "mlp.c_proj", _AFTER_ATTENTION),
}
# settings that change the paths of parts, or whether attention and memories read the same stream
VARIANTS = {
    ("gpt_neox", "use_parallel_residual", False): {"parallel": False},
    ("falcon", "parallel_attn", False): {"parallel": False},
    ("falcon", "new_decoder_architecture", True): {},
    ("stablelm", "use_parallel_residual", True): {"parallel": True},
}

# One family per kind of block: plain with Conv1D, parallel, flattened positions, in-place addition, gated with biases,
# post-norm with soft cap, no norm before the block. The others have the same blocks.
DEFAULT = ("gpt2", "gpt_neox", "opt", "falcon", "llama", "gemma2", "olmo2")
MIXTURES = ("qwen2_moe", "gpt_oss")  # shared and routed experts beside dense blocks; experts of another form


def sweep_others(cases: Iterable[Any]) -> list[Any]:
    """Return cases (families, or tuples that start with one) with those outside of both lists marked as sweeps."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    default = {family: next((row for row in rows if row[0] == family), None) for family in DEFAULT + MIXTURES}
    return [pytest.param(*row, marks=() if default.get(row[0]) is row else pytest.mark.sweep) for row in rows]
