"""Share of value lists that are clearer than a random direction, by layer.

    python benchmarks/coherence.py MODEL CORPUS [--memories 256] [-o FILE]

Draws some memories of every layer (seeded), lists their top tokens without undertrained tokens, and compares each list
with those of 1,000 random directions (src/memlens/vocab/coherence.py). Random directions are clear in 1% of cases.
MODEL and CORPUS may be `bundled`. The corpus only tells which tokens are rare. Writes one CSV row per layer.
"""

import argparse
import csv
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import memlens
from memlens.corpus.readers import list_files, read_jsonl, read_paragraphs
from memlens.index.memory import CLEAR
from memlens.models.memory_model import MemoryModel
from memlens.stats import generator, wilson
from memlens.vocab.coherence import LISTED, coherence, list_similarities, random_similarities
from memlens.vocab.kernels import find_ends
from memlens.vocab.tokens import undertrained

COLUMNS = ("model", "layer", "memories", "clear", "share", "low", "high", "noise", "max_p_times_uniform")


def count_tokens(model: MemoryModel, corpus: str, tokens: int) -> NDArray[np.int64]:
    """Return the occurrences of each token in the first tokens of a corpus."""
    counts = np.zeros(model.vocabulary, np.int64)
    for file in list_files(corpus):
        for passage in read_jsonl(file, "text") if file.kind == ".jsonl" else read_paragraphs(file):
            if counts.sum() >= tokens:
                return counts
            (text,) = model.tokenizer.encode([passage.text])
            counts += np.bincount(text.ids, minlength=model.vocabulary)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hub id, folder, file or `bundled`.")
    parser.add_argument("corpus", help="Text file or `bundled`.")
    parser.add_argument("--memories", type=int, default=256, help="Memories per layer. Default: 256.")
    parser.add_argument("--tokens", type=int, default=200_000, help="Tokens of the corpus to count. Default: 200000.")
    parser.add_argument("-o", "--out", type=Path, help="CSV file. Default: benchmarks/results/coherence-MODEL.csv.")
    options = parser.parse_args()
    model = memlens.load(options.model)
    embedding = model.lens.embedding.cpu().numpy()
    listed = np.flatnonzero(~undertrained(embedding, count_tokens(model, options.corpus, options.tokens)))
    layers = range(len(model.layers))
    null = random_similarities(model, layers, model.lens.readings[0], listed)
    rows = []
    for layer in layers:
        values = model.layers[layer].values
        count = min(options.memories, len(values))
        memories = np.sort(generator(0, "coherence benchmark", layer).choice(len(values), count, replace=False))
        scores = model.lens.value_scores(values[memories.tolist()], layer).detach().cpu().double()
        top = listed[find_ends(scores.float().contiguous().numpy().take(listed, 1), LISTED).top]
        clear = int((coherence(list_similarities(embedding, top), null[layer]) >= CLEAR).sum())
        multiple = float((scores.softmax(-1).amax(1) * model.vocabulary).median())
        share, (low, high) = clear / count, wilson(clear, count)
        numbers = [round(number, 4) for number in (share, low, high, 1 - share, multiple)]
        rows.append([Path(options.model).stem, layer, count, clear, *numbers])
        print(*rows[-1], flush=True)
    out = options.out or Path(__file__).parent / "results" / f"coherence-{Path(options.model).stem}.csv"
    with out.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])


if __name__ == "__main__":
    main()
