"""Write docs/benchmarks.md and its chart from the CSV files in benchmarks/results.

python docs/make_benchmarks.py
"""

import csv
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from statistics import mean

import altair as alt
import vl_convert

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
CHART = DOCS / "pictures" / "benchmarks.svg"
HEAD = """# Benchmarks

Each table answers one question. Everything was measured on 2026-11-18 and 2026-11-19 on two shared x86-64 cores
(AVX-512). There are no measurements on a GPU or a Mac. Ratios compare programs that take turns in one run, so they
hardly depend on the machine. Absolute times and sizes do depend on it.

`python docs/make_benchmarks.py` generates this page from the files in `benchmarks/results`.
"""
COLUMNS = ("what", "setup", "result", "target", "command")
CHARTED = "How much does a scan add to the forward pass?"
PICTURE = "![Cost of a scan relative to the forward pass, by model](pictures/benchmarks.svg)\n"
INPUTS = {
    "k=1": "1 memory",
    "k=16": "16 memories",
    "k=512": "512 memories",
    "residual": "residual stream",
    "words": "bag of words, without the model",
}
DETECTORS = """## Do the patterns of a memory detect its activation on other text?

Prefixes of 10,000 tokens that were not scanned are split into those with a pattern of the memory and those without. A
memory is strongly active on the 1% of prefixes with the largest coefficients. The mean is taken over 60 random memories
of each layer. Memories without a pattern count with their zeros. Numbers in parentheses are those of the patterns of
another memory of the layer. The bundled model was scanned on 200,000 tokens, as in the demo, without subjects by
states. SmolLM2 was not measured. `benchmarks/explanations.py bundled DEMO bundled:held-out --memories 60` measures
every layer.
"""
PUBLISHED = """
Published for MLP features (Gur-Arieh et al. 2025, arXiv 2501.08319), input score and output score: MaxAct .41 and .33
in GPT-2 small, .56 and .50 in Llama 3.1 8B; VocabProj .07 and .37. The input test here counts a memory if it is on
average more active on five random prefixes with its patterns than on five without. A memory that is inactive on all ten
does not count, so chance is below .5 (see the numbers in parentheses). In the paper, a language model writes the
description and the example sentences. Here, both come from a corpus, the sentences are cut at the prefix, and many
patterns state how a prefix ends. The input scores are therefore only roughly comparable, and the output score (does
steering by the feature fit its description?) has no counterpart.
"""
MEASURES = {
    "precision": "precision",
    "recall": "recall",
    "f1": "F1",
    "auroc": "AUROC",
    "correlation": "correlation",
    "input": "input test",
}
DEPTHS = 6  # number of layers to show of each model
Row = dict[str, str]


def read_rows(name: str) -> list[Row]:
    with (RESULTS / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write_page() -> str:
    """Return the text of docs/benchmarks.md."""
    lines = [HEAD]
    for question, rows in groupby([*read_rows("summary.csv"), *probe_rows()], key=lambda row: row["question"]):
        lines += [f"## {question}\n", *table_lines(rows), ""]
        if question == CHARTED:
            lines.append(PICTURE)
    detectors = [*detector_lines()]
    return "\n".join([*lines, DETECTORS, *detectors, PUBLISHED] if detectors else lines)


def detector_lines() -> Iterator[str]:
    """Yield the table of patterns as detectors, with DEPTHS layers of each model that was measured."""
    paths = sorted(RESULTS.glob("explanations-*.csv"))
    if paths:
        yield f"| model | layer | memories with a match | {' | '.join(MEASURES.values())} |"
        yield "| --- " * (3 + len(MEASURES)) + "|"
    for path in paths:
        rows = read_rows(path.name)
        for depth in range(DEPTHS):
            row = rows[round(depth * (len(rows) - 1) / (DEPTHS - 1))]
            cells = [f"{float(row[name]):.2f} ({float(row[f'{name}_other']):.2f})" for name in MEASURES]
            yield f"| {row['model']} | {row['layer']} | {float(row['described']):.0%} | {' | '.join(cells)} |"


def table_lines(rows: Iterable[Row]) -> Iterator[str]:
    yield "| " + " | ".join(COLUMNS) + " |"
    yield "| --- " * len(COLUMNS) + "|"
    for row in rows:
        yield "| " + " | ".join(f"`{row[name]}`" if name == "command" else row[name] for name in COLUMNS) + " |"


def probe_rows() -> Iterator[Row]:
    """Yield the mean AUC over all probe sets for each input, in the layer where 16 memories score best."""
    rows = read_rows("probes-smollm2.csv")
    layers = sorted({row["layer"] for row in rows}, key=int)
    by_layer = {layer: [row for row in rows if row["layer"] == layer] for layer in layers}
    best = max(layers, key=lambda layer: mean(float(row["k=16"]) for row in by_layer[layer]))
    sets = len(by_layer[best])
    for column, name in INPUTS.items():
        place = "" if column == "words" else f", layer {best}"
        yield {
            "question": "How well do single memories encode public concepts?",
            "what": name,
            "setup": f"SmolLM2, mean over the {sets} binary sets of sae-probes 0.4.2{place}",
            "result": f"AUC {mean(float(row[column]) for row in by_layer[best]):.3f}",
            "target": "",
            "command": "benchmarks/probes.py MODEL --wheel FILE",
        }


def draw_chart() -> str:
    """Return the SVG of the chart: the cost of a scan as a multiple of the forward pass."""
    data = [
        {"model": row["what"], "cost": float(re.match(r"[\d.]+", row["result"])[0])}  # type: ignore[index]
        for row in read_rows("summary.csv")
        if row["question"] == CHARTED
    ]
    base = alt.Chart(alt.Data(values=data))
    bars = base.mark_bar(color="#4c78a8").encode(
        x=alt.X("cost:Q", title="time relative to the forward pass", scale=alt.Scale(domain=[0, 1.5])),
        y=alt.Y("model:N", title=None, sort=None, axis=alt.Axis(labelLimit=260)),
    )
    labels = base.mark_text(align="left", dx=4).encode(
        x="cost:Q", y=alt.Y("model:N", sort=None), text=alt.Text("cost:Q", format=".3f")
    )
    forward_pass = alt.Chart(alt.Data(values=[{"cost": 1}])).mark_rule(strokeDash=[4, 4]).encode(x="cost:Q")
    chart = (bars + labels + forward_pass).properties(width=420, height=150)
    return vl_convert.vegalite_to_svg(chart.to_json())


if __name__ == "__main__":
    (DOCS / "benchmarks.md").write_text(write_page(), encoding="utf-8")
    CHART.write_text(draw_chart() + "\n", encoding="utf-8")
