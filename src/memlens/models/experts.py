"""Experts behind a router: their memories, and the function of ours that runs them where they are watched or edited.

transformers keeps the experts of a layer as stacked tensors in one module and lets anyone register a function that runs
them. Ours is the plain loop over experts, in the same order and with the same products as the module's own, so its
output is the same bit for bit; between key and value projection it shows the coefficients, and lets them be changed.

The output of expert e for a token is w (m V + b), w the router's weight: a coefficient is w m, and w b no memory's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from memlens.errors import UnsupportedModel
from memlens.models.groups import CoefficientBlock, MemoryGroup, MemoryLayer

if TYPE_CHECKING:
    from memlens.models.hooks import BatchShape, Change

IMPLEMENTATION = "memlens"
_Tap = TypeVar("_Tap")
_TAPS = "_memlens_taps"  # on the experts' module while somebody watches or edits it
_LAYOUT = ("is_concatenated", "is_transposed", "has_bias", "has_gate", "num_experts")


def is_experts(module: nn.Module) -> bool:
    """Does a module hold stacked experts that the registered functions of transformers can run?"""
    return all(hasattr(module, name) for name in _LAYOUT) and isinstance(getattr(module, "down_proj", None), Tensor)


@dataclass(frozen=True, eq=False)
class ExpertGroup(MemoryGroup):
    """The memories of one expert of a stacked module."""

    experts: Any = field(kw_only=True, repr=False)  # the module, with its layout as transformers notes it
    router: Any = field(kw_only=True, default=None, repr=False)  # the module with one row per expert as its weight

    @property
    def reader(self) -> nn.Module:
        module: nn.Module = self.experts
        return module

    writer = reader

    @property
    def gated(self) -> bool:
        return bool(self.experts.has_gate)

    @cached_property  # asked for with every block, and a module's attributes are slow
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
        """Rows of keys, or of gate and up together, [size or 2 size, d]."""
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
    """The experts of a stacked module; `facts`: activation, activate, combine, scale."""
    if getattr(experts, "has_post_expert_norm", False):
        raise UnsupportedModel("a norm follows every expert, so that values do not add up; use another model")
    if getattr(experts, "_is_expert_parallel", False):
        raise UnsupportedModel("its experts are spread over several devices; load the model onto one device")
    return [
        ExpertGroup(kind="routed", expert=expert, experts=experts, router=router, **facts)
        for expert in range(experts.num_experts)
    ]


@dataclass(eq=False)
class _Taps:
    """The observers and the edits of the experts of one module, by the group of each expert."""

    edits: list[tuple[dict[int, ExpertGroup], BatchShape, Change]] = field(default_factory=list)
    watchers: list[tuple[dict[int, ExpertGroup], BatchShape, Callable[[CoefficientBlock], None]]] = field(
        default_factory=list
    )


@dataclass(frozen=True, eq=False)
class StackedExperts:
    """One module of stacked experts with the groups of its layer."""

    module: nn.Module
    groups: dict[int, ExpertGroup]

    def watch(self, shape: BatchShape, use: Callable[[CoefficientBlock], None]) -> AbstractContextManager[None]:
        return self._added((self.groups, shape, use), lambda taps: taps.watchers)

    def edit(self, shape: BatchShape, change: Change) -> AbstractContextManager[None]:
        return self._added((self.groups, shape, change), lambda taps: taps.edits)

    @contextmanager
    def _added(self, tap: _Tap, among: Callable[[_Taps], list[_Tap]]) -> Iterator[None]:
        """Within, the tap is among those of the module."""
        with self._tapped() as taps:
            among(taps).append(tap)
            try:
                yield
            finally:
                among(taps).remove(tap)

    @contextmanager
    def _tapped(self) -> Iterator[_Taps]:
        """The module's taps; the outermost to leave takes them off."""
        known: _Taps | None = getattr(self.module, _TAPS, None)
        taps = _Taps() if known is None else known
        if known is None:
            object.__setattr__(self.module, _TAPS, taps)
        try:
            yield taps
        finally:
            if known is None:
                object.__delattr__(self.module, _TAPS)


def stacked_experts(layer: MemoryLayer) -> list[StackedExperts]:
    """The modules of stacked experts in a layer, each once."""
    by_module: dict[int, tuple[nn.Module, dict[int, ExpertGroup]]] = {}
    for group in layer.groups:
        if isinstance(group, ExpertGroup):
            by_module.setdefault(id(group.experts), (group.experts, {}))[1][group.expert] = group
    return [StackedExperts(module, groups) for module, groups in by_module.values()]


@contextmanager
def own_experts(network: Any) -> Iterator[None]:
    """Within, the experts of a transformers' network are run by our function; what was chosen before is restored."""
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
    """The sum over experts of w (m V + b), [tokens, d], for tokens [tokens, d] and their experts [tokens, k]."""
    taps: _Taps | None = getattr(experts, _TAPS, None)
    output = torch.zeros_like(hidden_states)
    with torch.no_grad():
        chosen = nn.functional.one_hot(top_k_index, num_classes=experts.num_experts + 1).permute(2, 1, 0)
        hit = torch.greater(chosen.sum(dim=(-1, -2)), 0).nonzero()[:, 0].tolist()
    edited = () if taps is None or not taps.edits else range(experts.num_experts)
    for expert in sorted({*hit, *edited} - {experts.num_experts}):
        place, rows = torch.where(chosen[expert])
        inner = _inner(experts, expert, hidden_states[rows])
        m = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
        weights = top_k_weights[rows, place]
        change = None if not edited or taps is None else _edited(taps, expert, rows, m, weights)
        if change is None:
            added = _affine(experts, experts.down_proj[expert], _bias_of(experts, "down_proj", expert), m)
            added = added * weights[:, None]
        else:
            rows, m, weights, added = change
        if taps is not None and taps.watchers:
            _show(
                taps,
                expert,
                rows,
                m * weights[:, None] if change is None else m,
                weights,
                inner if change is None else None,
            )
        output.index_add_(0, rows, added.to(output.dtype))
    return output


def _inner(experts: Any, expert: int, states: Tensor) -> Tensor:
    """The products of states with the keys of one expert, or with its gates and ups, [n, size or 2 size]."""
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    return _affine(experts, getattr(experts, name)[expert], _bias_of(experts, name, expert), states)


def _affine(experts: Any, weight: Tensor, bias: Tensor | None, states: Tensor) -> Tensor:
    if not experts.is_transposed:
        return nn.functional.linear(states, weight, bias)
    product = states @ weight
    return product if bias is None else product + bias


def _bias_of(experts: Any, name: str, expert: int) -> Tensor | None:
    return getattr(experts, f"{name}_bias")[expert] if experts.has_bias else None


def _edited(
    taps: _Taps, expert: int, rows: Tensor, m: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """(rows, coefficients, weights, what is added) with the edits done, at every token; None where none is made."""
    groups, shape, _change = taps.edits[0]
    tokens = shape.batch * shape.positions
    group = groups[expert]
    block = CoefficientBlock(group, (shape.batch, shape.positions), rows, m * weights[:, None], weights)
    before = coefficients = block.everywhere()
    for _groups, _shape, change in taps.edits:
        coefficients = change(coefficients, group)
    if coefficients is before:
        return None
    used = coefficients.reshape(tokens, -1).to(m.dtype)
    everywhere = torch.zeros(tokens, dtype=weights.dtype, device=weights.device).index_copy(0, rows, weights)
    added = used @ group.values.to(used.dtype)
    bias = _bias_of(group.experts, "down_proj", expert)
    if bias is not None:
        added = added + everywhere[:, None] * bias
    return torch.arange(tokens, device=rows.device), used, everywhere, added


def _show(taps: _Taps, expert: int, rows: Tensor, coefficients: Tensor, weights: Tensor, inner: Tensor | None) -> None:
    for groups, shape, use in taps.watchers:
        group = groups[expert]
        gates = inner[:, group._part(0)] if inner is not None and group.gated else None
        use(CoefficientBlock(group, (shape.batch, shape.positions), rows, coefficients, weights, gates))
