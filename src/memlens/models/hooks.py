"""Hooks on a feed-forward block, as context managers: they are gone after the `with`, whatever happened inside.

Coefficients are read after the down projection ran, from the input it really got; edits are made before it runs. So a
watcher sees the coefficients that were used, in whichever order watching and editing were entered. Experts behind a
router are watched in the function that runs them (experts.py).
One model serves one thread at a time: a hook sees every pass through its model. MemoryModel.sharing_weights makes more.
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
    """Call `use` with the hidden state that goes into `module`, before it runs."""

    def hook(_module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        use(first_input(arguments, named))

    with module.register_forward_pre_hook(hook, with_kwargs=True):
        yield


@contextmanager
def on_output(module: nn.Module, use: Callable[[Tensor], None]) -> Iterator[None]:
    """Call `use` with the hidden state that comes out of `module`, before anyone else can change it in place."""

    def hook(_module: nn.Module, _arguments: tuple[Any, ...], output: Any) -> None:
        use(first_output(output))

    with module.register_forward_hook(hook):
        yield


class BatchShape:
    """[batch, pos] of the running pass, since some blocks (OPT) flatten the two before their feed-forward part."""

    def __init__(self) -> None:
        self.batch = self.positions = 0

    def note(self, states: Tensor) -> None:
        self.batch, self.positions = states.shape[0], states.shape[1]

    def unflatten(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(self.batch, self.positions, tensor.shape[-1])


Change = Callable[[Tensor, "MemoryGroup"], Tensor]  # (coefficients [batch, pos, size], group) -> what is used instead


@contextmanager
def watch_coefficients(layer: MemoryLayer, use: Callable[[CoefficientBlock], None]) -> Iterator[None]:
    """Call `use` with the coefficients of each group of the layer whenever they have been used."""
    with _on_groups(layer, partial(_watch_group, use=use), partial(StackedExperts.watch, use=use)):
        yield


@contextmanager
def edit_coefficients(layer: MemoryLayer, change: Change) -> Iterator[None]:
    """Let each group use `change(c, group)` instead of its coefficients c; the same tensor leaves it as it is."""
    with _on_groups(layer, partial(_edit_group, change=change), partial(StackedExperts.edit, change=change)):
        yield


@contextmanager
def _on_groups(
    layer: MemoryLayer,
    on_linear: Callable[[LinearGroup, BatchShape], AbstractContextManager[None]],
    on_experts: Callable[[StackedExperts, BatchShape], AbstractContextManager[None]],
) -> Iterator[None]:
    """Within, all groups of a layer are hooked, and know [batch, pos] of the running pass."""
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
    def hook(_module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], _output: Tensor) -> None:
        m = first_input(arguments, named).reshape(shape.batch * shape.positions, -1)
        if scale.latest is not None:
            m = m * scale.latest
        weights = None if scale.latest is None else scale.latest[:, 0]
        gates = latest.pop().flatten(0, -2)[:, group.key_rows] if latest else None
        use(CoefficientBlock(group, (shape.batch, shape.positions), None, m, weights, gates))

    def note(gates: Tensor) -> None:
        latest[:] = [gates]

    latest: list[Tensor] = []  # what the gate's projection put out, until it was used
    with ExitStack() as stack:
        scale = stack.enter_context(_TokenScale(group).followed())
        if group.gated:
            stack.enter_context(on_output(group.key_projection, note))
        with group.down.register_forward_hook(hook, with_kwargs=True):
            yield


@contextmanager
def _edit_group(group: LinearGroup, shape: BatchShape, change: Change) -> Iterator[None]:
    def hook(_module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        given = first_input(arguments, named)
        m = shape.unflatten(given)
        factor = None if scale.latest is None else shape.unflatten(scale.latest)
        before = m if factor is None else m * factor
        after = change(before, group)
        if after is before:
            return None
        changed = after if factor is None else _unscaled(after, factor, group)
        return with_first_input(arguments, named, changed.reshape(given.shape).to(given.dtype))

    with _TokenScale(group).followed() as scale, group.down.register_forward_pre_hook(hook, with_kwargs=True):
        yield


def _unscaled(coefficients: Tensor, factor: Tensor, group: MemoryGroup) -> Tensor:
    """m of which s m are these coefficients; where s is 0 none but 0 can be had, by any m."""
    shut = factor == 0
    if bool((shut & (coefficients != 0)).any()):
        raise SettingError(
            f"the gate of shared expert {group.expert} is 0 at a token, so no coefficient there can be other than 0; "
            "change it at other positions"
        )
    return torch.where(shut, 0, coefficients / torch.where(shut, 1, factor))


class _TokenScale:
    """s [batch * pos, 1] of a group in the running pass; None where it is 1 for every token."""

    def __init__(self, group: LinearGroup) -> None:
        self.group = group
        self.latest: Tensor | None = None

    @contextmanager
    def followed(self) -> Iterator[_TokenScale]:
        """Within, `latest` is computed from what the key projection is given, which is before s itself is used."""
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
    """Call `use` with y [batch, pos, d], what the block adds to the stream: through post-norm and scale."""
    shape, parts = BatchShape(), list[Tensor]()
    modules = layer.outputs if layer.post_norm is None else (layer.post_norm.module,)

    def begin(states: Tensor) -> None:
        shape.note(states)
        parts.clear()
        if not modules:  # no memories add anything
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
