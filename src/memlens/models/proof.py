"""A proof at load time that the network computes the coefficients, keys, values and stream that memlens reports.

Every layer is computed twice: by the network's own modules (block by block, in float32 regardless of the model's
dtype), and by the paper's formulas from the tensors of `MemoryLayer` and `Lens`. The input of a block is two rows of 8
positions: the block's states for random tokens, and noise. If the two results differ, the model is rejected with an
error that names the layer, the check and the deviation. A deviation is the largest difference at a position, divided by
the largest number at that position. It may be at most 3e-5 (1e-6 for a float64 model), or ten times as much in step 8.

For each layer:

1. coefficients  m equals the formula on x, keys and activation, so nothing else contributes to m.
2. output        The coefficients times the values, plus biases, are the whole output of the feed-forward part.
3. norms         Each norm equals its formula with its gain and bias (the norms before and after the block).
4. addition      With all coefficients at zero, the stream lacks exactly y.
5. causality     Changing the last position does not change the positions before it.
6. stream        x is computed from the stream that y is added to: nothing is added in between.
7. completeness  No other part of the block works on each position alone: there are no unseen memories.
8. second probe  Steps 1 to 6 again on 64 positions with large numbers, which reveals branches on length or size.

Once, after the last layer:

9. prediction    The final norm and the lens, applied to the last state, give the model's own logits.

Step 8 tests code, not weights. If several layers run the same code, it is run for the first of them only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from memlens.errors import ModelError, UnsupportedModel
from memlens.models import hooks
from memlens.models.blocks import (
    BlockCall,
    ModuleCall,
    Probe,
    Product,
    ProductMode,
    first_input,
    in_float32,
    reject_on_error,
    replace_forwards,
    skip_blocks,
)
from memlens.models.groups import CoefficientBlock, LinearGroup, MemoryGroup, MemoryLayer, scaled
from memlens.models.lens import at_least_float32
from memlens.models.match import map_to_stream, rows_of
from memlens.models.memory_model import MemoryModel

_CHECKS = ("coefficients", "output", "addition", "stream", "norms", "causality", "prediction")
_TOLERANCE, _FLOAT64_TOLERANCE = 3e-5, 1e-6
_SECOND = 10  # factor by which the tolerance is higher in step 8, which uses large numbers on purpose
# A tensor subclass can change what a product computes, in the formula as well as in the network. Inside the context
# `_plain_numbers`, formulas use the plain numbers of a tensor.
_plain_numbers = torch._C.DisableTorchFunctionSubclass


@dataclass(frozen=True)
class Proof:
    """The largest relative deviation of each check over all layers and probe positions."""

    coefficients: float  # m against f(x K^T + b) (times the up projection if gated)
    output: float  # the sum over groups of m V + b against the output of the feed-forward part
    addition: float  # o - y against o with all coefficients at zero
    stream: float  # the block's input against o - y
    norms: float  # each norm module against its formula
    causality: float  # states against the states after a change of later tokens
    prediction: float  # the lens on the last state against the model's own logits
    tolerance: float
    positions: int


def prove(model: MemoryModel) -> Proof:
    """Compare the network with the formulas on a probe input.

    Raises:
        UnsupportedModel: The results differ by more than the tolerance.
    """
    check_finite_weights(model.network, model.name)
    tolerance = _FLOAT64_TOLERANCE if model.dtype == torch.float64 else _TOLERANCE
    worst = _Worst(model.name, tolerance)
    with torch.no_grad(), model.running(), reject_on_error(f"{model.name}: the proof cannot be computed"):
        probe = model.probe()
        if [(number, call.block) for number, call in enumerate(probe.calls)] != [
            (layer.number, layer.block) for layer in model.layers
        ]:
            worst.reject("its layers are not the blocks that run one after another")
        second, proven_code = second_calls(model, probe.calls), set[Hashable]()
        for layer, call in zip(model.layers, probe.calls, strict=True):
            step = f"{model.name}: layer {layer.number}: the proof cannot be computed"
            with in_float32(layer.block), reject_on_error(step):
                _LayerProof(layer, call, worst).prove()
                code = code_of(layer.block)
                if second is not None and code not in proven_code:
                    proven_code.add(code)
                    with with_small_maps(layer, second[layer.number]) as small:
                        second_worst = _Worst(model.name, tolerance * _SECOND)
                        _LayerProof(small, second[layer.number], second_worst).prove_arithmetic()
        with in_float32(*probe.around, deep=False):
            _prove_prediction(model, probe, worst)
    return Proof(**worst.deviations, tolerance=tolerance, positions=probe.tokens.numel())


def check_finite_weights(network: nn.Module, name: str) -> None:
    """Raise ModelError if a parameter holds a NaN or an infinity."""
    for parameter_name, parameter in network.named_parameters():
        # a finite sum means finite numbers; after an infinite sum, check each number, because the sum may overflow
        if torch.isfinite(parameter.detach().sum(dtype=torch.float32)) or torch.isfinite(parameter.detach()).all():
            continue
        raise ModelError(f"{name}: {parameter_name} contains NaN or infinity; download the checkpoint again")


class _Worst:
    """The largest deviation of each check so far. Rejects the model as soon as a deviation exceeds the tolerance."""

    def __init__(self, name: str, tolerance: float) -> None:
        self.name, self.tolerance = name, tolerance
        self.deviations = dict.fromkeys(_CHECKS, 0.0)

    def compare(self, check: str, where: str, actual: Tensor, expected: Tensor, scale: Tensor | None = None) -> None:
        actual, expected = at_least_float32(actual), at_least_float32(expected).to(actual.device)
        if actual.shape != expected.shape:
            self.reject(f"{where}, check of {check}: shape {list(actual.shape)} instead of {list(expected.shape)}")
        if not actual.numel():
            return
        deviation = self.deviation(actual, expected, scale)
        if not deviation <= self.tolerance:  # `not` also rejects NaN
            self.reject(
                f"{where}, check of {check}: the deviation is {deviation:.2g}, the tolerance {self.tolerance:g}"
            )
        self.deviations[check] = max(self.deviations[check], deviation)

    @staticmethod
    def deviation(actual: Tensor, expected: Tensor, scale: Tensor | None = None) -> float:
        """Return the largest difference at any position, divided by the largest number at that position."""
        largest = (expected if scale is None else scale).abs().amax(-1).clamp_min(1e-6)
        return float(((actual - expected).abs().amax(-1) / largest).max())

    def reject(self, reason: str) -> NoReturn:
        raise UnsupportedModel(f"{self.name} cannot be proven to consist of memories: {reason}")


class _LayerProof:
    """Runs steps 1 to 7 for one layer, on its probe states. All tensors are [batch * pos, ...]."""

    def __init__(self, layer: MemoryLayer, call: BlockCall, worst: _Worst) -> None:
        self.layer, self.call, self.worst = layer, call, worst
        self.where = f"layer {layer.number}"
        self.calls = {part.module: part for part in call.trace.calls}
        self.blocks: list[CoefficientBlock] = []

    def prove(self) -> None:
        """Run steps 1 to 7."""
        self.prove_arithmetic()
        trace = self.call.trace
        unseen = find_unseen_part(self.layer, self.call, self.calls, trace.products, rows_of(trace.output))
        if unseen is not None:
            self.worst.reject(f"{self.where}: {unseen}")

    def prove_arithmetic(self) -> None:
        """Run steps 1 to 6."""
        o = rows_of(self.call.trace.output)
        self._watch()
        with _plain_numbers():
            y, y_silent = self._prove_groups() if self.layer.groups else (torch.zeros_like(o), torch.zeros_like(o))
        scale = y.abs().amax(-1, keepdim=True) + o.abs().amax(-1, keepdim=True) / 100
        self._prove_addition(o, y - y_silent, scale)
        if self.layer.groups:
            with _plain_numbers():
                self._prove_stream(o - y, scale)

    def _prove_addition(self, o: Tensor, y: Tensor, scale: Tensor) -> None:
        """Run steps 4 and 5 at once, with all coefficients at zero and another state at the last position."""
        later = torch.zeros(self.call.states.shape[:2], dtype=torch.bool, device=o.device)
        later[:, -1] = self.call.states.shape[1] > 1
        early = ~later.flatten()
        states = self.call.states.clone()
        states[later] = states[later].flip(-1)
        expected = (o - y)[early]
        with hooks.edit_coefficients(self.layer, lambda c, _group: torch.zeros_like(c)):
            silent = rows_of(self.call.run(states))[early]
        if self.worst.deviation(silent, expected, scale[early]) <= self.worst.tolerance:
            self.worst.compare("addition", self.where, silent, expected, scale[early])
            self.worst.compare("causality", self.where, silent, expected, scale[early])
            return
        output = rows_of(self.call.run(states))[early]  # shows which of the two checks failed
        self.worst.compare("causality", self.where, output, o[early], scale[early])
        self.worst.compare("addition", self.where, silent, expected, scale[early])

    def _watch(self) -> None:
        """Collect the coefficients of all groups.

        No module returns the coefficients of experts, so the experts are run once more.
        """
        if self.layer.is_mixture:
            with hooks.watch_coefficients(self.layer, self.blocks.append):
                self.call.run()
            return
        for group in self.layer.groups:
            m, weights = rows_of(self._call_of(group.writer, "down projection").inputs), None
            if group.token_scale is not None:
                gate = group.token_scale(rows_of(self._call_of(group.reader, "key projection").inputs))
                m, weights = m * gate, gate[:, 0]
            self.blocks.append(CoefficientBlock(group, self.call.shape, None, m, weights))

    def _call_of(self, module: nn.Module, part: str) -> ModuleCall:
        if module not in self.calls:
            self.worst.reject(f"the {part} of {self.where} does not run")
        return self.calls[module]

    def _prove_groups(self) -> tuple[Tensor, Tensor]:
        """Run steps 1 to 3. Return y by formula, and y with all coefficients at zero."""
        output = silent = torch.zeros(())
        for group in self.layer.groups:
            self._call_of(group.writer, "down projection")
        for block in self.blocks:
            group = block.group
            x = rows_of(self._call_of(group.reader, "key projection").inputs)
            rows = torch.arange(len(x), device=x.device) if block.rows is None else block.rows
            expected = group.coefficients(x[rows])
            if block.rows is not None and block.weights is not None:  # the formula excludes the router's weight
                expected = expected * block.weights[:, None]
            self.worst.compare("coefficients", self.where, block.coefficients, expected)
            bias = x.new_zeros(x.shape[-1]) if group.value_bias is None else group.value_bias.to(x.dtype)
            biases = bias.expand(len(rows), -1) if block.weights is None else block.weights[:, None] * bias
            added = scaled(group.weighed_values(block.coefficients) + biases, group.scale)
            zeros = x.new_zeros(x.shape)
            output = output + zeros.index_add(0, rows, added)
            silent = silent + zeros.index_add(0, rows, scaled(biases, group.scale))
        outputs = [rows_of(self._call_of(module, "output").output) for module in self.layer.outputs]
        self.worst.compare("output", self.where, torch.stack(outputs).sum(0), output)
        norm = self.layer.post_norm
        if norm is not None:
            call = self._call_of(norm.module, "norm after the block")
            self.worst.compare("norms", f"{self.where} (before the norm after the block)", rows_of(call.inputs), output)
            output, silent = norm.by_formula(output), norm.by_formula(silent)
            self.worst.compare("norms", f"{self.where} (after the block)", rows_of(call.output), output)
        return scaled(output, self.layer.scale), scaled(silent, self.layer.scale)

    def _prove_stream(self, stream: Tensor, scale: Tensor) -> None:
        """Run step 6, and step 3 for the norm before the block."""
        norm = self.layer.input_norm
        x, *more_inputs = (
            rows_of(self.calls[module].inputs) for module in dict.fromkeys(group.reader for group in self.layer.groups)
        )
        for inputs in more_inputs:
            self.worst.compare("stream", f"{self.where} (inputs of its groups)", inputs, x)
        reads = x
        if norm is not None:
            reads = rows_of(self._call_of(norm.module, "norm before the block").inputs)
            self.worst.compare("norms", f"{self.where} (before the block)", x, norm.by_formula(reads))
        if self.layer.parallel:
            self.worst.compare("stream", self.where, reads, rows_of(self.call.states), scale)
            return
        moved = map_to_stream(stream, reads, tolerance=self.worst.tolerance)
        self.worst.compare("stream", self.where, reads if moved is None else moved, stream, scale)


def _prove_prediction(model: MemoryModel, probe: Probe, worst: _Worst) -> None:
    """Run step 9: compare the lens with the network's own code after the blocks, on the last layer's probe states."""
    lens, last = model.lens, probe.calls[-1].states
    if lens.final_norm is not None:
        with _plain_numbers():
            expected = lens.final_norm.by_formula(last)
        worst.compare("norms", "final norm", lens.final_norm(last), expected)
    logits = probe.logits
    if logits is None:
        with skip_blocks(probe.calls, last):
            logits = model.logits(probe.tokens)
    with _plain_numbers():
        read = lens.capped(lens.state_logits(last))
    logits = at_least_float32(logits).to(read.device)
    worst.compare("prediction", "output embedding", read, logits)
    # the most likely tokens may differ only if their logits are equal within the tolerance
    top_logits = logits.gather(-1, read.argmax(-1, keepdim=True))
    worst.compare("prediction", "most likely token", top_logits, logits.amax(-1, keepdim=True), scale=logits)


# Step 7: completeness
#
# A block adds memories and the output of parts that mix positions. If unseen memories follow the known ones, step 6
# fails. Step 7 searches for unseen memories before or parallel to the known ones (parallel blocks, layers without
# memories). It examines modules, and products that the block's own code computes from its parameters.


def find_unseen_part(
    layer: MemoryLayer,
    block: BlockCall,
    calls: Mapping[nn.Module, ModuleCall],
    products: Sequence[Product],
    o: Tensor,
) -> str | None:
    """Describe a part of the block that processes each position alone but is not made of memories.

    Returns None if there is no such part.

    Args:
        layer: The memories of the block.
        block: The call of the block.
        calls: Module calls inside the block when it ran on its probe states.
        products: Products inside the block in the same run.
        o: The output of that run, [batch * pos, d].
    """
    batch, positions, width = block.states.shape
    if positions < 2:
        return None
    memory_modules = {module for part in layer.outputs for module in part.modules()}
    parameters = {id(parameter) for module in memory_modules for parameter in module.parameters(False)}
    memory_parameters = {name for name, parameter in layer.block.named_parameters() if id(parameter) in parameters}
    other_products = [product for product in products if product.parameter not in memory_parameters]
    pinned = _PinnedBlock(block, other_products, [calls[part] for part in layer.outputs])
    alone, mixing = pinned.classify()
    other_modules = calls.keys() - memory_modules
    other_calls = {name: calls[module] for name, module in layer.block.named_modules() if module in other_modules}
    for name, call in other_calls.items():  # outer modules come first
        holds_memories = {*call.module.modules()} & {*layer.outputs}
        holds_mixing = any(product.parameter.startswith(f"{name}.") for product in mixing)
        matrices = sum(parameter.dim() > 1 for parameter in call.module.parameters())
        if holds_memories or holds_mixing or matrices < 2:
            continue
        shapes = {rows_of(call.inputs).shape, rows_of(call.output).shape}
        if shapes == {(batch * positions, width)} and _works_alone(call, block.states.shape):
            return f"{name} processes each position alone and does not consist of memories"
    if writers := pinned.writers(alone, o):
        return f"{writers[0].name} processes each position alone and does not consist of memories"
    if not layer.groups and len(writers := pinned.writers(mixing, o)) > 1:
        names = " and ".join(product.name for product in writers)
        return f"{names} add to the stream one after the other, and neither consists of memories"
    return None


def _works_alone(call: ModuleCall, shape: torch.Size) -> bool:
    """Return True if a module's output at the last position depends on its input there and on no other position."""

    def depends_on(changed: slice) -> bool:
        inputs = call.inputs.reshape(shape).clone()
        inputs[:, changed] = inputs[:, changed].flip(-1)
        after = call.again(inputs.reshape(call.inputs.shape)).reshape(shape)
        return not torch.allclose(after[:, -1], call.output.reshape(shape)[:, -1], rtol=1e-5, atol=1e-6)

    return depends_on(slice(-1, None)) and not depends_on(slice(-1))  # a constant output depends on no position


class _PinnedBlock:
    """A block that is re-run with all products and memories pinned to their recorded outputs.

    If a product is changed at the first position and the output changes, the change reached the output without passing
    through another product.
    """

    def __init__(self, block: BlockCall, products: Sequence[Product], memories: Sequence[ModuleCall]) -> None:
        self.block, self.products, self.memories = block, products, memories
        self.shape = block.shape

    def classify(self) -> tuple[list[Product], list[Product]]:
        """Return products whose input depends only on products at the same position, and those that mix positions."""
        _, inputs = self._run(self.products)
        outputs = [rows_of(product.output) for product in self.products]
        alone, mixing = [], []
        for product in self.products:
            if product.key not in inputs:
                continue
            moved = (inputs[product.key] != product.inputs).reshape(*self.shape, -1).any(-1).any(0)  # [pos]
            if moved[1:].any():
                mixing.append(product)
            elif moved[0] and not any(torch.equal(rows_of(product.inputs), output) for output in outputs):
                alone.append(product)  # a product of another product's output is part of the same map
        return alone, mixing

    def writers(self, products: Sequence[Product], o: Tensor) -> list[Product]:
        """Return the products whose output reaches the stream directly, without another product in between."""
        # usually there are no writers, and a single run shows this
        if not products or torch.equal(rows_of(self._run(products)[0]), o):
            return []
        return [product for product in products if not torch.equal(rows_of(self._run([product])[0]), o)]

    def _run(self, changed: Sequence[Product]) -> tuple[Tensor, dict[tuple[str, int], Tensor]]:
        outputs = {
            product.key: _change_first_position(product.output, self.shape) if product in changed else product.output
            for product in self.products
        }
        memories = {call.module: partial(_repeat_call, call) for call in self.memories}
        with replace_forwards(memories), ProductMode(self.block.block, self.shape, outputs) as mode:
            output = self.block.run()
        return output, {product.key: product.inputs for product in mode.products}


def _repeat_call(call: ModuleCall, *_arguments: Any, **_keywords: Any) -> Any:
    return call.returning(call.output.clone())


def _change_first_position(output: Tensor, shape: tuple[int, int]) -> Tensor:
    changed = output.reshape(*shape, -1).clone()
    changed[:, 0] = changed[:, 0].flip(-1) + 1
    return changed.reshape(output.shape)


# Step 8: second probe
#
# Products with large matrices dominate the cost of a pass, and torch's linear maps treat all positions alike. Each of
# these maps is therefore replaced by a random map of low rank, which costs almost nothing. All other code of the block
# runs on 64 positions, with a stream and coefficients of up to a thousand times the usual size.

_LENGTH, _RANK, _SEED = 64, 4, 2022
_STREAM, _LARGEST = 100.0, 1000.0  # size of the stream relative to the first probe, and of the largest key products


def second_calls(model: MemoryModel, calls: Sequence[BlockCall]) -> list[BlockCall] | None:
    """Return the blocks' calls for 64 tokens, without running the blocks, or None if the context is too short."""
    length = _LENGTH if model.context is None else min(_LENGTH, model.context)
    if length <= calls[0].shape[1]:
        return None
    generator = torch.Generator().manual_seed(_SEED)
    tokens = torch.randint(0, model.vocabulary, (1, length), generator=generator).to(model.device)
    recorded: list[ModuleCall] = []

    def forward(call: BlockCall) -> Callable[..., Any]:
        def skip(*arguments: Any, **keywords: Any) -> Any:
            inputs = first_input(arguments, keywords).detach()
            recorded.append(ModuleCall(call.block, arguments, keywords, inputs, inputs, None))
            return _extend_return_value(call, inputs)

        return skip

    with replace_forwards({call.block: forward(call) for call in calls}):
        model.run_body(tokens)
    long_calls = [BlockCall(call) for call in recorded]
    for call, short_call in zip(long_calls, calls, strict=True):
        states = call.states.to(short_call.states.device)  # skipped blocks do not move states to their device
        call.states = _large_states(states, generator) * short_call.states.square().mean().sqrt() * _STREAM
    return long_calls


def _extend_return_value(call: BlockCall, states: Tensor) -> Any:
    """Return the block's recorded return value with these states. Other tensors are repeated to the same length."""
    places = torch.arange(states.shape[1]) % call.shape[1]

    def extend(value: Any) -> Any:
        by_position = isinstance(value, Tensor) and value.shape[:2] == call.shape
        return value[:1, places.to(value.device)] if by_position else value

    returned = call.recorded.returning(states)
    if not isinstance(returned, tuple | list):
        return returned
    return type(returned)(value if value is states else extend(value) for value in returned)


def code_of(block: nn.Module) -> Hashable:
    """Return a key that is equal for blocks that run the same code: classes, settings and functions of all modules."""

    def settings(module: nn.Module) -> Iterator[tuple[str, Any]]:
        for name, value in vars(module).items():
            if isinstance(value, bool | str | float):
                yield name, value
            elif callable(value):
                yield name, id(getattr(value, "__func__", value))

    return tuple((name, type(module), tuple(settings(module))) for name, module in block.named_modules())


def _large_states(like: Tensor, generator: torch.Generator) -> Tensor:
    """Return noise in which one coordinate is 30 times as large at every third position, as in trained networks."""
    states = torch.randn(like.shape, generator=generator)
    places = torch.arange(0, like.shape[1], 3)
    states[:, places, places % like.shape[2]] *= 30
    return states.to(like)


@dataclass(eq=False)
class _SmallMap:
    """A random map of rank 4, x -> (x A) B. The size of the map is set at its first call."""

    outputs: int
    size: float
    spread: float  # size of the largest output relative to the smallest
    parts: list[Tensor] = field(default_factory=list)

    def __call__(self, *arguments: Any, **keywords: Any) -> Tensor:
        inputs: Tensor = first_input(arguments, keywords)
        if not self.parts:
            generator = torch.Generator().manual_seed(_SEED)
            inward = torch.randn(inputs.shape[-1], _RANK, generator=generator)
            outward = torch.randn(_RANK, self.outputs, generator=generator)
            outward = outward * self.spread ** torch.rand(self.outputs, generator=generator)
            inward, outward = inward.to(inputs), outward.to(inputs)
            largest = (inputs @ inward @ outward).abs().max().clamp_min(1e-30)
            self.parts = [inward, outward * (self.size / largest)]
        return inputs @ self.parts[0] @ self.parts[1]


@dataclass(frozen=True, eq=False)
class _SmallMapGroup(LinearGroup):
    """A group whose projections are replaced by small maps."""

    maps: dict[nn.Module, _SmallMap] = field(kw_only=True)

    @property
    def value_bias(self) -> None:
        return None

    def matches(self, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        gate = self.maps[self.key_projection](inputs)[..., self.key_rows]
        up = None if self.up_projection is None else self.maps[self.up_projection](inputs)[..., self.up_rows]
        return gate, up

    def weighed_values(self, coefficients: Tensor) -> Tensor:
        return self.maps[self.down](coefficients)


@contextmanager
def with_small_maps(layer: MemoryLayer, call: BlockCall) -> Iterator[MemoryLayer]:
    """Replace the linear maps of the block with small maps. Yields the layer with formulas that use the small maps."""
    size = float(call.states.square().mean().sqrt())
    maps = {module: _SmallMap(_outputs(module), 3.0, 1.0) for module in layer.block.modules() if is_plain(module)}
    groups: list[MemoryGroup] = []
    for group in layer.groups:
        parts = projections(group)
        if parts and all(part in maps for part in parts):
            maps |= {part: _SmallMap(maps[part].outputs, _LARGEST, _LARGEST) for part in parts}
            maps[parts[-1]] = _SmallMap(maps[parts[-1]].outputs, 3 * size, 1.0)
            settings = {field.name: getattr(group, field.name) for field in fields(group)}
            groups.append(_SmallMapGroup(**settings, maps=maps))
        else:
            for part in parts:
                maps.pop(part, None)
            groups.append(group)
    with replace_forwards(maps):
        yield replace(layer, groups=tuple(groups))


def projections(group: MemoryGroup) -> list[nn.Module]:
    """Return the projections of a group, the down projection last."""
    if not isinstance(group, LinearGroup):
        return []
    return [part for part in (group.key_projection, group.up_projection, group.down) if part is not None]


def is_plain(module: nn.Module) -> bool:
    """Return True for an unmodified linear map of torch or transformers with more than one output."""
    kind, hooked = type(module), module._forward_hooks or module._forward_pre_hooks
    everywhere = torch.nn.modules.module  # module with the hooks that are registered for all modules
    if hooked or everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks or "forward" in vars(module):
        return False
    is_linear_class = kind is nn.Linear or (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")
    parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
    return is_linear_class and all(type(parameter) is nn.Parameter for parameter in parameters) and _outputs(module) > 1


def _outputs(module: Any) -> int:
    return int(module.nf if hasattr(module, "nf") else module.out_features)
