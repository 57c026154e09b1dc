"""The page in a real browser: every chart is drawn, nothing is complained of, nothing is asked of the network."""

from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize("size", [(390, 844), (1280, 900)], ids=["phone", "desktop"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_opens_without_a_complaint_or_a_request(
    browser: Any, full_page: Path, size: tuple[int, int], scheme: str
) -> None:
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
    opened = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    opened.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("request", lambda request: asked.append(request.url))
    opened.goto(full_page.as_uri())
    opened.locator("html[data-ready=yes]").wait_for()
    charts = opened.locator("[data-chart]").count()
    assert charts > 10 and opened.locator("[data-chart].drawn svg.marks").count() == charts
    assert said == [] and asked == [full_page.as_uri()]
    assert opened.evaluate("document.documentElement.scrollWidth") <= size[0]  # nothing to scroll sideways
    assert opened.locator(".toc").evaluate("contents => contents.open") == (size[0] > 1000)  # a phone's is closed
    context.close()


def test_a_point_tells_its_numbers(browser: Any, full_page: Path) -> None:
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    opened.goto(full_page.as_uri())
    opened.locator("html[data-ready=yes]").wait_for()
    opened.locator("[data-chart=refinement]").hover()
    opened.locator("#vg-tooltip-element.visible", has_text="layer").wait_for()
    opened.close()
