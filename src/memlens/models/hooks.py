"""Hooks on a feed-forward block, as context managers: they are gone after the `with`, whatever happened inside.

Coefficients are read after the down projection ran, from the input it really got; edits are made before it runs. So a
watcher sees the coefficients that were used, in whichever order watching and editing were entered.
One model serves one thread at a time: a hook sees every pass through its model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from memlens.models.memory_model import FeedForward


def first_tensor(output: Tensor | tuple[Any, ...]) -> Tensor:
    """A block's hidden state, whether it returns it alone or first in a tuple."""
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def first_argument(arguments: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
    """The hidden state that a module was called with, by place or by name."""
    tensor: Tensor = arguments[0] if arguments else named["hidden_states"]
    return tensor


@contextmanager
def on_input(module: nn.Module, use: Callable[[Tensor], None]) -> Iterator[None]:
    """Call `use` with the hidden state that goes into `module`, before it runs."""

    def hook(_module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        use(first_argument(arguments, named))

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def on_output(module: nn.Module, use: Callable[[Tensor], None]) -> Iterator[None]:
    """Call `use` with the hidden state that comes out of `module`, before anyone else can change it in place."""

    def hook(_module: nn.Module, _arguments: tuple[Any, ...], output: Tensor | tuple[Any, ...]) -> None:
        use(first_tensor(output))

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


class BatchShape:
    """[batch, pos] of the running pass, since some blocks (OPT) flatten the two before their feed-forward part."""

    def __init__(self) -> None:
        self.batch = self.positions = 0

    def note(self, states: Tensor) -> None:
        self.batch, self.positions = states.shape[0], states.shape[1]

    def unflatten(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(self.batch, self.positions, tensor.shape[-1])


@contextmanager
def watch_coefficients(feed_forward: FeedForward, use: Callable[[Tensor], None]) -> Iterator[None]:
    """Call `use` with m [batch, pos, memories] whenever the block has used it."""
    shape = BatchShape()

    def hook(_module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], _output: Tensor) -> None:
        use(shape.unflatten(first_argument(arguments, named)))

    with on_input(feed_forward.block, shape.note):
        handle = feed_forward.down.register_forward_hook(hook, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()


@contextmanager
def edit_coefficients(feed_forward: FeedForward, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let the block use `change(m)` instead of m, [batch, pos, memories]."""
    shape = BatchShape()

    def hook(_module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        given: Tensor = arguments[0]
        changed = change(shape.unflatten(given))
        return (changed.reshape(given.shape).to(given.dtype), *arguments[1:])

    with on_input(feed_forward.block, shape.note):
        handle = feed_forward.down.register_forward_pre_hook(hook)
        try:
            yield
        finally:
            handle.remove()


@contextmanager
def watch_addition(feed_forward: FeedForward, use: Callable[[Tensor], None]) -> Iterator[None]:
    """Call `use` with y [batch, pos, d], what the block adds to the stream: after the post-norm where there is one."""
    shape = BatchShape()
    last = feed_forward.down if feed_forward.post_norm is None else feed_forward.post_norm.module
    with ExitStack() as hooks:
        hooks.enter_context(on_input(feed_forward.block, shape.note))
        hooks.enter_context(on_output(last, lambda addition: use(shape.unflatten(addition))))
        yield
