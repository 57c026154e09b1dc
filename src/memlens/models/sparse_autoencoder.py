"""A layer of memories with the interface of a sparse autoencoder, for tools that expect such an autoencoder.

    encode(x) = m          the coefficients, [..., d_sae]; x [..., d_in] is the input of the feed-forward block (the
                           stream after the norm before the block), which is the input of the module `cfg.module_in`
    decode(m) = m V + b    [..., d_in], the output of the module `cfg.module_out` for these coefficients

This is a transcoder, not an autoencoder: decode(encode(x)) is the block's output, not x. It uses the block's own
weights, so it is exact up to rounding. The output is also what the layer adds to the stream, unless the layer has a
norm after the block (Gemma 2, OLMo 2) or a scale; see `cfg.adds_output`. With a signed activation (GELU, SiLU) or a
gate, coefficients are signed and few are exactly 0.

Names follow sae-lens 6 (SAE, TranscoderConfig) and SAEBench's BaseSAE: W_enc [d_in, d_sae], b_enc, W_dec [d_sae, d_in],
b_dec, cfg, dtype, device, encode, decode, forward, fold_W_dec_norm. A gated block also has W_up and b_up.
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
    """The position of the layer in the model, which sae-lens stores separately from the sizes."""

    model_name: str
    hook_name: str  # name of x in sae-lens if x has one, otherwise module_in
    hook_name_out: str
    hook_layer: int
    hook_head_index: int | None = None
    context_size: int | None = None
    prepend_bos: bool = False


@dataclass
class SaeConfig:
    """Sizes and settings with the names that sae-lens and SAEBench expect."""

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
    module_in: str  # the module whose input is x
    module_out: str  # the module whose output is m V + b
    adds_output: bool  # True if the layer adds the output of `decode` to the stream unchanged
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
    """The memories of one dense layer. The weights are copies, so changing them does not change the model."""

    # required by sae-lens; there is no error term and no further hook point
    use_error_term = False
    hook_dict: Mapping[str, nn.Module] = MappingProxyType({})

    def __init__(self, group: LinearGroup, cfg: SaeConfig, dtype: torch.dtype) -> None:
        super().__init__()

        def copied(tensor: Tensor | None, size: int) -> nn.Parameter:
            source = torch.zeros(size, device=cfg.device) if tensor is None else tensor.detach()
            return nn.Parameter(source.to(dtype).clone().contiguous(), requires_grad=False)

        self.cfg, self._group = cfg, group
        self.W_enc = copied(group.keys.T, 0)  # [d_in, d_sae]
        self.b_enc = copied(group.key_bias, cfg.d_sae)
        self.W_up = None if group.up is None else copied(group.up.T, 0)  # [d_in, d_sae]
        self.b_up = None if group.up is None else copied(group.up_bias, cfg.d_sae)
        self.W_dec = copied(scaled(group.values, group.scale), 0)  # [d_sae, d_in]
        bias = group.value_bias
        self.b_dec = copied(None if bias is None else scaled(bias, group.scale), cfg.d_out)
        self.lengths: Tensor  # [d_sae], norms of values folded into the coefficients
        self.register_buffer("lengths", torch.ones_like(self.b_enc, requires_grad=False))

    @property
    def dtype(self) -> torch.dtype:
        return self.W_dec.dtype

    @property
    def device(self) -> torch.device:
        return self.W_dec.device

    def encode(self, x: Tensor) -> Tensor:
        """Return the coefficients [..., d_sae] for block inputs x [..., d_in]."""
        x = x.to(self.dtype)
        gate, group = x @ self.W_enc + self.b_enc, self._group
        if self.W_up is None or self.b_up is None:
            coefficients = group.activate(gate)
        else:
            up = x @ self.W_up + self.b_up
            coefficients = group.activate(gate) * up if group.combine is None else group.combine(gate, up)
        return coefficients * self.lengths

    def decode(self, coefficients: Tensor) -> Tensor:
        """Return the output of the block for coefficients [..., d_sae]: [..., d_in]."""
        return coefficients @ self.W_dec + self.b_dec

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))

    @torch.no_grad()
    def fold_W_dec_norm(self) -> None:  # noqa: N802 (sae-lens' name)
        """Normalize values to length 1 and multiply coefficients by the previous length. Outputs do not change."""
        lengths = self.W_dec.norm(dim=1)
        lengths = torch.where(lengths > 0, lengths, torch.ones_like(lengths))
        self.W_dec.div_(lengths[:, None])
        self.lengths.mul_(lengths)


def as_sae(model: MemoryModel | Any, layer: int, *, dtype: torch.dtype | None = None) -> LayerAsSae:
    """Return the memories of a layer with the interface of a sparse autoencoder.

    Args:
        model: A MemoryModel or an argument of `load`.
        layer: The number of the layer, counted from 0.
        dtype: The dtype of the weights, or None for the dtype of the model.

    Returns:
        An object with the attributes and methods of a sparse autoencoder.

    Raises:
        UnsupportedModel: The layer has experts or no memories.

    Example:
        >>> sae = memlens.as_sae(model, 1)
        >>> sae.cfg.d_sae
        40
    """
    from memlens.models.load import load

    memory_model = load(model) if not isinstance(model, MemoryModel) else model
    (number,) = memory_model.layer_numbers([layer])
    memories = memory_model.layers[number]
    (group,) = memories.groups if len(memories.groups) == 1 else (None,)
    if not isinstance(group, LinearGroup):
        raise UnsupportedModel(
            f"layer {number} of {memory_model.name} is not a single dense block, and a sparse autoencoder has no "
            "router; use a layer without experts"
        )
    precision = group.values.dtype if dtype is None else dtype
    return LayerAsSae(group, _config(memory_model, memories, group, precision), precision)


def _config(model: MemoryModel, layer: MemoryLayer, group: LinearGroup, dtype: torch.dtype) -> SaeConfig:
    paths = {module: path for path, module in model.network.named_modules()}
    module_in, module_out = paths[group.key_projection], paths[layer.outputs[0]]
    # sae-lens' mlp.hook_in is x, unlike TransformerLens' ln2.hook_normalized, which is before the norm's gain.
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
