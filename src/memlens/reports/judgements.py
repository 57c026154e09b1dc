"""What a claim is judged from, what comes out, and how numbers are put there.

Knows tables as rows and the three verdicts; no claim.

One small function a claim of the paper: from the tables to a verdict. The rules in words are in claims.

A function is called only if the table it looks at is there; layers may still be missing from it, or have no numbers
because nothing in them took part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memlens.reports.charts import depth, in_third
from memlens.stats import difference_of, mean_of, share_difference, wilson
from memlens.text import percent

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


def points(low: float, high: float) -> str:
    return f"{100 * low:+.1f} to {100 * high:+.1f} points".replace("-", "−")


def span(low: float, high: float) -> str:
    return f"{percent(low)} to {percent(high)}"


def decimal(value: float) -> str:
    """Two significant digits, without an exponent as long as nobody has to count zeros."""
    if value and abs(value) < 1e-6:
        return np.format_float_scientific(value, precision=1, trim="-", exp_digits=1)
    return np.format_float_positional(value, precision=2, fractional=False, trim="-")


JudgementsRow = dict[str, Any]

_INTERVAL, _QUARTILES = ("change", "low", "high"), ("q1", "median", "q3")
_NOT_MEASURED = Finding("the layers that would show it were not measured, or not enough", "", UNCLEAR)
FEWEST = 6  # observations; of fewer, a median has no 95% interval: they lie on one side of it more than once in 20


def last_token_matters_most(evidence: Evidence) -> Finding:
    by_layer: dict[int, dict[str, JudgementsRow]] = {}
    for row in _known(evidence["local-edits"], _INTERVAL, "memories"):
        by_layer.setdefault(row["layer"], {})[row["edit"]] = row
    whole = [edits for edits in by_layer.values() if {"first", "last", "random"} <= edits.keys()]
    if not whole:
        return _NOT_MEASURED
    apart = sum(all(_is_above(edits[edit], edits["last"]) for edit in ("first", "random")) for edits in whole)
    lowest = sum(edits["last"]["change"] < min(edits["first"]["change"], edits["random"]["change"]) for edits in whole)
    verdict = APPEARS if apart >= 0.9 * len(whole) else ABSENT if lowest < 0.5 * len(whole) else UNCLEAR
    return Finding(f"largest drop in {lowest} of {len(whole)} layers", f"beyond doubt in {apart}", verdict)


def _is_above(edit: JudgementsRow, last: JudgementsRow) -> bool:
    """Is the change surely less of a drop, for the same memories? Without that difference: are the intervals apart?"""
    paired = edit.get("beside_last_low")
    return bool(last["high"] < edit["low"] if paired is None else paired > 0)


def last_token_matters_less_with_depth(evidence: Evidence) -> Finding:
    ends = []
    for which in ("upper", "lower"):
        known = _known(evidence.third("local-edits", which), _INTERVAL, "memories")
        rows = [row for row in known if row["edit"] == "last"]
        if not rows:
            return _NOT_MEASURED
        ends.append(mean_of([(row["change"], row["low"], row["high"]) for row in rows]))
    _, low, high = difference_of(ends[0], ends[1])
    yours = f"{percent(ends[1][0])} in the lower third, {percent(ends[0][0])} in the upper"
    return Finding(yours, points(low, high), judge_difference(low, high, least=0.05))


def agreement_rises(evidence: Evidence) -> Finding:
    upper, lower = (evidence.third("agreement", which) for which in ("upper", "lower"))
    if not upper or not lower:
        return _NOT_MEASURED
    agree, memories, low_agree, low_memories = (
        sum(row[column] for row in rows) for rows in (upper, lower) for column in ("agree", "memories")
    )
    if not memories or not low_memories:
        return _NOT_MEASURED
    low, high = share_difference(agree, memories, low_agree, low_memories)
    yours = f"{percent(low_agree / low_memories, 2)} in the lower third, {percent(agree / memories, 2)} in the upper"
    return Finding(yours, points(low, high), judge_difference(low, high, least=0.005))


def rank_improves(evidence: Evidence) -> Finding:
    upper, lower = (_known(evidence.third("rank", which), ("median",), "memories") for which in ("upper", "lower"))
    if not upper or not lower:
        return _NOT_MEASURED
    above, below = (sum(row["median"] for row in rows) / len(rows) for rows in (upper, lower))
    yours = f"median {below:,.0f} in the lower third, {above:,.0f} in the upper"
    if not all(row.get("low") is not None and row.get("high") is not None for row in upper + lower):
        verdict = APPEARS if above <= 0.9 * below else ABSENT if above >= below else UNCLEAR
        return Finding(yours, "", verdict)
    ends = [mean_of([(row["median"], row["low"], row["high"]) for row in rows]) for rows in (lower, upper)]
    _, low, high = difference_of(ends[0], ends[1])
    return Finding(
        yours,
        f"better by {low:,.0f} to {high:,.0f} places".replace("-", "−"),
        judge_difference(low, high, least=0.1 * below),
    )


_CONFIDENT_FROM = 0.625  # layers 10 to 15 of the paper's 16 are those deeper than this


def confident_values_sit_high(evidence: Evidence) -> Finding:
    rows = evidence["predictive-values"]
    high_layers = [layer for layer in evidence.memories if depth(layer, evidence.layers) > _CONFIDENT_FROM]
    if not rows or not high_layers or len(high_layers) == len(evidence.memories):
        return _NOT_MEASURED
    expected = sum(evidence.memories[layer] for layer in high_layers) / sum(evidence.memories.values())
    found = sum(row["layer"] in high_layers for row in rows)
    low, high = wilson(found, len(rows))
    bar = max(0.5, expected)
    verdict = APPEARS if low > bar else ABSENT if high < bar or found / len(rows) <= expected else UNCLEAR
    return Finding(f"{found} of {len(rows)} (evenly spread: {percent(expected, 0)})", span(low, high), verdict)


def confident_values_predict(evidence: Evidence) -> Finding:
    rows = evidence["predictive-values"]
    if not rows:
        return _NOT_MEASURED
    agree = sum(bool(row.get("agrees", (row["precision"] or 0) > 0)) for row in rows)
    low, high = wilson(agree, len(rows))
    known = all(row.get("chance") is not None for row in rows)  # the paper does not say what chance gives
    chance = sum(row["chance"] for row in rows) / len(rows) if known else 0.0
    bar = max(0.25, chance)
    verdict = APPEARS if low > bar else ABSENT if high < bar or agree / len(rows) <= chance else UNCLEAR
    by_chance = f" (by chance: {chance * len(rows):.1f})" if known else ""
    return Finding(f"{agree} of {len(rows)}{by_chance}", span(low, high), verdict)


def few_memories_are_active(evidence: Evidence) -> Finding:
    medians = [row["median"] for row in _known(evidence["active"], ("median",), "prefixes")]
    if not medians:
        return _NOT_MEASURED
    inside = sum(0.1 <= median <= 0.5 for median in medians)
    verdict = APPEARS if inside >= 0.9 * len(medians) else ABSENT if inside < 0.5 * len(medians) else UNCLEAR
    yours = f"medians from {percent(min(medians), 0)} to {percent(max(medians), 0)}"
    return Finding(yours, f"inside in {inside} of {len(medians)} layers", verdict)


def active_drops_towards_the_middle(evidence: Evidence) -> Finding:
    middle, lower = (_known(evidence.third("active", which), _QUARTILES, "prefixes") for which in ("middle", "lower"))
    if not middle or not lower:
        return _NOT_MEASURED
    mean = {
        (name, column): sum(row[column] for row in rows) / len(rows)
        for name, rows in (("middle", middle), ("lower", lower))
        for column in ("q1", "median", "q3")
    }
    if mean["middle", "median"] >= mean["lower", "median"]:
        verdict = ABSENT
    else:
        verdict = APPEARS if mean["middle", "q3"] < mean["lower", "q1"] else UNCLEAR
    yours = f"{percent(mean['lower', 'median'])} in the lower third, {percent(mean['middle', 'median'])} in the middle"
    quartiles = f"middle half {span(mean['lower', 'q1'], mean['lower', 'q3'])}, then "
    return Finding(yours, quartiles + span(mean["middle", "q1"], mean["middle", "q3"]), verdict)


def outputs_are_compositions(evidence: Evidence) -> Finding:
    rows = [row for row in evidence["composition"] if row["prefixes"]]
    if not rows:
        return _NOT_MEASURED
    intervals = [wilson(row["zero"], row["prefixes"]) for row in rows]
    shares = [row["zero"] / row["prefixes"] for row in rows]
    least = shares.index(min(shares))
    if any(high < 0.68 for _, high in intervals):
        verdict = ABSENT
    else:
        verdict = APPEARS if all(low > 0.5 for low, _ in intervals) else UNCLEAR
    return Finding(f"least {percent(shares[least])}, in layer {rows[least]['layer']}", span(*intervals[least]), verdict)


def predictions_settle(evidence: Evidence) -> Finding:
    ends = _ends([row for row in evidence["refinement"] if row["prefixes"]], evidence.layers)
    if ends is None:
        return _NOT_MEASURED
    first, last = ends
    low, high = last.get("gain_low"), last.get("gain_high")  # of the same prefixes, from the first layer on
    if low is None or high is None:
        low, high = share_difference(last["match"], last["prefixes"], first["match"], first["prefixes"])
    yours = f"{percent(first['match'] / first['prefixes'])} → {percent(last['match'] / last['prefixes'])}"
    return Finding(yours, points(low, high), judge_difference(low, high, least=0.1))


def last_residual_knows_the_token(evidence: Evidence) -> Finding:
    rows = [row for row in evidence["refinement"] if row["layer"] == evidence.layers - 1 and row["prefixes"]]
    if not rows:
        return _NOT_MEASURED
    low, high = wilson(rows[0]["match"], rows[0]["prefixes"])
    verdict = APPEARS if low > 0.5 else ABSENT if high < 0.5 else UNCLEAR
    return Finding(percent(rows[0]["match"] / rows[0]["prefixes"]), span(low, high), verdict)


def confidence_grows(evidence: Evidence) -> Finding:
    ends = _ends(_known(evidence["confidence"], _QUARTILES, "prefixes"), evidence.layers)
    if ends is None:
        return _NOT_MEASURED
    first, last = ends
    surely = last["median"] > first["q3"]
    verdict = ABSENT if last["median"] <= first["median"] else APPEARS if surely else UNCLEAR
    return Finding(
        f"median {decimal(first['median'])} → {decimal(last['median'])}",
        f"middle half {decimal(first['q1'])} to {decimal(first['q3'])}, "
        f"then {decimal(last['q1'])} to {decimal(last['q3'])}",
        verdict,
    )


def residual_dominates(evidence: Evidence) -> Finding:
    rows = evidence["cases"]
    sample, total = _sample(rows), sum(_prefixes(row) for row in rows)
    if not total:
        return _NOT_MEASURED
    share = sum(row["residual"] for row in rows) / total
    low, high = wilson(share * sample, sample)  # the same prefixes in every layer: they count once
    verdict = APPEARS if low > 0.5 else ABSENT if high < 0.5 else UNCLEAR
    return Finding(f"{percent(share)} over all layers", span(low, high), verdict)


def changes_are_compositions(evidence: Evidence) -> Finding:
    rows = evidence["cases"]
    composition, ffn = (sum(row[case] for row in rows) for case in ("composition", "ffn"))
    changes = composition + ffn
    if not changes:
        return Finding("no prefix changes its prediction", "", UNCLEAR)
    share, sample = composition / changes, changes / len(rows)
    low, high = wilson(share * sample, sample)
    verdict = APPEARS if low > 0.8 else ABSENT if high < 0.8 else UNCLEAR
    return Finding(f"{percent(share)} of {changes:,} changes", span(low, high), verdict)


def shallow_below_semantic_above(evidence: Evidence) -> Finding:
    ends = {}
    for which in ("lower", "upper"):
        rows = evidence.third("patterns", which)
        shallow, semantic = (sum(row[kind] for row in rows) for kind in ("shallow", "semantic"))
        sample = sum(row.get("patterned_memories", 10) for row in rows)
        if not shallow + semantic:
            return _NOT_MEASURED
        ends[which] = (shallow / (shallow + semantic), sample)
    (below, many_below), (above, many_above) = ends["lower"], ends["upper"]
    low, high = share_difference(below * many_below, many_below, above * many_above, many_above)
    yours = f"{percent(below, 0)} shallow in the lower third, {percent(above, 0)} in the upper"
    return Finding(yours, points(low, high), judge_difference(low, high, least=0.1))


def _known(rows: list[JudgementsRow], columns: Sequence[str], observed: str) -> list[JudgementsRow]:
    """The rows that have numbers there, of enough observations where their number is known (the paper's is not)."""
    enough = [row for row in rows if row.get(observed) is None or row[observed] >= FEWEST]
    return [row for row in enough if all(row[column] is not None for column in columns)]


def _ends(rows: list[JudgementsRow], layers: int) -> tuple[JudgementsRow, JudgementsRow] | None:
    """The model's first and last layer; None unless there are two and both were measured."""
    by_layer = {int(row["layer"]): row for row in rows}
    if layers < 2 or not {0, layers - 1} <= by_layer.keys():
        return None
    return by_layer[0], by_layer[layers - 1]


def _prefixes(row: JudgementsRow) -> int:
    return sum(int(row[case]) for case in ("residual", "ffn", "agreement", "composition", "reversal"))


def _sample(rows: list[JudgementsRow]) -> int:
    return max((_prefixes(row) for row in rows), default=0)
