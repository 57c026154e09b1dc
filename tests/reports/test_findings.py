"""Findings: every sentence can be worked out again from the tables, and none says more than the verdict."""

import json
import shlex
from collections import Counter
from statistics import median
from typing import Any

import pyarrow.parquet as pq
import pytest
from report_tables import write_rows

import memlens
from memlens.cli import main
from memlens.errors import UnknownName
from memlens.reports.findings import Insight, Material, find, find_all, finders
from memlens.text import visible


def only(index: memlens.Index, name: str) -> Insight:
    (insight,) = find(index, name)
    assert insight.name == name
    return insight


def run_command(insight: Insight, capsys: pytest.CaptureFixture[str]) -> Any:
    """The JSON that a finding's command prints."""
    assert main([*shlex.split(insight.command)[1:], "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def rows_of(index: memlens.Index, table: str) -> list[dict[str, Any]]:
    return pq.read_table(index.folder / f"{table}.parquet").to_pylist()


def test_an_index_with_every_table_tells_nearly_everything_in_the_order_asked_for(full: memlens.Index) -> None:
    names = [insight.name for insight in find_all(full)]
    assert len(names) >= 12 and len(set(names)) == len(names)
    assert {"memory", "settling", "right", "depth", "composition", "dead", "claim-last-token"} <= set(names)
    assert [insight.name for insight in find(full, "dead", "settling", "wanted")] == ["dead", "settling", "wanted"]
    assert all(insight.name == name for name in finders() for insight in find(full, name))


def test_without_experiments_only_what_scan_and_values_know_is_told(bare: memlens.Index) -> None:
    assert {one.name for one in find_all(bare)} <= {"right", "rarest", "wanted", "twins", "below", "dead"}
    with pytest.raises(UnknownName, match="no finding 'weather'; known: memory, right"):
        find(bare, "weather")


def test_the_memory_that_is_right_has_the_largest_share_and_its_command_lists_the_triggers(
    bare: memlens.Index, capsys: pytest.CaptureFixture[str]
) -> None:
    top = {(row["layer"], row["memory"]): row["argmax"] for row in rows_of(bare, "values")}
    followed: Counter[Any] = Counter()
    agree: Counter[Any] = Counter()
    for row in rows_of(bare, "triggers"):
        name = row["layer"], row["memory"]
        if row["end"] == "top" and row["next_token"] is not None:
            followed[name] += 1
            agree[name] += row["next_token"] == top[name]
    many = {name: agree[name] / count for name, count in followed.items() if count >= 5 and agree[name]}
    material = Material(bare)
    words = {name: share for name, share in many.items() if material.is_word(top[name])} or many
    assert len(words) > 1
    insight = only(bare, "right")
    best = max(words, key=lambda name: (words[name], followed[name], -name[0], -name[1]))
    assert insight.title.startswith(f"L{best[0]}N{best[1]} promotes ")
    assert f"follows {agree[best]} of its {followed[best]} strongest triggers" in insight.title
    shown = run_command(insight, capsys)
    following = [one["next_token"] for one in shown["triggers"]["top"] if one["next_token"] is not None]
    assert len(following) == followed[best]
    assert following.count(shown["value"]["promotes"][0]["token"]) == agree[best]


def test_the_clearest_memory_is_confirmed_by_triggers_that_were_held_out(full: memlens.Index) -> None:
    values = {(row["layer"], row["memory"]): row["tokens"][:10] for row in rows_of(full, "values")}
    sentences = {row["sentence"]: set(row["tokens"]) for row in rows_of(full, "corpus")}
    places = {
        (row["layer"], row["memory"], row["rank"]): row for row in rows_of(full, "triggers") if row["end"] == "top"
    }
    material, found = Material(full), []
    for row in rows_of(full, "patterns"):
        name = row["layer"], row["memory"]
        triggers = [places[(*name, rank)] for rank in row["prefixes"] if (*name, rank) in places]
        if triggers:
            read = set.union(*(sentences[trigger["sentence"]] for trigger in triggers))
            promoted = [token for token in values[name] if token in read and material.is_word(token)]
            is_phrase = median(trigger["position"] for trigger in triggers) >= 5
            held = -(row["precision"] or 0)
            order = (row["kind"] != "semantic", len(row["prefixes"]) < 10, not is_phrase, held, -len(promoted))
            found.append(((*order, -row["confidence"], *name, row["pattern"]), row["description"]))
    order, description = min(found)
    insight = only(full, "memory")
    assert len({one[0][:5] for one in found}) > 1, "nothing to choose between"
    assert insight.title.startswith(f"L{order[6]}N{order[7]} detects ")
    assert insight.title.endswith(visible(description).removeprefix("about: "))
    assert (order[4] == 0) == (not any("top tokens that occur in these sentences" in line for line in insight.lines))


def test_the_rarest_memory_fires_on_the_fewest_prefixes(bare: memlens.Index) -> None:
    filled = Counter((row["layer"], row["memory"]) for row in rows_of(bare, "triggers") if row["end"] == "top")
    alive = [row for row in rows_of(bare, "memories") if filled[row["layer"], row["memory"]] >= 5]
    rarest = min(alive, key=lambda row: (row["frequency"], row["layer"], row["memory"]))
    title = only(bare, "rarest").title
    assert title.startswith(f"L{rarest['layer']}N{rarest['memory']} is rarely active: on ")
    assert f"{rarest['frequency']:.2%}" in title


def test_the_token_of_most_values_is_counted_and_its_command_lists_them(
    bare: memlens.Index, capsys: pytest.CaptureFixture[str]
) -> None:
    times = Counter(row["argmax"] for row in rows_of(bare, "values"))
    material = Material(bare)
    words = [token for token in times if material.is_word(token)] or list(times)
    best = min(words, key=lambda token: (-times[token], token))
    insight = only(bare, "wanted")
    assert insight.title.endswith(f"is the top token of {times[best]:,} values")
    assert sum(one["rank"] == 0 for one in run_command(insight, capsys)["found"]) == times[best]


def test_dead_memories_are_counted(bare: memlens.Index) -> None:
    rows = rows_of(bare, "memories")
    dead = sum(row["dead"] for row in rows)
    every = f"All {len(rows):,} memories are active somewhere in this corpus"
    assert only(bare, "dead").title.startswith(f"{dead:,} of {len(rows):,} memories" if dead else every)


def refinement(rates: list[float]) -> list[dict[str, Any]]:
    return [
        {"layer": layer, "prefixes": 1000, "match": round(1000 * rate), "rate": rate, "low": rate, "high": rate}
        | {"step": rate - rates[layer - 1] if layer else None}
        for layer, rate in enumerate(rates)
    ]


@pytest.mark.parametrize(
    ("rates", "title", "crossed", "verdict"),
    [
        ([layer / 20 for layer in range(16)], "The", "layer 10 is the first layer", "appears"),
        ([0.3] * 16, "Not here: The", "no layer", "does not appear"),
    ],
)
def test_where_predictions_settle_is_read_off_the_table(
    full: memlens.Index, rates: list[float], title: str, crossed: str, verdict: str
) -> None:
    write_rows(full, "refinement", refinement(rates))
    insight = only(full, "settling")
    assert insight.title == f"{title} prediction settles layer by layer"
    assert f"{rates[0]:.1%} in layer 0" in insight.lines[0] and f"{rates[-1]:.1%} in layer 15" in insight.lines[0]
    assert insight.lines[1] == (
        f"{crossed} in which more than half of the residuals predict the final token (95% interval)"
    )
    assert f"verdict: {verdict}" in insight.lines


def test_the_share_of_compositions_is_the_mean_over_layers(full: memlens.Index) -> None:
    rows = [
        {"layer": n, "prefixes": 100, "zero": n, "rate": n / 100, "zero_active": n, "rate_active": n / 50}
        for n in range(16)
    ]
    write_rows(full, "composition", rows)
    assert only(full, "composition").title.startswith("7.5% of layer outputs")
    assert only(full, "composition").lines[0] == "outputs that match no active memory: 15.0%"


def test_what_is_no_word_is_passed_over_only_while_there_are_words(bare: memlens.Index) -> None:
    material = Material(bare)
    material.__dict__["_frequent_tokens"], material.__dict__["_corpus_tokens"] = {2}, set(range(6))
    bare.__dict__["vocabulary"] = [" river", ",", " the", "ing", " 1990", " sea", " Antar"]
    assert [material.is_word(token) for token in range(7)] == [True, False, False, False, False, True, False]
    rows: list[dict[str, Any]] = [{"token": token} for token in (1, 2, 5, 0)]
    assert material.first_word(rows, lambda row: row["token"]) == {"token": 5}
    assert material.first_word(rows[:2], lambda row: row["token"]) == {"token": 1}
    assert material.first_word([], lambda row: row["token"]) is None
    material = Material(bare)
    material.__dict__["_frequent_tokens"], material.__dict__["_corpus_tokens"] = set(), {0, 1, 2}
    bare.__dict__["vocabulary"] = ["river", ",", "sea"]  # without spaces
    assert [material.is_word(token) for token in range(3)] == [True, False, True]


def test_commands_can_be_pasted_whatever_the_folder_is_called(
    full: memlens.Index, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = full.folder.with_name("an index; with $signs")
    full.folder.rename(folder)
    index = memlens.open_index(folder)
    for insight in find_all(index):
        assert shlex.split(insight.command)[::2][:2] == ["memlens", str(folder)]
    about_memories = list(find(index, "right", "rarest", "wanted", "dead"))
    for insight in about_memories:
        assert main(shlex.split(insight.command)[1:]) == 0 and capsys.readouterr().out, insight.command
    assert len(about_memories) >= 3
