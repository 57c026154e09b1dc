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
    kind = type(module)
    is_row_by_row = next(module.children(), None) is None
    return kind.__name__.endswith(_NORM) and kind.__module__.startswith("transformers.models.") and is_row_by_row


@contextmanager
def in_blocks(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Within, these modules are computed block by block where no gradient is wanted."""
    changed = [module for module in modules if "forward" not in vars(module)]
    for module in changed:
        module.forward = partial(_run, module.forward, _is_norm(module))
    try:
        yield
    finally:
        for module in changed:
            vars(module).pop("forward", None)  # another thread that runs the same network may have been quicker


def _run(forward: Callable[[Tensor], Tensor], by_rows: bool, given: Tensor) -> Tensor:
    size = BLOCK * torch.get_num_threads()
    if given.numel() <= size or given.device.type != "cpu" or torch.is_grad_enabled() or not given.is_contiguous():
        return forward(given)
    width = given.shape[-1]
    flat, size = (given.view(-1, width), max(1, size // width)) if by_rows else (given.view(-1), size)
    first = forward(flat[:size])
    out = first.new_empty(len(flat), *first.shape[1:])
    out[:size] = first
    for start in range(size, len(flat), size):
        out[start : start + size] = forward(flat[start : start + size])
    return out.view(*given.shape[:-1], -1)
