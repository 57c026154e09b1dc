"""Which columns of each experiment are drawn on a terminal, and how they are written: a line an experiment.

Knows names of columns; how they are drawn is experiment_picture's matter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memlens.cli.text import number, percent

Row = dict[str, Any]
Write = Callable[[Any], str]


def count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def signed(share: float | None) -> str:
    return "–" if share is None else f"{share:+.0%}"


def logit(value: float | None) -> str:
    return "–" if value is None else f"{value:+.2f}"


def short(value: float | None) -> str:
    return "–" if value is None else number(value)


@dataclass(frozen=True)
class Column:
    """One column of the table: a number, and its interval where there is one."""

    head: str
    name: str
    write: Write = percent
    interval: tuple[str, str] | None = None  # names of the columns that hold its ends

    def cell(self, row: Row) -> str:
        return self.write(row[self.name])

    def span(self, row: Row) -> str:
        low, high = (row[name] for name in self.interval or ())
        if low is None or high is None:
            return "–"
        first = self.write(low)
        # one sign for both ends keeps three intervals on one line
        return f"{first.removesuffix('%')} to {self.write(high)}"


@dataclass(frozen=True)
class Picture:
    """What is drawn of an experiment that has a row a layer."""

    columns: tuple[Column, ...]
    curves: tuple[str, ...]  # columns that are drawn as curves
    used: str  # what took part, as the column that counts it


_RATE = ("low", "high")
_QUARTILES = tuple(Column(name, name) for name in ("q1", "q3"))
_RANK = tuple(Column(name, name, count) for name in ("q1", "q3"))
CASES = ("residual", "agreement", "composition", "ffn", "reversal")
_EDITS = ("first", "last", "random")
KINDS = ("shallow", "semantic", "both", "not_covered")

PICTURES = {
    "agreement": Picture(
        (
            Column("agree", "rate", percent, _RATE),
            Column("shuffled", "shuffled"),
            Column("memories", "memories", count),
        ),
        ("rate",),
        "memories",
    ),
    "rank": Picture(
        (Column("median", "median", count, _RATE), *_RANK, Column("memories", "memories", count)),
        ("median",),
        "memories",
    ),
    "local-edits": Picture(
        tuple(Column(edit, edit, signed, (f"{edit}_low", f"{edit}_high")) for edit in _EDITS),
        _EDITS,
        "memories",
    ),
    "patterns": Picture(
        (
            *(Column(kind, kind, percent, (f"{kind}_low", f"{kind}_high")) for kind in ("shallow", "semantic")),
            Column("both", "both"),
            Column("not covered", "not_covered"),
        ),
        ("shallow", "semantic"),
        "memories",
    ),
    "active": Picture(
        (
            Column("median", "median", percent, _RATE),
            *_QUARTILES,
            Column("effective memories", "effective_median", count),
            Column("of", "memories", count),
        ),
        ("median",),
        "prefixes",
    ),
    "composition": Picture(
        (
            Column("no memory", "rate", percent, _RATE),
            Column("no active one", "rate_active", percent, ("low_active", "high_active")),
        ),
        ("rate", "rate_active"),
        "prefixes",
    ),
    "refinement": Picture((Column("predict it", "rate", percent, _RATE),), ("rate",), "prefixes"),
    "confidence": Picture(
        (Column("median p", "median", short, _RATE), Column("q1", "q1", short), Column("q3", "q3", short),
         Column("median rank", "median_rank", count)),
        ("median",),
        "prefixes",
    ),
    "cases": Picture(tuple(Column(case, case) for case in CASES), CASES, "prefixes"),
    "contributions": Picture(
        (Column("ffn", "ffn_share"), Column("attention", "attention_share"), Column("top 1", "top1_share"),
         Column("top 10", "top10_share"), Column("top 100", "top100_share"),
         Column("ffn logit", "ffn", logit, _RATE)),
        ("ffn_share", "attention_share"),
        "prefixes",
    ),
}  # fmt: skip
