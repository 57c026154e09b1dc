"""A new experiment is one file and one name in the registry: command line, report and workbench have it at once."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from toy_experiment import EXPERIMENT

from memlens.cli import main
from memlens.experiments.run import EXPERIMENTS
from memlens.index.reader import Index
from memlens.reports.report import make_report
from memlens.web.pages.overview import read_charts
from memlens.web.workbench import ServedIndex


def test_a_new_experiment_is_listed_run_printed_reported_and_drawn(
    tiny_gpt2_values: Index,
    copy_of: Callable[..., Index],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setitem(EXPERIMENTS, "toy", EXPERIMENT)
    index = copy_of(tiny_gpt2_values)
    assert main(["experiment", str(index.folder)]) == 0
    assert EXPERIMENT.title in capsys.readouterr().out
    assert main(["experiment", str(index.folder), "toy"]) == 0
    printed = capsys.readouterr().out
    rows = index.table("experiments/toy").to_pylist()
    assert f"beyond the paper: {sum(row['memories'] for row in rows):,} memories" in printed
    *shown, verdict, reason = printed.splitlines()
    assert [line.split()[0] for line in shown[-len(rows) :]] == [str(row["layer"]) for row in rows]
    assert verdict == "not compared with a shuffled network: A toy memory has triggers"
    assert reason == (
        "  It has what was kept; appears by the rule, but no shuffled network was measured (run `memlens "
        "experiment INDEX shuffled`)."
    )
    page = make_report(index, tmp_path / "report.html").read_text(encoding="utf-8")
    words = (
        "How many triggers has a memory?",
        "A toy memory has triggers",
        "Appears always.",
        "It has what was kept; ",
    )
    assert all(text in page for text in ('<article id="toy"', '"toy":{"$schema"', *words))
    (section,) = read_charts(ServedIndex(index.folder))
    assert (section.name, section.charts[0].name, len(section.tables[0].rows)) == ("toy", "toy", len(rows))


def test_looking_up_experiments_imports_nothing_heavy() -> None:
    code = (
        "import sys, json, memlens.experiments.run, memlens.cli.analyze;"
        "print(json.dumps([m for m in ('torch', 'numba', 'transformers', 'pandas', 'altair') if m in sys.modules]))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == []
