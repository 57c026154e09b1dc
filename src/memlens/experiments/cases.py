"""Cases (Figure 11): whether a layer's output has the top token of the residual, the block, both or neither."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from memlens.experiments import experiment as ex
from memlens.stats import Estimate, generator, ratio_estimate, wilson
from memlens.text import percent

if TYPE_CHECKING:
    from memlens.experiments.prefix_pass import PrefixTables

_CHANGES = ("composition", "ffn")
CASES = ("residual", "agreement", "composition", "ffn", "reversal")
HUES = {"residual": "c1", "composition": "c2", "agreement": "c3", "ffn": "c4", "reversal": "c5"}
SCHEMA = ex.schema(
    "layer:int32 prefixes:int64 residual:int64 ffn:int64 agreement:int64 composition:int64 reversal:int64",
    # equal in all rows, without layer 0: share of outputs whose top token is that of r; share of compositions among the
    # other outputs
    "kept kept_low kept_high compromises compromises_low compromises_high",
)


def compute(tables: "PrefixTables", seed: int) -> list[ex.Row]:
    """Return one row per layer with the count of each case. The five counts sum to the number of prefixes."""
    from memlens.models.lens import split_cases

    rows: list[ex.Row] = []
    # for each prefix, the number of layers with each case, without layer 0
    times = {case: np.zeros(tables.prefixes.num_rows) for case in CASES}
    for layer, columns in tables.by_layer():
        r, y, o = columns["residual_token"], columns["ffn_token"], columns["output_token"]
        split = split_cases(r, y, o)
        for case, holds in split.items():
            times[case] += holds * (layer > 0)
        rows.append({"layer": layer, "prefixes": len(o), **{case: int(holds.sum()) for case, holds in split.items()}})
    kept, changes = times["residual"] + times["agreement"], times["composition"] + times["ffn"]
    deeper = sum(row["layer"] > 0 for row in rows)
    whole = ratio_estimate(kept, np.full(len(kept), deeper), generator(seed, "cases kept"))
    compromises = ratio_estimate(times["composition"], changes, generator(seed, "cases compromises"))
    every = ex.estimate_columns("kept", whole) | ex.estimate_columns("compromises", compromises)
    return [row | every for row in rows]


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
        stacked_panel(name, cases, "case", HUES, whose, layers, f"Cases of {whose}, by depth")
        for name, whose, cases, layers in both
    ]


def residual_is_left(evidence: ex.Evidence) -> ex.Judgement:
    share, published = (
        _share(source.rows, "kept", ("residual", "agreement"), CASES) for source in (evidence, evidence.theirs)
    )
    if share is None or published is None:
        return ex.NOT_MEASURED
    yours = f"{percent(share.value)} from layer 1 on"
    judged = ex.judge_share(share, 0.5, "one half", published.value, yours)
    return _with_first(judged, evidence, ("residual", "agreement"), CASES)


def changes_are_compositions(evidence: ex.Evidence) -> ex.Judgement:
    changes = sum(row[case] for row in evidence.rows for case in _CHANGES if row["layer"])
    if evidence.rows and not changes:
        return ex.Judgement("no prefix changes its prediction", "", ex.UNCLEAR, "No layer changes a prediction.")
    both = (_share(source.rows, "compromises", _CHANGES[:1], _CHANGES) for source in (evidence, evidence.theirs))
    share, published = both
    if share is None or published is None:
        return ex.NOT_MEASURED
    yours = f"{percent(share.value)} of {changes:,} changes from layer 1 on"
    judged = ex.judge_share(share, 0.5, "one half", published.value, yours)
    return _with_first(judged, evidence, _CHANGES[:1], _CHANGES)


def _with_first(
    judged: ex.Judgement, evidence: ex.Evidence, parts: Sequence[str], wholes: Sequence[str]
) -> ex.Judgement:
    """Return the judgement with the share in layer 0 added to its reason."""
    first = next((row for row in evidence.rows if row["layer"] == 0), None)
    whole = 0 if first is None else sum(first[case] for case in wholes)
    if first is None or not whole:
        return judged
    return judged.and_also(f"layer 0: {percent(sum(first[case] for case in parts) / whole)}")


def _share(rows: list[ex.Row], name: str, parts: Sequence[str], wholes: Sequence[str]) -> Estimate | None:
    """Return a share over all layers except layer 0. For the paper's rows, it is computed from counts."""
    rows = [row for row in ex.known_rows(rows, (), "prefixes") if row["layer"]]
    part, whole = (sum(row[case] for row in rows for case in cases) for cases in (parts, wholes))
    return ex.prefix_estimate(rows, name, lambda: Estimate(part / whole, *wilson(part, whole)) if whole else None)


EXPERIMENT = ex.prefix_experiment(
    "cases",
    "Figure 11",
    "Top token of a layer's output: residual, block, both or neither",
    ex.ResultTable(
        "cases",
        SCHEMA,
        compute,
        question="Does the prediction come from the residual or the layer?",
        lead="Each bar contains all sampled prefixes.",
        how="Compares the top tokens of the residual r, the layer output y and their sum o. r and o are read as "
        "predictions, and y is read in the same way as values. Residual: o has the token of r but not of y. Ffn: o "
        "has the token of y but not of r. Agreement: all three tokens are equal. Composition: o has neither token. "
        "Reversal: r and y have the same token and o another one, which is possible only if the final norm has a "
        "bias.",
        draw=draw,
        published=published,
    ),
    claims=(
        ex.Claim(
            "residual",
            "A layer mostly keeps the residual’s prediction",
            "85% from layer 1 on",
            "Share of prefixes and layers from layer 1 on with top(o) = top(r), including agreement. The claim appears "
            "if the 95% interval over prefixes lies above one half, and does not appear if it lies below. Layer 0 is "
            "shown separately." + ex.rule_of_enough("prefixes"),
            residual_is_left,
            write=percent,
        ),
        ex.Claim(
            "changes",
            "When a layer changes the prediction, the result is a compromise",
            "98.2% of changes from layer 1 on",
            "Share of “composition” among “composition” and “ffn” from layer 1 on. The claim appears if the 95% "
            "interval over prefixes lies above one half, and does not appear if it lies below. Layer 0 is shown "
            "separately." + ex.rule_of_enough("prefixes"),
            changes_are_compositions,
            write=percent,
        ),
    ),
    picture=ex.Picture(
        tuple(ex.Column(case, case) for case in CASES),
        {case: case for case in CASES},
        lambda rows: [ex.part_shares(row, CASES) for row in rows],
    ),
)
