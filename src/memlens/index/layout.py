"""Where everything of an index lies: a plain folder of Parquet files and one manifest.

    manifest.json          written last: its presence means the index is complete
    corpus.parquet         the sentences: text, tokens
    vocabulary.parquet     the text of every token
    triggers.parquet       the top (and bottom) triggers of every memory
    memories.parquet       one row a memory: statistics
    ordinary.parquet       random prefixes a memory fires on
    values.parquet         what values promote          (`memlens values`)
    keys.parquet           tokens that keys match alone (`memlens values`)
    patterns.parquet       what triggers have in common (`memlens patterns`)
    names.parquet          one line a memory            (`memlens patterns`)
    experiments/           one table an experiment      (`memlens experiment`)
    annotations.sqlite     people's labels; never rewritten
    partial/               the state of a scan under way; gone when it is complete

This module knows names and schemas only; it reads and writes nothing.

manifest.json: what an index is of, and the size and checksum of every file. Written last, when all else is there.

Older indexes are read as if they were new: here alone a manifest of an earlier schema is brought up to date.

A step takes the manifest of one version to the next; the file on disk stays as it is until a stage writes it anyway.
There is one version so far, so there are no steps yet. An index of a later version is refused, never guessed at.

What every manifest must hold for an index to be read; one that lacks it is refused by name, never guessed at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from memlens import __version__
from memlens.errors import IndexFolderError
from memlens.files import facts_of
from memlens.models.memory_model import MemoryModel
from memlens.scanner.sample import bin_edges
from memlens.scanner.scanner import bos_to_feed
from memlens.scanner.settings import ScanSettings

SCHEMA_VERSION = 1

MANIFEST = "manifest.json"
PARTIAL = "partial"
ANNOTATIONS = "annotations.sqlite"
LOCK = ".lock"
WORKERS = ".workers"  # held by worker processes, so that no scan begins beside those of a killed one
PARTS = "parts"  # in partial/
SHARD = "shard.json"  # in partial/: this is a finished part of a scan

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


def model_facts(model: MemoryModel, plan: dict[str, Any]) -> dict[str, Any]:
    """What a manifest says about the model."""
    first = model.layers[0]
    return {
        "name": model.name,
        "source": model.source,
        "family": model.family,
        "fingerprint": plan["model"],
        "dtype": str(model.dtype).removeprefix("torch."),
        "width": model.width,
        "vocabulary": model.vocabulary,
        "activation": first.activation,
        "gated": first.gated,
        "memories": {str(block.layer): block.memories for block in model.layers},
        "bos": bos_to_feed(model, ScanSettings(bos=plan["settings"]["bos"])),
    }


def make_manifest(
    model: dict[str, Any], plan: dict[str, Any], counts: dict[str, Any], prefixes: int, tokens: int, folder: Path
) -> dict[str, Any]:
    """`model` as model_facts gives it, `counts` of the corpus, what the scan has fed; the tables are in `folder`."""
    return {
        "memlens": __version__,
        "schema": SCHEMA_VERSION,
        "plan": plan,
        "model": model,
        "layers": list(plan["settings"]["layers"]),
        "counts": {**counts, "prefixes": prefixes, "tokens_fed": tokens},
        "histogram_edges": bin_edges(),
        "files": {name: facts_of(folder / name) for name in SCAN_TABLES},
    }


Manifest = dict[str, Any]
# version -> what makes its manifest one of the next version
STEPS: Mapping[int, Callable[[Manifest], Manifest]] = {}


def migrated(
    manifest: Manifest,
    folder: Path,
    steps: Mapping[int, Callable[[Manifest], Manifest]] = STEPS,
    newest: int = SCHEMA_VERSION,
) -> Manifest:
    """The manifest as this memlens writes it; refused where that cannot be."""
    found = manifest["schema"]
    for version in range(found, newest):
        if version not in steps:
            break
        manifest = {**steps[version](manifest), "schema": version + 1}
    if manifest["schema"] != newest:
        newer = found > newest
        advice = "install a newer memlens" if newer else "scan again with --fresh"
        raise IndexFolderError(
            f"{folder} has schema version {found}, this memlens reads {'up to ' if newer else ''}{newest}; {advice}"
        )
    return manifest


# What every manifest has, and of what kind it is.
_PARTS = {
    "schema": int,
    "plan": dict,
    "model": dict,
    "layers": list,
    "counts": dict,
    "histogram_edges": list,
    "files": dict,
}
_COUNTS = ("sentences", "tokens", "prefixes")


def refuse_misshapen(manifest: dict[str, Any], path: Path) -> None:
    """Refuse a manifest that is not of the shape that readers rely on."""
    missing = [part for part, kind in _PARTS.items() if not _is(manifest.get(part), kind)]
    wrong = missing[0] if missing else _wrong_inside(manifest)
    if wrong:
        raise IndexFolderError(f"{path} is damaged: it has no usable '{wrong}'; scan again with --fresh")


def _wrong_inside(manifest: dict[str, Any]) -> str:
    layers, model = manifest["layers"], manifest["model"]
    if not layers or not all(_is(layer, int) for layer in layers):
        return "layers"
    memories = model.get("memories")
    if not _is(memories, dict) or not all(_is(memories.get(str(layer)), int) for layer in layers):
        return "model"
    if not isinstance(model.get("name"), str):
        return "model"
    if not _is(manifest["plan"].get("settings"), dict):
        return "plan"
    if not all(_is(manifest["counts"].get(name), int) for name in _COUNTS):
        return "counts"
    for entry in manifest["files"].values():
        if not (_is(entry, dict) and _is(entry.get("bytes"), int) and isinstance(entry.get("sha256"), str)):
            return "files"
    return ""


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))
