"""The files of an index, their schemas, and the manifest: a plain folder of Parquet files and one JSON document.

    manifest.json          written last: its presence means that the index is complete
    manifest.backup.json   a copy of it, for `memlens repair`
    corpus.parquet         sentences: text, tokens
    vocabulary.parquet     the text of every token
    triggers.parquet       the top (and bottom) triggers of every memory
    memories.parquet       one row per memory: statistics
    ordinary.parquet       random prefixes on which a memory is active
    counts.parquet         one row per memory: how often it is active by position, and by quadrant in gated blocks
    quadrants.parquet      the top prefixes of each sign quadrant (gated blocks only)
    experts.parquet        one row per routed expert: how often the router chooses it (mixtures of experts only)
    routing.parquet        prefixes that are routed to an expert (mixtures of experts only)
    values.parquet         tokens that values promote and demote (`memlens values`)
    keys.parquet           tokens whose embedding alone matches a key (`memlens values`)
    routers.parquet        tokens whose embedding alone matches a router row (`memlens values`, mixtures only)
    tokens.parquet         one row per token: whether it was trained, its classes (`memlens values`)
    patterns.parquet       patterns that triggers share (`memlens patterns`)
    names.parquet          one line per memory (`memlens patterns`)
    lower_patterns.parquet patterns that the most negative triggers share (`memlens patterns`, gated blocks only)
    roles.parquet          the role of each memory (`memlens roles`)
    effects.parquet        the effects of silencing the memories of a role (`memlens roles --effects`)
    experiments/           tables of experiments (`memlens experiment`)
    annotations.jsonl      labels, verdicts and notes, one event per line
    partial/               the state of an unfinished scan

The manifest describes the model, the text and the settings, how each table was computed, and the size and checksum of
every file. A manifest that is incomplete, changed or of another schema version is rejected. Unknown entries are kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pyarrow as pa

from memlens import __version__
from memlens.errors import IndexFolderError, MemlensError, SettingError
from memlens.files import FileFacts, is_sealed, parse_document, read_json, write_sealed
from memlens.memory import GroupShape, MemoryNames
from memlens.settings import HUB, ScanSettings

SCHEMA_VERSION = 1

MANIFEST = "manifest.json"
BACKUP = "manifest.backup.json"  # a copy of the manifest, for `memlens repair`
DAMAGED_MANIFEST = "manifest.damaged.json"  # the manifest that `memlens repair` replaced
PARTIAL = "partial"
ANNOTATIONS = "annotations.jsonl"
ANNOTATIONS_LOCK = f"{ANNOTATIONS}.lock"
LOCK = ".lock"
PARTS = "parts"  # folder in partial/: the saved states
SHARD = "shard.json"  # in partial/: marks a finished shard
PULL = "pull.json"  # in partial/: repository and commit of an unfinished pull

QUADRANT_SIGNS = ("++", "+-", "-+", "--")  # the sign of the gate, then the sign of the input

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
# Tables that a scan writes for some models only (gates, experts).
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

COUNTS_SCHEMA = pa.schema(
    [
        ("layer", pa.int32()),
        ("memory", pa.int32()),
        # The first three columns have one number per range of positions (`position_edges` in the manifest).
        ("fired", pa.list_(pa.int64())),  # prefixes on which the memory is active
        ("prefixes", pa.list_(pa.int64())),  # prefixes that reached the memory
        ("sentences", pa.list_(pa.int64())),  # sentences with a prefix that reached the memory
        ("quadrants", pa.list_(pa.int64())),  # prefixes in ++, +-, -+, --; null without a gate
    ]
)
QUADRANTS_SCHEMA = pa.schema(
    [("layer", pa.int32()), ("memory", pa.int32()), ("quadrant", pa.string()), ("rank", pa.int32()), *PREFIX_COLUMNS]
)

_EXPERT = [("layer", pa.int32()), ("expert", pa.int32())]
EXPERTS_SCHEMA = pa.schema(
    # prefixes routed to the expert, their share, the mean router weight
    [*_EXPERT, ("chosen", pa.int64()), ("share", pa.float64()), ("weight", pa.float64())]
)
ROUTING_SCHEMA = pa.schema(
    [
        *_EXPERT,
        ("list", pa.string()),  # "heaviest" (the largest router weights) or "drawn" (at random)
        ("rank", pa.int32()),
        ("weight", pa.float32()),  # router weight; null for drawn prefixes
        ("sentence", pa.int64()),
        ("position", pa.int32()),
        ("next_token", pa.int32()),
    ]
)
SCHEMAS = {
    CORPUS: CORPUS_SCHEMA,
    VOCABULARY: VOCABULARY_SCHEMA,
    TRIGGERS: TRIGGERS_SCHEMA,
    MEMORIES: MEMORIES_SCHEMA,
    ORDINARY: ORDINARY_SCHEMA,
    COUNTS: COUNTS_SCHEMA,
    QUADRANTS: QUADRANTS_SCHEMA,
    EXPERTS: EXPERTS_SCHEMA,
    ROUTING: ROUTING_SCHEMA,
}
# required columns that may have nulls or empty lists
_NULLABLE = {
    "next_token", "weight", "quadrants", "target", "target_rank", "prefixes", "follows", "promotes", "role", "roles",
}  # fmt: skip
# pairs of columns whose lists have the same length in every row
_PARALLEL = (("tokens", "p"), ("bottom_tokens", "bottom_p"), ("tokens", "scores"), ("tokens", "ends"))
_PATTERN_COLUMNS = "layer memory pattern kind description prefixes confidence share q"
DERIVED_COLUMNS = {  # columns that readers require
    VALUES: "layer memory max_p entropy norm argmax target target_rank tokens p bottom_tokens bottom_p coherence",
    KEYS: "layer memory tokens scores",
    ROUTERS: "layer expert tokens scores",
    TOKENS: "token trained",
    PATTERNS: _PATTERN_COLUMNS,
    LOWER_PATTERNS: _PATTERN_COLUMNS,
    NAMES: "layer memory name confidence triggers patterns covered follows promotes",
    ROLES: "layer memory role roles",
}


_ENTRIES = {
    MANIFEST, BACKUP, DAMAGED_MANIFEST, PARTIAL, ANNOTATIONS, LOCK, EXPERIMENTS, REPORT,
    *SCAN_TABLES, *OPTIONAL_TABLES, *DERIVED_TABLES,
}  # fmt: skip


def foreign_entries(folder: Path) -> list[str]:
    """Return the names in the folder that do not belong to an index: all names if the folder holds no index."""
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    if MANIFEST not in names and PARTIAL not in names:
        return names
    temporary = {f"{name}.part" for name in _ENTRIES}
    return [name for name in names if name not in _ENTRIES | temporary and not name.startswith(ANNOTATIONS)]


def located(index: str | os.PathLike[str]) -> Path:
    """Return the folder of an index. For hf:REPO this is a local copy of the repository's current content."""
    name = os.fspath(index)
    if not name.startswith(HUB):
        return Path(name)
    from memlens.index.hub import copy_of

    return copy_of(name)


def is_complete(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def made_with() -> dict[str, str]:
    """Return the versions of memlens and torch and the kind of processor, which affect the last bits of a table."""
    capability = os.environ.get("ATEN_CPU_CAPABILITY") or _vector_unit()
    return {
        "memlens": __version__,
        "torch": version("torch"),
        "processor": f"{platform.machine()} {capability}".strip(),
    }


def _vector_unit() -> str:
    """Return the widest vector unit that torch would use, or "" on systems other than Linux."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split())
    except OSError:
        return ""
    return "avx512" if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags else "avx2" if "avx2" in flags else ""


_FILE_NAME = re.compile(r"(experiments/)?[A-Za-z0-9_][A-Za-z0-9_-]*\.parquet")
Count = Annotated[int, msgspec.Meta(ge=0)]
Kind = Literal["dense", "shared", "routed"]  # kinds of groups


class ScannedModel(msgspec.Struct, frozen=True, dict=True):
    """The model that was scanned."""

    name: str
    memories: dict[Count, Count]  # layer -> number of memories, for every layer of the model
    source: str | None = None
    family: str | None = None
    fingerprint: str | None = None
    dtype: str | None = None
    width: int | None = None
    vocabulary: Count = 0
    activation: str | None = None
    gated: bool = False
    bos: int | None = None  # token placed before every sentence
    # layer -> (kind, experts, memories per expert) of each group, for layers that are not one dense block
    groups: dict[Count, tuple[tuple[Kind, Count, Count], ...]] = {}

    def __post_init__(self) -> None:
        for layer, groups in self.groups.items():
            if sum(count * size for _, count, size in groups) != self.memories.get(layer):
                raise ValueError(f"the groups of layer {layer} do not add up to its memories")

    @cached_property
    def names(self) -> MemoryNames:
        dense = {layer: (GroupShape("dense", 1, count),) for layer, count in self.memories.items()}
        grouped = {layer: [GroupShape(*group) for group in groups] for layer, groups in self.groups.items()}
        return MemoryNames({**dense, **grouped})


class CorpusCounts(msgspec.Struct, frozen=True):
    """The amount of text that was scanned."""

    sentences: Count
    tokens: Count
    prefixes: Count
    repeated_prefixes: Count = 0
    cut_sentences: Count = 0
    cut_tokens: Count = 0
    tokens_fed: Count = 0


Checksums = dict[str, str | None]  # table -> checksum of the version that was read


class ValuesNote(msgspec.Struct, frozen=True):
    """A note on how values.parquet and keys.parquet were computed."""

    top: Count = 0
    reading: str = ""
    vocabulary: str = "all"  # tokens over which values are read: "all" or "trained"
    tokens: Count = 0  # number of these tokens; 0 if `vocabulary` is "all"
    untrained: bool = False  # True if lists may contain undertrained tokens
    listed: Count = 0  # number of tokens that lists may contain; 0 for all
    threads: Count = 0
    made_from: Checksums = msgspec.field(default_factory=dict, name="from")


class PatternsNote(msgspec.Struct, frozen=True):
    """A note on how patterns.parquet and names.parquet were computed. `content` is the note as parsed from JSON."""

    top: Count
    rate: float
    families: dict[str, Count] = {}  # family of hypotheses -> number of tested hypotheses
    settings: dict[str, Any] = {}
    made_from: Checksums = msgspec.field(default_factory=dict, name="from")
    content: dict[str, Any] = {}


class ExperimentNote(msgspec.Struct, frozen=True):
    """A note on how the tables of an experiment or of the prefix pass were computed.

    `content` is the note as parsed from JSON.
    """

    seed: int | None = None
    sample: int | None = None
    origin: str | None = None
    validation: Any = None
    validation_corpus: dict[str, Any] | None = None  # sources, unit and column as given by the user
    stop_words: str | None = None
    made_from: Checksums = msgspec.field(default_factory=dict, name="from")
    content: dict[str, Any] = {}


class ManifestDocument(msgspec.Struct, frozen=True):
    """The parts of manifest.json that memlens reads."""

    schema: int
    plan: dict[str, Any]
    model: ScannedModel
    layers: Annotated[tuple[Count, ...], msgspec.Meta(min_length=1)]  # the scanned layers
    counts: CorpusCounts
    histogram_edges: tuple[float, ...]
    files: dict[str, FileFacts]
    position_edges: tuple[int, ...] = ()
    scanned_with: tuple[dict[str, str], ...] = ()
    values: ValuesNote = ValuesNote()
    patterns: PatternsNote | None = None
    roles: dict[str, Any] = {}
    effects: dict[str, Any] = {}
    experiments: dict[str, ExperimentNote] = {}
    aggregate: ExperimentNote = ExperimentNote()

    def __post_init__(self) -> None:
        for name in self.files:
            if not _FILE_NAME.fullmatch(name):
                raise ValueError(f"it lists the file '{name}', which is not part of an index")
        if missing := [layer for layer in self.layers if layer not in self.model.memories]:
            raise ValueError(f"the model has no layer {missing[0]}")


@dataclass(frozen=True)
class Manifest:
    """The manifest of a complete index."""

    content: Mapping[str, Any]  # the parsed file, including entries that memlens does not know

    @classmethod
    def read(cls, folder: Path, advice: str = "") -> Manifest:
        """Return the manifest of the index in `folder`. Raises IndexFolderError if it is damaged."""
        path = folder / MANIFEST
        advice = advice or f"restore it with `memlens repair {folder}`, or scan again with --fresh"
        try:
            content = read_json(path, advice)
        except MemlensError as error:
            raise IndexFolderError(str(error)) from error
        _check_schema_version(content.get("schema"), folder)
        manifest = cls(content)
        try:
            _ = manifest.document, manifest.settings
        except (SettingError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise IndexFolderError(f"{path} is damaged ({error}); {advice}") from error
        if not is_sealed(content):
            raise IndexFolderError(f"{path} was changed after it was written; {advice}")
        return manifest

    def write(self, folder: Path) -> None:
        """Write the backup, then manifest.json, which is always the last file."""
        write_sealed(folder / BACKUP, self.content)
        write_sealed(folder / MANIFEST, self.content)

    def with_files(self, facts: Mapping[str, Any], without: Sequence[str] = ()) -> Manifest:
        """Return a copy that also lists the files in `facts` and no longer lists the files in `without`."""
        rest = {name: entry for name, entry in self.content["files"].items() if name not in without}
        return self.with_notes({"files": {**rest, **facts}})

    def with_notes(self, notes: Mapping[str, Any]) -> Manifest:
        return Manifest({**self.content, **notes})

    @cached_property
    def document(self) -> ManifestDocument:
        return parse_document(self.content, ManifestDocument)

    @cached_property
    def generation(self) -> str:
        """A checksum of the plan, the model and the scan's tables, which identifies the scan."""
        scanned = {name: facts.sha256 for name, facts in self.files.items() if name in SCAN_TABLES + OPTIONAL_TABLES}
        content = json.dumps([self.content["plan"], self.content["model"], scanned], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @property
    def model(self) -> ScannedModel:
        return self.document.model

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that were scanned."""
        return self.document.layers

    @property
    def counts(self) -> CorpusCounts:
        return self.document.counts

    @cached_property
    def settings(self) -> ScanSettings:
        """The options of the scan."""
        options = {field.name: field for field in fields(ScanSettings)}
        recorded = {name: value for name, value in self.content["plan"]["settings"].items() if name in options}
        if recorded.get("layers"):
            recorded["layers"] = tuple(recorded["layers"])
        return ScanSettings(**recorded)

    @property
    def scanned_with(self) -> tuple[dict[str, str], ...]:
        """The versions and processors of the scan. There are several if it was resumed on another machine."""
        return self.document.scanned_with

    @property
    def histogram_edges(self) -> tuple[float, ...]:
        return self.document.histogram_edges

    @property
    def position_edges(self) -> tuple[int, ...]:
        """The positions at which the ranges of positions begin, except the first range."""
        return self.document.position_edges

    @property
    def files(self) -> dict[str, FileFacts]:
        return self.document.files

    def sha256(self, table: str) -> str | None:
        """Return the checksum of a table (`values`, `experiments/agreement`), or None if it was not computed."""
        facts = self.files.get(f"{table}.parquet")
        return facts.sha256 if facts else None

    @property
    def values(self) -> ValuesNote:
        """The note on how values were computed. The note is empty if they were not computed."""
        return self.document.values

    @property
    def value_tokens(self) -> int:
        """The number of tokens over which values are read, which is also the largest possible rank."""
        return self.values.tokens or self.model.vocabulary

    @cached_property
    def patterns(self) -> PatternsNote | None:
        note = self.document.patterns
        return None if note is None else msgspec.structs.replace(note, content=self.content["patterns"])

    @cached_property
    def experiments(self) -> dict[str, ExperimentNote]:
        notes = self.document.experiments
        return {
            name: msgspec.structs.replace(note, content=self.content["experiments"][name])
            for name, note in notes.items()
        }

    def experiment(self, name: str) -> ExperimentNote:
        """Return the note of an experiment, or an empty note if the experiment was not run."""
        return self.experiments.get(name, ExperimentNote())

    @cached_property
    def prefix_pass(self) -> ExperimentNote:
        """The note on the latest prefix pass, whose table several experiments use."""
        return msgspec.structs.replace(self.document.aggregate, content=self.content.get("aggregate", {}))


def recorded_plan(folder: Path) -> Any:
    """Return the plan of the index in `folder` without validating the manifest."""
    return read_json(folder / MANIFEST).get("plan")


def _check_schema_version(version: Any, folder: Path) -> None:
    if version == SCHEMA_VERSION or not isinstance(version, int) or isinstance(version, bool):
        return
    is_newer = version > SCHEMA_VERSION
    advice = "install a newer memlens" if is_newer else "scan again with --fresh"
    raise IndexFolderError(
        f"{folder} has schema version {version}, this memlens reads {'up to ' if is_newer else ''}{SCHEMA_VERSION}; "
        f"{advice}"
    )


def find_problem(path: Path, name: str, manifest: Manifest) -> str:
    """Describe invalid content of a table. Returns "" if there is none. Reads the Parquet footer only.

    A valid checksum does not guarantee valid content, because the author of a table also writes its checksum. Columns,
    the number of rows, and the smallest and largest layer, memory, sentence, position and token must fit the manifest.
    """
    import pyarrow.parquet as pq

    try:
        with path.open("rb") as handle:
            metadata = pq.ParquetFile(handle).metadata
            schema = metadata.schema.to_arrow_schema()
    except (OSError, pa.ArrowException) as error:
        return f"it cannot be read ({str(error).splitlines()[0][:100]})"
    for field in SCHEMAS.get(name, ()):
        if field.name not in schema.names or schema.field(field.name).type != field.type:
            return f"it has no column '{field.name}' of type {field.type}"
    for column in DERIVED_COLUMNS.get(name, "").split():
        if column not in schema.names:
            return f"it has no column '{column}'"
    expected = expected_rows(name, manifest)
    if expected is not None and metadata.num_rows != expected:
        return f"it has {metadata.num_rows:,} rows instead of {expected:,}"
    if name not in SCHEMAS and name not in DERIVED_COLUMNS:
        return ""
    for number in range(metadata.num_row_groups):
        row_group = metadata.row_group(number)
        if problem := _find_null(row_group, name, manifest) or _find_bad_number(row_group, name, manifest):
            return problem
    return ""


def _find_null(row_group: Any, name: str, manifest: Manifest) -> str:
    """Describe a missing value, a column without null count, or a list of wrong length. Returns "" if there is none."""
    required = SCHEMAS[name].names if name in SCHEMAS else DERIVED_COLUMNS[name].split()
    rows, counts = row_group.num_rows, {}  # column -> numbers of values and of nulls
    for number in range(row_group.num_columns if rows else 0):
        column = row_group.column(number)
        column_name, statistics = column.path_in_schema.partition(".")[0], column.statistics
        if column_name in required:
            nulls = None if statistics is None else statistics.null_count
            counts[column_name] = column.num_values, nulls
            if column_name not in _NULLABLE and nulls != 0:
                return f"its column '{column_name}' has {'no statistics' if nulls is None else 'missing values'}"
    for first, second in _PARALLEL:
        if second in counts and counts[first] != counts[second]:
            return f"its columns '{first}' and '{second}' have lists of different lengths"
    positions = len(manifest.position_edges) + 1
    lengths = dict.fromkeys(("fired", "prefixes", "sentences"), positions) | {"quadrants": len(QUADRANT_SIGNS)}
    for column_name, length in lengths.items() if name == COUNTS and rows else ():
        values, nulls = counts[column_name]
        if nulls is None or values != length * (rows - nulls) + nulls:  # a list that is null counts as one value
            return f"its column '{column_name}' has lists of other lengths than {length}"
    return ""


def expected_rows(name: str, manifest: Manifest) -> int | None:
    """Return the number of rows of a scan table if the manifest determines it."""
    memories = sum(manifest.model.memories[layer] for layer in manifest.layers)
    counts = {MEMORIES: memories, COUNTS: memories, CORPUS: manifest.counts.sentences}
    return (counts | {VOCABULARY: manifest.model.vocabulary}).get(name)


def _find_bad_number(row_group: Any, name: str, manifest: Manifest) -> str:
    """Describe a number that the statistics of a row group show to be out of range. Returns "" if there is none."""
    ranges = {}
    for number in range(row_group.num_columns):
        column = row_group.column(number)
        statistics = column.statistics
        if column.physical_type in ("INT32", "INT64") and statistics is not None and statistics.has_min_max:
            ranges[column.path_in_schema.partition(".")[0]] = (statistics.min, statistics.max)
    layers = ranges.get("layer", (min(manifest.layers), max(manifest.layers)))
    for layer in layers:
        if layer not in manifest.layers:
            return f"it refers to layer {layer}, which was not scanned"
    memories = max(manifest.model.memories[layer] for layer in manifest.layers if layers[0] <= layer <= layers[1])
    limits: dict[str, tuple[int, int | None]] = {"memory": (0, memories)}
    if name != ROLES:
        limits |= {"sentence": (0, manifest.counts.sentences), "position": (-1, None), "rank": (0, None)}
        limits |= {"ends": (0, None)}
        limits |= dict.fromkeys(
            ("token", "tokens", "bottom_tokens", "next_token", "argmax", "target", "follows", "promotes"),
            (0, manifest.model.vocabulary),
        )
    for column_name, (least, end) in limits.items():
        low, high = ranges.get(column_name, (least, least))
        if column_name in ranges and (low < least or (end is not None and high >= end)):
            wrong = low if low < least else high
            return f"it refers to {column_name} {wrong}, which does not exist"
    return ""
