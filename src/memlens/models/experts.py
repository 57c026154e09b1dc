"""Routed experts: their memories, and a function that runs them so that coefficients can be observed and edited.

transformers stores the experts of a layer as stacked tensors in one module and accepts registered functions that run
them. On the CPU, `run_experts` loops over the experts in the same order and with the same products as the module's own
code, so its output is bit-identical. On a device, it makes the same computation as transformers' grouped
implementation. Between the key and value projections, it passes the coefficients to observers and edits.

The output of an expert for a token is w (m V + b), where w is the router's weight. The coefficient is w m. The bias w b
belongs to no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from memlens.errors import UnsupportedModel
from memlens.models.groups import CoefficientBlock, MemoryGroup, MemoryLayer, RoutedBlock

if TYPE_CHECKING:
    from memlens.models.hooks import BatchShape, Change

IMPLEMENTATION = "memlens"
_Tap = TypeVar("_Tap")
_TAPS = "_memlens_taps"  # attribute of the experts' module while it is observed or edited
_LAYOUT = ("is_concatenated", "is_transposed", "has_bias", "has_gate", "num_experts")


def is_experts(module: nn.Module) -> bool:
    """Return True if a module holds stacked experts that functions registered with transformers can run."""
    return all(hasattr(module, name) for name in _LAYOUT) and isinstance(getattr(module, "down_proj", None), Tensor)


@dataclass(frozen=True, eq=False)
class ExpertGroup(MemoryGroup):
    """The memories of one expert of a stacked module."""

    experts: Any = field(kw_only=True, repr=False)  # the module, with the layout attributes of transformers
    router: Any = field(kw_only=True, default=None, repr=False)  # the module whose weight has one row per expert

    @property
    def reader(self) -> nn.Module:
        module: nn.Module = self.experts
        return module

    writer = reader

    @property
    def gated(self) -> bool:
        return bool(self.experts.has_gate)

    @cached_property  # cached, because it is read for every block and attributes of modules are slow
    def size(self) -> int:
        return int(self.experts.down_proj.shape[1 if self.experts.is_transposed else 2])

    @property
    def keys(self) -> Tensor:
        return self._inward[self._part(0)]

    @property
    def key_bias(self) -> Tensor | None:
        return None if self._inward_bias is None else self._inward_bias[self._part(0)]

    @property
    def up(self) -> Tensor | None:
        return self._inward[self._part(1)] if self.gated else None

    @property
    def up_bias(self) -> Tensor | None:
        return None if self._inward_bias is None or not self.gated else self._inward_bias[self._part(1)]

    @property
    def values(self) -> Tensor:
        down: Tensor = self.experts.down_proj.detach()[self.expert]
        return down if self.experts.is_transposed else down.T

    @property
    def value_bias(self) -> Tensor | None:
        return self.experts.down_proj_bias.detach()[self.expert] if self.experts.has_bias else None

    @property
    def _inward(self) -> Tensor:
        """The rows of the keys [size, d], or, for a gated expert, of gate and up together [2 * size, d]."""
        stacked = self.experts.gate_up_proj if self.gated else self.experts.up_proj
        rows: Tensor = stacked.detach()[self.expert]
        return rows.T if self.experts.is_transposed else rows

    @property
    def _inward_bias(self) -> Tensor | None:
        if not self.experts.has_bias:
            return None
        stacked = self.experts.gate_up_proj_bias if self.gated else self.experts.up_proj_bias
        bias: Tensor = stacked.detach()[self.expert]
        return bias

    def _part(self, number: int) -> slice:
        if not self.gated:
            return slice(None)
        if self.experts.is_concatenated:
            return slice(number * self.size, (number + 1) * self.size)
        return slice(number, None, 2)


def expert_groups(experts: Any, router: nn.Module | None = None, **facts: Any) -> list[ExpertGroup]:
    """Return the groups of a stacked module. `facts` sets the fields activation, activate, combine and scale."""
    if getattr(experts, "has_post_expert_norm", False):
        raise UnsupportedModel("a norm follows every expert, so values do not add up; use another model")
    if getattr(experts, "_is_expert_parallel", False):
        raise UnsupportedModel("its experts are distributed over several devices; load the model onto one device")
    return [
        ExpertGroup(kind="routed", expert=expert, experts=experts, router=router, **facts)
        for expert in range(experts.num_experts)
    ]


class _Watcher(NamedTuple):
    groups: dict[int, ExpertGroup]
    shape: BatchShape
    use: Callable[[Any], None]
    split: bool  # True if `use` takes a CoefficientBlock per expert, False for a RoutedBlock of all experts


@dataclass(eq=False)
class _Taps:
    """The observers and edits of the experts of one module."""

    edits: list[tuple[dict[int, ExpertGroup], BatchShape, Change]] = field(default_factory=list)
    watchers: list[_Watcher] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class StackedExperts:
    """A module of stacked experts and its groups by expert."""

    module: nn.Module
    groups: dict[int, ExpertGroup]

    def watch(self, shape: BatchShape, use: Callable[[Any], None], split: bool) -> AbstractContextManager[None]:
        return self._add_tap(_Watcher(self.groups, shape, use, split), lambda taps: taps.watchers)

    def edit(self, shape: BatchShape, change: Change) -> AbstractContextManager[None]:
        return self._add_tap((self.groups, shape, change), lambda taps: taps.edits)

    @contextmanager
    def _add_tap(self, tap: _Tap, select: Callable[[_Taps], list[_Tap]]) -> Iterator[None]:
        """Add an observer or an edit inside the context. The outermost context creates and removes the `_Taps`."""
        is_outermost = not hasattr(self.module, _TAPS)
        if is_outermost:
            object.__setattr__(self.module, _TAPS, _Taps())
        taps = select(getattr(self.module, _TAPS))
        taps.append(tap)
        try:
            yield
        finally:
            taps.remove(tap)
            if is_outermost:
                object.__delattr__(self.module, _TAPS)


def stacked_experts(layer: MemoryLayer) -> list[StackedExperts]:
    """Return the modules of a layer that hold stacked experts."""
    by_module: dict[int, tuple[nn.Module, dict[int, ExpertGroup]]] = {}
    for group in layer.groups:
        if isinstance(group, ExpertGroup):
            by_module.setdefault(id(group.experts), (group.experts, {}))[1][group.expert] = group
    return [StackedExperts(module, groups) for module, groups in by_module.values()]


@contextmanager
def replace_experts(network: Any) -> Iterator[None]:
    """Inside the context, run the experts of a network with `run_experts`."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    before = network.get_experts_implementation()
    if IMPLEMENTATION not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, run_experts)
    network.set_experts_implementation(IMPLEMENTATION)
    try:
        yield
    finally:
        network.set_experts_implementation(before)


def run_experts(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the sum of w (m V + b) over each token's k experts, [tokens, d], for states [tokens, d].

    On the CPU, a loop over experts is faster (docs/benchmarks.md) and gives the same bits as the module's own loop. On
    a device, a loop would wait for the router in every layer, so all experts run in one grouped product.
    """
    taps: _Taps = getattr(experts, _TAPS, None) or _Taps()
    is_grouped = hidden_states.device.type != "cpu" or any(not watcher.split for watcher in taps.watchers)
    run = _run_grouped if is_grouped and not taps.edits else _run_one_by_one
    return run(experts, taps, hidden_states, top_k_index, top_k_weights)


def _run_grouped(
    experts: Any, taps: _Taps, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    # sort by expert, then by the expert's rank for the token, then by token
    chosen, order = torch.sort(top_k_index.T.reshape(-1), stable=True)
    rows, weights = order % len(hidden_states), top_k_weights.T.reshape(-1)[order]
    stops = torch.searchsorted(chosen, torch.arange(experts.num_experts, device=chosen.device), right=True)
    inner = _grouped(experts, "gate_up_proj" if experts.has_gate else "up_proj", hidden_states[rows], chosen, stops)
    m = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    added = _grouped(experts, "down_proj", m, chosen, stops) * weights[:, None]
    for groups, shape, use, split in taps.watchers:
        gates = inner[:, groups[0]._part(0)] if experts.has_gate else None
        batch_shape = (shape.batch, shape.positions)
        block = RoutedBlock(groups, batch_shape, chosen, rows, m * weights[:, None], weights, gates)
        for part in block.split() if split else [block]:
            use(part)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    total: Tensor = added[places].view(top_k_index.shape[1], *hidden_states.shape).sum(0)
    return total.to(hidden_states.dtype)


def _grouped(experts: Any, name: str, states: Tensor, chosen: Tensor, stops: Tensor) -> Tensor:
    """Multiply states [n, inputs], sorted by expert, by their expert's matrix and add the expert's bias."""
    if states.device.type == "cpu":  # on the CPU, torch's grouped product lacks some dtypes and sizes
        edges = pairwise([0, *stops.tolist()])
        return torch.cat([_affine(experts, name, e, states[first:stop]) for e, (first, stop) in enumerate(edges)])
    from transformers.integrations.moe import _grouped_linear

    bias = getattr(experts, f"{name}_bias")[chosen] if experts.has_bias else None
    weight, offsets = getattr(experts, name), stops.to(torch.int32)
    product: Tensor = _grouped_linear(states, weight, offsets, bias=bias, is_transposed=experts.is_transposed)
    return product


def _run_one_by_one(
    experts: Any, taps: _Taps, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    output = torch.zeros_like(hidden_states)
    numbers = torch.arange(experts.num_experts, device=top_k_index.device)
    selected = numbers[:, None, None] == top_k_index.T  # [experts, k, tokens]
    routed_experts = selected.flatten(1).any(1).nonzero()[:, 0].tolist()
    edited_experts = range(experts.num_experts) if taps.edits else ()
    inward = "gate_up_proj" if experts.has_gate else "up_proj"
    for expert in sorted({*routed_experts, *edited_experts}):
        place, rows = torch.where(selected[expert])
        # products with the keys, or with gate and up: [n, size or 2 * size]
        inner = _affine(experts, inward, expert, hidden_states[rows])
        m = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
        weights = top_k_weights[rows, place]
        change = _apply_edits(taps, expert, rows, m, weights) if edited_experts else None
        if change is None:
            added = _affine(experts, "down_proj", expert, m)
            added = added * weights[:, None]
        else:
            rows, m, weights, added = change
        for groups, shape, use, _ in taps.watchers:
            coefficients = m * weights[:, None] if change is None else m
            gates = inner[:, groups[expert]._part(0)] if change is None and experts.has_gate else None
            batch_shape = (shape.batch, shape.positions)
            use(CoefficientBlock(groups[expert], batch_shape, rows, coefficients, weights, gates))
        output.index_add_(0, rows, added.to(output.dtype))
    return output


def _affine(experts: Any, name: str, expert: int, states: Tensor) -> Tensor:
    """Multiply states [n, inputs] by one expert's matrix and add the expert's bias."""
    weight, bias = getattr(experts, name)[expert], _bias_of(experts, name, expert)
    if not experts.is_transposed:
        return nn.functional.linear(states, weight, bias)
    product: Tensor = states @ weight
    return product if bias is None else product + bias


def _bias_of(experts: Any, name: str, expert: int) -> Tensor | None:
    return getattr(experts, f"{name}_bias")[expert] if experts.has_bias else None


def _apply_edits(
    taps: _Taps, expert: int, rows: Tensor, m: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Apply the edits at every token. Return (rows, coefficients, weights, output), or None if nothing changed."""
    groups, shape, _change = taps.edits[0]
    tokens = shape.batch * shape.positions
    group = groups[expert]
    block = CoefficientBlock(group, (shape.batch, shape.positions), rows, m * weights[:, None], weights)
    before = coefficients = block.everywhere()
    for _groups, _shape, change in taps.edits:
        coefficients = change(coefficients, group)
    if coefficients is before:
        return None
    flat = coefficients.reshape(tokens, -1).to(m.dtype)
    everywhere = torch.zeros(tokens, dtype=weights.dtype, device=weights.device).index_copy(0, rows, weights)
    added = flat @ group.values.to(flat.dtype)
    bias = _bias_of(group.experts, "down_proj", expert)
    if bias is not None:
        added = added + everywhere[:, None] * bias
    return torch.arange(tokens, device=rows.device), flat, everywhere, added
