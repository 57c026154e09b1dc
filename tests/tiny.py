"""The small real models that all tests use; see memlens.testing, which users' tests can use as well."""

from memlens.testing import (
    CONTEXT,
    FAMILIES,
    LAYERS,
    MEMORIES,
    VOCABULARY,
    WIDTH,
    save_tiny,
    tiny_model,
    tiny_tokenizer,
)

__all__ = [
    "CONTEXT",
    "FAMILIES",
    "LAYERS",
    "MEMORIES",
    "VOCABULARY",
    "WIDTH",
    "save_tiny",
    "tiny_model",
    "tiny_tokenizer",
]
