"""One prompt, live: what fired, what it wrote, and what happens if it is changed. An index adds names; none is needed.

    trace(model, "The capital of France is")            what every layer did, and which memories mattered
    intervene(model, prompt, "L3N512=0")                before and after, with memories set, scaled or silenced
    generate(model, prompt, 20, "L3N512=0")             how the text goes on
    silence_each, integrate, in_common                  which memories an answer hangs on
    ValueChange, trying, side_effects, save_changed     values themselves changed

The model is a loaded one, whatever load() takes, or an index, whose own model is loaded. The functions, and what they
take, are names of `memlens` as well; what they give back is documented here only.

Importing this package is cheap: torch comes in with the first name that is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memlens.trace.attribution import Attribution, silence_each
    from memlens.trace.common import CommonMemory, in_common
    from memlens.trace.comparison import Comparison, intervene
    from memlens.trace.edits import Edit
    from memlens.trace.generation import Continuation, generate
    from memlens.trace.groups import promoting
    from memlens.trace.integrated import integrate
    from memlens.trace.intervention import Intervention
    from memlens.trace.result import LayerTrace, Trace, TracedMemory
    from memlens.trace.tracing import trace
    from memlens.trace.value_changes import SideEffect, ValueChange, save_changed, side_effects, trying

_HOME = {
    "Attribution": "attribution",
    "CommonMemory": "common",
    "Comparison": "comparison",
    "Continuation": "generation",
    "Edit": "edits",
    "Intervention": "intervention",
    "LayerTrace": "result",
    "SideEffect": "value_changes",
    "Trace": "result",
    "TracedMemory": "result",
    "ValueChange": "value_changes",
    "generate": "generation",
    "in_common": "common",
    "integrate": "integrated",
    "intervene": "comparison",
    "promoting": "groups",
    "save_changed": "value_changes",
    "side_effects": "value_changes",
    "silence_each": "attribution",
    "trace": "tracing",
    "trying": "value_changes",
}

__all__ = [
    "Attribution",
    "CommonMemory",
    "Comparison",
    "Continuation",
    "Edit",
    "Intervention",
    "LayerTrace",
    "SideEffect",
    "Trace",
    "TracedMemory",
    "ValueChange",
    "generate",
    "in_common",
    "integrate",
    "intervene",
    "promoting",
    "save_changed",
    "side_effects",
    "silence_each",
    "trace",
    "trying",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
