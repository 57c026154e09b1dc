"""The claims of shuffled networks, and what a claim needs beyond its rule."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import memlens
from memlens.experiments import shuffled
from memlens.experiments.experiment import (
    ABSENT,
    APPEARS,
    NOT_JUDGED,
    PARTLY,
    SAME,
    UNCLEAR,
    UNCOMPARED,
    Claim,
    Evidence,
    Judgement,
    Row,
    compare_with_shuffled,
    exceeds,
    join_networks,
)
from memlens.experiments.run import EXPERIMENTS, NULL, is_made, run
from memlens.models.memory_model import MemoryModel
from memlens.models.shuffle import shuffled_weights
from memlens.stats import Estimate


def claim(sign: int = 1, target: float | None = None, *, is_compared: bool = True) -> Claim:
    return Claim("c", "C", "1", "rule", lambda evidence: judged(), sign=sign, target=target, is_compared=is_compared)


def judged(verdict: str = APPEARS) -> Judgement:
    return Judgement("+5 points", "", verdict, "A reason.", Estimate(0.05, 0.04, 0.06))


def networks(trained: float, *values: float, width: float = 0.01) -> list[Row]:
    return [
        {"claim": "c", "seed": seed, "tokens": 10_000, "value": value, "low": value - width, "high": value + width}
        | {"trained": trained, "trained_low": trained - width, "trained_high": trained + width}
        for seed, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("rule", "sign", "rows", "expected"),
    [
        (APPEARS, 1, networks(0.5, 0.1, 0.12, 0.11), APPEARS),
        (PARTLY, 1, networks(0.5, 0.1, 0.12, 0.11), PARTLY),
        (APPEARS, 1, networks(0.5, 0.49, 0.5, 0.51), SAME),
        (APPEARS, 1, networks(0.5, 0.9, 0.9, 0.9), SAME),  # shuffled networks show more
        (APPEARS, -1, networks(-0.5, -0.1, -0.12, -0.11), APPEARS),
        (APPEARS, -1, networks(-0.5, -0.9, -0.9, -0.9), SAME),
        (APPEARS, 1, networks(0.5, 0.1, 0.45, 0.2), SAME),  # shuffled networks differ from each other
        (APPEARS, 1, networks(0.5, 0.45), APPEARS),
        (APPEARS, 1, [], UNCOMPARED),
        (ABSENT, 1, networks(0.5, 0.1, 0.12, 0.11), ABSENT),
        (NOT_JUDGED, 1, [], NOT_JUDGED),
    ],
)
def test_a_claim_appears_only_beyond_shuffled_networks(rule: str, sign: int, rows: list[Row], expected: str) -> None:
    """Before, 10 of 25 claims appeared in the bundled model with shuffled weights."""
    compared = compare_with_shuffled(claim(sign), judged(rule), rows)
    assert compared.verdict == expected and bool(compared.shuffled) == bool(rows)
    if expected == UNCOMPARED:
        assert "appears by the rule, but no shuffled network was measured" in compared.reason
    if expected == SAME:
        assert "not beyond the range of" in compared.reason


def test_what_people_judged_is_not_compared() -> None:
    assert compare_with_shuffled(claim(is_compared=False), judged(), []).verdict == APPEARS


def test_a_claimed_share_is_compared_by_its_distance() -> None:
    third = claim(target=1 / 3)
    near, far = Estimate(0.32, 0.31, 0.33), Estimate(0.1, 0.09, 0.11)
    assert exceeds(third, near, far).low > 0 > exceeds(third, far, near).high
    assert exceeds(third, near, near).low < 0
    over = Estimate(0.6, 0.59, 0.61)  # more than a third is no closer
    assert exceeds(third, near, over).low > 0


def test_a_text_that_is_too_short_shows_nothing() -> None:
    """Semantic patterns were found in no network on 10,000 tokens, and the verdict was "same as shuffled network"."""
    compared = compare_with_shuffled(claim(), judged(), networks(0.0, 0.0, 0.0, 0.0))
    assert compared.verdict == UNCLEAR and compared.reason.endswith(
        "this text of 10,000 tokens is too short to show the claim."
    )
    assert compare_with_shuffled(claim(), judged(), networks(0.03, 0.03, 0.03, 0.03)).verdict == SAME
    assert compare_with_shuffled(claim(-1), judged(), networks(0.03, 0.03, 0.03, 0.03)).verdict == UNCLEAR


def test_an_obvious_effect_exceeds_shuffled_networks_that_vary() -> None:
    """The residual is kept in 86% of prefixes, and in 26% to 68% in shuffled networks. It counted as the same."""
    shares = networks(0.86, 0.482, 0.26, 0.5725, 0.335, 0.6775, 0.3035, width=0.02)
    assert compare_with_shuffled(claim(), judged(), shares).verdict == APPEARS


@pytest.mark.parametrize("variation", [0, 1, 2, 5])
def test_a_further_shuffled_network_seldom_exceeds_the_others(variation: int) -> None:
    """The errors of the shuffled networks counted twice before: without variation, 1 in 2,000 exceeded the others."""
    random = np.random.default_rng(0)
    numbers = random.normal(0, variation, (2000, 7)) + random.normal(0, 1, (2000, 7))
    exceeding = 0
    for *values, further in numbers.tolist():
        first = join_networks([Estimate(value, value - 1.96, value + 1.96) for value in values])
        exceeding += exceeds(claim(), Estimate(further, further - 1.96, further + 1.96), first).low > 0
    assert 0.01 < exceeding / 2000 < 0.06


def test_one_shuffled_network_has_only_its_own_error() -> None:
    assert join_networks([Estimate(0.3, 0.2, 0.5)]) == pytest.approx((0.3, 0.2, 0.5))


@pytest.mark.parametrize("scanned", ["gpt2"], indirect=True)
def test_rows_are_the_measures_of_an_analysis_of_the_same_text(
    fresh: tuple[memlens.Index, MemoryModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, model = fresh
    monkeypatch.setattr(shuffled, "NETWORKS", 1)
    monkeypatch.setattr(shuffled, "PREFIXES", 20)
    monkeypatch.setattr(shuffled, "SAMPLES", {"local-edits": 2})
    before = model.fingerprint()
    rows = run(index, "shuffled", model, sample=100)["shuffled"].to_pylist()
    assert model.fingerprint() == before and is_made(index, NULL, sample=100)
    known = {one.slug for experiment in EXPERIMENTS.values() for one in experiment.claims}
    assert rows and {row["claim"] for row in rows} <= known and {row["seed"] for row in rows} == {0}
    text = tmp_path / "text.jsonl"
    assert shuffled.write_part(index, text, 100) == rows[0]["tokens"] >= 100
    with shuffled_weights(model, 0):
        part = memlens.scan(model, text, out=tmp_path / "part", layers=shuffled.chosen_layers(index))
        memlens.values(part, model=model)
        by_hand = run(part, "agreement", model)["agreement"].to_pylist()
    rates = {row["layer"]: row["rate"] for row in by_hand}
    share = sum(row["agree"] for row in by_hand) / sum(row["memories"] for row in by_hand)
    (row,) = [row for row in rows if row["claim"] == "agreement-chance"]
    chance = max(
        sum(row[name] * row["memories"] for row in by_hand) / sum(row["memories"] for row in by_hand)
        for name in ("shuffled", "baseline")
    )
    assert rates and row["value"] == pytest.approx(share - chance)
    verdicts = [one.judgement for one in EXPERIMENTS["agreement"].judge(index, lambda name: by_hand)]
    assert all(one is not None and one.shuffled for one in verdicts)


def test_evidence_of_a_claim_is_unchanged_by_the_comparison() -> None:
    first = judged()
    compared = compare_with_shuffled(claim(), first, networks(0.5, 0.1, 0.12, 0.11))
    assert compared.shuffled_value == pytest.approx(0.11)  # the median of the shuffled networks
    assert replace(compared, reason=first.reason, shuffled="", shuffled_value=None) == first
    assert Evidence([], 2, {}).rows == []


def test_the_shipped_rows_are_of_every_network_and_of_claims_that_are_compared() -> None:
    rows = json.loads(shuffled.SHIPPED.read_text("utf-8"))["rows"]
    compared = {claim.slug for experiment in EXPERIMENTS.values() for claim in experiment.claims if claim.is_compared}
    assert {row["seed"] for row in rows} == set(range(shuffled.NETWORKS))
    assert {row["claim"] for row in rows} <= compared and len({row["claim"] for row in rows}) > 20
    assert set(rows[0]) == set(shuffled.SCHEMA.names)
