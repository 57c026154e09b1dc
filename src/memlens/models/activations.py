"""Activations that transformers computes in several steps, block by block: the same numbers in less time.

GPT-2's GELU makes eight passes over all coefficients of a batch, each of them into new memory. Every step looks at one
number at a time, so that a block that fits the cache can go through all steps before the next block begins. With one
thread they are the same bit for bit; with more, a last bit may differ where the shares of two threads meet.
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


def stepwise(network: nn.Module) -> list[nn.Module]:
    """The activations of a network that gain from blocks; one that somebody has changed is left alone."""
    return [module for module in network.modules() if type(module) in _STEPWISE and "forward" not in vars(module)]


@contextmanager
def in_blocks(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Within, these activations are computed block by block where no gradient is wanted."""
    changed = [module for module in modules if "forward" not in vars(module)]
    for module in changed:
        module.forward = partial(_run, module.forward)
    try:
        yield
    finally:
        for module in changed:
            vars(module).pop("forward", None)  # another thread that runs the same network may have been quicker


def _run(forward: Callable[[Tensor], Tensor], given: Tensor) -> Tensor:
    size = BLOCK * torch.get_num_threads()
    if given.numel() <= size or given.device.type != "cpu" or torch.is_grad_enabled() or not given.is_contiguous():
        return forward(given)
    flat = given.view(-1)
    out = torch.empty_like(flat)
    for start in range(0, len(flat), size):
        out[start : start + size] = forward(flat[start : start + size])
    return out.view_as(given)
