"""Each rule on tables made for it: the paper's own curves show every claim, and every verdict can occur."""

import re
from itertools import pairwise
from typing import Any

import pytest

from memlens.experiments.confidence import decimal
from memlens.experiments.experiment import (
    ABSENT,
    APPEARS,
    NOT_APPLICABLE,
    NOT_JUDGED,
    PARTLY,
    UNCLEAR,
    Evidence,
    Judgement,
    depth,
    direction,
    judge_trend,
    third,
)
from memlens.experiments.patterns import band_of, is_of_paper
from memlens.experiments.run import EXPERIMENTS
from memlens.stats import Estimate, contrast, wilson

Row = dict[str, Any]
LAYERS = 16
CLAIMS = {claim.slug: (experiment, claim) for experiment in EXPERIMENTS.values() for claim in experiment.claims}
WIDE = 3.0  # of an interval that holds everything


def published(slug: str) -> list[Row]:
    experiment, claim = CLAIMS[slug]
    return next(table for table in experiment.tables if table.name == (claim.table or experiment.name)).published()


def judge(slug: str, rows: list[Row], layers: int = LAYERS, **facts: Any) -> Judgement:
    memories = dict.fromkeys(range(layers), 4096)
    return CLAIMS[slug][1].judge(Evidence(rows, layers, memories, published(slug), **facts))


def verdict(slug: str, rows: list[Row], layers: int = LAYERS) -> str:
    return judge(slug, rows, layers).verdict


def by_layer(value: Any) -> list[Any]:
    """A number, or a function of the layer, in every layer."""
    return [value(layer) if callable(value) else value for layer in range(LAYERS)]


def measured(column: str, value: Any, width: float = 0.002, prefix: str = "", **more: Any) -> list[Row]:
    """A row a layer with one number and its interval."""
    return [
        {"layer": n, column: own, f"{prefix}low": own - width, f"{prefix}high": own + width, **more}
        for n, own in enumerate(by_layer(value))
    ]


def edits(last: Any, other: float = -0.1, width: float = 0.02) -> list[Row]:
    return [
        {"layer": layer, "edit": edit, "change": change, "low": change - width, "high": change + width}
        | {"beside_last": change - own, "beside_last_low": change - own - width}
        | {"beside_last_high": change - own + width}
        for layer, own in enumerate(by_layer(last))
        for edit, change in (("first", other), ("random", other), ("last", own))
    ]


def counts(column: str, share: Any, of: int = 4000, whole: str = "prefixes", **more: Any) -> list[Row]:
    return [
        {"layer": n, whole: of, column: round(own * of), "rate": own, "low": wilson(own * of, of)[0]}
        | {"high": wilson(own * of, of)[1], **more}
        for n, own in enumerate(by_layer(share))
    ]


def settled(share: Any, width: float = 0.01, slope: float = 0.9, **more: Any) -> list[Row]:
    """Refinement: shares with steps, and a paired slope over the depth."""
    rows = counts("match", share, trend=slope, trend_low=slope - width, trend_high=slope + width, **more)
    for before, row in pairwise(rows):
        step = row["rate"] - before["rate"]
        row |= {"step": step, "step_low": step - width, "step_high": step + width}
    return rows


def confident(layers: list[int], agrees: int = 0, **more: Any) -> list[Row]:
    return [{"layer": layer, "precision": 0.1 if i < agrees else 0.0, **more} for i, layer in enumerate(layers)]


def bins(auroc: float, width: float = 0.05, shuffled: float = 0.5, agree: int = 10) -> list[Row]:
    rows = [{"from_p": 0.1, "to_p": 0.2, "memories": 1000, "agree": agree, "rate": agree / 1000}] * 8
    area = {"auroc": auroc, "auroc_low": auroc - width, "auroc_high": auroc + width, "auroc_shuffled": shuffled}
    return [row | area for row in rows]


def cases(residual: int, composition: int, ffn: int) -> list[Row]:
    row = {"residual": residual, "composition": composition, "ffn": ffn, "agreement": 0, "reversal": 0}
    return [{"layer": layer} | row for layer in range(LAYERS)]


def kinds(shallow: Any, beyond: Any, implied: Any = 0.0, width: float = 0.05) -> list[Row]:
    """Counts of 100 prefixes by kind, with intervals of their shares."""
    rows = []
    for layer, parts in enumerate(zip(*map(by_layer, (shallow, implied, beyond)), strict=True)):
        shares = dict(zip(("shallow", "implied", "beyond"), parts, strict=True))
        shares["semantic"] = shares["implied"] + shares["beyond"]
        row: Row = {"layer": layer, "both": 0, "not_covered": 100 * (1 - shares["shallow"] - shares["semantic"])}
        for kind, share in shares.items():
            row |= {kind: 100 * share, f"{kind}_low": share - width, f"{kind}_high": share + width}
        rows.append(row)
    return rows


def keys(
    patterned: int, memories: int = 4096, each: float = 3.6, covered: float = 0.7, width: float = 0.03
) -> list[Row]:
    row: Row = {"memories": memories, "patterned_memories": memories, "paper_kinds_memories": patterned}
    row |= {"shallow": 90, "semantic": 0, "both": 0, "not_covered": 10, "paper_kinds": 100 * covered}
    row |= {"paper_kinds_low": covered - width, "paper_kinds_high": covered + width}
    row |= {"each": each, "each_low": each - 10 * width, "each_high": each + 10 * width}
    return [{"layer": layer} | row for layer in range(LAYERS)]


def excess(name: str, found: float, width: float, base: float = 0.3) -> list[Row]:
    edges = {f"{name}_excess": found, f"{name}_excess_low": found - width, f"{name}_excess_high": found + width}
    return [{"layer": layer, f"{name}_pooled": base + found} | edges for layer in range(LAYERS)]


def changes(distant: int, related: int, hinted: float = 0.1) -> list[Row]:
    """Judged by one person; all cosines on one side of the bar."""
    verdicts = [{"distant": 1, "related": 0}] * distant + [{"distant": 0, "related": 1}] * related
    return [{"layer": 15, "cosine": hinted, "bar": 0.5} | verdict for verdict in verdicts]


def ranks(share: Any, width: float = 0.002) -> list[Row]:
    rows = measured("median", share, width, shuffled=9000)
    return [
        row | {key: 20_000 * row[key] for key in ("median", "low", "high")} | {"vocabulary": 20_000} for row in rows
    ]


def dropping(found: float, width: float = 0.01) -> list[Row]:
    return measured("median", 0.3, drop=found, drop_low=found - width, drop_high=found + width)


def pace(found: float, width: float = 0.001) -> list[Row]:
    return counts("match", 0.5, pace=found, pace_low=found - width, pace_high=found + width)


def rising(layer: int) -> float:
    return layer / LAYERS


def shown(
    appears: list[Row], absent: list[Row], unclear: list[Row], partly: list[Row] | None = None
) -> dict[str, list[Row]]:
    found = {APPEARS: appears, ABSENT: absent, UNCLEAR: unclear}
    return found if partly is None else found | {PARTLY: partly}


EXCESSES = ((0.2, 0.1), (-0.2, 0.1), (0.05, 0.1), (0.006, 0.001))
SHOWN = {
    "shallow": shown(
        kinds(lambda n: 0.7 - 0.03 * n, 0), kinds(lambda n: 0.03 * n, 0), kinds(0.5, 0, width=WIDE),
        kinds(lambda n: 0.5 - 0.0005 * n, 0, width=0.005),
    ),
    "semantic": shown(
        kinds(0, lambda n: 0.03 * n), kinds(0, lambda n: 0.5 - 0.03 * n), kinds(0, 0.5, width=WIDE),
        kinds(0, lambda n: 0.01 * n, lambda n: 0.4 - 0.02 * n, width=0.01),
    ),
    "every-key": shown(keys(4096), keys(3000), keys(19, 20)),
    "patterns-a-key": {NOT_JUDGED: keys(9)},
    "covered": shown(keys(9), keys(9, covered=0.5), keys(9, covered=0.66, width=0.2)),
    "last-token": shown(
        edits(-0.6), edits(-0.05), edits(-0.2, width=WIDE), edits(lambda n: -0.05 if n == 3 else -0.6, width=0.001)
    ),
    "last-token-depth": shown(
        edits(lambda n: -0.7 + 0.02 * n), edits(lambda n: -0.02 * n), edits(-0.5, width=0.5),
        edits(lambda n: -0.7 + 0.001 * n, width=0.001),
    ),
    "agreement": shown(
        counts("agree", lambda n: 0.03 * rising(n), 4096, "memories"), counts("agree", 0.01, 40960, "memories"),
        counts("agree", 0.05, 40, "memories"),
    ),
    "agreement-chance": shown(
        counts("agree", 0.03, 4096, "memories", shuffled=0.01), counts("agree", 0.03, 4096, "memories", shuffled=0.1),
        counts("agree", 0.03, 100, "memories", baseline=0.03),
    ),
    "rank": shown(
        ranks(lambda n: 0.5 - 0.02 * n), ranks(lambda n: 0.3 + 0.02 * n), ranks(0.4, 0.3),
        ranks(lambda n: 0.5 - 0.001 * n, 0.0001),
    ),
    "confident-values": shown(*(confident([15] * high + [0] * low) for high, low in ((90, 10), (10, 90), (5, 4)))),
    "predictive-values": shown(*(confident([15] * 100, agrees, chance=0.25) for agrees in (50, 5, 25))),
    "confidence-agreement": shown(bins(0.7), bins(0.4), bins(0.5)),
    "active": shown(
        measured("median", 0.3), measured("median", 0.7), [], measured("median", lambda n: 0.3 if n < 11 else 0.7)
    ),
    "active-middle": shown(dropping(-0.2), dropping(0.2), dropping(-0.05, 0.2), dropping(-0.012, 0.01)),
    "composition": shown(counts("zero", 0.8), counts("zero", lambda n: 0.8 if n else 0.5), counts("zero", 0.7, 10)),
    "stop-words": shown(*(excess("stop_words", *found) for found in EXCESSES)),
    "short-prefixes": shown(*(excess("short", *found) for found in EXCESSES)),
    "refinement": shown(
        settled(rising), settled(0.5, slope=-0.2), settled(0.5, 0.9, slope=0.1),
        settled(lambda n: rising(n) - 0.2 * (n == 9)),
    ),
    "last-residual": shown(*(counts("match", share) for share in (0.8, 0.2, 0.5))),
    "bottom-third": shown(counts("match", 0.31), counts("match", 0.1), counts("match", 0.3, 20)),
    "acceleration": shown(pace(0.03), pace(-0.02), pace(0.01, 0.02), pace(0.0015)),
    "confidence": shown(
        *(
            measured("median", 0.2, trend=s, trend_low=s - w, trend_high=s + w)
            for s, w in ((0.3, 0.1), (-0.3, 0.1), (0.1, 0.3))
        )
    ),
    "residual": shown(cases(800, 200, 0), cases(100, 900, 0), cases(1, 1, 0)),
    "changes": shown(cases(100, 890, 10), cases(100, 10, 450), cases(9, 1, 1)),
    "last-layer": shown(changes(66, 34), changes(20, 80), changes(5, 5)),
}  # fmt: skip


@pytest.mark.parametrize("slug", CLAIMS)
def test_a_rule_gives_the_verdict_its_words_promise(slug: str) -> None:
    judged = {expected: judge(slug, rows) for expected, rows in SHOWN[slug].items()}
    assert {expected: one.verdict for expected, one in judged.items()} == {expected: expected for expected in judged}
    assert verdict(slug, []) == UNCLEAR  # layers that were not measured are no evidence
    for one in judged.values():
        assert one.reason[0].isupper() and one.reason.endswith(".") and "None" not in one.reason


def test_the_papers_own_curves_show_every_claim() -> None:
    own = {
        "confident-values": confident([15] * 97 + [0] * 3),
        "predictive-values": confident([15] * 100, agrees=46),
        "every-key": keys(10, 10),
        "covered": keys(10, 10),
        "confidence-agreement": bins(0.9),  # the paper gives only bins
        "stop-words": excess("stop_words", 0.3, 0.1),  # the paper gives no base rate
        "short-prefixes": excess("short", 0.3, 0.1),
        "last-layer": changes(66, 34),
    }
    for slug in CLAIMS.keys() - {"patterns-a-key"}:
        assert verdict(slug, own.get(slug) or published(slug)) == APPEARS, (slug, judge(slug, published(slug)))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ((0.5, 0.1, 0.9), APPEARS), ((0.05, 0.01, 0.09), PARTLY), ((-0.5, -0.9, -0.1), ABSENT),
        ((0.05, -0.01, 0.09), ABSENT), ((0.05, -0.2, 0.3), UNCLEAR),
    ],
)  # fmt: skip
def test_a_direction_is_never_open_where_the_interval_excludes_zero(found: Any, expected: str) -> None:
    assert direction(Estimate(*found), published=1.0) == expected


@pytest.mark.parametrize("slug", ["agreement", "rank", "last-token-depth", "shallow", "semantic"])
def test_layer_0_alone_decides_no_trend_and_is_shown_by_itself(slug: str) -> None:
    rows = SHOWN[slug][ABSENT]
    lift = {"rate": 0, "low": 0, "high": 0, "agree": 0, "median": 19000, "change": -0.99}
    lift |= {"shallow": 99, "beyond": 0, "implied": 0}
    first = {key: lift.get(key, value) for key, value in rows[0].items()}
    others = [row for row in rows if row["layer"] > 0]
    judged = judge(slug, [first, *others])
    assert judged.verdict == ABSENT and "layer 0: " in judged.reason


def test_what_only_a_relu_model_can_show_is_not_applicable_to_others() -> None:
    for slug in ("active", "active-middle"):
        judged = judge(slug, SHOWN[slug][APPEARS], rests_at_zero=False)
        assert judged.verdict == NOT_APPLICABLE and "sign" in judged.reason


def test_every_layer_is_corrected_for_the_number_of_layers() -> None:
    """One of sixteen layers a little below the bar: by itself it is below, among sixteen it may be chance."""
    rows = counts("zero", lambda n: 0.655 if n == 4 else 0.9, 2000)
    assert wilson(0.655 * 2000, 2000)[1] < 0.68
    assert verdict("composition", rows) == APPEARS
    assert verdict("composition", counts("zero", lambda n: 0.6 if n == 4 else 0.9, 2000)) == ABSENT


def test_people_count_and_the_hint_alone_decides_nothing() -> None:
    judged = judge("last-layer", changes(20, 80))
    assert (
        judged.verdict == ABSENT
        and judged.yours == "20 of 100 distant according to people, 100 of 100 by the cosine hint"
    )
    unseen = [row | {"related": 0, "distant": 0} for row in changes(100, 0)]
    for cosine in (0.1, 0.9):
        judged = judge("last-layer", [row | {"cosine": cosine} for row in unseen])
        assert judged.verdict == UNCLEAR and "by the cosine hint; not judged by people" in judged.yours


ON_MEMORIES = ("last-token", "last-token-depth", "rank")
ON_PREFIXES = (
    "active", "active-middle", "composition", "stop-words", "short-prefixes", "refinement", "last-residual",
    "bottom-third", "acceleration", "confidence", "residual", "changes",
)  # fmt: skip


@pytest.mark.parametrize("slug", [*ON_MEMORIES, *ON_PREFIXES])
@pytest.mark.parametrize("expected", [APPEARS, ABSENT])
def test_a_handful_of_observations_shows_nothing_however_clear_they_look(slug: str, expected: str) -> None:
    observed = "memories" if slug in ON_MEMORIES else "prefixes"
    few, enough = ([row | {observed: count} for row in SHOWN[slug][expected]] for count in (5, 4000))
    assert verdict(slug, few) == UNCLEAR and verdict(slug, enough) == expected


@pytest.mark.parametrize("slug", [*ON_MEMORIES, "active", "confidence"])
def test_layers_in_which_nothing_took_part_are_no_evidence(slug: str) -> None:
    numbers = ("change", "low", "high", "q1", "median", "q3")
    rows = SHOWN[slug][APPEARS]
    empty = [{key: None if key in numbers else value for key, value in row.items()} for row in rows]
    judgement = judge(slug, empty)
    assert judgement.verdict == UNCLEAR and "not measured" in judgement.yours
    step = 3 if slug.startswith("last-token") else 1  # rows a layer
    some = slice(3 * step, 6 * step)
    assert verdict(slug, [*rows[: some.start], *empty[some], *rows[some.stop :]]) == APPEARS  # the others still count


EDGES = {
    "active-middle": "drop", "stop-words": "stop_words_excess", "short-prefixes": "short_excess", "residual": "kept",
    "changes": "compromises", "confidence": "trend", "refinement": "trend", "acceleration": "pace",
    "shallow": "shallow", "semantic": "beyond", "patterns-a-key": "each", "covered": "paper_kinds",
    "last-token": "beside_last", "confidence-agreement": "auroc",
}  # fmt: skip


@pytest.mark.parametrize("slug", [*EDGES, "last-token-depth", "rank", "active", "agreement"])
def test_a_number_without_an_interval_is_no_certainty(slug: str) -> None:
    """A measured number whose interval is missing, as of one observation or of observations that are all alike."""
    name = EDGES.get(slug, "")
    edges = dict.fromkeys((f"{name}_low", f"{name}_high") if name else ("low", "high"))
    shown = SHOWN[slug].get(APPEARS) or SHOWN[slug][NOT_JUDGED]
    rows = [row | ({name: row.get(name, 0.9)} if name else {}) | edges for row in shown]
    assert verdict(slug, rows) == UNCLEAR


def test_without_the_layers_that_a_claim_speaks_of_nobody_can_tell() -> None:
    def missing(slug: str, expected: str, *layers: int) -> str:
        return verdict(slug, [row for row in SHOWN[slug][expected] if row["layer"] not in layers])

    for expected in (APPEARS, ABSENT):
        assert missing("last-residual", expected, 15) == UNCLEAR
        assert missing("last-residual", expected, 0) == expected
        assert missing("bottom-third", expected, 4) == UNCLEAR
        assert missing("acceleration", expected, 0) == missing("acceleration", expected, 15) == UNCLEAR
        assert missing("acceleration", expected, 8, 9, 10) == UNCLEAR
        for slug in ("refinement", "confidence", "agreement", "rank", "last-token-depth", "shallow", "semantic"):
            assert missing(slug, expected, *range(8, 16)) == missing(slug, expected, *range(8)) == UNCLEAR
            assert missing(slug, expected, 0) == missing(slug, expected, 15) == expected  # the slope is there


def test_depth_is_the_middle_of_a_layers_part() -> None:
    assert [depth(layer, 4) for layer in range(4)] == [0.125, 0.375, 0.625, 0.875]
    assert [third(layer, 6) for layer in range(6)] == ["lower", "lower", "middle", "middle", "upper", "upper"]
    assert third(0, 1) == "middle"


def test_intervals_of_shares_hold_what_they_promise() -> None:
    low, high = wilson(46, 100)
    assert (round(low, 3), round(high, 3)) == (0.366, 0.557)
    assert wilson(0, 0) == (0.0, 1.0)
    # Newcombe's own example: 56/70 against 48/80
    found = contrast((1, -1), [Estimate(hits / total, *wilson(hits, total)) for hits, total in ((56, 70), (48, 80))])
    assert (round(found.low, 4), round(found.high, 4)) == (0.0524, 0.3339)


def test_layers_of_the_paper_are_quoted_from_zero() -> None:
    said = {slug: claim.published for slug, (_, claim) in CLAIMS.items()}
    quoted = [int(n) for text in said.values() for n in re.findall(r"(?:layers? |–)(\d+)(?![\d,.%]| of)", text)]
    assert quoted and max(quoted) == LAYERS - 1 and min(quoted) == 0
    active, rank, last = (EXPERIMENTS[name].tables[0].published() for name in ("active", "rank", "local-edits"))
    assert said["active-middle"] == f"{active[1]['median']:.0%} in layer 1, {active[9]['median']:.0%} in layer 9"
    first, final = (f"{rank[layer]['median']:,}" for layer in (0, 15))
    assert said["rank"] == f"median {first} of 20,000 (inferred) in layer 0, {final} in layer 15"
    assert f"{-last[16]['change']:.0%} in layer 0" in said["last-token-depth"] and last[16]["edit"] == "last"
    refinement = EXPERIMENTS["refinement"].tables[0].published()
    assert said["refinement"] == f"{refinement[0]['rate']:.1%} → {refinement[15]['rate']:.0%}"
    assert said["last-residual"] == f"{refinement[15]['rate']:.0%}"
    for slug, quote, number in (
        ("residual", "85% from", "85.0%"), ("changes", "98.2%", "98.2%"), ("last-residual", "86%", "86.2%"),
        ("composition", "67% to", "66.7%"), ("last-token", "47 points", "+46.9 points"),
    ):  # fmt: skip
        reason = judge(slug, published(slug)).reason
        assert quote in said[slug] and (f"published {number}" in reason or f"{number} published" in reason), reason
    assert f"{refinement[4]['rate']:.0%} by layer 4" in said["bottom-third"]
    assert f"{100 * refinement[9]['pace']:.1f} points per layer" in said["acceleration"]


@pytest.mark.parametrize(
    ("value", "written"),
    [(0.0, "0"), (0.296, "0.3"), (0.00014, "0.00014"), (4.5e-6, "0.0000045"), (1.94e-28, "1.9e-28"), (-2e-9, "-2e-9")],
)
def test_a_number_is_written_so_that_nobody_counts_zeros(value: float, written: str) -> None:
    assert decimal(value) == written


def test_a_trend_is_shown_as_last_minus_first_layer_and_its_slope_per_layer() -> None:
    """A steep share was shown as a slope over the whole depth, up to "+109 points"."""
    rates = [0.0, *(min(0.01 * 2**layer, 0.95) for layer in range(LAYERS - 1))]
    rows = [{"layer": layer, "rate": rate, "low": rate, "high": rate} for layer, rate in enumerate(rates)]
    trend = Evidence(rows, LAYERS, {}).trend("rate")
    assert trend is not None and trend.slope.value > 1 and trend.change.value == pytest.approx(rates[-1] - rates[1])
    judged = judge_trend(trend, trend, 1, "0%")
    assert judged.yours == "+94 points from layer 1 to 15" and judged.interval.endswith(" per layer")


def by_third(kind: str) -> list[str]:
    rows = published("shallow")
    thirds = [[row[kind] for row in rows if third(row["layer"], LAYERS) == which] for which in ("lower", "upper")]
    return [f"{sum(shares) / len(shares):.0%}" for shares in thirds]


@pytest.mark.parametrize("slug", ["shallow", "semantic"])
def test_the_published_shares_of_figure_2_are_means_of_thirds(slug: str) -> None:
    lower, upper = by_third(slug)
    assert CLAIMS[slug][1].published == f"{lower} of prefixes in layers 0–4, {upper} in layers 11–15"


def test_a_quarter_is_not_a_third() -> None:
    """Half to double of a third accepted 26.2%."""
    judged = judge("bottom-third", counts("match", 0.262))
    assert judged.verdict == ABSENT and "lies below 28.3% to 38.3%" in judged.reason


@pytest.mark.parametrize(("name", "slug"), [("stop_words", "stop-words"), ("short", "short-prefixes")])
def test_an_excess_near_zero_does_not_appear_next_to_a_large_published_one(name: str, slug: str) -> None:
    """An interval of 0.8 points around 0 was "cannot tell", although the published excess is 30 points."""
    judged = judge(slug, excess(name, 0.0, 0.008, base=0.28 if name == "stop_words" else 0.13))
    assert judged.verdict == ABSENT and ("+32 points" if name == "stop_words" else "+30 points") in judged.reason
    assert judge(slug, excess(name, 0.02, 0.01, base=0.7)).verdict == UNCLEAR  # above the published share


def test_only_kinds_of_the_annotators_cover_triggers_and_keys() -> None:
    """With every kind of pattern, 90% of triggers and all memories counted."""
    rows = keys(3000, covered=0.55)
    assert by_kind("covered", rows) == (ABSENT, "90.0% have a pattern of any kind")
    assert by_kind("every-key", rows) == (ABSENT, "100.0% have a pattern of any kind that memlens finds")


def by_kind(slug: str, rows: list[Row]) -> tuple[str, str]:
    judged = judge(slug, rows)
    return judged.verdict, judged.reason.removesuffix(".").split("; ")[-1]


def test_patterns_per_key_are_shown_without_a_verdict() -> None:
    """3.2 per key "appeared" because it lies within half and double."""
    judged = judge("patterns-a-key", keys(9, each=3.2))
    assert judged.verdict == NOT_JUDGED and judged.yours == "3.20 per key"


def test_figure_2_holds_two_claims() -> None:
    """Shallow minus semantic fell although no semantic pattern was added."""
    rows = kinds(lambda n: 0.8 - 0.04 * n, 0.1, width=0.02)
    assert (verdict("shallow", rows), verdict("semantic", rows)) == (APPEARS, ABSENT)


def test_subjects_that_the_last_word_implies_have_a_size_but_no_direction() -> None:
    rows = kinds(0.2, lambda n: 0.3 - 0.01 * n, lambda n: 0.03 * n)
    assert verdict("semantic", rows) == ABSENT
    judged = judge("semantic", kinds(0.2, lambda n: 0.02 * n, lambda n: 0.3 - 0.02 * n))
    assert judged.verdict == PARTLY and "+0 points including subjects that the last word implies" in judged.reason


def test_a_line_does_not_hide_a_reversal() -> None:
    """Agreement climbed to 2.7% in the middle and fell to nearly 0 above; the slope was positive."""
    rates = [0.001, 0.0, 0.001, 0.001, 0.002, 0.003, 0.005, 0.01, 0.03, 0.04, 0.045, 0.02, 0.012, 0.01, 0.008, 0.005]
    rows = counts("agree", lambda n: rates[n], 4096, "memories")
    trend = Evidence(rows, LAYERS, {}).trend("rate")
    assert trend is not None and trend.slope.low > 0
    falling = counts("agree", lambda n: falling_rate(rates, n), 4096, "memories")
    trend = Evidence(falling, LAYERS, {}).trend("rate")
    assert trend is not None and trend.rise is not None and trend.rise.high < 0
    assert judge("agreement", falling).verdict == ABSENT


def falling_rate(rates: list[float], layer: int) -> float:
    return rates[layer] / (4 if layer > 10 else 1)


@pytest.mark.parametrize("slug", ["changes", "residual"])
def test_layer_0_does_not_decide_what_the_others_do(slug: str) -> None:
    """In the bundled model, layer 0 lowered the share of compromises from 96% to 71%."""
    part, other = ("composition", "ffn") if slug == "changes" else ("residual", "composition")
    rows = [row | {part: 80, other: 20} for row in cases(0, 0, 0)]
    first = rows[0] | {part: 0, other: 100_000}
    judged = judge(slug, [first, *rows[1:]])
    assert judged.verdict == APPEARS and judged.yours.startswith("80.0%") and "layer 0: 0.0%" in judged.reason


@pytest.mark.parametrize("slug", ["confident-values", "predictive-values"])
def test_nearly_uniform_values_are_not_confident(slug: str) -> None:
    """The hundred most confident values were judged although the first had 1.65 times the probability by chance."""
    for most, expected in ((1.65, ABSENT), (40.0, APPEARS)):
        judged = judge(slug, confident([15] * 100, agrees=50, chance=0.25, times_uniform=most))
        assert judged.verdict == expected and f"{most:.3g} times that of a uniform distribution" in judged.reason


def test_agreement_by_confidence_is_not_judged_by_bins_of_four_memories() -> None:
    """One of four memories in the highest bin was a rising line."""
    few = bins(0.52, 0.1)
    few[-1] = few[-1] | {"memories": 4, "agree": 1, "rate": 0.25}
    assert verdict("confidence-agreement", few) == UNCLEAR
    assert verdict("confidence-agreement", bins(0.7, shuffled=0.8)) == ABSENT  # frequent tokens explain it
    assert verdict("confidence-agreement", bins(0.9, agree=0)) == UNCLEAR


@pytest.mark.parametrize(
    ("pattern", "band", "is_usual"),
    [
        (("ending:press", "shallow", 'ends with "press"'), "shallow", True),
        (("n-gram:the war", "shallow", 'contains "the war"'), "shallow", True),
        (("frame:was … on", "shallow", 'ends with "was … on"'), "shallow", True),
        (("early:3", "shallow", "ends within the first three words of a sentence"), "shallow", False),
        (("topic:goal league", "semantic", "about: league, goal"), "beyond", True),
        (("list:a month", "shallow", "ends with a month: may, june"), "implied", True),
        (("list:an article", "shallow", "ends with an article: the, a"), "shallow", False),
        (("class:31", "shallow", "ends with a word of kinship: father, son"), "implied", True),
        (("class:32", "shallow", "ends with a mark: ., ,"), "shallow", False),
        (("class:33", "shallow", "ends with a word like barge, ferry, canoe"), "implied", True),
        (("class:34", "shallow", "ends with a word like the, a, ferry"), "shallow", False),
    ],
)
def test_a_pattern_is_wording_or_a_subject_that_the_last_word_implies_or_not(
    pattern: tuple[str, str, str], band: str, is_usual: bool
) -> None:
    row = dict(zip(("pattern", "kind", "description"), pattern, strict=True))
    assert (band_of(row), is_of_paper(row)) == (band, is_usual)
