"""The blocks of a running network: which modules they are, the calls made to them, and a block run again by itself.

A block is run again in float32 whatever its own dtype is, so that a proof is as tight for a bfloat16 model as for any
other. Half of what it is given are the network's own states and half is noise, in which no coordinate stands out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from memlens.errors import MemlensError, UnsupportedModel
from memlens.models.products import Product, ProductMode

_SEQUENCES, _LENGTH, _SEED = 2, 8, 2021  # every row costs time at each load; what begins later than this is not seen


def probe_tokens(tokens: int, context: int | None) -> Tensor:
    """[2, 8] or shorter, int64: random tokens below `tokens`."""
    length = _LENGTH if context is None else min(_LENGTH, context)
    return torch.randint(0, tokens, (_SEQUENCES, length), generator=torch.Generator().manual_seed(_SEED))


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """One call of a module, to be made again: its first tensor and what it put out are copies."""

    module: nn.Module
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    given: Tensor
    output: Tensor
    returned: Any  # all that it returned, as it was

    def again(self, given: Tensor) -> Tensor:
        """Run the module with another first tensor; returns its output."""
        arguments, named = with_first_input(self.arguments, self.named, given.clone())
        with torch.no_grad(), errors_of_the_network():
            output: Tensor = first_output(self.module(*arguments, **named))
        return output.detach().clone()

    def returning(self, output: Tensor) -> Any:
        """The module's recorded return value with its first tensor replaced."""
        if not isinstance(self.returned, tuple | list):
            return output
        place = next(number for number, value in enumerate(self.returned) if isinstance(value, Tensor))
        return type(self.returned)(output if number == place else value for number, value in enumerate(self.returned))


class BlockCall:
    """One call of a block, [batch, pos, d] to the same, to be made again in float32: within `in_float32(block)`."""

    def __init__(self, call: ModuleCall) -> None:
        self.block = call.module
        self.own = call
        states = _finer(call.given)
        noise = torch.randn(states.shape, generator=torch.Generator().manual_seed(_SEED)).to(states)
        self.states = states.clone()  # what the block is given when it is run again, float32 or finer
        self.states[1:] = noise[1:] * states[:1].square().mean().sqrt()
        self.shape: tuple[int, int] = (states.shape[0], states.shape[1])
        self._finer = replace(call, arguments=_finer(call.arguments), named=_finer(call.named))

    def run(self, states: Tensor | None = None) -> Tensor:
        """Run the block on `states`, or on its probe; returns its output."""
        return self._finer.again(self.states if states is None else states)

    def traced(self) -> BlockTrace:
        """The block run on its probe, with all that is made inside."""
        calls: list[ModuleCall] = []
        inside = [module for module in self.block.modules() if module is not self.block]
        with record_calls(inside, calls.append), ProductMode(self.block, self.shape) as mode:
            output = self.run()
        counts = Counter(call.module for call in calls)
        return BlockTrace(output, [call for call in calls if counts[call.module] == 1], mode.products)

    @cached_property
    def trace(self) -> BlockTrace:
        """`traced` as it was first made: discovery and proof look at the same run."""
        return self.traced()


@dataclass(frozen=True, eq=False)
class BlockTrace:
    """The output of a block on its probe, and the calls and products inside it."""

    output: Tensor
    calls: list[ModuleCall]  # of all modules inside that ran once, in the order in which they ended
    products: list[Product]


@contextmanager
def errors_of_the_network() -> Iterator[None]:
    """Around a call of the network: what it stumbles over is a reason to refuse it, unless memory ran out."""
    try:
        yield
    except (MemlensError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
            raise MemoryError(str(error)) from error
        reason = " ".join(str(error).split())[:200]
        raise UnsupportedModel(f"it does not run on tokens alone ({type(error).__name__}: {reason})") from error


def first_input(arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """The first tensor that a module is given, by place or by name; None where it is given none."""
    return next((value for value in (*arguments, *named.values()) if isinstance(value, Tensor)), None)


def with_first_input(
    arguments: tuple[Any, ...], named: dict[str, Any], given: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a module with another tensor in the place of the first."""
    first = first_input(arguments, named)
    place = next((number for number, value in enumerate(arguments) if value is first), None)
    if place is None:
        return arguments, {**named, next(name for name, value in named.items() if value is first): given}
    return (*arguments[:place], given, *arguments[place + 1 :]), named


def first_output(output: Any) -> Any:
    """The first tensor of what a module returned; None where it returned none."""
    if isinstance(output, tuple | list):
        return next((value for value in output if isinstance(value, Tensor)), None)
    return output if isinstance(output, Tensor) else None


def _finer(value: Any) -> Any:
    """Tensors coarser than float32, in whatever they are nested, as float32."""
    if isinstance(value, Tensor):
        return value.detach().float() if value.is_floating_point() and value.dtype.itemsize < 4 else value.detach()
    if type(value) in (tuple, list):
        return type(value)(_finer(part) for part in value)
    if type(value) is dict:
        return {key: _finer(part) for key, part in value.items()}
    return value


@contextmanager
def record_calls(modules: Iterable[nn.Module], use: Callable[[ModuleCall], None]) -> Iterator[None]:
    """Call `use` with every call of the modules that takes and puts out a tensor, when it has ended."""
    open_calls: list[Tensor | None] = []

    def before(_module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = first_input(arguments, named)
        open_calls.append(None if given is None else given.detach().clone())

    def after(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        given, put_out = open_calls.pop(), first_output(output)
        if given is not None and put_out is not None:
            use(ModuleCall(module, arguments, named, given, put_out.detach().clone(), output))

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)
        yield


@contextmanager
def in_float32(*modules: nn.Module, deep: bool = True) -> Iterator[None]:
    """Within, parameters and buffers coarser than float32 are float32; then they are the very tensors they were.

    deep: also those of the modules inside.
    """
    saved: dict[Tensor, Tensor] = {}
    for module in modules:
        for tensor in (*module.parameters(deep), *module.buffers(deep)):
            if tensor.is_floating_point() and tensor.dtype.itemsize < 4:
                saved.setdefault(tensor, tensor.data)
    try:
        for tensor, data in saved.items():
            tensor.data = data.float()
        yield
    finally:
        for tensor, data in saved.items():
            tensor.data = data


@contextmanager
def note_runs(network: nn.Module) -> Iterator[set[nn.Module]]:
    """Within, modules that run are put into the set."""
    ran: set[nn.Module] = set()
    with ExitStack() as stack:
        for module in network.modules():
            stack.callback(module.register_forward_pre_hook(lambda module, _arguments: ran.add(module)).remove)
        yield ran


def outside(ran: Iterable[nn.Module], blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """Those of the modules that ran which are not in a block."""
    inside = {module for block in blocks for module in block.modules()}
    return [module for module in ran if module not in inside]


@dataclass(frozen=True, eq=False)
class Probe:
    """One pass over a few tokens: the calls of the blocks, and the modules that ran around them."""

    tokens: Tensor  # [batch, pos] int64
    calls: list[BlockCall]
    around: list[nn.Module]
    logits: Tensor | None = None  # what the network makes of the last call's states, where that was looked at


@contextmanager
def replaced(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Within, modules run these functions in the place of their own."""
    saved = {module: module.__dict__.get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            module.forward = forward
        yield
    finally:
        for module, before in saved.items():
            if before is None:
                del module.forward
            else:
                module.forward = before


def passed_over(calls: Sequence[BlockCall], states: Tensor) -> AbstractContextManager[None]:
    """Within, every block puts out `states` at once, in the place of its own; nothing of it is run."""

    def forward(call: BlockCall) -> Callable[..., Any]:
        return lambda *_arguments, **_named: call.own.returning(states)

    return replaced({call.block: forward(call) for call in calls})


def find_blocks(network: nn.Module, tokens: Tensor, run: Callable[[], Any]) -> list[BlockCall]:
    """The calls of the blocks: of the largest list of modules that run in turn, each on what the last put out.

    UnsupportedModel says why there are none.
    """
    lists = [list(module) for module in network.modules() if isinstance(module, nn.ModuleList) and len(module)]
    members = dict.fromkeys(member for modules in lists for member in modules)
    calls: list[ModuleCall] = []
    with record_calls(members, calls.append), errors_of_the_network():
        run()
    called = {call.module for call in calls}
    running = [modules for modules in lists if called & set(modules)]
    if not running:
        raise UnsupportedModel("it has no list of blocks that run one after another")
    modules = max(running, key=_size)
    block_calls = [call for call in calls if call.module in modules]
    _refuse_broken_chain(modules, block_calls, tokens)
    return [BlockCall(call) for call in block_calls]


def _size(modules: list[nn.Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def _refuse_broken_chain(modules: list[nn.Module], calls: list[ModuleCall], tokens: Tensor) -> None:
    shapes = sorted({str(list(tensor.shape)) for call in calls for tensor in (call.given, call.output)})
    if len(shapes) != 1 or calls[0].given.dim() != 3 or calls[0].given.shape[:2] != tokens.shape:
        raise UnsupportedModel(f"its blocks do not read and write one stream [batch, position, width]: {shapes[:3]}")
    if [call.module for call in calls] != modules:
        raise UnsupportedModel("its blocks do not run once each, one after another")
    if not all(torch.equal(before.output, after.given) for before, after in pairwise(calls)):
        raise UnsupportedModel("the stream changes between its blocks")
