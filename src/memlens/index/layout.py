"""The files of an index, their schemas, and the typed manifest: a plain folder of Parquet files and one JSON document.

    manifest.json          written last: its presence means the index is complete
    corpus.parquet         the sentences: text, tokens
    vocabulary.parquet     the text of every token
    triggers.parquet       the top (and bottom) triggers of every memory
    memories.parquet       one row per memory: statistics
    ordinary.parquet       random prefixes a memory fires on
    counts.parquet         one row per memory: how often it fires by position, and by quadrant where it has a gate
    quadrants.parquet      the top prefixes of each sign quadrant (gated blocks only)
    experts.parquet        one row per expert behind a router: how often it is chosen (mixtures of experts only)
    routing.parquet        prefixes that are sent to an expert  (the same)
    values.parquet         what values promote          (`memlens values`)
    keys.parquet           tokens that keys match alone (`memlens values`)
    routers.parquet        tokens that a router's rows match alone (the same, of a mixture)
    tokens.parquet         tokens: trained? classes     (`memlens values`)
    patterns.parquet       what triggers have in common (`memlens patterns`)
    names.parquet          one line per memory          (`memlens patterns`)
    lower_patterns.parquet   the same of the most negative triggers (`memlens patterns`, gated blocks only)
    roles.parquet          what each memory is for      (`memlens roles`)
    experiments/           one table per experiment     (`memlens experiment`)
    annotations.sqlite     people's labels; never rewritten
    partial/               the state of a scan in progress; gone when it is complete

The manifest says what an index is of, how its tables were made, and the size and checksum of every file. One that lacks
something, was changed after it was written or has another schema version is refused by name, never guessed at. What is
read is written back as it was, unknown entries included.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from memlens import __version__
from memlens.errors import IndexFolderError, MemlensError, SettingError
from memlens.files import FileFacts, has_seal, is_sealed, read_json, write_sealed
from memlens.memory import KINDS, GroupShape, MemoryNames
from memlens.settings import HUB, ScanSettings

SCHEMA_VERSION = 1

MANIFEST = "manifest.json"
PARTIAL = "partial"
ANNOTATIONS = "annotations.sqlite"
LOCK = ".lock"
PARTS = "parts"  # in partial/
SHARD = "shard.json"  # in partial/: this is a finished shard
PULL = "pull.json"  # in partial/: what is being copied from the Hub

QUADRANT_SIGNS = ("++", "+-", "-+", "--")  # of a gated memory: the sign of the gate, then that of the input

CORPUS = "corpus.parquet"
VOCABULARY = "vocabulary.parquet"
TRIGGERS = "triggers.parquet"
MEMORIES = "memories.parquet"
ORDINARY = "ordinary.parquet"
VALUES = "values.parquet"
KEYS = "keys.parquet"
TOKENS = "tokens.parquet"
PATTERNS = "patterns.parquet"
NAMES = "names.parquet"
LOWER_PATTERNS = "lower_patterns.parquet"
ROLES = "roles.parquet"
EFFECTS = "effects.parquet"
EXPERIMENTS = "experiments"
REPORT = "report.html"
ROUTERS = "routers.parquet"
COUNTS = "counts.parquet"
QUADRANTS = "quadrants.parquet"
EXPERTS = "experts.parquet"
ROUTING = "routing.parquet"
DERIVED_TABLES = (VALUES, KEYS, ROUTERS, TOKENS, PATTERNS, NAMES, LOWER_PATTERNS, ROLES, EFFECTS)
SCAN_TABLES = (CORPUS, VOCABULARY, TRIGGERS, MEMORIES, ORDINARY)
# Of a scan, too, where the model has gates or experts; older indexes have no counts and no quadrants.
OPTIONAL_TABLES = (COUNTS, QUADRANTS, EXPERTS, ROUTING)

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
PREFIX_COLUMNS = [
    ("coefficient", pa.float32()),
    ("sentence", pa.int64()),
    ("position", pa.int32()),
    ("next_token", pa.int32()),
]
TRIGGERS_SCHEMA = pa.schema(
    [("layer", pa.int32()), ("memory", pa.int32()), ("end", pa.string()), ("rank", pa.int32()), *PREFIX_COLUMNS]
)
ORDINARY_SCHEMA = pa.schema([("layer", pa.int32()), ("memory", pa.int32()), ("rank", pa.int32()), *PREFIX_COLUMNS])
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


_ENTRIES = {MANIFEST, PARTIAL, ANNOTATIONS, LOCK, EXPERIMENTS, REPORT, *SCAN_TABLES, *OPTIONAL_TABLES, *DERIVED_TABLES}


def foreign_entries(folder: Path) -> list[str]:
    """Names in the folder that are not memlens'; everything is foreign in a folder that never was an index."""
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    if MANIFEST not in names and PARTIAL not in names:
        return names
    beside = {f"{name}.part" for name in _ENTRIES}
    return [name for name in names if name not in _ENTRIES | beside and not name.startswith(ANNOTATIONS)]


def located(index: str | os.PathLike[str]) -> Path:
    """The folder of an index: the one that is named, or for hf:REPO a copy of what is on the Hub now."""
    name = os.fspath(index)
    if not name.startswith(HUB):
        return Path(name)
    from memlens.index.hub import copy_of

    return copy_of(name)


def is_complete(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


Record = TypeVar("Record")


def made_with() -> dict[str, str]:
    """The versions and the kind of processor that a table is made with: its last bits depend on them."""
    capability = os.environ.get("ATEN_CPU_CAPABILITY") or _vector_unit()
    return {
        "memlens": __version__,
        "torch": version("torch"),
        "processor": f"{platform.machine()} {capability}".strip(),
    }


def _vector_unit() -> str:
    """The widest vector unit that torch would use here, as Linux tells it; empty elsewhere."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split())
    except OSError:
        return ""
    return "avx512" if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags else "avx2" if "avx2" in flags else ""


@dataclass(frozen=True)
class ScannedModel:
    """The model that was scanned."""

    name: str
    memories: Mapping[int, int]  # of every layer of the model, scanned or not
    source: str | None = None
    family: str | None = None
    fingerprint: str | None = None
    dtype: str | None = None
    width: int | None = None
    vocabulary: int = 0
    activation: str | None = None
    gated: bool = False
    bos: int | None = None  # the token that was fed in front of every sentence
    groups: Mapping[int, tuple[GroupShape, ...]] = field(default_factory=dict)  # of layers that are not one dense block

    @cached_property
    def names(self) -> MemoryNames:
        dense = {layer: (GroupShape("dense", 1, count),) for layer, count in self.memories.items()}
        return MemoryNames({**dense, **self.groups})


@dataclass(frozen=True)
class CorpusCounts:
    """The amount of text that was scanned."""

    sentences: int
    tokens: int
    prefixes: int
    repeated_prefixes: int = 0
    cut_sentences: int = 0
    cut_tokens: int = 0
    tokens_fed: int = 0


@dataclass(frozen=True)
class ValuesNote:
    """The manifest's note of how values.parquet and keys.parquet were made."""

    top: int = 0
    reading: str = ""
    vocabulary: str = "all"  # or "trained"
    tokens: int = 0  # in it, where it is not all
    threads: int = 0
    made_from: Mapping[str, str] = field(default_factory=dict)  # table -> its checksum then


@dataclass(frozen=True)
class PatternsNote:
    """The manifest's note of how patterns.parquet and names.parquet were made; `content` is all of it."""

    top: int
    rate: float
    families: Mapping[str, int] = field(default_factory=dict)  # of hypotheses -> how many were tested
    settings: Mapping[str, Any] = field(default_factory=dict)
    made_from: Mapping[str, str] = field(default_factory=dict)  # table -> its checksum then
    content: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ExperimentNote:
    """The note of how tables of one experiment, or of the pass over prefixes, were made; `content` is all of it."""

    seed: int | None = None
    sample: int | None = None
    origin: str | None = None
    validation: Any = None
    validation_corpus: Mapping[str, Any] | None = None  # its sources, unit and column, as they were given
    stop_words: str | None = None
    made_from: Mapping[str, str] = field(default_factory=dict)
    content: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """The manifest of a complete index."""

    content: Mapping[str, Any]  # as it is on disk

    @classmethod
    def read(cls, folder: Path, advice: str = "scan again with --fresh") -> Manifest:
        """The manifest of the index in `folder`; refused if it is not as memlens has written it."""
        path = folder / MANIFEST
        try:
            content = read_json(path, advice)
        except MemlensError as error:
            raise IndexFolderError(str(error)) from error
        wrong = _wrong_part(content)
        if wrong:
            raise IndexFolderError(f"{path} is damaged: it has no usable '{wrong}'; {advice}")
        _refuse_other_schema(content["schema"], folder)
        if not has_seal(content) or not is_sealed(content):
            raise IndexFolderError(f"{path} was changed after it was written; {advice}")
        return cls(content)

    def write(self, folder: Path) -> None:
        write_sealed(folder / MANIFEST, self.content)

    def with_files(self, facts: Mapping[str, Any], without: Sequence[str] = ()) -> Manifest:
        """The same with some files noted and others not."""
        rest = {name: entry for name, entry in self.content["files"].items() if name not in without}
        return self.with_notes({"files": {**rest, **facts}})

    def with_notes(self, notes: Mapping[str, Any]) -> Manifest:
        return Manifest({**self.content, **notes})

    @cached_property
    def generation(self) -> str:
        """A name of the scan: another one as soon as the plan, the model, the corpus or a table of the scan differs."""
        scanned = {name: facts.sha256 for name, facts in self.files.items() if name in SCAN_TABLES + OPTIONAL_TABLES}
        content = json.dumps([self.content["plan"], self.content["model"], scanned], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @cached_property
    def model(self) -> ScannedModel:
        noted = self.content["model"]
        groups = {
            int(n): tuple(GroupShape(*group) for group in shapes) for n, shapes in noted.get("groups", {}).items()
        }
        memories = {int(n): count for n, count in noted["memories"].items()}
        return _known(ScannedModel, noted, memories=memories, groups=groups)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that were scanned."""
        return tuple(self.content["layers"])

    @cached_property
    def counts(self) -> CorpusCounts:
        return _known(CorpusCounts, self.content["counts"])

    @cached_property
    def settings(self) -> ScanSettings:
        """The options of the scan."""
        return _settings(self.content)

    @property
    def scanned_with(self) -> list[dict[str, str]]:
        """The versions and kinds of processor that the scan was worked on with; several where it was continued."""
        return list(self.content.get("scanned_with", []))

    @property
    def histogram_edges(self) -> list[float]:
        return list(self.content["histogram_edges"])

    @property
    def position_edges(self) -> list[int]:
        """The first positions of all ranges of positions but the first; empty in an older index."""
        return list(self.content.get("position_edges", []))

    @cached_property
    def files(self) -> dict[str, FileFacts]:
        return {name: _known(FileFacts, entry) for name, entry in self.content["files"].items()}

    def sha256(self, table: str) -> str | None:
        """The checksum of a table (`values`, `experiments/agreement`); None where it is not noted."""
        facts = self.files.get(f"{table}.parquet")
        return facts.sha256 if facts else None

    @cached_property
    def values(self) -> ValuesNote:
        """Empty where there are no values yet."""
        noted = self.content.get("values", {})
        return _known(ValuesNote, noted, made_from=noted.get("from", {}))

    @property
    def value_tokens(self) -> int:
        """The number of tokens that values are read over: the largest rank a token can have."""
        return self.values.tokens or self.model.vocabulary

    @cached_property
    def patterns(self) -> PatternsNote | None:
        noted = self.content.get("patterns")
        return _known(PatternsNote, noted, made_from=noted.get("from", {}), content=noted) if noted else None

    @cached_property
    def experiments(self) -> dict[str, ExperimentNote]:
        return {name: _experiment(noted) for name, noted in self.content.get("experiments", {}).items()}

    def experiment(self, name: str) -> ExperimentNote:
        """The note of one experiment; empty where it was not run."""
        return self.experiments.get(name, ExperimentNote())

    @cached_property
    def prefix_pass(self) -> ExperimentNote:
        """The note of the latest pass over prefixes, which several experiments read; empty where there was none."""
        return _experiment(self.content.get("aggregate", {}))


def recorded_plan(folder: Path) -> Any:
    """The plan of the index in `folder` as its manifest has it, unchecked."""
    return read_json(folder / MANIFEST).get("plan")


def _known(kind: type[Record], noted: Mapping[str, Any], **more: Any) -> Record:
    """A record of the fields that it has; what else a manifest holds is of another version."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{**{name: value for name, value in noted.items() if name in names}, **more})


def _experiment(noted: Any) -> ExperimentNote:
    if not isinstance(noted, dict):
        return ExperimentNote()
    made_from = noted.get("from", {})
    return _known(ExperimentNote, noted, made_from=made_from if isinstance(made_from, dict) else {}, content=noted)


def _settings(content: Mapping[str, Any]) -> ScanSettings:
    noted = content["plan"]["settings"]
    return _known(ScanSettings, {**noted, "layers": tuple(noted["layers"]) if noted.get("layers") else None})


def _refuse_other_schema(version: int, folder: Path) -> None:
    if version == SCHEMA_VERSION:
        return
    is_newer = version > SCHEMA_VERSION
    advice = "install a newer memlens" if is_newer else "scan again with --fresh"
    raise IndexFolderError(
        f"{folder} has schema version {version}, this memlens reads {'up to ' if is_newer else ''}{SCHEMA_VERSION}; "
        f"{advice}"
    )


_KINDS = {"schema": int, "plan": dict, "model": dict, "layers": list, "counts": dict, "histogram_edges": list,
          "files": dict}  # fmt: skip
_COUNTED = ("sentences", "tokens", "prefixes")


def _wrong_part(content: Mapping[str, Any]) -> str:
    """The first part of the manifest that readers cannot rely on; empty if all is well."""
    for part, kind in _KINDS.items():
        if not _is(content.get(part), kind):
            return part
    for part in ("values", "patterns", "roles", "effects", "experiments", "aggregate"):
        if not _is(content.get(part, {}), dict):
            return part
    layers, model, counts = content["layers"], content["model"], content["counts"]
    if not layers or not all(_is(layer, int) for layer in layers):
        return "layers"
    memories = model.get("memories")
    if not _is(memories, dict) or not all(_is(memories.get(str(layer)), int) for layer in layers):
        return "model"
    if not all(name.isdecimal() and _is(count, int) for name, count in memories.items()):
        return "model"
    if not _are_groups(model.get("groups", {}), memories):
        return "model"
    if not isinstance(model.get("name"), str) or not _is(model.get("vocabulary", 0), int):
        return "model"
    if not all(_is(counts.get(name), int) for name in _COUNTED):
        return "counts"
    if not all(_is(count, int) for count in counts.values()):
        return "counts"
    for entry in content["files"].values():
        if not (_is(entry, dict) and _is(entry.get("bytes"), int) and isinstance(entry.get("sha256"), str)):
            return "files"
    try:
        _settings(content)
    except (SettingError, TypeError, ValueError, KeyError, AttributeError):
        return "plan"
    return ""


def _are_groups(groups: Any, memories: Mapping[str, int]) -> bool:
    """Layer -> [kind, count, size] of its groups, which together are as many memories as the layer has."""
    if not _is(groups, dict) or not groups.keys() <= memories.keys():
        return False
    for layer, shapes in groups.items():
        if not _is(shapes, list) or not all(_is(group, list) and len(group) == 3 for group in shapes):
            return False
        if not all(kind in KINDS and _is(count, int) and _is(size, int) for kind, count, size in shapes):
            return False
        if sum(count * size for _, count, size in shapes) != memories[layer]:
            return False
    return True


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))
