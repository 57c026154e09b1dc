"""`memlens check`: is every file of an index whole, and do they belong together? Reads everything, changes nothing.

whole        there, and byte for byte what the manifest says
damaged      missing, of another size or content, not readable, or with rows about what the index does not have
unreadable   there, but the system does not let memlens look: permissions, a lock, a failing disk
outdated     whole, but made from a table that has been made again since
not noted    there, but not part of the index: left by a stage that was killed, or somebody else's
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from memlens.errors import FilesError, IndexFolderError, MemlensError
from memlens.files import checksum
from memlens.index.format import (
    ANNOTATIONS,
    CORPUS,
    COUNTS,
    EFFECTS,
    EXPERIMENTS,
    KEYS,
    LOWER_PATTERNS,
    MANIFEST,
    MEMORIES,
    NAMES,
    OPTIONAL_TABLES,
    PARTIAL,
    PATTERNS,
    ROLES,
    ROUTERS,
    SCAN_TABLES,
    TOKENS,
    VALUES,
    VOCABULARY,
)
from memlens.index.history import History
from memlens.index.reader import Index
from memlens.parallel import Progress, no_progress

_PREFIX_TABLES = ("triggers", "ordinary", "quadrants")


def wrong_references(index: Index, table: str, with_corpus: bool = True) -> str:
    """A sentence about a row that refers to something that does not exist; empty if there is none."""
    columns = set(index.schema_names(table))
    if {"layer", "memory"} <= columns:
        problem = _wrong_memories(index, table)
        if problem:
            return problem
    if table in _PREFIX_TABLES and with_corpus:
        return _wrong_prefixes(index, table)
    return ""


def _wrong_memories(index: Index, table: str) -> str:
    """Layers that were not scanned and memories that a layer does not have."""
    rows = index.sql(
        f"SELECT layer, min(memory) AS low, max(memory) AS high, count(*) AS rows, "
        f"count(DISTINCT memory) AS memories FROM {{{table}}} WHERE memory IS NOT NULL GROUP BY layer ORDER BY layer"
    )
    for row in rows:
        if row["layer"] not in index.layers:
            return f"it speaks of layer {row['layer']}, which was not scanned"
        count = index.memories(row["layer"])
        if row["low"] < 0 or row["high"] >= count:
            wrong = row["low"] if row["low"] < 0 else row["high"]
            return f"it speaks of memory {wrong} of layer {row['layer']}, which has {count:,}"
        if table == "memories" and not row["rows"] == row["memories"] == count:
            return f"it has {row['memories']:,} memories of layer {row['layer']} instead of {count:,}"
    return ""


def _wrong_prefixes(index: Index, table: str) -> str:
    """Sentences that the corpus does not have, and positions beyond a sentence's end."""
    wrong = index.sql(
        f"SELECT t.sentence, t.position, c.sentence IS NULL AS lost FROM "
        f"(SELECT sentence, min(position) AS low, max(position) AS position FROM {{{table}}} GROUP BY sentence) t "
        "LEFT JOIN (SELECT sentence, len(tokens) AS length FROM {corpus}) c USING (sentence) "
        "WHERE c.sentence IS NULL OR t.position >= c.length OR t.low < -1 ORDER BY t.sentence LIMIT 1"
    )
    if not wrong:
        return ""
    row = wrong[0]
    if row["lost"]:
        return f"it speaks of sentence {row['sentence']}, which the corpus does not have"
    return f"it speaks of position {row['position']} of sentence {row['sentence']}, which is shorter"


WHOLE, DAMAGED, UNREADABLE, OUTDATED, NOT_NOTED = "whole", "damaged", "unreadable", "outdated", "not noted"


@dataclass(frozen=True)
class Finding:
    """The state of one file."""

    file: str
    state: str
    detail: str = ""  # what is wrong, or how many rows it has


@dataclass(frozen=True)
class Check:
    """The state of an index."""

    folder: Path
    findings: tuple[Finding, ...]

    @property
    def damaged(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.state == DAMAGED)

    @property
    def unreadable(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.state == UNREADABLE)

    @property
    def is_whole(self) -> bool:
        return not self.damaged and not self.unreadable

    def to_make_again(self) -> list[str]:
        """Tables of later stages that are damaged or outdated; refused if what is damaged cannot be made again."""
        names = [finding.file for finding in self.findings if finding.state in (DAMAGED, OUTDATED)]
        for name in names:
            if name == ANNOTATIONS:
                raise IndexFolderError(
                    f"{self.folder / name} is damaged, and nothing else holds what people wrote; "
                    f"run `memlens annotate {self.folder} recover`"
                )
            if name in (MANIFEST, *SCAN_TABLES, *OPTIONAL_TABLES):
                raise IndexFolderError(
                    f"{self.folder / name} is damaged and comes from the scan; scan again with --fresh"
                )
        return names


def check_index(folder: Path, progress: Progress = no_progress) -> Check:
    """Look at every file of an index; a folder that is no index is refused."""
    try:
        index = Index(folder)
    except IndexFolderError as error:
        if not (folder / MANIFEST).is_file():
            raise
        return Check(folder, (Finding(MANIFEST, DAMAGED, str(error)),))
    findings = [Finding(MANIFEST, WHOLE, "")]
    files = index.manifest.files
    for number, name in enumerate(sorted({*files, *SCAN_TABLES})):
        progress("check", number, len(files))
        findings.append(_file(index, name))
    progress("check", len(files), len(files))
    damaged = {finding.file for finding in findings if finding.state == DAMAGED}
    findings = [_in_place(index, finding, damaged) for finding in findings]
    findings += _others(index)
    return Check(folder, tuple(findings))


def _file(index: Index, name: str) -> Finding:
    """One file by itself."""
    facts, path = index.manifest.files.get(name), index.folder / name
    if facts is None:
        return Finding(name, DAMAGED, "the manifest does not describe it")
    if not path.is_file():
        return Finding(name, DAMAGED, "it is missing")
    try:
        size = path.stat().st_size
        if size != facts.bytes:
            return Finding(name, DAMAGED, f"it has {size:,} bytes instead of {facts.bytes:,}")
        if checksum(path) != facts.sha256:
            return Finding(name, DAMAGED, "its content has changed (the checksum differs)")
        with path.open("rb") as handle:
            rows = pq.ParquetFile(handle).metadata.num_rows
    except PermissionError as error:
        return Finding(name, UNREADABLE, f"{error.strerror}; look at the permissions of file and folder")
    except (OSError, pa.ArrowException) as error:
        return Finding(name, DAMAGED, f"it cannot be read ({str(error).splitlines()[0][:100]})")
    return Finding(name, WHOLE, f"{rows:,} rows")


def _in_place(index: Index, finding: Finding, damaged: set[str]) -> Finding:
    """The same finding, unless the file does not fit the others; only whole files can be compared."""
    name = finding.file
    if finding.state != WHOLE or name == MANIFEST or MANIFEST in damaged:
        return finding
    rows = int(finding.detail.split()[0].replace(",", ""))
    expected = _expected_rows(index, name)
    if expected is not None and rows != expected:
        return Finding(name, DAMAGED, f"it has {rows:,} rows instead of {expected:,}")
    try:
        problem = wrong_references(index, name.removesuffix(".parquet"), with_corpus=CORPUS not in damaged)
    except (MemlensError, duckdb.Error, pa.ArrowException) as error:
        problem = f"it cannot be read ({str(error).splitlines()[0][:100]})"
    if problem:
        return Finding(name, DAMAGED, problem)
    made_from = _made_from(index, name)
    old = [table for table, known in made_from.items() if known != index.manifest.sha256(table)]
    return Finding(name, OUTDATED, f"made from an earlier {old[0]}; make it again") if old else finding


def _expected_rows(index: Index, name: str) -> int | None:
    manifest = index.manifest
    memories = sum(index.memories(layer) for layer in index.layers)
    known = {
        CORPUS: manifest.counts.sentences,
        VOCABULARY: manifest.model.vocabulary,
        MEMORIES: memories,
        COUNTS: memories,
        "values.parquet": memories,
        "keys.parquet": memories,
        ROLES: memories,
        TOKENS: manifest.model.vocabulary,
    }
    return known.get(name)


def _made_from(index: Index, name: str) -> dict[str, Any]:
    """The tables that a derived one was made from, with their checksums then, as far as the manifest notes them."""
    manifest = index.manifest
    folder, _, table = name.removesuffix(".parquet").rpartition("/")
    if name in (VALUES, KEYS, ROUTERS, TOKENS):
        return dict(manifest.values.made_from)
    if name in (PATTERNS, NAMES, LOWER_PATTERNS):
        return dict(manifest.patterns.made_from) if manifest.patterns else {}
    if name == ROLES:
        noted = manifest.content.get("roles", {})
        is_read_otherwise = manifest.values.reading not in (None, noted.get("reading"))
        return {**noted.get("from", {}), **({"values": None} if is_read_otherwise else {})}
    if name == EFFECTS:
        return dict(manifest.content.get("effects", {}).get("from", {}))
    if folder != EXPERIMENTS:
        return {}
    if table in ("prefixes", "prefix-layers"):
        noted = manifest.prefix_pass.content
        return {"values": noted["values"]} if "values" in noted else {}
    return dict(manifest.experiment(table).made_from)


def _others(index: Index) -> Iterator[Finding]:
    """Findings about files that the manifest does not note."""
    noted = {*index.manifest.files, *SCAN_TABLES}
    for path in sorted([*index.folder.glob("*.parquet"), *index.folder.glob(f"{EXPERIMENTS}/*.parquet")]):
        name = path.relative_to(index.folder).as_posix()
        if name not in noted:
            yield Finding(name, NOT_NOTED, "a stage was stopped while it was written; make it again")
    for path in sorted(index.folder.glob("**/*.part")):
        if not path.is_relative_to(index.folder / PARTIAL):
            yield Finding(path.relative_to(index.folder).as_posix(), NOT_NOTED, "left by a stage that was killed")
    if (index.folder / PARTIAL).is_dir():
        yield Finding(PARTIAL, NOT_NOTED, "an unfinished scan that is to replace this index")
    if (index.folder / ANNOTATIONS).is_file():
        yield _annotations(index.folder / ANNOTATIONS)


def _annotations(path: Path) -> Finding:
    try:
        with closing(History(path)) as history:
            events, unhashed = history.check_whole()
            advice = f"run `memlens annotate {path.parent} recover` to add them"
            more = f", {unhashed:,} of them without checksums; {advice}" if unhashed else ""
            return Finding(ANNOTATIONS, WHOLE, f"{events:,} events{more}")
    except FilesError as error:  # locked or forbidden, which says nothing about what is in it
        return Finding(ANNOTATIONS, UNREADABLE, str(error))
    except IndexFolderError as error:
        return Finding(ANNOTATIONS, DAMAGED, str(error))
