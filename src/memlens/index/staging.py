"""The folder of an index during a scan: refusing what is not memlens', continuing, and publishing the new tables.

A new index is made in partial/ and moved up when it is complete, so that an index that is being replaced stays whole
until then. partial/corpus.json is the mark of an unfinished scan with something to lose: it is the last file of the
corpus stage, and the first to go when partial/ is thrown away. Nothing that memlens did not write is ever removed.
"""

import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from memlens.corpus.store import CorpusStore
from memlens.errors import IndexFolderError, MemlensError
from memlens.files import (
    explain_os_errors,
    is_as_noted,
    read_json,
    read_sealed,
    sync_folder,
    write_json,
    write_sealed,
)
from memlens.index.format import (
    ANNOTATIONS,
    ANNOTATIONS_LOCK,
    BACKUP,
    DERIVED_TABLES,
    EXPERIMENTS,
    LOCK,
    MANIFEST,
    OPTIONAL_TABLES,
    PARTIAL,
    REPORT,
    SCAN_TABLES,
    SCHEMA_VERSION,
    SHARD,
    Manifest,
    foreign_entries,
    is_complete,
    made_with,
    recorded_plan,
)

_MACHINES = "made_with.json"  # in partial/: the versions and kinds of processor that the scan was worked on with


def recorded_threads(folder: Path) -> int | None:
    """With how many threads the index in `folder`, complete or unfinished, is made; None where there is none.

    The number is part of the plan, so continuing with another one would be refused.
    """
    with explain_os_errors(folder):
        plan = unfinished_plan(folder)
        if plan is None and is_complete(folder):
            plan = recorded_plan(folder)
    settings = plan.get("settings") if isinstance(plan, dict) else None
    threads = settings.get("threads") if isinstance(settings, dict) else None
    return threads if isinstance(threads, int) else None


def unfinished_plan(folder: Path) -> dict[str, Any] | None:
    """The plan of an unfinished scan that has got as far as having something to lose."""
    plan = folder / PARTIAL / "plan.json"
    return read_json(plan) if CorpusStore.exists(folder / PARTIAL) and plan.is_file() else None


def can_continue(folder: Path) -> bool:
    """Is there an unfinished scan with something to lose?"""
    return unfinished_plan(folder) is not None


def refuse_foreign(folder: Path) -> None:
    """A folder with anything that is not memlens' is no place for an index."""
    foreign = foreign_entries(folder)
    if foreign:
        raise IndexFolderError(
            f"{folder} holds '{foreign[0]}', which is not part of an index; choose an empty or new folder with -o"
        )


def refuse_newer(folder: Path) -> None:
    """An index of a newer memlens is not compared with a plan: this one does not know what its parts mean."""
    with explain_os_errors(folder):
        version = read_json(folder / MANIFEST).get("schema") if is_complete(folder) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise IndexFolderError(
            f"{folder} holds an index of a newer memlens (schema version {version}, this one reads up to "
            f"{SCHEMA_VERSION}); choose another folder with -o, install a newer memlens, or replace it with --fresh"
        )


def refuse_inside(folder: Path, sources: tuple[str, ...]) -> None:
    """An index inside the corpus' own folder would become part of the corpus."""
    for source in sources:
        place = Path(source)
        if place.is_dir() and folder.resolve().is_relative_to(place.resolve()):
            raise IndexFolderError(f"{folder} lies inside the corpus folder {source}; choose another folder with -o")


def is_finished(folder: Path, plan: dict[str, Any]) -> bool:
    """Is the very index that is wanted there already? One of something else is refused."""
    if not is_complete(folder):
        return False
    other = difference(recorded_plan(folder), plan)
    unfinished = unfinished_plan(folder)
    if other and unfinished == plan:
        return False
    if other:
        raise IndexFolderError(
            f"{folder} holds an index of {other}; choose another folder with -o, or replace it with --fresh"
        )
    manifest = Manifest.read(folder)
    for name in (*SCAN_TABLES, *(name for name in OPTIONAL_TABLES if name in manifest.files)):
        if not is_as_noted(folder / name, manifest.files.get(name)):
            raise IndexFolderError(f"{folder / name} is missing or damaged; scan again with --fresh")
    if unfinished is None or unfinished == plan:
        throw_partial_away(folder)  # left by a scan that was killed while tidying up
    return True


def begin(folder: Path, plan: dict[str, Any], resume: bool) -> None:
    """Make sure that what is in partial/ is this very scan, or nothing."""
    unfinished = unfinished_plan(folder) if resume else None
    if unfinished is not None:
        other = difference(unfinished, plan)
        if other:
            raise IndexFolderError(
                f"{folder} holds an unfinished scan of {other}; repeat that command to continue it, "
                "or start over with --fresh"
            )
        _note_machine(folder)
        return
    refuse_annotations(folder)
    with explain_os_errors(folder):
        throw_partial_away(folder)
        (folder / PARTIAL).mkdir()
    write_json(folder / PARTIAL / "plan.json", plan)
    _note_machine(folder)


def _note_machine(folder: Path) -> None:
    known, ours = scanned_with(folder), made_with()
    if ours not in known:
        write_sealed(folder / PARTIAL / _MACHINES, {"made_with": [*known, ours]})


def scanned_with(folder: Path) -> list[dict[str, str]]:
    """With what an unfinished scan was worked on, in that order; more than one where it was continued elsewhere."""
    path = folder / PARTIAL / _MACHINES
    return list(read_sealed(path)["made_with"]) if path.is_file() else []


def continued_elsewhere(folder: Path) -> str:
    """One line where the unfinished scan in `folder` was begun with another torch or processor; else empty."""
    known = scanned_with(folder) if can_continue(folder) else []
    return differing_hands([*known, made_with()]) if known else ""


def differing_hands(hands: Sequence[dict[str, str]]) -> str:
    """One line about parts of one scan that round differently; empty where all were made alike."""
    kinds = list(dict.fromkeys(f"torch {one.get('torch')} on {one.get('processor')}" for one in hands))
    if len(kinds) < 2:
        return ""
    return f"parts of this scan are of {' and of '.join(kinds)}; last bits may differ, so that ties may swap"


@contextmanager
def nothing_left_if_refused(folder: Path) -> Iterator[None]:
    """Take away what begin() wrote if the scan is refused before it has anything to keep; to be used under the lock."""
    try:
        yield
    except MemlensError:
        if (folder / PARTIAL).exists() and not can_continue(folder):
            throw_partial_away(folder)
        remove_if_empty(folder)
        raise


def remove_if_empty(folder: Path) -> None:
    """Remove a folder that contains nothing but its lock. Call this while holding the lock."""
    if {entry.name for entry in folder.iterdir()} <= {LOCK}:
        (folder / LOCK).unlink()
        folder.rmdir()


def refuse_annotations(folder: Path) -> None:
    if (folder / ANNOTATIONS).exists():
        raise IndexFolderError(
            f"{folder} holds people's annotations, which belong to its old triggers; move {ANNOTATIONS} away first, "
            "then run the same command again"
        )


def throw_partial_away(folder: Path) -> None:
    for mark in (SHARD, "corpus.json"):  # first what says that there is something to keep, since a kill may come
        (folder / PARTIAL / mark).unlink(missing_ok=True)
    if (folder / PARTIAL).exists():
        shutil.rmtree(folder / PARTIAL)


def take_manifest_away(folder: Path) -> None:
    """Make an index a folder of tables that may be replaced. Raises IndexFolderError if it has annotations."""
    is_index = (folder / MANIFEST).exists()  # else nobody can annotate it, and no lock file is needed
    try:
        with FileLock(folder / ANNOTATIONS_LOCK, timeout=0) if is_index else nullcontext():
            refuse_annotations(folder)
            (folder / MANIFEST).unlink(missing_ok=True)
            (folder / BACKUP).unlink(missing_ok=True)
            sync_folder(folder)  # else a power cut could leave new tables with the old manifest
    except Timeout as error:
        raise IndexFolderError(f"someone is annotating {folder}; choose another folder with -o") from error


def replace_tables(folder: Path, names: Collection[str]) -> None:
    """Put the new tables, of these names, in place; from here until the manifest is written this is no index."""
    take_manifest_away(folder)
    for name in (*DERIVED_TABLES, REPORT):
        (folder / name).unlink(missing_ok=True)
    if (folder / EXPERIMENTS).is_dir():
        shutil.rmtree(folder / EXPERIMENTS)
    for name in OPTIONAL_TABLES:
        if name not in names:
            (folder / name).unlink(missing_ok=True)
    for name in names:
        made = folder / PARTIAL / name
        if made.exists():  # else a call that was killed here has moved it already
            made.replace(folder / name)
    sync_folder(folder)


def difference(found: Any, wanted: dict[str, Any]) -> str:
    """The difference between the plan in a folder and the wanted one, in words; empty if they are equal."""
    if not isinstance(found, dict) or not isinstance(found.get("settings", {}), dict):
        return "something that cannot be read any more"
    for key, words in (("schema", "another schema version"), ("model", "another model"), ("corpus", "another corpus")):
        if found.get(key) != wanted[key]:
            return words
    theirs, ours = found.get("settings", {}), wanted["settings"]
    for name in ours:
        if theirs.get(name) != ours[name]:
            return f"the same model with --{name.replace('_', '-')} {theirs.get(name)} instead of {ours[name]}"
    if found.get("shard") != wanted.get("shard"):
        return f"shard {found['shard']}" if "shard" in found else "everything, not of one shard"
    return "" if found == wanted else "another batch plan"
