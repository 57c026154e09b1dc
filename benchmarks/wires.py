"""Whether wires predict what silencing changes: the correlation of predicted and measured changes of coefficients.

    python benchmarks/wires.py INDEX [-o FILE.csv] [--pairs 40] [--triggers 3]

For neighboring layers, for layers 5 apart and for random pairs of neighboring layers: silence the earlier memory of a
wire on the top triggers of the later one, and compare the change of the later coefficient with the change that the wire
predicts. Strong wires are those with the largest |cosine| among all pairs of their two layers.
"""

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

from memlens.circuits.wires import folded_keys, folded_values, validate_wires
from memlens.index.reader import Index
from memlens.models.memory_model import MemoryModel

COLUMNS = ("model", "wires", "distance", "pairs", "triggers", "r", "rank", "same_sign")


def choose_pairs(model: MemoryModel, distance: int, count: int, strong: bool) -> Iterator[tuple[str, str]]:
    """Yield pairs of memories, spread over all pairs of layers with this distance."""
    draw = np.random.default_rng(0)
    layers = range(len(model.layers) - distance)
    for layer, share in zip(layers, np.array_split(np.arange(count), len(layers)), strict=True):
        source, target = model.layers[layer], model.layers[layer + distance]
        if strong:
            values, keys = folded_values(source), folded_keys(target)["key"]
            cosines = (values / values.norm(dim=1, keepdim=True)) @ (keys / keys.norm(dim=1, keepdim=True)).T
            best = cosines.abs().flatten().topk(len(share)).indices.numpy()
            places = np.stack(np.unravel_index(best, cosines.shape), 1)
        else:
            places = draw.integers(0, (source.memories, target.memories), (len(share), 2))
        for earlier, later in places.tolist():
            yield str(model.names.name(layer, earlier)), str(model.names.name(layer + distance, later))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("index", type=Path, help="An index with its model.")
    results = Path(__file__).parent / "results" / "wires.csv"
    parser.add_argument("-o", "--out", type=Path, default=results, help="CSV file to which rows are appended.")
    parser.add_argument("--pairs", type=int, default=40, help="Wires of each kind.")
    parser.add_argument("--triggers", type=int, default=3, help="Triggers per wire.")
    options = parser.parse_args()
    index = Index(options.index)
    model = index.load_model()
    is_new = not options.out.exists()
    with options.out.open("a", encoding="utf-8", newline="") as handle:
        writer = csv.writer(handle, lineterminator="\n")
        if is_new:
            writer.writerow(COLUMNS)
        for kind, distance in (("strong", 1), ("strong", 5), ("random", 1)):
            pairs = list(choose_pairs(model, distance, options.pairs, kind == "strong"))
            check = validate_wires(index, model, pairs, options.triggers)
            predicted, measured = np.array([check.predicted, check.measured])
            rank, same = spearmanr(predicted, measured).statistic, np.mean(np.sign(predicted) == np.sign(measured))
            numbers = [f"{value:.3f}" for value in (check.correlation, rank, same)]
            writer.writerow([model.name, kind, distance, len(pairs), len(predicted), *numbers])
            handle.flush()


if __name__ == "__main__":
    main()
