"""Each rule on tables made for it: the paper's own curves show every claim, and every verdict can occur."""

import re
from typing import Any

import pytest

from memlens.experiments.confidence import decimal
from memlens.experiments.experiment import ABSENT, APPEARS, UNCLEAR, Evidence, Judgement, depth, third
from memlens.experiments.registry import EXPERIMENTS, all_claims
from memlens.stats import share_difference, wilson

Row = dict[str, Any]
LAYERS = 16
CLAIMS = {claim.slug: (experiment, claim) for experiment, claim in all_claims()}


def published(name: str) -> list[Row]:
    return EXPERIMENTS[name].tables[0].published()


def judge(slug: str, rows: list[Row], layers: int = LAYERS) -> Judgement:
    return CLAIMS[slug][1].judge(Evidence(rows, layers, dict.fromkeys(range(layers), 4096)))


def verdict(slug: str, rows: list[Row], layers: int = LAYERS) -> str:
    return judge(slug, rows, layers).verdict


def by_layer(value: Any) -> list[Any]:
    """A number, or a function of the layer, in every layer."""
    return [value(layer) if callable(value) else value for layer in range(LAYERS)]


def edits(last: Any, other: float = -0.1, width: float = 0.02) -> list[Row]:
    return [
        {"layer": layer, "edit": edit, "change": change, "low": change - width, "high": change + width}
        for layer, own in enumerate(by_layer(last))
        for edit, change in (("first", other), ("random", other), ("last", own))
    ]


def agreement(rate: Any, memories: int = 4096) -> list[Row]:
    return counts("agree", rate, memories, "memories")


def quartiles(median: Any, width: float = 0.02) -> list[Row]:
    return [{"layer": n, "q1": m - width, "median": m, "q3": m + width} for n, m in enumerate(by_layer(median))]


def confident(layers: list[int], agrees: int = 0) -> list[Row]:
    return [{"layer": layer, "precision": 0.1 if i < agrees else 0.0} for i, layer in enumerate(layers)]


def counts(column: str, share: Any, of: int = 4000, whole: str = "prefixes") -> list[Row]:
    return [{"layer": n, whole: of, column: round(own * of)} for n, own in enumerate(by_layer(share))]


def cases(residual: int, composition: int, ffn: int) -> list[Row]:
    row = {"residual": residual, "composition": composition, "ffn": ffn, "agreement": 0, "reversal": 0}
    return [{"layer": layer} | row for layer in range(LAYERS)]


def patterns(shallow: Any, memories: int) -> list[Row]:
    return [
        {"layer": n, "shallow": own, "semantic": 100 - own, "patterned_memories": memories}
        for n, own in enumerate(by_layer(shallow))
    ]


def rising(layer: int) -> float:
    return layer / LAYERS


def shown(appears: list[Row], absent: list[Row], unclear: list[Row]) -> dict[str, list[Row]]:
    return {APPEARS: appears, ABSENT: absent, UNCLEAR: unclear}


SHOWN = {
    "patterns": shown(
        patterns(lambda n: 90 - 5 * n, 100), patterns(lambda n: 5 * n, 100), patterns(lambda n: 60 - n, 4)
    ),
    "last-token": shown(edits(-0.6), edits(-0.05), edits(-0.6, width=0.4)),
    "last-token-depth": shown(edits(lambda n: -0.7 + 0.02 * n), edits(-0.5), edits(-0.5, width=0.5)),
    "agreement": shown(agreement(lambda n: 0.03 * rising(n)), agreement(0.01), agreement(0.05, memories=40)),
    "rank": shown(*(quartiles(lambda n, slope=slope: 9000 + slope * n) for slope in (-300, 300, -50))),
    "confident-values": shown(*(confident([15] * high + [0] * low) for high, low in ((90, 10), (10, 90), (5, 4)))),
    "predictive-values": shown(*(confident([15] * 100, agrees=agrees) for agrees in (50, 5, 25))),
    "active": shown(quartiles(0.3), quartiles(0.7), quartiles(lambda n: 0.3 if n < 11 else 0.7)),
    "active-middle": shown(
        quartiles(lambda n: 0.5 if n < 5 else 0.2), quartiles(0.3), quartiles(lambda n: 0.5 if n < 5 else 0.48)
    ),
    "composition": shown(counts("zero", 0.8), counts("zero", lambda n: 0.8 if n else 0.5), counts("zero", 0.7, 10)),
    "refinement": shown(counts("match", rising), counts("match", 0.5), counts("match", 0.5, 10)),
    "last-residual": shown(*(counts("match", share) for share in (0.8, 0.2, 0.5))),
    "confidence": shown(quartiles(lambda n: 0.1 + rising(n)), quartiles(0.3), quartiles(lambda n: 0.3 + 0.001 * n)),
    "residual": shown(cases(800, 200, 0), cases(100, 900, 0), cases(5, 5, 0)),
    "changes": shown(cases(100, 890, 10), cases(100, 450, 450), cases(9, 1, 0)),
}
MEASURED = ["last-token", "last-token-depth", "rank", "active", "active-middle", "confidence"]  # by numbers, not counts


@pytest.mark.parametrize("slug", CLAIMS)
def test_a_rule_gives_the_verdict_its_words_promise(slug: str) -> None:
    assert {expected: verdict(slug, rows) for expected, rows in SHOWN[slug].items()} == shown(APPEARS, ABSENT, UNCLEAR)
    assert verdict(slug, []) == UNCLEAR  # layers that were not measured are no evidence


def test_the_papers_own_curves_show_every_claim() -> None:
    for slug, (experiment, _claim) in CLAIMS.items():
        rows = published(experiment.name)
        if experiment.name == "local-edits":  # the paper prints no intervals; its plotted means are taken as they are
            rows = [row | {"low": row["change"], "high": row["change"]} for row in rows]
        if experiment.name == "predictive-values":
            rows = confident([15] * 97 + [0] * 3, agrees=46)
        assert verdict(slug, rows) == APPEARS, slug


@pytest.mark.parametrize("slug", MEASURED)
def test_layers_in_which_nothing_took_part_are_no_evidence(slug: str) -> None:
    numbers = ("change", "low", "high", "q1", "median", "q3")
    rows = SHOWN[slug][APPEARS]
    empty = [{key: None if key in numbers else value for key, value in row.items()} for row in rows]
    judgement = judge(slug, empty)
    assert judgement.verdict == UNCLEAR and "not measured" in judgement.yours
    assert verdict(slug, [*empty[3:6], *rows[:3], *rows[6:]]) == APPEARS  # the others still count


@pytest.mark.parametrize("slug", MEASURED)
@pytest.mark.parametrize("expected", [APPEARS, ABSENT])
def test_a_handful_of_observations_shows_nothing_however_clear_they_look(slug: str, expected: str) -> None:
    observed = "prefixes" if slug in ("active", "active-middle", "confidence") else "memories"
    few, enough = ([row | {observed: count} for row in SHOWN[slug][expected]] for count in (5, 6))
    assert verdict(slug, few) == UNCLEAR and verdict(slug, enough) == expected


@pytest.mark.parametrize("slug", ["refinement", "last-residual", "confidence"])
@pytest.mark.parametrize("expected", [APPEARS, ABSENT])
def test_without_the_models_last_layer_nobody_can_tell_how_it_ends(slug: str, expected: str) -> None:
    rows = SHOWN[slug][expected]
    assert verdict(slug, rows) == expected and verdict(slug, rows[:-1]) == UNCLEAR


def test_without_the_first_layer_nobody_can_tell_where_it_began() -> None:
    for slug in ("refinement", "confidence"):
        assert verdict(slug, SHOWN[slug][ABSENT][1:]) == UNCLEAR


def test_depth_is_the_middle_of_a_layers_part() -> None:
    assert [depth(layer, 4) for layer in range(4)] == [0.125, 0.375, 0.625, 0.875]
    assert [third(layer, 6) for layer in range(6)] == ["lower", "lower", "middle", "middle", "upper", "upper"]
    assert third(0, 1) == "middle"


def test_intervals_of_shares_hold_what_they_promise() -> None:
    low, high = wilson(46, 100)
    assert (round(low, 3), round(high, 3)) == (0.366, 0.557)
    assert wilson(0, 0) == (0.0, 1.0)
    # Newcombe's own example: 56/70 against 48/80
    low, high = share_difference(56, 70, 48, 80)
    assert (round(low, 4), round(high, 4)) == (0.0524, 0.3339)


def test_layers_of_the_paper_are_quoted_from_zero() -> None:
    said = {slug: claim.published for slug, (_, claim) in CLAIMS.items()}
    quoted = [int(n) for text in said.values() for n in re.findall(r"(?:layers? |in |–)(\d+)(?![\d,.%]| of)", text)]
    assert quoted and max(quoted) == LAYERS - 1 and min(quoted) == 0
    active, rank, last = (published(name) for name in ("active", "rank", "local-edits"))
    assert said["active-middle"] == f"{active[0]['median']:.0%} in layer 0, {active[9]['median']:.0%} in layer 9"
    assert said["rank"] == f"median {rank[0]['median']:,} in layer 0, {rank[15]['median']:,} in layer 15"
    assert f"{-last[16]['change']:.0%} in layer 0" in said["last-token-depth"] and last[16]["edit"] == "last"


def test_confident_values_must_beat_chance() -> None:
    for chance, expected in ((0.1, APPEARS), (0.45, UNCLEAR), (0.5, ABSENT)):
        judged = judge("predictive-values", [row | {"chance": chance} for row in SHOWN["predictive-values"][APPEARS]])
        assert judged.verdict == expected and judged.yours == f"50 of 100 (by chance: {100 * chance:.1f})"


def test_intervals_and_paired_differences_count_where_the_table_has_them() -> None:
    def judged_with(slug: str, table: str, **more: float) -> str:
        return verdict(slug, [row | more for row in SHOWN[slug][table]])

    wide = [row | {"low": row["median"] - 9000, "high": row["median"] + 9000} for row in SHOWN["rank"][APPEARS]]
    assert verdict("rank", wide) == UNCLEAR
    paired = [row | {"beside_last_low": 0.1 * (row["edit"] != "last")} for row in SHOWN["last-token"][UNCLEAR]]
    assert verdict("last-token", paired) == APPEARS
    assert judged_with("last-token", APPEARS, beside_last_low=-0.1) == UNCLEAR
    assert judged_with("refinement", UNCLEAR, gain_low=0.12, gain_high=0.3) == APPEARS
    # there, but perhaps too small to count
    assert judged_with("refinement", UNCLEAR, gain_low=0.02, gain_high=0.3) == UNCLEAR


@pytest.mark.parametrize(
    ("value", "written"),
    [(0.0, "0"), (0.296, "0.3"), (0.00014, "0.00014"), (4.5e-6, "0.0000045"), (1.94e-28, "1.9e-28"), (-2e-9, "-2e-9")],
)
def test_a_number_is_written_so_that_nobody_counts_zeros(value: float, written: str) -> None:
    assert decimal(value) == written
