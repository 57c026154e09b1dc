"""The cases of Fig 11: whose token a layer's output has: the residual's, the feed-forward block's, both's or neither's.

residual o == r != y; ffn o == y != r; agreement o == r == y; composition: three different tokens; reversal: r == y, but
o differs, which linear logits cannot do, but a final norm or an adaptive softmax between can. All by top().
This module knows top tokens only, not how they were found.
"""

from __future__ import annotations

from typing import Any


def split_cases(r: Any, y: Any, o: Any) -> dict[str, Any]:
    """Which case holds for the top tokens of r, y and o: single tokens, or arrays of them. Exactly one always does."""
    return {
        "residual": (o == r) & (o != y),
        "ffn": (o == y) & (o != r),
        "agreement": (o == r) & (o == y),
        "composition": (o != r) & (o != y) & (r != y),
        "reversal": (o != r) & (r == y),
    }


def case_of(r: int, y: int, o: int) -> str:
    """The name of the case for one layer at one position."""
    return next(case for case, holds in split_cases(r, y, o).items() if holds)
