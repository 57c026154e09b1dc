"""The page Annotate and its JSON: the paper's protocol, nothing lost, nobody sees too much."""

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

import pytest
from fastapi.testclient import TestClient
from own_server import without_labels

from memlens.annotations.records import Annotations, Sample
from memlens.annotations.study import draw_sample, read_study
from memlens.errors import SettingError
from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.web.pages.annotate import patterns_of_form

FORM = {"content-type": "application/x-www-form-urlencoded"}
ClientOf = Callable[..., TestClient]
RIVER = {"description": "the river", "kind": "semantic", "prefixes": [0, 1, 2]}


@pytest.fixture
def study(own_index: Index) -> Index:
    """Two memories to label, four prefixes of each."""
    alive = own_index.sql("SELECT DISTINCT layer, memory FROM {triggers} WHERE rank = 3 ORDER BY layer, memory LIMIT 2")
    names = tuple(MemoryId(row["layer"], row["memory"]) for row in alive)
    notes = Annotations(without_labels(own_index))
    notes.set_sample(Sample(names, 4, 0))
    return own_index


@pytest.fixture
def client(study: Index, client_of: ClientOf) -> TestClient:
    return client_of(study)


def sampled(index: Index) -> list[str]:
    return [str(name) for name in read_study(Annotations(index)).memories]


def label(client: TestClient, annotator: str, memory: str, *patterns: dict[str, Any]) -> Any:
    content = {"annotator": annotator, "memory": memory, "patterns": patterns}
    return client.post("/api/annotate/labels", json=content)


def labels_of(client: TestClient, annotator: str) -> Any:
    return client.get(f"/api/annotate/labels?as={annotator}").json()["labels"]


def post_form(client: TestClient, path: str, fields: list[tuple[str, str]], **query: str) -> Any:
    return client.post(f"{path}?{urlencode(query)}", content=urlencode(fields), headers=FORM, follow_redirects=False)


def test_looking_makes_no_file(own_index: Index, client_of: ClientOf) -> None:
    client = client_of(without_labels(own_index))
    for address in ("/annotate", "/annotate?as=ann", "/api/annotate", "/api/annotate/labels?as=ann"):
        assert client.get(address).status_code == 200
    assert "Draw a sample" in client.get("/annotate").text
    assert not (own_index.folder / "annotations.jsonl").exists()


def test_a_sample_is_drawn_as_the_command_draws_it(own_index: Index, client_of: ClientOf) -> None:
    client = client_of(without_labels(own_index))
    answer = post_form(client, "/annotate/sample", [("per_layer", "2"), ("top", "7"), ("seed", "3")])
    assert answer.status_code == 303 and answer.headers["location"] == "/annotate"
    told = client.get("/api/annotate").json()
    drawn = draw_sample(own_index, 2, 7, 3)
    assert told == {"memories": [str(name) for name in drawn.memories], "top": 7, "people": []}
    assert client.post("/api/annotate/sample", json={"per_layer": 1}).json()["top"] == 25
    assert post_form(client, "/annotate/sample", [("per_layer", "many")]).status_code == 422
    assert post_form(client, "/annotate/sample", [("per_layer", "0")]).status_code == 422


def test_one_labels_memory_by_memory_and_finishes(client: TestClient, study: Index) -> None:
    first, second = sampled(study)
    begun = client.get("/annotate?as=ann", follow_redirects=False)
    assert begun.status_code == 303 and begun.headers["location"] == f"/annotate?as=ann&memory={first}"
    page = client.get(begun.headers["location"]).text
    shown = [int(rank) for rank in re.findall(r'<li data-rank="(\d+)"', page)]
    assert shown == [0, 1, 2, 3] and "0 of 2 labeled" in page
    ticks = [("tick", f"0:{rank}") for rank in (0, 1, 3)] + [("tick", f"2:{rank}") for rank in (1, 2, 3)]
    named = {"text0": " ends alike ", "kind0": "shallow", "text1": "", "text2": "rivers", "kind2": "semantic"}
    saved = post_form(client, "/annotate/save", [*named.items(), *ticks], **{"as": "ann", "memory": first})
    assert saved.status_code == 303 and saved.headers["location"] == "/annotate?as=ann"
    (saved_label,) = labels_of(client, "ann")
    assert saved_label["memory"] == first and saved_label["patterns"] == [
        {"description": "ends alike", "kind": "shallow", "prefixes": [0, 1, 3]},
        {"description": "rivers", "kind": "semantic", "prefixes": [1, 2, 3]},
    ]
    again = client.get(f"/annotate?as=ann&memory={first}").text
    assert 'value="ends alike"' in again and 'value="1:3" checked' in again and "1 of 2 labeled" in again
    assert post_form(client, "/annotate/save", [], **{"as": "ann", "memory": second}).status_code == 303  # no pattern
    assert "All 2 memories are labeled" in client.get("/annotate?as=ann").text
    assert post_form(client, "/annotate/finish", [], **{"as": "ann"}).status_code == 303
    assert "Thank you" in client.get("/annotate?as=ann").text
    refused = post_form(client, "/annotate/save", [], **{"as": "ann", "memory": first})
    assert refused.status_code == 422 and "has finished" in refused.text


def test_what_is_refused_is_shown_again_with_the_reason(client: TestClient, study: Index) -> None:
    first = sampled(study)[0]
    fields = [("text0", "only two & <b>"), ("kind0", "semantic"), ("tick", "0:0"), ("tick", "0:2")]
    page = post_form(client, "/annotate/save", fields, **{"as": "ann", "memory": first})
    assert page.status_code == 422 and "fewer than 3 prefixes" in page.text
    assert 'value="only two &amp; &lt;b&gt;"' in page.text and 'value="0:2" checked' in page.text
    assert labels_of(client, "ann") == []


def test_undo_brings_back_what_was_said_before(client: TestClient, study: Index) -> None:
    first = sampled(study)[0]
    for patterns in ([RIVER], []):
        assert label(client, "ann", first, *patterns).status_code == 200
    undone = post_form(client, "/annotate/undo", [], **{"as": "ann", "memory": first})
    assert undone.status_code == 303 and undone.headers["location"].endswith(f"memory={first}")
    assert labels_of(client, "ann")[0]["patterns"] == [RIVER]
    assert client.post("/api/annotate/undo", json={"annotator": "ann", "memory": first}).json()["done"] == []
    answer = client.post("/api/annotate/undo", json={"annotator": "ann", "memory": first})
    assert answer.status_code == 422 and "no label" in answer.json()["error"]


def test_nobody_sees_others_before_finishing(study: Index, client_of: ClientOf) -> None:
    client, stranger = client_of(study), client_of(study)
    first = sampled(study)[0]
    for memory in sampled(study):
        assert label(stranger, "ann", memory, RIVER | {"description": "ann's secret"}).status_code == 200
    stranger.post("/api/annotate/finish", json={"annotator": "ann"})
    for name in ("bob", "Zoë; <b>"):  # from the first look at a memory, before anything is saved
        assert client.get("/annotate", params={"as": name}).status_code == 200
        page, answer = client.get(f"/m/{first}").text, client.get(f"/api/memories/{first}").json()
        assert "secret" not in page and "labels of others when you have finished" in page and "Zoë; <b>" not in page
        assert answer["labels"] == [] and answer["unfinished"] == name
    assert "secret" in stranger.get(f"/m/{first}").text
    client.get("/annotate", params={"as": "bob"})
    for memory in sampled(study):
        assert label(client, "bob", memory, RIVER).status_code == 200
    for address in (
        "/annotate",
        "/annotate?as=bob",
        f"/annotate?as=bob&memory={first}",
        "/api/annotate",
        f"/m/{first}",
    ):
        assert "secret" not in client.get(address).text
    assert {one["annotator"] for one in labels_of(client, "bob")} == {"bob"} and "the river" in client.get(
        f"/m/{first}"
    ).text
    assert client.post("/api/annotate/finish", json={"annotator": "bob"}).status_code == 200
    page, study_page = client.get(f"/m/{first}").text, client.get("/annotate?as=bob").text
    assert "the river" in page and "secret" in page and "is not shown" not in page
    assert "ann&#39;s secret" in study_page and "Agreement" in study_page


def test_spaces_around_a_name_make_nobody_else(client: TestClient, study: Index) -> None:
    first = sampled(study)[0]
    for name in ("ann", " ann", "ann\t"):
        assert label(client, name, first).status_code == 200
        assert post_form(client, "/annotate/save", [], **{"as": name, "memory": first}).status_code == 303
    assert [one["annotator"] for one in client.get("/api/annotate").json()["people"]] == ["ann"]
    assert client.post("/api/annotate/finish", json={"annotator": "  "}).status_code == 422


def test_nothing_is_written_for_another_site(client: TestClient, study: Index) -> None:
    content = {"annotator": "eve", "memory": sampled(study)[0], "patterns": []}
    for wrong in ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}):
        assert client.post("/api/annotate/labels", json=content, headers=wrong).status_code == 403
    assert client.get("/api/annotate").json()["people"] == []


BAD_PATTERNS: list[tuple[dict[str, Any], str]] = [
    ({"kind": "deep"}, "not a class"),
    ({"description": " "}, "no description"),
    ({"description": "x" * 201}, "more than 200 characters"),
    ({"prefixes": [0, 1, 4]}, "the trigger ranks of L0N0 are 0 to 3"),
    ({"prefixes": [0, 0, 0]}, "fewer than 3"),
    ({"prefixes": ["x"]}, "prefixes"),
]


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"memory": "L0N99999"}, 404, "does not exist"),
        ({"memory": "nonsense"}, 404, "not the name of a memory"),
        ({"annotator": "\u202e\x07"}, 404, "is not a valid annotator name"),
        ({"annotator": ""}, 422, "annotator"),
        ({"patterns": "none"}, 422, "patterns"),
        *(({"patterns": [RIVER | change]}, 422, words) for change, words in BAD_PATTERNS),
    ],
)
def test_bad_labels_are_refused_with_one_line(
    client: TestClient, study: Index, change: dict[str, Any], status: int, words: str
) -> None:
    content = {"annotator": "ann", "memory": sampled(study)[0], "patterns": [RIVER]} | change
    answer = client.post("/api/annotate/labels", json=content)
    assert answer.status_code == status and words in answer.json()["error"] and "\n" not in answer.json()["error"]
    assert client.get("/api/annotate").json()["people"] == []


def test_odd_addresses_and_forms_are_answered(client: TestClient, study: Index) -> None:
    first = sampled(study)[0]
    outside = next(f"L0N{number}" for number in range(40) if f"L0N{number}" not in sampled(study))
    for memory in (outside, "L7N1", "../.."):
        assert client.get(f"/annotate?as=ann&memory={memory}").status_code == 404
    assert client.get(f"/annotate?as={'x' * 61}").status_code == 422
    evil = client.get("/annotate", params={"as": "<script>alert(1)</script>", "memory": first})
    assert evil.status_code == 200 and "<script>alert" not in evil.text
    query = {"as": "ann", "memory": first}
    for fields in ([("tick", "0")], [("tick", "0:-1")], [("tick", "0:9999999999")], [("text0", "x" * 200_000)]):
        assert post_form(client, "/annotate/save", fields, **query).status_code == 422
    broken = client.post(f"/annotate/save?as=ann&memory={first}", content=b"\xff\xfe=%ff", headers=FORM)
    assert broken.status_code == 422


def test_a_form_becomes_patterns() -> None:
    named = {"text0": "", "kind0": "shallow", "text1": "a", "kind1": "semantic", "then": "next"}
    (pattern,) = patterns_of_form([*named.items(), ("tick", "1:4"), ("tick", "1:2")])
    assert (pattern.description, pattern.kind, pattern.prefixes) == ("a", "semantic", (4, 2))
    (nameless,) = patterns_of_form([("tick", "3:1")])  # not dropped here, so that it is refused
    assert nameless.description == "" and nameless.prefixes == (1,)
    with pytest.raises(SettingError, match="not a checkbox value"):
        patterns_of_form([("tick", "1:x")])


def test_a_damaged_line_is_reported_and_all_others_count(study: Index, client_of: ClientOf) -> None:
    client, first = client_of(study), sampled(study)[0]
    assert label(client, "ann", first, RIVER).status_code == 200
    with (study.folder / "annotations.jsonl").open("ab") as file:
        file.write(b"not an event\n")
    assert label(client, "bob", first, RIVER).status_code == 200
    for path in ("/annotate", "/collections"):
        assert "line 3 is damaged" in client.get(path).text
    assert [one["annotator"] for one in client.get("/api/annotate").json()["people"]] == ["ann", "bob"]


def test_a_file_that_cannot_be_written_is_reported(study: Index, client_of: ClientOf) -> None:
    client, first = client_of(study), sampled(study)[0]
    (study.folder / "annotations.jsonl").unlink()
    (study.folder / "annotations.jsonl").mkdir()
    answer = client.put(f"/api/collections/{first}", json={"star": True})
    assert answer.status_code == 409 and "annotations.jsonl: Is a directory" in answer.json()["error"]
