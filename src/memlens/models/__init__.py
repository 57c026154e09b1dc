"""A language model seen as memories.

    model = memlens.models.load("gpt2")
    model.layers[3].values            # [memories, d]
    with model.watch(use): model.run_body(tokens)

Importing this package is cheap: torch and transformers come in with the first model. It knows nothing of corpora.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memlens.models.feed_forward import FeedForward
    from memlens.models.info import ModelInfo, describe
    from memlens.models.lens import Lens
    from memlens.models.loading import load
    from memlens.models.memory_model import MemoryModel, Recording
    from memlens.models.proof import Proof, prove
    from memlens.models.tokenizer import Encoded, Tokenizer

__all__ = [
    "Encoded",
    "FeedForward",
    "Lens",
    "MemoryModel",
    "ModelInfo",
    "Proof",
    "Recording",
    "Tokenizer",
    "describe",
    "load",
    "prove",
]

_HOME = {
    "Encoded": "tokenizer",
    "FeedForward": "feed_forward",
    "Lens": "lens",
    "MemoryModel": "memory_model",
    "ModelInfo": "info",
    "Proof": "proof",
    "Recording": "memory_model",
    "Tokenizer": "tokenizer",
    "describe": "info",
    "load": "loading",
    "prove": "proof",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
