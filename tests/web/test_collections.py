"""Collections: what is kept on a memory's page is on all pages at once, also when two people write."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi.testclient import TestClient
from own_server import EVERY_SCREEN, opened, serving

from memlens.annotations.records import Annotations
from memlens.index.reader import Index
from memlens.web.workbench import Workbench


def test_what_is_kept_is_shown_everywhere(client_of: Callable[..., TestClient], own_index: Index) -> None:
    client = client_of(own_index.folder)
    assert client.get("/api/collections").json() == [] and "No memory is saved yet" in client.get("/collections").text
    note = {"star": True, "name": "rivers <b>", "note": "water", "lists": ["nature", " nature ", ""]}
    kept = client.put("/api/collections/L1N7", json=note).json()
    assert kept["lists"] == ["nature"] and client.get("/api/collections").json() == [kept]
    for path in ("/collections", "/m/L1N7", "/search?q=L1N7&in=values", "/search?layers=1&limit=100"):
        page = client.get(path).text
        assert "rivers &lt;b&gt;" in page or path.startswith("/search?q=")
    assert client.get("/api/brief/L1N7").json()["summary"].startswith("rivers <b>: ")
    assert client.put("/api/collections/L9N7", json=note).status_code == 404
    assert client.put("/api/collections/L1N7", json={"name": "x" * 201}).status_code == 422
    client.put("/api/collections/L1N7", json={})
    assert client.get("/api/collections").json() == []


def test_two_people_write_at_once_and_nothing_is_lost(client_of: Callable[..., TestClient], own_index: Index) -> None:
    client = client_of(own_index.folder)

    def write(number: int) -> int:
        return client.put(f"/api/collections/L1N{number % 20}", json={"name": str(number)}).status_code

    with ThreadPoolExecutor(4) as people:
        assert set(people.map(write, range(60))) == {200}
    notes = Annotations(own_index)
    assert sorted(int(event["content"]["name"]) for event in notes.history("notes")) == list(range(60))
    assert len(notes.notes()) == 20


def test_pages_of_two_people_change_only_what_they_changed(
    client_of: Callable[..., TestClient], own_index: Index
) -> None:
    client = client_of(own_index.folder)
    client.patch("/api/collections/L1N7", json={"star": True})
    client.patch("/api/collections/L1N7", json={"name": "rivers"})  # of a page that was opened before
    client.patch("/api/collections/L1N7", json={"lists": ["nature", ""]})
    (kept,) = client.get("/api/collections").json()
    assert (kept["star"], kept["name"], kept["lists"]) == (True, "rivers", ["nature"])
    assert client.patch("/api/collections/L9N7", json={"star": True}).status_code == 404


def test_parts_that_are_changed_at_the_same_moment_all_stay(
    client_of: Callable[..., TestClient], own_index: Index
) -> None:
    client = client_of(own_index.folder)
    parts = ({"star": True}, {"name": "rivers"}, {"note": "of water"}, {"lists": ["nature"]})

    def change(number: int) -> int:
        return client.patch(f"/api/collections/L1N{number // 4}", json=parts[number % 4]).status_code

    with ThreadPoolExecutor(4) as people:
        assert set(people.map(change, range(60))) == {200}
    kept = client.get("/api/collections").json()
    assert len(kept) == 15
    for note in kept:
        assert (note["star"], note["name"], note["note"], note["lists"]) == (True, "rivers", "of water", ["nature"])


@EVERY_SCREEN
def test_a_memory_is_kept_with_the_keyboard_alone(browser: Any, own_index: Index, width: int, scheme: str) -> None:
    with serving(Workbench(own_index.folder)) as address, opened(browser, address, width, True, scheme) as page:
        page.goto(address + "/m/L1N7")
        page.locator(".star").focus()
        page.keyboard.press("Enter")
        page.locator(".keep [role=status]").filter(has_text="saved").wait_for()
        page.keyboard.press("Tab")
        for part, text, key in (("name", "my memory", "Tab"), ("lists", "one, two", "Enter")):
            page.locator(f"[name={part}]:focus").wait_for()
            page.keyboard.type(text)
            with page.expect_response(lambda answer: answer.request.method == "PATCH"):
                page.keyboard.press(key)
        page.goto(address + "/collections")
        assert page.locator("h2").all_inner_texts() == ["one", "two"]
        assert page.locator(".kept li").first.inner_text().startswith("★")
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        page.locator(".kept a").first.focus()
        page.keyboard.press("Enter")
        page.wait_for_url("**/m/L1N7")
        assert page.locator("[name=name]").input_value() == "my memory"
        assert page.locator(".star").get_attribute("aria-pressed") == "true"
