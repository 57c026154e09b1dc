"""The page Compare and its JSON give the results of memlens.compare."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

import memlens
from memlens.comparison.compare import compare_indexes
from memlens.index.reader import Index
from memlens.testing import tiny_model, tiny_tokenizer
from memlens.text import probability

ClientOf = Callable[..., TestClient]


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Index:
    folder = tmp_path_factory.mktemp("wide")
    (folder / "text.txt").write_text("The river runs to the sea. The end of the river.", encoding="utf-8")
    model = memlens.load(tiny_model("gpt2", n_inner=52), tokenizer=tiny_tokenizer())
    return memlens.scan(model, folder / "text.txt", out=folder / "index", threads=1)


@pytest.mark.parametrize("by", ["triggers", "values", "patterns"])
def test_two_layers_of_one_index(client: TestClient, index: Index, by: str) -> None:
    answer = client.get("/api/compare", params={"layers": "0:2", "by": by, "top": 7}).json()
    found = compare_indexes(index, index, by=by, layers="0:2", top=7)
    assert answer == found.to_json() and found.alike
    names = [(change.before.memory, change.after.memory) for change in found.changes]
    page = client.get("/compare", params={"a": 0, "b": 2, "by": by, "top": 7}).text  # a form's fields
    places = [page.index(f"<h3>{one} → {other}</h3>") for one, other in names]
    assert places == sorted(places)


def test_without_a_choice_the_last_two_layers_are_shown(client: TestClient) -> None:
    page = client.get("/compare")
    assert page.status_code == 200 and "Layers 1 and 2 of" in page.text
    refused = client.get("/api/compare")
    assert refused.status_code == 422 and "--compare INDEX" in refused.json()["error"]


@pytest.mark.parametrize(("order", "word"), [("alike", "shared"), ("changed", "different")])
def test_the_amount_beside_a_pair_is_what_the_pairs_are_sorted_by(client: TestClient, order: str, word: str) -> None:
    page = client.get(f"/compare?layers=0:1&order={order}").text
    changes = [pair["change"] for pair in client.get(f"/api/compare?layers=0:1&top=10&order={order}").json()["changes"]]
    amounts = [probability(1 - change if order == "alike" else change) for change in changes]
    assert re.findall(rf"</span> ([\d.%e-]+) {word}</p>", page) == amounts


def test_two_indexes_by_name(client_of: Callable[..., TestClient], index: Index, tiny_gpt2_values: Index) -> None:
    client = client_of(index, other=tiny_gpt2_values)
    answer = client.get("/api/compare", params={"top": 9}).json()
    assert answer == compare_indexes(index, tiny_gpt2_values, top=9).to_json() and answer["same_model"] is False
    page = client.get("/compare?by=values&a=&b=&order=changed").text
    assert "By layer" in page and "different models" in page and page.count('class="card"') == 10
    assert "Show more" in page and client.get("/compare?top=40").text.count('class="card"') == 40
    lacking = client.get("/compare?by=patterns")
    assert lacking.status_code == client.get("/api/compare?by=patterns").status_code == 409
    assert "memlens patterns" in lacking.text
    assert client.get("/compare?a=1&b=").status_code == 422  # half a pair


def test_other_shapes_are_compared_layer_by_layer_only(client_of: ClientOf, index: Index, wide: Index) -> None:
    client = client_of(index, other=wide)
    page = client.get("/compare")
    assert page.status_code == 422 and "--layers 3:5" in page.text and "<select" in page.text
    assert client.get("/compare?layers=0:1").status_code == 200


@pytest.mark.parametrize(
    ("status", "queries"),
    [
        (404, "layers=0:99"),
        (422, "layers=3 layers=%3Cscript%3E by=keys top=100000 order=worst a=<b>&b=1"),
        (200, "layers=0:1&a=%00&b=x layers=0:1&top=200"),
    ],
)
def test_bad_input_is_one_line_and_shown_as_text(client: TestClient, status: int, queries: str) -> None:
    for query in queries.split():
        page, answer = client.get(f"/compare?{query}"), client.get(f"/api/compare?{query}")
        assert page.status_code == status
        assert not any(tag in page.text for tag in ("<script>a", "<b>:", "<b>bold"))
        assert answer.status_code in (status, 422)
        assert answer.status_code == 200 or set(answer.json()) == {"error"}


def test_a_comparison_is_computed_once(
    client_of: ClientOf, index_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    own = "memlens.web.pages.compare.compare_indexes"
    monkeypatch.setattr(own, lambda *given, by, **named: calls.append(by) or compare_indexes(*given, by=by, **named))
    client = client_of(index_folder)
    for _ in range(3):
        assert client.get("/api/compare?layers=0:1&by=values").status_code == 200
    assert calls == ["values"]
