"""The page is whole, loads nothing, shows text as text, and names what is missing."""

import base64
import csv
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import altair
import pytest
from report_tables import EVIL, like_the_paper, write_rows

import memlens
from memlens.errors import OutputError
from memlens.experiments.experiment import third
from memlens.experiments.run import all_tables
from memlens.experiments.style import page_spec
from memlens.pattern.related import duplicate_groups, token_sets, trigger_sets
from memlens.reports.galleries import (
    LEAST_AUROC,
    LEAST_PRECISION,
    clearest_patterns,
    predictive_values,
    same_triggers,
    same_values,
    tied_share,
)
from memlens.reports.report import make_report
from memlens.reports.sections import Tables, make_sections

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Every element with its attributes and text; fails on a tag that is closed out of order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        (self.scripts if self.open and self.open[-1] in ("script", "style") else self.texts).append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def all(self, attribute: str) -> list[Any]:
        return [attributes[attribute] for _, attributes in self.elements if attribute in attributes]


@pytest.fixture(scope="module")
def page(full_page: Path) -> Page:
    return Page(full_page.read_text(encoding="utf-8"))


def read(index: memlens.Index, tmp_path: Path, *assets: Path) -> Page:
    return Page(make_report(index, tmp_path / "report.html", *assets).read_text(encoding="utf-8"))


@pytest.mark.parametrize("which", ["full", "bare"])
def test_every_link_leads_to_one_place_on_the_page(which: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    page = read(request.getfixturevalue(which), tmp_path)
    places = [f"#{name}" for name in page.all("id")]
    assert len(places) == len(set(places))
    links = [href for href in page.all("href") if not href.startswith("data:text/csv")]
    assert links and set(links) <= set(places)


def test_nothing_is_loaded_and_no_handler_is_inline(page: Page) -> None:
    assert not page.all("src") and not page.all("srcset")
    assert {tag for tag, _ in page.elements} & {"link", "iframe", "object", "embed", "base", "form", "img"} == set()
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    css = page.scripts[0]
    assert "url(" not in css and "@import" not in css


def test_only_the_scripts_of_the_page_may_run_and_text_like_html_is_shown_as_text(page: Page) -> None:
    policy = next(a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and "default-src 'none'" in policy and "unsafe-eval" not in policy
    running = page.scripts[2:]  # after the style and the charts' data
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in running]
    assert re.findall(r"'sha256-([^']+)'", policy) == hashes
    assert EVIL in page.text
    assert [a.get("type") for tag, a in page.elements if tag == "script"] == ["application/json", "module", "module"]


def test_broken_names_do_not_break_the_page(bare: memlens.Index, tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)>\ud800\x00"
    bare.manifest = bare.manifest.with_notes({"model": {**bare.manifest.content["model"], "name": name}})
    assert "<img src=x onerror=alert(1)>\\ud800␀" in read(bare, tmp_path).text


def test_the_same_index_gives_the_same_bytes(full: memlens.Index, full_page: Path, tmp_path: Path) -> None:
    again = make_report(full, tmp_path / "again.html").read_bytes()
    assert again == full_page.read_bytes()  # of the same tables in another folder
    assert str(tmp_path).encode() not in again


def test_every_chart_is_valid_vega_lite(full: memlens.Index) -> None:
    charts = [chart for section in make_sections(Tables(full)) for chart in section.charts]
    assert len(charts) > 10
    for chart in charts:
        own = {name: part for name, part in chart.spec.items() if name != "config"}  # which has settings of Vega's own
        altair.Chart.from_dict(own)  # raises on what the schema of Vega-Lite does not know


def test_names_that_count_over_a_process_count_from_one_in_every_chart() -> None:
    def chart(first: int) -> dict[str, Any]:
        views = [f"view_{first}", f"view_{first + 1}"]
        params = [{"name": f"param_{first + 7}", "select": "point", "views": views[:1]}]
        return {"layer": [{"name": name} for name in views], "params": params, "data": {"values": ["view_9"]}}

    assert page_spec(chart(3)) == page_spec(chart(40))
    assert page_spec(chart(3))["params"][0]["views"] == [page_spec(chart(3))["layer"][0]["name"]] == ["view_1"]
    assert page_spec(chart(3))["data"] == {"values": ["view_9"]}


def test_missing_tables_are_named_with_the_command_that_makes_them(bare: memlens.Index, tmp_path: Path) -> None:
    text = read(bare, tmp_path).text
    for _, table in all_tables():
        command = table.command or f"memlens experiment INDEX {table.name}"
        assert table.question in text and command in text
    assert "No claim of the paper was tested on this index yet" in text


def test_any_subset_of_tables_is_shown_and_a_claim_without_its_table_is_not_judged(
    bare: memlens.Index, tmp_path: Path
) -> None:
    tables = like_the_paper(bare)
    write_rows(bare, "rank", tables["rank"])
    assert [judged.claim.slug for judged in Tables(bare).judge() if judged.judgement] == ["rank"]
    write_rows(bare, "cases", tables["cases"])
    page = read(bare, tmp_path)
    assert page.all("data-chart")[:3] == ["rank", "cases", "cases-paper"]
    assert "memlens experiment INDEX agreement" in page.text
    assert "memlens experiment INDEX rank --" not in page.text  # nothing is known of sample and seed here


def test_every_chart_has_a_description_and_its_numbers(page: Page) -> None:
    charts = [attributes for _, attributes in page.elements if "data-chart" in attributes]
    specs = json.loads(page.scripts[1])["charts"]
    assert {chart["data-chart"] for chart in charts} == set(specs)
    assert all(chart["role"] == "img" and len(chart["aria-label"] or "") > 20 for chart in charts)
    articles = sum(tag == "figure" for tag, _ in page.elements)
    assert sum(tag == "details" and a.get("class") == "numbers" for tag, a in page.elements) >= articles


def test_values_computed_anew_are_told(bare: memlens.Index, tmp_path: Path) -> None:
    write_rows(bare, "rank", like_the_paper(bare)["rank"])
    note = {"rank": {"seed": 3, "sample": 7, "from": {"values": "another"}}}
    bare.write({}, lambda: {"experiments": note})
    text = read(bare, tmp_path).text
    assert "This table is outdated" in text and "memlens experiment INDEX rank --sample 7 --seed 3" in text


def test_assets_hold_each_chart_and_the_very_tables(full: memlens.Index, tmp_path: Path) -> None:
    figures = tmp_path / "figures"
    for name in read(full, tmp_path, figures).all("data-chart"):
        svg = (figures / f"{name}.svg").read_text(encoding="utf-8")
        assert svg.startswith("<svg") and "var(--" not in svg
        assert (figures / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    for path in (full.folder / "experiments").glob("*.parquet"):
        assert from_csv(figures / f"{path.stem}.csv") == full.table(f"experiments/{path.stem}").to_pylist()


def from_csv(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8", newline="") as handle:
        return [{name: _value(cell) for name, cell in row.items()} for row in csv.DictReader(handle)]


def _value(cell: str) -> Any:
    if cell in ("True", "False"):
        return cell == "True"
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            continue
    return cell or None


def test_a_folder_in_place_of_the_page_or_a_file_in_place_of_the_assets_is_refused(
    bare: memlens.Index, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="is a folder; name a file"):
        make_report(bare, tmp_path)
    with pytest.raises(OutputError, match="is a file; name a folder"):
        make_report(bare, tmp_path / "report.html", tmp_path / "file")


def test_the_gallery_of_patterns_shows_the_surest_of_each_third_and_kind_and_none_that_is_weak(
    full: memlens.Index,
) -> None:
    rows = full.table("patterns").to_pylist()
    for row in rows:
        row["auroc"] = 0.7 if row["memory"] == 0 else row["auroc"]  # the surest of all are weak
    write_rows(full, "patterns", rows, folder="")
    cards = clearest_patterns(full)
    assert cards is not None and [(third(card.layer, 16), card.kind) for card in cards] == [
        ("lower", "shallow"), ("middle", "shallow"), ("middle", "semantic"), ("upper", "semantic")
    ]  # fmt: skip
    good = [row for row in rows if row["auroc"] is None or row["auroc"] >= LEAST_AUROC]
    shown = {(row["pattern"], row["kind"]) for card in cards for row in rows if card.memory == name_of(row)}
    for card in cards:
        place = (third(card.layer, 16), card.kind)
        own = [row for row in good if (third(row["layer"], 16), row["kind"]) == place]
        best = max(own, key=lambda row: (-1 if row["precision"] is None else row["precision"], row["confidence"]))
        assert card.confidence == best["confidence"] or (best["pattern"], best["kind"]) in shown
        row = next(row for row in own if card.memory == name_of(row) and row["confidence"] == card.confidence)
        assert (card.auroc, card.auroc_same_token) == (row["auroc"], row["auroc_same_token"])
        alike = [one for one in rows if (one["layer"], one["memory"]) == (row["layer"], row["memory"])]
        assert len(card.others) == len({one["sense"] for one in alike} - {row["sense"]})


def test_the_gallery_of_values_shows_only_those_that_predict_one_trigger_in_five(full: memlens.Index) -> None:
    rows = full.table("experiments/predictive-values").to_pylist()
    cards = predictive_values(full, Tables(full))
    assert cards is not None
    best = sorted((row for row in rows if row["precision"] >= 0.2), key=lambda row: -row["precision"])[:6]
    assert LEAST_PRECISION == 0.2 and [card.memory for card in cards] == [name_of(row) for row in best]
    write_rows(full, "predictive-values", [row | {"precision": 0.02} for row in rows])
    assert predictive_values(full, Tables(full)) == []


def name_of(row: dict[str, Any]) -> str:
    return f"L{row['layer']}N{row['memory']}"


def test_duplicates_are_on_the_page_with_what_they_share(full: memlens.Index, tmp_path: Path) -> None:
    page = read(full, tmp_path)
    for gallery, named in ((same_triggers(full), trigger_sets(full)), (same_values(full), token_sets(full))):
        assert gallery is not None
        for card in gallery.cards:
            assert card.count >= len(card.memories) > 1 and " ".join(card.memories) in page.text
            first, second = (named[memlens.MemoryId.parse(name)] for name in card.memories[:2])
            assert len(first & second) / len(first | second) >= card.least
            assert bool(card.examples) != bool(card.tokens)
    groups = duplicate_groups(trigger_sets(full), 0.5)
    assert groups and f"{sum(len(g.memories) for g in groups):,} memories in {len(groups):,}" in page.text


def test_what_people_say_stands_beside_the_hint(full: memlens.Index, tmp_path: Path) -> None:
    row = {"layer": 15, "prefix": 0, "text": "The river", "residual_text": " runs", "output_text": EVIL, "cosine": 0.25,
           "memories": [3], "related": 2, "distant": 1}  # fmt: skip
    write_rows(full, "last-layer", [row, row | {"related": 0, "distant": 0}])
    page = read(full, tmp_path)
    assert "Here people judged 1 of 2: 0 distant, 1 related; mean cosine 0.25 for related words." in page.text
    assert "people: 2 related, 1 distant" in page.text and page.text.count("people: ") == 1


def test_figure_two_has_a_panel_for_the_machine_the_paper_and_each_person(page: Page) -> None:
    charts = [name for name in page.all("data-chart") if name.startswith("patterns")]
    assert charts == ["patterns", "patterns-paper", "patterns-people-0"]
    spec = json.loads(page.scripts[1])["charts"]["patterns"]
    drawn = spec["data"]["values"]
    assert {row["pattern"] for row in drawn} == {
        "shallow",
        "both",
        "implied by the last word",
        "beyond the last word",
        "not covered",
    }
    assert all(row["low"] - 1e-9 <= row["share"] <= row["high"] + 1e-9 for row in drawn)


def test_the_share_of_ties_is_that_of_a_loop_over_all_lists(bare: memlens.Index) -> None:
    lists: dict[tuple[int, int, str], dict[int, float]] = {}
    for row in bare.table("triggers").to_pylist():
        lists.setdefault((row["layer"], row["memory"], row["end"]), {})[row["rank"]] = row["coefficient"]
    top = bare.manifest.settings.top
    full = [entries for entries in lists.values() if len(entries) == top]
    tied = [entries for entries in full if sorted(entries.items())[-1][1] == sorted(entries.items())[-2][1]]
    assert full and tied_share(bare) == pytest.approx(len(tied) / len(full))
