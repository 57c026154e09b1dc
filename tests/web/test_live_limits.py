"""Requests for the model: one runs, a few wait, others are refused. Other pages do not wait, and nothing is mixed.

The tests hold the model to keep requests waiting, so that they do not depend on speed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from fastapi.testclient import TestClient
from own_server import without_labels
from transformers import PreTrainedTokenizerFast

from memlens.errors import MemlensError, SettingError
from memlens.index.reader import Index
from memlens.models.memory_model import MemoryModel
from memlens.settings import LiveSettings
from memlens.tracer.intervene import generate, intervene
from memlens.web import workbench
from memlens.web.pages.memory import silence
from memlens.web.pages.trace import read_grid
from memlens.web.workbench import Workbench
from waiting import wait_until

PROMPT = "The river runs to the sea"
LIVE = {"prompt": PROMPT}


def waiting(client: TestClient) -> int:
    """Return the number of requests that wait for the model."""
    count: int = client.app.state.model_limiter.statistics().tasks_waiting  # type: ignore[attr-defined]
    return count


def bench_of(client: TestClient) -> Workbench:
    bench: Workbench = client.app.state.workbench  # type: ignore[attr-defined]
    return bench


def ask(pool: ThreadPoolExecutor, client: TestClient, count: int) -> list[Future[Any]]:
    return [pool.submit(client.get, "/api/trace", params=LIVE) for _ in range(count)]


@pytest.fixture
def busy(client_of: Callable[..., TestClient], index_folder: Path, model: MemoryModel) -> TestClient:
    return client_of(index_folder, model, live=LiveSettings(waiting=2, prompt_tokens=12))


def test_lookups_answer_while_the_model_is_busy(
    client_of: Callable[..., TestClient], index_folder: Path, model: MemoryModel
) -> None:
    client = client_of(index_folder, model, live=LiveSettings(waiting=16))
    with ThreadPoolExecutor(17) as pool:
        with bench_of(client).model():
            answers = ask(pool, client, 17)  # more than there are threads for pages
            wait_until(lambda: waiting(client) == 16, "16 requests wait")
            for path in ("/api/status", "/m/L0N0", "/search?q=river", "/trace", "/"):
                assert client.get(path).status_code == 200
            assert not any(answer.done() for answer in answers)
        assert {answer.result().status_code for answer in answers} == {200}


def test_if_enough_requests_wait_others_are_refused(busy: TestClient) -> None:
    with ThreadPoolExecutor(3) as pool:
        with bench_of(busy).model():
            answers = ask(pool, busy, 3)
            wait_until(lambda: waiting(busy) == 2, "two requests wait")
            for path in ("/api/trace", "/api/trace/cell", "/api/memories/L0N0/coefficients"):
                answer = busy.get(path, params=LIVE)
                assert answer.status_code == 429
                assert answer.json() == {"error": "the model is busy and 2 requests are waiting; try again in a moment"}
            assert busy.post("/api/memories/L0N0/silence", json=LIVE).status_code == 429
            page = busy.get("/trace", params=LIVE)
            assert page.status_code == 429 and "the model is busy" in page.text and "<html" in page.text
        assert [answer.result().status_code for answer in answers] == [200] * 3
    assert busy.get("/trace", params=LIVE).status_code == 200


def test_a_request_does_not_wait_for_ever(
    client_of: Callable[..., TestClient], index_folder: Path, model: MemoryModel
) -> None:
    client = client_of(index_folder, model, live=LiveSettings(seconds=0.2))
    with ThreadPoolExecutor(2) as pool, bench_of(client).model():
        answers = ask(pool, client, 2)
        wait_until(lambda: any(answer.done() for answer in answers), "a request is refused")
        refused = next(answer for answer in answers if answer.done()).result()
        assert refused.status_code == 429 and "busy for 0.2 seconds" in refused.json()["error"]


def test_a_computation_that_takes_too_long_ends_before_the_next_layer(
    client_of: Callable[..., TestClient], index_folder: Path, model: MemoryModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, layers = client_of(index_folder, model, live=LiveSettings(seconds=9)), []
    monkeypatch.setattr(workbench, "time", SimpleNamespace(monotonic=lambda: 10.0 * len(layers)))  # 10 s a layer
    with model.watch(lambda layer, _m: layers.append(layer)):
        answer = client.get("/api/trace", params=LIVE)
    assert answer.status_code == 422 and "took longer than 9 seconds" in answer.json()["error"] and layers == [0]


def test_prompts_and_edits_are_limited(busy: TestClient) -> None:
    long = {"prompt": "a b c d e f g h i j k l m n o p"}
    for answer in (
        busy.get("/api/trace", params=long),
        busy.get("/api/trace/cell", params=long),
        busy.post("/api/memories/L0N0/silence", json=long),
    ):
        assert answer.status_code == 422 and "the limit is 12" in answer.json()["error"]
    assert busy.get("/api/trace", params=LIVE | {"set": "L0N1=" + "0" * 500}).status_code == 422


@pytest.mark.parametrize("bad", [{"waiting": -1}, {"seconds": 0}, {"prompt_tokens": 0}])
def test_invalid_limits_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(SettingError, match="must be"):
        LiveSettings(**bad)


def test_concurrent_requests_get_the_same_answers_as_single_ones(
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


def test_caches_do_not_grow_with_requests(client_of: Callable[..., TestClient], index_folder: Path) -> None:
    """Requests of every kind, each asked once: what is kept is bounded, and what all pages need stays."""
    client = client_of(index_folder)
    index = bench_of(client).index
    client.get("/")
    made = index._results["statistics"][1]
    for number in range(70):
        client.get("/api/map", params={"by": "max", "room": 500 + number})
        client.get("/m/L0N1", cookies={"memlens-annotator-8000": f"person{number}"})
        client.get("/search/results", params={"q": f"word {number}"})
    assert len(index._results) <= 64 and len(index._verified) <= len(index.manifest.files)
    assert index._results["statistics"][1] is made


def test_an_error_is_reported_and_frees_the_model(busy: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: Any) -> None:
        raise MemlensError("oops")

    with monkeypatch.context() as patch:
        patch.setattr("memlens.web.pages.trace.read_grid", fail)
        for _ in range(5):
            assert busy.get("/api/trace", params=LIVE).json() == {"error": "oops"}
    assert busy.get("/api/trace", params=LIVE).status_code == 200


def test_a_panic_of_the_tokenizer_is_one_sentence(
    busy: TestClient, model: MemoryModel, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated")
    monkeypatch.setattr(model.tokenizer, "_fast", PreTrainedTokenizerFast(tokenizer_object=backend))
    answer = busy.get("/api/trace", params={"prompt": "a" * 40 + "!"})
    capfd.readouterr()  # the panic prints itself
    assert answer.status_code < 500 and answer.json()["error"].startswith("the tokenizer failed on a text")
