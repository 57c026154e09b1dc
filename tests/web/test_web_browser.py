"""The pages Overview, memory and Search in a real browser."""

import re
from collections.abc import Callable
from dataclasses import asdict
from importlib import resources
from typing import Any

import pytest
from own_server import EVERY_SCREEN, opened, serving

import memlens
from memlens.index.reader import Index
from memlens.memory import GroupShape, MemoryNames
from memlens.web.workbench import Workbench

pytestmark = pytest.mark.sweep  # test_browser_walk.py visits all pages by default
Open = Callable[..., Any]


@EVERY_SCREEN
def test_every_page_fits_its_screen_without_errors(open_page: Open, width: int, scheme: str) -> None:
    for path, ready in (
        ("/", ".map[data-drawn=max]"),
        ("/m/L1N7", ".memory-page[data-shaded=yes]"),
        ("/search?q=the", ".results li"),
    ):
        page = open_page(path, width, scheme)
        page.locator(ready).first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")  # nothing to scroll sideways


def test_the_map_works_with_pointer_and_keyboard(open_page: Open) -> None:
    page = open_page("/")
    page.locator(".map[data-drawn=max]").wait_for()
    canvas = page.locator(".map canvas")
    canvas.hover(position={"x": 36, "y": 5})
    page.locator(".now b").filter(has_text="L0N0").wait_for()
    canvas.focus()
    for key, name in (("End", "L0N39"), ("PageDown", "L1N39"), ("Home", "L1N0"), ("ArrowDown", "L1N1")):
        page.keyboard.press(key)
        assert page.locator(".now b").inner_text() in (name, "L2N0")  # of a single line, down is the next layer
    name = page.locator(".now b").inner_text()
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/m/{name}")


def test_the_map_is_colored_by_the_chosen_statistic(open_page: Open) -> None:
    page = open_page("/")
    page.locator(".map[data-drawn=max]").wait_for()
    before = page.evaluate("document.querySelector('.map canvas').toDataURL()")
    page.locator("#by").select_option("class")
    page.locator(".map[data-drawn=class]").wait_for()
    assert page.locator(".legend .kind").count() == 4 and page.url.endswith("by=class")
    assert page.evaluate("document.querySelector('.map canvas').toDataURL()") != before
    page.locator(".map canvas").click(position={"x": 36, "y": 5})
    page.wait_for_url("**/m/L0N0")


@EVERY_SCREEN
def test_the_overview_works_with_the_keyboard(open_page: Open, width: int, scheme: str) -> None:
    page = open_page("/", width, scheme)
    home, name = page.url, page.locator(".cards .memory").first.inner_text()
    page.locator(".cards .memory").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/m/{name}")
    page.go_back()
    page.get_by_role("link", name="a random memory").focus()
    page.keyboard.press("Enter")
    page.locator(".memory-page").wait_for()
    for step, arrives in (
        ("the memories that are active", ".results li"),
        ("Trace a prompt", ".grid .cell"),
        ("Steer", ".going .given"),
    ):
        page.goto(home)
        page.locator(".tour summary").focus()
        page.keyboard.press("Enter")
        page.locator(".tour a").filter(has_text=step).focus()
        page.keyboard.press("Enter")
        page.locator(arrives).first.wait_for()


@EVERY_SCREEN
def test_the_map_is_sorted_with_the_keyboard(open_page: Open, width: int, scheme: str) -> None:
    page = open_page("/", width, scheme)
    page.locator(".map[data-sorted=place]").wait_for()
    before = page.evaluate("document.querySelector('.map canvas').toDataURL()")
    page.locator("#sort").focus()
    page.keyboard.type("color")
    page.locator(".map[data-sorted=level]").wait_for()
    assert page.url.endswith("by=max&sort=level") and "sorted by color" in page.locator(".explanation").inner_text()
    assert page.evaluate("document.querySelector('.map canvas').toDataURL()") != before
    page.locator(".map canvas").focus()
    page.keyboard.press("ArrowRight")
    strongest = page.locator(".layer-details tbody a.memory").first.text_content()
    page.locator(".now b").filter(has_text=strongest).wait_for()  # the highest of layer 0 comes first
    page.goto(page.url.replace("level", "likeness"))
    page.locator(".map[data-sorted=likeness]").wait_for()


@EVERY_SCREEN
def test_a_memory_page_works_with_the_keyboard(open_page: Open, width: int, scheme: str) -> None:
    page = open_page("/m/L1N7", width, scheme)
    page.locator("[data-shaded=yes]").wait_for()
    page.locator("[data-side=value] tbody tr").first.wait_for()
    assert page.locator("[data-side=key] tbody tr").count() == page.locator("[data-side=value] tbody tr").count() == 8
    page.locator(".context-of").first.focus()
    page.keyboard.press("Enter")
    page.locator(".context b").wait_for()
    assert page.locator(".context .quiet").inner_text().startswith("text.txt:")
    page.keyboard.press("Enter")
    assert page.locator(".context").count() == 0
    assert page.locator(".trigger-list").first.locator("li").count() == 10
    page.locator(".more summary").focus()
    page.keyboard.press("Enter")
    assert page.locator(".trigger-list li").nth(15).is_visible()
    value, triggers = (page.locator(one).bounding_box() for one in (".value", ".triggers"))
    beside = value["x"] > triggers["x"] + triggers["width"] - 1
    assert beside if width > 1000 else value["y"] > triggers["y"]
    assert page.locator(".scores-of-tokens rect").count() > 20
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    page.locator(".acts a").filter(has_text="trace this").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/trace?prompt=*")


def test_a_trigger_is_copied(open_page: Open, index: Index) -> None:
    page = open_page("/m/L1N7")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator(".acts .copy").first.click()
    page.locator("#announcer").filter(has_text="copied").wait_for(state="attached")
    assert page.evaluate("navigator.clipboard.readText()") == index.triggers("L1N7")[0].text


def test_the_charts_of_the_experiments_are_drawn(open_page: Open) -> None:
    page = open_page("/")
    page.locator("#experiments-title").scroll_into_view_if_needed()
    page.locator("[data-charts=drawn]").wait_for()
    charts = page.locator(".chart")
    assert charts.count() >= 2 and page.locator(".chart.drawn svg.marks").count() == charts.count()


def test_triggers_are_shaded_and_patterns_highlighted(open_page: Open, index: Index) -> None:
    row = index.sql("SELECT layer, memory, len(prefixes) AS n FROM {patterns} ORDER BY layer, memory LIMIT 1")[0]
    page = open_page(f"/m/L{row['layer']}N{row['memory']}")
    page.locator("[data-shaded=yes]").wait_for()
    assert page.locator(".trigger-list .shade.at").count() == page.locator(".trigger-list li").count()
    assert "Tokens are shaded" in page.locator(".live").inner_text()
    chip = page.locator("[data-pattern]").first
    chip.focus()
    page.keyboard.press("Enter")
    assert chip.get_attribute("aria-pressed") == "true"
    lit = page.locator(".trigger-list li.has").count()
    assert 0 < lit == int(re.findall(r"\d+", chip.inner_text())[-1])
    page.keyboard.press("Enter")
    assert page.locator(".trigger-list li.has").count() == 0


def test_silencing_shows_before_and_after(open_page: Open) -> None:
    page = open_page("/m/L2N11")
    page.locator("#prompt").fill("The river runs to the")
    page.locator(".silence-form select").select_option("x4")
    page.locator(".silence-form button").click()
    page.locator(".outcome .verdict").wait_for()
    assert "KL" in page.locator(".outcome .verdict").inner_text() and page.locator(".outcome .bars").count() == 2


def test_neighbors_related_memories_and_names_are_one_step_away(open_page: Open) -> None:
    page = open_page("/m/L1N7")
    page.keyboard.press("]")
    page.wait_for_url("**/m/L1N8")
    page.keyboard.press("[")
    page.wait_for_url("**/m/L1N7")
    link = page.locator(".related table a").first
    name = link.inner_text()
    link.click()
    page.wait_for_url(f"**/m/{name}")
    page.locator("#find").fill("l2n11")
    page.keyboard.press("Enter")
    page.wait_for_url("**/m/L2N11")


def test_results_appear_while_typing_and_arrow_keys_move_through_them(open_page: Open) -> None:
    page = open_page("/search")
    page.locator("#q").fill("")
    page.keyboard.type("the ri", delay=15)
    page.locator(".results b").filter(has_text=re.compile("the ri", re.IGNORECASE)).first.wait_for()
    assert page.url.endswith("q=the+ri")
    page.keyboard.press("ArrowDown")
    first = page.locator(".results a").first
    assert first.evaluate("node => node === document.activeElement")
    name = first.locator(".memory").inner_text()
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/m/{name}*")


def test_filters_narrow_the_results_at_once(open_page: Open) -> None:
    page = open_page("/search?q=the")
    page.locator("[name=layers]").fill("2")
    page.wait_for_url("**layers=2")
    names = page.locator(".results .memory").all_inner_texts()
    assert names and all(name.startswith("L2N") for name in names)
    page.locator(".places label").filter(has_text="a token it promotes").click()
    page.locator(".results .token").first.wait_for()
    assert "in=values" in page.url


def test_all_content_is_readable_without_javascript(open_page: Open) -> None:
    page = open_page("/", javascript=False)
    page.locator(".layer-details summary").click()
    assert page.locator(".layer-details tbody tr").count() == 3
    page.locator(".layer-details tbody a.memory").first.click()
    assert page.locator(".trigger-list li").count() > 0 and page.locator(".trigger-list mark").count() > 0
    page.locator(".related a").first.click()
    assert page.locator(".related table a").count() > 0
    page.goto(page.url.split("/m/")[0] + "/search")
    page.locator("#q").fill("the")
    page.locator("form.search button").click()
    assert page.locator(".results li").count() > 0


def test_links_of_the_report_open_the_workbench(browser: Any, own_index: Index) -> None:
    """The report is a page of nowhere, but what it leads to is the workbench itself, with all that it can do."""
    memlens.report(own_index)
    with serving(Workbench(own_index.folder)) as address, opened(browser, address) as page:
        page.goto(address)
        page.get_by_role("link", name="the report").first.click()
        link = page.locator("a[data-memory]:visible").first
        name = link.inner_text()
        link.click()
        page.wait_for_url(f"{address}/m/{name}")
        page.locator(".star").click()
        page.locator(".keep [role=status]").filter(has_text="saved").wait_for()
        page.goto(address + "/report")
        page.locator("[data-home]").click()
        page.wait_for_url(address + "/")


def test_hostile_text_stays_text(open_page: Open) -> None:
    page = open_page("/search?q=alert(%27evil%27)")
    page.locator(".results li").first.wait_for()
    assert page.locator(".results script").count() == 0 and "<script>" in page.locator(".results").inner_text()
    page.locator(".results a").first.click()
    page.locator("[data-shaded=yes]").wait_for()
    assert page.locator(".trigger-list script, .trigger-list p b").count() == 0


def test_keyboard_focus_is_visible(open_page: Open) -> None:
    page = open_page("/m/L1N7")
    page.keyboard.press("Tab")
    skip = page.locator(".skip")
    assert skip.evaluate("node => node === document.activeElement && node.getBoundingClientRect().left >= 0")
    page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_the_map_names_memories_of_experts_as_the_index_does(browser: Any) -> None:
    groups = (
        GroupShape("dense", 1, 3),
        GroupShape("shared", 2, 5),
        GroupShape("routed", 4, 7),
        GroupShape("routed", 2, 3),
    )
    names = MemoryNames({6: groups})
    script = resources.files("memlens.web").joinpath("static", "overview.js").read_text("utf-8")
    function = re.search(r"^function nameOf.*?^}$", script, re.DOTALL | re.MULTILINE)
    assert function is not None
    page = browser.new_page()
    layer = {"layer": 6, "groups": [asdict(group) for group in groups]}
    numbers = list(range(names.count(6)))
    made = page.evaluate(
        f"([layer, numbers]) => {{ {function[0]}; return numbers.map((n) => nameOf(layer, n)) }}", [layer, numbers]
    )
    page.close()
    assert made == [str(names.name(6, number)) for number in numbers]


@EVERY_SCREEN
def test_a_typed_text_is_shaded_token_by_token(open_page: Open, width: int, scheme: str) -> None:
    page = open_page("/m/L1N7", width, scheme)
    page.locator("#try").focus()
    page.keyboard.type("The river runs", delay=10)
    page.locator(".tried").filter(has_text="The river runs").locator("small").wait_for()
    assert page.locator(".tried .shade").count() > 0 and "of its range" in page.locator(".tried small").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@EVERY_SCREEN
def test_memories_that_fire_on_a_text_are_searched(open_page: Open, width: int, scheme: str) -> None:
    page = open_page("/search", width, scheme)
    page.locator(".places input:checked").focus()
    page.keyboard.press("ArrowLeft")  # of radio buttons the last
    assert page.locator(".places input:checked").get_attribute("value") == "fires"
    page.locator("#q").focus()
    page.keyboard.type("The river runs to the sea")
    page.locator(".results .why").filter(has_text="of its range").first.wait_for()
    page.locator("[name=by]").focus()
    page.keyboard.type("eff")
    page.wait_for_url("**by=effect")
    assert "in=fires" in page.url and "effects refer to the logit" in page.locator(".count").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
