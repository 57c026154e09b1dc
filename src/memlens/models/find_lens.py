"""Finds the lens of a network: what lies between its last block and its logits, by running only that part.

The blocks are passed over, so that any states can be put in for those of the last block, in float32 whatever the
network's dtype is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memlens.errors import UnsupportedModel
from memlens.models.blocks import ModuleCall, Probe, errors_of_the_network, in_float32, passed_over, record_calls
from memlens.models.lens import Norm
from memlens.models.match import NEAR, deviation, ratio, recognised_norm


@dataclass(frozen=True, eq=False)
class FoundLens:
    """logits = cap(logit_scale * (state_scale * norm(state) E^T + b))"""

    output: nn.Module
    final_norm: Norm | None
    state_scale: float
    logit_scale: float
    soft_cap: float | None
    logits: Tensor  # of the probe's last states


def find_lens(network: Any, probe: Probe, run: Callable[[], Tensor], soft_caps: Sequence[float]) -> FoundLens:
    """`run`: gives the logits of the probe; `soft_caps`: numbers of the configuration that may be one."""
    states, around = probe.calls[-1].states, probe.around
    calls: list[ModuleCall] = []
    with in_float32(*around, deep=False):
        with passed_over(probe.calls, states), record_calls(around, calls.append), errors_of_the_network():
            logits = run()
        head = _head(network, calls, logits)
        final_norm, normed = None, states
        for call in calls:
            if call.given.shape == states.shape and torch.equal(call.given, states):
                final_norm = recognised_norm(call)
                if final_norm is not None:
                    normed = call.output
                    break
    state_scale = ratio(head.given, normed) if head.given.shape == normed.shape else None
    if state_scale is None:
        raise UnsupportedModel("between its last block and its output embedding lies more than a norm")
    return FoundLens(head.module, final_norm, state_scale, *_scale_and_cap(logits, head.output, soft_caps), logits)


def _head(network: Any, calls: Sequence[ModuleCall], logits: Tensor) -> ModuleCall:
    known = network.get_output_embeddings()
    for call in reversed(calls):
        if (known is None or call.module is known) and call.output.shape == logits.shape:
            return call
    raise UnsupportedModel("its logits do not come from one output embedding")


def _scale_and_cap(logits: Tensor, scores: Tensor, soft_caps: Sequence[float]) -> tuple[float, float | None]:
    """(scale, cap) that are nearest to logits = cap * tanh(scale * scores / cap), or without a cap."""
    found: list[tuple[float, float, float | None]] = []
    if (scale := ratio(logits, scores)) is not None:
        found.append((deviation(scores * scale, logits), scale, None))
    for cap in soft_caps:
        clear = (logits / cap).abs() < 0.9  # elsewhere too little is left of a score
        within = torch.where(clear, torch.atanh((logits / cap).clamp(-0.9, 0.9)) * cap, 0)
        if (scale := ratio(within, torch.where(clear, scores, 0))) is not None:
            found.append((deviation(torch.tanh(scores * scale / cap) * cap, logits), scale, cap))
    found = [candidate for candidate in found if candidate[0] < NEAR]
    if not found:
        raise UnsupportedModel("its logits are neither its output embedding's scores nor these scaled or soft-capped")
    return min(found, key=lambda candidate: candidate[0])[1:]
