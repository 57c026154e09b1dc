"""Predictive values (Figure 6 and Table 2): confident values and the tokens that follow their triggers.

Table 2 has the values with the highest max p and their Precision@50: the share of a memory's top 50 triggers (or
fewer, if the scan stored fewer) whose next token is the value's top token. Triggers at the end of a sentence are
excluded, and so are memories that have only such triggers. A value agrees if at least one trigger matches.
`chance` is the probability of agreement if the triggers were followed by tokens drawn at random from all next tokens of
the layer: 1 - (1 - f)^n for n triggers and a share f of the value's top token among these tokens. A value is confident
if its max p is at least twice the probability of a token in a uniform distribution (`times_uniform`).

Figure 6 has the agreement with the top-1 trigger in bins of max p. The bins have equal width on a logarithmic scale,
because max p spans orders of magnitude in most models. If the index was made with a preset of the paper, the scale is
linear as in the paper. The highest bins may hold few memories, so the claim is judged by `auroc`: how well max p
separates agreeing memories from the rest. For `auroc_shuffled`, a memory agrees if its value's top token is the target
of the next memory of its layer.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from memlens.experiments import experiment as ex
from memlens.experiments.agreement import read_targets
from memlens.index.reader import Index
from memlens.progress import Progress, no_progress
from memlens.stats import Estimate, roc_area, roc_estimate, wilson
from memlens.text import curve, number, percent, plain_table, quoted

_CONFIDENT_FROM = 0.625  # relative depth from which layers count as upper: layers 10 to 15 of the paper's 16
_SHOWN = 10
TRIGGERS, BINS = 50, 8
_CONFIDENT = 2  # minimum max p of a confident value, in multiples of a uniform probability

SCHEMA = ex.schema(
    "layer:int32 memory:int32 max_p:float32 times_uniform:float32 token:int32",  # token: the value's top token
    "precision agrees:bool",
    "triggers:int64 no_next:int64",  # number of triggers with a next token; number of triggers without one
    "chance precision_chance",  # expected agreement and precision by chance
)
BINS_SCHEMA = ex.schema(
    "bin:int32 from_p to_p memories:int64 agree:int64 rate low high",
    "auroc auroc_low auroc_high auroc_shuffled",  # AUROC of max p over all memories; equal in all rows
)


def compute(
    index: Index, model: Any = None, *, seed: int = 0, sample: int | None = 100, progress: Progress = no_progress
) -> list[ex.Row]:
    """Return the `sample` most confident values, or all values, sorted by max p (largest first), layer and memory."""
    table = pa.concat_tables(
        [_precisions(index, layer) for layer in ex.layers_of(index, "predictive-values", progress)]
    )
    order = np.argsort(-table.column("max_p").to_numpy(), kind="stable")  # ties stay in the order of layer and memory
    rows: list[ex.Row] = table.take(order if sample is None else order[:sample]).to_pylist()
    return rows


def _precisions(index: Index, layer: int) -> pa.Table:
    """Return the rows of all candidates in a layer."""
    from memlens.vocab.table import read_next_tokens

    values = index.table("values", ["max_p", "argmax"], [("layer", "=", layer)])
    max_p, argmax = values.column("max_p").to_numpy(), values.column("argmax").to_numpy()  # sorted by memory
    following = read_next_tokens(index, layer)
    next_tokens = following.tokens[:, :TRIGGERS]
    counts = (next_tokens >= 0).sum(1)
    matches = (next_tokens == argmax[:, None]).sum(1)
    shares = _shares(next_tokens, argmax)
    memories = np.flatnonzero(counts)
    triggers = np.minimum(following.filled, TRIGGERS)
    return pa.table(
        {
            "layer": np.full(len(memories), layer),
            "memory": memories,
            "max_p": max_p[memories],
            "times_uniform": max_p[memories] * np.float32(index.manifest.value_tokens),
            "token": argmax[memories],
            "precision": matches[memories] / counts[memories],
            "agrees": matches[memories] > 0,
            "triggers": counts[memories],
            "no_next": (triggers - counts)[memories],
            "chance": (1 - (1 - shares) ** counts)[memories],
            "precision_chance": shares[memories],
        },
        SCHEMA,
    )


def _shares(next_tokens: NDArray[Any], argmax: NDArray[Any]) -> NDArray[np.float64]:
    """Return how frequent the top token of each memory's value is among the layer's next tokens, as a share.

    `next_tokens` is [memories, triggers].
    """
    tokens = next_tokens[next_tokens >= 0].astype(np.int64)
    times = np.bincount(tokens, minlength=int(argmax.max(initial=-1)) + 1)
    shares: NDArray[np.float64] = times[argmax] / max(len(tokens), 1)
    return shares


def compute_bins(
    index: Index, model: Any = None, *, seed: int = 0, sample: int | None = None, progress: Progress = no_progress
) -> list[ex.Row]:
    """Return one row per bin of max p with the agreement of all memories that have a target. Ignores `sample`."""
    from memlens.vocab.table import default_reading

    targets = [read_targets(index, layer) for layer in index.layers]
    max_p = np.concatenate([layer.max_p for layer in targets]).astype(np.float64)
    agrees = np.concatenate([layer.agrees for layer in targets])
    if not len(max_p):
        return []
    edges = bin_edges(max_p, logarithmic=default_reading(index) != "raw")
    numbers = np.clip(np.searchsorted(edges, max_p, side="right") - 1, 0, BINS - 1)
    shuffled = np.concatenate([layer.argmax == np.roll(layer.target, -1) for layer in targets])
    area = roc_estimate(max_p[agrees], max_p[~agrees]) if agrees.any() and not agrees.all() else None
    aurocs = ex.estimate_columns("auroc", area) | {"auroc_shuffled": roc_area(max_p[shuffled], max_p[~shuffled])}
    return [_bin(number, edges, agrees[numbers == number]) | aurocs for number in range(BINS)]


def bin_edges(max_p: NDArray[np.float64], logarithmic: bool) -> NDArray[np.float64]:
    """Return BINS + 1 edges. A bin includes its lower edge, and the last bin also includes its upper edge."""
    space = np.geomspace if logarithmic else np.linspace
    return np.asarray(space(max_p.min(), max_p.max(), BINS + 1), np.float64)


def _bin(number: int, edges: NDArray[np.float64], agrees: NDArray[np.bool_]) -> ex.Row:
    count, agree = len(agrees), int(agrees.sum())
    row = {"bin": number, "from_p": edges[number], "to_p": edges[number + 1], "memories": count, "agree": agree}
    return row | ex.share_columns(agree, count)


def published_bins() -> list[ex.Row]:
    bins = ex.paper_figures()["fig6"]
    return [{"max_p": float(edge), "rate": rate} for edge, rate in zip(bins["bin"], bins["agreement"], strict=True)]


def draw(rows: list[ex.Row], model: ex.ModelShape) -> list[ex.Panel]:
    """Plot the number of confident values by layer."""
    from memlens.experiments import charts

    where = Counter(row["layer"] for row in rows)
    points = [{"layer": layer, "value": times} for layer, times in sorted(where.items())]
    title = f"of the {len(rows)} most confident values"
    chart = charts.bars(charts.with_depth(points, model.layers), title, ",", model.layers)
    return [charts.panel("predictive-values", chart, "Number of the most confident values, by depth", points, "value")]


def draw_bins(rows: list[ex.Row], model: ex.ModelShape) -> list[ex.Panel]:
    """Plot agreement against the value's confidence."""
    import altair as alt

    from memlens.experiments import charts

    filled = [row | {"max_p": (row["from_p"] * row["to_p"]) ** 0.5} for row in rows if row["rate"] is not None]
    both = [
        {"whose": whose, "depth": row["max_p"], "value": row["rate"]}
        | {name: row.get(name) for name in ("max_p", "low", "high")}
        for whose, bins in ((charts.YOURS, filled), (charts.PAPER, published_bins()))
        for row in bins
    ]
    axis = alt.X(
        "max_p:Q",
        title="highest probability in the value, max p",
        scale=alt.Scale(type="log", nice=False),
        axis=alt.Axis(format=".0~e", values=charts.LOG_TICKS, labelOverlap="greedy", labelSeparation=8),
    )
    chart = charts.curves(both, "share of memories that agree", ".0%", model.layers, x=axis)
    return [charts.panel("predictive-values-bins", chart, "Agreement by the value's confidence")]


def print_values(index: Index, tables: ex.Rows, width: int, origin: str) -> tuple[str, list[Any]]:
    """Return a line about the sample, and the values by layer, the agreement by confidence and some examples."""
    from rich.table import Table
    from rich.text import Text

    rows, bins = tables["predictive-values"], tables["predictive-values-bins"]
    summary = f"the {len(rows):,} most confident of {sum(row['memories'] for row in bins):,} values with a target"
    if rows:
        summary += f"; max p up to {rows[0]['times_uniform']:.3g} times uniform"
        summary += f"; mean precision {percent(sum(row['precision'] for row in rows) / len(rows))}"
        summary += f", {sum(row['agrees'] for row in rows):,} agree with a trigger"
        summary += f" (by chance: {sum(row['chance'] for row in rows):,.1f})"
    where = Counter(row["layer"] for row in rows)
    curves = Table.grid(padding=(0, 2, 0, 0))
    counts = [float(where[layer]) for layer in index.layers]
    curves.add_row("by layer", Text(curve(counts), "cyan"), Text(f"maximum {max(counts):,.0f}", "dim"))
    rates = [row["rate"] for row in bins]
    if bins:
        range_ = f"agreement for max p {number(bins[0]['from_p'])} to {number(bins[-1]['to_p'])}, up to "
        range_ += percent(max(rate for rate in rates if rate is not None))
        curves.add_row("by confidence", Text(curve(rates), "cyan"), Text(range_, "dim"))
    table = plain_table(["memory", "token", ">p", ">precision", ">triggers", "agrees"])
    for row in rows[:_SHOWN]:
        table.add_row(
            Text(str(index.names.name(row["layer"], row["memory"])), "bold"),
            Text(quoted(index.vocabulary[row["token"]], 20), "cyan"),
            number(row["max_p"]),
            percent(row["precision"]),
            str(row["triggers"]),
            Text("yes", "green") if row["agrees"] else Text("no"),
        )
    return summary, [curves, table]


def confident_values_sit_high(evidence: ex.Evidence) -> ex.Judgement:
    rows, memories = evidence.rows, evidence.memories
    high_layers = [layer for layer in memories if ex.depth(layer, evidence.layers) > _CONFIDENT_FROM]
    if not rows or not high_layers or len(high_layers) == len(memories):
        return ex.NOT_MEASURED
    expected = sum(memories[layer] for layer in high_layers) / sum(memories.values())
    count = sum(row["layer"] in high_layers for row in rows)
    first = sum(row["layer"] == 0 for row in rows)
    share = Estimate(count / len(rows), *wilson(count, len(rows)))
    published = ex.paper_statement("confident_in_upper_layers")
    judged = ex.judge_share(share, expected, "an even distribution over layers", published, f"{count} of {len(rows)}")
    return _if_confident(judged.and_also(f"layer 0: {first}"), rows)


def _if_confident(judged: ex.Judgement, rows: list[ex.Row]) -> ex.Judgement:
    """Add the largest max p to the reason. If even this max p is nearly uniform, the claim does not appear."""
    most = max((row["times_uniform"] for row in rows if row.get("times_uniform") is not None), default=None)
    if most is None:
        return judged
    judged = judged.and_also(f"the largest max p is {most:.3g} times that of a uniform distribution")
    if most >= _CONFIDENT:
        return judged
    return replace(judged, verdict=ex.ABSENT).and_also(f"no value is confident (at least {_CONFIDENT} times)")


def confident_values_predict(evidence: ex.Evidence) -> ex.Judgement:
    rows = evidence.rows
    if not rows:
        return ex.NOT_MEASURED
    agree = sum(bool(row.get("agrees", (row["precision"] or 0) > 0)) for row in rows)
    share = Estimate(agree / len(rows), *wilson(agree, len(rows)))
    chance = sum(row.get("chance") or 0 for row in rows) / len(rows)
    published = ex.paper_statement("confident_and_agreeing")
    judged = ex.judge_share(share, chance, "the chance level", published, f"{agree} of {len(rows)}")
    precision = sum(row["precision"] or 0 for row in rows) / len(rows)
    by_chance = sum(row.get("precision_chance") or 0 for row in rows) / len(rows)
    judged = judged.and_also(f"mean precision {percent(precision)}, expected by chance: {percent(by_chance)}")
    return _if_confident(replace(judged, measure=share.minus(chance)), rows)


def confidence_brings_agreement(evidence: ex.Evidence) -> ex.Judgement:
    rows = evidence.rows
    agree, memories = ex.pooled(rows, "agree", "memories") if rows and "agree" in rows[0] else (0, 0)
    area = ex.prefix_estimate(rows, "auroc")
    if area is None or agree < ex.FEWEST:
        return ex.NOT_MEASURED
    chance = max(rows[0]["auroc_shuffled"] or 0.5, 0.5)
    verdict = ex.share_verdict(area.low, area.high, chance)
    where = {ex.APPEARS: "above", ex.ABSENT: "below", ex.UNCLEAR: "on both sides of"}[verdict]
    return ex.Judgement(
        f"AUROC {area.value:.2f}, {agree:,} of {memories:,} agree",
        f"{area.low:.2f} to {area.high:.2f}",
        verdict,
        f"The AUROC measures how well max p separates memories that agree from others. Its interval lies {where} "
        f"{chance:.2f}, the larger of one half and the AUROC with shuffled targets. The paper reports only bins: "
        f"{' and '.join(percent(row['rate']) for row in (evidence.published[0], evidence.published[-1]))} in the "
        "lowest and in the highest.",
        area,
    )


EXPERIMENT = ex.Experiment(
    "predictive-values",
    "Figure 6 and Table 2",
    "The most confident values, and agreement by confidence",
    (
        ex.ResultTable(
            "predictive-values",
            SCHEMA,
            compute,
            question="Where are the most confident values?",
            lead="The hundred values with the highest max p, by layer. In the paper, 97 of them are in layers 10 to "
            "15.",
            how="Values are ordered by max p(v). Precision is the share of a memory’s top triggers whose next token is "
            "the top token of its value. A value agrees if at least one trigger matches. Chance is the probability of "
            "agreement if the triggers were followed by random tokens from among all next tokens of the layer: "
            "1 − (1 − f)ⁿ for n triggers and a share f of the value’s top token.",
            figure="Table 2",
            draw=draw,
        ),
        ex.ResultTable(
            "predictive-values-bins",
            BINS_SCHEMA,
            compute_bins,
            question="Do confident values agree more often?",
            lead="Agreement of all memories by the confidence of their value.",
            how="Memories are grouped into bins by max p(v). The chart shows the share of memories in each bin whose "
            "value’s top token follows their top trigger. The AUROC measures how well max p separates these memories "
            "from the others. Shuffled: the AUROC with the target of the next memory of the layer.",
            figure="Figure 6",
            draw=draw_bins,
            published=published_bins,
            command="memlens experiment INDEX predictive-values",
        ),
    ),
    sample_of="most confident values",
    sample=100,
    needs=("values",),
    claims=(
        ex.Claim(
            "confident-values",
            "The most confident values are in the upper layers",
            "97 of 100 in layers 10–15",
            "Share of the most confident values that are deeper than 0.625 of the layers (10–15 of the paper’s 16). "
            "The claim appears if the Wilson interval lies above the share of an even distribution over layers. It "
            f"does not appear if the interval lies below, or if no value is confident (max p at least {_CONFIDENT} "
            "times that of a uniform distribution).",
            confident_values_sit_high,
            write=percent,
            published_measure=ex.paper_statement("confident_in_upper_layers"),
        ),
        ex.Claim(
            "predictive-values",
            "Confident values predict the next token of their triggers",
            "46 of 100",
            "Share of the most confident values whose top token follows at least one of their triggers. For the chance "
            "level, triggers are followed by random tokens from among all next tokens of the layer. The claim appears "
            "if the Wilson interval lies above the chance level. It does not appear if the interval lies below, or if "
            f"no value is confident (max p at least {_CONFIDENT} times that of a uniform distribution).",
            confident_values_predict,
        ),
        ex.Claim(
            "confidence-agreement",
            "Agreement grows with the value’s largest probability",
            "0.2% in the lowest bin of max p, 100% in the highest",
            "AUROC: how well max p separates memories that agree from others. The claim appears if DeLong’s interval "
            "lies above one half and above the AUROC for shuffled targets, and does not appear if it lies below. The "
            "bins are only drawn, because the highest ones hold few memories. At least "
            f"{ex.FEWEST} memories must agree.",
            confidence_brings_agreement,
            table="predictive-values-bins",
            write=lambda area: f"AUROC {area:.2f}",
        ),
    ),
    terminal=print_values,
)
