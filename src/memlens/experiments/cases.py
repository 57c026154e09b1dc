"""Cases (Figure 11): how often a layer's output has the token of the residual, of the block, of both, or of neither."""

from typing import TYPE_CHECKING

from memlens.experiments import experiment as ex
from memlens.stats import wilson
from memlens.text import percent

if TYPE_CHECKING:
    from memlens.experiments.prefix_pass import Aggregate

CASES = ("residual", "agreement", "composition", "ffn", "reversal")
HUES = {"residual": "c1", "composition": "c2", "agreement": "c3", "ffn": "c4", "reversal": "c5"}
SCHEMA = ex.schema(
    "layer:int32 prefixes:int64 residual:int64 ffn:int64 agreement:int64 composition:int64 reversal:int64"
)


def compute(seen: "Aggregate", seed: int) -> list[ex.Row]:
    """Counts, layer by layer; the five cases sum to the prefixes."""
    from memlens.models.lens import split_cases

    rows = []
    for layer, columns in seen.by_layer():
        r, y, o = columns["residual_token"], columns["ffn_token"], columns["output_token"]
        counts = {case: int(holds.sum()) for case, holds in split_cases(r, y, o).items()}
        rows.append({"layer": layer, "prefixes": len(o), **counts})
    return rows


def published() -> list[ex.Row]:
    counts = ex.paper_figures()["fig11_counts_of_4000"]
    cases = ("residual", "ffn", "agreement", "composition")
    return [
        {"layer": layer} | {case: counts[case][layer] for case in cases} | {"reversal": 0}
        for layer in range(ex.PAPER_LAYERS)
    ]


def draw(rows: list[ex.Row], model: ex.ModelShape) -> list[ex.Panel]:
    from memlens.experiments.charts import PAPER, YOURS, stacked_panel

    both = (("cases", YOURS, rows, model.layers), ("cases-paper", PAPER, published(), ex.PAPER_LAYERS))
    return [
        stacked_panel(name, own, "case", HUES, whose, layers, f"How {whose} combines residual and layer, by depth")
        for name, whose, own, layers in both
    ]


def residual_dominates(evidence: ex.Evidence) -> ex.Judgement:
    totals = [sum(int(row[case]) for case in CASES) for row in evidence.rows]
    if not sum(totals):
        return ex.NOT_MEASURED
    share = sum(row["residual"] for row in evidence.rows) / sum(totals)
    low, high = wilson(share * max(totals), max(totals))  # the same prefixes in every layer: they count once
    return ex.Judgement(f"{percent(share)} over all layers", ex.as_span(low, high), ex.judge_share(low, high, 0.5))


def changes_are_compositions(evidence: ex.Evidence) -> ex.Judgement:
    composition, ffn = (sum(row[case] for row in evidence.rows) for case in ("composition", "ffn"))
    changes = composition + ffn
    if not changes:
        return ex.Judgement("no prefix changes its prediction", "", ex.UNCLEAR)
    share, sample = composition / changes, changes / len(evidence.rows)
    low, high = wilson(share * sample, sample)
    yours = f"{percent(share)} of {changes:,} changes"
    return ex.Judgement(yours, ex.as_span(low, high), ex.judge_share(low, high, 0.8))


EXPERIMENT = ex.prefix_experiment(
    "cases",
    "Figure 11",
    "Whose token a layer's output has",
    ex.ResultTable(
        "cases",
        SCHEMA,
        compute,
        question="Who decides, the residual or the layer?",
        lead="Bars add up to all sampled prefixes of a layer.",
        how="By top tokens of residual r, layer output y and their sum o; r and o are read as predictions, y as the "
        "values are that it is a sum of. Residual: o is r’s, not y’s. Ffn: o is y’s, not r’s. Agreement: all three "
        "the same. Composition: o is neither’s. Reversal: r and y agree, and o is another; impossible where all logits "
        "are linear, possible with a final norm’s bias, so it is counted and not hidden.",
        draw=draw,
        published=published,
        contract=("layer", *CASES),
    ),
    claims=(
        ex.Claim(
            "residual",
            "Most layers leave the residual’s prediction as it is",
            "82% over all layers",
            "Share of “residual” among all cases of all layers; an interval as if each prefix were seen once. Appears "
            "if it lies above one half; does not if it lies below.",
            residual_dominates,
        ),
        ex.Claim(
            "changes",
            "Where a layer changes the prediction, it is a compromise, not the layer’s own",
            "98.5% of changes",
            "Share of “composition” among “composition” and “ffn”; an interval from an average layer's number of "
            "changes. Appears if it lies above four fifths; does not if it lies below.",
            changes_are_compositions,
        ),
    ),
    picture=ex.Picture(
        tuple(ex.Column(case, case) for case in CASES),
        {case: case for case in CASES},
        lambda rows: [ex.part_shares(row, CASES) for row in rows],
    ),
)
