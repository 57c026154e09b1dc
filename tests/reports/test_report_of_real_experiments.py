"""The report of real experiments: their tables and charts make a page."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import memlens
from memlens.experiments.agreement import BASELINES, draw
from memlens.experiments.experiment import ModelShape
from memlens.experiments.run import EXPERIMENTS
from memlens.reports.report import make_report


def test_every_experiment_is_on_the_page_with_its_recipe(analyzed: memlens.Index, tmp_path: Path) -> None:
    text = make_report(analyzed, tmp_path / "report.html").read_text(encoding="utf-8")
    for name in EXPERIMENTS:
        assert f'<article id="{name}"' in text and f'<div id="how-{name}"' in text
        size = 30 if EXPERIMENTS[name].on_prefixes else EXPERIMENTS[name].sample
        sample = "" if size is None else f" --sample {size}"
        assert f"memlens experiment INDEX {name}{sample} --seed 0" in text
    assert "A share of at most 0.01 of the patterns of each family is expected by chance: " in text
    assert "30 random prefixes of the scanned corpus, seed 0" in text
    assert analyzed.has("experiments/prefix-layers") and "prefix-layers" not in text  # a working table is no result
    assert "is outdated" not in text and "different passes" not in text
    charts = json.loads(re.findall(r'id="charts">(.*?)</script>', text, re.DOTALL)[0])
    drawn = {name for name in EXPERIMENTS if analyzed.table(f"experiments/{name}").num_rows}
    assert drawn <= set(charts["charts"]) and len(drawn) >= len(EXPERIMENTS) - 1  # no memory can be silenced here


def test_a_chart_that_an_experiment_draws_itself_is_exported_too(analyzed: memlens.Index, tmp_path: Path) -> None:
    make_report(analyzed, tmp_path / "report.html", tmp_path / "figures")
    for name in ("last-layer", "contributions", "vetoes"):
        svg = (tmp_path / "figures" / f"{name}.svg").read_text(encoding="utf-8")
        assert "var(--" not in svg and "<svg" in svg


def test_tables_of_different_passes_say_so_and_each_where_it_comes_from(
    analyzed: memlens.Index, tiny_llama: Path, copy_of: Callable[..., memlens.Index], tmp_path: Path
) -> None:
    index = copy_of(analyzed)
    memlens.experiment(index, "cases", model=tiny_llama, sample=20, seed=5, threads=1)
    text = make_report(index, tmp_path / "report.html").read_text(encoding="utf-8")
    assert text.count("come from different passes") == 1 and "was measured on" not in text
    for name, origin in (("cases", "20 random prefixes"), ("refinement", "30 random prefixes")):
        recipe = text[text.index(f'<div id="how-{name}"') :].split("</details>")[0]
        assert f"{origin} of the scanned corpus, seed {5 if name == 'cases' else 0}" in recipe


def test_the_chart_of_agreement_has_both_baselines(analyzed: memlens.Index) -> None:
    rows = analyzed.table("experiments/agreement").to_pylist()
    spec = draw(rows, ModelShape.of(analyzed))[0].spec
    drawn = {
        (row["baseline"], row["layer"]): row["value"]
        for layer in spec["layer"]
        for row in layer.get("data", {}).get("values", [])
        if "baseline" in row
    }
    assert drawn == {(label, row["layer"]): row[column] for row in rows for column, label in BASELINES.items()}
    assert len(drawn) == 2 * len(rows)
