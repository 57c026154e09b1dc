"""Faults of a process, a disk or a clock: the same index after resume, or a clear refusal."""

import errno
import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from scale_helpers import TEXTS, Scans, tables_of

import memlens
from full_disk import files_no_larger_than
from memlens import files
from memlens.errors import FilesError, IndexFolderError
from memlens.index import staging
from memlens.index.format import SCAN_TABLES

# Loads everything once, then forks a scan for each line it is sent, so that many can be killed in a short time. A scan
# that hangs says where and ends, and none of them ends as the process does that it was forked from.
NURSERY = """
import faulthandler, os, sys, traceback
from pathlib import Path
import torch
torch.set_num_threads(1)
from memlens.index.build import build_index
from memlens.models.load import load
from memlens.settings import CorpusSettings, ScanSettings
model, out, *texts = sys.argv[1:]
loaded = load(model, prove=False)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(300, exit=True)
        print("pid", os.getpid(), flush=True)
        tell = lambda stage, *numbers: print(stage, *numbers, flush=True)
        settings = ScanSettings(top=5, batch_tokens=64, threads=1)
        try:
            build_index(loaded, CorpusSettings(tuple(texts)), settings, Path(out), save_seconds=0, progress=tell)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print("\\nend", code, flush=True)  # on a line of its own: the child may have been killed in the middle of one
"""


def one_run(nursery: subprocess.Popen[str], steps: int | None) -> int:
    """Run a scan and kill it when it has reported this many steps. Returns its exit code."""
    assert nursery.stdin is not None and nursery.stdout is not None
    nursery.stdin.write("go\n")
    nursery.stdin.flush()
    child = int(nursery.stdout.readline().split()[1])
    for step, line in enumerate(nursery.stdout, start=1):
        if line.startswith("end"):
            return int(line.split()[1])
        if step == steps:
            with suppress(ProcessLookupError):  # it has ended
                os.kill(child, signal.SIGKILL)
    raise AssertionError("the nursery has ended")


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.sweep)])
def test_a_driver_killed_at_random_moments_loses_nothing(small_checkpoint, alone, tmp_path, kills: int) -> None:
    out = tmp_path / "index"
    command = [sys.executable, "-c", NURSERY, str(small_checkpoint), str(out), *TEXTS]
    moments = random.Random(20)
    killed = complete = 0
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    ) as nursery:
        while killed < kills:
            ended = one_run(nursery, moments.randint(1, 40))
            assert ended in (0, -signal.SIGKILL)
            killed += ended != 0
            if (out / "manifest.json").is_file():
                complete += 1
                assert tables_of(out) == tables_of(alone)
                out.rename(tmp_path / f"complete{complete}")  # and from the beginning
            elif out.is_dir():
                with pytest.raises(IndexFolderError):
                    memlens.open_index(out)
        assert one_run(nursery, None) == 0 and nursery.stdin is not None
        nursery.stdin.close()
    assert tables_of(out) == tables_of(alone)
    assert memlens.check(out).is_whole and not (out / "partial").exists()


def test_a_full_disk_is_one_line_and_the_scan_goes_on_when_there_is_room(scans: Scans, tmp_path: Path) -> None:
    refused = 0
    for size in (500, 5_000, 20_000, 40_000, 60_000, 90_000):
        with files_no_larger_than(size):
            try:
                scans.run(tmp_path)
            except FilesError as error:
                refused += 1
                assert "cannot write" in str(error) and "\n" not in str(error)
                with pytest.raises(IndexFolderError):
                    memlens.open_index(tmp_path)
    assert refused >= 3, "several stages ran out of room"
    scans.end(tmp_path)
    assert not list(tmp_path.rglob("*.part"))


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


@pytest.mark.parametrize("name", ["corpus.parquet", "tokens.bin", "offsets.npy", "fresh_from.npy", "batches.npz"])
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
    staging.replace_tables(folder, SCAN_TABLES)
    assert synced == [(False, True), (False, False)]


def test_a_disk_that_cannot_lock_is_not_called_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(FilesError, match="No locks available"), files.lock_for_writing(tmp_path / ".lock"):
        pass
