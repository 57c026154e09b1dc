"""The probe behind `info` measures the speed of batches; workers and threads are chosen by speed and memory."""

import time
from typing import Any

import pytest

import memlens
from memlens.scanner import autotune
from memlens.scanner.autotune import WorkerCount, estimate_scan, fastest, fastest_workers
from memlens.scanner.scanner import Worker
from memlens.settings import ScanSettings
from memlens.testing import tiny_model, tiny_tokenizer


@pytest.mark.parametrize(("pause", "least", "most"), [(0.02, 512, 4000), (0.3, 32, 32)])
def test_sentences_are_measured_together_unless_one_takes_too_long(
    monkeypatch: pytest.MonkeyPatch, pause: float, least: int, most: int
) -> None:
    plan = Worker.plan

    def slow(self: Worker, *sentences: Any) -> Any:
        time.sleep(pause)
        return plan(self, *sentences)

    monkeypatch.setattr(Worker, "plan", slow)
    model = memlens.load(tiny_model("gpt2", n_positions=64), tokenizer=tiny_tokenizer())
    estimate = estimate_scan(model, ScanSettings(threads=1), seconds=0.1)
    assert least <= estimate.probe_tokens <= most


def test_the_default_is_one_process_where_a_scan_is_short() -> None:
    model = memlens.load(tiny_model("llama"), tokenizer=tiny_tokenizer(), prove=False)
    assert fastest_workers(model, tokens=1000, worker_bytes=1, seconds=0.1).workers == 1


def test_what_was_asked_for_is_kept_and_the_cores_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "usable_cores", lambda: 8)
    model = memlens.load(tiny_model("llama"), tokenizer=tiny_tokenizer(), prove=False)
    assert fastest_workers(model, 10**12, 1, workers=4) == WorkerCount(4, 2)
    assert fastest_workers(model, 10**12, 1, workers=3, threads=1) == WorkerCount(3, 1)
    assert fastest_workers(model, 10**12, 1 << 60) == WorkerCount(1, 8), "no memory for a second worker"
    assert fastest_workers(model, 10**15, 1, threads=2, seconds=0.1) == WorkerCount(4, 2), (
        "threads of a scan that goes on"
    )


def test_more_workers_must_be_clearly_faster() -> None:
    counts = [WorkerCount(1, 4), WorkerCount(2, 2), WorkerCount(4, 1)]
    assert fastest(counts, lambda count: {1: 100, 2: 104, 4: 104}[count.workers]) == WorkerCount(1, 4)
    assert fastest(counts, lambda count: {1: 100, 2: 150, 4: 151}[count.workers]) == WorkerCount(2, 2)
    assert fastest(counts, lambda count: {1: 100, 2: 150, 4: 170}[count.workers]) == WorkerCount(4, 1)
