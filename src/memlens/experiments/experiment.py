"""Experiment: a question of the paper with its tables, charts, terminal output, claims and published numbers.

An experiment is one module of this package that ends in `EXPERIMENT = Experiment(...)`, plus one name in run.MODULES.
The command line, the report and the workbench read everything else from that object. Lookups import these modules, so
they import torch, numba and Altair only inside the functions that compute or draw.

The file has three parts: claims and verdicts, the Experiment object, and helpers that several experiments share.

A claim has a direction and a size. The direction is judged by whether the interval of a difference excludes 0. The size
is shown next to the published size. A trend over layers is judged by its slope over relative depth. The upper third of
the layers is also compared with the other layers, as the slope of a line would hide a reversal. Layer 0 is left out of
trends and shown separately. Claims about every layer use intervals that hold for all layers at once. A share that the
paper states is judged by equivalence with a margin.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memlens.errors import IndexFolderError
from memlens.index.format import EXPERIMENTS as FOLDER
from memlens.index.reader import Index
from memlens.memory import KINDS, MemoryNames
from memlens.progress import Progress
from memlens.stats import Estimate, Z, contrast, mean_estimate, median_interval, share_interval, slope_weights
from memlens.text import number, percent

Row = dict[str, Any]

APPEARS, PARTLY, ABSENT, UNCLEAR = "appears", "appears in part", "does not appear", "cannot tell"
SAME, UNCOMPARED = "same as shuffled network", "not compared with a shuffled network"
NOT_APPLICABLE, NOT_JUDGED = "not applicable", "shown without a verdict"
UNTESTED = (NOT_APPLICABLE, NOT_JUDGED)  # verdicts on claims that were not tested
VERDICTS = (APPEARS, PARTLY, SAME, ABSENT, UNCLEAR, UNCOMPARED, *UNTESTED)
SHUFFLED = "shuffled"  # name of the table with the claims in shuffled networks
THIRDS = ("lower", "middle", "upper")  # thirds of the layers by depth
FEWEST = 6  # minimum number of observations: the median of five or fewer has no 95% interval
_SMALL = 0.1  # a size below this share of the published size counts as small


def depth(layer: int, layers: int) -> float:
    """Return the relative depth of the middle of a layer, so that models of any depth share one axis."""
    return round((layer + 0.5) / layers, 6)


def third(layer: int, layers: int) -> str:
    """Return the third of the layers that contains the middle of this layer."""
    return THIRDS[min(int(3 * (layer + 0.5) / layers), 2)]


def in_third(rows: Iterable[Row], which: str, layers: int) -> list[Row]:
    return [row for row in rows if third(row["layer"], layers) == which]


def estimate_of(row: Row, column: str, low: str = "low", high: str = "high") -> Estimate | None:
    """Return a number of a row with its interval, or None if there were too few observations for an interval.

    The paper's rows have no columns for intervals. The number itself then serves as both ends of its interval.
    """
    value = row.get(column)
    below, above = (row.get(name, value) for name in (low, high))
    return None if value is None or below is None or above is None else Estimate(value, below, above)


@dataclass(frozen=True)
class Evidence:
    """The rows of the table that a claim is judged on, the paper's rows, and facts about the model."""

    rows: list[Row]
    layers: int  # number of layers of the model
    memories: Mapping[int, int]  # layer -> number of memories
    published: list[Row] = field(default_factory=list)
    published_layers: int = 16
    rests_at_zero: bool = True  # True if inactive memories have m = 0, as with ReLU

    @property
    def theirs(self) -> "Evidence":
        """Evidence for the same claim, with the paper's rows as the measured rows."""
        return Evidence(self.published, self.published_layers, dict.fromkeys(range(self.published_layers), 4096))

    def trend(self, column: str, low: str = "low", high: str = "high") -> "Trend | None":
        """Return the trend of a number over depth without layer 0.

        Returns None if the measured layers span half of the depth or less. If the rows contain a slope, it is used,
        because it is paired over prefixes. Otherwise, a slope is fitted to the layers as independent observations.
        """
        by_layer = {
            row["layer"]: estimate
            for row in self.rows
            if row["layer"] and (estimate := estimate_of(row, column, low, high))
        }
        if len(by_layer) < 2 or max(by_layer) - min(by_layer) <= (self.layers - 2) / 2:
            return None
        estimates = list(by_layer.values())
        weights = slope_weights([depth(layer, self.layers) for layer in by_layer])
        slope: Estimate | None = contrast(weights, estimates)
        if "trend" in self.rows[0]:
            slope = estimate_of(self.rows[0], "trend", "trend_low", "trend_high")
        first, last = min(by_layer), max(by_layer)
        change = contrast((1, -1), (by_layer[last], by_layer[first]))
        upper = [layer for layer in by_layer if third(layer, self.layers) == "upper"]
        rise = None
        if 0 < len(upper) < len(by_layer):
            weights = [1 / len(upper) if layer in upper else -1 / (len(by_layer) - len(upper)) for layer in by_layer]
            rise = contrast(weights, estimates)
        return None if slope is None else Trend(slope, change, rise, first, last, self.layers)

    def first(self, column: str) -> float | None:
        """Return the value of a column in layer 0, or None."""
        value: float | None = next((row.get(column) for row in self.rows if row["layer"] == 0), None)
        return value


@dataclass(frozen=True)
class Trend:
    """The slope of a number over relative depth, and its value in the last layer minus that in the first (not layer 0).

    `rise` is the mean of the upper third of the layers minus the mean of the other layers, or None if either group is
    empty.
    """

    slope: Estimate
    change: Estimate
    rise: Estimate | None
    first: int
    last: int
    layers: int


@dataclass(frozen=True)
class Judgement:
    """The verdict on a claim, with the numbers behind it."""

    yours: str  # the measured number, as text
    interval: str  # interval of the measured number, as text; empty if the table has no interval
    verdict: str
    reason: str = ""  # reason in full sentences
    measure: Estimate | None = None  # the judged number, which is also compared with shuffled networks
    shuffled: str = ""  # the number in shuffled networks, as text; empty if it was not measured
    shuffled_value: float | None = None  # the number in shuffled networks, averaged over networks

    def and_also(self, words: str) -> "Judgement":
        """Return this judgement with more text at the end of its reason."""
        return replace(self, reason=f"{self.reason.removesuffix('.')}; {words}.")


def as_points(share: float) -> str:
    return f"{100 * share:+.3g} points".replace("-", "−")


def as_points_per_layer(share: float) -> str:
    return f"{as_points(share)} per layer"


def write_span(estimate: Estimate, write: Callable[[float], str] = as_points) -> str:
    """Return the interval of an estimate as text that states the unit only once."""
    low, high = write(estimate.low), write(estimate.high)
    _, space, unit = high.partition(" ")
    return f"{low.removesuffix(space + unit)} to {high}"


NOT_MEASURED = Judgement(
    "not measured", "", UNCLEAR, "The layers of this claim were not measured, or they have too few observations."
)


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, the published numbers, and the rule by which the statement is judged.

    The rules were chosen so that the paper's own numbers show every claim.
    """

    slug: str
    text: str
    published: str
    rule: str
    judge: Callable[[Evidence], Judgement]
    table: str = ""  # the table to judge; the experiment's first table by default
    sign: int = 1  # 1 if the claim is that the measure is large, -1 if the claim is that it is small
    write: Callable[[float], str] = as_points  # formats the measure
    target: float | None = None  # the share that the claim states; None if the claim states only a direction
    is_compared: bool = True  # False if the claim cannot be measured in shuffled networks
    curve: str = ""  # column whose curve in the experiment's picture shows the claim
    published_measure: float | None = None  # the paper's measure, if it does not follow from the published rows


@dataclass(frozen=True)
class JudgedClaim:
    """A claim and its judgement. The judgement is None if the table is missing."""

    claim: Claim
    experiment: str
    figure: str
    judgement: Judgement | None
    published: float | None = None  # the measure in the paper; None if the paper has no such number

    @property
    def record(self) -> Row:
        """The claim and its judgement as a flat record for JSON."""
        judgement = self.judgement
        columns = {name: getattr(judgement, name) for name in ("verdict", "yours", "interval", "shuffled", "reason")}
        return {"claim": self.claim.slug, "text": self.claim.text, "published": self.claim.published, **columns}


def compare_with_shuffled(claim: Claim, judged: Judgement, rows: Sequence[Row]) -> Judgement:
    """Compare a claim with shuffled networks. `rows` are the rows of the table SHUFFLED for this claim.

    A claim that satisfies its rule appears only if its number exceeds that of the shuffled networks. If it does not
    exceed theirs, and the trained network shows no difference from 0 on the compared text, the text is too short to
    tell.
    """
    estimates = [estimate for row in rows if (estimate := estimate_of(row, "value"))]
    trained = estimate_of(rows[0], "trained", "trained_low", "trained_high") if rows else None
    if estimates:
        shuffled = join_networks(estimates)
        judged = replace(judged, shuffled=claim.write(shuffled.value), shuffled_value=shuffled.value)
    if judged.verdict not in (APPEARS, PARTLY) or not claim.is_compared:
        return judged
    if not estimates or trained is None:
        problem = "no shuffled network was measured (run `memlens experiment INDEX shuffled`)"
        return replace(judged, verdict=UNCOMPARED).and_also(f"{judged.verdict} by the rule, but {problem}")
    here, there = claim.write(trained.value), write_span(shuffled, claim.write)
    is_beyond = exceeds(claim, trained, shuffled).low > 0
    verdict, relation = (judged.verdict, "beyond") if is_beyond else (SAME, "not beyond")
    networks = f"{len(estimates)} shuffled networks ({there})"
    reason = f"on the text of the comparison it is {here}, {relation} the range of {networks}"
    if verdict == SAME and claim.target is None and trained.times(claim.sign).low <= 0:
        verdict = UNCLEAR
        reason += f"; this text of {rows[0]['tokens']:,} tokens is too short to show the claim"
    return replace(judged, verdict=verdict).and_also(reason)


def join_networks(estimates: Sequence[Estimate]) -> Estimate:
    """Return the mean over networks, with prediction bounds for one more network.

    One more network lies below the lower bound in 5% of cases, and above the upper bound in 5%. The variation between
    networks is the variance of their numbers minus the part that the errors of the estimates explain. The bounds
    include the error of the mean, but not the error of the additional network.
    """
    count = len(estimates)
    values = np.array([estimate.value for estimate in estimates])
    below = float(np.mean([(estimate.value - estimate.low) ** 2 for estimate in estimates]))
    above = float(np.mean([(estimate.high - estimate.value) ** 2 for estimate in estimates]))
    mean, spread = float(values.mean()), 0.0
    if count > 1:
        from scipy.special import stdtrit

        variance = max(float(values.var(ddof=1)) - (below + above) / 2 / Z**2, 0.0)
        spread = float(stdtrit(count - 1, 0.95)) ** 2 * variance * (1 + 1 / count)
    return Estimate(mean, mean - (below / count + spread) ** 0.5, mean + (above / count + spread) ** 0.5)


def exceeds(claim: Claim, trained: Estimate, shuffled: Estimate) -> Estimate:
    """Return how far the trained network exceeds the shuffled networks in the direction of the claim.

    For a claim that states a share, return how much closer the trained network is to this share.
    """
    if claim.target is None:
        return contrast((1, -1), (trained, shuffled)).times(claim.sign)
    return contrast((-1, 1), [_distance(estimate, claim.target) for estimate in (trained, shuffled)])


def _distance(estimate: Estimate, target: float) -> Estimate:
    """Return the distance between an estimate and a target, with the interval of the distance."""
    low, high = sorted(abs(edge - target) for edge in (estimate.low, estimate.high))
    is_inside = estimate.low <= target <= estimate.high
    return Estimate(abs(estimate.value - target), 0.0 if is_inside else low, high)


RULE_OF_TRENDS = (
    "The slope is taken over relative depth from layer 1 on. Layer 0 is shown separately. The claim appears if the 95% "
    "interval of the slope lies on the claimed side of 0, and in part if this interval ends below a tenth of the "
    "published slope. It does not appear if the interval lies on the other side of 0, or if it contains 0 and ends "
    "below that tenth. It also does not appear if the upper third of the layers changes in the other direction, which "
    "a line through all layers would hide. No trend is measured if the scanned layers span half of the depth or less."
)


def direction(estimate: Estimate, published: float) -> str:
    """Return the verdict on a difference. `estimate` and `published` are positive in the direction of the claim."""
    small = estimate.high < _SMALL * published
    if estimate.low > 0:
        return PARTLY if small else APPEARS
    return ABSENT if estimate.high <= 0 or small else UNCLEAR


DIRECTIONS = {
    APPEARS: "lies on the claimed side of 0",
    PARTLY: "lies on the claimed side of 0, but below a tenth of the published size",
    ABSENT: "excludes a tenth of the published size in the claimed direction",
    UNCLEAR: "contains 0 and a tenth of the published size",
}


def judge_trend(
    yours: Trend | None,
    theirs: Trend | None,
    sign: int,
    first: str,
    step: tuple[bool, str] | None = None,
) -> Judgement:
    """Judge a measured slope by comparison with the published slope.

    The judgement shows the number in the last layer minus that in the first, and the slope per layer, because a slope
    over the whole depth may exceed the range of a share. Both have intervals.

    Args:
        yours: The measured trend.
        theirs: The trend of the paper's numbers.
        sign: The published direction, 1 or -1.
        first: Text that describes layer 0.
        step: Whether an additional condition holds, and its description. If it fails, the claim appears only in part.
    """
    if yours is None or theirs is None:
        return NOT_MEASURED
    verdict = direction(yours.slope.times(sign), sign * theirs.slope.value)
    here, published = as_points(yours.change.value), as_points(theirs.change.value)
    reason = f"The 95% interval of the slope {DIRECTIONS[verdict]} ({here} here, {published} published)"
    if verdict in (APPEARS, PARTLY) and yours.rise is not None and yours.rise.times(sign).high < 0:
        verdict = ABSENT
        rise = f"{as_points(yours.rise.value)}, {write_span(yours.rise)}"
        reason += f", but the upper third of the layers differs from the others in the opposite direction ({rise})"
    if step is not None:
        holds, description = step
        reason += f"; {description}"
        verdict = PARTLY if verdict == APPEARS and not holds else verdict
    per_layer = yours.slope.times(1 / yours.layers)
    return Judgement(
        f"{here} from layer {yours.first} to {yours.last}",
        f"{write_span(yours.change)}; {write_span(per_layer, as_points_per_layer)}",
        verdict,
        f"{reason}; layer 0: {first}.",
        per_layer,
    )


def judge_difference(yours: Estimate | None, theirs: Estimate | None, sign: int, first: str, what: str) -> Judgement:
    """Judge a measured difference by comparison with the published difference.

    `sign` is the published direction, and `first` is text that describes layer 0.
    """
    if yours is None or theirs is None:
        return NOT_MEASURED
    verdict = direction(yours.times(sign), sign * theirs.value)
    here, published = as_points(yours.value), as_points(theirs.value)
    return Judgement(
        f"{here} {what}",
        write_span(yours),
        verdict,
        f"The 95% interval of the difference {DIRECTIONS[verdict]} ({here} here, {published} published); "
        f"layer 0: {first}.",
        yours,
    )


def share_verdict(low: float, high: float, bar: float) -> str:
    """Return the verdict on the claim that a number exceeds a bar, given the ends of its interval."""
    return APPEARS if low > bar else ABSENT if high < bar else UNCLEAR


def judge_share(share: Estimate | None, bar: float, bar_is: str, published: float | None, yours: str) -> Judgement:
    """Judge whether a share exceeds `bar`, and mention the published share. `bar_is` describes the bar."""
    if share is None:
        return NOT_MEASURED
    verdict = share_verdict(share.low, share.high, bar)
    where = {APPEARS: "lies above", ABSENT: "lies below", UNCLEAR: "contains"}[verdict]
    beside = f"; here {percent(share.value)}" + ("" if published is None else f", published {percent(published)}")
    return Judgement(
        yours,
        as_span(share.low, share.high),
        verdict,
        f"The interval {where} {bar_is} ({percent(bar)}){beside}.",
        share,
    )


def judge_equivalence(estimate: Estimate | None, published: float, margin: float, what: str) -> Judgement:
    """Judge whether a share equals a published share: its interval must lie within `margin` of the published share."""
    if estimate is None:
        return NOT_MEASURED
    least, most = published - margin, published + margin
    if least <= estimate.low and estimate.high <= most:
        verdict, where = APPEARS, "within"
    elif estimate.high < least or estimate.low > most:
        verdict, where = ABSENT, "below" if estimate.high < least else "above"
    elif least <= estimate.value <= most:
        verdict, where = UNCLEAR, "partly within"
    else:
        verdict, where = UNCLEAR, "partly below" if estimate.value < least else "partly above"
    return Judgement(
        f"{percent(estimate.value)} {what}",
        as_span(estimate.low, estimate.high),
        verdict,
        f"The interval lies {where} {as_span(least, most)}, the published {percent(published)} with a margin of "
        f"{100 * margin:.0f} points; here {percent(estimate.value)}.",
        estimate,
    )


def mean_of(estimates: Sequence[Estimate]) -> Estimate:
    """Return the mean of independent estimates, with its interval."""
    return contrast([1 / len(estimates)] * len(estimates), estimates)


def pooled(rows: Sequence[Row], hits: str, of: str) -> tuple[int, int]:
    """Return the sums of two columns over all rows."""
    return sum(row[hits] for row in rows), sum(row[of] for row in rows)


def as_span(low: float, high: float) -> str:
    return f"{percent(low)} to {percent(high)}"


Write = Callable[[Any], str]
Rows = Mapping[str, Sequence[Row]]  # the rows of an experiment's tables by name

KEYS, LAYERS = "What memories hold", "How memories add up"  # titles of the two parts of the report
SAMPLE = 4000  # default number of prefixes
PAPER_LAYERS, PAPER_MEMORIES = 16, 4096
BEND = depth(9, PAPER_LAYERS)  # relative depth of layer 9, from which the paper's curve of predictions is steeper
PAPER_HEAD = 20_000  # tokens in the head of the paper's adaptive softmax; targets of flat values are all in it
QUARTILES = ("q1", "median", "q3")


@dataclass(frozen=True)
class ModelShape:
    """The sizes of the model and the names of its memories, for charts."""

    layers: int
    vocabulary: int
    names: MemoryNames

    @classmethod
    def of(cls, index: Index) -> "ModelShape":
        return cls(len(index.manifest.model.memories), index.manifest.model.vocabulary, index.names)


@dataclass(frozen=True)
class Panel:
    """One chart of a figure."""

    name: str  # base name of the chart's files
    alt: str  # text alternative
    spec: dict[str, Any]  # Vega-Lite, in the colors of the page


@dataclass(frozen=True, eq=False)
class ResultTable:
    """One table of an experiment, and the text of its section in the report."""

    name: str
    schema: pa.Schema
    # called with (index, model, *, seed, sample, progress), or with (tables, seed) if the experiment is on prefixes
    compute: Callable[..., list[Row]]
    question: str
    lead: str  # tells readers what to look for
    how: str  # explains how the numbers are computed
    figure: str = ""  # figure in the paper; by default, that of the experiment
    draw: Callable[[list[Row], ModelShape], list[Panel]] | None = None
    published: Callable[[], list[Row]] = list  # returns the numbers of the paper in the same form
    command: str = ""  # command that makes the table, if it is not `memlens experiment`
    by_people: bool = False  # True if the table stays empty until people have annotated memories
    below: str = ""  # sentence below the charts
    note: Callable[[Index, list[Row]], tuple[str, str] | None] | None = None  # returns a label and a sentence

    def read(self, index: Index) -> pa.Table | None:
        """Return this table of an index, or None if it was not computed.

        Raises:
            IndexFolderError: The table is damaged or does not fit the index (see `read_table`).
        """
        return read_table(index, f"{FOLDER}/{self.name}", self.schema)


def read_table(index: Index, name: str, schema: pa.Schema) -> pa.Table | None:
    """Return the table of an experiment, or None if it was not computed.

    Raises:
        IndexFolderError: The file is damaged, a column is missing, or a row refers to a layer, memory or token that the
            index does not have. A valid checksum does not exclude this, because the author of a table also writes its
            checksum.
    """
    if not index.has(name):
        return None
    table = index.table(name)
    if problem := _find_problem(table, schema, index):
        advice = f"compute it again with `memlens experiment {index.folder} all`"
        raise IndexFolderError(f"{index.folder / name}.parquet does not fit the index ({problem}); {advice}")
    return table


def _find_problem(table: pa.Table, schema: pa.Schema, index: Index) -> str:
    """Describe a missing column, or a layer, memory or token that does not exist. Returns "" if all is well."""
    for column in schema:
        if column.name not in table.column_names or table.schema.field(column.name).type != column.type:
            return f"it has no column '{column.name}' of type {column.type}"
    for name in {"layer", "memory"} & {*schema.names}:
        if table.column(name).null_count:
            return f"its column '{name}' has missing values"
    for layer in pc.unique(table.column("layer")).to_pylist() if "layer" in schema.names else ():
        if layer not in index.layers:
            return f"it refers to layer {layer}, which was not scanned"
        if "memory" in schema.names:
            memories = table.filter(pc.equal(table.column("layer"), layer)).column("memory")
            for memory in pc.min_max(memories).as_py().values():
                if memory not in range(index.memories(layer)):
                    return f"it refers to memory {memory} of layer {layer}, which does not exist"
    for name in {"token", "final_token", "residual_token"} & {*schema.names}:  # shown as text
        for token in pc.min_max(table.column(name)).as_py().values():
            if token is not None and token not in range(index.manifest.model.vocabulary):
                return f"it refers to token {token}, which does not exist"
    return ""


def count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def signed(share: float | None) -> str:
    return "–" if share is None else f"{share:+.0%}"


def short(value: float | None) -> str:
    return "–" if value is None else number(value)


@dataclass(frozen=True)
class Column:
    """One column of the terminal output: a number, and its interval if it has one."""

    head: str
    name: str
    write: Write = percent
    interval: tuple[str, str] | None = None  # names of the columns that hold the ends of the interval

    def cell(self, row: Row) -> str:
        return self.write(row[self.name])

    def span(self, row: Row) -> str:
        low, high = (row[name] for name in self.interval or ())
        if low is None or high is None:
            return "–"
        # a single percent sign for both ends leaves room for three intervals on one line
        return f"{self.write(low).removesuffix('%')} to {self.write(high)}"


@dataclass(frozen=True)
class Picture:
    """The terminal output of an experiment whose table has one row per layer."""

    columns: tuple[Column, ...]
    curves: Mapping[str, str]  # column -> label
    by_layer: Callable[[Sequence[Row]], list[Row]] = list  # converts the table to one row per layer
    remark: Callable[[Index], str] | None = None  # returns a text to show next to the sample size
    below: Callable[[Rows], list[Any]] | None = None  # returns what to print below the picture, from the other tables

    def headline(self, rows: Sequence[Row]) -> list[tuple[str, list[float | None], Write]]:
        """Return a label, the numbers by layer and the number format of each curve."""
        writes = {column.name: column.write for column in self.columns}
        layers = self.by_layer(rows)
        return [(label, [row.get(name) for row in layers], writes[name]) for name, label in self.curves.items()]


@dataclass(frozen=True, eq=False)
class Experiment:
    """One experiment of the paper."""

    name: str
    figure: str  # figure or table in the paper
    title: str
    tables: tuple[ResultTable, ...]  # the first one has the experiment's name; claims are judged on it by default
    sample_of: str = "memories per layer"  # what `sample` counts
    sample: int | None = None  # default sample size; None for all
    needs: tuple[str, ...] = ()  # tables that the index must have
    uses_model: bool = False
    maps: bool = False  # True if `compute` takes a pool on which it runs the model
    tokens_run: int = 0  # approximate number of tokens to run per sampled memory
    last_layer: bool = False  # True if the model's last layer must have been scanned
    people: str = ""  # kind of annotations that the experiment reads (see annotations/records.py)
    claims: tuple[Claim, ...] = ()
    picture: Picture | None = None  # an experiment has either `picture` or `terminal`
    # called with the index, the rows by table, the width of the terminal and a description of the
    # prefixes; returns a line about the sample and a list of renderables for rich
    terminal: Callable[[Index, Rows, int, str], tuple[str, list[Any]]] | None = None

    @property
    def on_prefixes(self) -> bool:
        """Whether the experiment is computed from the pass over sampled prefixes."""
        return self.sample_of == "prefixes"

    @property
    def part(self) -> str:
        """The part of the report that contains the experiment."""
        return LAYERS if self.on_prefixes else KEYS

    def figure_of(self, table: ResultTable) -> str:
        """Return the paper's figure or table that `table` repeats, or "" if the experiment is not in the paper."""
        return table.figure or (self.figure if self.figure.startswith(("Figure", "Section")) else "")

    @property
    def table_names(self) -> tuple[str, ...]:
        return tuple(table.name for table in self.tables)

    def judge(self, index: Index, rows: Callable[[str], list[Row] | None]) -> list[JudgedClaim]:
        """Judge the claims, and compare them with shuffled networks if the index has the table SHUFFLED.

        `rows` returns the rows of a table, or None if it is missing.
        """
        from memlens.experiments.shuffled import SCHEMA

        networks = read_table(index, f"{FOLDER}/{SHUFFLED}", SCHEMA) if self.claims else None
        measured = [] if networks is None else networks.to_pylist()
        claims = []
        for judged in self.judge_rules(index, rows):
            if judged.judgement is not None:
                shuffled = [row for row in measured if row["claim"] == judged.claim.slug]
                judged = replace(judged, judgement=compare_with_shuffled(judged.claim, judged.judgement, shuffled))
            claims.append(judged)
        return claims

    def judge_rules(self, index: Index, rows: Callable[[str], list[Row] | None]) -> list[JudgedClaim]:
        """Judge the claims by their rules alone, without shuffled networks."""
        model = index.manifest.model
        memories = {layer: index.memories(layer) for layer in index.layers}
        at_zero = not model.gated and (model.activation or "relu").startswith("relu")
        judged = []
        for claim in self.claims:
            table = next(table for table in self.tables if table.name == (claim.table or self.name))
            table_rows = rows(table.name)
            evidence = Evidence(
                table_rows or [], len(model.memories), memories, table.published(), PAPER_LAYERS, at_zero
            )
            judgement = None if table_rows is None else claim.judge(evidence)
            published = claim.published_measure
            if published is None and evidence.published:
                measure = claim.judge(replace(evidence.theirs, published=evidence.published)).measure
                published = None if measure is None else measure.value
            judged.append(JudgedClaim(claim, self.name, self.figure_of(table), judgement, published))
        return judged

    def charts(self, index: Index) -> list[Any]:
        """Draw the experiment's tables of an index for a notebook. Returns Altair charts."""
        from memlens.experiments.style import notebook_chart

        panels: list[Panel] = []
        for table in self.tables:
            content = table.read(index)
            if table.draw and content is not None and content.num_rows:
                panels += table.draw(content.to_pylist(), ModelShape.of(index))
        return [notebook_chart(panel.spec) for panel in panels]

    def obstacle(self, index: Index) -> str | None:
        """Return the reason why the experiment cannot run on this index, with advice, or None if it can run."""
        for table in self.needs:
            try:
                index.path(table)
            except IndexFolderError as error:
                return str(error)
        last = len(index.manifest.model.memories) - 1
        if self.last_layer and last not in index.layers:
            return f"the model's last layer, {last}, was not scanned into {index.folder}; scan with it in --layers"
        return None


def schema(*groups: str) -> pa.Schema:
    """Return a schema from column names separated by spaces.

    `name:type` gives a type, and `name:[type]` is a list. A column without a type is float64.
    """

    def column(text: str) -> tuple[str, pa.DataType]:
        name, _, kind = text.partition(":")
        plain = pa.type_for_alias(kind.strip("[]") or "float64")
        return name, pa.list_(plain) if kind.startswith("[") else plain

    return pa.schema([column(text) for group in groups for text in group.split()])


def prefix_experiment(name: str, figure: str, title: str, table: ResultTable, **rest: Any) -> Experiment:
    """Return an experiment with one table that is computed from the pass over sampled prefixes."""
    return Experiment(
        name, figure, title, (table,), sample_of="prefixes", sample=SAMPLE, needs=("values",), uses_model=True, **rest
    )


def layers_of(index: Index, name: str, progress: Progress) -> Iterator[int]:
    """Yield the scanned layers and report progress."""
    for done, layer in enumerate(index.layers):
        progress(name, done, len(index.layers))
        yield layer
    progress(name, len(index.layers), len(index.layers))


@cache
def paper_figures() -> dict[str, Any]:
    """Return the numbers in the paper's figures, which were read from its vector graphics. Layers count from 0."""
    text = files("memlens.experiments").joinpath("published_figures.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


def paper_statement(name: str) -> float:
    """Return a number that the paper states only in its text."""
    return float(paper_figures()["stated"][name])


def paper_quartiles(figure: str, unit: float = 1) -> list[Row]:
    columns = paper_figures()[figure]
    return [{"layer": n} | {name: columns[name][n] * unit for name in QUARTILES} for n in range(PAPER_LAYERS)]


def quartiles(numbers: Any) -> dict[str, float]:
    """Return q1, median and q3, interpolated linearly."""
    return dict(zip(QUARTILES, np.percentile(numbers, [25, 50, 75]).tolist(), strict=True))


def quartile_columns(numbers: Any) -> Row:
    """Return q1, median and q3, and the median's interval as low and high. Without numbers, all columns are None."""
    low, high = median_interval(numbers)
    return {**(quartiles(numbers) if len(numbers) else dict.fromkeys(QUARTILES)), "low": low, "high": high}


def share_columns(hits: int, count: int, columns: Sequence[str] = ("rate", "low", "high")) -> Row:
    """Return the share hits / count and its Wilson interval as columns. If count is 0, all columns are None."""
    share = hits / count if count else None
    return dict(zip(columns, (share, *share_interval(hits, count)), strict=True))


def part_shares(row: Row, parts: Sequence[str]) -> Row:
    """Return the row with the counts in `parts` replaced by their shares of the sum of these counts."""
    total = sum(row[part] for part in parts)
    return row | {part: row[part] / total if total else None for part in parts}


def estimate_columns(name: str, estimate: tuple[float, float | None, float | None] | None) -> Row:
    """Return a number and its interval as three columns."""
    value, low, high = estimate or (None, None, None)
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def prefix_trend(matrix: Any, layers: Sequence[int], depths: int, random: np.random.Generator) -> Row:
    """Return the mean slope over relative depth, with its interval, as columns.

    The slope of each prefix is fitted to its numbers in `matrix` [layers, prefixes], from layer 1 on.
    """
    rows = [row for row, layer in enumerate(layers) if layer > 0]
    if len(rows) < 2:
        return estimate_columns("trend", None)
    weights = np.array(slope_weights([depth(layers[row], depths) for row in rows]))
    return estimate_columns("trend", mean_estimate(weights @ np.asarray(matrix, np.float64)[rows], random))


def prefix_estimate(
    rows: Sequence[Row], name: str, otherwise: Callable[[], Estimate | None] = lambda: None
) -> Estimate | None:
    """Return a number that is equal in all rows, with its interval.

    For the paper's rows, which lack this number, return the result of `otherwise`.
    """
    if not rows or name not in rows[0]:
        return otherwise() if rows else None
    return estimate_of(rows[0], name, f"{name}_low", f"{name}_high")


def known_rows(rows: list[Row], columns: Sequence[str], observed: str) -> list[Row]:
    """Return the rows that have these columns and at least FEWEST observations.

    `observed` is the column with the number of observations. The paper's rows lack this column and are always returned.
    """
    enough = [row for row in rows if row.get(observed) is None or row[observed] >= FEWEST]
    return [row for row in enough if all(row[column] is not None for column in columns)]


def rule_of_enough(observed: str) -> str:
    return f" Layers with fewer than {FEWEST} {observed} are excluded."


# The kind of a memory is dense, shared or routed. Most columns describe all memories of a layer. Columns such as
# `routed_rate` describe only the memories of one kind, and they are empty for a model without a router.


def kind_columns(*names: str) -> Iterator[str]:
    """Yield the names of columns, each with every kind of memory as prefix, as in `routed_rate`."""
    return (f"{kind}_{name}" for kind in KINDS for name in names)


def kind_spans(names: MemoryNames, layer: int) -> dict[str, range]:
    """Return the range of memory numbers of each kind in a layer, or {} for a model without a router."""
    if not any(group.kind == "routed" for groups in names.layers.values() for group in groups):
        return {}
    spans: dict[str, range] = {}
    first = 0
    for group in names.layers[layer]:
        last = first + group.count * group.size
        spans[group.kind] = range(spans[group.kind].start if group.kind in spans else first, last)
        first = last
    return spans


def of_kind(kind: str, columns: Mapping[str, object]) -> Row:
    """Return the columns under new names that start with the kind, as in `routed_rate`."""
    return {f"{kind}_{name}": value for name, value in columns.items()}


def draw_kinds(
    name: str, rows: list[Row], column: str, title: str, form: str, text: str, model: ModelShape
) -> list[Panel]:
    """Return a chart with one curve per kind of memory, or no chart for a model without a router."""
    from memlens.experiments import charts

    points = [
        {"whose": charts.YOURS, "layer": row["layer"], "kind": kind, "value": row[f"{kind}_{column}"]}
        | {edge: row.get(f"{kind}_{edge}") for edge in ("low", "high")}
        for row in rows
        for kind in KINDS
        if row.get(f"{kind}_{column}") is not None
    ]
    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in points)]
    if not kinds:
        return []
    chart = charts.grouped_curves(charts.with_depth(points, model.layers), "kind", kinds, title, form, model.layers)
    return [charts.panel(f"{name}-kinds", chart, f"{text}, by kind of memory and depth")]
