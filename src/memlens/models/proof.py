"""Proof, at load time, that what memlens calls coefficients, keys, values and stream is what the network computes.

On a few random tokens every layer is computed twice: by the network's own modules, and by the formulas of the paper
from the tensors that `MemoryLayer` and `Lens` hand out. Where the two part, the model is refused with the layer, the
check and the size of the deviation.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memlens.errors import ModelError, UnsupportedModel
from memlens.models import hooks
from memlens.models.groups import LinearGroup, MemoryLayer
from memlens.models.lens import at_least_float32
from memlens.models.memory_model import MemoryModel

_SEQUENCES, _LENGTH, _SEED = 2, 7, 2021
# deviation allowed, as a share of the largest number at the same position
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Proof:
    """The largest deviation of each check over all layers and probe positions, relative to the numbers compared."""

    coefficients: float  # m against f(x K^T + b) (times the up projection where gated)
    output: float  # m V + b_V against what the down projection gives
    addition: float  # o - y with the memories at work against the same with all of them silent: both are r
    stream: float  # what the block reads against the stream that it is said to read
    norms: float  # each norm by centring, gain and bias against its own module
    prediction: float  # the last state through the lens against the model's own logits
    tolerance: float
    positions: int


def prove(model: MemoryModel) -> Proof:
    """Compare network and formulas on a probe input; UnsupportedModel where they differ."""
    refuse_broken_weights(model.network, model.name)
    tolerance = _TOLERANCE.get(model.dtype, 1e-4)
    tokens = _probe_tokens(model)
    worst = _Worst(model.name, tolerance)
    with torch.no_grad():
        probes, logits = _run(model, tokens)
        for probe in probes:
            _prove_layer(probe, worst)
        _prove_prediction(model, probes[-1].o, logits, worst)
    return Proof(**worst.deviations, tolerance=tolerance, positions=tokens.numel())


def refuse_broken_weights(network: nn.Module, name: str) -> None:
    """ModelError naming the first tensor that holds a NaN or an infinity."""
    for parameter_name, parameter in network.named_parameters():
        # the sum is finite only if all are finite, unless it overflows: then look at each
        if torch.isfinite(parameter.detach().sum(dtype=torch.float32)) or torch.isfinite(parameter.detach()).all():
            continue
        raise ModelError(f"{name}: {parameter_name} holds numbers that are NaN or infinite; get the checkpoint again")


class _Worst:
    """The largest deviation of each check so far; refuses as soon as one is too large."""

    def __init__(self, name: str, tolerance: float) -> None:
        self.name, self.tolerance = name, tolerance
        checks = ("coefficients", "output", "addition", "stream", "norms", "prediction")
        self.deviations = dict.fromkeys(checks, 0.0)

    def compare(self, check: str, where: str, given: Tensor, expected: Tensor, scale: Tensor | None = None) -> None:
        given, expected = at_least_float32(given), at_least_float32(expected)
        if given.shape != expected.shape:
            self._refuse(f"{where}, check of {check}: {list(given.shape)} instead of {list(expected.shape)}")
        largest = (expected if scale is None else scale).abs().amax(-1).clamp_min(1e-6)
        deviation = ((given - expected).abs().amax(-1) / largest).max().item()
        if not deviation <= self.tolerance:  # also refuses NaN
            self._refuse(f"{where}, check of {check}: off by {deviation:.2g} where {self.tolerance:g} is allowed")
        self.deviations[check] = max(self.deviations[check], deviation)

    def _refuse(self, what: str) -> None:
        raise UnsupportedModel(
            f"{self.name} cannot be proven to be made of memories: {what}; it does not fit its family"
        )


class _Probe:
    """One layer's tensors in one pass, each as [batch, pos, ...] at least float32."""

    def __init__(self, layer: MemoryLayer) -> None:
        self.layer = layer
        (group,) = layer.groups
        assert isinstance(group, LinearGroup)
        self.group: LinearGroup = group
        self.arguments: tuple[Any, ...] = ()
        self.named: dict[str, Any] = {}
        self.shape = hooks.BatchShape()
        self.seen: dict[str, Tensor] = {}

    def __getattr__(self, part: str) -> Tensor:
        return self.seen[part]

    def keep(self, part: str) -> Any:
        def keep(tensor: Tensor) -> None:
            self.seen[part] = at_least_float32(self.shape.unflatten(tensor.detach())).clone()

        return keep

    def attach(self, stack: ExitStack) -> None:
        layer, memories = self.layer, self.group

        def note_call(_module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            self.arguments, self.named = arguments, named
            self.shape.note(hooks.first_argument(arguments, named))
            self.keep("block_input")(hooks.first_argument(arguments, named))

        handle = layer.block.register_forward_pre_hook(note_call, with_kwargs=True)
        stack.callback(handle.remove)
        stack.enter_context(hooks.on_output(layer.block, self.keep("o")))
        stack.enter_context(hooks.on_input(memories.key_projection, self.keep("x")))
        stack.enter_context(hooks.on_input(memories.down, self.keep("m")))
        stack.enter_context(hooks.on_output(memories.down, self.keep("down_output")))
        if layer.input_norm is not None:
            stack.enter_context(hooks.on_input(layer.input_norm.module, self.keep("norm_input")))
        stack.enter_context(hooks.watch_addition(layer, self.keep("y")))

    def silent_output(self) -> Tensor:
        """o of the same block on the same input with every coefficient at zero."""
        with hooks.edit_coefficients(self.layer, lambda m, _group: torch.zeros_like(m)):
            output = self.layer.block(*self.arguments, **self.named)
        return at_least_float32(hooks.first_tensor(output))


def _run(model: MemoryModel, tokens: Tensor) -> tuple[list[_Probe], Tensor]:
    probes = [_Probe(layer) for layer in model.layers]
    with ExitStack() as stack:
        for probe in probes:
            probe.attach(stack)
        logits = model.logits(tokens)
    for probe in probes:
        for part, name in (("x", "key projection"), ("m", "down projection"), ("y", "last part")):
            if part not in probe.seen:
                layer = probe.layer.number
                raise UnsupportedModel(
                    f"{model.name}: the {name} of layer {layer} is never run; it does not fit its family"
                )
    return probes, logits


def _prove_layer(probe: _Probe, worst: _Worst) -> None:
    layer, memories = probe.layer, probe.group
    where = f"layer {layer.number}"
    if probe.m.shape[-1] != memories.size:
        worst.compare("coefficients", where, probe.m, probe.m.new_zeros(*probe.m.shape[:-1], memories.size))
    worst.compare("coefficients", where, probe.m, memories.coefficients(probe.x))

    bias = 0 if memories.value_bias is None else memories.value_bias.to(probe.m.dtype)
    output = probe.m @ memories.values.to(probe.m.dtype) + bias
    worst.compare("output", where, probe.down_output, output)

    silent = torch.zeros_like(output) + bias  # what the down projection gives when every coefficient is zero
    if layer.post_norm is None:
        addition = output
    else:
        addition, silent = layer.post_norm.by_formula(output), layer.post_norm.by_formula(silent)
        worst.compare("norms", f"{where} (after the block)", probe.y, addition)
    stream = probe.o - addition
    worst.compare("addition", where, probe.silent_output() - silent, stream, scale=probe.o.abs() + addition.abs())

    reads = probe.x if layer.input_norm is None else probe.norm_input
    said = probe.block_input if layer.parallel else stream
    worst.compare("stream", where, reads, said, scale=probe.o.abs() + addition.abs())
    if layer.input_norm is not None:
        worst.compare("norms", f"{where} (before the block)", probe.x, layer.input_norm.by_formula(reads))


def _prove_prediction(model: MemoryModel, last: Tensor, logits: Tensor, worst: _Worst) -> None:
    lens = model.lens
    if lens.final_norm is not None:
        states = last.to(model.dtype)
        worst.compare("norms", "final norm", lens.final_norm(states), lens.final_norm.by_formula(states))
    read = lens.capped(lens.state_logits(last))
    worst.compare("prediction", "output embedding", read, logits)
    # a tie within the tolerance may fall either way, a clear winner may not
    own = at_least_float32(logits)
    chosen = own.gather(-1, read.argmax(-1, keepdim=True))
    worst.compare("prediction", "most likely token", chosen, own.amax(-1, keepdim=True), scale=own)


def _probe_tokens(model: MemoryModel) -> Tensor:
    used = min(model.vocabulary, model.tokenizer.size) if model.has_tokenizer else model.vocabulary
    length = _LENGTH if model.context is None else min(_LENGTH, model.context)
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randint(0, used, (_SEQUENCES, length), generator=generator)
