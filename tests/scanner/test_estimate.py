"""The probe behind `info`: what it measures is the speed of batches, also where one sentence takes long."""

from __future__ import annotations

import time
from typing import Any

import pytest

import memlens
from memlens.scanner.autotune import estimate_scan
from memlens.scanner.scanner import Worker
from memlens.scanner.settings import ScanSettings
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
