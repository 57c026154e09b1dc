"""examples/paper: its script runs to the end on a small model of the paper's kind, and its table is published data."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from docs_pages import ROOT

import memlens
from memlens.experiments.run import EXPERIMENTS

EXAMPLE, FIXTURE = ROOT / "examples" / "paper", ROOT / "tests" / "golden" / "fixture"
CURVES = {
    "2": ("fig2_pct", "shallow"),
    "3": ("fig3_pct", "last"),
    "4": ("fig4_counts_of_4096",),
    "5": ("fig5_rank", "median"),
    "7": ("fig7_pct", "median"),
    "8": ("fig8_plotted_pct",),
    "9": ("fig9_counts_of_4000",),
    "10": ("fig10_prob", "median"),
    "11": ("fig11_counts_of_4000", "residual"),
}


@pytest.mark.sweep
def test_the_same_script_runs_on_the_small_model(tmp_path: Path) -> None:
    (tmp_path / "memlens").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m memlens "$@"\n')
    (tmp_path / "memlens").chmod(0o755)
    own = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "WHERE": "--threads 1", "SAMPLE": "--sample 40"}
    inputs = [FIXTURE, FIXTURE / "trigger_train.txt", FIXTURE / "ffninfo_valid.txt", tmp_path / "index"]
    ran = subprocess.run(["bash", EXAMPLE / "run.sh", *inputs], env=own, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    index = memlens.open_index(tmp_path / "index")
    assert all(index.has(f"experiments/{name}") for name in EXPERIMENTS)
    assert index.manifest.settings.preset == "paper" and (index.folder / "report.html").is_file()
    assert "ffninfo_valid" in json.dumps(json.loads((index.folder / "manifest.json").read_text())["experiments"])


def test_the_table_has_the_ends_of_the_published_curves() -> None:
    published = json.loads((ROOT / "src/memlens/experiments/published_figures.json").read_text())
    rows = re.findall(r"^\| (\d+): .*?\| ([\d.-]+) \| ([\d.-]+) \|$", (EXAMPLE / "README.md").read_text(), re.MULTILINE)
    assert [row[0] for row in rows] == list(CURVES)
    for figure, first, last in rows:
        curve = published
        for name in CURVES[figure]:
            curve = curve[name]
        assert (float(first), float(last)) == (curve[0], curve[-1]), figure
