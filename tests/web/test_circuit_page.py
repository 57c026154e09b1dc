"""The page Circuit and its JSON give the results of memlens.circuit, and bad input is one line."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from memlens.circuits.graph import circuit
from memlens.models.memory_model import MemoryModel
from memlens.web.pages.circuit import read_groups

PROMPT = "The river runs"


def test_the_json_is_that_of_the_library(client: TestClient, model: MemoryModel) -> None:
    answer = client.get("/api/circuit", params={"prompt": PROMPT, "token": "␣the", "nodes": 9}).json()
    expected = circuit(model, PROMPT, token=" the", nodes=9).to_json()
    assert answer["target"] == pytest.approx(expected["target"]) and answer["tokens"] == expected["tokens"]
    assert [node["id"] for node in answer["nodes"]] == [node["id"] for node in expected["nodes"]]
    weights = [edge["weight"] for edge in answer["edges"]]
    assert weights == pytest.approx([edge["weight"] for edge in expected["edges"]], abs=1e-6)


def test_the_graph_is_a_file_with_the_groups_of_the_page(client: TestClient, model: MemoryModel) -> None:
    first, second = (node.id for node in circuit(model, PROMPT, nodes=9).memories[:2])
    asked = {"prompt": PROMPT, "nodes": 9, "group": f"-{first},{second}|two | of them"}
    answer = client.get("/api/circuit/graph", params=asked)
    ((name, *ids),) = answer.json()["qParams"]["supernodes"]
    assert answer.headers["content-disposition"] == 'attachment; filename="circuit.json"'
    assert (
        name == "two | of them" and set(ids) <= {node["node_id"] for node in answer.json()["nodes"]} and len(ids) == 2
    )


def test_a_group_without_a_name_has_one(model: MemoryModel) -> None:
    graph = circuit(model, PROMPT, nodes=2)
    assert read_groups(graph, [f"{graph.memories[0].id}|"]) == {"group": [graph.memories[0].id]}


@pytest.mark.parametrize(
    ("path", "query", "status", "words"),
    [
        ("", {"prompt": ""}, 422, "prompt"),
        ("", {"prompt": "b"}, 422, "the prompt has one token; a circuit needs at least two"),
        ("", {"token": "no such token"}, 404, "is not one token"),
        ("", {"token": "␣the", "against": "␣the"}, 422, "two different tokens"),
        ("", {"nodes": 0}, 422, "nodes"),
        ("", {"nodes": 10**6}, 422, "nodes"),
        ("", {"prompt": "the " * 200}, 422, "tokens"),
        ("/graph", {"group": "L0N999@1|x"}, 422, "group 'x': the circuit has no node 'L0N999@1'"),
    ],
)
def test_bad_input_is_one_line(client: TestClient, path: str, query: dict[str, Any], status: int, words: str) -> None:
    answer = client.get(f"/api/circuit{path}", params={"prompt": PROMPT} | query)
    assert answer.status_code == status and words in answer.json()["error"] and "\n" not in answer.json()["error"]


def test_input_is_shown_as_text(client: TestClient) -> None:
    page = client.get("/circuit", params={"prompt": '</textarea><script>alert("x")</script>', "token": '"><b>'}).text
    assert "<script>alert" not in page and '"><b>' not in page and page.count("</textarea>") == 1


def test_without_the_model_the_page_says_how_to_load_it(
    client_of: Callable[..., TestClient], index_folder: Path
) -> None:
    bare = client_of(index_folder)
    page = bare.get("/circuit", params={"prompt": PROMPT})
    assert page.status_code == 200 and "memlens serve" in page.text and PROMPT in page.text
    assert re.search(r"<button[^>]* disabled", page.text)
    assert bare.get("/api/circuit", params={"prompt": PROMPT}).status_code == 409
