"""The page Trace in a real browser."""

from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from own_server import EVERY_SCREEN, opened, serving

from memlens.models.memory_model import MemoryModel
from memlens.web.workbench import ServedIndex, Workbench

pytestmark = pytest.mark.sweep  # test_browser_walk.py visits all pages by default
Open = Callable[..., Any]


@pytest.mark.parametrize("javascript", [True, False])
def test_a_prompt_is_traced_and_a_memory_edited(open_page: Open, javascript: bool) -> None:
    page = open_page("/trace", javascript=javascript)
    page.fill("#prompt", "The river runs to")
    page.click(".prompt-form button")
    page.locator(".grid .cell[aria-current]").wait_for()
    rows, columns = page.locator(".grid tbody tr").count(), page.locator(".grid thead th").count() - 1
    assert rows == 3 and page.locator(".grid .cell").count() == rows * columns
    page.click('.cell[data-layer="1"][data-at="0"]')
    page.locator('.opened[data-layer="1"][data-at="0"]').wait_for()
    assert "layer=1&at=0" in page.url
    memory = page.locator(".effects .memory").first.inner_text()
    page.locator(".effects .change input[name=to]").first.fill("40")
    page.locator(".effects .change input[name=to]").first.press("Enter")
    page.locator(".edit").wait_for()
    assert page.locator(".edit code").inner_text() == f"{memory}=40" and "Before" in page.inner_text(".verdict-box")
    address = page.url
    page.goto(address)  # shared: the same again
    assert page.locator(".edit code").inner_text() == f"{memory}=40"
    assert page.locator('.opened[data-layer="1"][data-at="0"]').count() == 1
    page.locator(".effects .change button[value$='=0']").first.click()
    page.locator(".edit code", has_text=f"{memory}=0").or_(page.locator(".edit").nth(1)).first.wait_for()
    page.get_by_text("Remove all edits").click()
    page.locator(".verdict-box").wait_for(state="detached")
    assert page.locator(".edit").count() == 0


@EVERY_SCREEN
def test_the_grid_works_with_the_keyboard(open_page: Open, width: int, scheme: str) -> None:
    page = open_page("/trace?prompt=The+river+runs&layer=0&at=0", width, scheme)
    page.locator(".cell[aria-current]").focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowLeft", "ArrowUp", "ArrowDown"):
        page.keyboard.press(key)
    focused = "(() => { const d = document.activeElement.dataset; return d.layer + ',' + d.at; })()"
    assert page.evaluate(focused) == "1,1"
    page.keyboard.press("Enter")
    page.locator('.opened[data-layer="1"][data-at="1"]').wait_for()
    assert "layer=1&at=1" in page.url and page.locator('.cell[aria-current][data-layer="1"][data-at="1"]').count() == 1
    page.go_back()
    page.locator('.opened[data-layer="0"][data-at="0"]').wait_for()
    page.go_forward()
    page.locator('.opened[data-layer="1"][data-at="1"]').wait_for()
    page.locator(".cell[aria-current]").focus()
    page.keyboard.press("Home")
    assert page.evaluate(focused) == "1,0"
    page.locator("#prompt").fill("In 1990 the")
    page.keyboard.press("Enter")
    page.wait_for_url("**prompt=In+1990+the*")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@EVERY_SCREEN
def test_explaining_one_token_against_another_works_with_the_keyboard(open_page: Open, width: int, scheme: str) -> None:
    page = open_page("/trace?prompt=The+river+runs", width, scheme)
    page.locator(".target [name=token]").focus()
    page.keyboard.type("␣the")
    page.keyboard.press("Tab")
    page.keyboard.type("␣river")
    page.keyboard.press("Enter")
    page.wait_for_url("**against=*river*")
    assert page.locator("#answer-title").inner_text() == "Why ␣the rather than ␣river"
    numbers = [float(cell.replace("−", "-")) for cell in page.locator(".parts .right").all_inner_texts()]
    assert len(numbers) > 3 and sum(numbers[:-1]) == pytest.approx(numbers[-1], abs=0.001 * len(numbers))  # it adds up
    assert page.locator(".by-layer .memories").count() == page.locator(".by-layer .attention").count() == 3
    assert page.locator(".answer").bounding_box()["y"] < page.locator(".grid").bounding_box()["y"]
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    page.locator(".strongest .memory").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/m/L*")


def test_the_page_continues_when_the_model_is_loaded(
    browser: Any, index_folder: Path, model: MemoryModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_load = Event()

    def load(_index: ServedIndex, _source: str) -> MemoryModel:
        assert may_load.wait(30)
        return model

    monkeypatch.setattr(ServedIndex, "load_model", load)
    with serving(Workbench(index_folder, "slow-model")) as address, opened(browser, address) as page:
        page.goto(address + "/trace?prompt=The+river")
        assert "continues automatically" in page.locator(".waiting").inner_text()
        assert page.locator(".prompt-form button").is_disabled() and page.input_value("#prompt") == "The river"
        may_load.set()
        page.locator(".grid .cell[aria-current]").wait_for()


def test_any_edit_can_be_typed_and_an_invalid_one_is_reported_at_once(open_page: Open) -> None:
    page = open_page("/trace?prompt=The+river+runs&set=L1N7%3D25")
    page.locator("#any").fill("L2=x-1.5e0")
    page.locator(".any button").click()
    page.locator(".edit").nth(1).wait_for()
    page.locator("#any").fill("L2-1")
    page.locator("#any").press("Enter")
    assert page.locator("#any:invalid").count() == 1  # told by the browser, where it is typed
    assert page.locator(".edit code").all_inner_texts() == ["L1N7=25", "L2=x-1.5e0"]


def test_an_opened_cell_is_scrolled_into_view(open_page: Open) -> None:
    page = open_page("/trace?prompt=The+river+runs+to+the+sea&layer=2&at=0")
    page.emulate_media(reduced_motion="reduce")  # scroll at once
    page.set_viewport_size({"width": 1280, "height": 420})
    page.locator('.cell[data-layer="1"][data-at="1"]').click()
    page.locator('.opened[data-layer="1"][data-at="1"]').wait_for()
    assert page.locator("#cell").bounding_box()["y"] < 0.6 * 420


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_every_screen(open_page: Open, width: int, scheme: str) -> None:
    prompt = "The+river+runs+to+the+sea+and+to+the+hills"
    page = open_page(f"/trace?prompt={prompt}&set=L1N7%3D25", width=width, scheme=scheme)
    page.locator(".cell[aria-current]").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator(".cell[aria-current]").bounding_box()["x"] < width


def test_columns_of_a_short_prompt_are_aligned_with_their_tokens(open_page: Open) -> None:
    page = open_page("/trace?prompt=The+river")
    cells = page.locator(".grid tbody tr").first.locator(".cell").all()
    heads = page.locator(".grid thead th:not(.corner)").all()
    for head, cell in zip(heads, cells, strict=True):
        over, under = head.bounding_box(), cell.bounding_box()
        assert abs(over["x"] + over["width"] / 2 - under["x"] - under["width"] / 2) < 6
