"""The blocks of a running network: which modules they are, how they are called, and how to run one block alone.

Blocks are re-run in float32 regardless of the model's dtype, so the proof is equally strict for a bfloat16 model. In a
re-run, the first row of the batch holds the network's own states, and the other rows hold noise of the same size.
`ProductMode` records the products of a block's parameters, including products that no module computes.
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
from torch.overrides import TorchFunctionMode

from memlens.errors import MemlensError, UnsupportedModel

_SEQUENCES, _LENGTH, _SEED = 2, 8, 2021  # a short probe, because every load runs it; the proof adds a longer probe


def probe_tokens(tokens: int, context: int | None) -> Tensor:
    """Return random token ids below `tokens`, int64 [2, 8]. A context shorter than 8 tokens gives shorter rows."""
    length = _LENGTH if context is None else min(_LENGTH, context)
    return torch.randint(0, tokens, (_SEQUENCES, length), generator=torch.Generator().manual_seed(_SEED))


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """A recorded call of a module, which can be repeated. `inputs` and `output` are copies."""

    module: nn.Module
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    inputs: Tensor  # the first tensor among the arguments
    output: Tensor  # the first tensor that it returned
    returned: Any  # the complete return value

    def again(self, inputs: Tensor) -> Tensor:
        """Repeat the call with `inputs` in place of its first tensor, and return the output."""
        arguments, keywords = with_first_input(self.arguments, self.keywords, inputs.clone())
        with torch.no_grad(), reject_on_error(RUNNING):
            output: Tensor = first_output(self.module(*arguments, **keywords))
        return output.detach().clone()

    def returning(self, output: Tensor) -> Any:
        """Return the recorded return value with its first tensor replaced."""
        if not isinstance(self.returned, tuple | list):
            return output
        place = next(number for number, value in enumerate(self.returned) if isinstance(value, Tensor))
        return type(self.returned)(output if number == place else value for number, value in enumerate(self.returned))


class BlockCall:
    """A recorded call of a block with states [batch, pos, d]. It must be repeated inside `in_float32(block)`."""

    def __init__(self, call: ModuleCall) -> None:
        self.block = call.module
        self.recorded = call  # the call made by the network
        # with a device map, the call itself moves its input to the block's device
        states = _finer(call.inputs).to(call.output.device)
        noise = torch.randn(states.shape, generator=torch.Generator().manual_seed(_SEED)).to(states)
        self.states = states.clone()  # the input of a re-run, float32 or float64
        self.states[1:] = noise[1:] * states[:1].square().mean().sqrt()
        self.shape: tuple[int, int] = (states.shape[0], states.shape[1])
        self._finer = replace(call, arguments=_finer(call.arguments), keywords=_finer(call.keywords))

    def run(self, states: Tensor | None = None) -> Tensor:
        """Run the block on `states` (default: the probe states) and return its output."""
        return self._finer.again(self.states if states is None else states)

    def traced(self) -> BlockTrace:
        """Run the block on its probe states and record the calls and products inside."""
        calls: list[ModuleCall] = []
        inside = [module for module in self.block.modules() if module is not self.block]
        with record_calls(inside, calls.append), ProductMode(self.block, self.shape) as mode:
            output = self.run()
        counts = Counter(call.module for call in calls)
        return BlockTrace(output, [call for call in calls if counts[call.module] == 1], mode.products)

    @cached_property
    def trace(self) -> BlockTrace:
        """The trace of the first re-run, which discovery and proof share."""
        return self.traced()


@dataclass(frozen=True, eq=False)
class BlockTrace:
    """The output of a block on its probe states, and the calls and products inside it."""

    output: Tensor
    calls: list[ModuleCall]  # calls of modules that ran exactly once, in the order in which they returned
    products: list[Product]


RUNNING = "it does not run on tokens alone"


@contextmanager
def reject_on_error(step: str) -> Iterator[None]:
    """Turn errors inside the context into an UnsupportedModel that names this step. MemoryError stays unchanged."""
    try:
        yield
    except (MemlensError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
            raise MemoryError(str(error)) from error
        reason = " ".join(str(error).split())[:200]
        raise UnsupportedModel(f"{step} ({type(error).__name__}: {reason})") from error


def first_input(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Return the first tensor among positional and keyword arguments, or None if there is none."""
    return next((value for value in (*arguments, *keywords.values()) if isinstance(value, Tensor)), None)


def with_first_input(
    arguments: tuple[Any, ...], keywords: dict[str, Any], inputs: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with `inputs` in place of the first tensor."""
    first = first_input(arguments, keywords)
    place = next((number for number, value in enumerate(arguments) if value is first), None)
    if place is None:
        return arguments, {**keywords, next(name for name, value in keywords.items() if value is first): inputs}
    return (*arguments[:place], inputs, *arguments[place + 1 :]), keywords


def first_output(output: Any) -> Any:
    """Return the first tensor of a return value, or None if it has none."""
    if isinstance(output, tuple | list):
        return next((value for value in output if isinstance(value, Tensor)), None)
    return output if isinstance(output, Tensor) else None


def _finer(value: Any) -> Any:
    """Convert tensors of lower precision than float32 to float32, also inside tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return value.detach().float() if value.is_floating_point() and value.dtype.itemsize < 4 else value.detach()
    if type(value) in (tuple, list):
        return type(value)(_finer(part) for part in value)
    if type(value) is dict:
        return {key: _finer(part) for key, part in value.items()}
    return value


@contextmanager
def record_calls(modules: Iterable[nn.Module], use: Callable[[ModuleCall], None]) -> Iterator[None]:
    """Call `use` after every call of these modules that takes and returns a tensor."""
    open_calls: list[Tensor | None] = []

    def before(_module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        inputs = first_input(arguments, keywords)
        open_calls.append(None if inputs is None else inputs.detach().clone())

    def after(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        inputs, result = open_calls.pop(), first_output(output)
        if inputs is not None and result is not None:
            use(ModuleCall(module, arguments, keywords, inputs, result.detach().clone(), output))

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)
        yield


def is_same(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors, which may be on different devices, have the same shape and numbers."""
    return a.shape == b.shape and torch.equal(a, b.to(a.device))


@contextmanager
def in_float32(*modules: nn.Module, deep: bool = True) -> Iterator[None]:
    """Convert parameters and buffers of lower precision to float32, and restore the original tensors afterwards.

    Args:
        modules: Modules whose parameters and buffers are converted.
        deep: Also convert parameters and buffers of submodules.
    """
    originals: dict[Tensor, Tensor] = {}
    for module in modules:
        for tensor in (*module.parameters(deep), *module.buffers(deep)):
            if tensor.is_floating_point() and tensor.dtype.itemsize < 4:
                originals.setdefault(tensor, tensor.data)
    try:
        for tensor, data in originals.items():
            tensor.data = data.float()
        yield
    finally:
        for tensor, data in originals.items():
            tensor.data = data


@contextmanager
def collect_running(network: nn.Module) -> Iterator[set[nn.Module]]:
    """Collect the modules that run inside the context."""
    modules: set[nn.Module] = set()
    with ExitStack() as stack:
        for module in network.modules():
            stack.callback(module.register_forward_pre_hook(lambda module, _arguments: modules.add(module)).remove)
        yield modules


def modules_outside(modules: Iterable[nn.Module], blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules that belong to no block."""
    inside = {module for block in blocks for module in block.modules()}
    return [module for module in modules if module not in inside]


@dataclass(frozen=True, eq=False)
class Probe:
    """One pass over a few tokens: the calls of the blocks and the modules that ran outside the blocks."""

    tokens: Tensor  # [batch, pos] int64
    calls: list[BlockCall]
    around: list[nn.Module]
    logits: Tensor | None = None  # logits for the probe states of the last call; None if not computed


@contextmanager
def replace_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Replace the forward functions of modules inside the context."""
    originals = {module: module.__dict__.get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            module.forward = forward
        yield
    finally:
        for module, before in originals.items():
            if before is None:
                del module.forward
            else:
                module.forward = before


def skip_blocks(calls: Sequence[BlockCall], states: Tensor) -> AbstractContextManager[None]:
    """Inside the context, skip the blocks: each returns `states` without running."""

    def forward(call: BlockCall) -> Callable[..., Any]:
        return lambda *_arguments, **_keywords: call.recorded.returning(states)

    return replace_forwards({call.block: forward(call) for call in calls})


def find_blocks(network: nn.Module, tokens: Tensor, run: Callable[[], Any]) -> list[BlockCall]:
    """Return the calls of the blocks. The blocks are the modules of the largest ModuleList that runs as a chain.

    Raises:
        UnsupportedModel: No such list was found.
    """
    lists = [list(module) for module in network.modules() if isinstance(module, nn.ModuleList) and len(module)]
    members = dict.fromkeys(member for modules in lists for member in modules)
    calls: list[ModuleCall] = []
    with record_calls(members, calls.append), reject_on_error(RUNNING):
        run()
    called = {call.module for call in calls}
    running = [modules for modules in lists if called & set(modules)]
    if not running:
        raise UnsupportedModel("it has no list of blocks that run one after another")
    modules = max(running, key=lambda modules: sum(p.numel() for module in modules for p in module.parameters()))
    block_calls = [call for call in calls if call.module in modules]
    _check_chain(modules, block_calls, tokens)
    return [BlockCall(call) for call in block_calls]


def _check_chain(modules: list[nn.Module], calls: list[ModuleCall], tokens: Tensor) -> None:
    shapes = sorted({str(list(tensor.shape)) for call in calls for tensor in (call.inputs, call.output)})
    if len(shapes) != 1 or calls[0].inputs.dim() != 3 or calls[0].inputs.shape[:2] != tokens.shape:
        raise UnsupportedModel(
            f"its blocks do not all read and write a stream of one shape [batch, position, width]; found {shapes[:3]}"
        )
    if [call.module for call in calls] != modules:
        raise UnsupportedModel("its blocks do not run once each, one after another")
    if not all(is_same(before.output, after.inputs) for before, after in pairwise(calls)):
        raise UnsupportedModel("the stream changes between its blocks")


@dataclass(frozen=True, eq=False)
class Product:
    """One product of a parameter matrix with activations, [batch, pos, ...] or [batch * pos, ...]."""

    parameter: str  # name of the parameter within the block
    use: int  # 0 for the first use of this parameter
    inputs: Tensor
    output: Tensor

    @property
    def key(self) -> tuple[str, int]:
        return self.parameter, self.use

    @property
    def name(self) -> str:
        """The path of the module, or of the parameter if it is not a module's `weight`."""
        return self.parameter.removesuffix(".weight")


class ProductMode(TorchFunctionMode):
    """Records products of parameter matrices with activations. `outputs` replaces the results of some products.

    A matrix is a parameter with at least two dimensions, or a tensor computed from parameters alone. Only products
    whose input and output have one row per position are recorded. Other products, such as convolutions over positions,
    run unchanged.
    """

    def __init__(
        self, block: nn.Module, shape: Sequence[int], outputs: Mapping[tuple[str, int], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.shape, self.outputs = tuple(shape), outputs or {}
        self.products: list[Product] = []
        self._uses: Counter[str] = Counter()
        self._storages = {_storage(parameter): name for name, parameter in block.named_parameters()}
        self._made: dict[int, tuple[str, Tensor]] = {}  # id -> name and tensor; holding the tensor keeps its id unique

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        tensors = list(_tensors((*args, *keywords.values())))
        names = [self._name(tensor) for tensor in tensors]
        if not any(names):
            return func(*args, **keywords)
        if all(names):
            output = func(*args, **keywords)
            if isinstance(output, Tensor) and _storage(output) not in self._storages:
                self._made[id(output)] = (next(filter(None, names)), output)
            return output
        pairs = list(zip(tensors, names, strict=True))
        inputs = next((tensor for tensor, name in pairs if not name and self._keeps(tensor)), None)
        matrix = next((name for tensor, name in pairs if name and sum(size > 1 for size in tensor.shape) > 1), None)
        if inputs is None or matrix is None:
            return func(*args, **keywords)
        return self._product(matrix, inputs.detach().clone(), lambda: func(*args, **keywords))

    def _product(self, parameter: str, inputs: Tensor, run: Any) -> Any:
        key = (parameter, self._uses[parameter])
        output = self.outputs[key].clone() if key in self.outputs else run()
        if isinstance(output, Tensor) and self._keeps(output):
            self._uses[parameter] += 1
            self.products.append(Product(*key, inputs, output.detach().clone()))
        return output

    def _keeps(self, tensor: Tensor) -> bool:
        """Return True if a tensor has one row per position."""
        batch, positions = self.shape
        by_position = tensor.dim() > 2 and tensor.shape[:2] == (batch, positions)
        return tensor.is_floating_point() and (by_position or (tensor.dim() > 1 and len(tensor) == batch * positions))

    def _name(self, tensor: Tensor) -> str | None:
        name = self._storages.get(_storage(tensor))
        if name is None and id(tensor) in self._made:
            return self._made[id(tensor)][0]
        return name


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)
