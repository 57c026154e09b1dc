"""memlens: analysis of the feed-forward layers of transformer language models as key-value memories.

    index = memlens.scan("gpt2", "my-texts/", out="gpt2-index")
    index.triggers("L5N94")
    memlens.analyze("gpt2", "my-texts/", out="gpt2-index")       # all stages, with a report
    memlens.trace("gpt2-index", "The capital of France is")      # one prompt, live

Each public name below is imported when it is first used, so that `import memlens` is fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memlens.api import (
        chart,
        check,
        compare,
        experiment,
        merge,
        patterns,
        pull,
        push,
        report,
        roles,
        scan,
        site,
        values,
    )
    from memlens.circuits.graph import circuit
    from memlens.circuits.task import task_circuit
    from memlens.errors import MemlensError
    from memlens.index.reader import Index, open_index
    from memlens.memory import MemoryId, Prefix, Trigger
    from memlens.models.load import load
    from memlens.models.memory_model import MemoryModel
    from memlens.models.sparse_autoencoder import as_sae
    from memlens.pipeline import analyze, demo, repair
    from memlens.probing.probe import probe
    from memlens.probing.saved import SparseProbe
    from memlens.tracer.attribution import in_common, integrate, silence_each
    from memlens.tracer.firing import coefficients_on, fires_on
    from memlens.tracer.intervene import generate, hooked, intervene, promoting
    from memlens.tracer.intervention import Edit, Intervention
    from memlens.tracer.trace import trace
    from memlens.tracer.value_changes import ValueChange, save_changed, side_effects, trying

__version__ = "0.1.0"

_NAMES = {
    "memlens.api": (
        *("chart", "check", "compare", "experiment", "merge", "patterns", "pull", "push", "report"),
        *("roles", "scan", "site", "values"),
    ),
    "memlens.circuits.graph": ("circuit",),
    "memlens.circuits.task": ("task_circuit",),
    "memlens.errors": ("MemlensError",),
    "memlens.index.reader": ("Index", "open_index"),
    "memlens.memory": ("MemoryId", "Prefix", "Trigger"),
    "memlens.models.load": ("load",),
    "memlens.models.memory_model": ("MemoryModel",),
    "memlens.models.sparse_autoencoder": ("as_sae",),
    "memlens.pipeline": ("analyze", "demo", "repair"),
    "memlens.probing.probe": ("probe",),
    "memlens.probing.saved": ("SparseProbe",),
    "memlens.tracer.attribution": ("in_common", "integrate", "silence_each"),
    "memlens.tracer.firing": ("coefficients_on", "fires_on"),
    "memlens.tracer.intervene": ("generate", "hooked", "intervene", "promoting"),
    "memlens.tracer.intervention": ("Edit", "Intervention"),
    "memlens.tracer.trace": ("trace",),
    "memlens.tracer.value_changes": ("ValueChange", "save_changed", "side_effects", "trying"),
}
_MODULE = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "Edit",
    "Index",
    "Intervention",
    "MemlensError",
    "MemoryId",
    "MemoryModel",
    "Prefix",
    "SparseProbe",
    "Trigger",
    "ValueChange",
    "analyze",
    "as_sae",
    "chart",
    "check",
    "circuit",
    "coefficients_on",
    "compare",
    "demo",
    "experiment",
    "fires_on",
    "generate",
    "hooked",
    "in_common",
    "integrate",
    "intervene",
    "load",
    "merge",
    "open_index",
    "patterns",
    "probe",
    "promoting",
    "pull",
    "push",
    "repair",
    "report",
    "roles",
    "save_changed",
    "scan",
    "side_effects",
    "silence_each",
    "site",
    "task_circuit",
    "trace",
    "trying",
    "values",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module 'memlens' has no attribute '{name}'")
    return getattr(import_module(_MODULE[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
