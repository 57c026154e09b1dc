"""Share of value lists that are clearer than a random direction, by layer.

    memlens values INDEX
    python benchmarks/coherence.py INDEX [-o FILE]

`memlens values` compares the list of every memory with those of 1,000 random directions, of which 1% are clear
(src/memlens/vocab/coherence.py). A list that is not clear counts as noise. Writes one CSV row per layer, with Wilson
intervals for the share of clear lists and the median of max p as a multiple of a uniform distribution.
"""

import argparse
import csv
from pathlib import Path

import numpy as np

from memlens.index.memory import CLEAR
from memlens.index.reader import Index
from memlens.stats import wilson

COLUMNS = ("model", "layer", "memories", "clear", "share", "low", "high", "noise", "max_p_times_uniform")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("index", type=Path, help="Index with values.")
    parser.add_argument("--model", default="bundled", help="Name of the model in the table. Default: bundled.")
    parser.add_argument("-o", "--out", type=Path, help="CSV file. Default: benchmarks/results/coherence-MODEL.csv.")
    options = parser.parse_args()
    index = Index(options.index)
    table = index.table("values", ["layer", "coherence", "max_p"])
    layers, coherence, max_p = (table.column(name).to_numpy() for name in table.column_names)
    rows = []
    for layer in index.layers:
        own = layers == layer
        count, clear = int(own.sum()), int((coherence[own] >= np.float32(CLEAR)).sum())
        multiple = float(np.median(max_p[own])) * index.manifest.model.vocabulary
        numbers = (clear / count, *wilson(clear, count), 1 - clear / count, multiple)
        rows.append([options.model, layer, count, clear, *(round(number, 4) for number in numbers)])
        print(*rows[-1])
    out = options.out or Path(__file__).parent / "results" / f"coherence-{options.model}.csv"
    with out.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])


if __name__ == "__main__":
    main()
