"""One walk through all pages in a real browser. The other browser tests are sweeps."""

from collections.abc import Callable
from typing import Any

Open = Callable[..., Any]


def test_a_walk_through_all_pages(open_page: Open) -> None:
    page = open_page("/")
    page.locator(".map[data-drawn=max]").wait_for()
    page.keyboard.press("?")
    page.get_by_role("dialog").get_by_text("Keyboard shortcuts").wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.type("river")
    page.keyboard.press("Enter")
    page.locator(".results a").first.click()
    page.locator(".memory-page[data-shaded=yes]").wait_for()
    page.locator(".related table a").first.wait_for()
    page.locator(".show-effect").click()
    page.locator(".effect-holder tbody tr").nth(19).wait_for()
    page.locator(".show-wires").click()
    page.locator(".wires-holder h3").nth(2).wait_for()
    page.locator(".silence-form button").click()
    page.locator(".outcome .verdict").wait_for()
    page.get_by_role("link", name="Trace", exact=True).click()
    page.fill("#prompt", "The river runs to")
    page.click(".prompt-form button")
    page.locator('.cell[data-layer="1"][data-at="0"]').click()
    page.locator('.opened[data-layer="1"][data-at="0"]').wait_for()
    page.get_by_role("link", name="Steer", exact=True).click()
    page.fill("#add-set", "L1")
    page.locator(".column[data-set=set] .add button").click()
    page.locator(".column[data-set=set] .bars li").first.wait_for()
    page.get_by_role("link", name="Compare", exact=True).click()
    page.locator(".changes .card").first.wait_for()
    for name in ("Collections", "Annotate", "Overview"):
        page.get_by_role("link", name=name, exact=True).click()
        page.get_by_role("heading", level=1).wait_for()
