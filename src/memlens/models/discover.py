"""Discovery: find the keys, values, norms, scales and stream of each block by experiments, without a list of models.

The network runs once on a few tokens. Then each block is re-run alone (blocks.py):

1. Find the groups of memories. A linear map contains values if its input is computed by keys that read the stream
   (match.py). Experts are recognized by transformers' interface for stacked experts.
2. Silence the groups and see how the block's output changes. The output of the groups reaches the stream unchanged,
   scaled by a constant or by a factor per coordinate, or through a norm.
3. Silence one group at a time to find its scale: none, a constant, a factor per coordinate or a gate per token.
4. Find the input of the feed-forward part: the stream that it adds to, or, in a parallel block, the stream before
   attention.

The result is a proposal for proof.py. If any step fails, the model is rejected with an error that names the layer and
the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from memlens.errors import UnsupportedModel
from memlens.models import hooks
from memlens.models.blocks import BlockCall, ModuleCall, in_float32, reject_on_error
from memlens.models.experts import expert_groups, is_experts
from memlens.models.groups import LinearGroup, MemoryGroup, MemoryLayer, Scale, scaled
from memlens.models.lens import Norm
from memlens.models.match import (
    NEAR,
    ScaledActivation,
    deviation,
    is_linear,
    map_to_stream,
    match_keys,
    ratio,
    recognized_norm,
    rows_of,
)


def discover_layers(calls: Sequence[BlockCall], activations: Sequence[str]) -> list[MemoryLayer]:
    """Return the memories of every block.

    Args:
        calls: The calls of the blocks.
        activations: Names of the activations to try first.

    Raises:
        UnsupportedModel: A block's feed-forward part is not recognized, or no block has such a part.
    """
    layers: list[MemoryLayer] = []
    latest: dict[tuple[Any, ...], MemoryLayer] = {}
    for number, call in enumerate(calls):
        kind = tuple((name, type(module)) for name, module in call.block.named_modules())
        with in_float32(call.block):
            try:
                with reject_on_error("the block cannot be run alone"):
                    discovery = _Discovery(call, number, activations)
                with reject_on_error("it cannot be compared with the layer before it"):
                    layer = discovery.from_template(latest[kind]) if kind in latest else None
                layers.append(discovery.layer() if layer is None else layer)
                latest[kind] = layers[-1]
            except UnsupportedModel as error:
                raise UnsupportedModel(f"layer {number}: {error}") from error
    if not any(layer.groups for layer in layers):
        raise UnsupportedModel("no feed-forward part was found in any of its blocks")
    return layers


class _Discovery:
    """Finds the memories of one block."""

    def __init__(self, call: BlockCall, number: int, activations: Sequence[str]) -> None:
        self.call, self.number, self.activations = call, number, activations
        self.block = call.block
        self.o, self.calls = call.trace.output, call.trace.calls
        self.by_module = {call.module: call for call in self.calls}

    def layer(self) -> MemoryLayer:
        """Run all steps of the discovery and return the layer. It has no groups if the block has no memories."""
        with reject_on_error("its keys and values cannot be found"):
            groups = [*self._linear_groups(), *self._expert_groups()]
        if not groups:
            return self._layer([], (), None, None, None, False)
        with reject_on_error("its memories cannot be silenced"):
            silent = self._silence(groups)
        with reject_on_error("the output of its memories cannot be found"):
            candidates = list(self._possible_outputs(groups))
        last_reason = ""
        for outputs in candidates:
            try:
                with reject_on_error("the path of its memories to the stream cannot be found"):
                    post_norm, scale = self._path_to_stream(outputs, silent)
                with reject_on_error("the scales of its memories cannot be found"):
                    scaled_groups = self._group_scales(groups, outputs)
            except UnsupportedModel as error:
                last_reason = str(error)
                continue
            with reject_on_error("the input of its memories cannot be found"):
                y = self._addition(outputs, post_norm, scale)
                input_norm, parallel = self._find_input(groups, y)
            return self._layer(scaled_groups, outputs, input_norm, post_norm, scale, parallel)
        raise UnsupportedModel(last_reason)

    def from_template(self, template: MemoryLayer) -> MemoryLayer | None:
        """Return this layer with the structure of another layer, or None if that structure does not fit.

        This is much faster than a search, and most blocks of a network differ only in their weights.
        """
        plain = [group for group in template.groups if isinstance(group, LinearGroup) and _is_plain(group)]
        # A parallel block's input does not depend on its output, so a different scale would go unnoticed.
        if not plain or len(plain) < len(template.groups) or isinstance(template.scale, Tensor) or template.parallel:
            return None
        paths = {module: name for name, module in template.block.named_modules()}
        modules = dict(self.block.named_modules())

        def counterpart(source: Any) -> Any:
            if isinstance(source, Norm):
                return replace(source, module=modules[paths[source.module]])
            return modules[paths[source]] if source in paths else source

        parts = ("key_projection", "up_projection", "down")
        groups = [replace(group, **{part: counterpart(getattr(group, part)) for part in parts}) for group in plain]
        outputs = tuple(counterpart(module) for module in template.outputs)
        input_norm, post_norm = counterpart(template.input_norm), counterpart(template.post_norm)
        norms = [norm.module for norm in (input_norm, post_norm) if norm is not None]
        if not {*outputs, *norms} <= self.by_module.keys() or not all(map(self._follows_formula, groups)):
            return None
        read = rows_of(self.by_module[norms[0] if input_norm else groups[0].reader].inputs)
        stream = rows_of(self.o) - self._addition(outputs, post_norm, template.scale)
        if not deviation(read, stream) < NEAR / 100:
            return None
        return self._layer(groups, outputs, input_norm, post_norm, template.scale, False)

    def _follows_formula(self, group: LinearGroup) -> bool:
        """Return True if the activation maps the outputs of the key projections to the input of the down projection."""
        if not {group.key_projection, group.up_projection or group.down, group.down} <= self.by_module.keys():
            return False
        m = group.activate(rows_of(self.by_module[group.key_projection].output)[:, group.key_rows])
        if group.up_projection is not None:
            m = m * rows_of(self.by_module[group.up_projection].output)[:, group.up_rows]
        return deviation(m, rows_of(self.by_module[group.down].inputs)) < NEAR / 100

    def _layer(
        self,
        groups: Sequence[MemoryGroup],
        outputs: tuple[nn.Module, ...],
        input_norm: Norm | None,
        post_norm: Norm | None,
        scale: Scale,
        parallel: bool,
    ) -> MemoryLayer:
        return MemoryLayer.of(
            number=self.number,
            block=self.block,
            groups=groups,
            outputs=outputs,
            input_norm=input_norm,
            post_norm=post_norm,
            scale=scale,
            parallel=parallel,
        )

    # Step 1

    def _linear_groups(self) -> Iterator[LinearGroup]:
        width = self.o.shape[-1]
        mixture = any(is_experts(call.module) for call in self.calls)
        count = 0
        for down in self.calls:
            if not is_linear(down) or down.output.shape[-1] != width:
                continue
            keys = match_keys(down, self.calls, self.activations)
            if keys is None:
                continue
            kind = "shared" if mixture else "dense"
            yield LinearGroup(kind=kind, expert=count, down=down.module, **vars(keys))
            count += 1

    def _expert_groups(self) -> Iterator[MemoryGroup]:
        for call in self.calls:
            if is_experts(call.module):
                experts: Any = call.module
                yield from expert_groups(experts, self._router(experts), **_expert_facts(experts, self.activations))

    def _router(self, experts: Any) -> nn.Module | None:
        shape = (experts.num_experts, self.o.shape[-1])
        routers = [
            module
            for module in self.block.modules()
            if isinstance(weight := getattr(module, "weight", None), Tensor) and weight.shape == shape
        ]
        return routers[0] if len(routers) == 1 else None

    # Step 2

    def _silence(self, groups: Sequence[MemoryGroup]) -> dict[nn.Module | None, ModuleCall | Tensor]:
        """Re-run the block with these groups silenced.

        Returns {module: call}; the key None holds the block's output.
        """
        layer = self._layer(groups, (), None, None, None, False)
        with hooks.edit_coefficients(layer, lambda c, _group: torch.zeros_like(c)):
            silent = self.call.traced()
        return {None: silent.output} | {call.module: call for call in silent.calls}

    def _possible_outputs(self, groups: Sequence[MemoryGroup]) -> Iterator[tuple[nn.Module, ...]]:
        """Yield modules whose outputs may add up to the sum of all groups, innermost modules first."""
        parts = list(dict.fromkeys(group.writer for group in groups))
        if len(parts) == 1 and isinstance(groups[0], LinearGroup):
            yield (parts[0],)
        width = self.o.shape[-1]
        above = [
            module
            for module in self.block.modules()
            if module is not self.block
            and module in self.by_module
            and self.by_module[module].output.shape[-1] == width
        ]
        holders = [module for module in above if set(parts) <= set(module.modules()) and module not in parts]
        yield from ((module,) for module in reversed(holders))
        if len(parts) == 1:
            yield (parts[0],)
            return
        # no module returns the sum: use the outermost modules that contain exactly one part each
        yield tuple(next(module for module in above if {part} == set(module.modules()) & set(parts)) for part in parts)

    def _out(self, outputs: tuple[nn.Module, ...], calls: dict[Any, Any] | None = None) -> Tensor:
        of = self.by_module if calls is None else calls
        return torch.stack([rows_of(of[module].output) for module in outputs]).sum(0)

    def _path_to_stream(self, outputs: tuple[nn.Module, ...], silent: dict[Any, Any]) -> tuple[Norm | None, Scale]:
        """Return the post-norm and the scale that are applied between the sum of the groups and the stream."""
        if any(module not in silent for module in outputs):
            raise UnsupportedModel("its feed-forward part does not run in every pass")
        change = rows_of(self.o - silent[None])
        out, out_silent = self._out(outputs), self._out(outputs, silent)
        if out.shape != change.shape:
            raise UnsupportedModel(
                f"its feed-forward part has width {out.shape[-1]} and its stream has width {change.shape[-1]}, as with "
                "hyper-connections, but memlens needs one stream of the same width"
            )
        scale, fits = self._fit(change, out - out_silent)
        if fits:
            return None, scale
        for call in self.calls:
            if call.output.shape[-1] != self.o.shape[-1] or not torch.equal(rows_of(call.inputs), out):
                continue
            norm = recognized_norm(call)
            if norm is None:
                continue
            scale, fits = self._fit(change, rows_of(call.output - silent[call.module].output))
            if fits:
                return norm, scale
        raise UnsupportedModel(self._why_not_added())

    def _fit(self, reached: Tensor, source: Tensor) -> tuple[Scale, bool]:
        """Fit reached = scale * source [n, d] with a constant or a factor per coordinate.

        Returns (scale, whether the fit is close).
        """
        # at tokens for which an expert has almost no weight (Zaya), its measured effect is rounding noise
        clear = source.abs().amax(-1) > 1e-4 * rows_of(self.o).abs().amax(-1)
        if clear.any():
            reached, source = reached[clear], source[clear]
        constant = ratio(reached, source)
        if constant is not None:
            return (None if constant == 1 else constant), True
        gain = (reached * source).sum(0) / source.square().sum(0).clamp_min(1e-30)
        if not deviation(source * gain, reached) < NEAR:
            return None, False
        for parameter in self.block.parameters():  # prefer the exact parameter to the noisy fit
            if parameter.shape == gain.shape and torch.allclose(parameter, gain, rtol=1e-3, atol=1e-5):
                return parameter.detach().clone(), True
        return gain, True

    def _why_not_added(self) -> str:
        last = [call for call in self.calls if torch.equal(rows_of(call.output), rows_of(self.o))]
        if any(recognized_norm(call) is not None for call in last):
            return "its norm follows the sum of stream and feed-forward output (post-norm), so o = r + y cannot hold"
        return "the output of its feed-forward part is not simply added to the stream"

    # Step 3

    def _group_scales(self, groups: Sequence[MemoryGroup], outputs: tuple[nn.Module, ...]) -> list[MemoryGroup]:
        """Return the groups, each with the factor by which its output is scaled before the groups are summed."""
        scaled_groups: list[MemoryGroup] = []
        experts = [group for group in groups if group.kind == "routed"]
        for part in (*([group] for group in groups if group.kind != "routed"), experts):
            if not part:
                continue
            last = part[0].writer
            if outputs == (last,):
                scaled_groups += part
                continue
            silent: Any = self._silence(part)
            reached = self._out(outputs) - self._out(outputs, silent)
            source = rows_of(self.by_module[last].output) - rows_of(silent[last].output)
            scale, fits = self._fit(reached, source)
            if fits:
                scaled_groups += [replace(group, scale=scale) for group in part]
                continue
            gate = self._token_gate(part[0], reached, source)
            if gate is None:
                raise UnsupportedModel("some of its memories reach the stream scaled by an unknown factor")
            scaled_groups += [replace(group, token_scale=gate) for group in part]
        return scaled_groups

    def _token_gate(self, group: MemoryGroup, reached: Tensor, source: Tensor) -> TokenGate | None:
        """Return the gate that scales a group at each token, or None if it is not the sigmoid of a linear map of x."""
        if not isinstance(group, LinearGroup):
            return None
        factor = (reached * source).sum(-1, keepdim=True) / source.square().sum(-1, keepdim=True).clamp_min(1e-30)
        x = rows_of(self.by_module[group.key_projection].inputs)
        for call in self.calls:
            if is_linear(call) and call.output.shape[-1] == 1 and torch.equal(rows_of(call.inputs), x):
                gate = TokenGate(call.module)
                if deviation(gate(x), factor) < NEAR:
                    return gate
        return None

    def _addition(self, outputs: tuple[nn.Module, ...], post_norm: Norm | None, scale: Scale) -> Tensor:
        out = self._out(outputs) if post_norm is None else rows_of(self.by_module[post_norm.module].output)
        return scaled(out, scale)

    # Step 4

    def _find_input(self, groups: Sequence[MemoryGroup], y: Tensor) -> tuple[Norm | None, bool]:
        """Return (norm whose output is x, whether the block reads the stream before its attention)."""
        x, *more_inputs = (
            rows_of(self.by_module[module].inputs) for module in dict.fromkeys(group.reader for group in groups)
        )
        if not all(torch.equal(inputs, x) for inputs in more_inputs):
            raise UnsupportedModel("its memories do not all read the same input")
        stream = rows_of(self.o) - y
        for norm, read in [*self._norms_before(x), (None, x)]:
            if map_to_stream(stream, read) is not None:
                return norm, False
            if deviation(read, rows_of(self.call.states)) < NEAR:
                return norm, True
        raise UnsupportedModel(
            "its feed-forward part does not read the stream that it adds to (directly or through a norm)"
        )

    def _norms_before(self, x: Tensor) -> Iterator[tuple[Norm, Tensor]]:
        """Yield (norm, its input) for norms whose output is x."""
        for call in self.calls:
            if call.inputs.shape[-1] == x.shape[-1] and torch.equal(rows_of(call.output), x):
                norm = recognized_norm(call)
                if norm is not None:
                    yield norm, rows_of(call.inputs)


@dataclass(frozen=True, eq=False)
class TokenGate:
    """The gate of a shared expert, one factor per token: x [..., d] -> sigmoid(x w) [..., 1]."""

    module: Any

    def __call__(self, inputs: Tensor) -> Tensor:
        bias = self.module.bias
        weight, bias = self.module.weight.to(inputs.dtype), None if bias is None else bias.to(inputs.dtype)
        return torch.sigmoid(nn.functional.linear(inputs, weight, bias))


def _is_plain(group: LinearGroup) -> bool:
    """Return True if a group consists of modules and an activation only, without scales or other functions."""
    return (
        group.combine is None
        and group.token_scale is None
        and group.scale is None
        and not isinstance(group.activate, ScaledActivation)
    )


def _expert_facts(experts: Any, activations: Sequence[str]) -> dict[str, Any]:
    from transformers.integrations import moe

    has_own_gate = getattr(type(experts), "_apply_gate", None) is not moe._default_apply_gate
    return {
        "activation": activations[0] if activations else "silu",
        "activate": getattr(experts, "act_fn", nn.functional.silu),
        "combine": _Combine(experts) if has_own_gate and experts.has_gate else None,
    }


@dataclass(frozen=True, eq=False)
class _Combine:
    """The function of the experts' module that combines gate and up."""

    experts: Any

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        products = (
            torch.cat([gate, up], -1) if self.experts.is_concatenated else torch.stack([gate, up], -1).flatten(-2)
        )
        m: Tensor = self.experts._apply_gate(products)
        return m
