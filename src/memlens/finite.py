"""Content made fit for JSON, which has no infinity and no NaN. Knows nothing of memories."""

from __future__ import annotations

import math
from typing import Any


def finite(content: Any) -> Any:
    """The same lists, dictionaries and values, with None for every number that JSON lacks."""
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, dict):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [finite(value) for value in content]
    return content
