"""Activations and norms that transformers computes in several steps, block by block: the same numbers in less time.

GPT-2's GELU makes eight passes over all coefficients of a batch, Llama's norm five over all states, each of them into
new memory. A step of an activation looks at one number at a time and a step of such a norm at one row, so that a block
that fits the cache can go through all steps before the next block begins. With one thread they are the same bit for
bit; with more, a last bit of an activation may differ where the shares of two threads meet.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from transformers import activations

# Numbers of a block for each thread: they and what the steps make of them fit the second-level cache. A multiple of
# every vector's width: what is left over at the end of a thread's share is computed one by one, in other last bits.
BLOCK = 1 << 17

# Those of transformers that are several elementwise steps in Python; others are one compiled step.
_STEPWISE = (
    activations.NewGELUActivation,
    activations.FastGELUActivation,
    activations.QuickGELUActivation,
    activations.AccurateGELUActivation,
    activations.ReLUSquaredActivation,
)


_NORM = "RMSNorm"  # how the classes of such norms end; a LayerNorm is one compiled step


def stepwise(network: nn.Module) -> list[nn.Module]:
    """The activations and norms of a network that gain from blocks; one that somebody has changed is left alone."""
    return [
        module
        for module in network.modules()
        if (type(module) in _STEPWISE or _is_norm(module)) and "forward" not in vars(module)
    ]


def _is_norm(module: nn.Module) -> bool:
    """Is it one that transformers has written out for a kind of model? They look at a row at a time.

    One with modules inside has products, whose last bits may depend on the number of rows.
    """
    kind, is_plain = type(module), not any(True for _ in module.children())
    return kind.__name__.endswith(_NORM) and kind.__module__.startswith("transformers.models.") and is_plain


@contextmanager
def in_blocks(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Within, these modules are computed block by block where no gradient is wanted."""
    changed = [module for module in modules if "forward" not in vars(module)]
    for module in changed:
        module.forward = partial(_run_rows if _is_norm(module) else _run_numbers, module.forward)
    try:
        yield
    finally:
        for module in changed:
            vars(module).pop("forward", None)  # another thread that runs the same network may have been quicker


def _run_numbers(forward: Callable[[Tensor], Tensor], given: Tensor) -> Tensor:
    size = BLOCK * torch.get_num_threads()
    if not _is_worth(given, size):
        return forward(given)
    return _run(forward, given.view(-1), size).view_as(given)


def _run_rows(forward: Callable[[Tensor], Tensor], given: Tensor) -> Tensor:
    size = BLOCK * torch.get_num_threads()
    if not _is_worth(given, size):
        return forward(given)
    rows = _run(forward, given.view(-1, given.shape[-1]), max(1, size // given.shape[-1]))
    return rows.view(*given.shape[:-1], rows.shape[-1])


def _is_worth(given: Tensor, size: int) -> bool:
    is_large = given.numel() > size and given.is_contiguous()
    return is_large and given.device.type == "cpu" and not torch.is_grad_enabled()


def _run(forward: Callable[[Tensor], Tensor], given: Tensor, size: int) -> Tensor:
    first = forward(given[:size])
    out = first.new_empty(len(given), *first.shape[1:])
    out[:size] = first
    for start in range(size, len(given), size):
        out[start : start + size] = forward(given[start : start + size])
    return out
