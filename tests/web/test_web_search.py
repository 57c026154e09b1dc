"""Search gives the same results on the command line and in the workbench."""

import json
import re
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings, strategies as st

import memlens
from memlens.cli import main
from memlens.index.reader import Index
from memlens.index.search import SearchQuery, search
from memlens.memory import MemoryId
from memlens.models.memory_model import MemoryModel
from memlens.pattern.words import KINDS

WORDS = ["the", "The", "a", " of ", "RIVER", "zzz", "é", "—", "\ufffd", "<script>", "'", '"', "%", "\u202e", "ß"]
FILTERS = [{}, {"layers": "1-2"}, {"class": "shallow", "agreement": "no"}, {"class": "none"}, {"class": "both"}]


def lowered(text: str) -> str:
    """Lowercase letter by letter, as DuckDB does. Python writes some letters as two."""
    return "".join(letter.lower() if len(letter.lower()) == 1 else letter for letter in text)


@cache
def trigger_texts(index: Index) -> dict[tuple[MemoryId, str], list[str]]:
    memories = [index.names.name(layer, n) for layer in index.layers for n in range(index.memories(layer))]
    lists = {end: index.triggers_of(memories, end) for end in ("top", "bottom")}
    return {(name, end): [one.text for one in lists[end][name]] for name in memories for end in lists}


def check_search(index: Index, text: str, ignores: bool | None = None, ends: bool = False, limit: int = 99) -> None:
    """Compare a search in triggers with every trigger of the index, one after another."""
    change = lowered if ignores or (ignores is None and text == text.lower()) else str
    wanted, expected = change(text), []
    for (name, end), texts in trigger_texts(index).items():
        changed = map(change, texts)
        ranks = [r for r, own in enumerate(changed) if (own.endswith(wanted) if ends else wanted in own)]
        expected += [(-len(ranks), ranks[0], name, end)] if ranks else []
    expected.sort(key=lambda row: (row[:2], row[2].layer, row[2].memory, row[3] != "top"))
    found = search(index, SearchQuery((text,), ignore_case=ignores, ends=ends, limit=limit))
    assert [(-hit.matches, hit.trigger.rank, hit.name, hit.end) for hit in found.found] == expected[:limit]
    assert found.total == len(expected)


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize(
    ("q", "options"),
    [
        *[("the", {}), ("The", {}), ("THE", {"ignore_case": True}), ("the", {"ends": True}), ("the", {"in": "values"})],
        ("e", {"in": "values", "substring": True}),
        ("the", {"in": "values", "bottom": True}),
        (["the", "iv"], {"in": "values"}),
        ("ends wi", {"in": "patterns"}),
        ("nd", {"in": "patterns", "substring": True}),
        ("L1N3", {"in": "name"}),
        ("", {"order": "mean"}),
        ("", {"order": "max_p"}),
    ],
)
def test_the_command_line_and_the_workbench_give_the_same_answer(
    client: TestClient,
    index: Index,
    capsys: pytest.CaptureFixture[str],
    q: str | list[str],
    options: dict[str, object],
    filters: dict[str, str],
) -> None:
    asked = {**options, **filters, "limit": 30}
    arguments = [q] if isinstance(q, str) and q else list(q)
    for name, value in asked.items():
        arguments += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    assert main(["search", str(index.folder), *arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == client.get("/api/search", params={"q": q, **asked}).json()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.text(min_size=1, max_size=4), st.booleans(), st.booleans())
def test_any_text_is_found_in_the_triggers_that_contain_it(index: Index, text: str, ignores: bool, ends: bool) -> None:
    check_search(index, text, ignores, ends)


def test_selected_texts_are_found_in_the_triggers_that_contain_them(index: Index) -> None:
    for text, ignores, limit in product(WORDS, (True, None), (7, 500)):
        check_search(index, text, ignores, limit=limit)


def test_both_ends_and_bos_are_searched(tiny_llama: Path, tiny_text: Path, tmp_path: Path) -> None:
    """A gated model keeps bottom triggers; with the released preset BOS alone can be a trigger."""
    index = memlens.scan(tiny_llama, tiny_text, out=tmp_path / "index", top=6, threads=1, preset="released")
    ends = {row["end"] for row in index.sql('SELECT DISTINCT "end" FROM {triggers}')}
    assert ends == {"top", "bottom"} and index.sql("SELECT min(position) AS p FROM {triggers}")[0]["p"] == -1
    for word in ("river", "r", "é", "sea", "T"):
        check_search(index, word)
        check_search(index, word, ends=True)


def test_filters_keep_exactly_the_memories_that_pass(client: TestClient, index: Index) -> None:
    patterns, values = index.table("patterns").to_pylist(), index.table("values").to_pylist()
    kinds: dict[str, set[str]] = {}
    for row in patterns:
        if row["kind"] not in KINDS:  # patterns of next tokens do not count
            continue
        kinds.setdefault(f"L{row['layer']}N{row['memory']}", set()).add(row["kind"])
    agree = {f"L{row['layer']}N{row['memory']}": row["argmax"] == row["target"] for row in values if row["target"]}
    every = [one["name"] for one in client.get("/api/search?q=the&limit=500").json()["found"]]
    for query, passes in (
        ("layers=1-2", lambda name: name[1] in "12"),
        ("class=shallow", lambda name: kinds.get(name) == {"shallow"}),
        ("class=semantic", lambda name: kinds.get(name) == {"semantic"}),
        ("class=both", lambda name: len(kinds.get(name, ())) == 2),
        ("class=none", lambda name: name not in kinds),
        ("agreement=yes", lambda name: agree.get(name) is True),
        ("agreement=no&layers=0", lambda name: agree.get(name) is False and name[1] == "0"),
    ):
        asked = client.get(f"/api/search?q=the&limit=500&{query}").json()
        kept = [name for name in every if passes(name)]
        assert [one["name"] for one in asked["found"]] == kept and asked["total"] == len(kept)


def test_a_text_that_is_not_a_token_is_searched_inside_tokens(client: TestClient) -> None:
    found = client.get("/api/search?q=iv&in=values").json()
    if found.get("found"):
        assert all("iv" in token["text"] for one in found["found"] for token in one["tokens"])
    nothing = client.get("/api/search?q=qqqqqq&in=values")
    assert nothing.status_code == 404 and "is neither a token" in nothing.json()["error"]


def test_names_are_completed_and_a_full_name_opens_its_memory(client: TestClient) -> None:
    found = client.get("/api/search?q=l1n3&in=name").json()
    assert [one["name"] for one in found["found"]] == ["L1N3", *(f"L1N{number}" for number in range(30, 40))]
    assert client.get("/api/search?q=L1&in=name").json()["total"] == 40
    assert client.get("/api/search?q=L9N1&in=name").status_code == 404
    assert client.get("/api/search?q=river&in=name").status_code == 422
    answer = client.get("/search?q=L1N3", follow_redirects=False)
    assert answer.status_code == 303 and answer.headers["location"] == "/m/L1N3"


@pytest.mark.parametrize("order", ["max", "frequency", "mean"])
def test_without_a_text_memories_are_sorted_by_a_statistic(client: TestClient, index: Index, order: str) -> None:
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


BAD = "layers=x layers=5-1 limit=0 limit=501 in=nowhere class=pretty agreement=maybe order=beauty in=patterns&q=%22"


@pytest.mark.parametrize(
    ("status", "queries"), [(404, "layers=99"), (422, f"{BAD} q={'x' * 1001}"), (200, "q=%ff%fe q=%00")]
)
def test_bad_input_is_one_line_on_both_sides(client: TestClient, status: int, queries: str) -> None:
    for query in queries.split():
        answer = client.get(f"/api/search?{query}")
        assert answer.status_code == client.get(f"/search?{query}").status_code == status, query
        assert status == 200 or (set(answer.json()) == {"error"} and "\n" not in answer.json()["error"])


def test_memories_that_fire_on_a_text_are_those_of_the_library(
    client: TestClient, index: Index, model: MemoryModel
) -> None:
    for order in ("relative", "effect"):
        asked = client.get("/api/fires", params={"text": "The river runs", "order": order, "limit": 7}).json()
        found = memlens.fires_on(model, "The river runs", index=index, order=order, limit=7)
        assert [one["name"] for one in asked["found"]] == [str(one.name) for one in found.found]
        assert [one["effect"] for one in asked["found"]] == pytest.approx([one.effect for one in found.found])
        page = client.get("/search", params={"q": "The river runs", "in": "fires", "by": order, "limit": 7}).text
        assert re.findall(r'class="memory">(L\d+N\d+)<', page) == [str(one.name) for one in found.found]
    assert client.get("/search?in=fires").status_code == 200
    assert client.get("/api/fires?text=a&layers=9").status_code == 404
    assert "/api/fires" in client.get("/api/search?q=a&in=fires").json()["error"]
