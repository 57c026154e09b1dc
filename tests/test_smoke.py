"""The first steps of a new user in a few seconds: load, scan, values, show, and one page of the workbench."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from fastapi.testclient import TestClient

import memlens
from memlens.index.reader import Index
from memlens.web.app import create_app
from memlens.web.workbench import Workbench

Run = Callable[..., tuple[int, str, str]]


def test_the_bundled_model_loads_and_predicts() -> None:
    model = memlens.load("bundled")
    assert torch.isfinite(model.logits(torch.tensor([[3, 1, 4]]))).all()


def test_a_scan_and_values_leave_an_index_that_passes_its_check(
    tiny_gpt2: Path, tiny_text: Path, tmp_path: Path, run: Run
) -> None:
    folder = tmp_path / "index"
    assert run("scan", tiny_gpt2, tiny_text, "-o", folder, "--top", 5, "--threads", 1)[0] == 0
    assert run("values", folder, "--threads", 1)[0] == 0
    assert run("check", folder)[0] == 0


def test_a_memory_is_shown(tiny_gpt2_values: Index, run: Run) -> None:
    code, out, _ = run("show", tiny_gpt2_values.folder, "L1N3", "--json")
    assert code == 0 and json.loads(out)


def test_an_unknown_memory_is_one_line(tiny_gpt2_values: Index, refused: Callable[..., str]) -> None:
    assert "layer 9" in refused("show", tiny_gpt2_values.folder, "L9N9")


def test_the_page_of_a_memory_opens(tiny_gpt2_values: Index) -> None:
    app = create_app(Workbench(tiny_gpt2_values.folder))
    with TestClient(app, "http://127.0.0.1:8000") as client:
        assert "L1N3" in client.get("/m/L1N3").text
