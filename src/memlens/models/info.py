"""Facts about a loaded model, and the number of parameters of a model that is not loaded yet."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from memlens.errors import MemlensError
from memlens.models.gguf import read_head
from memlens.models.huggingface import check_kind
from memlens.models.load import bundled_folder, check_text_config, network_without_weights, read_config
from memlens.models.memory_model import MemoryModel
from memlens.models.proof import Proof

_STATES = 128  # number of states in the timed product
_WORTHWHILE = 1.1  # smallest speedup by bfloat16 that is reported


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a model."""

    name: str
    family: str
    layers: int
    memories: tuple[int, ...]  # number of memories by layer
    width: int
    activation: str
    gated: bool
    signed: bool  # True if bottom triggers are kept by default
    parallel: bool  # True if attention and feed-forward block read the same stream
    input_norm: str | None  # "LayerNorm" or "RMSNorm"; None if the block reads the stream itself
    post_norm: str | None  # kind of norm after the feed-forward block; None if its output is added directly
    final_norm: str | None
    readings: tuple[str, ...]  # supported readings of values, the default first
    soft_cap: float | None
    vocabulary: int
    tied: bool  # True if input and output embedding share one matrix
    context: int | None  # the longest input, including BOS; None if there is no limit
    bos: str | None  # text of the BOS token, or None
    adds_bos: bool | None  # True if texts start with BOS; None without a tokenizer
    parameters: int
    device: str
    dtype: str
    proof: Proof | None  # None if the model was loaded with prove=False

    @property
    def total_memories(self) -> int:
        return sum(self.memories)


def describe(model: MemoryModel) -> ModelInfo:
    """Return the facts about a loaded model."""
    first, lens = model.first, model.lens
    tokenizer = model.tokenizer if model.has_tokenizer else None
    has_bos = tokenizer is not None and tokenizer.bos is not None
    return ModelInfo(
        name=model.name,
        family=model.family,
        layers=len(model.layers),
        memories=tuple(layer.memories for layer in model.layers),
        width=model.width,
        activation=first.activation,
        gated=first.gated,
        signed=first.signed,
        parallel=first.parallel,
        input_norm=None if first.input_norm is None else first.input_norm.label,
        post_norm=None if first.post_norm is None else first.post_norm.label,
        final_norm=None if lens.final_norm is None else lens.final_norm.label,
        readings=lens.readings,
        soft_cap=lens.soft_cap,
        vocabulary=model.vocabulary,
        tied=lens.tied,
        context=model.context,
        bos=tokenizer.token_text(tokenizer.bos) if has_bos else None,  # type: ignore[union-attr, arg-type]
        adds_bos=None if tokenizer is None else tokenizer.adds_bos,
        parameters=sum(parameter.numel() for parameter in model.network.parameters()),
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        proof=model.proof,
    )


def faster_dtype_note(model: MemoryModel) -> str | None:
    """Return a line about bfloat16 if the checkpoint uses it and this CPU computes bfloat16 faster than float32."""
    if model.device.type != "cpu" or model.dtype != torch.float32 or model.stored_dtype != torch.bfloat16:
        return None
    gain = bfloat16_gain(model.first.groups[0].keys)
    if gain < _WORTHWHILE:
        return None
    return (
        f"the checkpoint is bfloat16, and this processor multiplies its matrices {gain:.1f} times as fast in bfloat16 "
        "as in float32; --dtype bfloat16 saves time, but more coefficients are equal"
    )


def bfloat16_gain(matrix: torch.Tensor) -> float:
    """Return the speedup of bfloat16 over float32 for the product of states with a matrix [n, d]."""
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        weights, states = matrix.to(dtype), torch.ones(_STATES, matrix.shape[1], dtype=dtype)
        times = []
        for _ in range(3):
            began = time.perf_counter()
            torch.nn.functional.linear(states, weights)
            times.append(time.perf_counter() - began)
        seconds[dtype] = min(times)
    return seconds[torch.float32] / seconds[torch.bfloat16]


def count_parameters(model: str | os.PathLike[str]) -> int | None:
    """Return the number of parameters of a checkpoint without loading it, or None if it cannot be determined.

    A network without weights is built from the configuration. The count of a fairseq checkpoint is estimated from the
    size of its file.
    """
    name = os.fspath(model)
    try:
        place = bundled_folder() if name == "bundled" else Path(name).expanduser()
        if (place / "model.pt").is_file():
            return (place / "model.pt").stat().st_size // 4
        if place.suffix.lower() == ".gguf":
            return sum(tensor.numel() for tensor in read_head(place).tensors.values())
        name = str(place) if place.is_dir() else name
        config = read_config(name, name)
        check_kind(config, name)
        check_text_config(name, config, name)
        return sum(parameter.numel() for parameter in network_without_weights(config, name).parameters())
    except (MemlensError, RuntimeError):  # loading reports the reason; "~name" of an unknown user is a RuntimeError
        return None
