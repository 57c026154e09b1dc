"""What memories promote and which tokens their keys match, as tables of an index, and how to search them.

    compute_values(index)                values.parquet and keys.parquet
    search_values(index, " Paris")       which memories promote a token
    read_value(index, "L3N512")          both ends of one value, and the tokens of its key

Names are imported when first used: looking at the tables needs no torch, making them does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memlens.values.looking import MemoryValue, TokenNumber, read_value, summarize_values
    from memlens.values.search import FoundToken, Promotion, search_values
    from memlens.values.table import compute_values, default_reading, values_are_made

__all__ = [
    "FoundToken",
    "MemoryValue",
    "Promotion",
    "TokenNumber",
    "compute_values",
    "default_reading",
    "read_value",
    "search_values",
    "summarize_values",
    "values_are_made",
]

_HOME = {
    "FoundToken": "search",
    "MemoryValue": "looking",
    "Promotion": "search",
    "TokenNumber": "looking",
    "compute_values": "table",
    "default_reading": "table",
    "read_value": "looking",
    "search_values": "search",
    "summarize_values": "looking",
    "values_are_made": "table",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
