"""Local workers: the same bytes as one process, whoever is killed, stopped or orphaned."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from scale_helpers import OPTIONS, TEXTS, children_of, interrupting_after, is_alive, start, tables_of

import memlens
from memlens.errors import IndexFolderError, ModelError, SettingError, WorkerError
from memlens.scanner import executors
from memlens.testing import tiny_model, tiny_tokenizer


def test_four_workers_give_the_bytes_of_one_process(small_checkpoint: Path, alone: Path, tmp_path: Path) -> None:
    fed: list[int] = []
    memlens.scan(
        small_checkpoint,
        TEXTS,
        out=tmp_path,
        workers=4,
        progress=lambda stage, done, total: fed.append(done) if stage == "scan" else None,
        **OPTIONS,
    )
    assert tables_of(tmp_path) == tables_of(alone)
    assert fed == sorted(fed) and len(fed) > 50, "batches of all workers are counted"
    first, second = memlens.open_index(tmp_path).manifest, memlens.open_index(alone).manifest
    assert first == second, "nothing in an index says how many workers made it"


def test_a_model_in_memory_and_one_killed_worker(alone: Path, tmp_path: Path) -> None:
    killed: list[int] = []

    def kill_one(stage: str, done: int, total: int | None) -> None:
        if stage == "scan" and done > 0 and not killed:
            killed.append(children_of(os.getpid())[0])
            os.kill(killed[0], signal.SIGKILL)

    memlens.scan(
        tiny_model("llama"), TEXTS, out=tmp_path, tokenizer=tiny_tokenizer(), workers=2, progress=kill_one, **OPTIONS
    )
    assert killed and not is_alive(killed[0])
    assert tables_of(tmp_path) == tables_of(alone)


def test_ctrl_c_lets_workers_save_and_fewer_workers_continue(
    small_checkpoint: Path, alone: Path, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        memlens.scan(small_checkpoint, TEXTS, out=tmp_path, workers=2, progress=interrupting_after(9), **OPTIONS)
    assert not children_of(os.getpid()), "no worker is left behind"
    assert list((tmp_path / "partial" / "parts").glob("*.npz"))
    with pytest.raises(IndexFolderError, match="unfinished scan"):
        memlens.open_index(tmp_path)
    steps: list[int] = []
    memlens.scan(small_checkpoint, TEXTS, out=tmp_path, progress=lambda s, done, total: steps.append(done), **OPTIONS)
    assert steps[0] > 0, "what the workers had done is kept"
    assert tables_of(tmp_path) == tables_of(alone)


def test_ctrl_c_twice_ends_at_once_and_loses_nothing_that_was_saved(
    small_checkpoint: Path, alone: Path, tmp_path: Path
) -> None:
    process = start(small_checkpoint, tmp_path, workers=2, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("scan") and int(line.split()[1]) > 2000:
            break
    workers = children_of(process.pid)
    assert len(workers) == 2
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)  # they cannot save any more, as if in a very long batch
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None, "it waits for the workers' batches"
    process.send_signal(signal.SIGINT)
    process.stdout.close()
    assert process.wait(timeout=60) != 0
    assert not any(is_alive(worker) for worker in workers)
    memlens.scan(small_checkpoint, TEXTS, out=tmp_path, workers=1, **OPTIONS)
    assert tables_of(tmp_path) == tables_of(alone)


def test_workers_of_a_killed_driver_end_and_a_new_driver_waits_for_them(
    small_checkpoint: Path, alone: Path, tmp_path: Path
) -> None:
    process = start(small_checkpoint, tmp_path, workers=2)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("scan") and int(line.split()[1]) > 1000:
            break
    workers = children_of(process.pid)
    os.kill(workers[0], signal.SIGSTOP)  # one that cannot notice at once
    process.kill()
    process.stdout.close()
    process.wait()
    before = len(list((tmp_path / "partial" / "parts").glob("*.npz")))
    assert before >= 1
    threading.Timer(1.0, os.kill, (workers[0], signal.SIGCONT)).start()
    began = time.monotonic()
    memlens.scan(small_checkpoint, TEXTS, out=tmp_path, workers=1, **OPTIONS)
    assert time.monotonic() - began > 0.9, "it began only when the last old worker was gone"
    while any(is_alive(worker) for worker in workers):  # one that was still loading ends as soon as it looks around
        assert time.monotonic() - began < 120
        time.sleep(0.1)
    assert tables_of(tmp_path) == tables_of(alone)


def test_a_worker_that_dies_again_and_again_is_one_clear_line(
    small_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "RETRIES", 0)

    def kill_all(stage: str, done: int, total: int | None) -> None:
        if stage == "scan" and done > 0:
            for worker in children_of(os.getpid()):
                os.kill(worker, signal.SIGKILL)

    with pytest.raises(WorkerError, match=r"worker process \d was ended by SIGKILL"):
        memlens.scan(
            small_checkpoint, TEXTS[0], out=tmp_path, workers=2, progress=kill_all, top=5, threads=1, batch_tokens=64
        )
    assert not children_of(os.getpid())


def test_what_a_worker_refuses_arrives_as_the_same_error(tmp_path: Path) -> None:
    network = tiny_model("llama")
    model = memlens.load(network, tokenizer=tiny_tokenizer())
    network.model.layers[1].mlp.up_proj.weight.data[17] = float("nan")
    with pytest.raises(ModelError, match=r"L1N17 .* NaN"):
        memlens.scan(model, TEXTS[0], out=tmp_path, workers=2, **OPTIONS)


def test_a_model_that_was_changed_in_memory_is_scanned_as_it_is(
    small_checkpoint: Path, alone: Path, tmp_path: Path
) -> None:
    model = memlens.load(small_checkpoint)
    model.network.model.layers[0].mlp.down_proj.weight.data *= 2
    memlens.scan(model, TEXTS[0], out=tmp_path / "one", workers=1, **OPTIONS)
    memlens.scan(model, TEXTS[0], out=tmp_path / "two", workers=2, **OPTIONS)
    assert tables_of(tmp_path / "two") == tables_of(tmp_path / "one")


def test_a_model_that_cannot_be_copied_is_refused_in_one_line(tmp_path: Path) -> None:
    network = tiny_model("llama")
    network.helper = lambda: None
    with pytest.raises(ModelError, match="cannot be copied to other processes"):
        memlens.scan(network, TEXTS[0], out=tmp_path, tokenizer=tiny_tokenizer(), workers=2, **OPTIONS)


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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": 0}, "--workers is 0"),
        ({"workers": 10**9}, "--workers"),
        ({"executor": "slurm"}, "local, ray"),
        ({"ray_address": "auto"}, "--executor ray only"),
        ({"gpus_per_worker": 1}, "--executor ray only"),
        ({"shard": "0/4"}, "1 to 4"),
        ({"layer_budget": 0}, "--layer-budget is 0"),
    ],
)
def test_wrong_ways_to_run_are_refused_before_anything_is_written(
    small_checkpoint: Path, tmp_path: Path, options: dict, words: str
) -> None:
    with pytest.raises(SettingError, match=words):
        memlens.scan(small_checkpoint, TEXTS[0], out=tmp_path / "index", **options)
    assert not (tmp_path / "index").exists()
