"""memlens: the feed-forward layers of a transformer language model, read as key-value memories.

    index = memlens.scan("gpt2", "my-texts/", out="gpt2-index")
    index.triggers("L5N94")
    memlens.analyze("gpt2", "my-texts/", out="gpt2-index")       # that, and everything else, with a report
    memlens.trace("gpt2-index", "The capital of France is")      # one prompt, live

The public names below are imported when first used, so that `import memlens` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memlens.api import check, compare, experiment, merge, open_index, patterns, report, scan, values
    from memlens.errors import MemlensError
    from memlens.index.reader import Index
    from memlens.memory import MemoryId, Prefix, Trigger
    from memlens.models.load import load
    from memlens.models.memory_model import MemoryModel
    from memlens.pipeline import analyze, demo
    from memlens.tracer.attribution import in_common, integrate, silence_each
    from memlens.tracer.generate import generate
    from memlens.tracer.intervene import intervene, promoting
    from memlens.tracer.intervention import Edit, Intervention
    from memlens.tracer.trace import trace
    from memlens.tracer.value_changes import ValueChange, save_changed, side_effects, trying

__version__ = "0.1.0"

_WHERE = {
    "Edit": "memlens.tracer.intervention",
    "Index": "memlens.index.reader",
    "Intervention": "memlens.tracer.intervention",
    "MemlensError": "memlens.errors",
    "MemoryId": "memlens.memory",
    "MemoryModel": "memlens.models.memory_model",
    "Prefix": "memlens.memory",
    "Trigger": "memlens.memory",
    "ValueChange": "memlens.tracer.value_changes",
    "analyze": "memlens.pipeline",
    "check": "memlens.api",
    "compare": "memlens.api",
    "demo": "memlens.pipeline",
    "experiment": "memlens.api",
    "generate": "memlens.tracer.generate",
    "in_common": "memlens.tracer.attribution",
    "integrate": "memlens.tracer.attribution",
    "intervene": "memlens.tracer.intervene",
    "load": "memlens.models.load",
    "merge": "memlens.api",
    "open_index": "memlens.api",
    "patterns": "memlens.api",
    "promoting": "memlens.tracer.intervene",
    "report": "memlens.api",
    "save_changed": "memlens.tracer.value_changes",
    "scan": "memlens.api",
    "side_effects": "memlens.tracer.value_changes",
    "silence_each": "memlens.tracer.attribution",
    "trace": "memlens.tracer.trace",
    "trying": "memlens.tracer.value_changes",
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
