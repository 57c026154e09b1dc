"""Does this model behave like the paper's? The claims, the numbers they rest on, and the rule for each.

    appears            the effect is there and is no accident of the sample
    does not appear    it is absent or reversed, or too small to count
    cannot tell        the sample is too small, or the layers that would show it were not measured

The rules were chosen with the paper's curves in view: in the tests every claim must appear for them. A claim whose
table is missing is not judged. This module knows words; the numbers are compared in judgements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memlens.reports import judgements
from memlens.reports.judgements import Evidence, Finding


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, the numbers it rests on, and how it is judged here."""

    slug: str
    text: str
    published: str
    needs: str  # the experiment whose table is looked at
    figure: str
    rule: str
    judge: Callable[[Evidence], Finding]


_BY_DIFFERENCE = "Appears if the 95% interval of the difference lies above {least}; does not if it ends below that."
_ENOUGH = f" Layers with fewer than {judgements.FEWEST} {{observed}} do not count."
_ENOUGH_MEMORIES, _ENOUGH_PREFIXES = (_ENOUGH.format(observed=observed) for observed in ("memories", "prefixes"))

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "patterns",
        "Upper layers hold fewer shallow and more semantic patterns than lower ones",
        "shallow in layers 0–8, semantic in 9–15",
        "patterns",
        "Figure 2",
        "Share of shallow among trigger prefixes with one kind of pattern only, lower third minus upper third; an "
        "interval as if each memory were one observation. " + _BY_DIFFERENCE.format(least="10 points"),
        judgements.shallow_below_semantic_above,
    ),
    Claim(
        "last-token",
        "Removing the last token of a trigger hurts most",
        "largest drop in all 16 layers",
        "local-edits",
        "Figure 3",
        "Mean change of the same memories without the first or a random token, less that without the last. Appears if "
        "in at least nine tenths of the layers the 95% intervals of both differences (a bootstrap over the memories) "
        "lie above 0; does not if the mean drop is the largest in fewer than half." + _ENOUGH_MEMORIES,
        judgements.last_token_matters_most,
    ),
    Claim(
        "last-token-depth",
        "The last token matters less with depth",
        "−72% in layer 0, −45 to −50% in layers 13–15",
        "local-edits",
        "Figure 3",
        "Mean change of the upper third minus that of the lower third. "
        + _BY_DIFFERENCE.format(least="5 points")
        + _ENOUGH_MEMORIES,
        judgements.last_token_matters_less_with_depth,
    ),
    Claim(
        "agreement",
        "Values agree with what follows their keys’ triggers more often with depth",
        "about 0 in layers 0–9, then up to 3.5%",
        "agreement",
        "Figure 4",
        "Share of agreeing memories, upper third minus lower third. " + _BY_DIFFERENCE.format(least="0.5 points"),
        judgements.agreement_rises,
    ),
    Claim(
        "rank",
        "The following token ranks better under the value with depth",
        "median 9,611 in layer 0, 5,139 in layer 15",
        "rank",
        "Figure 5",
        "Mean of the layers' median ranks, lower third minus upper third. Appears if the 95% interval lies above "
        "a tenth of the lower third's rank; does not if it ends below that. Without intervals: appears from a tenth on."
        + _ENOUGH_MEMORIES,
        judgements.rank_improves,
    ),
    Claim(
        "confident-values",
        "The most confident values sit in the upper layers",
        "97 of 100 in layers 10–15",
        "predictive-values",
        "Table 2",
        "Share of the most confident values in layers deeper than 0.625 (10–15 of the paper's 16). Appears if its 95% "
        "interval lies above one half and above an even spread; does not if it lies below or the share is no more "
        "than even.",
        judgements.confident_values_sit_high,
    ),
    Claim(
        "predictive-values",
        "Confident values predict what follows their triggers",
        "46 of 100",
        "predictive-values",
        "Table 2",
        "Share of the most confident values whose top token follows at least one of their triggers. By chance: the "
        "same if triggers were followed by tokens drawn at random from those after all triggers of the layer. Appears "
        "if the 95% interval lies above one quarter and above chance; does not if it lies below either or the share "
        "is no more than chance.",
        judgements.confident_values_predict,
    ),
    Claim(
        "active",
        "Between 10% and 50% of a layer’s memories are active",
        "medians from 12% to 55%, inside in 15 of 16 layers",
        "active",
        "Figure 7",
        "Appears if the median share of memories with m > 0 is between 10% and 50% in at least nine tenths of the "
        "layers; does not if in fewer than half." + _ENOUGH_PREFIXES,
        judgements.few_memories_are_active,
    ),
    Claim(
        "active-middle",
        "Fewer memories are active towards the middle of the model",
        "49% in layer 0, 12% in layer 9",
        "active",
        "Figure 7",
        "Quartiles averaged over thirds. Appears if the middle third's upper quartile lies below the lower third's "
        "lower quartile; does not if its median is no lower." + _ENOUGH_PREFIXES,
        judgements.active_drops_towards_the_middle,
    ),
    Claim(
        "composition",
        "In every layer at least 68% of outputs match no single memory",
        "67% to 96% (68% in the text)",
        "composition",
        "Figure 8",
        "Appears if the 95% interval of every layer reaches 68% and stays above one half; does not if that of any "
        "layer ends below 68%.",
        judgements.outputs_are_compositions,
    ),
    Claim(
        "refinement",
        "The prediction settles layer by layer",
        "2.6% → 86%",
        "refinement",
        "Figure 9",
        "Share of prefixes whose residual already has the final token on top, last layer minus first, on the same "
        "prefixes: the interval is a bootstrap over prefixes. " + _BY_DIFFERENCE.format(least="10 points"),
        judgements.predictions_settle,
    ),
    Claim(
        "last-residual",
        "Before the last feed-forward layer most predictions are made",
        "86%",
        "refinement",
        "Figure 9",
        "Share of prefixes whose residual in the model's last layer has the final token on top. Appears if the 95% "
        "interval lies above one half; does not if it lies below.",
        judgements.last_residual_knows_the_token,
    ),
    Claim(
        "confidence",
        "The residual grows confident of the final token",
        "median .0004 → .295",
        "confidence",
        "Figure 10",
        "Probability of the final token, first and last layer. Appears if the last median lies above the first upper "
        "quartile; does not if it is no higher than the first median." + _ENOUGH_PREFIXES,
        judgements.confidence_grows,
    ),
    Claim(
        "residual",
        "Most layers leave the residual’s prediction as it is",
        "82% over all layers",
        "cases",
        "Figure 11",
        "Share of “residual” among all cases of all layers; an interval as if each prefix were seen once. Appears if "
        "it lies above one half; does not if it lies below.",
        judgements.residual_dominates,
    ),
    Claim(
        "changes",
        "Where a layer changes the prediction, it is a compromise, not the layer’s own",
        "98.5% of changes",
        "cases",
        "Figure 11",
        "Share of “composition” among “composition” and “ffn”; an interval from an average layer's number of changes. "
        "Appears if it lies above four fifths; does not if it lies below.",
        judgements.changes_are_compositions,
    ),
)


def judge_all(evidence: Evidence) -> list[tuple[Claim, Finding | None]]:
    """Every claim with what the tables say; None where the table is missing."""
    return [(claim, claim.judge(evidence) if claim.needs in evidence.tables else None) for claim in CLAIMS]
