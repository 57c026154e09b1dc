"""Proof, at load time, that what memlens calls coefficients, keys, values and stream is what the network computes.

On a few random tokens and on noise every layer is computed twice: by the network's own modules, block by block and in
float32 whatever the model's dtype is, and by the formulas of the paper from the tensors that `MemoryLayer` and `Lens`
hand out. Where the two part, the model is refused with the layer, the check and the size of the deviation.

coefficients  m is what the formula makes of x, keys and activation, so nothing else can have a part in it
output        the coefficients times the values, and biases, are all that the feed-forward part puts out
addition      with every coefficient at zero the stream lacks exactly y
stream        x is made of the stream that y is added to: nothing else was added in between, nothing is left over
norms         each norm is what its gain and bias say
causality     what follows a position does not change it
prediction    the last state read through the lens gives the model's own logits

In one layer of those that run the same code the products of torch's own linear maps are made once more; in the others
they are taken from the run, since that code multiplies and does nothing else. A second probe of 64 positions and larger
numbers (second_probe.py) looks for what begins later or above a size, in one layer of those that run the same code; and
no part of a block may make memories that were not seen (unseen.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from memlens.errors import ModelError, UnsupportedModel
from memlens.models import hooks
from memlens.models.blocks import BlockCall, ModuleCall, Probe, in_float32, passed_over, replaced
from memlens.models.groups import CoefficientBlock, LinearGroup, MemoryLayer, scaled
from memlens.models.lens import at_least_float32
from memlens.models.match import carried, rows_of
from memlens.models.memory_model import MemoryModel
from memlens.models.second_probe import as_recorded, code_of, is_plain, projections, second_calls, stood_in
from memlens.models.unseen import unseen_part

_CHECKS = ("coefficients", "output", "addition", "stream", "norms", "causality", "prediction")
# deviation allowed, as a share of the largest number at the same position
_TOLERANCE, _FINE_TOLERANCE = 3e-5, 1e-6
# Within, a tensor of a class of its own is no more than its numbers: such a class may do more in a product than
# multiply, and would do so in the formula as in the network.
_plain_numbers = torch._C.DisableTorchFunctionSubclass
_SECOND = 10  # times as much for the second probe, whose numbers are large on purpose


@dataclass(frozen=True)
class Proof:
    """The largest deviation of each check over all layers and probe positions, relative to the numbers compared."""

    coefficients: float  # m against f(x K^T + b) (times the up projection where gated)
    output: float  # the sum of all groups' m V + b against what the feed-forward part puts out
    addition: float  # o - y with the memories at work against the same with all of them silent: both are r
    stream: float  # what the block reads against the stream that it is said to read
    norms: float  # each norm by centring, gain and bias against its own module
    causality: float  # the states of a position against the same with other states behind it
    prediction: float  # the last state through the lens against the model's own logits
    tolerance: float
    positions: int


def prove(model: MemoryModel) -> Proof:
    """Compare network and formulas on a probe input; UnsupportedModel where they differ."""
    refuse_broken_weights(model.network, model.name)
    tolerance = _FINE_TOLERANCE if model.dtype == torch.float64 else _TOLERANCE
    worst = _Worst(model.name, tolerance)
    with torch.no_grad(), model.running():
        probe = model.probe()
        if [(number, call.block) for number, call in enumerate(probe.calls)] != [
            (layer.number, layer.block) for layer in model.layers
        ]:
            worst.refuse("its layers are not the blocks that run, one after another")
        second, seen = second_calls(model, probe.calls), set[Any]()
        for layer, call in zip(model.layers, probe.calls, strict=True):
            with in_float32(layer.block):
                is_known = (built := code_of(layer.block)) in seen
                seen.add(built)
                _LayerProof(as_recorded(layer, call) if is_known else layer, call, worst).prove()
                if second is not None and not is_known:
                    with stood_in(layer, second[layer.number]) as stand_in:
                        larger = _Worst(model.name, tolerance * _SECOND)
                        _LayerProof(stand_in, second[layer.number], larger).prove_arithmetic()
        with in_float32(*probe.around, deep=False):
            _prove_prediction(model, probe, worst)
    return Proof(**worst.deviations, tolerance=tolerance, positions=probe.tokens.numel())


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
        self.deviations = dict.fromkeys(_CHECKS, 0.0)

    def compare(self, check: str, where: str, given: Tensor, expected: Tensor, scale: Tensor | None = None) -> None:
        given, expected = at_least_float32(given), at_least_float32(expected)
        if given.shape != expected.shape:
            self.refuse(f"{where}, check of {check}: {list(given.shape)} instead of {list(expected.shape)}")
        if not given.numel():
            return
        deviation = self.deviation(given, expected, scale)
        if not deviation <= self.tolerance:  # also refuses NaN
            self.refuse(f"{where}, check of {check}: off by {deviation:.2g} where {self.tolerance:g} is allowed")
        self.deviations[check] = max(self.deviations[check], deviation)

    @staticmethod
    def deviation(given: Tensor, expected: Tensor, scale: Tensor | None = None) -> float:
        """The largest difference at any position, as a share of the largest number there."""
        largest = (expected if scale is None else scale).abs().amax(-1).clamp_min(1e-6)
        return float(((given - expected).abs().amax(-1) / largest).max())

    def refuse(self, what: str) -> None:
        raise UnsupportedModel(f"{self.name} cannot be proven to be made of memories: {what}")


class _LayerProof:
    """One layer on its probe: what its modules did, and what the formulas say they did. All are [batch * pos, ...]."""

    def __init__(self, layer: MemoryLayer, call: BlockCall, worst: _Worst) -> None:
        self.layer, self.call, self.worst = layer, call, worst
        self.where = f"layer {layer.number}"
        self.calls = {part.module: part for part in call.trace.calls}
        self.blocks: list[CoefficientBlock] = []

    def prove(self) -> None:
        """All checks."""
        self.prove_arithmetic()
        trace = self.call.trace
        unseen = unseen_part(self.layer, self.call, self.calls, trace.products, rows_of(trace.output))
        if unseen is not None:
            self.worst.refuse(f"{self.where}: {unseen}")

    def prove_arithmetic(self) -> None:
        """All checks but that for parts that were not seen."""
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
        """With every coefficient at zero the stream lacks exactly y, whatever stands at the last position."""
        later = torch.zeros(self.call.states.shape[:2], dtype=torch.bool, device=o.device)
        later[:, -1] = self.call.states.shape[1] > 1
        early = ~later.flatten()
        turned = self.call.states.clone()
        turned[later] = turned[later].flip(-1)
        expected = (o - y)[early]
        with replaced(self._at_rest()), hooks.edit_coefficients(self.layer, lambda c, _group: torch.zeros_like(c)):
            silent = rows_of(self.call.run(turned))[early]
        if self.worst.deviation(silent, expected, scale[early]) <= self.worst.tolerance:
            self.worst.compare("addition", self.where, silent, expected, scale[early])
            self.worst.compare("causality", self.where, silent, expected, scale[early])
            return
        other = rows_of(self.call.run(turned))[early]  # which of the two is it?
        self.worst.compare("causality", self.where, other, o[early], scale[early])
        self.worst.compare("addition", self.where, silent, expected, scale[early])

    def _at_rest(self) -> dict[nn.Module, Callable[..., Tensor]]:
        """Outputs of torch's own linear maps where all coefficients are set to zero, computed without a product.

        Keys are given the same at early positions as they were before, and values nothing but zeros.
        """
        forwards: dict[nn.Module, Callable[..., Tensor]] = {}
        for group in self.layer.groups:
            for part in projections(group):
                if is_plain(part) and part in self.calls:
                    forwards[part] = partial(_again, self.calls[part].output)
            if isinstance(group, LinearGroup) and group.down in forwards:
                nothing = torch.zeros_like(self.calls[group.down].output)
                forwards[group.down] = partial(
                    _again, nothing if group.value_bias is None else nothing + group.value_bias
                )
        return forwards

    def _watch(self) -> None:
        """The coefficients of all groups; those of experts are in no module's call and need a run of their own."""
        if self.layer.is_mixture:
            with hooks.watch_coefficients(self.layer, self.blocks.append):
                self.call.run()
            return
        for group in self.layer.groups:
            m, weights = rows_of(self._of(group.writer, "down projection").given), None
            if group.token_scale is not None:
                gate = group.token_scale(rows_of(self._of(group.reader, "key projection").given))
                m, weights = m * gate, gate[:, 0]
            self.blocks.append(CoefficientBlock(group, self.call.shape, None, m, weights))

    def _of(self, module: nn.Module, part: str) -> ModuleCall:
        if module not in self.calls:
            self.worst.refuse(f"the {part} of {self.where} is never run")
        return self.calls[module]

    def _prove_groups(self) -> tuple[Tensor, Tensor]:
        """(y, and y with every coefficient at zero), by formula."""
        output = silent = torch.zeros(())
        for group in self.layer.groups:
            self._of(group.writer, "down projection")
        for block in self.blocks:
            group = block.group
            x = rows_of(self._of(group.reader, "key projection").given)
            rows = torch.arange(len(x), device=x.device) if block.rows is None else block.rows
            expected = group.coefficients(x[rows])
            if block.rows is not None and block.weights is not None:  # the router's weight is no part of the formula
                expected = expected * block.weights[:, None]
            self.worst.compare("coefficients", self.where, block.coefficients, expected)
            bias = x.new_zeros(x.shape[-1]) if group.value_bias is None else group.value_bias.to(x.dtype)
            biases = bias.expand(len(rows), -1) if block.weights is None else block.weights[:, None] * bias
            added = scaled(group.weighed_values(block.coefficients) + biases, group.scale)
            nothing = x.new_zeros(x.shape)
            output = output + nothing.index_add(0, rows, added)
            silent = silent + nothing.index_add(0, rows, scaled(biases, group.scale))
        outputs = [rows_of(self._of(module, "output").output) for module in self.layer.outputs]
        self.worst.compare("output", self.where, torch.stack(outputs).sum(0), output)
        norm = self.layer.post_norm
        if norm is not None:
            call = self._of(norm.module, "norm after the block")
            self.worst.compare("norms", f"{self.where} (before the norm after the block)", rows_of(call.given), output)
            output, silent = norm.by_formula(output), norm.by_formula(silent)
            self.worst.compare("norms", f"{self.where} (after the block)", rows_of(call.output), output)
        return scaled(output, self.layer.scale), scaled(silent, self.layer.scale)

    def _prove_stream(self, stream: Tensor, scale: Tensor) -> None:
        norm = self.layer.input_norm
        x, *others = (
            rows_of(self.calls[module].given) for module in dict.fromkeys(group.reader for group in self.layer.groups)
        )
        for other in others:
            self.worst.compare("stream", f"{self.where} (inputs of its groups)", other, x)
        reads = x
        if norm is not None:
            reads = rows_of(self._of(norm.module, "norm before the block").given)
            self.worst.compare("norms", f"{self.where} (before the block)", x, norm.by_formula(reads))
        if self.layer.parallel:
            self.worst.compare("stream", self.where, reads, rows_of(self.call.states), scale)
            return
        moved = carried(stream, reads, tolerance=self.worst.tolerance)
        self.worst.compare("stream", self.where, reads if moved is None else moved, stream, scale)


def _again(output: Tensor, *_arguments: Any, **_named: Any) -> Tensor:
    return output.clone()


def _prove_prediction(model: MemoryModel, probe: Probe, worst: _Worst) -> None:
    """The lens on the last layer's states and noise, against all that the network does behind its blocks."""
    lens, last = model.lens, probe.calls[-1].states
    if lens.final_norm is not None:
        with _plain_numbers():
            expected = lens.final_norm.by_formula(last)
        worst.compare("norms", "final norm", lens.final_norm(last), expected)
    logits = probe.logits
    if logits is None:
        with passed_over(probe.calls, last):
            logits = model.logits(probe.tokens)
    logits = at_least_float32(logits)
    with _plain_numbers():
        read = lens.capped(lens.state_logits(last))
    worst.compare("prediction", "output embedding", read, logits)
    # a tie within the tolerance may fall either way, a clear winner may not
    chosen = logits.gather(-1, read.argmax(-1, keepdim=True))
    worst.compare("prediction", "most likely token", chosen, logits.amax(-1, keepdim=True), scale=logits)
