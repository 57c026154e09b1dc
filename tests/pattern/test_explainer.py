"""Proposals of a language model: asked of a local server, marked as proposals, scored on held-out triggers."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from index_by_hand import write_index
from memlens.errors import SettingError
from memlens.index.reader import Index
from memlens.pattern.explainer import KEY_VARIABLE, Explainer, propose

TEXTS = [f"On day {n} the free press was read by {n} people in town {n}." for n in range(60)]


class Stub(BaseHTTPRequestHandler):
    """Describes truly, and then picks by the description it is given, as a good reader would."""

    description = 'ends with "press"'
    answer = ""  # overrides what is said
    status = 200
    asked: list[tuple[str, str | None]] = []  # noqa: RUF012 - replaced for every test

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][0]["content"]
        self.asked.append((prompt, self.headers.get("Authorization")))
        said = self.description
        if "Which of them fit this description" in prompt:
            word = re.findall(r'ends with "(\w+)"', prompt)[0]
            said = json.dumps(
                [int(n) for n, text in re.findall(r"^(\d+)\. (.*)$", prompt, re.M) if text.endswith(word)]
            )
        content = self.answer or json.dumps({"choices": [{"message": {"role": "assistant", "content": said}}]})
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(content.encode())

    def log_message(self, format: str, *arguments: object) -> None:
        """Silent."""


Stubbed = tuple[str, type[Stub]]


@pytest.fixture
def stub() -> Iterator[tuple[str, type[Stub]]]:
    kind = type("OwnStub", (Stub,), {"asked": []})
    server = HTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", kind
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return write_index(tmp_path / "index", TEXTS, {(0, 0): [(s, 5) for s in range(20)], (0, 1): [(0, 1)]})


def test_a_true_description_tells_triggers_from_others(index: Index, stub: Stubbed) -> None:
    url, kind = stub
    proposal = propose(index, "L0N0", Explainer(url, "some-model"))
    assert proposal.description == 'ends with "press"' and proposal.by.startswith("some-model at 127.0.0.1")
    assert proposal.detection is not None and proposal.detection > 0.9 and proposal.held_out == 10
    assert proposal.proposal is True
    assert not index.has("patterns")
    described, detected = (prompt for prompt, _ in kind.asked)
    lines = [line.partition(". ")[2] for line in detected.splitlines()]
    for rank, trigger in enumerate(index.triggers("L0N0")):
        assert (trigger.text in described.splitlines()) == (rank % 2 == 0)  # the test's triggers were not shown before
        assert (trigger.text in lines) == (rank % 2 == 1)


def test_a_wrong_description_scores_as_guessing_does(index: Index, stub: Stubbed) -> None:
    url, kind = stub
    kind.description = 'ends with "giraffe"'
    assert propose(index, "L0N0", Explainer(url)).detection == 0.5


def test_the_key_comes_from_the_environment_only(stub: Stubbed, monkeypatch: pytest.MonkeyPatch) -> None:
    url, kind = stub
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    Explainer(url).ask("hello")
    monkeypatch.setenv(KEY_VARIABLE, "a-test-value")
    Explainer(url).ask("hello")
    assert [key for _, key in kind.asked] == [None, "Bearer a-test-value"]


def refused_in_one_line(url: str) -> None:
    with pytest.raises(SettingError) as refused:
        Explainer(url).ask("hello")
    assert "\n" not in str(refused.value) and url in str(refused.value)


@pytest.mark.parametrize(("status", "answer"), [(401, "{}"), (200, "no json"), (200, "{}"), (200, '{"choices": []}')])
def test_a_server_that_fails_is_reported_in_one_line(stub: Stubbed, status: int, answer: str) -> None:
    url, kind = stub
    kind.status, kind.answer = status, answer
    refused_in_one_line(url)


@pytest.mark.parametrize("head", ["nothing that HTTP knows", "HTTP/1.0 200 OK\r\nContent-Length: 1000"])
def test_a_server_that_breaks_off_is_reported_in_one_line(
    stub: Stubbed, monkeypatch: pytest.MonkeyPatch, head: str
) -> None:
    url, kind = stub
    monkeypatch.setattr(kind, "send_response", lambda self, code: self.wfile.write(f"{head}\r\n".encode()))
    monkeypatch.setattr(kind, "end_headers", lambda self: self.wfile.write(b"\r\n"))
    refused_in_one_line(url)


def test_nonsense_is_refused_before_anything_is_sent(index: Index) -> None:
    for address in ("localhost", "http://[half", "http://host:port/v1", "http://:80"):
        with pytest.raises(SettingError, match="give an address"):
            Explainer(address)
    with pytest.raises(SettingError, match="check that it is running"):
        Explainer("http://127.0.0.1:9").ask("hello")
    with pytest.raises(SettingError, match="at least 3"):
        propose(index, "L0N1", Explainer("http://127.0.0.1:9"))
