"""A layer of memories with the interface of a sparse autoencoder, so that tools made for those run on it.

    encode(x) = m      the coefficients, [..., d_sae]; x [..., d_in] is the input of the feed-forward block, that is the
                       stream after the norm before the block: what the module `cfg.module_in` is given
    decode(m) = m V + b    [..., d_in]: what the module `cfg.module_out` puts out, for the coefficients m of a pass

It is a transcoder, not an autoencoder: decode(encode(x)) is the block's output, not x. It is exact, since these are the
block's own weights: equal to what the model computes but for rounding. That output is what is added to the stream, too,
unless the layer has a norm after the block (Gemma 2, OLMo 2) or a scale; `cfg.adds_output` says so. Coefficients are
signed where the activation is (GELU, SiLU) and where the block is gated; few are exactly 0 then.

Names are those of sae-lens 6 (SAE, TranscoderConfig) and of SAEBench's BaseSAE: W_enc [d_in, d_sae], b_enc,
W_dec [d_sae, d_in], b_dec, cfg, dtype, device, encode, decode, forward, fold_W_dec_norm; a gated block has W_up, b_up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from memlens.errors import UnsupportedModel
from memlens.models.groups import LinearGroup, MemoryLayer, scaled
from memlens.models.memory_model import MemoryModel


@dataclass
class SaeMetadata:
    """The place in a model that the coefficients come from; sae-lens keeps it apart from the sizes."""

    model_name: str
    hook_name: str  # sae-lens' name of x where it has one, else module_in
    hook_name_out: str
    hook_layer: int
    hook_head_index: int | None = None
    context_size: int | None = None
    prepend_bos: bool = False


@dataclass
class SaeConfig:
    """Sizes and settings, under the names that sae-lens and SAEBench ask for."""

    d_in: int
    d_sae: int
    d_out: int
    dtype: str
    device: str
    model_name: str
    hook_name: str
    hook_layer: int
    activation_fn: str
    gated: bool
    module_in: str  # the module of the network whose input is x
    module_out: str  # the one whose output is m V + b
    adds_output: bool  # is that output what the layer adds to the stream?
    metadata: SaeMetadata
    architecture: str = "transcoder"
    apply_b_dec_to_input: bool = False
    normalize_activations: str = "none"
    reshape_activations: str = "none"
    hook_head_index: int | None = None
    context_size: int | None = None
    prepend_bos: bool = False
    model_from_pretrained_kwargs: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class LayerAsSae(nn.Module):
    """The memories of one dense layer; weights are copies, so that nothing done to them changes the model."""

    # sae-lens asks for both: there is no error to add, and no hook point besides encode's result
    use_error_term = False
    hook_dict: Mapping[str, nn.Module] = MappingProxyType({})

    def __init__(self, group: LinearGroup, cfg: SaeConfig, dtype: torch.dtype) -> None:
        super().__init__()

        def kept(tensor: Tensor | None, size: int) -> nn.Parameter:
            filled = torch.zeros(size, device=cfg.device) if tensor is None else tensor.detach()
            return nn.Parameter(filled.to(dtype).clone().contiguous(), requires_grad=False)

        self.cfg, self._group = cfg, group
        self.W_enc = kept(group.keys.T, 0)  # [d_in, d_sae]
        self.b_enc = kept(group.key_bias, cfg.d_sae)
        self.W_up = None if group.up is None else kept(group.up.T, 0)  # [d_in, d_sae]
        self.b_up = None if group.up is None else kept(group.up_bias, cfg.d_sae)
        self.W_dec = kept(scaled(group.values, group.scale), 0)  # [d_sae, d_in]
        bias = group.value_bias
        self.b_dec = kept(None if bias is None else scaled(bias, group.scale), cfg.d_out)
        self.lengths: Tensor  # [d_sae], of the values that were folded into the coefficients
        self.register_buffer("lengths", torch.ones_like(self.b_enc, requires_grad=False))

    @property
    def dtype(self) -> torch.dtype:
        return self.W_dec.dtype

    @property
    def device(self) -> torch.device:
        return self.W_dec.device

    def encode(self, x: Tensor) -> Tensor:
        """Coefficients [..., d_sae] of inputs x [..., d_in] of the block."""
        x = x.to(self.dtype)
        gate, group = x @ self.W_enc + self.b_enc, self._group
        if self.W_up is None or self.b_up is None:
            coefficients = group.activate(gate)
        else:
            up = x @ self.W_up + self.b_up
            coefficients = group.activate(gate) * up if group.combine is None else group.combine(gate, up)
        return coefficients * self.lengths

    def decode(self, coefficients: Tensor) -> Tensor:
        """The output of the block for these coefficients, [..., d_in]."""
        return coefficients @ self.W_dec + self.b_dec

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))

    @torch.no_grad()
    def fold_W_dec_norm(self) -> None:  # noqa: N802 (sae-lens' name)
        """Values of length 1, and coefficients times the length that each had; what is decoded stays the same."""
        lengths = self.W_dec.norm(dim=1)
        lengths = torch.where(lengths > 0, lengths, torch.ones_like(lengths))
        self.W_dec.div_(lengths[:, None])
        self.lengths.mul_(lengths)


def as_sae(model: MemoryModel | Any, layer: int, *, dtype: torch.dtype | None = None) -> LayerAsSae:
    """The memories of a layer with the interface of a sparse autoencoder; refused for layers with experts.

    `model` is a MemoryModel or what `load` takes; `dtype` is the model's own unless it is given.
    """
    from memlens.models.load import load

    loaded = load(model) if not isinstance(model, MemoryModel) else model
    (number,) = loaded.layer_numbers([layer])
    memories = loaded.layers[number]
    (group,) = memories.groups if len(memories.groups) == 1 else (None,)
    if not isinstance(group, LinearGroup):
        raise UnsupportedModel(
            f"layer {number} of {loaded.name} is not one dense block, and a sparse autoencoder has no router; "
            "choose a layer without experts"
        )
    precision = group.values.dtype if dtype is None else dtype
    return LayerAsSae(group, _config(loaded, memories, group, precision), precision)


def _config(model: MemoryModel, layer: MemoryLayer, group: LinearGroup, dtype: torch.dtype) -> SaeConfig:
    paths = {module: path for path, module in model.network.named_modules()}
    module_in, module_out = paths[group.key_projection], paths[layer.outputs[0]]
    # TransformerLens' ln2.hook_normalized lies before the norm's gain; sae-lens puts mlp.hook_in where x is. Its
    # hook_mlp_out is what is added to the stream.
    adds_output = layer.post_norm is None and layer.scale is None
    names = f"blocks.{layer.number}.mlp.hook_in", f"blocks.{layer.number}.hook_mlp_out"
    reads, writes = names if adds_output else (module_in, module_out)
    bos = model.has_tokenizer and model.tokenizer.adds_bos
    place: dict[str, Any] = {"model_name": model.name, "hook_name": reads, "hook_layer": layer.number}
    place |= {"context_size": model.context, "prepend_bos": bos}
    return SaeConfig(
        d_in=group.keys.shape[1],
        d_sae=group.size,
        d_out=group.values.shape[1],
        dtype=str(dtype).removeprefix("torch."),
        device=str(group.values.device),
        activation_fn=group.activation,
        gated=group.gated,
        module_in=module_in,
        module_out=module_out,
        adds_output=adds_output,
        metadata=SaeMetadata(**place, hook_name_out=writes),
        **place,
    )
