"""Pictures of the report show the numbers of the tables: one memory, one prompt, roles, and sizes of claims."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import memlens
from memlens.experiments.prefixes import LAYERS, PREFIXES, PREFIXES_SCHEMA
from memlens.experiments.run import EXPERIMENTS
from memlens.experiments.silencing import word_tokens
from memlens.reports import pictures
from memlens.reports.findings import Finding
from memlens.reports.pictures import (
    ClaimMark,
    describe_text,
    mark_claim,
    picture_memory,
    picture_prompt,
    picture_roles,
)
from memlens.reports.report import make_report
from memlens.reports.sections import Tables
from memlens.stats import Estimate
from memlens.text import token, visible


def test_a_memory_is_shown_with_its_strongest_triggers_and_top_tokens(bare: memlens.Index) -> None:
    picture = picture_memory(bare, [Finding("claim x", "", ""), Finding("pattern L3N5", "", "", "L3N5")])
    assert picture is not None and picture.panel is not None
    assert [one.coefficient for one in picture.examples] == [one.coefficient for one in bare.triggers("L3N5")[:5]]
    value = next(
        row
        for row in pq.read_table(bare.folder / "values.parquet").to_pylist()
        if (row["layer"], row["memory"]) == (3, 5)
    )
    drawn = picture.panel.spec["data"]["values"]
    assert [row["p"] for row in drawn] == pytest.approx([p * len(bare.vocabulary) for p in value["p"][:10]])
    names = [f"{place}. {token(bare.vocabulary[number])}" for place, number in enumerate(value["tokens"][:10], 1)]
    assert [row["name"] for row in drawn] == names
    assert picture_memory(bare, [Finding("claim x", "", "")]) is None


def predict_targets(index: memlens.Index) -> memlens.Index:
    """The index with the model's predictions as the tokens that follow the first ten prefixes in the text."""
    prefixes = index.table(PREFIXES).to_pylist()
    for row in prefixes[:10]:
        row["target"] = row["final_token"]
    table = pa.Table.from_pylist(prefixes, PREFIXES_SCHEMA)
    index.write({PREFIXES: (table.schema, [table])}, dict)
    return index


def test_a_prompt_is_shown_with_the_prediction_of_every_layer(
    analyzed: memlens.Index, copy_of: Callable[..., memlens.Index], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "_SHORTEST", 1)
    index = predict_targets(copy_of(analyzed))
    layers = index.table(LAYERS).to_pylist()
    best, found = None, []
    for prefix in index.table(PREFIXES).to_pylist():
        own = sorted((row for row in layers if row["prefix"] == prefix["prefix"]), key=lambda row: row["layer"])
        if prefix["target"] == prefix["final_token"] and 1 <= len(prefix["text"]) <= 90:
            predictions = {row["residual_token"] for row in own}
            is_word = prefix["final_token"] in word_tokens(index)
            order = is_word, len(predictions) >= 3, own[-1]["p_final"] - own[0]["p_final"], -prefix["prefix"]
            found.append(order)
            best = (prefix, own) if order == max(found) else best
    picture = picture_prompt(index)
    assert picture is not None and best is not None and len(found) > 1
    prefix, own = best
    assert picture.text == visible(prefix["text"])
    assert [row["p"] for row in picture.panel.spec["data"]["values"]] == [row["p_final"] for row in own]
    assert picture.layers == sum(row["residual_token"] != prefix["final_token"] for row in own)


def test_without_a_prefix_pass_there_is_no_prompt(bare: memlens.Index) -> None:
    assert picture_prompt(bare) is None


def test_roles_are_drawn_as_shares_of_each_layer() -> None:
    rows = [{"layer": 0, "memories": 10, "dead": 5, "token": 0}, {"layer": 1, "memories": 20, "dead": 5, "token": 2}]
    (panel,) = picture_roles(rows, ["dead", "token"])
    shares = {(row["layer"], row["role"]): row["share"] for row in panel.spec["data"]["values"]}
    assert shares == {(0, "dead"): 0.5, (0, "token"): 0, (1, "dead"): 0.25, (1, "token"): 0.1}
    assert picture_roles([{"layer": 0, "memories": 10, "dead": 0}], ["dead"]) == []


def test_the_number_of_a_claim_is_drawn_in_multiples_of_the_papers(full: memlens.Index) -> None:
    judged = next(one for one in Tables(full).judge() if one.judgement and one.published)
    assert judged.judgement is not None
    judgement = replace(judged.judgement, measure=Estimate(1.5, 0.75, 9.0), shuffled_value=-1.5)
    mark = mark_claim(replace(judged, judgement=judgement, published=1.5))
    assert mark is not None and mark.shuffled == ClaimMark.place(-1) == 0
    assert (mark.value, mark.low, mark.high) == (ClaimMark.place(1), ClaimMark.place(0.5), 100)
    assert mark.value == pytest.approx(100 * 2 / 3.5, abs=0.01)
    negative = mark_claim(replace(judged, judgement=judgement, published=-1.5))
    assert negative is not None and negative.low <= negative.value <= negative.high
    assert mark_claim(replace(judged, published=None)) is None


def test_the_papers_numbers_of_a_kind_are_those_of_its_own_curves(full: memlens.Index) -> None:
    published = {one.claim.slug: one.published for one in Tables(full).judge()}
    match = [row["rate"] for row in EXPERIMENTS["refinement"].tables[0].published()]
    assert published["last-residual"] == pytest.approx(match[-1])
    assert published["every-key"] == 1 and published["patterns-a-key"] == 3.6


def test_the_amount_of_text_is_judged_by_the_memories_that_are_often_active(bare: memlens.Index) -> None:
    rows = pq.read_table(bare.folder / "memories.parquet").to_pylist()
    prefixes = bare.manifest.counts.prefixes
    enough = sum(row["frequency"] * prefixes >= 80 for row in rows)  # the scan stored 8 triggers per memory
    sentence = describe_text(bare)
    assert f"{prefixes:,} prefixes" in sentence and f"{100 * enough / len(rows):.1f}% of the memories" in sentence


def test_the_page_has_no_block_characters_and_the_pictures(
    full_page: Path,
    analyzed: memlens.Index,
    copy_of: Callable[..., memlens.Index],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pictures, "_SHORTEST", 1)
    page = full_page.read_text(encoding="utf-8").split('<script type="application/json"')[0]
    assert not re.search("[▁▂▃▄▅▆▇█]", page) and '<svg class="forest"' in page and '<svg class="spark"' in page
    other = make_report(predict_targets(copy_of(analyzed)), tmp_path / "other.html").read_text(encoding="utf-8")
    assert 'data-chart="prompt-layers"' in other
