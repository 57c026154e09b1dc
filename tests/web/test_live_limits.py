"""Live pages under load: one is computed, a few wait, others are told so; nothing else waits, and nothing is mixed.

A trace is held up by holding the model, so that nothing here depends on how fast the machine is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from own_server import serving, without_labels

from memlens.errors import MemlensError, SettingError
from memlens.index.reader import Index
from memlens.models.memory_model import MemoryModel
from memlens.settings import LiveSettings
from memlens.tracer.intervene import generate, intervene
from memlens.web.pages.memory import silence
from memlens.web.pages.trace import read_grid
from memlens.web.workbench import Turn, Workbench

PROMPT = "The river runs to the sea"
LIVE = {"prompt": PROMPT}


@contextmanager
def held(workbench: Workbench) -> Iterator[None]:
    """Somebody else computes."""
    with workbench.model():
        yield


def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(30_000):  # five minutes: a busy machine is no failure
        if holds():
            return
        time.sleep(0.01)
    raise AssertionError("it never came to that")


def taken(client: TestClient) -> int:
    count: int = client.app.state.turns._taken  # type: ignore[attr-defined]
    return count


def ask(pool: ThreadPoolExecutor, client: TestClient, count: int) -> list[Future[Any]]:
    return [pool.submit(client.get, "/api/trace", params=LIVE) for _ in range(count)]


@pytest.fixture
def busy(client_of: Callable[..., TestClient], index_folder: Path, model: MemoryModel) -> TestClient:
    return client_of(index_folder, model, live=LiveSettings(waiting=2, prompt_tokens=12))


def bench_of(client: TestClient) -> Workbench:
    bench: Workbench = client.app.state.workbench  # type: ignore[attr-defined]
    return bench


def test_look_ups_answer_while_the_model_is_at_work(
    client_of: Callable[..., TestClient], index_folder: Path, model: MemoryModel
) -> None:
    client = client_of(index_folder, model, live=LiveSettings(waiting=16))
    with ThreadPoolExecutor(17) as pool:
        with held(bench_of(client)):
            asked = ask(pool, client, 17)  # more than there are threads for pages
            wait_until(lambda: taken(client) == 17)
            for path in ("/api/status", "/m/L0N0", "/search?q=river", "/trace", "/"):
                assert client.get(path).status_code == 200
            assert not any(one.done() for one in asked)
        assert {one.result().status_code for one in asked} == {200}
    assert taken(client) == 0


def test_when_enough_wait_the_others_are_told_so(busy: TestClient) -> None:
    with ThreadPoolExecutor(3) as pool:
        with held(bench_of(busy)):
            asked = ask(pool, busy, 3)
            wait_until(lambda: taken(busy) == 3)
            for path in ("/api/trace", "/api/trace/cell", "/api/memories/L0N0/coefficients"):
                answer = busy.get(path, params=LIVE)
                assert answer.status_code == 429
                assert answer.json() == {
                    "error": "the model is busy, and 2 requests wait already; try again in a moment"
                }
            assert busy.post("/api/memories/L0N0/silence", json=LIVE).status_code == 429
            page = busy.get("/trace", params=LIVE)
            assert page.status_code == 429 and "the model is busy" in page.text and "<html" in page.text
        assert [one.result().status_code for one in asked] == [200] * 3
    assert busy.get("/trace", params=LIVE).status_code == 200


def test_one_that_is_abandoned_makes_room(index_folder: Path, model: MemoryModel) -> None:
    workbench = Workbench(index_folder, model, live=LiveSettings(waiting=1))
    with serving(workbench) as address, held(workbench):

        def leaves() -> bool:
            """It waits, as it may, and goes away; False if it was not let in."""
            try:
                return httpx.get(f"{address}/api/trace", params=LIVE, timeout=0.3).status_code != 429
            except httpx.ReadTimeout:
                return True

        for _ in range(4):  # the first is on its way to the model; none of the others stays in the row
            wait_until(leaves)
        assert httpx.get(f"{address}/api/status", timeout=300).status_code == 200
    workbench.close()


def test_a_computation_ends_when_nobody_waits_or_it_takes_too_long(workbench: Workbench, model: MemoryModel) -> None:
    from memlens.web.workbench import _TURN

    for make, words in ((lambda: Turn(60), "nobody waits"), (lambda: Turn(0.1), "longer than the 0.1 seconds")):
        turn, passed = make(), []

        def pass_layer(layer: int, _m: Any, turn: Turn = turn, passed: list[int] = passed) -> None:
            passed.append(layer)
            turn.is_abandoned = turn._seconds == 60
            wait_until(lambda: turn.is_abandoned or time.monotonic() > turn._until)

        token = _TURN.set(turn)
        try:
            with pytest.raises(SettingError, match=words), workbench.model() as lent, model.watch(pass_layer):
                read_grid(lent, PROMPT, [])
        finally:
            _TURN.reset(token)
        assert passed == [0]  # the next layer was not begun
    assert read_grid(model, PROMPT, []) == read_grid(model, PROMPT, [])


def test_a_request_that_takes_too_long_is_one_line(
    client_of: Callable[..., TestClient], index_folder: Path, model: MemoryModel
) -> None:
    client = client_of(index_folder, model, live=LiveSettings(seconds=0.1))
    with model.watch(lambda _layer, _m: time.sleep(0.2)):
        answer = client.get("/api/trace", params=LIVE)
    assert answer.status_code == 422 and "longer than the 0.1 seconds" in answer.json()["error"]


def test_prompts_and_edits_are_limited(busy: TestClient) -> None:
    long = {"prompt": "a b c d e f g h i j k l m n o p"}
    for answer in (
        busy.get("/api/trace", params=long),
        busy.get("/api/trace/cell", params=long),
        busy.post("/api/memories/L0N0/silence", json=long),
    ):
        assert answer.status_code == 422 and "12 are the most" in answer.json()["error"]
    assert busy.get("/api/trace", params=LIVE | {"set": "L0N1=" + "0" * 500}).status_code == 422


@pytest.mark.parametrize("bad", [{"waiting": -1}, {"seconds": 0}, {"prompt_tokens": 0}])
def test_limits_that_cannot_be_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(SettingError, match="must be"):
        LiveSettings(**bad)


def test_requests_at_once_get_what_each_would_get_alone(
    own_index: Index, model: MemoryModel, client_of: Callable[..., TestClient]
) -> None:
    """Traces, edits, steered texts and labels of eight people at once: nobody sees another's edit, no label is lost."""
    client = client_of(without_labels(own_index), model, live=LiveSettings(waiting=100))
    assert client.post("/api/annotate/sample", json={"per_layer": 3, "top": 5}).status_code == 200
    memories = client.get("/api/annotate").json()["memories"]
    plain = asdict(read_grid(model, PROMPT, []))
    edited = [[f"L{layer}N{memory}=25"] for layer in range(3) for memory in (1, 7)]
    grids = {sets[0]: asdict(read_grid(model, PROMPT, sets)) for sets in edited}
    kls = {sets[0]: intervene(model, PROMPT, sets).kl for sets in edited}
    texts = {sets[0]: list(generate(model, PROMPT, 4, sets).tokens) for sets in edited}
    silenced = silence(model, own_index.check("L1N3"), PROMPT, "0").kl

    def work(number: int) -> None:
        sets = edited[number % len(edited)]
        cell = client.get("/api/trace/cell", params=LIVE | {"set": sets})
        assert cell.json()["kl"] == pytest.approx(kls[sets[0]], rel=1e-6)
        for memory in memories[:4]:
            label = {"annotator": f"p{number}", "memory": memory, "patterns": []}
            assert client.post("/api/annotate/labels", json=label).status_code == 200
        assert same(client.get("/api/trace", params=LIVE).json(), plain)
        answer = client.get("/api/steer", params=LIVE | {"set": sets, "count": 4})
        assert json.loads(answer.text.splitlines()[-1])["tokens"] == texts[sets[0]]
        assert same(client.get("/api/trace", params=LIVE | {"set": sets}).json(), grids[sets[0]])
        answer = client.post("/api/memories/L1N3/silence", json=LIVE)
        assert answer.json()["kl"] == pytest.approx(silenced, rel=1e-6)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(16)))
    for number in range(16):
        labels = client.get("/api/annotate/labels", params={"as": f"p{number}"}).json()["labels"]
        assert sorted(label["memory"] for label in labels) == sorted(memories[:4])


def same(answer: dict[str, Any], grid: dict[str, Any]) -> bool:
    for row, expected in zip(answer["layers"], grid["layers"], strict=True):
        for cell, wanted in zip(row, expected, strict=True):
            if (cell["id"], cell["was"]) != (wanted["id"], wanted["was"]) or abs(cell["p"] - wanted["p"]) > 1e-6:
                return False
    return True


def test_what_is_kept_does_not_grow_with_requests(client_of: Callable[..., TestClient], index_folder: Path) -> None:
    """Requests of every kind, each asked once: what is kept is bounded, and what all pages need stays."""
    client = client_of(index_folder)
    index = bench_of(client).index
    client.get("/")
    made = index._results[("statistics",)][1]
    for number in range(200):
        client.get("/api/map", params={"by": "max", "room": 500 + number})
        client.get("/m/L0N1", cookies={"memlens-annotator-8000": f"person{number}"})
        client.get("/search/results", params={"q": f"word {number}"})
    assert len(index._results) <= 64 and len(index._verified) <= len(index.manifest.files)
    assert index._results[("statistics",)][1] is made
    assert taken(client) == 0


def test_an_error_is_answered_and_gives_the_turn_back(busy: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: Any) -> None:
        raise MemlensError("oops")

    with monkeypatch.context() as patch:
        patch.setattr("memlens.web.pages.trace.read_grid", fail)
        for _ in range(5):
            assert busy.get("/api/trace", params=LIVE).json() == {"error": "oops"}
    assert taken(busy) == 0 and busy.get("/api/trace", params=LIVE).status_code == 200
