"""memlens: the feed-forward layers of a transformer language model, read as key-value memories.

    index = memlens.scan("gpt2", "my-texts/", out="gpt2-index")
    index.triggers("L5N94")
    memlens.analyze("gpt2", "my-texts/", out="gpt2-index")       # that, and everything else, with a report
    memlens.trace("gpt2-index", "The capital of France is")      # one prompt, live

The public names below are imported when first used, so that `import memlens` costs nothing.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memlens.analyze import analyze
    from memlens.api import check, compare, experiment, merge, open_index, patterns, report, scan, values
    from memlens.demo import demo
    from memlens.errors import MemlensError
    from memlens.index.reader import Index
    from memlens.memory import MemoryId, Prefix, Trigger
    from memlens.models import load
    from memlens.models.memory_model import MemoryModel
    from memlens.trace.attribution import silence_each
    from memlens.trace.common import in_common
    from memlens.trace.comparison import intervene
    from memlens.trace.edits import Edit
    from memlens.trace.generation import generate
    from memlens.trace.groups import promoting
    from memlens.trace.integrated import integrate
    from memlens.trace.intervention import Intervention
    from memlens.trace.tracing import trace
    from memlens.trace.value_changes import ValueChange, save_changed, side_effects, trying

__version__ = "0.1.0"

_WHERE = {
    "Edit": "memlens.trace.edits",
    "Index": "memlens.index.reader",
    "Intervention": "memlens.trace.intervention",
    "MemlensError": "memlens.errors",
    "MemoryId": "memlens.memory",
    "MemoryModel": "memlens.models.memory_model",
    "Prefix": "memlens.memory",
    "Trigger": "memlens.memory",
    "ValueChange": "memlens.trace.value_changes",
    "analyze": "memlens.analyze",
    "check": "memlens.api",
    "compare": "memlens.api",
    "demo": "memlens.demo",
    "experiment": "memlens.api",
    "generate": "memlens.trace.generation",
    "in_common": "memlens.trace.common",
    "integrate": "memlens.trace.integrated",
    "intervene": "memlens.trace.comparison",
    "load": "memlens.models",
    "merge": "memlens.api",
    "open_index": "memlens.api",
    "patterns": "memlens.api",
    "promoting": "memlens.trace.groups",
    "report": "memlens.api",
    "save_changed": "memlens.trace.value_changes",
    "scan": "memlens.api",
    "side_effects": "memlens.trace.value_changes",
    "silence_each": "memlens.trace.attribution",
    "trace": "memlens.trace.tracing",
    "trying": "memlens.trace.value_changes",
    "values": "memlens.api",
}

__all__ = [
    "Edit",
    "Index",
    "Intervention",
    "MemlensError",
    "MemoryId",
    "MemoryModel",
    "Prefix",
    "Trigger",
    "ValueChange",
    "analyze",
    "check",
    "compare",
    "demo",
    "experiment",
    "generate",
    "in_common",
    "integrate",
    "intervene",
    "load",
    "merge",
    "open_index",
    "patterns",
    "promoting",
    "report",
    "save_changed",
    "scan",
    "side_effects",
    "silence_each",
    "trace",
    "trying",
    "values",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'memlens' has no attribute '{name}'")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


class _Memlens(ModuleType):
    """A verb keeps its name where a folder has the same one: the import system may not bind `scan/` over `scan()`."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _WHERE and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Memlens
