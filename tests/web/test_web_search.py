"""Search: the same answers as the command line's functions, filters that hold everywhere, and no way to break it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import memlens
from memlens.errors import SettingError
from memlens.index.reader import Index
from memlens.index.search import PatternSearch, search_patterns, search_triggers
from memlens.vocab.search import search_values
from memlens.web.search_arrays import find_patterns, find_tokens, find_triggers
from memlens.web.served_index import ServedIndex
from memlens.web.statistics import Statistics, read_statistics


@pytest.fixture(scope="module")
def served(index_folder: Path) -> Iterator[ServedIndex]:
    with closing(ServedIndex(index_folder)) as opened:
        yield opened


WORDS = [
    "the",
    "The",
    "a",
    " of ",
    "river",
    "RIVER",
    "zzz",
    "é",
    "—",
    "\ufffd",
    "<script>",
    "'",
    '"',
    "%",
    "\u202e",
    "ß",
]


@pytest.mark.parametrize("ignore_case", [True, False])
@pytest.mark.parametrize("text", WORDS)
def test_text_in_triggers_is_found_as_search_triggers_finds_it(
    served: ServedIndex, index: Index, text: str, ignore_case: bool
) -> None:
    for limit in (1, 7, 500):
        mine = find_triggers(served, text, None, ignore_case=ignore_case, limit=limit)
        assert mine == search_triggers(index, text, ignore_case=ignore_case, limit=limit)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(min_size=1, max_size=4), st.booleans())
def test_any_text_is_found_as_search_triggers_finds_it(served: ServedIndex, text: str, ignore_case: bool) -> None:
    mine = find_triggers(served, text, None, ignore_case=ignore_case, limit=5)
    assert mine == search_triggers(served, text, ignore_case=ignore_case, limit=5)


def test_both_ends_and_bos_are_searched_alike(tmp_path: Path) -> None:
    """A gated model keeps bottom triggers; with the released preset BOS alone can be a trigger."""
    from memlens.testing import save_tiny

    text = tmp_path / "text.txt"
    text.write_text("The river runs to the sea. Rain fell on the café. The river rose.\n" * 2, encoding="utf-8")
    model = save_tiny(tmp_path / "model", "llama", adds_bos=True)
    index = memlens.scan(str(model), text, out=tmp_path / "index", top=6, threads=1, preset="released")
    ends = {row["end"] for row in index.sql('SELECT DISTINCT "end" FROM {triggers}')}
    assert ends == {"top", "bottom"} and index.sql("SELECT min(position) AS p FROM {triggers}")[0]["p"] == -1
    with closing(ServedIndex(index.folder)) as served:
        for word in ("river", "r", "é", "sea", "T"):
            found = find_triggers(served, word, None, ignore_case=False, limit=99)
            assert found == search_triggers(index, word, limit=99)


def test_filters_keep_exactly_the_memories_that_pass(served: ServedIndex, client: TestClient) -> None:
    statistics = read_statistics(served)
    everything = search_triggers(served, "the", ignore_case=True, limit=10_000).found
    asked = client.get("/api/search?q=the&layers=1-2&class=shallow&limit=500").json()
    mask = np.isin(statistics.categories["class"], [1, 3])
    kept = [str(one.memory) for one in everything if one.memory.layer > 0 and mask[statistics.row_of(one.memory)]]
    assert [one["name"] for one in asked["found"]] == kept[:500]
    assert asked["total"] == len(kept) and 0 < len(kept) < len(everything)


def test_a_class_includes_both_and_none_does_not(client: TestClient) -> None:
    def total(kind: str) -> int:
        return int(client.get(f"/api/search?class={kind}").json()["total"])

    every = int(client.get("/api/search").json()["total"])
    assert total("shallow") + total("semantic") - total("both") + total("none") == every


def test_tokens_are_found_as_search_values_finds_them(served: ServedIndex, index: Index) -> None:
    statistics = read_statistics(served)
    mask = statistics.chosen([0, 2])
    vocabulary = [text for text in dict.fromkeys(index.vocabulary) if text]
    queries = [
        ["the"],
        [" the"],
        ["the", " the"],
        [" of", " the", "e"],
        vocabulary[5:40],
        *([text] for text in vocabulary),
    ]
    compared = 0
    for texts in queries:
        if not set(texts) <= set(vocabulary):
            continue
        every = search_values(index, texts, limit=None)
        for chosen, kept in ((None, every), (mask, [one for one in every if one.memory.layer != 1])):
            found, total = find_tokens(served, texts, chosen, 7)
            assert total == len(kept) and [one.memory for one in found] == [one.memory for one in kept[:7]]
            assert [one.found for one in found] == [one.found for one in kept[:7]]
            compared += bool(kept)
    assert compared > 50


@pytest.mark.parametrize("text", ["ends", "END", "with", 'ends with "', "about", "a", ":", "e", "zzz", "ending:", "é"])
def test_patterns_are_found_as_search_patterns_finds_them(served: ServedIndex, index: Index, text: str) -> None:
    if text == ":":
        with pytest.raises(SettingError, match="no word"):
            find_patterns(served, text, None, 5)
        return
    expected = search_patterns(index, text, substring=True, limit=1000)
    found = find_patterns(served, text, None, 1000)
    assert found.total == expected.total
    assert found.found == tuple(replace(one, name="") for one in expected.found)
    mask = read_statistics(served).chosen([2])
    second = tuple(replace(one, name="") for one in expected.found if one.memory.layer == 2)
    assert find_patterns(served, text, mask, 3) == PatternSearch(second[:3], len(second))


def test_filters_choose_by_layer_class_and_agreement_together() -> None:
    classes = np.array([0, 1, 2, 3, 0, 1, 2, 3], np.uint8)
    agreement = np.array([2, 2, 2, 2, 1, 1, 2, 0], np.uint8)
    statistics = Statistics((4, 1), np.array([0, 4, 8]), {}, {"class": classes, "agreement": agreement})
    assert np.flatnonzero(statistics.chosen(kind="semantic")).tolist() == [2, 3, 6, 7]
    assert np.flatnonzero(statistics.chosen(kind="none")).tolist() == [0, 4]
    assert np.flatnonzero(statistics.chosen(kind="both")).tolist() == [3, 7]
    assert np.flatnonzero(statistics.chosen([1], "semantic", "yes")).tolist() == [6]
    assert np.flatnonzero(statistics.chosen([1], None, "no")).tolist() == [4, 5]
    assert [str(statistics.memory_at(row)) for row in (0, 3, 4, 7)] == ["L4N0", "L4N3", "L1N0", "L1N3"]
    assert statistics.rows_of(np.array([1, 4]), np.array([2, 1])).tolist() == [6, 1]


def test_a_token_is_found_with_and_without_its_space(client: TestClient, index: Index) -> None:
    both = [text for text in ("the", " the") if text in index.vocabulary]
    assert both
    asked = client.get("/api/search?q=the&in=values&limit=500").json()
    expected = search_values(index, both, limit=None)
    assert [one["name"] for one in asked["found"]] == [str(one.memory) for one in expected][:500]
    assert asked["total"] == len(expected)


def test_what_is_no_token_is_looked_for_inside_tokens(client: TestClient) -> None:
    found = client.get("/api/search?q=iv&in=values").json()
    if found["found"]:
        assert all("iv" in token["text"] for one in found["found"] for token in one["tokens"])
    nothing = client.get("/api/search?q=qqqqqq&in=values").json()
    assert nothing["total"] == 0 and "no token" in nothing["note"]


def test_patterns_are_found_by_their_words(client: TestClient, index: Index) -> None:
    row = index.sql("SELECT description FROM {patterns} ORDER BY layer, memory, pattern LIMIT 1")[0]
    found = client.get("/api/search", params={"q": row["description"], "in": "patterns"}).json()
    assert found["total"] >= 1 and any(one["pattern"] == row["description"] for one in found["found"])
    layer = client.get("/api/search", params={"q": "ends", "in": "patterns", "layers": "2", "limit": 500}).json()
    assert all(one["name"].startswith("L2N") for one in layer["found"])


def test_names_are_completed(client: TestClient) -> None:
    found = client.get("/api/search?q=l1n3&in=name").json()
    assert [one["name"] for one in found["found"]] == ["L1N3", *(f"L1N{number}" for number in range(30, 40))]
    assert client.get("/api/search?q=L1&in=name").json()["total"] == 40
    assert client.get("/api/search?q=L9N1&in=name").status_code == 404
    assert client.get("/api/search?q=river&in=name").status_code == 422


def test_a_whole_name_leads_to_its_memory(client: TestClient) -> None:
    answer = client.get("/search?q=L1N3", follow_redirects=False)
    assert answer.status_code == 303 and answer.headers["location"] == "/m/L1N3"


@pytest.mark.parametrize("order", ["max", "frequency", "mean"])
def test_without_a_text_memories_come_by_a_statistic(client: TestClient, index: Index, order: str) -> None:
    found = client.get(f"/api/search?order={order}&limit=15").json()["found"]
    rows = index.sql(f"SELECT layer, memory FROM {{memories}} ORDER BY {order} DESC, layer, memory LIMIT 15")
    assert [one["name"] for one in found] == [f"L{row['layer']}N{row['memory']}" for row in rows]


def test_the_page_needs_no_javascript(client: TestClient) -> None:
    text = client.get("/search?q=the&layers=1-2&class=shallow").text
    assert 'value="the"' in text and 'value="1-2"' in text and '<option value="shallow" selected>' in text
    assert '<a href="/m/L' in text and "<b>the</b>" in text.lower()


def test_corpus_text_and_queries_are_shown_as_text(client: TestClient) -> None:
    text = client.get("/search", params={"q": "<script>alert('evil')</script>"}).text
    assert "<script>alert" not in text and "&lt;script&gt;" in text
    assert "\u202e" not in client.get("/search?q=turned").text


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("layers=99", 404),
        ("layers=x", 422),
        ("layers=5-1", 422),
        ("limit=0", 422),
        ("limit=501", 422),
        ("in=nowhere", 422),
        ("class=pretty", 422),
        ("agreement=maybe", 422),
        ("order=beauty", 422),
        ("q=%ff%fe", 200),
        ("q=%00", 200),
        ("q=" + "x" * 201, 422),
        ("in=patterns&q=%22", 422),
    ],
)
def test_bad_input_is_one_line_on_both_sides(client: TestClient, query: str, status: int) -> None:
    answer = client.get(f"/api/search?{query}")
    assert answer.status_code == status
    assert client.get(f"/search?{query}").status_code == status
    if status >= 400:
        assert set(answer.json()) == {"error"} and "\n" not in answer.json()["error"]
