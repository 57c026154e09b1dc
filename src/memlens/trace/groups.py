"""Groups of memories to intervene on: all that promote some tokens, as the index's values table lists them."""

from __future__ import annotations

from collections.abc import Sequence

from memlens.errors import UnknownName
from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.values import search_values


def promoting(
    index: Index, tokens: str | Sequence[str], *, end: str = "top", within: int = 10, limit: int | None = None
) -> tuple[MemoryId, ...]:
    """All memories that have one of the tokens among the `within` first of their value's list, strongest first.

    `end="bottom"` gives those that push the tokens down. For an Edit: `Edit(memories=promoting(index, " Paris"))`.
    """
    found = search_values(index, tokens, end=end, limit=None)
    memories = tuple(one.memory for one in found if one.rank < within)[:limit]
    if not memories:
        raise UnknownName(f"no memory has {tokens!r} among the {within} first tokens of its value; raise `within`")
    return memories
