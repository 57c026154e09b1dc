"""Verification of every file of an index (`memlens check`), and restoration of a damaged manifest.

whole        present, with the checksum and content that the manifest records
damaged      missing, changed, unreadable, or with a reference to something that the index does not contain
unreadable   present, but the system denies reading it: permissions, a lock, a failing disk
outdated     whole, but computed from a table that has been replaced since then
not listed   present, but not in the manifest: left by a killed stage, or a user's file
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from memlens.errors import IndexFolderError, MemlensError
from memlens.files import (
    checksum,
    explain_os_errors,
    has_size,
    lock_for_writing,
    read_sealed,
)
from memlens.index.format import (
    ANNOTATIONS,
    BACKUP,
    CORPUS,
    DAMAGED_MANIFEST,
    EFFECTS,
    EXPERIMENTS,
    KEYS,
    LOCK,
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
    SCHEMA_VERSION,
    TOKENS,
    VALUES,
    VOCABULARY,
    Manifest,
    expected_rows,
    find_problem,
)
from memlens.index.reader import Index
from memlens.progress import Progress, no_progress

_PREFIX_TABLES = ("triggers", "ordinary", "quadrants")


def find_bad_reference(index: Index, table: str, with_corpus: bool = True) -> str:
    """Describe a row that refers to something outside the index. Returns "" if there is none."""
    columns = set(index.schema_names(table))
    problem = _find_bad_memory(index, table) if {"layer", "memory"} <= columns else ""
    if not problem and table in _PREFIX_TABLES and with_corpus:
        return _find_bad_prefix(index, table)
    return problem


def _find_bad_memory(index: Index, table: str) -> str:
    """Describe a reference to a layer or a memory that was not scanned. Returns "" if there is none."""
    rows = index.sql(
        f"SELECT layer, min(memory) AS low, max(memory) AS high, count(*) AS rows, "
        f"count(DISTINCT memory) AS memories FROM {{{table}}} WHERE memory IS NOT NULL GROUP BY layer ORDER BY layer"
    )
    for row in rows:
        if row["layer"] not in index.layers:
            return f"it refers to layer {row['layer']}, which was not scanned"
        count = index.memories(row["layer"])
        if row["low"] < 0 or row["high"] >= count:
            wrong = row["low"] if row["low"] < 0 else row["high"]
            return f"it refers to memory {wrong} of layer {row['layer']}, which has {count:,}"
        if table == "memories" and not row["rows"] == row["memories"] == count:
            return f"it has {row['memories']:,} memories of layer {row['layer']} instead of {count:,}"
    return ""


def _find_bad_prefix(index: Index, table: str) -> str:
    """Describe a reference to a missing sentence, or to a position after its end. Returns "" if there is none."""
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
        return f"it refers to sentence {row['sentence']}, which the corpus does not have"
    return f"it refers to position {row['position']} of sentence {row['sentence']}, which is shorter"


WHOLE, DAMAGED, UNREADABLE, OUTDATED, NOT_LISTED = "whole", "damaged", "unreadable", "outdated", "not listed"


@dataclass(frozen=True)
class Finding:
    """The result of checking one file."""

    file: str
    state: str
    detail: str = ""  # the problem, or the number of rows


@dataclass(frozen=True)
class Check:
    """The result of checking an index."""

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

    def tables_to_rebuild(self) -> list[str]:
        """Return the names of the damaged or outdated tables that later stages can rebuild.

        Raises:
            IndexFolderError: A damaged file cannot be rebuilt from the other files.
        """
        names = [finding.file for finding in self.findings if finding.state in (DAMAGED, OUTDATED)]
        for name in names:
            if name == ANNOTATIONS:
                raise IndexFolderError(
                    f"{self.folder / name} is damaged and cannot be rebuilt; "
                    f"run `memlens annotate {self.folder} recover`"
                )
            if name in (MANIFEST, *SCAN_TABLES, *OPTIONAL_TABLES):
                raise IndexFolderError(
                    f"{self.folder / name} is damaged and only a scan can rebuild it; scan again with --fresh"
                )
        return names


def check_index(
    folder: Path,
    progress: Progress = no_progress,
    check_annotations: Callable[[Path], Finding | None] = lambda folder: None,
) -> Check:
    """Check every file of an index. Raises IndexFolderError if the folder is not an index."""
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
        findings.append(_check_file(index, name))
    progress("check", len(files), len(files))
    damaged = {finding.file for finding in findings if finding.state == DAMAGED}
    findings = [_compare_with_others(index, finding, damaged) for finding in findings]
    findings += _find_other_files(index)
    if (finding := check_annotations(folder)) is not None:
        findings.append(finding)
    return Check(folder, tuple(findings))


def _check_file(index: Index, name: str) -> Finding:
    """Check one file without comparing it with the other files."""
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
        if problem := find_problem(path, name, index.manifest):
            return Finding(name, DAMAGED, problem)
        with path.open("rb") as handle:
            rows = pq.ParquetFile(handle).metadata.num_rows
    except PermissionError as error:
        return Finding(name, UNREADABLE, f"{error.strerror}; look at the permissions of file and folder")
    except (OSError, pa.ArrowException) as error:
        return Finding(name, DAMAGED, f"it cannot be read ({str(error).splitlines()[0][:100]})")
    expected = {VALUES: MEMORIES, KEYS: MEMORIES, ROLES: MEMORIES, TOKENS: VOCABULARY}.get(name)
    if expected is not None and rows != (count := expected_rows(expected, index.manifest)):
        return Finding(name, DAMAGED, f"it has {rows:,} rows instead of {count:,}")
    return Finding(name, WHOLE, f"{rows:,} rows")


def _compare_with_others(index: Index, finding: Finding, damaged: set[str]) -> Finding:
    """Return the finding with the state "damaged" or "outdated" if the file does not match the other files."""
    name = finding.file
    if finding.state != WHOLE or name == MANIFEST:
        return finding
    try:
        problem = find_bad_reference(index, name.removesuffix(".parquet"), with_corpus=CORPUS not in damaged)
    except MemlensError as error:
        problem = f"it cannot be read ({str(error).splitlines()[0][:100]})"
    if problem:
        return Finding(name, DAMAGED, problem)
    old = [table for table, then in _made_from(index, name).items() if then != index.manifest.sha256(table)]
    return Finding(name, OUTDATED, f"computed from an earlier {old[0]}; compute it again") if old else finding


def _made_from(index: Index, name: str) -> dict[str, Any]:
    """Return the tables that a derived table was computed from, with the checksums they had then."""
    manifest = index.manifest
    folder, _, table = name.removesuffix(".parquet").rpartition("/")
    if name in (VALUES, KEYS, ROUTERS, TOKENS):
        return dict(manifest.values.made_from)
    if name in (PATTERNS, NAMES, LOWER_PATTERNS):
        return dict(manifest.patterns.made_from) if manifest.patterns else {}
    if name == ROLES:
        note = manifest.content.get("roles", {})
        has_other_reading = manifest.values.reading not in (None, note.get("reading"))
        return {**note.get("from", {}), **({"values": None} if has_other_reading else {})}
    if name == EFFECTS:
        return dict(manifest.content.get("effects", {}).get("from", {}))
    if folder != EXPERIMENTS:
        return {}
    if table in ("prefixes", "prefix-layers"):
        note = manifest.prefix_pass.content
        return {"values": note["values"]} if "values" in note else {}
    return dict(manifest.experiment(table).made_from)


def _find_other_files(index: Index) -> Iterator[Finding]:
    """Yield findings about files that the manifest does not list."""
    listed_files = {*index.manifest.files, *SCAN_TABLES}
    for path in sorted([*index.folder.glob("*.parquet"), *index.folder.glob(f"{EXPERIMENTS}/*.parquet")]):
        name = path.relative_to(index.folder).as_posix()
        if name not in listed_files:
            yield Finding(name, NOT_LISTED, "its stage was stopped while it wrote this file; run the stage again")
    for path in sorted(index.folder.glob("**/*.part")):
        if not path.is_relative_to(index.folder / PARTIAL):
            yield Finding(path.relative_to(index.folder).as_posix(), NOT_LISTED, "left behind by a killed stage")
    if (index.folder / PARTIAL).is_dir():
        yield Finding(PARTIAL, NOT_LISTED, "an unfinished scan that will replace this index")


# A damaged manifest


def restore_manifest(folder: Path) -> bool:
    """Restore a damaged manifest from its backup. The damaged file is kept under another name.

    Returns:
        True if the manifest was restored, False if it is not damaged or the folder is not an index.

    Raises:
        IndexFolderError: The manifest cannot be read, or it is damaged and the backup is not usable.
    """
    path = folder / MANIFEST
    if not path.exists() and not (folder / BACKUP).is_file():
        return False
    try:
        Manifest.read(folder, "its backup cannot be used either; scan again with --fresh")
        return False
    except IndexFolderError as error:
        damage = error
        is_unreadable = error.__cause__ is not None and isinstance(error.__cause__.__cause__, OSError)
        if path.exists() and is_unreadable:  # it cannot be opened, so it may be undamaged
            raise
    with lock_for_writing(folder / LOCK), explain_os_errors(folder):
        try:
            manifest = _read_backup(folder)
        except (MemlensError, ValueError) as error:
            raise damage from error
        if path.exists():
            shutil.copyfile(path, folder / DAMAGED_MANIFEST)
        manifest.write(folder)
    return True


def _read_backup(folder: Path) -> Manifest:
    content = read_sealed(folder / BACKUP)
    manifest = Manifest({name: part for name, part in content.items() if name != "seal"})
    _ = manifest.document, manifest.settings
    if manifest.document.schema != SCHEMA_VERSION:
        raise ValueError("another schema version")
    for name in SCAN_TABLES:
        if not has_size(folder / name, manifest.files.get(name)):
            raise ValueError(f"{name} belongs to another index")
    return manifest
