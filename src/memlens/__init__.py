"""memlens: the feed-forward layers of a transformer language model, read as key-value memories.

    index = memlens.scan("gpt2", "my-texts/", out="gpt2-index")
    index.triggers("L5N894")
    memlens.analyze("gpt2", "my-texts/", out="gpt2-index")       # that, and everything else, with a report

The public names below are imported when first used, so that `import memlens` costs nothing.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memlens.analyze import analyze
    from memlens.api import experiment, open_index, report, scan, values
    from memlens.errors import MemlensError
    from memlens.index.reader import Index
    from memlens.memory import MemoryId, Prefix, Trigger
    from memlens.models import load
    from memlens.models.memory_model import MemoryModel

__version__ = "0.1.0"

_WHERE = {
    "Index": "memlens.index.reader",
    "MemlensError": "memlens.errors",
    "MemoryId": "memlens.memory",
    "MemoryModel": "memlens.models.memory_model",
    "Prefix": "memlens.memory",
    "Trigger": "memlens.memory",
    "analyze": "memlens.analyze",
    "experiment": "memlens.api",
    "load": "memlens.models",
    "open_index": "memlens.api",
    "report": "memlens.api",
    "scan": "memlens.api",
    "values": "memlens.api",
}

__all__ = [
    "Index",
    "MemlensError",
    "MemoryId",
    "MemoryModel",
    "Prefix",
    "Trigger",
    "analyze",
    "experiment",
    "load",
    "open_index",
    "report",
    "scan",
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
