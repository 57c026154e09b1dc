"""Facts about a loaded model, and the sizes of a model that is not loaded yet.

Sizes come from the configuration: the network is built on torch's meta device, and memories are counted by the shapes
of its linear maps. Loading then discovers and proves them. For a fairseq checkpoint only the file size is known.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memlens.errors import MemlensError
from memlens.models.experts import is_experts
from memlens.models.gguf import read_head
from memlens.models.groups import input_rows
from memlens.models.huggingface import check_kind, text_config
from memlens.models.load import bundled_folder, check_text_config, network_without_weights, read_config
from memlens.models.memory_model import MemoryModel
from memlens.models.proof import Proof


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
    post_norm: str | None  # kind of norm after the block; None if the output is added to the stream directly
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


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model. `memories` is empty if only the file size is known."""

    parameters: int
    memories: tuple[int, ...] = ()  # number of memories by layer
    widest: int = 0  # number of memories of the largest group, because experts run one after another
    width: int = 0
    gated: bool = False
    unpacked: int = 0  # bytes of additional float32 weights in memory while a .gguf file is read


def sizes_before_loading(model: str | os.PathLike[str]) -> ModelSizes | None:
    """Return the sizes of a checkpoint without loading it, or None if they cannot be determined."""
    name = os.fspath(model)
    try:
        place = bundled_folder() if name == "bundled" else Path(name).expanduser()
    except RuntimeError:  # "~name" of an unknown user, which loading reports
        return None
    if (place / "model.pt").is_file():
        return ModelSizes((place / "model.pt").stat().st_size // 4)
    try:
        if place.suffix.lower() == ".gguf":
            return _from_gguf(place) if place.is_file() else None
        return _from_configuration(str(place) if place.is_dir() else name)
    except MemlensError:
        return None  # loading reports the reason


def _from_gguf(path: Path) -> ModelSizes:
    """Return the sizes after dequantization, during which each tensor is float32."""
    head = read_head(path)
    sizes = _from_configuration(str(path.resolve().parent), gguf_file=path.name)
    return replace(sizes, unpacked=4 * sum(tensor.numel() for tensor in head.tensors.values()))


def _from_configuration(place: str, **options: str) -> ModelSizes:
    config = read_config(place, place, **options)
    check_kind(config, place)
    if not options:
        check_text_config(place, config, place)
    network = network_without_weights(config, place)
    width = int(text_config(config).hidden_size)
    text = network.get_decoder()  # without networks for images or audio, which may be larger
    lists = [module for module in (text or network).modules() if isinstance(module, nn.ModuleList)]
    blocks: Any = max(lists, key=lambda blocks: sum(parameter.numel() for parameter in blocks.parameters()), default=[])
    by_block = [[size for module in block.modules() for size in _memories_in(module, width)] for block in blocks]
    return ModelSizes(
        parameters=sum(parameter.numel() for parameter in network.parameters()),
        memories=tuple(sum(count * size for count, size, _ in parts) for parts in by_block) if any(by_block) else (),
        widest=max((size for parts in by_block for _, size, _ in parts), default=0),
        width=width,
        gated=any(gated for parts in by_block for *_, gated in parts),
    )


def _memories_in(module: Any, width: int) -> Iterator[tuple[int, int, bool]]:
    """Yield (groups, memories per group, gated) for modules that look like a feed-forward part."""
    if is_experts(module):
        size = module.down_proj.shape[1 if module.is_transposed else 2]
        yield module.num_experts, size, bool(module.has_gate)
        return
    maps = [tuple(input_rows(child).shape) for child in module.children() if _is_map(child)]
    names = (*vars(module), *(name for name, _child in module.named_children()))
    if not any("act" in name or "gelu" in name for name in names):
        return  # attention has maps of the same shapes but no activation
    for out, size in maps:
        inward = [rows for rows, inputs in maps if inputs == width and (rows, inputs) != (out, size)]
        if out == width and inward in ([size], [size, size], [2 * size]):
            yield 1, size, inward != [size]


def _is_map(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.dim() == 2
