"""The page in a real browser: every chart is drawn, nothing is complained of, nothing is asked of the network."""

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

import memlens
from memlens.experiments.run import all_tables
from memlens.reports.report import SITE, make_report


@pytest.fixture(scope="module")
def opened(browser: Any, full_page: Path) -> Iterator[Any]:
    """The page on a desk, when its charts are drawn. Tests leave it as it was."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(full_page.as_uri())
    page.locator("html[data-ready=yes]").wait_for()
    yield page
    page.close()


@pytest.mark.parametrize(
    ("size", "scheme"),
    [
        ((390, 844), "light"),
        pytest.param((390, 844), "dark", marks=pytest.mark.sweep),
        pytest.param((1280, 900), "light", marks=pytest.mark.sweep),
        pytest.param((1280, 900), "dark", marks=pytest.mark.sweep),
    ],
)
def test_it_opens_without_a_complaint_or_a_request(
    browser: Any, full_page: Path, size: tuple[int, int], scheme: str
) -> None:
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
    opened = context.new_page()
    complaints: list[str] = []
    asked: list[str] = []
    opened.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("request", lambda request: asked.append(request.url))
    opened.goto(full_page.as_uri())
    opened.locator("html[data-ready=yes]").wait_for()
    charts = opened.locator("[data-chart]").count()
    assert charts > 10 and opened.locator("[data-chart].drawn svg.marks").count() == charts
    assert complaints == [] and asked == [full_page.as_uri()]
    assert opened.evaluate("document.documentElement.scrollWidth") <= size[0]  # nothing to scroll sideways
    assert opened.locator(".toc").evaluate("contents => contents.open") == (size[0] > 1000)  # a phone's is closed
    context.close()


def test_a_point_tells_its_numbers(opened: Any) -> None:
    opened.locator("[data-chart=refinement]").hover()
    opened.locator("#vg-tooltip-element.visible", has_text="layer").wait_for()


def test_methods_are_folded_and_a_link_to_one_opens_it(opened: Any) -> None:
    recipe = opened.locator("#how-agreement")
    assert not recipe.is_visible()
    opened.locator(".claims a[href='#how-agreement']").first.click()
    recipe.wait_for(state="visible")


def test_each_figure_gives_png_svg_and_the_csv_of_its_table(opened: Any, full_folder: Path) -> None:
    index, published = memlens.open_index(full_folder), {table.name: table.published() for _, table in all_tables()}
    figures = opened.locator(".panel")
    assert figures.count() == opened.locator("[data-chart]").count() > 10
    for place in range(figures.count()):
        figure = figures.nth(place)
        assert figure.locator("[data-file]").all_text_contents() == ["PNG", "SVG"]
        for link in figure.locator("a[download]").all():
            name = link.get_attribute("download").removesuffix(".csv")
            if name == "dead":
                counts = "layer, count(*) AS memories, sum(dead::INT) AS dead"
                rows = index.sql(f"SELECT {counts} FROM {{memories}} GROUP BY layer ORDER BY layer")
            elif name.endswith("-paper"):
                rows = published[name.removesuffix("-paper")]
            else:
                rows = index.table(f"experiments/{name}").to_pylist()
            assert within(link) == as_csv(rows), name
    link = opened.locator(".panel a[download]").first
    assert saved(opened, link) == within(link)
    for kind, beginning in (("PNG", b"\x89PNG"), ("SVG", b"<svg")):
        content = saved(opened, opened.get_by_role("button", name=f"{kind} of the chart cases", exact=True))
        assert content.startswith(beginning) and b"var(--" not in content and len(content) > 3000


def within(link: Any) -> bytes:
    """The file that a link holds in its own address."""
    with urlopen(link.get_attribute("href")) as file:
        content: bytes = file.read()
    return content


def saved(page: Any, what: Any) -> bytes:
    with page.expect_download() as download:
        what.click()
    return Path(download.value.path()).read_bytes()


def as_csv(rows: list[dict[str, Any]]) -> bytes:
    sink = io.StringIO()
    writer = csv.DictWriter(sink, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return sink.getvalue().encode()


def test_it_prints_on_twelve_pages_at_most_and_without_what_is_folded(opened: Any) -> None:
    content = opened.pdf(format="A4", prefer_css_page_size=True)
    assert 4 < len(re.findall(rb"/Type /Page\b", content)) <= 12
    opened.emulate_media(media="print")
    assert not opened.locator("details").evaluate_all("folded => folded.some((one) => one.checkVisibility())")
    # what must stay together: a heading, its words and its chart; a card; a row of a table
    for kept in (".whole", ".card", "figure", "tr"):
        assert opened.locator(kept).first.evaluate("one => getComputedStyle(one).breakInside") == "avoid"
    alone = "charts => charts.filter((one) => !one.closest('.whole, article').querySelector('h3')).length"
    assert opened.locator(".chart").evaluate_all(alone) == 0
    assert opened.locator("h3").first.evaluate("one => getComputedStyle(one).breakAfter") == "avoid"
    opened.emulate_media(media="screen")


def test_names_of_memories_lead_to_their_pages_only_where_there_are_pages(
    opened: Any, browser: Any, full_folder: Path, tmp_path: Path
) -> None:
    names = opened.locator("[data-memory]")
    assert names.count() > 10 and opened.locator("a[data-memory][href], a[data-home][href]").count() == 0
    linked = make_report(memlens.open_index(full_folder), tmp_path / "report.html", links=SITE)
    page = browser.new_page()
    page.goto(linked.as_uri())
    for link in page.locator("[data-memory]").all()[:5]:
        assert link.get_attribute("href") == f"memory.html?name={link.text_content()}"
    assert page.locator("[data-home]").get_attribute("href") == "index.html"
    page.close()
