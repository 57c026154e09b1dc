"""The page Steer in a real browser."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from own_server import EVERY_SCREEN, parsed_command

import memlens
from memlens.index.reader import Index

pytestmark = pytest.mark.sweep  # test_browser_walk.py visits all pages by default
Open = Callable[..., Any]
DONE = ".column[data-set=set] .bars li"


@EVERY_SCREEN
def test_an_edit_changes_the_text_and_the_address(open_page: Open, index: Index, width: int, scheme: str) -> None:
    page = open_page("/steer?prompt=The+river+runs&count=6", width, scheme)
    page.locator(".column[data-set=''] .bars li").first.wait_for()
    page.locator("#add-set").focus()
    page.keyboard.type("L1")
    page.keyboard.press("Enter")
    page.locator(DONE).first.wait_for()
    line = page.locator(".column[data-set=set] .edits li")
    line.locator("select").focus()
    page.keyboard.type("set")
    for key in ("Tab", "Tab", "ControlOrMeta+a"):  # past the slider
        page.keyboard.press(key)
    page.keyboard.type("60")
    page.wait_for_url("**set=L1%3D60*")
    page.locator(".going .differs").first.wait_for()
    assert "KL" in page.locator(".column[data-set=set] .next h3").inner_text()
    command = page.locator(".column[data-set=set] .command code").inner_text()
    assert command == f"memlens trace {index.folder} 'The river runs' --set L1=60 --generate 6"
    page.locator(DONE).first.wait_for()
    shown = page.locator(".column[data-set=set] .going").inner_text()
    page.goto(page.url)
    page.locator(DONE).first.wait_for()
    assert page.locator(".column[data-set=set] .going").inner_text() == shown
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_switches_sliders_and_a_second_set(open_page: Open) -> None:
    page = open_page("/steer?prompt=The+river+runs&count=4&set=L1%3D60&set=!L2%3D0&other=L0%3Dx0.5")
    page.locator(".column[data-set=other] .bars li").first.wait_for()
    assert page.locator(".column[data-set=set] .edits li.off .memory").inner_text() == "L2"
    assert "--set L2" not in page.locator(".column[data-set=set] .command code").inner_text()
    slider = page.locator(".column[data-set=other] [type=range]")
    slider.focus()
    page.keyboard.press("Home")
    page.wait_for_url("**other=L0%3Dx-4*")
    page.locator(".column[data-set=set] .edits li").first.locator("[type=checkbox]").click()
    page.wait_for_url("**set=%21L1%3D60*")
    page.locator(".column[data-set=set] .remove").first.click()
    page.wait_for_url(lambda url: "L1%3D60" not in url)
    page.locator(".second").click()
    page.wait_for_url(lambda url: "other=" not in url)


def test_memories_that_matter_for_the_prompt_are_suggested(open_page: Open, index: Index) -> None:
    page = open_page("/steer?prompt=The+river+runs&count=4")
    page.locator(".suggestions button").nth(4).wait_for()
    strongest = memlens.trace(index, "The river runs").memories[:5]
    buttons = page.locator(".column[data-set=set] .suggestions button")
    assert [text.split()[0] for text in buttons.all_inner_texts()] == [str(one.memory) for one in strongest]
    buttons.first.click()
    page.wait_for_url(f"**set={strongest[0].memory}%3D0*")
    page.locator(DONE).first.wait_for()


def test_a_saved_circuit_is_opened(open_page: Open, index: Index, tmp_path: Path) -> None:
    page = open_page("/steer?prompt=The+river+runs&count=4")
    edits = [f"L1N{number}={number / 3}" for number in range(30)] + ["L0=x0.5"]
    model = memlens.load(index.manifest.model.source)
    memlens.Intervention.parse(*edits).save(tmp_path / "circuit.json", model)
    chooser = page.locator(".column[data-set=set] [type=file]")
    chooser.set_input_files(tmp_path / "circuit.json")
    page.wait_for_url("**set=L1N29%3D9.66667&set=L0%3Dx0.5")
    page.locator(DONE).first.wait_for()
    assert page.locator(".column[data-set=set] .edits li").count() == 31
    problem = page.locator(".column[data-set=set] .note")
    for saved, message in (
        (memlens.Intervention.parse("L1N2=0", positions=[0]), "edits single positions"),
        (memlens.Intervention((memlens.Edit("L1N2"),), "other", "0" * 64), "is for other, not for the model of this"),
    ):
        saved.save(tmp_path / "other.json")
        chooser.set_input_files(tmp_path / "other.json")
        problem.filter(has_text=message).wait_for()
    (tmp_path / "other.json").write_text("[]", encoding="utf-8")
    chooser.set_input_files(tmp_path / "other.json")
    problem.filter(has_text="not a saved intervention").wait_for()


@pytest.mark.parametrize("prompt", ["-5 degrees", "--", "--set L1=0", "=ls", "it's `a` $b !c"])
def test_the_command_of_a_continuation_can_be_pasted_into_a_shell(open_page: Open, index: Index, prompt: str) -> None:
    page = open_page(f"/steer?{urlencode({'prompt': prompt, 'count': 3, 'seed': 7})}&set=L1%3D-60&set=L0%3Dx0.5")
    page.locator(DONE).first.wait_for()
    given = parsed_command(page.locator(".column[data-set=set] .command code").text_content())
    assert (given["model"], given["prompt"], given["sets"]) == (str(index.folder), prompt, ["L1=-60", "L0=x0.5"])
    assert (given["generate"], given["seed"]) == (3, 7)
