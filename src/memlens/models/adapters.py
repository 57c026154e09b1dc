"""Adapters of other packages: an entry point of the group `memlens.models` brings the memories of a model type.

    [project.entry-points."memlens.models"]
    mytype = "mypackage:adapt"          # the model_type of a configuration, and a function

adapt(network, tokenizer, name=..., source=...) returns a MemoryModel, most easily a subclass of HuggingFaceModel. It is
asked before memlens looks by itself, also for types that memlens refuses, and what it returns is proven like any other.
"""

import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoints, entry_points
from typing import Any

from memlens.errors import ModelError
from memlens.models.huggingface import HuggingFaceModel
from memlens.models.memory_model import MemoryModel
from memlens.models.refusals import Config, refuse_kind
from memlens.models.tokenizer import Tokenizer

GROUP = "memlens.models"


@cache
def _entries(_where: tuple[str, ...]) -> EntryPoints:
    return entry_points(group=GROUP)


def _adapters(model_type: str) -> EntryPoints:
    """Entry points for a model type; packages are looked through once, and again where there are others to find."""
    return _entries(tuple(sys.path)).select(name=model_type)


def refuse_config(config: Config, name: str) -> None:
    """UnsupportedModel where the configuration speaks against the model and nobody brings an adapter for it."""
    if not _adapters(config.model_type):
        refuse_kind(config, name)


def as_memories(network: Any, tokenizer: Tokenizer | None, *, name: str, source: str) -> MemoryModel:
    """A transformers' network as a MemoryModel: by an adapter for its type, else by discovery."""
    adapt: Callable[..., Any] = HuggingFaceModel
    for entry in _adapters(network.config.model_type):
        try:
            adapt = entry.load()
        except Exception as error:
            package = "a package" if entry.dist is None else entry.dist.name
            raise ModelError(f"the adapter {entry.value} of {package} cannot be imported ({error}); mend it") from error
    model = adapt(network, tokenizer, name=name, source=source)
    if not isinstance(model, MemoryModel):
        raise ModelError(f"the adapter for '{network.config.model_type}' gave no MemoryModel; mend it")
    return model
