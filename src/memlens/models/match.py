"""Search for the keys of a down projection: the linear maps and the activation that compute its input.

The search uses the recorded calls of a block, not the names of modules. Candidates are all maps that could hold keys,
all pairs of maps that could be gate and up, and the two halves of each map that could fuse gate and up. The search
tries each candidate with each activation and selects the combination with the smallest deviation. The result is a
proposal, which proof.py checks with a much smaller tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from memlens.models.blocks import ModuleCall
from memlens.models.groups import input_rows
from memlens.models.lens import Norm, NormKind, to_float64

NEAR = 2e-2  # largest deviation of a proposal; the proof is much stricter and reports the exact deviation
_EXACT = 1e-5
_COLUMNS = 64  # number of hidden units that are compared first
_COMMON = ("silu", "gelu", "gelu_pytorch_tanh", "relu")  # preferred names among equal functions
_EPSILONS = (1e-5, 1e-6, 1e-12, 1e-8)


def deviation(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference at any position, divided by the largest number at that position."""
    expected = expected.to(actual.device)
    largest = expected.abs().amax(-1).clamp_min(1e-6)
    return float(((actual - expected).abs().amax(-1) / largest).max())


def rows_of(tensor: Tensor) -> Tensor:
    """Flatten [batch, pos, n] to [batch * pos, n]. Tensors that are already flat are unchanged."""
    return tensor.reshape(-1, tensor.shape[-1])


def is_linear(call: ModuleCall) -> bool:
    """Return True if a module's shapes are those of a linear map."""
    weight = getattr(call.module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not call.inputs.is_floating_point():
        return False
    return input_rows(call.module).shape == (call.output.shape[-1], call.inputs.shape[-1])


def recognized_norm(call: ModuleCall) -> Norm | None:
    """Return the Norm whose formula the called module computes, or None if the module is no known norm."""
    if call.inputs.shape != call.output.shape or not call.inputs.is_floating_point() or is_linear(call):
        return None
    weight = getattr(call.module, "weight", None)
    if weight is not None and weight.shape != call.inputs.shape[-1:]:
        return None
    kinds: tuple[NormKind, ...] = ("rms", "layer") if weight is None else ("rms", "layer", "rms+1", "layer+1")
    best: tuple[float, Norm | None] = (NEAR, None)
    for kind in kinds:
        for epsilon in (None, torch.finfo(torch.float32).eps, *_EPSILONS):
            norm = Norm(call.module, kind, epsilon)
            try:
                off = deviation(norm.by_formula(call.inputs), call.output)
            except AttributeError:
                continue  # the module stores no epsilon, so try common ones
            if off < best[0]:
                best = (off, norm)
            if epsilon is None:
                break
        if best[0] < _EXACT:
            break
    return best[1]


@dataclass(frozen=True, eq=False)
class Keys:
    """The keys of a down projection, and the activation that turns their products into coefficients."""

    key_projection: nn.Module
    up_projection: nn.Module | None
    key_rows: slice
    up_rows: slice
    activation: str
    activate: Callable[[Tensor], Tensor]
    combine: Callable[[Tensor, Tensor], Tensor] | None = None


@dataclass(frozen=True, eq=False)
class _KeyCandidate:
    call: ModuleCall
    up_call: ModuleCall | None
    key_rows: slice = field(default_factory=lambda: slice(None))
    up_rows: slice = field(default_factory=lambda: slice(None))

    @property
    def gate(self) -> Tensor:
        return rows_of(self.call.output)[:, self.key_rows]

    @property
    def up(self) -> Tensor | None:
        return None if self.up_call is None else rows_of(self.up_call.output)[:, self.up_rows]

    def keys(self, activation: str, activate: Callable[[Tensor], Tensor]) -> Keys:
        up = None if self.up_call is None else self.up_call.module
        return Keys(self.call.module, up, self.key_rows, self.up_rows, activation, activate)


def match_keys(down: ModuleCall, calls: Sequence[ModuleCall], names: Sequence[str]) -> Keys | None:
    """Return the keys of a down projection, or None if no candidate is close enough.

    Args:
        down: The call of the down projection.
        calls: All calls of the block, in the order in which they returned.
        names: Names of activations to try first.
    """
    before = calls[: calls.index(down)]
    m = rows_of(down.inputs)
    candidates = list(_candidates(down, before))
    best = _best(candidates, m, before, names)
    if best is not None:
        return best
    for call in before:  # BitNet has a norm between the coefficients and the values
        if call.output.shape == down.inputs.shape and torch.equal(rows_of(call.output), m):
            norm = recognized_norm(call)
            inner = None if norm is None else _best(candidates, rows_of(call.inputs), before, names)
            if norm is not None and inner is not None and inner.up_projection is not None:
                return replace(inner, combine=_NormedProduct(inner.activate, norm))
    return _clamped(candidates, m, _constants(down, calls))


@dataclass(frozen=True, eq=False)
class _NormedProduct:
    """The function norm(f(g) * u)."""

    activate: Callable[[Tensor], Tensor]
    norm: Norm

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.norm.by_formula(self.activate(gate) * up)


@dataclass(frozen=True, eq=False)
class _ClampedProduct:
    """The function (u + 1) g sigmoid(slope g) with g and u clamped, as in the experts of gpt-oss and MiniMax M3."""

    slope: float
    limit: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(self.slope * gate)


def _clamped(candidates: Sequence[_KeyCandidate], m: Tensor, constants: Sequence[float]) -> Keys | None:
    """Return keys whose gate and up form a clamped product with two of the constants, or None if no pair does."""
    limits = sorted(
        constants, reverse=True
    )  # largest first: if nothing was clamped, any limit above the largest number fits
    for candidate in candidates:
        for combine in (_ClampedProduct(slope, limit) for limit in limits for slope in constants):
            if candidate.up is not None and deviation(combine(candidate.gate, candidate.up), m) < _EXACT:
                keys = candidate.keys("silu", nn.functional.silu)
                return replace(keys, combine=combine)
    return None


def _constants(down: ModuleCall, calls: Sequence[ModuleCall]) -> list[float]:
    """Return the float attributes of the modules that contain the down projection."""
    around = [call.module for call in calls if down.module in call.module.children()]
    return [value for module in around for value in vars(module).values() if type(value) is float and value > 0]


def _candidates(down: ModuleCall, before: Sequence[ModuleCall]) -> Iterator[_KeyCandidate]:
    size, width, positions = down.inputs.shape[-1], down.output.shape[-1], len(rows_of(down.inputs))
    maps = [call for call in before if is_linear(call) and call.inputs.shape[-1] == width]
    maps = [call for call in maps if len(rows_of(call.inputs)) == positions]
    whole = [call for call in maps if call.output.shape[-1] == size]
    for key_call in whole:
        for up_call in whole:
            if key_call is not up_call and torch.equal(rows_of(key_call.inputs), rows_of(up_call.inputs)):
                yield _KeyCandidate(key_call, up_call)
    for call in maps:
        if call.output.shape[-1] == 2 * size:
            halves = (slice(0, size), slice(size, None)), (slice(0, None, 2), slice(1, None, 2))
            for first, second in halves:
                yield _KeyCandidate(call, call, first, second)
                yield _KeyCandidate(call, call, second, first)
    yield from (_KeyCandidate(call, None) for call in whole)


def _best(
    candidates: Sequence[_KeyCandidate], m: Tensor, before: Sequence[ModuleCall], names: Sequence[str]
) -> Keys | None:
    """Return the candidate and the activation whose product is closest to m [n, size], or None if none is close."""
    best: tuple[float, Keys | None] = (NEAR, None)
    for functions in (_by_name(tuple(names)), _by_name(None), _modules(before, m.shape[-1])):
        for candidate in candidates:
            for name, activate in functions:
                off = _distance(candidate, activate, m)
                if off < best[0]:
                    best = (off, candidate.keys(name, activate))
                if off < _EXACT:
                    return best[1]
    return best[1]


def _distance(candidate: _KeyCandidate, activate: Callable[[Tensor], Tensor], m: Tensor) -> float:
    gate, up = candidate.gate, candidate.up
    for columns in (slice(0, _COLUMNS), slice(None)):
        product = activate(gate[:, columns])
        off = deviation(product if up is None else product * up[:, columns], m[:, columns])
        if not off < 10 * NEAR:  # a generous limit, because 64 units may exclude the largest number of a position
            return float("inf")
    return off


@lru_cache
def _by_name(names: tuple[str, ...] | None) -> list[tuple[str, Callable[[Tensor], Tensor]]]:
    """Return activations of transformers by name. If `names` is None, return all nonlinear ones without weights."""
    from transformers.activations import ACT2FN

    if names is None:
        names = (*_COMMON, *(name for name in ACT2FN if name not in (*_COMMON, "linear", "prelu", "xielu")))
    return [(name, ACT2FN[name]) for name in names]


def _modules(before: Sequence[ModuleCall], size: int) -> list[tuple[str, Callable[[Tensor], Tensor]]]:
    """Return the block's elementwise modules as activations, with the constant factor on their input, if any."""
    activations: list[tuple[str, Callable[[Tensor], Tensor]]] = []
    for call in before:
        if call.inputs.shape != call.output.shape or call.inputs.shape[-1] != size or is_linear(call):
            continue
        if not _is_elementwise(call):
            continue
        for source in before:
            if is_linear(source) and source.output.shape[-1] == size and source.output.numel() == call.inputs.numel():
                factor = ratio(rows_of(call.inputs), rows_of(source.output))
                if factor is not None:
                    activations.append((_name_of(call.module), ScaledActivation(call.module, factor)))
    return activations


def _is_elementwise(call: ModuleCall) -> bool:
    """Return True if a module applies the same function to every number."""
    # softmax and norms without a gain pass this test too, but each of their outputs depends on all inputs
    if not torch.allclose(call.again(call.inputs.flip(-1)).flip(-1), call.output, rtol=1e-5, atol=1e-6):
        return False
    is_fixed = torch.rand(call.inputs.shape, generator=torch.Generator().manual_seed(0)).to(call.inputs.device) < 0.5
    output = call.again(torch.where(is_fixed, call.inputs, call.inputs.flip(-1)))
    return torch.equal(output[is_fixed], call.output[is_fixed])


def _name_of(module: nn.Module) -> str:
    """Return the name that configurations use for an activation, or the name of its class if there is none."""
    from transformers.activations import ACT2CLS

    names = [name for name, kind in ACT2CLS.items() if kind is type(module)]
    return names[0] if names else type(module).__name__


@dataclass(frozen=True, eq=False)
class ScaledActivation:
    """An activation applied to c x instead of x."""

    activate: Any
    factor: float

    def __call__(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.activate(inputs if self.factor == 1 else inputs * self.factor)
        return output


def ratio(actual: Tensor, source: Tensor) -> float | None:
    """Return c such that actual = c * source, or None if there is no such c."""
    if actual.shape != source.shape:
        return None
    source = source.to(actual.device)
    wide = to_float64(source)
    factor = float((to_float64(actual) * wide).sum() / wide.square().sum().clamp_min(1e-30))
    if not deviation(source * factor, actual) < NEAR:
        return None
    rounded = float(f"{factor:.5g}")  # remove float32 noise of the fit, because settings have few digits
    return rounded if abs(rounded - factor) < 2e-6 * abs(factor) else factor


def map_to_stream(stream: Tensor, read: Tensor, tolerance: float = NEAR) -> Tensor | None:
    """Return `read` [n, d], mapped onto `stream`, or None if the two are different streams.

    The two may be equal, or differ by a scale and a shift of each coordinate. Doge and Zaya scale their stream between
    the point where the block reads it and the point where y is added.
    """
    if deviation(read, stream) < tolerance:
        return read
    wide, wide_stream = to_float64(read), to_float64(stream)
    centered, centered_stream = wide - wide.mean(0), wide_stream - wide_stream.mean(0)
    gain = (centered * centered_stream).sum(0) / centered.square().sum(0).clamp_min(1e-30)
    moved = (wide_stream.mean(0) + centered * gain).to(stream.device, stream.dtype)
    return moved if deviation(moved, stream) < tolerance else None
