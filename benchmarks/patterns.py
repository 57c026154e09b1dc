"""How long patterns for every memory of a large model take, and how much memory.

    python benchmarks/patterns.py [--layers 12] [--memories 3840] [--sentences 80000]

12 x 3,840 = 46,080 memories with 25 triggers each over text made of the bundled corpus: each sentence is two halves of
sentences of one document. A third of the memories have triggers that end with one word, a third triggers from one
document, a third random ones, so that every part of the work is done. The index is made by a process of its own; then
`compute_patterns` runs as the verb does, and its wall time and the process's peak memory are printed. Compiled code is
warmed up on a small index first: it is made once a machine and kept on disk.
"""

from __future__ import annotations

import argparse
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from memlens.corpus.sentences import read_units
from memlens.files import checksum, write_table
from memlens.index.format import (
    CORPUS,
    CORPUS_SCHEMA,
    SCHEMA_VERSION,
    TRIGGERS,
    TRIGGERS_SCHEMA,
    VOCABULARY,
    VOCABULARY_SCHEMA,
    Manifest,
)
from memlens.index.reader import Index
from memlens.pattern.table import compute_patterns
from memlens.pool import usable_cores
from memlens.settings import CorpusSettings

TOP = 25
PIECE = re.compile(r" ?\w+| ?[^\w\s]|\s")
OFTEN = 200  # places a word must have to be a memory's ending


def make_sentences(count: int, random: np.random.Generator) -> tuple[list[list[str]], np.ndarray]:
    """Pieces of every sentence, and the document of each."""
    documents: dict[str, list[list[str]]] = {}
    for unit in read_units(CorpusSettings(("bundled:prose",))):
        documents.setdefault(unit.source.rpartition(":")[0], []).append(PIECE.findall(unit.text))
    texts = list(documents.values())
    of = random.integers(0, len(texts), count)
    made = []
    for document in of.tolist():
        one, other = (texts[document][i] for i in random.integers(0, len(texts[document]), 2))
        made.append(one[: len(one) // 2 + 1] + other[len(other) // 2 :])
    return made, of


def draw_triggers(
    memories: int, tokens: np.ndarray, starts: np.ndarray, of: np.ndarray, random: np.random.Generator
) -> np.ndarray:
    """[memories, TOP] places in the text, one token after another."""
    order = np.argsort(tokens, kind="stable")
    _, begins, counts = np.unique(tokens[order], return_index=True, return_counts=True)
    frequent = np.flatnonzero(counts >= OFTEN)
    lengths = np.diff(np.append(starts, len(tokens)))
    in_document = [np.flatnonzero(of == document) for document in range(int(of.max()) + 1)]
    places = np.empty((memories, TOP), np.int64)
    for memory in range(memories):
        if memory % 3 == 0:
            word = random.choice(frequent)
            places[memory] = order[begins[word] + random.choice(counts[word], TOP, replace=False)]
            continue
        sentences = in_document[random.integers(len(in_document))] if memory % 3 == 1 else np.arange(len(starts))
        chosen = random.choice(sentences, TOP, replace=False)
        places[memory] = (
            starts[chosen] + lengths[chosen] // 2 + random.integers(0, lengths[chosen] - lengths[chosen] // 2)
        )
    return places


def build(folder: Path, layers: int, memories: int, sentences: int) -> None:
    random = np.random.default_rng(0)
    pieces, of = make_sentences(sentences, random)
    vocabulary = {piece: number for number, piece in enumerate(sorted({piece for own in pieces for piece in own}))}
    numbers = [[vocabulary[piece] for piece in own] for own in pieces]
    lengths = np.array([len(own) for own in numbers])
    starts, tokens = np.cumsum(lengths) - lengths, np.concatenate(numbers)
    corpus = {
        "sentence": range(sentences),
        "text": ["".join(own) for own in pieces],
        "tokens": numbers,
        "ends": [np.cumsum([len(piece) for piece in own]) for own in pieces],
        "source": [f"document {document}:{number}" for number, document in enumerate(of.tolist())],
        "cut": np.zeros(sentences, np.int32),
    }
    places = draw_triggers(layers * memories, tokens, starts, of, random)
    sentence = np.searchsorted(starts, places.ravel(), side="right") - 1
    position = places.ravel() - starts[sentence]
    at_end = position + 1 == lengths[sentence]
    following = np.append(tokens, 0)[places.ravel() + 1]
    triggers = {
        "layer": np.repeat(np.arange(layers), memories * TOP),
        "memory": np.tile(np.repeat(np.arange(memories), TOP), layers),
        "end": ["top"] * places.size,
        "rank": np.tile(np.arange(TOP), layers * memories),
        "coefficient": np.tile(np.linspace(9, 1, TOP), layers * memories),
        "sentence": sentence,
        "position": position,
        "next_token": pa.array(following, pa.int32(), mask=at_end),
    }
    tables = {
        CORPUS: pa.table(corpus, CORPUS_SCHEMA),
        VOCABULARY: pa.table({"token": range(len(vocabulary)), "text": list(vocabulary)}, VOCABULARY_SCHEMA),
        TRIGGERS: pa.table(triggers, TRIGGERS_SCHEMA),
    }
    folder.mkdir(parents=True)
    for name, table in tables.items():
        write_table(folder / name, table.schema, iter([table]))
    files = {n: {"bytes": (folder / n).stat().st_size, "sha256": checksum(folder / n)} for n in tables}
    model = {"name": "benchmark", "source": None, "vocabulary": len(vocabulary)}
    manifest = {
        "schema": SCHEMA_VERSION,
        "layers": list(range(layers)),
        "model": model | {"memories": {str(layer): memories for layer in range(layers)}},
        "counts": {"sentences": sentences, "tokens": len(tokens), "prefixes": len(tokens)},
        "plan": {"settings": {}},
        "histogram_edges": [],
        "files": files,
    }
    Manifest(manifest).write(folder)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--layers", type=int, default=12)
    arguments.add_argument("--memories", type=int, default=3840, help="a layer")
    arguments.add_argument("--sentences", type=int, default=80_000)
    arguments.add_argument("--build", type=Path, help="only make the index, in this folder")
    chosen = arguments.parse_args()
    if chosen.build:
        build(chosen.build, chosen.layers, chosen.memories, chosen.sentences)
        return
    with tempfile.TemporaryDirectory() as folder:
        small, large = Path(folder) / "small", Path(folder) / "large"
        build(small, 1, 30, 2000)
        compute_patterns(Index(small))
        sizes = ["--layers", chosen.layers, "--memories", chosen.memories, "--sentences", chosen.sentences]
        subprocess.run([sys.executable, __file__, "--build", large, *map(str, sizes)], check=True)
        index = Index(large)
        began, processor = time.perf_counter(), time.process_time()
        compute_patterns(index)
        seconds, processor = time.perf_counter() - began, time.process_time() - processor
        found = index.sql("SELECT count(*) AS n, count(DISTINCT (layer, memory)) AS memories FROM {patterns}")[0]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        tokens = index.manifest.counts.tokens
        print(
            f"{chosen.layers * chosen.memories:,} memories x {TOP} triggers over {tokens:,} tokens: {seconds:.0f} s of "
            f"wall time on {usable_cores()} cores ({processor:.0f} s of processor time), peak memory {peak:,} MB; "
            f"{found['n']:,} patterns of {found['memories']:,} memories"
        )


if __name__ == "__main__":
    main()
