"""The page Compare in a real browser."""

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.sweep  # test_browser_walk.py visits all pages by default
Open = Callable[..., Any]


def test_a_choice_is_applied_at_once_and_a_memory_is_opened(open_page: Open) -> None:
    page = open_page("/compare")
    page.locator(".changes .card").first.wait_for()
    page.select_option("[name=a]", "0")
    page.wait_for_url("**a=0&b=2*")
    page.locator("input[value=values] + span").click()
    page.wait_for_url("**by=values*")
    page.locator("input[value=values]").focus()
    page.keyboard.press("ArrowLeft")  # radio buttons by keys
    page.wait_for_url("**by=triggers*")
    name = page.locator(".one-side .memory").first.inner_text()
    page.locator(".one-side .memory").first.click()
    page.wait_for_url(f"**/m/{name}")


@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_and_works_without_javascript(open_page: Open, width: int) -> None:
    page = open_page("/compare?layers=0:1", width=width, javascript=False)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.get_by_role("button", name="Compare").click()
    page.wait_for_url("**a=0&b=1*")
    assert page.locator(".changes .card").count() > 0
