"""The paper's plotted numbers, in the units and column names of memlens' own tables.

Read off the vector figures of the paper (16 layers, ReLU, 65,536 memories, WikiText-103). Shares are fractions here and
layers count from 0, as everywhere in memlens. This module knows the paper's figures only; no index, no chart.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

LAYERS = 16
MEMORIES = 4096  # a layer
VOCABULARY = 267_744
PREFIXES = 4000

Row = dict[str, Any]

PATTERN_KINDS = {"shallow": "shallow", "shallow+semantic": "both", "semantic": "semantic", "not-covered": "not_covered"}


@cache
def figures() -> dict[str, Any]:
    """The figures as they were read off, by name."""
    text = files("memlens.reports").joinpath("published_figures.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


def published(experiment: str) -> list[Row]:
    """The rows that the paper's own model would have in the table of that experiment; empty if it has none."""
    make = _TABLES.get(experiment)
    return make() if make else []


def _agreement() -> list[Row]:
    return [
        {"layer": layer, "memories": MEMORIES, "agree": agree, "rate": agree / MEMORIES}
        for layer, agree in enumerate(figures()["fig4_counts_of_4096"])
    ]


def _patterns() -> list[Row]:
    shares = figures()["fig2_pct"]
    return [
        {"layer": layer} | {ours: shares[theirs][layer] / 100 for theirs, ours in PATTERN_KINDS.items()}
        for layer in range(LAYERS)
    ]


def _local_edits() -> list[Row]:
    return [
        {"layer": layer, "edit": edit, "change": percent / 100}
        for edit in ("first", "last", "random")
        for layer, percent in enumerate(figures()["fig3_pct"][edit])
    ]


def _bins() -> list[Row]:
    bins = figures()["fig6"]
    return [{"max_p": float(edge), "rate": rate} for edge, rate in zip(bins["bin"], bins["agreement"], strict=True)]


def _composition() -> list[Row]:
    # The plotted bars are whole numbers over 4,096, though the text speaks of 4,000 prefixes.
    return [
        {"layer": layer, "prefixes": 4096, "zero": zero, "rate": zero / 4096}
        for layer, zero in enumerate(figures()["fig8_implied_counts"])
    ]


def _refinement() -> list[Row]:
    return [
        {"layer": layer, "prefixes": PREFIXES, "match": match, "rate": match / PREFIXES}
        for layer, match in enumerate(figures()["fig9_counts_of_4000"])
    ]


def _cases() -> list[Row]:
    counts = figures()["fig11_counts_of_4000"]
    cases = ("residual", "ffn", "agreement", "composition")
    return [
        {"layer": layer} | {case: counts[case][layer] for case in cases} | {"reversal": 0} for layer in range(LAYERS)
    ]


def _quartiles(figure: str, unit: float) -> list[Row]:
    columns = figures()[figure]
    return [
        {"layer": layer} | {name: columns[name][layer] * unit for name in ("q1", "median", "q3")}
        for layer in range(LAYERS)
    ]


_TABLES = {
    "patterns": _patterns,
    "local-edits": _local_edits,
    "agreement": _agreement,
    "rank": lambda: _quartiles("fig5_rank", 1),
    "predictive-values-bins": _bins,
    "active": lambda: _quartiles("fig7_pct", 0.01),
    "composition": _composition,
    "refinement": _refinement,
    "confidence": lambda: _quartiles("fig10_prob", 1),
    "cases": _cases,
}
