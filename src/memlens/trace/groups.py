"""Groups of memories to intervene on: all that promote some tokens, as the index's values table lists them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from memlens.errors import SettingError, UnknownName
from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.trace.edits import short
from memlens.trace.opening import open_index
from memlens.trace.prompt import check_count
from memlens.values import search_values


def promoting(
    index: Index | str | os.PathLike[str],
    tokens: str | Sequence[str],
    *,
    end: str = "top",
    within: int = 10,
    limit: int | None = None,
) -> tuple[MemoryId, ...]:
    """All memories that have one of the tokens among the `within` first of their value's list, strongest first.

        memlens.Edit(memlens.promoting("gpt2-index", " Paris"))

    `end="bottom"` gives those that push the tokens down; a limit keeps the strongest.
    """
    opened = open_index(index)
    named: Any = [tokens] if isinstance(tokens, str) else tokens
    texts = list(named) if isinstance(named, Iterable) else [named]
    if not all(isinstance(text, str) for text in texts):
        raise SettingError(f"a group's tokens are named by their texts, like ' Paris', not {short(tokens)}")
    check_count(within, "first tokens cannot be looked through")
    if limit is not None:
        check_count(limit, "memories are no group")
    found = search_values(opened, texts, end=end, limit=None)
    listed = min(opened.manifest["values"]["top"], len(opened.vocabulary))
    if within > listed:
        raise SettingError(
            f"{opened.folder} lists {listed} tokens a value, not {within}; lower `within` or make the values again"
        )
    memories = tuple(one.memory for one in found if one.rank < within)[:limit]
    if not memories:
        raise UnknownName(f"no memory has {tokens!r} among the {within} first tokens of its value; raise `within`")
    return memories
