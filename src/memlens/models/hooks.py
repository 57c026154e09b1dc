"""Context managers that observe and edit the coefficients and states of a block.

Hooks exist only inside the contexts. Coefficients are read after the down projection has run, from its actual input.
Edits are made before the down projection runs. An observer therefore always sees the coefficients that were used,
regardless of the order in which the contexts were entered. Routed experts are observed in the function that runs them
(experts.py). A hook sees every pass through its model, so only one thread may use a model at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from memlens.errors import SettingError
from memlens.models.blocks import first_input, first_output, with_first_input
from memlens.models.experts import StackedExperts, stacked_experts
from memlens.models.groups import CoefficientBlock, LinearGroup, MemoryGroup, MemoryLayer, scaled


@contextmanager
def on_input(module: nn.Module, use: Callable[[Tensor], None]) -> Iterator[None]:
    """Call `use` with the first input tensor of `module` before it runs."""

    def hook(_module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        use(first_input(arguments, keywords))

    with module.register_forward_pre_hook(hook, with_kwargs=True):
        yield


@contextmanager
def on_output(module: nn.Module, use: Callable[[Tensor], None]) -> Iterator[None]:
    """Call `use` with the first output tensor of `module`, before other code can change it in place."""

    def hook(_module: nn.Module, _arguments: tuple[Any, ...], output: Any) -> None:
        use(first_output(output))

    with module.register_forward_hook(hook):
        yield


class BatchShape:
    """The shape [batch, pos] of the running pass.

    Some blocks (OPT) flatten both dimensions before the feed-forward part.
    """

    def __init__(self) -> None:
        self.batch = self.positions = 0

    def note(self, states: Tensor) -> None:
        self.batch, self.positions = states.shape[0], states.shape[1]

    def unflatten(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(self.batch, self.positions, tensor.shape[-1])


Change = Callable[[Tensor, "MemoryGroup"], Tensor]  # (coefficients [batch, pos, size], group) -> replacement


@contextmanager
def watch_coefficients(layer: MemoryLayer, use: Callable[[Any], None], split: bool = True) -> Iterator[None]:
    """Call `use` with the coefficients of each group of the layer after they have been used.

    With `split`, `use` is called with one CoefficientBlock per expert. Otherwise, it is called with one RoutedBlock for
    all experts behind a router.
    """
    with _on_groups(layer, partial(_watch_group, use=use), partial(StackedExperts.watch, use=use, split=split)):
        yield


@contextmanager
def edit_coefficients(layer: MemoryLayer, change: Change) -> Iterator[None]:
    """Replace the coefficients c of each group by `change(c, group)`. Returning the same tensor changes nothing."""
    with _on_groups(layer, partial(_edit_group, change=change), partial(StackedExperts.edit, change=change)):
        yield


@contextmanager
def _on_groups(
    layer: MemoryLayer,
    on_linear: Callable[[LinearGroup, BatchShape], AbstractContextManager[None]],
    on_experts: Callable[[StackedExperts, BatchShape], AbstractContextManager[None]],
) -> Iterator[None]:
    """Enter a context for every group of a layer. Each context receives the shape of the running pass."""
    shape = BatchShape()
    with ExitStack() as stack:
        stack.enter_context(on_input(layer.block, shape.note))
        for group in layer.groups:
            if isinstance(group, LinearGroup):
                stack.enter_context(on_linear(group, shape))
        for experts in stacked_experts(layer):
            stack.enter_context(on_experts(experts, shape))
        yield


@contextmanager
def _watch_group(group: LinearGroup, shape: BatchShape, use: Callable[[CoefficientBlock], None]) -> Iterator[None]:
    def hook(_module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], _output: Tensor) -> None:
        m = first_input(arguments, keywords).reshape(shape.batch * shape.positions, -1)
        if scale.latest is not None:
            m = m * scale.latest
        weights = None if scale.latest is None else scale.latest[:, 0]
        gates = latest_gates.pop().flatten(0, -2)[:, group.key_rows] if latest_gates else None
        use(CoefficientBlock(group, (shape.batch, shape.positions), None, m, weights, gates))

    def note(gates: Tensor) -> None:
        latest_gates[:] = [gates]

    latest_gates: list[Tensor] = []  # latest output of the gate projection, removed when it is used
    with ExitStack() as stack:
        scale = stack.enter_context(_TokenScale(group).observe())
        if group.gated:
            stack.enter_context(on_output(group.key_projection, note))
        with group.down.register_forward_hook(hook, with_kwargs=True):
            yield


@contextmanager
def _edit_group(group: LinearGroup, shape: BatchShape, change: Change) -> Iterator[None]:
    def hook(_module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        inputs = first_input(arguments, keywords)
        m = shape.unflatten(inputs)
        factor = None if scale.latest is None else shape.unflatten(scale.latest)
        before = m if factor is None else m * factor
        after = change(before, group)
        if after is before:
            return None
        replacement = after if factor is None else _unscaled(after, factor, group)
        return with_first_input(arguments, keywords, replacement.reshape(inputs.shape).to(inputs.dtype))

    with _TokenScale(group).observe() as scale, group.down.register_forward_pre_hook(hook, with_kwargs=True):
        yield


def _unscaled(coefficients: Tensor, factor: Tensor, group: MemoryGroup) -> Tensor:
    """Return m such that s m equals these coefficients. If s is 0, only coefficients of 0 are possible."""
    closed = factor == 0
    if bool((closed & (coefficients != 0)).any()):
        raise SettingError(
            f"the gate of shared expert {group.expert} is 0 at a token, so its coefficients there can only be 0; "
            "edit other positions"
        )
    return torch.where(closed, 0, coefficients / torch.where(closed, 1, factor))


class _TokenScale:
    """The scale s [batch * pos, 1] of a group in the running pass, or None if it is 1 for every token."""

    def __init__(self, group: LinearGroup) -> None:
        self.group = group
        self.latest: Tensor | None = None

    @contextmanager
    def observe(self) -> Iterator[_TokenScale]:
        """Compute `latest` from the input of the key projection, which runs before s is used."""
        compute = self.group.token_scale
        if compute is None:
            yield self
            return

        def note(inputs: Tensor) -> None:
            self.latest = compute(inputs).reshape(-1, 1)

        with on_input(self.group.key_projection, note):
            yield self


@contextmanager
def watch_addition(layer: MemoryLayer, use: Callable[[Tensor], None]) -> Iterator[None]:
    """Call `use` with y [batch, pos, d], which the block adds to the stream.

    Post-norm and scale are already applied.
    """
    shape, parts = BatchShape(), list[Tensor]()
    modules = layer.outputs if layer.post_norm is None else (layer.post_norm.module,)

    def begin(states: Tensor) -> None:
        shape.note(states)
        parts.clear()
        if not modules:  # a layer without memories adds nothing
            use(states.new_zeros(()).expand_as(states))

    def add(addition: Tensor) -> None:
        parts.append(shape.unflatten(addition))
        if len(parts) == len(modules):
            use(scaled(parts[0] if len(parts) == 1 else torch.stack(parts).sum(0), layer.scale))

    with ExitStack() as stack:
        stack.enter_context(on_input(layer.block, begin))
        for module in modules:
            stack.enter_context(on_output(module, add))
        yield
