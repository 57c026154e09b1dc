"""The frozen network of one prompt, in which a logit is linear in what embeddings, memories and biases write.

1. Run the model once on the prompt. Freeze every attention weight (the output of each softmax), the scale of every norm
   at every position, and one factor per memory. For a plain memory m = f(z) with z = k.x + b, the factor is f(z) / z.
   For a gated memory m = f(g) u, the factor is f(g) or, if the block adds a constant to u or clips u, the slope of m in
   u. With `gate="half"`, half of a gated memory is attributed to each of its two factors, as in LRP.
2. Everything that remains is linear: the stream, the keys and the logits are sums over writes. A write is an embedding,
   a memory's coefficient times its value, or a bias.
3. The relevance of a write is the write times the gradient of the target in the frozen network. One backward pass gives
   the relevance of every memory at every position.
4. The edge from write i to memory j is the contribution of i to j's coefficient through norms and attention only, times
   the gradient of the target with respect to j's coefficient. Edges are computed in a second graph in which
   coefficients are leaves.
5. An edge is split by the first attention head on its paths. With coefficients and head outputs as leaves, the head
   outputs are linear in the writes. The part of the edge that enters attention through a head is the contribution of i
   to the output of this head, times the gradient of j's coefficient with respect to this output over all later paths.
   The direct part is the contribution that reaches j without attention.

These sums are conserved. Embeddings and biases together sum to the target. Edges into j sum to the relevance of j, and
edges out of i sum to the relevance of i. The first sum is checked on every prompt. If it fails, the network is
rejected, because some part of it is not linear after freezing, such as a state space mixer.

References: RelP (arXiv 2508.21258); Golden 2025, "Equivalent Linear Mappings of Large Language Models".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from memlens.errors import UnsupportedModel
from memlens.models import hooks
from memlens.models.blocks import first_input, with_first_input
from memlens.models.groups import MemoryGroup
from memlens.models.memory_model import MemoryModel

Gate = Literal["value", "half"]
Target = Callable[[Tensor], Tensor]  # logits [vocabulary] -> the number to explain
CONSERVATION = 1e-3  # tolerance relative to the size of the terms; float32 sums deviate by about 1e-6

_FROZEN = {
    torch.softmax,
    torch.Tensor.softmax,
    torch.special.softmax,
    nn.functional.softmax,
    torch.rsqrt,
    torch.Tensor.rsqrt,
    torch.sqrt,
    torch.Tensor.sqrt,
    torch.sigmoid,
    torch.Tensor.sigmoid,
    nn.functional.sigmoid,
}


_PRODUCTS = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm}


@dataclass(eq=False)
class HeadOutputs:
    """Outputs of the attention heads of one layer, [heads, pos, d_head], before the output projection."""

    linear: Tensor  # differentiable and linear in the block's input
    used: Tensor  # the tensor that the network used: `linear`, or a leaf if heads are cut off


class FreezeNonlinearities(TorchFunctionMode):
    """Context manager in which attention weights, gates and norm scales are constants for autograd.

    The outputs of attention heads are kept in `heads` by layer. `layer` is the number of the running block. With
    `cut_heads`, the outputs become leaves, so that gradients do not pass through attention.
    """

    def __init__(self, cut_heads: bool = False) -> None:
        super().__init__()
        self.cut_heads = cut_heads
        self.layer: int | None = None
        self.heads: dict[int, HeadOutputs] = {}

    def _keep_heads(self, output: Tensor) -> Tensor:
        if self.layer is None:
            return output
        linear = output.reshape(-1, *output.shape[-2:])
        used = linear.detach().clone().requires_grad_() if self.cut_heads else linear
        self.heads[self.layer] = HeadOutputs(linear, used)
        return used.reshape(output.shape)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        kinds = (*args[1:], *options.values())
        is_downcast = func is torch.Tensor.float or (func is torch.Tensor.to and kinds == (torch.float32,))
        if is_downcast and args[0].dtype == torch.float64:
            return args[0]  # stay in float64: some norms compute in float32, with a precision of only 1e-7
        if func in _FROZEN:
            return func(*args, **options).detach()
        if func is nn.functional.layer_norm:
            return _layer_norm(*args, **options)
        if func is nn.functional.rms_norm:
            return _rms_norm(*args, **options)
        if func is nn.functional.scaled_dot_product_attention:
            return self._keep_heads(_attend(*args, **options))
        if func in _PRODUCTS and len(args) == 2 and _is_attention(*args):
            return self._keep_heads(func(*args, **options))
        return func(*args, **options)


def _is_attention(weights: Tensor, value: Tensor) -> bool:
    """Return True if a product multiplies frozen attention weights [..., pos, pos] by values [..., pos, d_head]."""
    is_square = weights.dim() > 2 and weights.shape[-1] == weights.shape[-2] == value.shape[-2]
    return is_square and value.requires_grad and not weights.requires_grad


def _layer_norm(
    states: Tensor, shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Apply LayerNorm with its scale as a constant. Centering stays differentiable because it is linear."""
    axes = tuple(range(-len(shape), 0))
    centered = states - states.mean(axes, keepdim=True)
    return _scale_by_constant(centered, axes, weight, bias, eps)


def _rms_norm(states: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Apply RMSNorm with its scale as a constant."""
    epsilon = torch.finfo(states.dtype).eps if eps is None else eps
    return _scale_by_constant(states, tuple(range(-len(shape), 0)), weight, None, epsilon)


def _scale_by_constant(
    states: Tensor, axes: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    normed = states * torch.rsqrt(states.detach().square().mean(axes, keepdim=True) + eps)
    normed = normed if weight is None else normed * weight
    return normed if bias is None else normed + bias


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute scaled dot-product attention with constant weights. Tensors are [batch, heads, pos, d_head]."""
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    with torch.no_grad():
        scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~allowed, -torch.inf)
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        weights = torch.softmax(scores, -1)
    return weights @ value


@dataclass(eq=False)
class LayerGraph:
    """The coefficients of one layer in the frozen network, one tensor [pos, size] per group of memories."""

    used: list[Tensor] = field(default_factory=list)  # tensors that the network used: linear + constant, or leaves
    linear: list[Tensor] = field(default_factory=list)  # the part that is linear in the block's input, differentiable
    constant: list[Tensor] = field(default_factory=list)  # the remaining part: key biases, and f(0) if it is not 0

    @property
    def coefficients(self) -> Tensor:
        """The coefficients of all memories of the layer, [pos, memories]."""
        return torch.cat(self.used, 1).detach()


@dataclass(frozen=True, eq=False)
class Gradients:
    """The gradient of one output of a frozen pass with respect to its writes."""

    embedding: Tensor  # [pos, d]
    coefficients: dict[int, Tensor]  # layer -> [pos, memories]
    bias: float  # bias times gradient, summed over all bias parameters


@dataclass(frozen=True, eq=False)
class FrozenPass:
    """One forward pass of the frozen network, with its autograd graph."""

    target: Tensor
    embedding: Tensor  # [pos, d], leaf: the input of the first block
    layers: dict[int, LayerGraph]
    biases: tuple[nn.Parameter, ...]  # leaves
    heads: dict[int, HeadOutputs]

    @property
    def writes(self) -> list[Tensor]:
        """All leaves that write to the stream: the embedding, the coefficients of every layer, and the biases."""
        used = [tensor for graph in self.layers.values() for tensor in graph.used]
        return [self.embedding, *used, *self.biases]

    def gradients(self, outputs: Sequence[Tensor], cotangents: Sequence[Tensor] | None = None) -> Gradients:
        """Return the gradient of the outputs (times cotangents) with respect to every write."""
        embedding, *rest = torch.autograd.grad(
            outputs, self.writes, cotangents, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        gradients = iter(rest)
        coefficients = {
            layer: torch.cat([next(gradients) for _ in graph.used], 1) for layer, graph in self.layers.items()
        }
        of_biases = zip(self.biases, gradients, strict=True)
        bias = sum((float((parameter.detach() * gradient).sum()) for parameter, gradient in of_biases), 0.0)
        return Gradients(embedding, coefficients, bias)

    def head_gradients(self, outputs: Sequence[Tensor], cotangents: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Return the gradient of the outputs (times cotangents) with respect to the head outputs of every layer."""
        used = [heads.used for heads in self.heads.values()]
        return list(
            torch.autograd.grad(outputs, used, cotangents, retain_graph=True, allow_unused=True, materialize_grads=True)
        )


@contextmanager
def frozen_pass(
    model: MemoryModel,
    tokens: Tensor,
    target: Target,
    *,
    gate: Gate = "value",
    cut: bool = False,
    cut_heads: bool = False,
) -> Iterator[FrozenPass]:
    """Run the frozen network on one prompt. Inside the context, its biases require gradients.

    Args:
        model: The model. Its dtype decides the precision of all sums.
        tokens: The input tokens [1, pos], including BOS.
        target: The number to explain, from the logits of the last position before soft-capping.
        gate: What carries the relevance of a gated memory: `value` (its input u), or `half` (gate and input equally).
        cut: Make the coefficients leaves, so that gradients pass through norms and attention only.
        cut_heads: Make the outputs of attention heads leaves, so that gradients do not pass through attention.
    """
    embedding: list[Tensor] = []
    layers: dict[int, LayerGraph] = {}
    with _only_biases_require_grad(model.network) as biases:
        with ExitStack() as stack:
            stack.enter_context(_embedding_as_leaf(model, embedding))
            inputs = stack.enter_context(_block_inputs(model))
            freeze = partial(_freeze, inputs=inputs, layers=layers, gate=gate, cut=cut)
            stack.enter_context(model.edit({layer: partial(freeze, layer=layer) for layer in range(len(model.layers))}))
            mode = FreezeNonlinearities(cut_heads)
            for number, one in enumerate(model.layers):
                stack.enter_context(hooks.on_input(one.block, partial(_note_layer, mode, number)))
            stack.enter_context(mode)
            states = model.run_body(tokens, gradients=True)
            logits = model.lens.state_logits(states[0, -1:], gradients=True)[0]
        with torch.enable_grad():
            explained = target(logits)
        yield FrozenPass(explained, embedding[0], layers, biases, mode.heads)


def _note_layer(mode: FreezeNonlinearities, layer: int, _state: Tensor) -> None:
    mode.layer = layer


@contextmanager
def _only_biases_require_grad(network: nn.Module) -> Iterator[tuple[nn.Parameter, ...]]:
    """Let only bias parameters require gradients inside the context, and restore all flags afterwards."""
    flags = {parameter: parameter.requires_grad for parameter in network.parameters()}
    biases = tuple(parameter for name, parameter in network.named_parameters() if name.endswith("bias"))
    try:
        for parameter in flags:
            parameter.requires_grad_(False)
        for parameter in biases:
            parameter.requires_grad_(True)
        yield biases
    finally:
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)


@contextmanager
def _embedding_as_leaf(model: MemoryModel, embedding: list[Tensor]) -> Iterator[None]:
    """Replace the input of the first block by a leaf with the same values."""

    def replace_input(_module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        leaf = first_input(arguments, named)[0].detach().clone().requires_grad_()
        embedding.append(leaf)
        return with_first_input(arguments, named, leaf[None])

    with model.layers[0].block.register_forward_pre_hook(replace_input, with_kwargs=True):
        yield


@contextmanager
def _block_inputs(model: MemoryModel) -> Iterator[dict[nn.Module, Tensor]]:
    """Yield {module: its input [pos, d]} for every module that multiplies its input by keys, filled during the pass."""
    inputs: dict[nn.Module, Tensor] = {}

    def keep(reader: nn.Module, states: Tensor) -> None:
        inputs[reader] = states.reshape(-1, states.shape[-1])

    with ExitStack() as stack:
        for reader in {group.reader for layer in model.layers for group in layer.groups}:
            stack.enter_context(hooks.on_input(reader, partial(keep, reader)))
        yield inputs


def _freeze(
    coefficients: Tensor,
    group: MemoryGroup,
    *,
    inputs: Mapping[nn.Module, Tensor],
    layers: dict[int, LayerGraph],
    layer: int,
    gate: Gate,
    cut: bool,
) -> Tensor:
    """Return the frozen form of a group's coefficients [1, pos, size], and add this form to the layer's graph."""
    exact = coefficients[0].detach()
    linear = _linear_part(group, inputs[group.reader], exact, gate)
    constant = exact - linear.detach()
    used = exact.clone().requires_grad_() if cut else linear + constant
    graph = layers.setdefault(layer, LayerGraph())
    graph.used.append(used)
    graph.linear.append(linear)
    graph.constant.append(constant)
    return used[None]


def _linear_part(group: MemoryGroup, x: Tensor, exact: Tensor, gate: Gate) -> Tensor:
    """Return the part of the coefficients that is linear in x: frozen ratios times products with keys."""
    products, ups = group.matches(x)
    key_part = x @ group.keys.to(x.dtype).T
    if ups is None or group.up is None:
        return _ratio(exact, products.detach(), group) * key_part
    by_up = _up_factor(group, exact, products.detach(), ups.detach()) * (x @ group.up.to(x.dtype).T)
    if gate == "value":
        return by_up
    return 0.5 * by_up + 0.5 * _ratio(exact, products.detach(), None) * key_part


def _up_factor(group: MemoryGroup, exact: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """Return the factor of u in the coefficients: f(g), or the slope in u if the group has its own `combine`."""
    if group.combine is None:
        return _ratio(exact, up, None)
    with torch.enable_grad():
        leaf = up.clone().requires_grad_()
        m = group.combine(gate, leaf)
        (slope,) = torch.autograd.grad(m.sum(), leaf)
    return slope * _ratio(exact, m.detach(), None)  # `exact` may include a scale per token


def _ratio(exact: Tensor, product: Tensor, group: MemoryGroup | None) -> Tensor:
    """Return exact / product or, if the product is 0, the slope of the activation (0 for a gated memory)."""
    zero = product == 0
    ratio = exact / torch.where(zero, 1, product)
    if group is None or not bool(zero.any()):
        return torch.where(zero, 0, ratio)
    with torch.enable_grad():
        at = torch.zeros((), dtype=product.dtype, device=product.device, requires_grad=True)
        (slope,) = torch.autograd.grad(group.activate(at), at)
    return torch.where(zero, slope, ratio)


def check_conservation(model: MemoryModel, frozen: FrozenPass, gradients: Gradients) -> None:
    """Raise UnsupportedModel if the network is not linear, so that embeddings and biases do not sum to the target."""
    total = (
        float((frozen.embedding.detach() * gradients.embedding).sum())
        + gradients.bias
        + constant_relevance(frozen, gradients)
    )
    value = float(frozen.target.detach())
    scale = max(abs(value), float((frozen.embedding.detach() * gradients.embedding).abs().sum()))
    if not abs(total - value) <= CONSERVATION * scale:
        raise UnsupportedModel(
            f"{model.name} is not linear once attention, norms and gates are frozen: its writes sum to {total:.4g}, "
            f"not to {value:.4g}. Circuits need softmax attention in every layer and no other nonlinear parts"
        )


def constant_relevance(frozen: FrozenPass, gradients: Gradients) -> float:
    """Return the contribution of the constant parts of all coefficients (key biases and f(0)) to the target."""
    parts = (
        float((torch.cat(graph.constant, 1) * gradients.coefficients[layer]).sum())
        for layer, graph in frozen.layers.items()
    )
    return sum(parts, 0.0)
