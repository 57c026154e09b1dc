"""While pages are opened the model's loading waits, but never for long."""

from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread, Timer

import pytest
from fastapi.testclient import TestClient

from memlens.models.memory_model import MemoryModel
from memlens.web import workbench
from memlens.web.served_index import ServedIndex
from memlens.web.workbench import PagesFirst


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(workbench, "time", clock)
    return clock


def waited(pages: PagesFirst, clock: Clock) -> float:
    began = clock.now
    pages.wait()
    return clock.now - began


def test_loading_waits_for_pages_and_some_moments_after_them(clock: Clock) -> None:
    pages = PagesFirst()
    assert waited(pages, clock) == 0
    with pages.answering(), pages.answering():
        assert waited(pages, clock) == pytest.approx(2, abs=0.04)  # a long page may need what is loaded
        assert waited(pages, clock) == 0
    assert waited(pages, clock) == pytest.approx(1, abs=0.04)
    assert waited(pages, clock) == 0


def test_pages_without_a_break_hold_the_model_up_for_a_while_only(clock: Clock) -> None:
    pages, total = PagesFirst(), 0.0
    for _ in range(20):
        with pages.answering():
            pass
        total += waited(pages, clock)
    assert total == pytest.approx(10, abs=0.2)


def test_whoever_needs_the_model_ends_the_wait(clock: Clock) -> None:
    pages = PagesFirst()
    with pages.answering():
        pages.hurry()
    assert waited(pages, clock) == 0


def test_a_prompt_to_trace_is_such_a_one(
    client_of: Callable[..., TestClient], index_folder: Path, model: MemoryModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workbench, "_IN_ALL", 1e9)
    monkeypatch.setattr(workbench, "_AFTER", 1e9)
    monkeypatch.setattr(ServedIndex, "load_model", lambda *_: model)
    client = client_of(index_folder, "model")
    assert client.get("/m/L0N0").status_code == 200
    assert client.get("/api/status").json()["status"] == "loading"
    assert client.get("/trace", params={"prompt": "The river"}).status_code == 200
    while client.get("/api/status").json()["status"] == "loading":
        pass


def test_whoever_needs_the_model_does_not_wait_for_tables_either() -> None:
    pages, ends = PagesFirst(), Event()
    tables = Thread(target=ends.wait, daemon=True)
    tables.start()
    Timer(0.1, pages.hurry).start()
    pages.wait_for(tables)
    assert tables.is_alive()
    ends.set()


def test_whatever_loading_fails_with_is_said(
    client_of: Callable[..., TestClient], index_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ImportError("no such library")

    monkeypatch.setattr(ServedIndex, "load_model", fail)
    client = client_of(index_folder, "model")
    while (status := client.get("/api/status").json())["status"] == "loading":
        pass
    assert "no such library" in str(status)
