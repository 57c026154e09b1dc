"""Continuations are those of memlens.generate, do not mix, and bad input is one line."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fastapi.testclient import TestClient

from memlens.errors import ModelError
from memlens.models.memory_model import MemoryModel
from memlens.tracer.intervene import Generation, generate
from memlens.tracer.result import TokenShare

PROMPT = "The river runs"


def steer(client: TestClient, **asked: Any) -> list[dict[str, Any]]:
    answer = client.get("/api/steer", params={"prompt": PROMPT, "count": 6} | asked)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


@pytest.mark.parametrize("asked", [{}, {"set": ["L1N7=25", "L2=x-1"]}, {"temperature": 1.5, "seed": 7, "set": "L0=0"}])
def test_a_continuation_is_the_one_of_the_library(
    client: TestClient, model: MemoryModel, asked: dict[str, Any]
) -> None:
    *tokens, whole = steer(client, **asked)
    edits = asked.get("set")
    expected = generate(model, PROMPT, 6, edits, temperature=asked.get("temperature", 0.0), seed=asked.get("seed", 0))
    assert whole == expected.to_json()
    assert [one["id"] for one in tokens] == list(expected.tokens)
    assert [one["p"] for one in tokens] == list(expected.p)


def test_concurrent_continuations_do_not_mix(client: TestClient) -> None:
    asked = [{"set": f"L1N{number}={20 * number}", "temperature": 1.0, "seed": number} for number in range(4)]
    alone = [steer(client, **one) for one in asked]
    with ThreadPoolExecutor(4) as people:
        together = list(people.map(lambda one: steer(client, **one), asked))
    assert together == alone


@pytest.mark.parametrize(
    ("asked", "status", "words"),
    [
        ({"set": "L1N4000=0"}, 404, "does not exist"),
        ({"set": "L1N7"}, 422, "the edit 'L1N7' has no '='"),
        ({"count": 201}, 422, "count"),
        ({"temperature": -1}, 422, "temperature"),
        ({"prompt": "the " * 300}, 422, "tokens"),
    ],
)
def test_invalid_requests_are_refused_before_the_response_starts(
    client: TestClient, asked: dict[str, Any], status: int, words: str
) -> None:
    answer = client.get("/api/steer", params={"prompt": PROMPT, "count": 6} | asked)
    assert answer.status_code == status and words in answer.json()["error"]


def test_an_edit_that_overflows_is_refused_before_the_response_starts(client: TestClient) -> None:
    answer = client.get("/api/steer", params={"prompt": PROMPT, "set": "L0=1e38"})
    assert answer.status_code in (409, 422) and answer.json()["error"]


def test_an_error_in_the_middle_is_the_last_line(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    own, calls = Generation.__next__, []

    def fails_later(self: Generation) -> TokenShare:
        calls.append(1)
        if len(calls) > 2:
            raise ModelError("the coefficients are no longer finite; take smaller ones")
        return own(self)

    monkeypatch.setattr(Generation, "__next__", fails_later)
    *tokens, last = steer(client)
    assert len(tokens) == 2 and "no longer finite" in last["error"]
