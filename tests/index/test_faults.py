"""After a fault of a process, a disk or a clock, a resumed scan gives the same index or a clear error."""

import errno
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from scale_helpers import Scans

import memlens
from memlens import files
from memlens.errors import FilesError, IndexFolderError
from memlens.index import staging
from memlens.index.format import SCAN_TABLES


def test_a_clock_that_is_set_back_changes_nothing(scans, tmp_path, monkeypatch) -> None:
    now = iter(range(2_000_000_000, 0, -86_400))
    monkeypatch.setattr(time, "time", lambda: float(next(now)))
    monkeypatch.setattr(time, "time_ns", lambda: next(now) * 10**9)
    for batches in (10, 40):
        scans.stop(tmp_path, batches)
        for path in tmp_path.rglob("*"):
            os.utime(path, (0, 0))
    scans.end(tmp_path)


def test_a_scan_that_is_interrupted_several_times_has_one_part(scans: Scans, tmp_path: Path) -> None:
    for _ in range(3):
        scans.stop(tmp_path, 12)
    folder = tmp_path / "partial" / "parts"
    (folder / "0123.npz.part").write_bytes(b"half")
    scans.stop(tmp_path, 3)
    assert len(list(folder.iterdir())) == 1
    scans.end(tmp_path)


def test_parts_of_other_layer_budgets_are_used(scans: Scans, tmp_path: Path) -> None:
    scans.stop(tmp_path, 12)
    scans.stop(tmp_path, 30, layer_budget=2)
    assert len(list((tmp_path / "partial" / "parts").iterdir())) > 1
    scans.go_on(tmp_path)


def test_a_damaged_part_can_be_removed_and_its_batches_are_done_again(scans: Scans, tmp_path: Path) -> None:
    scans.stop(tmp_path, 20, signal.SIGTERM)
    (part,) = (tmp_path / "partial" / "parts").glob("*.npz")
    whole = part.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 16
    for damaged in (bytes(flipped), whole[:-100], b""):
        part.write_bytes(damaged)
        with pytest.raises(IndexFolderError, match=f"{part.name} is damaged; remove this one file .* or start over"):
            scans.run(tmp_path)
    part.unlink()
    scans.end(tmp_path)


@pytest.mark.parametrize("name", ["corpus.parquet", "tokens.bin", "offsets.bin", "fresh_from.bin", "batches.npz"])
def test_a_bit_flipped_while_a_scan_is_interrupted_is_refused(scans: Scans, tmp_path: Path, name: str) -> None:
    scans.stop(tmp_path, 3)
    path = tmp_path / "partial" / name
    content = bytearray(path.read_bytes())
    content[content.index(b"NUMPY") + 130 if name == "batches.npz" else len(content) * 3 // 4] ^= 1
    path.write_bytes(content)
    with pytest.raises(IndexFolderError, match=f"{name} is (missing or )?damaged"):
        scans.run(tmp_path)
    with pytest.raises(IndexFolderError):
        memlens.open_index(tmp_path)


def test_the_old_manifest_is_gone_for_good_before_any_table_is_replaced(alone, tmp_path, monkeypatch) -> None:

    folder = Path(shutil.copytree(alone, tmp_path / "index"))
    (folder / "partial").mkdir()
    shutil.copy(folder / "memories.parquet", folder / "partial" / "corpus.parquet")
    before = (folder / "corpus.parquet").read_bytes()
    synced: list[tuple[bool, bool]] = []

    def note(path: Path) -> None:
        synced.append(((path / "manifest.json").exists(), (path / "corpus.parquet").read_bytes() == before))

    monkeypatch.setattr(staging, "sync_folder", note)
    staging.replace_tables(folder, folder / "partial", SCAN_TABLES)
    assert synced == [(False, True), (False, False)]


def test_a_disk_that_cannot_lock_is_not_called_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl", reason="this system locks files in another way")

    def refuse(handle: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(FilesError, match="No locks available"), files.lock_for_writing(tmp_path / ".lock"):
        pass
