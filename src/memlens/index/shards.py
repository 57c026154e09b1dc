"""Shards: a scan split over machines that share nothing (`--shard 3/16`), merged into one index.

The folder of a finished shard is not an index. Its partial/ contains

    shard.json       written last, so its presence means complete: the plan, the shard's number, checksums of its files
    parts/           the saved states
    corpus.parquet, tokens.bin, ...    the text, in shard 1 only, because all shards have the same text

Merging needs neither the model nor the original text. It needs every shard of one plan exactly once.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from memlens.corpus.store import BATCHES, FLAT, CorpusStore, read_batches
from memlens.errors import IndexFolderError, MemlensError, SettingError
from memlens.files import (
    FileFacts,
    checksum,
    explain_os_errors,
    facts_of,
    has_size,
    is_intact,
    lock_for_writing,
    parse_document,
    read_sealed,
    replacing,
    write_sealed,
)
from memlens.index import staging
from memlens.index.format import CORPUS, LOCK, PARTIAL, PARTS, SCHEMA_VERSION, SHARD, VOCABULARY, Count
from memlens.index.tables import JoinedParts
from memlens.progress import Progress, no_progress
from memlens.scanner.state import LayerShape, PartFolder, ShardNumber
from memlens.settings import ScanSettings

_SHARED_FILES = (CORPUS, VOCABULARY, *FLAT)  # equal in all shards, so only shard 1 keeps them


class ShardDocument(msgspec.Struct, frozen=True):
    """The content of shard.json."""

    schema: int
    plan: dict[str, Any]
    model: dict[str, Any]
    shapes: dict[int, LayerShape]
    counts: dict[str, Count]
    tokens: str  # checksums of the encoded text, which must be equal in all shards
    scanned_with: list[dict[str, str]]
    files: dict[str, FileFacts]


@dataclass(frozen=True)
class Shard:
    """A finished shard of a scan."""

    folder: Path
    id: ShardNumber
    document: ShardDocument

    @property
    def partial(self) -> Path:
        return self.folder / PARTIAL

    @property
    def plan(self) -> dict[str, Any]:
        """The plan, which is the same for all shards."""
        return {name: value for name, value in self.document.plan.items() if name != "shard"}


def holds_shard(folder: Path, plan: dict[str, Any]) -> bool:
    """Return True if the folder holds the finished shard of this plan. Raises IndexFolderError if a file is damaged."""
    path = folder / PARTIAL / SHARD
    if "shard" not in plan or not path.is_file():
        return False
    shard = open_shard(folder)
    if shard.document.plan != plan:
        return False
    for name, facts in shard.document.files.items():
        if not has_size(shard.partial / name, facts):
            raise _damaged(shard, name)
    return True


def finish_shard(
    folder: Path, model: dict[str, Any], plan: dict[str, Any], shapes: dict[int, LayerShape], store: CorpusStore
) -> None:
    """Turn a completed scan of a shard's batches into a finished shard."""
    partial = folder / PARTIAL
    shard = ShardNumber.parse(plan["shard"])
    names = [BATCHES, *(f"{PARTS}/{path.name}" for path in sorted((partial / PARTS).glob("*.npz")))]
    names += _SHARED_FILES if shard.number == 1 else ()
    content = {
        "schema": SCHEMA_VERSION,
        "plan": plan,
        "model": model,
        "shapes": {str(layer): list(shape) for layer, shape in shapes.items()},
        "counts": store.counts,
        "tokens": " ".join(checksum(partial / name) for name in FLAT),
        "scanned_with": staging.scanned_with(folder),
        "files": {name: facts_of(partial / name) for name in names},
    }
    write_sealed(partial / SHARD, content)
    if shard.number != 1:
        for name in _SHARED_FILES:
            (partial / name).unlink(missing_ok=True)


def open_shard(folder: Path) -> Shard:
    """Return the finished shard in a folder without verifying its files. Raises IndexFolderError if there is none."""
    path = folder / PARTIAL / SHARD
    if not path.is_file():
        if (folder / PARTIAL).is_dir():
            reason = "is an unfinished scan; repeat its `memlens scan --shard` command to finish it"
        else:
            reason = "is not a shard of a scan; make shards with `memlens scan --shard I/N`"
        raise IndexFolderError(f"{folder} {reason}")
    content = read_sealed(path)
    if content.get("schema") != SCHEMA_VERSION:
        raise IndexFolderError(
            f"{folder} has schema version {content.get('schema')}, but this memlens reads {SCHEMA_VERSION}; "
            "use the memlens that wrote it or scan again"
        )
    try:
        document = parse_document(content, ShardDocument)
        return Shard(folder, ShardNumber.parse(document.plan["shard"]), document)
    except (ValueError, KeyError, AttributeError, TypeError, SettingError) as error:
        raise IndexFolderError(f"{path} is damaged ({error}); scan this shard again") from error


def merge_shards(
    folders: Sequence[Path], folder: Path, *, resume: bool = True, progress: Progress = no_progress
) -> None:
    """Merge all shards, in any order, into an index in `folder`."""
    from memlens.index.build import publish

    shards = sorted((open_shard(shard_folder) for shard_folder in folders), key=lambda shard: shard.id)
    if folder.resolve() in {shard_folder.resolve() for shard_folder in folders}:
        raise SettingError(f"-o {folder} is one of the shards; choose another folder for the index")
    _check_plans(shards)
    _check_numbers(shards)
    if resume:
        staging.check_not_newer(folder)
    with explain_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        staging.check_only_index_files(folder)
    first = shards[0]
    with lock_for_writing(folder / LOCK):
        if resume and staging.holds_index(folder, first.plan):
            return
        try:
            for number, shard in enumerate(shards):
                progress("check", number, len(shards))
                for name, facts in shard.document.files.items():
                    if not is_intact(shard.partial / name, facts):
                        raise _damaged(shard, name)
            progress("tables", 0, None)
            scanned, store = _join_parts(shards), CorpusStore(first.partial)
        except MemlensError:
            staging.remove_if_empty(folder)
            raise
        staging.prepare_partial(folder, first.plan, resume)
        with explain_os_errors(folder):
            for name in (CORPUS, VOCABULARY):
                with replacing(folder / PARTIAL / name) as beside:
                    shutil.copyfile(first.partial / name, beside)
            machines: list[dict[str, str]] = []
            for shard in shards:
                machines += [machine for machine in shard.document.scanned_with if machine not in machines]
            vocabulary = first.document.files[VOCABULARY]
            publish(folder, scanned, store, vocabulary, first.document.model, first.plan, machines)


def _check_plans(shards: Sequence[Shard]) -> None:
    """Raise IndexFolderError unless all shards come from one scan."""
    first = shards[0]
    for shard in shards[1:]:
        difference = staging.describe_difference(shard.plan, first.plan)
        if not difference and shard.document.tokens != first.document.tokens:
            difference = "another division of the corpus into sentences"
        if difference:
            raise IndexFolderError(
                f"{shard.folder} is not from the same scan as {first.folder}: it is a shard of a scan of {difference}; "
                "make all shards with the same command"
            )
        if shard.id.of != first.id.of:
            raise IndexFolderError(
                f"{first.folder} is shard {first.id}, but {shard.folder} is shard {shard.id}; merge the shards of "
                "one scan"
            )


def _check_numbers(shards: Sequence[Shard]) -> None:
    """Raise IndexFolderError unless every shard of the plan is given exactly once."""
    folders: dict[int, Path] = {}
    for shard in shards:
        if shard.id.number in folders:
            raise IndexFolderError(
                f"{folders[shard.id.number]} and {shard.folder} are both shard {shard.id}; give each shard once"
            )
        folders[shard.id.number] = shard.folder
    total = shards[0].id.of
    missing = [str(number) for number in range(1, total + 1) if number not in folders]
    if missing:
        names = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise IndexFolderError(
            f"of {total} shards, these are missing: {names}; scan them, starting with --shard {missing[0]}/{total}"
        )


def _damaged(shard: Shard, name: str) -> IndexFolderError:
    return IndexFolderError(f"{shard.partial / name} is missing or damaged; scan shard {shard.id} again with --fresh")


def _join_parts(shards: Sequence[Shard]) -> JoinedParts:
    first = shards[0]
    try:
        settings = ScanSettings(**{**first.plan["settings"], "layers": tuple(first.plan["settings"]["layers"])})
        shapes = first.document.shapes
        batches = read_batches(first.partial / BATCHES)
        joined = JoinedParts([PartFolder(shard.partial / PARTS) for shard in shards], shapes, settings)
    except (TypeError, KeyError, ValueError, SettingError) as error:
        raise IndexFolderError(f"{first.partial / SHARD} is damaged; scan shard {first.id} again") from error
    if not all(joined.done(layer).contains_all(batches) for layer in shapes):
        raise IndexFolderError("the shards do not contain every batch of the plan; scan them again")
    return joined
