"""The rule for workers and threads, and the cost of a scan."""

from pathlib import Path

import pytest
import torch

import memlens
from memlens.errors import SettingError
from memlens.models.memory_model import MemoryModel
from memlens.models.recipe import ModelRecipe, gpu_of, make_pool
from memlens.pool import ProcessPool
from memlens.scanner import resources
from memlens.scanner.resources import choose_workers, estimate_scan
from memlens.settings import CorpusSettings, RunSettings, ScanRunSettings, ScanSettings
from memlens.testing import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def model() -> MemoryModel:
    return memlens.load(tiny_model("gpt2", n_positions=64), tokenizer=tiny_tokenizer(), prove=False)


def chosen(
    model: MemoryModel, monkeypatch: pytest.MonkeyPatch, tokens: int, recorded: int | None = None, **run: int
) -> tuple[int, int]:
    monkeypatch.setattr(resources, "usable_cores", lambda: 8)
    monkeypatch.setattr(resources, "approximate_tokens", lambda corpus, limit: tokens)
    corpus = CorpusSettings(("nowhere.txt",))
    return choose_workers(ScanRunSettings(**run), model, ScanSettings(), corpus, recorded, False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokens", "recorded", "run", "expected"),
    [
        (1000, None, {}, (1, 8)),
        (10**12, None, {}, (8, 1)),
        (10**12, 2, {}, (4, 2)),
        (10**12, None, {"threads": 3}, (1, 3)),
        (1000, None, {"workers": 4}, (4, 2)),
        (1000, None, {"workers": 3, "threads": 1}, (3, 1)),
        (1000, None, {"executor": "ray"}, (0, 1)),
    ],
)
def test_workers_and_threads(model, monkeypatch, tokens, recorded, run, expected) -> None:
    monkeypatch.setattr(resources, "free_memory", lambda: 1 << 50)
    assert chosen(model, monkeypatch, tokens, recorded, **run) == expected


def test_every_gpu_has_a_worker_and_the_driver_is_the_first(model, monkeypatch) -> None:
    monkeypatch.setattr(MemoryModel, "device", torch.device("cuda:0"))
    for gpus, threads in ((1, 8), (4, 2)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert chosen(model, monkeypatch, 1000) == (gpus, threads)
    assert chosen(model, monkeypatch, 1000, device_map="auto") == (1, 8)  # type: ignore[arg-type]
    monkeypatch.setattr(MemoryModel, "device", torch.device("cuda:1"))
    assert chosen(model, monkeypatch, 1000) == (1, 8)  # the user named this GPU
    monkeypatch.setattr(MemoryModel, "device", torch.device("cuda:0"))
    assert isinstance(make_pool(ModelRecipe(model, 1), RunSettings(), 4), ProcessPool)
    assert make_pool(ModelRecipe(model, 1), RunSettings(), 4).driver_works  # type: ignore[attr-defined]
    assert [gpu_of(number, 4, driver_works=True) for number in (1, 2, 3, 4, 5)] == [1, 2, 3, 1, 2]
    assert [gpu_of(number, 4, driver_works=False) for number in (0, 1, 5)] == [0, 1, 1]
    assert gpu_of(1, 1, driver_works=True) == 0


def test_without_memory_for_a_second_worker_there_is_one_process(model, monkeypatch) -> None:
    monkeypatch.setattr(resources, "free_memory", lambda: 1 << 20)
    assert chosen(model, monkeypatch, 10**12) == (1, 8)


def test_the_estimate_measures_a_batch(model: MemoryModel) -> None:
    estimate = estimate_scan(model, ScanSettings(threads=1))
    assert estimate.tokens_per_second > 0 and 1500 < estimate.probe_tokens <= 2048


def test_lists_that_would_fill_the_memory_are_rejected_before_they_are_made(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The river runs to the sea.")
    model = memlens.load(tiny_model("gpt2", n_inner=100_000), tokenizer=tiny_tokenizer(), prove=False)
    with pytest.raises(SettingError, match=r"--top is 100000: .* 720\.0 GB, more than half .* lower --top"):
        memlens.scan(model, tmp_path / "text.txt", out=tmp_path / "index", top=100_000, workers=1)
    assert not (tmp_path / "index").exists()
    with pytest.raises(SettingError, match=r"240\.0 GB"):
        memlens.scan(model, tmp_path / "text.txt", out=tmp_path / "index", top=100_000, workers=1, layer_budget=1)
    with pytest.raises(SettingError, match=r"720\.0 GB"):
        estimate_scan(model, ScanSettings(top=100_000))
