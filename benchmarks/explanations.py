"""Patterns as detectors of activation on text that was not scanned, by layer.

    memlens scan MODEL TEXT -o INDEX && memlens values INDEX && memlens patterns INDEX --states
    python benchmarks/explanations.py MODEL INDEX OTHER_TEXT [--memories 100] [--tokens 10000] [-o FILE]

Draws some memories of every layer (seeded), finds the prefixes of OTHER_TEXT that have a pattern of the memory, and
compares them with the memory's coefficients (detectors.py). A memory is strongly active on 1% of
the prefixes, so precision is 0.01 by chance and recall is the share of prefixes with a pattern. Memories without a
pattern count with their zeros. The columns that end in `_other` hold the scores of the same memories with the patterns
of another memory of their layer.

`input` follows the input test of Gur-Arieh et al. (2025, arXiv 2501.08319): the share of memories that are on average
more active on five random prefixes with a pattern than on five without. A memory without such prefixes fails. In the
paper, a language model writes the description and the sentences; here, both come from a corpus, the sentences are cut
at the prefix, and a pattern states what a prefix ends with. The numbers are therefore only roughly comparable, and the
paper's output test (does steering by the feature fit the description?) has no counterpart here.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from detectors import all_prefixes, read_all_coefficients, score_detector, score_prefixes
from numpy.typing import NDArray

import memlens
from memlens.index.build import build_index
from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.settings import CorpusSettings
from memlens.stats import generator

EXAMPLES = 5  # prefixes with and without a pattern, for the input test
MEASURES = ("precision", "recall", "f1", "auroc", "correlation", "input")
COLUMNS = ("model", "layer", "memories", "described", "prefixes", *MEASURES, *(f"{name}_other" for name in MEASURES))
PUBLISHED = (  # method, model, input score, output score (Gur-Arieh et al. 2025)
    ("MaxAct", "GPT-2 small", 0.41, 0.33),
    ("MaxAct", "Llama 3.1 8B", 0.56, 0.50),
    ("VocabProj", "", 0.07, 0.37),
)


def passes_input_test(
    scores: NDArray[np.float32], coefficients: NDArray[np.float32], draw: np.random.Generator
) -> bool:
    """Return True if the mean coefficient of random prefixes with a pattern exceeds that of others."""
    means = []
    for prefixes in (np.flatnonzero(scores > 0), np.flatnonzero(scores == 0)):
        if not len(prefixes):
            return False
        means.append(coefficients[draw.choice(prefixes, min(EXAMPLES, len(prefixes)), replace=False)].mean())
    return bool(means[0] > means[1])


def draw_memories(index: Index, layer: int, count: int) -> list[MemoryId]:
    total = index.manifest.model.memories[layer]
    draw = generator(0, "explanations", layer)
    return [index.names.name(layer, number) for number in sorted(draw.choice(total, min(count, total), replace=False))]


def measure(scores: NDArray[np.float32], coefficients: NDArray[np.float32], seed: int) -> dict[str, float]:
    """Return the mean of each measure over memories. Both arrays are [memories, prefixes]."""
    draw = generator(0, "input test", seed)
    found = [score_detector(*pair) for pair in zip(scores, coefficients, strict=True)]
    passed = [passes_input_test(*pair, draw) for pair in zip(scores, coefficients, strict=True)]
    columns = {name: [getattr(own, name) for own in found] for name in MEASURES[:-1]} | {"input": passed}
    return {name: float(np.mean([number for number in own if number is not None])) for name, own in columns.items()}


def print_table(rows: Sequence[dict[str, object]]) -> None:
    print("layer", *(f"{name:>12}" for name in MEASURES), "(with the patterns of another memory)", sep="  ")
    for row in rows:
        cells = (f"{row[name]:.2f} ({row[f'{name}_other']:.2f})" for name in MEASURES)
        print(f"{row['layer']:5}", *(f"{cell:>12}" for cell in cells), sep="  ")
    print("\npublished, MLP features (Gur-Arieh et al. 2025): input and output score")
    for method, model, of_input, of_output in PUBLISHED:
        print(f"{method:10}{model:14}{of_input:.2f}  {of_output:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hub id, folder, file or `bundled`.")
    parser.add_argument("index", type=Path, help="Index of the model with patterns.")
    parser.add_argument("text", help="Text that was not scanned, or `bundled:held-out`.")
    parser.add_argument("--memories", type=int, default=100, help="Memories per layer. Default: 100.")
    parser.add_argument("--tokens", type=int, default=10_000, help="Prefixes of the other text. Default: 10000.")
    parser.add_argument("-o", "--out", type=Path, help="CSV file. Default: benchmarks/results/explanations-MODEL.csv.")
    options = parser.parse_args()
    model, index = memlens.load(options.model), Index(options.index)
    rows: list[dict[str, object]] = []
    with TemporaryDirectory() as folder:
        settings = replace(index.manifest.settings, layers=index.layers[:1], max_tokens=2 * options.tokens)
        build_index(model, CorpusSettings((options.text,)), settings, Path(folder) / "other")
        other = Index(Path(folder) / "other")
        places = all_prefixes(other, options.tokens)
        memories = [name for layer in index.layers for name in draw_memories(index, layer, options.memories)]
        scores = score_prefixes(index, other, places, memories, model)
        coefficients = read_all_coefficients(other, model, places, memories)
    for layer in index.layers:
        own = [place for place, name in enumerate(memories) if name.layer == layer]
        rows.append(
            {"model": Path(options.model).stem, "layer": layer, "memories": len(own)}
            | {"described": float((scores[own] > 0).any(1).mean()), "prefixes": float((scores[own] > 0).mean())}
            | measure(scores[own], coefficients[own], layer)
            | {f"{name}_other": n for name, n in measure(np.roll(scores[own], 1, 0), coefficients[own], layer).items()}
        )
    print_table(rows)
    out = options.out or Path(__file__).parent / "results" / f"explanations-{Path(options.model).stem}.csv"
    with out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in rows:
            writer.writerow([f"{cell:.4f}" if isinstance(cell := row[name], float) else cell for name in COLUMNS])
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
