"""Probes on public sets: the protocol of sae-probes on the memories of a local model, set by set, to be continued.

    pip download --no-deps sae-probes==0.4.2
    python benchmarks/probes.py MODEL --wheel sae_probes-0.4.2-py3-none-any.whl [-o FILE] [--layers 4,9]

The wheel (MIT licence, Kantamneni et al. 2025, https://arxiv.org/abs/2502.16681) holds 113 sets of texts with two
labels each; nothing of it is run. As there: the last token, at most 1,024 texts to learn from and half of them of each
label, texts cut from the left, k = 1, 2, 4 ... 512 by mean difference, logistic regression, AUC. Other than there:
columns are standardised, five strengths of regularisation instead of ten, at most 500 texts to test on, and 256 tokens
of a text.
A set that is in the file (benchmarks/results/probes-MODEL.jsonl, some 6 kB a set) is not done again; a run that is
stopped loses at most the set it was at. Fits use one core: `OMP_NUM_THREADS=1` and one process a core, with --part 1/2
and 2/2 and the same file, take the least time. Texts that several sets have in common are read once (119,781 of
164,530).
"""

import argparse
import csv
import io
import json
import time
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from rich.progress import track

import memlens
from memlens.probing.activations import Layer, encode_texts, read_activations
from memlens.probing.fit import Columns, Division, Fit, fit_dense, fit_sparse, fit_words
from memlens.probing.labels import LabelledTexts
from memlens.probing.probe import fitting
from memlens.settings import ProbeSettings
from memlens.stats import generator, mean_interval, wilson

DATA = "sae_probes/data/"
TRAIN, TEST, SEED = 1024, 500, 42
KS = ProbeSettings().sizes
Row = NDArray[np.float32]


def rows_of(wheel: zipfile.ZipFile, name: str) -> list[dict[str, str]]:
    csv.field_size_limit(1 << 24)
    packed = pa.CompressedInputStream(io.BytesIO(wheel.read(DATA + name + ".zst")), "zstd")
    return list(csv.DictReader(io.TextIOWrapper(packed, "utf-8", newline="")))


def sets_of(wheel: zipfile.ZipFile) -> list[str]:
    rows = rows_of(wheel, "probing_datasets_MASTER.csv")
    return [row["Dataset save name"] for row in rows if row["Data type"] == "Binary Classification"]


def divide(rows: list[dict[str, str]]) -> Division:
    """As in sae-probes: the first 5,000 rows, of which training and test are drawn with both labels equally often."""
    rows = rows[:5000]
    classes = tuple(sorted({row["target"] for row in rows}))
    y = np.array([classes.index(row["target"]) for row in rows])
    random = np.random.RandomState(SEED)
    fewest = int(np.bincount(y).min())
    train = min(TRAIN, len(rows) - 100, 2 * (fewest - 20)) // 2  # of each label
    test = min(TEST // 2, fewest - train)
    drawn = [random.permutation(np.flatnonzero(y == place)) for place in (0, 1)]
    learnt = random.permutation(np.concatenate([own[:train] for own in drawn]))
    tested = np.concatenate([own[train : train + test] for own in drawn])
    used = np.concatenate([learnt, tested])
    labels = LabelledTexts(tuple(rows[row]["prompt"] for row in used), y[used], classes)
    return Division(labels, np.arange(len(learnt)), np.arange(len(learnt), len(used)), SEED)


class SharedTexts:
    """Activations at the last token of texts, of which some are kept until the last set that has them was read."""

    def __init__(self, model: Any, layers: list[int], max_length: int, sets: list[Division]) -> None:
        self.model, self.layers, self.max_length = model, layers, max_length
        self.uses = Counter(text for division in sets for text in set(division.labels.texts))
        self.kept: dict[str, list[tuple[Row, Row]]] = {}  # for each layer: memories and states of one text

    def read(self, texts: tuple[str, ...]) -> tuple[int, Iterator[Layer]]:
        """How many texts are cut, and for every layer [texts, memories] and [texts, d]."""
        encoded, cut = encode_texts(self.model, texts, self.max_length)
        ids = dict(zip(texts, encoded, strict=True))
        return cut, self._layers(texts, ids)

    def _layers(self, texts: tuple[str, ...], ids: dict[str, list[int]]) -> Iterator[Layer]:
        self.uses.subtract(list(ids))
        known = [text for text in ids if text in self.kept]
        new = [text for text in ids if text not in self.kept]
        wanted = [text for text in new if self.uses[text]]
        place = {text: number for number, text in enumerate((*known, *new))}
        rows = [place[text] for text in texts]
        kept: dict[str, list[tuple[Row, Row]]] = {text: [] for text in wanted}
        read = read_activations(self.model, [ids[text] for text in new], "last", self.layers) if new else self._none()
        for number, (layer, m, states) in enumerate(read):
            for text in wanted:
                own = place[text] - len(known)
                kept[text].append((m[own].copy(), states[own].copy()))
            old = [self.kept[text][number] for text in known]
            both = [np.vstack([*(pair[part] for pair in old), found]) for part, found in enumerate((m, states))]
            yield layer, both[0][rows], both[1][rows]
        self.kept |= kept
        for text in [text for text in known if not self.uses[text]]:
            del self.kept[text]

    def _none(self) -> Iterator[Layer]:
        for layer in self.layers:
            memories, width = self.model.layers[layer].memories, self.model.width
            yield layer, np.zeros((0, memories), np.float32), np.zeros((0, width), np.float32)


def probes_of(shared: SharedTexts, division: Division) -> Iterator[dict[str, Any]]:
    cut, layers = shared.read(division.labels.texts)
    sizes = {"train": len(division.train), "test": len(division.test), "cut": cut}

    def row(read: str, layer: int | None, k: int | None, fit: Fit) -> dict[str, Any]:
        return sizes | {
            "input": read,
            "layer": layer,
            "k": k,
            "auc": round(fit.score.value, 4),
            "held": round(fit.held, 4),
        }

    with fitting():
        yield row("words", None, None, fit_words(division, division.y))
    for layer, m, states in layers:
        with fitting():
            fits = fit_sparse(Columns.of(m, division.train), division, KS, division.y)
            yield from (row("memories", layer, k, fit) for k, fit in fits.items())
            yield row("residual", layer, None, fit_dense(Columns.of(states, division.train), division, division.y))


def chosen_aucs(rows: list[dict[str, Any]], read: str, k: int) -> dict[str, float]:
    """By set; its layer is the one under which the held-out part is most likely."""
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        if (row["input"], row["k"] or 0) == (read, k) and row["held"] > best.get(row["set"], {"held": -np.inf})["held"]:
            best[row["set"]] = row
    return {name: row["auc"] for name, row in best.items()}


def head_line(done: list[dict[str, Any]], rows: list[dict[str, Any]], sets: int) -> str:
    """All in one line: sets, AUC by k beside the two baselines, the best layer, and what all sets would take."""
    found = {k: chosen_aucs(rows, "memories", k) for k in KS}
    by_k = ", ".join(f"{mean(aucs.values()):.3f} (k={k})" for k, aucs in found.items() if aucs)
    others = ", ".join(f"{read} {mean(chosen_aucs(rows, read, 0).values()):.3f}" for read in ("residual", "words"))
    largest = [row for row in rows if row["k"] == KS[-1]]
    layers = sorted({row["layer"] for row in largest})
    best = max(layers, key=lambda layer: mean(row["auc"] for row in largest if row["layer"] == layer))
    hours = sets * mean(one["processor"] for one in done) / 3600
    return (
        f"{len(done)} of {sets} sets: mean AUC of memories {by_k}; {others}; best layer {best} at k={KS[-1]}; "
        f"{sets} sets take {hours:.1f} h of processor time, {hours / 2:.1f} h on two idle cores at best"
    )


def with_interval(aucs: Iterable[float]) -> str:
    """The mean over sets with its 95% interval: sets are the draws, as if from all sets that one might make."""
    numbers = np.array(list(aucs))
    low, high = mean_interval(numbers, generator(0, "probes"))
    return f"{numbers.mean():.3f}" + ("" if low is None or high is None else f" ({low:.3f} to {high:.3f})")


def beaten(own: dict[str, float], other: dict[str, float]) -> str:
    """The share of sets in which the former has the larger AUC, with its 95% interval."""
    both = [name for name in own if name in other]
    won = sum(own[name] > other[name] for name in both)
    low, high = wilson(won, len(both))
    return f"{won} of {len(both)}, {100 * won / max(len(both), 1):.0f}% ({100 * low:.0f} to {100 * high:.0f})"


def summarize(done: list[dict[str, Any]], sets: int) -> None:
    """The head line, then two tables in Markdown: by input and k with the layer chosen, and means by layer and k."""
    rows = [{"set": one["set"], **row} for one in done for row in one["probes"]]
    if not rows:
        print(f"0 of {sets} sets")
        return
    print(head_line(done, rows, sets))
    words, residual = (chosen_aucs(rows, read, 0) for read in ("words", "residual"))
    print("\n| input | mean AUC (95%) | median | beats the bag of words in | beats the residual stream in |")
    print("| --- | --- | --- | --- | --- |")
    for read, k in sorted({(row["input"], row["k"] or 0) for row in rows}):
        aucs = chosen_aucs(rows, read, k)
        beats = [beaten(aucs, other) if other is not aucs and other != aucs else "–" for other in (words, residual)]
        shown = f"{read} k={k}" if k else read
        print(f"| {shown} | {with_interval(aucs.values())} | {median(aucs.values()):.3f} |", " | ".join(beats), "|")
    ks = (*(k for k in KS if any(row["k"] == k for row in rows)), None)
    print("\n| layer |", " | ".join(f"k={k}" if k else "residual" for k in ks), "|")
    print("| --- |", " | ".join("---" for _ in ks), "|")
    for layer in sorted({row["layer"] for row in rows if row["layer"] is not None}):
        own = [[row["auc"] for row in rows if (row["layer"], row["k"]) == (layer, k)] for k in ks]
        print(f"| {layer} |", " | ".join(with_interval(found) if found else "–" for found in own), "|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--wheel", type=Path, required=True)
    parser.add_argument("-o", "--out", type=Path, help="default: benchmarks/results/probes-MODEL.jsonl")
    parser.add_argument("--layers", default="", help="0,5,11; all layers by default")
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--dtype", default="float32", help="of the model; bfloat16 is faster on some processors")
    parser.add_argument("--part", default="1/1", help="1/2: the first half of the sets; the other in a second process")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no further set after so long")
    given = parser.parse_args()
    wheel = zipfile.ZipFile(given.wheel)
    out = given.out or Path(__file__).parent / "results" / f"probes-{Path(given.model).name}.jsonl"
    out.parent.mkdir(exist_ok=True)
    done = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] if out.exists() else []
    sets = sets_of(wheel)
    part, parts = map(int, given.part.split("/"))
    own = sets[len(sets) * (part - 1) // parts : len(sets) * part // parts]  # neighbours have texts in common
    left = [name for name in own if name not in {one["set"] for one in done}]
    began = time.monotonic()
    if not left:  # nothing to do but to sum up
        summarize(done, len(sets))
        return
    divisions = {name: divide(rows_of(wheel, name)) for name in left}
    model = memlens.load(given.model, dtype=given.dtype)
    layers = [int(layer) for layer in given.layers.split(",")] if given.layers else list(range(len(model.layers)))
    shared = SharedTexts(model, layers, given.max_length, list(divisions.values()))
    for name in track(left, description=f"{len(done)} sets were done; probing"):
        if time.monotonic() - began > given.minutes * 60:
            break
        start = time.process_time()
        found = list(probes_of(shared, divisions[name]))
        done.append({"set": name, "processor": round(time.process_time() - start, 1), "probes": found})
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(done[-1], separators=(",", ":")) + "\n")
    summarize(done, len(sets))


if __name__ == "__main__":
    main()
