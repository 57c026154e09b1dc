"""k-sparse probes of a model's memories on the public sets of sae-probes.

    pip download --no-deps sae-probes==0.4.2
    python benchmarks/probes.py MODEL --wheel sae_probes-0.4.2-py3-none-any.whl [-o FILE] [--layers 4,9]

The wheel (MIT license, Kantamneni et al. 2025, https://arxiv.org/abs/2502.16681) contains 113 sets of texts with two
labels. Only its data is read. The protocol is that of sae-probes: coefficients at the last token, at most 1,024
training texts with balanced labels, texts cut from the left, the k memories with the largest mean difference for k = 1,
2, 4, ..., 512, logistic regression, AUC. Differences: columns are standardized, there are 5 strengths of regularization
instead of 10, at most 500 test texts, and at most 256 tokens per text.

Writes one CSV row per set and layer. Sets that are already in the file are skipped, so a stopped run can be continued.
"""

import argparse
import csv
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from rich.progress import track

import memlens
from memlens.models.memory_model import MemoryModel
from memlens.probing.activations import encode_texts, read_activations
from memlens.probing.fit import Columns, Split, fit_dense, fit_sparse, fit_words
from memlens.probing.labels import LabeledTexts
from memlens.probing.probe import fitting
from memlens.settings import ProbeSettings

DATA = "sae_probes/data/"
TRAIN, TEST, SEED, MAX_LENGTH = 1024, 500, 42, 256
SIZES = ProbeSettings().sizes
COLUMNS = ("set", "train", "test", "cut", "words", "layer", *(f"k={k}" for k in SIZES), "residual")
Row = dict[str, str | int | float]


def read_rows(wheel: zipfile.ZipFile, name: str) -> list[dict[str, str]]:
    csv.field_size_limit(1 << 24)
    packed = pa.CompressedInputStream(io.BytesIO(wheel.read(DATA + name + ".zst")), "zstd")
    return list(csv.DictReader(io.TextIOWrapper(packed, "utf-8", newline="")))


def read_set_names(wheel: zipfile.ZipFile) -> list[str]:
    rows = read_rows(wheel, "probing_datasets_MASTER.csv")
    return [row["Dataset save name"] for row in rows if row["Data type"] == "Binary Classification"]


def divide(rows: list[dict[str, str]]) -> Split:
    """Draw balanced training and test texts from the first 5,000 rows, as sae-probes does."""
    rows = rows[:5000]
    classes = tuple(sorted({row["target"] for row in rows}))
    y = np.array([classes.index(row["target"]) for row in rows])
    rng = np.random.RandomState(SEED)
    fewest = int(np.bincount(y).min())
    train_size = min(TRAIN, len(rows) - 100, 2 * (fewest - 20)) // 2  # per label
    test_size = min(TEST // 2, fewest - train_size)
    by_label = [rng.permutation(np.flatnonzero(y == label)) for label in (0, 1)]
    train = rng.permutation(np.concatenate([rows_of[:train_size] for rows_of in by_label]))
    test = np.concatenate([rows_of[train_size : train_size + test_size] for rows_of in by_label])
    selected = np.concatenate([train, test])
    labels = LabeledTexts(tuple(rows[row]["prompt"] for row in selected), y[selected], classes)
    return Split(labels, np.arange(len(train)), np.arange(len(train), len(selected)), SEED)


def probe_set(model: MemoryModel, name: str, division: Split, layers: list[int]) -> Iterator[Row]:
    """Yield one row per layer."""
    encoded, cut = encode_texts(model, division.labels.texts, MAX_LENGTH)
    with fitting():
        words = fit_words(division).score.value
    for layer, coefficients, states in read_activations(model, encoded, "last", layers):
        with fitting():
            fits = fit_sparse(Columns.of(coefficients, division.train), division, SIZES)
            residual = fit_dense(Columns.of(states, division.train), division)
        scores = {f"k={k}": round(fit.score.value, 4) for k, fit in fits.items()}
        sizes = {"train": len(division.train), "test": len(division.test), "cut": cut}
        yield {"set": name, **sizes, "words": round(words, 4), "layer": layer, **scores} | {
            "residual": round(residual.score.value, 4)
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hub id, folder or file.")
    parser.add_argument("--wheel", type=Path, required=True, help="Wheel of sae-probes.")
    parser.add_argument("-o", "--out", type=Path, help="CSV file. Default: benchmarks/results/probes-MODEL.csv.")
    parser.add_argument("--layers", default="", help="Layers to probe, like 0,5,11. Default: all.")
    options = parser.parse_args()
    wheel = zipfile.ZipFile(options.wheel)
    out = options.out or Path(__file__).parent / "results" / f"probes-{Path(options.model).stem}.csv"
    done: set[str] = set()
    if out.exists():
        with out.open(encoding="utf-8", newline="") as file:
            done = {row["set"] for row in csv.DictReader(file)}
    else:
        out.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")
    model = memlens.load(options.model)
    layers = [int(layer) for layer in options.layers.split(",")] if options.layers else list(range(len(model.layers)))
    remaining = [name for name in read_set_names(wheel) if name not in done]
    for name in track(remaining, description="probing"):
        rows = list(probe_set(model, name, divide(read_rows(wheel, name)), layers))
        with out.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    main()
