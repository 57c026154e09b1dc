"""The probe behind `info` measures the speed of batches; workers and threads are chosen by speed and memory."""

import time
from pathlib import Path
from typing import Any

import pytest

import memlens
from memlens.errors import SettingError
from memlens.scanner import autotune
from memlens.scanner.autotune import WorkerCount, estimate_scan, fastest, fastest_workers
from memlens.scanner.scanner import Worker
from memlens.settings import ScanSettings
from memlens.testing import tiny_model, tiny_tokenizer


@pytest.mark.parametrize(("pause", "least", "most"), [(0.02, 512, 4000), (0.3, 32, 32)])
def test_sentences_are_measured_together_unless_one_takes_too_long(monkeypatch, pause, least, most) -> None:
    plan = Worker.plan

    def slow(self: Worker, *sentences: Any) -> Any:
        time.sleep(pause)
        return plan(self, *sentences)

    monkeypatch.setattr(Worker, "plan", slow)
    model = memlens.load(tiny_model("gpt2", n_positions=64), tokenizer=tiny_tokenizer())
    estimate = estimate_scan(model, ScanSettings(threads=1), seconds=0.1)
    assert least <= estimate.probe_tokens <= most


def test_a_short_scan_has_one_process_and_what_was_asked_for_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model = memlens.load(tiny_model("llama"), tokenizer=tiny_tokenizer(), prove=False)
    assert fastest_workers(model, tokens=1000, worker_bytes=1, seconds=0.1).workers == 1
    monkeypatch.setattr(autotune, "usable_cores", lambda: 8)
    assert fastest_workers(model, 10**12, 1, workers=4) == WorkerCount(4, 2), "the cores are shared"
    assert fastest_workers(model, 10**12, 1, workers=3, threads=1) == WorkerCount(3, 1)
    assert fastest_workers(model, 10**12, 1 << 60) == WorkerCount(1, 8), "no memory for a second worker"
    goes_on = fastest_workers(model, 10**15, 1, threads=2, seconds=0.1)
    assert goes_on == WorkerCount(4, 2), "threads of a scan that goes on"


@pytest.mark.parametrize(("speeds", "best"), [((100, 104, 104), 0), ((100, 150, 151), 1), ((100, 150, 170), 2)])
def test_more_workers_must_be_clearly_faster(speeds: tuple[int, ...], best: int) -> None:
    counts = [WorkerCount(1, 4), WorkerCount(2, 2), WorkerCount(4, 1)]
    assert fastest(counts, lambda count: speeds[counts.index(count)]) == counts[best]


def test_lists_that_would_fill_the_memory_are_refused_before_they_are_made(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The river runs to the sea.")
    model = memlens.load(tiny_model("gpt2", n_inner=100_000), tokenizer=tiny_tokenizer(), prove=False)
    with pytest.raises(SettingError, match=r"--top is 100000: .* 720\.0 GB, more than half .* lower --top"):
        memlens.scan(model, tmp_path / "text.txt", out=tmp_path / "index", top=100_000, workers=1)
    assert not (tmp_path / "index").exists()
    with pytest.raises(SettingError, match=r"240\.0 GB"):
        memlens.scan(model, tmp_path / "text.txt", out=tmp_path / "index", top=100_000, workers=1, layer_budget=1)
    with pytest.raises(SettingError, match=r"720\.0 GB"):
        estimate_scan(model, ScanSettings(top=100_000))
