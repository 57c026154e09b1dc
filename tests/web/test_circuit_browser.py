"""The page Circuit in a real browser."""

from collections.abc import Callable
from typing import Any

from own_server import EVERY_SCREEN

Open = Callable[..., Any]
ADDRESS = "/circuit?prompt=The+river+runs+to&nodes=12"


@EVERY_SCREEN
def test_a_circuit_is_explored_with_the_keyboard(open_page: Open, width: int, scheme: str) -> None:
    page = open_page("/circuit", width, scheme)
    page.fill("#prompt", "The river runs to")
    page.fill("[name=nodes]", "12")
    page.keyboard.press("Enter")
    page.locator("#graph .node").first.wait_for()
    assert page.locator("#graph .node[data-id^=L]").count() == 12
    page.locator("#graph .node[tabindex='0']").focus()
    page.keyboard.press("ArrowUp")  # from a token to a memory
    page.keyboard.press("Enter")
    page.locator("#details .ends").wait_for()
    focus = page.evaluate("document.activeElement.dataset.id")
    sums = page.locator("#details .sum .n").all_inner_texts()
    assert focus.startswith("L") and len(sums) == 2 and sums[0] == sums[1]  # what comes in goes out
    page.locator("#graph .node.focus").focus()
    page.keyboard.press(" ")
    page.keyboard.press("ArrowUp")
    page.keyboard.press(" ")
    page.locator("#make-group [name=name]").fill("rivers")
    page.keyboard.press("Enter")
    page.locator("#graph .node[data-id=group0]").wait_for()
    assert page.locator("#graph .node[data-id^=L]").count() == 10
    page.wait_for_url("**group=-L*")
    page.reload()  # the address holds everything
    page.locator("#graph .node[data-id=group0]").wait_for()
    assert page.locator("#group-list input").input_value() == "rivers"
    page.get_by_role("button", name="Expand").click()
    assert page.locator("#graph .node[data-id^=L]").count() == 12
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    page.locator("#group-list").get_by_role("link", name="Silence these").click()
    page.locator(".column[data-set=set] .edits li").nth(1).wait_for()


def test_the_slider_moves_memories_to_the_rest_of_their_layer(open_page: Open) -> None:
    page = open_page(ADDRESS)
    page.locator("#graph .node").first.wait_for()
    page.locator("#shown").fill("3")
    assert page.locator("#graph .node[data-id^=L]").count() == 3
    page.wait_for_url("**shown=3*")
    page.locator("#graph .node[data-id=target]").click()
    names = page.locator("#details li span:first-child").all_inner_texts()
    assert any(name.startswith("other memories of layer") for name in names)


def test_edges_are_shown_on_hover_and_kept_on_click(open_page: Open) -> None:
    page = open_page(ADDRESS)
    node = page.locator("#graph .node[data-id^=L]").first
    node.hover()
    assert page.locator("#graph .edge:not(.backbone)").count() > 0 and page.locator("#graph .faded").count() > 0
    node.click()
    page.mouse.move(0, 0)
    assert page.locator("#graph .edge:not(.backbone)").count() > 0
    page.wait_for_url("**focus=L*")
    page.locator("#details a.memory").click()
    page.wait_for_url("**/m/L*")


def test_nodes_are_grouped_while_the_pointer_is_on_one_of_them(open_page: Open) -> None:
    page = open_page(ADDRESS)
    nodes = page.locator("#graph .node[data-id^=L]")
    for number in (1, 0):
        nodes.nth(number).click(modifiers=["Shift"])
    page.locator("#make-group [name=name]").fill("rivers")
    page.keyboard.press("Enter")
    page.locator("#graph .node[data-id=group0]").wait_for()  # the node below the pointer is now part of the group
    assert page.locator("#graph .edge").count() > 0


def test_the_names_of_layers_and_tokens_stay_visible(open_page: Open) -> None:
    page = open_page("/circuit?prompt=The+river+runs+to+the+sea+and+the+old+town&nodes=40", 390)
    page.locator("#graph .node").first.wait_for()
    frame = page.locator(".graph").bounding_box()
    page.locator(".graph").evaluate("frame => frame.scrollTo(100, 50)")
    layer, tokens = page.locator("#layers span").last.bounding_box(), page.locator("#tokens").bounding_box()
    assert frame["x"] <= layer["x"] <= frame["x"] + 20
    assert abs(tokens["y"] + tokens["height"] - frame["y"] - frame["height"]) < 20
    assert "".join(page.locator("#tokens span").all_inner_texts()).endswith("the␣old␣town")
