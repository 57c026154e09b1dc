"""Labelling as a person does it: by keys alone, and with plain forms where there is no JavaScript."""

from typing import Any

import pytest
from own_server import opened, serving, without_labels

from memlens.annotations.records import Annotations, LabeledPattern, Sample
from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.web.workbench import Workbench


@pytest.fixture
def study(own_index: Index) -> Index:
    alive = own_index.sql("SELECT DISTINCT layer, memory FROM {triggers} WHERE rank = 9 ORDER BY layer, memory LIMIT 2")
    notes = Annotations(without_labels(own_index))
    notes.set_sample(Sample(tuple(MemoryId(row["layer"], row["memory"]) for row in alive), 10, 0))
    return own_index


def labels(index: Index, annotator: str) -> list[tuple[LabeledPattern, ...]]:
    notes = Annotations(index)
    return [label.patterns for label in notes.labels_of(annotator)]


def test_a_study_is_done_by_keys_alone(browser: Any, study: Index) -> None:
    with serving(Workbench(study)) as address, opened(browser, address) as page:
        page.goto(address + "/annotate")
        page.locator("#as:focus").wait_for()
        page.keyboard.type("Ada <i>")
        page.keyboard.press("Enter")
        page.locator(".labeling.live #text0:focus").wait_for()
        first = page.locator("h1").inner_text()
        page.keyboard.type("ends with a name")
        page.keyboard.press("Enter")
        for key in (" ", "j", " ", "j", "j", " ", "k", "n"):
            page.keyboard.press(key)
        page.keyboard.type("about rivers")
        page.keyboard.press("Enter")
        for key in ("s", " ", "j", " "):
            page.keyboard.press(key)
        page.keyboard.press("Control+Enter")  # two prefixes are too few: said at once, nothing is lost
        assert "2 of the 3 prefixes" in page.locator("[role=alert]").inner_text()
        for key in ("j", "x", "Control+Enter"):
            page.keyboard.press(key)
        page.locator("h1", has_text=first).wait_for(state="detached")
        shallow, semantic = ("ends with a name", "shallow", (0, 1, 3)), ("about rivers", "semantic", (2, 3, 4))
        assert labels(study, "Ada <i>") == [(LabeledPattern(*shallow), LabeledPattern(*semantic))]
        assert "1 of 2 labeled" in page.inner_text(".progress")
        page.locator(".labeling.live #text0:focus").wait_for()
        page.keyboard.press("Escape")
        page.keyboard.press("[")
        page.locator("h1", has_text=first).wait_for()
        page.locator(".labeling.live .prefixes li.at:focus").wait_for()
        assert page.input_value("#text1") == "about rivers" and page.locator(".ticks input:checked").count() == 6
        page.keyboard.press("u")
        page.locator(".undo").wait_for(state="hidden")
        assert labels(study, "Ada <i>") == []


def test_several_people_label_without_javascript(browser: Any, study: Index) -> None:
    with serving(Workbench(study)) as address:
        for person in ("ann", "bob"):
            with opened(browser, address, width=390, javascript=False) as page:
                page.goto(address + "/annotate")
                page.fill("#as", person)
                page.click(".who button")
                for _ in range(2):
                    page.fill("#text0", f"{person} sees this")
                    page.locator("[name=kind0][value=semantic] + .chip").click()
                    for rank in (0, 2, 5):
                        page.locator(f".ticks input[value='0:{rank}']").check(force=True)
                    page.get_by_role("button", name="Save and continue").click()
                page.get_by_role("button", name="Finish").click()
                page.get_by_text("Thank you").wait_for()
                shown_text = page.inner_text("main")
                assert f"{person} sees this" in shown_text and ("ann sees this" in shown_text or person == "ann")
                assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert labels(study, "bob")[0] == (LabeledPattern("bob sees this", "semantic", (0, 2, 5)),)
