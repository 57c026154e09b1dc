"""Damaged and outdated tables are rebuilt from whole ones, with the same settings and the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import memlens
from memlens.errors import IndexFolderError
from memlens.index.reader import Index


@pytest.fixture(scope="module")
def complete(tiny_gpt2_values: Index, tmp_path_factory: pytest.TempPathFactory) -> Index:
    import shutil

    folder = shutil.copytree(tiny_gpt2_values.folder, tmp_path_factory.mktemp("complete") / "index")
    memlens.patterns(folder, seed=3)
    memlens.experiment(folder, ["agreement", "refinement", "predictive-values"], sample=9, seed=5, threads=1)
    return memlens.open_index(folder)


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


TABLES = ("values", "keys", "tokens", "patterns", "names", "experiments/agreement", "experiments/refinement",
          "experiments/prefixes", "experiments/predictive-values-bins")  # fmt: skip


@pytest.mark.parametrize("table", TABLES)
def test_a_damaged_table_is_made_again_byte_for_byte(
    complete: Index, copy_of: Callable[..., Index], table: str
) -> None:
    index = copy_of(complete)
    path = index.folder / f"{table}.parquet"
    before = {file: file.read_bytes() for file in index.folder.rglob("*.parquet")}
    damage(path)
    assert not memlens.check(index).is_whole
    assert memlens.repair(index) == [f"{table}.parquet"]
    assert memlens.check(index).is_whole
    assert {file: file.read_bytes() for file in index.folder.rglob("*.parquet")} == before


def test_a_whole_index_is_left_alone(complete: Index, copy_of: Callable[..., Index]) -> None:
    index = copy_of(complete)
    before = (index.folder / "manifest.json").read_bytes()
    assert memlens.repair(index) == [] and (index.folder / "manifest.json").read_bytes() == before


def test_an_outdated_table_is_made_again(complete: Index, copy_of: Callable[..., Index]) -> None:
    index = copy_of(complete)
    memlens.values(index.folder, top=4, threads=1)
    states = {finding.file: finding.state for finding in memlens.check(index).findings}
    assert states["experiments/agreement.parquet"] == "outdated"
    assert "experiments/agreement.parquet" in memlens.repair(index)
    assert "outdated" not in {finding.state for finding in memlens.check(index).findings}


@pytest.mark.parametrize("table", ["triggers", "corpus", "memories", "vocabulary"])
def test_what_the_scan_found_cannot_be_made_from_the_rest(
    complete: Index, copy_of: Callable[..., Index], table: str
) -> None:
    index = copy_of(complete)
    damage(index.folder / f"{table}.parquet")
    with pytest.raises(IndexFolderError, match="only a scan can rebuild it; scan again with --fresh"):
        memlens.repair(index.folder)


def test_every_table_says_what_it_was_made_with(complete: Index) -> None:
    for name, entry in complete.manifest.content["files"].items():
        assert set(entry["made_with"]) == {"memlens", "torch", "processor"}, name
    assert complete.manifest.values.made_from == {"triggers": complete.manifest.sha256("triggers")}


def flip_character(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] = ord("x") if content[place] != ord("x") else ord("y")
    path.write_bytes(content)


@pytest.mark.parametrize("part", [0.01, 0.3, 0.6, 0.9])
def test_a_damaged_manifest_is_restored_from_its_backup(
    complete: Index, copy_of: Callable[..., Index], part: float
) -> None:
    folder = copy_of(complete).folder
    path = folder / "manifest.json"
    before = path.read_bytes()
    flip_character(path, int(part * len(before)))
    damaged = path.read_bytes()
    assert memlens.repair(folder) == ["manifest.json"]
    assert path.read_bytes() == before and (folder / "manifest.damaged.json").read_bytes() == damaged


def test_a_manifest_that_is_lost_with_its_backup_cannot_be_restored(
    complete: Index, copy_of: Callable[..., Index]
) -> None:
    folder = copy_of(complete).folder
    (folder / "manifest.json").write_bytes(b"{")
    (folder / "manifest.backup.json").unlink()
    with pytest.raises(IndexFolderError, match=r"damaged \(not JSON\); its backup cannot be used either"):
        memlens.repair(folder)


def test_a_manifest_without_permission_is_not_called_damaged(
    complete: Index, copy_of: Callable[..., Index], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy_of(complete).folder

    def deny(*_: object, **__: object) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", deny)
    with pytest.raises(IndexFolderError, match=r"Permission denied; check the path and its permissions$"):
        memlens.open_index(folder)
