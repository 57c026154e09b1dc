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

Each table answers one question. Everything was measured on 2026-11-18 on two shared x86-64 cores (AVX-512). There are
no measurements on a GPU or a Mac. Ratios compare programs that take turns in one run, so they hardly depend on the
machine. Absolute times and sizes do depend on it.

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
    return "\n".join(lines)


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
