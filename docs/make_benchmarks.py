"""Write docs/benchmarks.md from benchmarks/results/summary.csv and the probe results."""

import csv
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from statistics import mean

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
HEAD = """# Benchmarks

This page answers one question per table. Results were measured on 2026-11-18 on 2 shared x86-64 cores (AVX-512) without
a GPU. Ratios compare programs that take turns in one run, so they hardly depend on the machine. Times and sizes do. No
number here was measured on a GPU or a Mac.

The tables are generated from `benchmarks/results/` by `python docs/make_benchmarks.py`.
"""
COLUMNS = ("what", "setup", "result", "target", "command")


def page() -> str:
    """Return the text of docs/benchmarks.md."""
    return "\n".join([HEAD, *summary_tables(), *probe_table()])


def summary_tables() -> Iterator[str]:
    """Yield the lines of one table per question in summary.csv."""
    with (RESULTS / "summary.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for question, group in groupby(rows, key=lambda row: row["question"]):
        yield f"## {question}\n"
        yield "| " + " | ".join(COLUMNS) + " |"
        yield "| --- " * len(COLUMNS) + "|"
        for row in group:
            yield "| " + " | ".join(f"`{row[c]}`" if c == "command" else row[c] for c in COLUMNS) + " |"
        yield ""


def probe_table() -> Iterator[str]:
    """Yield the lines of the table of k-sparse probes: mean AUC over the public sets, by layer."""
    with (RESULTS / "probes-smollm2.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    columns = ("k=1", "k=16", "k=512", "residual", "words")
    yield "## How well do single memories encode public concepts?\n"
    yield "Mean AUC over the 113 binary sets of sae-probes 0.4.2 (Kantamneni et al. 2025) for SmolLM2-135M, last token,"
    yield "by the number of memories (k), next to the residual stream and a bag of words. Command:"
    yield "`benchmarks/probes.py`.\n"
    yield "| layer | " + " | ".join(columns) + " |"
    yield "| --- " * (1 + len(columns)) + "|"
    for layer in sorted({int(row["layer"]) for row in rows}):
        of_layer = [row for row in rows if int(row["layer"]) == layer]
        yield f"| {layer} | " + " | ".join(f"{mean(float(row[c]) for row in of_layer):.3f}" for c in columns) + " |"
    yield ""


if __name__ == "__main__":
    (DOCS / "benchmarks.md").write_text(page(), encoding="utf-8")
