"""The index folder during a scan: checks of the folder, resuming, and publishing the new tables.

A new index is built in partial/ and moved into place when it is complete. Until then, an index that is being replaced
stays usable. partial/corpus.json marks a scan that can be resumed: the corpus stage writes it last, and
`remove_partial` deletes it first. Files that memlens did not write are never removed.
"""

import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from memlens.corpus.store import CorpusStore
from memlens.errors import IndexFolderError, MemlensError
from memlens.files import (
    explain_os_errors,
    is_intact,
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

_MACHINES = "made_with.json"  # in partial/: versions and processors used so far


def recorded_threads(folder: Path) -> int | None:
    """Return the number of threads of the index or unfinished scan in `folder`, or None if it holds neither.

    A scan can only be resumed with the same number of threads, which is part of the plan.
    """
    with explain_os_errors(folder):
        plan = read_partial_plan(folder)
        if plan is None and is_complete(folder):
            plan = recorded_plan(folder)
    settings = plan.get("settings") if isinstance(plan, dict) else None
    threads = settings.get("threads") if isinstance(settings, dict) else None
    return threads if isinstance(threads, int) else None


def read_partial_plan(folder: Path) -> dict[str, Any] | None:
    """Return the plan of an unfinished scan in this folder, or None."""
    plan = folder / PARTIAL / "plan.json"
    return read_json(plan) if CorpusStore.exists(folder / PARTIAL) and plan.is_file() else None


def has_resumable_scan(folder: Path) -> bool:
    """Return True if the folder holds an unfinished scan that can be resumed."""
    return read_partial_plan(folder) is not None


def check_only_index_files(folder: Path) -> None:
    """Raise IndexFolderError if the folder contains files that memlens did not write."""
    foreign = foreign_entries(folder)
    if foreign:
        raise IndexFolderError(
            f"{folder} holds '{foreign[0]}', which is not part of an index; choose an empty or new folder with -o"
        )


def check_not_newer(folder: Path) -> None:
    """Raise IndexFolderError if the folder holds an index written by a newer version of memlens."""
    with explain_os_errors(folder):
        version = read_json(folder / MANIFEST).get("schema") if is_complete(folder) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise IndexFolderError(
            f"{folder} holds an index of a newer memlens (schema version {version}, this one reads up to "
            f"{SCHEMA_VERSION}); choose another folder with -o, install a newer memlens, or replace it with --fresh"
        )


def check_outside_corpus(folder: Path, sources: tuple[str, ...]) -> None:
    """Raise IndexFolderError if the index would lie inside a corpus folder and so become part of the corpus."""
    for source in sources:
        place = Path(source)
        if place.is_dir() and folder.resolve().is_relative_to(place.resolve()):
            raise IndexFolderError(f"{folder} lies inside the corpus folder {source}; choose another folder with -o")


def holds_index(folder: Path, plan: dict[str, Any]) -> bool:
    """Return True if the folder already holds the index for this plan.

    Raises:
        IndexFolderError: The folder holds an index for a different plan, or a table is damaged.
    """
    if not is_complete(folder):
        return False
    other = describe_difference(recorded_plan(folder), plan)
    unfinished = read_partial_plan(folder)
    if other and unfinished == plan:
        return False
    if other:
        raise IndexFolderError(
            f"{folder} holds an index of {other}; choose another folder with -o, or replace it with --fresh"
        )
    manifest = Manifest.read(folder)
    for name in (*SCAN_TABLES, *(name for name in OPTIONAL_TABLES if name in manifest.files)):
        if not is_intact(folder / name, manifest.files.get(name)):
            raise IndexFolderError(f"{folder / name} is missing or damaged; scan again with --fresh")
    if unfinished is None or unfinished == plan:
        remove_partial(folder)  # left behind if the process was killed during cleanup
    return True


def prepare_partial(folder: Path, plan: dict[str, Any], resume: bool) -> None:
    """Prepare partial/ for this plan, or keep it if the scan is resumed. Raises IndexFolderError for another plan."""
    unfinished = read_partial_plan(folder) if resume else None
    if unfinished is not None:
        other = describe_difference(unfinished, plan)
        if other:
            raise IndexFolderError(
                f"{folder} holds an unfinished scan of {other}; repeat that command to continue it, "
                "or start over with --fresh"
            )
        _note_machine(folder)
        return
    check_no_annotations(folder)
    with explain_os_errors(folder):
        remove_partial(folder)
        (folder / PARTIAL).mkdir()
    write_json(folder / PARTIAL / "plan.json", plan)
    _note_machine(folder)


def _note_machine(folder: Path) -> None:
    machines, this_machine = scanned_with(folder), made_with()
    if this_machine not in machines:
        write_sealed(folder / PARTIAL / _MACHINES, {"made_with": [*machines, this_machine]})


def scanned_with(folder: Path) -> list[dict[str, str]]:
    """Return the versions and processors of an unfinished scan, in order of use."""
    path = folder / PARTIAL / _MACHINES
    return list(read_sealed(path)["made_with"]) if path.is_file() else []


def resumed_hardware_warning(folder: Path) -> str:
    """Return a warning if the unfinished scan in `folder` was started with another torch or processor, else ""."""
    machines = scanned_with(folder) if has_resumable_scan(folder) else []
    return mixed_hardware_warning([*machines, made_with()]) if machines else ""


def mixed_hardware_warning(machines: Sequence[dict[str, str]]) -> str:
    """Return a warning if parts of one scan were made with different torch versions or processors, else ""."""
    kinds = list(dict.fromkeys(f"torch {machine.get('torch')} on {machine.get('processor')}" for machine in machines))
    if len(kinds) < 2:
        return ""
    return f"parts of this scan were made with {' and with '.join(kinds)}; the last bits of coefficients may differ"


@contextmanager
def discard_partial_on_error(folder: Path) -> Iterator[None]:
    """Remove partial/ after a MemlensError if there is nothing to resume. The caller holds the lock."""
    try:
        yield
    except MemlensError:
        if (folder / PARTIAL).exists() and not has_resumable_scan(folder):
            remove_partial(folder)
        remove_if_empty(folder)
        raise


def remove_if_empty(folder: Path) -> None:
    """Remove a folder that contains only its lock file. The caller holds the lock."""
    if {entry.name for entry in folder.iterdir()} <= {LOCK}:
        (folder / LOCK).unlink()
        folder.rmdir()


def check_no_annotations(folder: Path) -> None:
    """Raise IndexFolderError if the folder holds annotations, which refer to the triggers that would be replaced."""
    if (folder / ANNOTATIONS).exists():
        raise IndexFolderError(
            f"{folder} holds annotations of its current triggers; move {ANNOTATIONS} away, then run the command again"
        )


def remove_partial(folder: Path) -> None:
    """Remove the state of an unfinished scan, or a finished shard."""
    for mark in (SHARD, "corpus.json"):  # first the files that mark a scan as resumable or a shard as finished
        (folder / PARTIAL / mark).unlink(missing_ok=True)
    if (folder / PARTIAL).exists():
        shutil.rmtree(folder / PARTIAL)


def remove_manifest(folder: Path) -> None:
    """Remove the manifest, so that tables can be replaced. Raises IndexFolderError if the index has annotations."""
    is_index = (folder / MANIFEST).exists()  # only an index can have annotations, so only an index needs the lock
    try:
        with FileLock(folder / ANNOTATIONS_LOCK, timeout=0) if is_index else nullcontext():
            check_no_annotations(folder)
            (folder / MANIFEST).unlink(missing_ok=True)
            (folder / BACKUP).unlink(missing_ok=True)
            sync_folder(folder)  # a power cut must not leave new tables with the old manifest
    except Timeout as error:
        raise IndexFolderError(
            f"{folder} is being annotated; try again later, or choose another folder with -o"
        ) from error


def replace_tables(folder: Path, source: Path, names: Collection[str]) -> None:
    """Move new tables from another folder into place and remove all other tables.

    The folder is not an index until the manifest is written.
    """
    remove_manifest(folder)
    old = [
        *(folder / name for name in (*DERIVED_TABLES, *OPTIONAL_TABLES, REPORT)),
        *folder.glob(f"{EXPERIMENTS}/*.parquet*"),
    ]
    for path in old:
        if path.relative_to(folder).as_posix() not in names:
            path.unlink(missing_ok=True)
    with suppress(OSError):  # the folder of experiments is missing or not empty
        (folder / EXPERIMENTS).rmdir()
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        if (source / name).exists():  # otherwise an interrupted call has already moved the table
            (source / name).replace(folder / name)
    for parent in {(folder / name).parent for name in (MANIFEST, *names)}:
        sync_folder(parent)


def describe_difference(recorded: Any, requested: dict[str, Any]) -> str:
    """Return how the recorded plan differs from the requested one, or "" if they are equal."""
    if not isinstance(recorded, dict) or not isinstance(recorded.get("settings", {}), dict):
        return "an unknown model (its plan cannot be read)"
    for key, words in (("schema", "another schema version"), ("model", "another model"), ("corpus", "another corpus")):
        if recorded.get(key) != requested[key]:
            return words
    old, new = recorded.get("settings", {}), requested["settings"]
    for name in new:
        if old.get(name) != new[name]:
            return f"the same model with --{name.replace('_', '-')} {old.get(name)} instead of {new[name]}"
    if recorded.get("shard") != requested.get("shard"):
        return f"shard {recorded['shard']}" if "shard" in recorded else "the whole corpus instead of one shard"
    return "" if recorded == requested else "another batch plan"
