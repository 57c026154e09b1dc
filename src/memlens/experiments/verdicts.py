"""Verdicts: what a claim of the paper is, the evidence it is judged by, and the rules that claims share.

A claim has a direction (does the interval of a difference exclude 0?), a size, which stands beside the published one,
and sometimes a crossover; each is judged apart. Claims over layers are judged by the slope over relative depth, layer 0
left out and shown by itself. "Every layer" uses intervals that hold for all layers at once.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from memlens.stats import Estimate, contrast, slope_weights
from memlens.text import percent

Row = dict[str, Any]

APPEARS, PARTLY, ABSENT, UNCLEAR = "appears", "appears in part", "does not appear", "cannot tell"
NOT_APPLICABLE = "not applicable"
VERDICTS = (APPEARS, PARTLY, ABSENT, UNCLEAR, NOT_APPLICABLE)
THIRDS = ("lower", "middle", "upper")  # of the stack
FEWEST = 6  # observations; of fewer, a median has no 95% interval: they lie on one side of it more than once in 20
_SMALL = 0.1  # of the published size


def depth(layer: int, layers: int) -> float:
    """Relative depth: the middle of the layer's part of the stack, so that models of any depth share one axis."""
    return round((layer + 0.5) / layers, 6)


def third(layer: int, layers: int) -> str:
    """The third of the stack in which the middle of the layer lies."""
    return THIRDS[min(int(3 * (layer + 0.5) / layers), 2)]


def in_third(rows: Iterable[Row], which: str, layers: int) -> list[Row]:
    return [row for row in rows if third(row["layer"], layers) == which]


def estimate_of(row: Row, column: str, low: str = "low", high: str = "high") -> Estimate | None:
    """A number of a row with its interval; None where it was measured without one, as of too few observations.

    The paper's rows have no columns for intervals: there the number stands alone.
    """
    value = row.get(column)
    below, above = (row.get(name, value) for name in (low, high))
    return None if value is None or below is None or above is None else Estimate(value, below, above)


@dataclass(frozen=True)
class Evidence:
    """The rows of the table that a claim is judged by, the paper's own rows, and what the model is."""

    rows: list[Row]
    layers: int  # of the model
    memories: Mapping[int, int]  # by scanned layer
    published: list[Row] = field(default_factory=list)
    published_layers: int = 16
    rests_at_zero: bool = True  # is a memory silent at 0, as with ReLU, so that m > 0 means active?

    def third(self, which: str) -> list[Row]:
        return in_third(self.rows, which, self.layers)

    @property
    def theirs(self) -> "Evidence":
        """The paper's own rows as evidence."""
        return Evidence(self.published, self.published_layers, dict.fromkeys(range(self.published_layers), 4096))

    def trend(self, column: str, low: str = "low", high: str = "high") -> Estimate | None:
        """Slope over relative depth of a number per layer, without layer 0; None where layers span half of it or less.

        As the rows note it where layers were seen on the same prefixes, else from numbers of different memories.
        """
        known = {
            row["layer"]: estimate
            for row in self.rows
            if row["layer"] and (estimate := estimate_of(row, column, low, high))
        }
        if len(known) < 2 or max(known) - min(known) <= (self.layers - 2) / 2:
            return None
        if "trend" in self.rows[0]:
            return estimate_of(self.rows[0], "trend", "trend_low", "trend_high")
        weights = slope_weights([depth(layer, self.layers) for layer in known])
        return contrast(weights, list(known.values()))

    def first(self, column: str) -> float | None:
        """The number of layer 0."""
        value: float | None = next((row.get(column) for row in self.rows if row["layer"] == 0), None)
        return value


@dataclass(frozen=True)
class Judgement:
    """The verdict of a table on a claim."""

    yours: str
    interval: str  # empty where the table has none
    verdict: str
    reason: str = ""  # one sentence

    def and_also(self, words: str) -> "Judgement":
        """The same judgement with these words added to its reason."""
        return replace(self, reason=f"{self.reason.removesuffix('.')}; {words}.")


NOT_MEASURED = Judgement(
    "not measured", "", UNCLEAR, "The layers that would show it were not measured, or not with enough observations."
)


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, the numbers it rests on, and how it is judged here.

    The rules were chosen with the paper's curves in view: every claim must appear for them.
    """

    slug: str
    text: str
    published: str
    rule: str
    judge: Callable[[Evidence], Judgement]
    table: str = ""  # which of the experiment's tables is judged; its first by default


@dataclass(frozen=True)
class JudgedClaim:
    """A claim with what the experiment's table says about it; None where the table is missing."""

    claim: Claim
    experiment: str
    figure: str
    judgement: Judgement | None

    @property
    def record(self) -> Row:
        """The claim and its judgement as one flat record for JSON."""
        judgement = self.judgement
        columns = {name: getattr(judgement, name) for name in ("verdict", "yours", "interval", "reason")}
        return {"claim": self.claim.slug, "text": self.claim.text, "published": self.claim.published, **columns}


RULE_OF_TRENDS = (
    "Slope over relative depth from layer 1 on; layer 0 is shown by itself. Appears if the slope’s 95% interval lies "
    "on the claimed side of 0, in part if it ends below a tenth of the published slope; does not appear if it lies on "
    "the other side, or ends below that tenth. Layers that span half of the depth or less show no trend."
)


def direction(estimate: Estimate, published: float) -> str:
    """The rule for "more here than there"; `estimate` and `published` are positive in the direction of the claim."""
    small = estimate.high < _SMALL * published
    if estimate.low > 0:
        return PARTLY if small else APPEARS
    return ABSENT if estimate.high <= 0 or small else UNCLEAR


_DIRECTIONS = {
    APPEARS: "the interval lies on the claimed side of 0",
    PARTLY: "the direction is the paper’s, but the size is less than a tenth of the published one",
    ABSENT: "nothing in the claimed direction can be seen",
    UNCLEAR: "the interval holds 0, and more than a tenth of the published size",
}


def judge_trend(
    yours: Estimate | None,
    theirs: Estimate | None,
    sign: int,
    write: Callable[[float], str],
    first: str,
    crossover: tuple[bool, str] | None = None,  # does it happen, and the words for it
    where: str = "over the depth",
) -> Judgement:
    """A slope or difference against the paper's; sign says which way the paper's goes."""
    if yours is None or theirs is None:
        return NOT_MEASURED
    verdict = direction(yours.times(sign), sign * theirs.value)
    reason = f"{where.capitalize()} {_DIRECTIONS[verdict]} ({write(yours.value)} here, {write(theirs.value)} published)"
    if crossover is not None:
        happens, words = crossover
        reason += f"; {words}"
        verdict = PARTLY if verdict == APPEARS and not happens else verdict
    return Judgement(
        f"{write(yours.value)} {where}",
        f"{write(yours.low)} to {write(yours.high)}",
        verdict,
        f"{reason}; layer 0 by itself: {first}.",
    )


def share_verdict(low: float, high: float, bar: float) -> str:
    """The one rule for "more than": the interval above the bar, below it, or across."""
    return APPEARS if low > bar else ABSENT if high < bar else UNCLEAR


def judge_share(share: Estimate | None, bar: float, bar_is: str, published: float | None, yours: str) -> Judgement:
    """A share against a bar, with the published share beside it."""
    if share is None:
        return NOT_MEASURED
    verdict = share_verdict(share.low, share.high, bar)
    where = {APPEARS: "lies above", ABSENT: "lies below", UNCLEAR: "holds"}[verdict]
    beside = f"; here {percent(share.value)}" + ("" if published is None else f", published {percent(published)}")
    return Judgement(
        yours,
        as_span(share.low, share.high),
        verdict,
        f"The interval {where} {bar_is} ({percent(bar)}){beside}.",
    )


def judge_size(estimate: Estimate | None, published: float, write: Callable[[float], str], what: str) -> Judgement:
    """A number against the published one: alike where the interval lies within its half and its double."""
    if estimate is None:
        return NOT_MEASURED
    half, double = published / 2, 2 * published
    inside = half <= estimate.low and estimate.high <= double
    outside = estimate.high < half or estimate.low > double
    verdict = APPEARS if inside else ABSENT if outside else UNCLEAR
    where = "within" if inside else "outside" if outside else "partly within"
    return Judgement(
        f"{write(estimate.value)} {what}",
        f"{write(estimate.low)} to {write(estimate.high)}",
        verdict,
        f"The interval lies {where} half and double the published {write(published)}; here {write(estimate.value)}.",
    )


RULE_OF_SIZES = (
    "Appears if the 95% interval lies within half and double the published size; does not if it lies outside."
)


def mean_of(estimates: Sequence[Estimate]) -> Estimate:
    """The mean of independent estimates, with its interval."""
    return contrast([1 / len(estimates)] * len(estimates), estimates)


def pooled(rows: Sequence[Row], hits: str, of: str) -> tuple[int, int]:
    """Counts of all rows together."""
    return sum(row[hits] for row in rows), sum(row[of] for row in rows)


def as_points(share: float) -> str:
    return f"{100 * share:+.3g} points".replace("-", "−")


def as_span(low: float, high: float) -> str:
    return f"{percent(low)} to {percent(high)}"
