"""An index of any size for the workbench's benchmark: real tables, real words, random triggers and numbers.

Sentences are made of halves of the bundled corpus's sentences; tokens are whole words. Written through the same
writers and schemas as a scan's own tables, layer by layer, so that size costs time but little memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa

from memlens.corpus.sentences import read_units
from memlens.files import checksum, write_table
from memlens.index.format import (
    CORPUS,
    CORPUS_SCHEMA,
    MEMORIES,
    MEMORIES_SCHEMA,
    ORDINARY,
    ORDINARY_SCHEMA,
    SCHEMA_VERSION,
    TRIGGERS,
    TRIGGERS_SCHEMA,
    VOCABULARY,
    VOCABULARY_SCHEMA,
    Manifest,
)
from memlens.index.reader import Index
from memlens.pattern.table import NAMES_SCHEMA, PATTERNS_SCHEMA
from memlens.settings import CorpusSettings
from memlens.vocab.kernels import SCORE_BINS
from memlens.vocab.table import KEYS_SCHEMA, VALUES_SCHEMA

PIECE = re.compile(r" ?\w+| ?[^\w\s]|\s")
EDGES = [*(-(2.0**power) for power in range(5, -11, -1)), *(2.0**power for power in range(-10, 6))]
GROUP, LISTED, PATTERNS = 1024, 50, 2


class Maker:
    """Everything random comes from one seed."""

    def __init__(self, layers: int, memories: int, top: int, sentences: int, seed: int = 0) -> None:
        self.layers, self.memories, self.top = layers, memories, top
        self.random = np.random.default_rng(seed)
        known = [PIECE.findall(unit.text) for unit in read_units(CorpusSettings(("bundled:prose",)))]
        words = sorted({piece for own in known for piece in own})
        number = {word: token for token, word in enumerate(words)}
        self.vocabulary = words
        first, second = self.random.integers(0, len(known), (2, sentences))
        self.pieces = [
            known[a][: len(known[a]) // 2 + 1] + known[b][len(known[b]) // 2 :]
            for a, b in zip(first, second, strict=True)
        ]
        self.tokens = [[number[piece] for piece in own] for own in self.pieces]
        self.lengths = np.array([len(own) for own in self.tokens])

    def corpus(self) -> Iterator[pa.Table]:
        for start in range(0, len(self.pieces), 4096):
            part = range(start, min(start + 4096, len(self.pieces)))
            yield pa.table(
                {
                    "sentence": list(part),
                    "text": ["".join(self.pieces[i]) for i in part],
                    "tokens": [self.tokens[i] for i in part],
                    "ends": [np.cumsum([len(piece) for piece in self.pieces[i]]) for i in part],
                    "source": ["bundled"] * len(part),
                    "cut": [0] * len(part),
                },
                CORPUS_SCHEMA,
            )

    def chunks(self) -> Iterator[tuple[int, range]]:
        for layer in range(self.layers):
            for start in range(0, self.memories, GROUP):
                yield layer, range(start, min(start + GROUP, self.memories))

    def triggers(self) -> Iterator[pa.Table]:
        for layer, chunk in self.chunks():
            rows = len(chunk) * self.top
            # the same sentences again and again, as real memories have them
            sentence = (self.random.random(rows) ** 2 * len(self.pieces)).astype(np.int64)
            position = (self.random.random(rows) * self.lengths[sentence]).astype(np.int64)
            following = [
                self.tokens[s][p + 1] if p + 1 < len(self.tokens[s]) else None
                for s, p in zip(sentence.tolist(), position.tolist(), strict=True)
            ]
            strength = np.sort(self.random.gamma(4.0, 1.0, (len(chunk), self.top)))[:, ::-1].ravel()
            yield pa.table(
                {
                    "layer": np.full(rows, layer),
                    "memory": np.repeat(np.array(chunk), self.top),
                    "end": ["top"] * rows,
                    "rank": np.tile(np.arange(self.top), len(chunk)),
                    "coefficient": strength,
                    "sentence": sentence,
                    "position": position,
                    "next_token": pa.array(following, pa.int32()),
                },
                TRIGGERS_SCHEMA,
            )

    def statistics(self) -> Iterator[pa.Table]:
        for layer, chunk in self.chunks():
            count, draw = len(chunk), self.random
            yield pa.table(
                {
                    **_place(layer, chunk),
                    "max": draw.gamma(6.0, 1.0, count),
                    "min": -draw.random(count),
                    "mean": draw.normal(0.1, 0.05, count),
                    "frequency": draw.beta(1.0, 9.0, count),
                    "dead": draw.random(count) < 0.002,
                    "histogram": list(draw.integers(0, 1000, (count, len(EDGES) + 1))),
                },
                MEMORIES_SCHEMA,
            )

    def values(self) -> Iterator[pa.Table]:
        for layer, chunk in self.chunks():
            tokens, p = self._tokens(len(chunk)), self._shares(len(chunk))
            yield pa.table(
                {
                    **_place(layer, chunk),
                    "max_p": p[:, 0],
                    "entropy": self.random.random(len(chunk)) * 8,
                    "norm": self.random.gamma(4.0, 1.0, len(chunk)),
                    "argmax": tokens[:, 0],
                    "target": np.where(self.random.random(len(chunk)) < 0.04, tokens[:, 0], tokens[:, 7]),
                    "target_rank": self.random.integers(1, len(self.vocabulary), len(chunk)),
                    "shuffled_rank": self.random.integers(1, len(self.vocabulary), len(chunk)),
                    "tokens": list(tokens),
                    "p": list(p),
                    "bottom_tokens": list(self._tokens(len(chunk))),
                    "bottom_p": list(self._shares(len(chunk))[:, ::-1] / 1e4),
                    "trigger_p": list(self._shares(len(chunk))),
                    "histogram": list(self.random.integers(0, 1000, (len(chunk), SCORE_BINS))),
                },
                VALUES_SCHEMA,
            )

    def keys(self) -> Iterator[pa.Table]:
        for layer, chunk in self.chunks():
            columns = {"tokens": list(self._tokens(len(chunk))), "scores": list(self._shares(len(chunk)))}
            yield pa.table({**_place(layer, chunk), **columns}, KEYS_SCHEMA)

    def patterns(self) -> Iterator[pa.Table]:
        for layer, chunk in self.chunks():
            words = [self.vocabulary[i].strip() for i in self.random.integers(0, 2000, PATTERNS * len(chunk))]
            kinds = [("shallow", "ending", "ends with"), ("semantic", "topic", "about")]
            rows = [
                {"layer": layer, "memory": memory, "pattern": f"{kinds[n][1]}:{words[PATTERNS * i + n]}",
                 "kind": kinds[n][0], "description": f'{kinds[n][2]} "{words[PATTERNS * i + n]}"',
                 "prefixes": list(range(n, 20 + n)), "confidence": 0.8, "share": 0.01, "q": 1e-6}
                for i, memory in enumerate(chunk) for n in range(PATTERNS)
            ]  # fmt: skip
            yield pa.Table.from_pylist(rows, PATTERNS_SCHEMA)

    def names(self) -> Iterator[pa.Table]:
        for layer, chunk in self.chunks():
            words = [self.vocabulary[i].strip() for i in self.random.integers(0, 2000, len(chunk))]
            rows = [
                {"layer": layer, "memory": memory, "name": f'ends with "{word}" → promotes "{word}"', "confidence": 0.8,
                 "triggers": self.top, "patterns": PATTERNS, "covered": 20, "follows": [1], "follows_times": [3],
                 "promotes": [1, 2, 3], "agrees": False}
                for memory, word in zip(chunk, words, strict=True)
            ]  # fmt: skip
            yield pa.Table.from_pylist(rows, NAMES_SCHEMA)

    def _tokens(self, rows: int) -> np.ndarray:
        return (self.random.random((rows, LISTED)) ** 2 * len(self.vocabulary)).astype(np.int32)

    def _shares(self, rows: int) -> np.ndarray:
        return np.sort(self.random.dirichlet(np.full(LISTED, 0.3), rows))[:, ::-1]


def make_index(folder: Path, layers: int, memories: int, top: int, sentences: int) -> Index:
    """A complete index; `memories` a layer."""
    made = Maker(layers, memories, top, sentences)
    folder.mkdir(parents=True, exist_ok=True)
    words = pa.table({"token": range(len(made.vocabulary)), "text": made.vocabulary}, VOCABULARY_SCHEMA)
    tables = {
        CORPUS: (CORPUS_SCHEMA, made.corpus()),
        VOCABULARY: (VOCABULARY_SCHEMA, iter([words])),
        TRIGGERS: (TRIGGERS_SCHEMA, made.triggers()),
        MEMORIES: (MEMORIES_SCHEMA, made.statistics()),
        ORDINARY: (ORDINARY_SCHEMA, iter([ORDINARY_SCHEMA.empty_table()])),
        "values.parquet": (VALUES_SCHEMA, made.values()),
        "keys.parquet": (KEYS_SCHEMA, made.keys()),
        "patterns.parquet": (PATTERNS_SCHEMA, made.patterns()),
        "names.parquet": (NAMES_SCHEMA, made.names()),
    }
    for name, (schema, parts) in tables.items():
        write_table(folder / name, schema, parts)
    tokens = int(made.lengths.sum())
    counts = {
        "sentences": sentences,
        "tokens": tokens,
        "prefixes": tokens,
        "repeated_prefixes": 0,
        "cut_sentences": 0,
        "cut_tokens": 0,
    }
    model = {
        "name": "benchmark", "source": None, "family": "gpt2", "activation": "gelu_new", "gated": False,
        "dtype": "float32", "bos": None,
        "memories": {str(layer): memories for layer in range(layers)}, "vocabulary": len(made.vocabulary), "width": 64,
        "fingerprint": "none",
    }  # fmt: skip
    manifest = {
        "schema": SCHEMA_VERSION, "layers": list(range(layers)), "model": model, "counts": counts,
        "plan": {"settings": {"top": top}}, "histogram_edges": EDGES, "values": {"reading": "folded", "top": LISTED},
        "patterns": {"top": 25, "rate": 0.01},
        "files": {
            name: {"bytes": (folder / name).stat().st_size, "sha256": checksum(folder / name)} for name in tables
        },
    }  # fmt: skip
    Manifest(manifest).write(folder)
    return Index(folder)


def make_live_index(folder: Path, beside: Path, layers: int = 30, memories: int = 1536, sentences: int = 200) -> None:
    """A random Llama-like model, saved beside the index, and a real index of it with all its values and patterns."""
    import memlens
    from memlens.testing import save_tiny
    from memlens.vocab.table import compute_values

    sizes = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    sizes |= {"num_hidden_layers": layers, "intermediate_size": memories, "max_position_embeddings": 512}
    model = memlens.load(str(save_tiny(beside / "model", "llama", **sizes)))
    text = beside / "text.txt"
    units = islice(read_units(CorpusSettings(("bundled",))), sentences)
    text.write_text("\n".join(unit.text for unit in units), encoding="utf-8")
    compute_values(memlens.scan(model, text, out=folder, top=50, unit="line", max_length=128), model)
    memlens.patterns(folder)


def _place(layer: int, chunk: range) -> dict[str, np.ndarray]:
    return {"layer": np.full(len(chunk), layer), "memory": np.array(chunk)}
