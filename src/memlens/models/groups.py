"""The memories of one layer: MemoryLayer, and its groups of memories, each a dense block or an expert.

A memory is one hidden unit of a feed-forward block: row i of `keys` with row i of `values` (and of `up` where the block
is gated). A layer may have none, one group, or many: dense ones come first, then shared experts, then those behind a
router, expert by expert; the memories of a layer are counted through in that order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memlens.memory import KINDS, ExpertId, GroupShape, MemoryId
from memlens.models.lens import Norm, at_least_float32

Scale = float | Tensor | None  # a constant, one factor per coordinate [d], or none


def scaled(vectors: Tensor, scale: Scale) -> Tensor:
    """`vectors` [..., d] times a scale; the same tensor where there is none."""
    return vectors if scale is None else vectors * (scale.to(vectors) if isinstance(scale, Tensor) else scale)


@dataclass(frozen=True, eq=False)
class MemoryGroup(ABC):
    """Memories that are used together.

    plain: m = f(x K^T + b_K);  gated: m = f(x G^T + b_G) * (x U^T + b_U), with G in `keys` and U in `up`; `combine` is
    there where the two meet in another way. The group puts out s * (m V + b_V), times `scale`. s is 1, or a number of
    the token: of a shared expert its gate (`token_scale`), of a routed one the router's weight. The coefficient is s m.
    """

    kind: str = "dense"  # or "shared", "routed"
    expert: int = 0  # counted within its kind
    start: int = 0  # the number of its first memory in the layer
    activation: str = "relu"  # the checkpoint's own name, such as "gelu_new"
    activate: Callable[[Tensor], Tensor] = field(default=torch.relu, repr=False)  # f, found by the activation's name
    combine: Callable[[Tensor, Tensor], Tensor] | None = field(default=None, repr=False)  # (x G^T + b, x U^T + b) -> m
    scale: Scale = field(default=None, repr=False)
    token_scale: Callable[[Tensor], Tensor] | None = field(default=None, repr=False)  # x [..., d] -> s [..., 1]

    @property
    @abstractmethod
    def reader(self) -> nn.Module:
        """The module that is given x."""

    @property
    @abstractmethod
    def writer(self) -> nn.Module:
        """The module that puts out the memories' sum, of a stacked module that of all its experts."""

    @property
    @abstractmethod
    def keys(self) -> Tensor:
        """[size, d]; the gate's rows where the block is gated."""

    @property
    @abstractmethod
    def key_bias(self) -> Tensor | None: ...

    @property
    @abstractmethod
    def up(self) -> Tensor | None:
        """[size, d]; None where the block is not gated."""

    @property
    @abstractmethod
    def up_bias(self) -> Tensor | None: ...

    @property
    @abstractmethod
    def values(self) -> Tensor:
        """[size, d], a view of the checkpoint's own weights, without any scale."""

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
        """The slice of its memories among those of the layer."""
        return slice(self.start, self.start + self.size)

    @cached_property
    def gate_turns(self) -> bool:
        """Does a negative gate turn the sign of what it lets through, as with SiLU, and not with a sigmoid or ReLU?"""
        return bool((self.activate(torch.tensor([-1.0], device=self.values.device)) < 0).item())

    def holds(self, memory: MemoryId | ExpertId) -> bool:
        """Is this the group of a memory, or of an expert, of the same layer?"""
        return (memory.kind, memory.expert) == (self.kind, self.expert)

    def coefficients(self, inputs: Tensor) -> Tensor:
        """s m [..., size] for block inputs x [..., d], by the formula above and not by the model's own modules.

        Computed in the dtype of `inputs`, whatever the model's is; without the weight of a router.
        """
        gate, up = self.matches(inputs)
        if up is None:
            coefficients = self.activate(gate)
        else:
            coefficients = self.activate(gate) * up if self.combine is None else self.combine(gate, up)
        return coefficients if self.token_scale is None else coefficients * self.token_scale(inputs)

    def matches(self, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """(x K^T + b_K, x U^T + b_U), [..., size] each; the second is None where the block is not gated."""
        up = None if self.up is None else _affine(inputs, self.up, self.up_bias)
        return _affine(inputs, self.keys, self.key_bias), up

    def weighed_values(self, coefficients: Tensor) -> Tensor:
        """c V [n, d] for coefficients [n, size], in their dtype and without any scale."""
        return coefficients @ self.values.to(coefficients.dtype)


@dataclass(frozen=True, eq=False)
class LinearGroup(MemoryGroup):
    """A group whose projections are modules; `key_rows` and `up_rows` tell the rows of a fused projection apart."""

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
    """The matrix of a projection with one row per output, [outputs, inputs], whichever way round it is stored."""
    weight: Tensor = projection.weight.detach()
    # transformers' Conv1D (GPT-2) stores [inputs, outputs]; known by its name, so that this file needs torch only
    return weight.T if type(projection).__name__ == "Conv1D" else weight


def _bias(projection: nn.Module, rows: slice) -> Tensor | None:
    bias: Tensor | None = getattr(projection, "bias", None)
    return None if bias is None else bias.detach()[rows]


class CoefficientBlock(NamedTuple):
    """The coefficients of one group in one pass, of the tokens that reach it."""

    group: MemoryGroup
    shape: tuple[int, int]  # (batch, pos) of the pass
    rows: Tensor | None  # [n] which rows of the flattened [batch * pos], each once, in any order; None: all, in order
    coefficients: Tensor  # [n, size], s * m
    weights: Tensor | None  # [n], s; None where it is 1 for every token
    gates: Tensor | None = None  # [n, size], x G^T + b_G; None where the block is not gated or its experts are edited

    def at(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(coefficients [k, size], s [k]) at some rows [k] of the flattened pass; zeros where they do not reach it."""
        if self.rows is None:
            coefficients = self.coefficients[rows]
            return coefficients, coefficients.new_ones(len(rows)) if self.weights is None else self.weights[rows]
        place = torch.full((self.shape[0] * self.shape[1],), len(self.rows), device=rows.device)
        place[self.rows] = torch.arange(len(self.rows), device=rows.device)
        padded = torch.cat([self.coefficients, self.coefficients.new_zeros(1, self.coefficients.shape[1])])
        weights = self.coefficients.new_ones(len(self.rows)) if self.weights is None else self.weights
        return padded[place[rows]], torch.cat([weights, weights.new_zeros(1)])[place[rows]]

    def everywhere(self) -> Tensor:
        """[batch, pos, size]; zeros at tokens that do not reach the group."""
        if self.rows is None:
            return self.coefficients.reshape(*self.shape, -1)
        full = self.coefficients.new_zeros(self.shape[0] * self.shape[1], self.coefficients.shape[1])
        return full.index_copy(0, self.rows, self.coefficients).reshape(*self.shape, -1)


@dataclass(frozen=True, eq=False)
class MemoryLayer:
    """The memories of one layer, and the modules through which its part of the stream is watched.

    The block adds y to the residual stream: what all groups put out together, through `post_norm` where there is one,
    times `scale`.
    """

    number: int
    block: nn.Module = field(repr=False)  # its output (or that output's first element) is o, [batch, pos, d]
    groups: tuple[MemoryGroup, ...] = field(repr=False)
    outputs: tuple[nn.Module, ...] = field(repr=False)  # what they put out is together the sum of all groups
    input_norm: Norm | None = field(repr=False)  # the norm whose output is x; None where x is the stream itself
    post_norm: Norm | None = field(repr=False)  # the norm between the groups' output and the stream
    parallel: bool = False  # does the block read the stream from before the attention of its layer?
    scale: Scale = field(default=None, repr=False)

    @classmethod
    def of(cls, *, groups: Iterable[MemoryGroup], **parts: Any) -> MemoryLayer:
        """A layer whose groups are put in order and counted through."""
        ordered, start = [], 0
        for group in sorted(groups, key=lambda known: (KINDS.index(known.kind), known.expert)):
            ordered.append(replace(group, start=start))
            start += group.size
        return cls(groups=tuple(ordered), **parts)

    @property
    def memories(self) -> int:
        return sum(group.size for group in self.groups)

    @property
    def shape(self) -> tuple[GroupShape, ...]:
        """Kinds, counts and sizes of the groups: all that names of memories are made of."""
        alike = groupby(self.groups, key=lambda group: (group.kind, group.size))
        return tuple(GroupShape(kind, len(list(several)), size) for (kind, size), several in alike)

    @property
    def is_mixture(self) -> bool:
        """Does a router choose which memories a token meets?"""
        return any(group.kind == "routed" for group in self.groups)

    @property
    def gated(self) -> bool:
        return any(group.gated for group in self.groups)

    @property
    def activation(self) -> str:
        return self.groups[0].activation if self.groups else ""

    @property
    def signed(self) -> bool:
        """Do negative coefficients mean something? Then bottom triggers are kept by default."""
        return self.gated

    @property
    def values(self) -> Tensor:
        """[memories, d], with their group's scale: of one group without a scale a view, else a copy of all of them."""
        return self._rows([scaled(group.values, group.scale) for group in self.groups])

    @property
    def keys(self) -> Tensor:
        """[memories, d]; of one group a view, else a copy of all of them."""
        return self._rows([group.keys for group in self.groups])

    def _rows(self, parts: list[Tensor]) -> Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def group_of(self, number: int) -> tuple[MemoryGroup, int]:
        """The group of a memory, and the memory's number within it."""
        group = next(group for group in reversed(self.groups) if group.start <= number)
        return group, number - group.start

    def group_named(self, owner: ExpertId) -> MemoryGroup:
        return next(group for group in self.groups if group.holds(owner))

    def values_of(self, numbers: Sequence[int] | Tensor) -> Tensor:
        """[n, d]: the values of some memories, with their group's scale; no others are copied."""
        places = [self.group_of(number) for number in (numbers.tolist() if isinstance(numbers, Tensor) else numbers)]
        rows = [scaled(group.values[place], group.scale) for group, place in places]
        return torch.stack(rows) if rows else self.groups[0].values[:0]

    def lengths(self) -> Tensor:
        """||v|| of every value, [memories], float32 or finer."""
        return torch.cat([_lengths(scaled(at_least_float32(group.values), group.scale)) for group in self.groups])


def _lengths(values: Tensor) -> Tensor:
    # most families store values as columns, over which torch's norm is five times slower than a product
    return values.norm(dim=1) if values.is_contiguous() else torch.linalg.vecdot(values, values).sqrt()
