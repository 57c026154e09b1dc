"""The files of an index and their schemas: a plain folder of Parquet files and one manifest.

manifest.json          written last: its presence means the index is complete
corpus.parquet         the sentences: text, tokens
vocabulary.parquet     the text of every token
triggers.parquet       the top (and bottom) triggers of every memory
memories.parquet       one row per memory: statistics
ordinary.parquet       random prefixes a memory fires on
values.parquet         what values promote          (`memlens values`)
keys.parquet           tokens that keys match alone (`memlens values`)
patterns.parquet       what triggers have in common (`memlens patterns`)
names.parquet          one line per memory          (`memlens patterns`)
experiments/           one table per experiment     (`memlens experiment`)
annotations.sqlite     people's labels; never rewritten
partial/               the state of a scan in progress; gone when it is complete
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

SCHEMA_VERSION = 1

MANIFEST = "manifest.json"
PARTIAL = "partial"
ANNOTATIONS = "annotations.sqlite"
LOCK = ".lock"
PARTS = "parts"  # in partial/
SHARD = "shard.json"  # in partial/: this is a finished shard

CORPUS = "corpus.parquet"
VOCABULARY = "vocabulary.parquet"
TRIGGERS = "triggers.parquet"
MEMORIES = "memories.parquet"
ORDINARY = "ordinary.parquet"
VALUES = "values.parquet"
KEYS = "keys.parquet"
PATTERNS = "patterns.parquet"
NAMES = "names.parquet"
EXPERIMENTS = "experiments"
REPORT = "report.html"
DERIVED_TABLES = (VALUES, KEYS, PATTERNS, NAMES)
SCAN_TABLES = (CORPUS, VOCABULARY, TRIGGERS, MEMORIES, ORDINARY)

CORPUS_SCHEMA = pa.schema(
    [
        ("sentence", pa.int64()),
        ("text", pa.string()),
        ("tokens", pa.list_(pa.int32())),
        ("ends", pa.list_(pa.int32())),
        ("source", pa.string()),
        ("cut", pa.int32()),
    ]
)
VOCABULARY_SCHEMA = pa.schema([("token", pa.int32()), ("text", pa.string())])
_PREFIX = [
    ("coefficient", pa.float32()),
    ("sentence", pa.int64()),
    ("position", pa.int32()),
    ("next_token", pa.int32()),
]
TRIGGERS_SCHEMA = pa.schema(
    [("layer", pa.int32()), ("memory", pa.int32()), ("end", pa.string()), ("rank", pa.int32()), *_PREFIX]
)
ORDINARY_SCHEMA = pa.schema([("layer", pa.int32()), ("memory", pa.int32()), ("rank", pa.int32()), *_PREFIX])
MEMORIES_SCHEMA = pa.schema(
    [
        ("layer", pa.int32()),
        ("memory", pa.int32()),
        ("max", pa.float32()),
        ("min", pa.float32()),
        ("mean", pa.float64()),
        ("frequency", pa.float64()),
        ("dead", pa.bool_()),
        ("histogram", pa.list_(pa.int64())),
    ]
)


_ENTRIES = {MANIFEST, PARTIAL, ANNOTATIONS, LOCK, EXPERIMENTS, REPORT, *SCAN_TABLES, *DERIVED_TABLES}


def foreign_entries(folder: Path) -> list[str]:
    """Names in the folder that are not memlens'; everything is foreign in a folder that never was an index."""
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    if MANIFEST not in names and PARTIAL not in names:
        return names
    beside = {f"{name}.part" for name in _ENTRIES}
    return [name for name in names if name not in _ENTRIES | beside and not name.startswith(ANNOTATIONS)]


def is_complete(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()
