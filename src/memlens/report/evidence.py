"""What a claim is judged from, what comes out, and how numbers are put there.

Knows tables as rows and the three verdicts; no claim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from memlens.report.depth import in_third

Row = dict[str, Any]

APPEARS, ABSENT, UNCLEAR = "appears", "does not appear", "cannot tell"


@dataclass(frozen=True)
class Evidence:
    """The tables that a claim may look at, by name, and how deep the model is."""

    tables: Mapping[str, list[Row]]
    layers: int  # of the model
    memories: Mapping[int, int]  # by scanned layer

    def __getitem__(self, name: str) -> list[Row]:
        return self.tables[name]

    def third(self, name: str, which: str) -> list[Row]:
        return in_third(self.tables[name], which, self.layers)


@dataclass(frozen=True)
class Finding:
    """What the tables say about a claim."""

    yours: str
    interval: str  # empty where the table has none
    verdict: str


def judge_difference(low: float, high: float, least: float) -> str:
    """The one rule for "more here than there": certainly too small to count, certainly not, or neither."""
    if high < least:
        return ABSENT
    return APPEARS if low >= least else UNCLEAR


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f}%".replace("-", "−")


def points(low: float, high: float) -> str:
    return f"{100 * low:+.1f} to {100 * high:+.1f} points".replace("-", "−")


def span(low: float, high: float) -> str:
    return f"{percent(low)} to {percent(high)}"


def decimal(value: float) -> str:
    """Two significant digits, without an exponent as long as nobody has to count zeros."""
    if value and abs(value) < 1e-6:
        return np.format_float_scientific(value, precision=1, trim="-", exp_digits=1)
    return np.format_float_positional(value, precision=2, fractional=False, trim="-")
