"""MemoryLayer, the memories of one layer, and its groups: dense blocks, shared experts and routed experts.

A memory is one hidden unit of a feed-forward block: row i of `keys` and row i of `values` (and of `up` if the block is
gated). A layer has no group, one, or many. Dense groups come first, then shared experts, then routed experts. The
memories of a layer are numbered in this order of groups.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memlens.memory import KINDS, ExpertId, GroupShape, MemoryId
from memlens.models.lens import Norm, at_least_float32

Scale = float | Tensor | None  # a constant, a factor per coordinate [d], or None


def scaled(vectors: Tensor, scale: Scale) -> Tensor:
    """Multiply vectors [..., d] by a scale. Returns the same tensor if the scale is None."""
    return vectors if scale is None else vectors * (scale.to(vectors) if isinstance(scale, Tensor) else scale)


@dataclass(frozen=True, eq=False)
class MemoryGroup(ABC):
    """Memories that share one input and one output.

    Plain: m = f(x K^T + b_K). Gated: m = f(x G^T + b_G) * (x U^T + b_U), with G in `keys` and U in `up`; `combine`
    replaces this product if the block uses another function. The output is scale * s * (m V + b_V), and the coefficient
    is s m. The factor s is 1 or a number per token: the gate of a shared expert (`token_scale`), or the router's weight
    of a routed expert.
    """

    kind: str = "dense"  # "dense", "shared" or "routed"
    expert: int = 0  # number of the expert within its kind
    start: int = 0  # the number of the group's first memory in the layer
    activation: str = "relu"  # name of the activation in the checkpoint, such as "gelu_new"
    activate: Callable[[Tensor], Tensor] = field(default=torch.relu, repr=False)  # f
    combine: Callable[[Tensor, Tensor], Tensor] | None = field(default=None, repr=False)  # (x G^T + b, x U^T + b) -> m
    scale: Scale = field(default=None, repr=False)
    token_scale: Callable[[Tensor], Tensor] | None = field(default=None, repr=False)  # x [..., d] -> s [..., 1]

    @property
    @abstractmethod
    def reader(self) -> nn.Module:
        """The module whose input is x."""

    @property
    @abstractmethod
    def writer(self) -> nn.Module:
        """The module that returns the sum over the memories (for stacked experts, over all experts)."""

    @property
    @abstractmethod
    def keys(self) -> Tensor:
        """The keys [size, d], which are the rows of the gate if the block is gated."""

    @property
    @abstractmethod
    def key_bias(self) -> Tensor | None: ...

    @property
    @abstractmethod
    def up(self) -> Tensor | None:
        """The rows of the up projection, [size, d], or None if the block is not gated."""

    @property
    @abstractmethod
    def up_bias(self) -> Tensor | None: ...

    @property
    @abstractmethod
    def values(self) -> Tensor:
        """The values [size, d], a view of the checkpoint's own weights without any scale."""

    @property
    @abstractmethod
    def value_bias(self) -> Tensor | None: ...

    @property
    @abstractmethod
    def gated(self) -> bool: ...

    @property
    @abstractmethod
    def size(self) -> int: ...

    @property
    def columns(self) -> slice:
        """The slice of this group's memories within the layer."""
        return slice(self.start, self.start + self.size)

    @cached_property
    def gate_turns(self) -> bool:
        """True if a negative gate makes the activation negative, as SiLU does and a sigmoid or ReLU does not."""
        return bool((self.activate(torch.tensor([-1.0], device=self.values.device)) < 0).item())

    def holds(self, memory: MemoryId | ExpertId) -> bool:
        """Return True if this memory or expert of the same layer belongs to this group."""
        return (memory.kind, memory.expert) == (self.kind, self.expert)

    def coefficients(self, inputs: Tensor) -> Tensor:
        """Compute s m [..., size] for block inputs x [..., d] by the formula, without the model's modules.

        The dtype is that of `inputs`. The router's weight is not included.
        """
        m = self.combined(*self.matches(inputs))
        return m if self.token_scale is None else m * self.token_scale(inputs)

    def combined(self, gate: Tensor, up: Tensor | None) -> Tensor:
        """Return m from the two products that `matches` returns."""
        if up is None:
            return self.activate(gate)
        return self.activate(gate) * up if self.combine is None else self.combine(gate, up)

    def matches(self, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return x K^T + b_K and x U^T + b_U, [..., size] each. The second is None if the block is not gated."""
        up = None if self.up is None else _affine(inputs, self.up, self.up_bias)
        return _affine(inputs, self.keys, self.key_bias), up

    def weighed_values(self, coefficients: Tensor) -> Tensor:
        """Return c V [n, d] for coefficients c [n, size], in the dtype of c and without the group's scale."""
        return coefficients @ self.values.to(coefficients.dtype)


@dataclass(frozen=True, eq=False)
class LinearGroup(MemoryGroup):
    """A group whose projections are modules. `key_rows` and `up_rows` select the rows of a fused projection."""

    key_projection: nn.Module = field(kw_only=True, repr=False)  # x -> x K^T + b_K; the gate of a gated block
    up_projection: nn.Module | None = field(kw_only=True, default=None, repr=False)
    down: nn.Module = field(kw_only=True, repr=False)  # its input is m, its output m V + b_V
    key_rows: slice = field(default_factory=lambda: slice(None))
    up_rows: slice = field(default_factory=lambda: slice(None))

    @property
    def reader(self) -> nn.Module:
        return self.key_projection

    @property
    def writer(self) -> nn.Module:
        return self.down

    @property
    def gated(self) -> bool:
        return self.up_projection is not None

    @property
    def size(self) -> int:
        return self.values.shape[0]

    @property
    def keys(self) -> Tensor:
        return input_rows(self.key_projection)[self.key_rows]

    @property
    def key_bias(self) -> Tensor | None:
        return _bias(self.key_projection, self.key_rows)

    @property
    def up(self) -> Tensor | None:
        return None if self.up_projection is None else input_rows(self.up_projection)[self.up_rows]

    @property
    def up_bias(self) -> Tensor | None:
        return None if self.up_projection is None else _bias(self.up_projection, self.up_rows)

    @property
    def values(self) -> Tensor:
        return input_rows(self.down).T

    @property
    def value_bias(self) -> Tensor | None:
        return _bias(self.down, slice(None))


def _affine(inputs: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
    return nn.functional.linear(inputs, rows.to(inputs.dtype), None if bias is None else bias.to(inputs.dtype))


def input_rows(projection: Any) -> Tensor:
    """Return the matrix of a projection as [outputs, inputs], however it is stored."""
    weight: Tensor = projection.weight.detach()
    # transformers' Conv1D (GPT-2) stores [inputs, outputs]; compared by name to avoid importing transformers
    return weight.T if type(projection).__name__ == "Conv1D" else weight


def _bias(projection: nn.Module, rows: slice) -> Tensor | None:
    bias: Tensor | None = getattr(projection, "bias", None)
    return None if bias is None else bias.detach()[rows]


class CoefficientBlock(NamedTuple):
    """The coefficients of one group in one pass, for the tokens that reach the group."""

    group: MemoryGroup
    shape: tuple[int, int]  # (batch, pos) of the pass
    rows: Tensor | None  # [n], distinct rows of the flattened [batch * pos] in any order; None for all rows in order
    coefficients: Tensor  # [n, size], s * m
    weights: Tensor | None  # [n], the factor s; None if s is 1 for every token
    gates: Tensor | None = None  # [n, size], x G^T + b_G; None if not gated or if experts are edited

    def at(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return coefficients [k, size] and s [k] at rows [k] of the flattened pass: 0 for tokens not in the block."""
        if self.rows is None:
            coefficients = self.coefficients[rows]
            return coefficients, coefficients.new_ones(len(rows)) if self.weights is None else self.weights[rows]
        place = torch.full((self.shape[0] * self.shape[1],), len(self.rows), device=rows.device)
        place[self.rows] = torch.arange(len(self.rows), device=rows.device)
        padded = torch.cat([self.coefficients, self.coefficients.new_zeros(1, self.coefficients.shape[1])])
        weights = self.coefficients.new_ones(len(self.rows)) if self.weights is None else self.weights
        return padded[place[rows]], torch.cat([weights, weights.new_zeros(1)])[place[rows]]

    def everywhere(self) -> Tensor:
        """Return the coefficients as [batch, pos, size], with zeros for tokens that do not reach the group."""
        if self.rows is None:
            return self.coefficients.reshape(*self.shape, -1)
        full = self.coefficients.new_zeros(self.shape[0] * self.shape[1], self.coefficients.shape[1])
        return full.index_copy(0, self.rows, self.coefficients).reshape(*self.shape, -1)


class RoutedBlock(NamedTuple):
    """The coefficients of the experts behind a router in one pass, sorted by expert."""

    groups: Mapping[int, MemoryGroup]  # by expert
    shape: tuple[int, int]  # (batch, pos) of the pass
    experts: Tensor  # [n], ascending
    rows: Tensor  # [n], rows of the flattened [batch * pos], distinct within each expert
    coefficients: Tensor  # [n, size], s * m
    weights: Tensor  # [n], s
    gates: Tensor | None  # [n, size], x G^T + b_G; None if not gated or if experts are edited

    def split(self) -> Iterator[CoefficientBlock]:
        """Yield the block of each expert that has tokens."""
        count = max(self.groups) + 1
        edges = torch.searchsorted(self.experts, torch.arange(count + 1, device=self.experts.device)).tolist()
        for expert, (first, stop) in enumerate(pairwise(edges)):
            if stop > first:
                gates = None if self.gates is None else self.gates[first:stop]
                yield CoefficientBlock(
                    self.groups[expert], self.shape, self.rows[first:stop], self.coefficients[first:stop],
                    self.weights[first:stop], gates,
                )  # fmt: skip


@dataclass(frozen=True, eq=False)
class MemoryLayer:
    """The memories of one layer and the modules at which its states are observed.

    The block adds y to the residual stream. y is the sum of all groups, normalized by `post_norm` if there is one,
    times `scale`.
    """

    number: int
    block: nn.Module = field(repr=False)  # its (first) output is o, [batch, pos, d]
    groups: tuple[MemoryGroup, ...] = field(repr=False)
    outputs: tuple[nn.Module, ...] = field(repr=False)  # modules whose outputs add up to the sum of all groups
    input_norm: Norm | None = field(repr=False)  # the norm whose output is x; None if x is the stream itself
    post_norm: Norm | None = field(repr=False)  # the norm between the groups and the stream
    parallel: bool = False  # True if the block reads the stream before its attention
    scale: Scale = field(default=None, repr=False)

    @classmethod
    def of(cls, *, groups: Iterable[MemoryGroup], **parts: Any) -> MemoryLayer:
        """Create a layer with its groups sorted and numbered."""
        ordered, start = [], 0
        for group in sorted(groups, key=lambda group: (KINDS.index(group.kind), group.expert)):
            ordered.append(replace(group, start=start))
            start += group.size
        return cls(groups=tuple(ordered), **parts)

    @property
    def memories(self) -> int:
        return sum(group.size for group in self.groups)

    @property
    def shape(self) -> tuple[GroupShape, ...]:
        """The kinds, counts and sizes of the groups, which determine the names of the memories."""
        runs = groupby(self.groups, key=lambda group: (group.kind, group.size))
        return tuple(GroupShape(kind, len(list(groups)), size) for (kind, size), groups in runs)

    @property
    def is_mixture(self) -> bool:
        """True if a router selects the memories for each token."""
        return any(group.kind == "routed" for group in self.groups)

    @property
    def gated(self) -> bool:
        return any(group.gated for group in self.groups)

    @property
    def activation(self) -> str:
        return self.groups[0].activation if self.groups else ""

    @property
    def signed(self) -> bool:
        """True if negative coefficients are meaningful. Bottom triggers are then kept by default."""
        return self.gated

    @property
    def values(self) -> Tensor:
        """The values [memories, d] times the scale of each group.

        They are a view if there is one group without a scale, otherwise a copy.
        """
        parts = [scaled(group.values, group.scale) for group in self.groups]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @property
    def keys(self) -> Tensor:
        """The keys [memories, d]. They are a view if there is a single group, otherwise a copy."""
        parts = [group.keys for group in self.groups]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def group_of(self, number: int) -> tuple[MemoryGroup, int]:
        """Return the group of a memory and the memory's number within it."""
        group = next(group for group in reversed(self.groups) if group.start <= number)
        return group, number - group.start

    def group_named(self, owner: ExpertId) -> MemoryGroup:
        return next(group for group in self.groups if group.holds(owner))

    def values_of(self, numbers: Sequence[int] | Tensor) -> Tensor:
        """Return the values of these memories times the scale of their group, [n, d], without copying other values."""
        places = [self.group_of(number) for number in (numbers.tolist() if isinstance(numbers, Tensor) else numbers)]
        rows = [scaled(group.values[place], group.scale) for group, place in places]
        return torch.stack(rows) if rows else self.groups[0].values[:0]

    def lengths(self) -> Tensor:
        """Return ||v|| of every value, [memories], float32 or float64."""
        lengths = []
        for group in self.groups:
            values = scaled(at_least_float32(group.values), group.scale)
            # most families store values as columns, for which torch's norm is five times slower than a dot product
            is_by_row = values.is_contiguous()
            lengths.append(values.norm(dim=1) if is_by_row else torch.linalg.vecdot(values, values).sqrt())
        return torch.cat(lengths)
