"""Local workers give the bytes of one process, also after a kill or an interruption."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from scale_helpers import OPTIONS, TEXTS, Scans, start, tables_of

import memlens
from memlens.errors import IndexFolderError, ModelError
from memlens.testing import tiny_model, tiny_tokenizer
from processes import list_workers, wait_until_ended


@pytest.mark.sweep
def test_four_workers_give_the_bytes_of_one_process(scans: Scans, tmp_path: Path) -> None:
    fed: list[int] = []
    scans.end(tmp_path, workers=4, progress=lambda stage, done, total: fed.append(done) if stage == "scan" else None)
    assert fed == sorted(fed) and len(fed) > 8, "segments of all workers are counted"
    first, second = memlens.open_index(tmp_path).manifest, memlens.open_index(scans.alone).manifest
    assert first == second, "nothing in an index says how many workers made it"


def test_a_model_in_memory_and_one_killed_worker(alone: Path, tmp_path: Path) -> None:
    killed: list[int] = []

    def kill_one(stage: str, done: int, total: int | None) -> None:
        if stage == "scan" and done > 0 and not killed:
            killed.append(list_workers(os.getpid())[0])
            os.kill(killed[0], signal.SIGKILL)

    model = memlens.load(tiny_model("llama"), tokenizer=tiny_tokenizer())
    Scans(model, alone).end(tmp_path, workers=2, progress=kill_one)
    assert killed
    wait_until_ended(killed)


@pytest.mark.sweep
def test_ctrl_c_keeps_finished_segments_and_fewer_workers_continue(scans: Scans, tmp_path: Path) -> None:
    scans.stop(tmp_path, 3, workers=2)
    assert not list_workers(os.getpid()), "no worker is left behind"
    with pytest.raises(IndexFolderError, match="unfinished scan"):
        memlens.open_index(tmp_path)
    scans.go_on(tmp_path)


@pytest.mark.sweep
def test_workers_of_a_killed_driver_end_and_the_next_driver_continues(small_checkpoint, scans, tmp_path) -> None:
    with start(small_checkpoint, tmp_path, until=1000) as process:
        workers = list_workers(process.pid)
        process.kill()
    assert len(workers) == 2
    wait_until_ended(workers)
    assert len(list((tmp_path / "partial" / "parts").glob("*.npz"))) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "partial"]
    scans.go_on(tmp_path)


@pytest.mark.sweep
def test_a_model_that_was_changed_in_memory_is_scanned_as_it_is(small_checkpoint: Path, tmp_path: Path) -> None:
    model = memlens.load(small_checkpoint)
    model.network.model.layers[0].mlp.down_proj.weight.data *= 2
    for workers in (1, 2):
        memlens.scan(model, TEXTS[0], out=tmp_path / str(workers), workers=workers, **OPTIONS)
    assert tables_of(tmp_path / "2") == tables_of(tmp_path / "1")


def test_a_model_that_cannot_be_copied_is_refused_in_one_line(tmp_path: Path) -> None:
    network = tiny_model("llama")
    network.helper = lambda: None
    with pytest.raises(ModelError, match="cannot be copied to other processes"):
        memlens.scan(network, TEXTS[0], out=tmp_path, tokenizer=tiny_tokenizer(), workers=2, **OPTIONS)


@pytest.mark.sweep
def test_a_script_without_a_main_guard_can_use_workers(small_checkpoint: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, memlens\n"
        "print('once')\n"
        "memlens.scan(sys.argv[1], sys.argv[2], out=sys.argv[3], workers=2, threads=1, top=3, batch_tokens=512)\n"
    )
    command = [sys.executable, str(script), str(small_checkpoint), TEXTS[0], str(tmp_path / "index")]
    ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert (ran.returncode, ran.stdout) == (0, "once\n"), ran.stderr
    assert memlens.open_index(tmp_path / "index").layers
