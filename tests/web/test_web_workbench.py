"""The workbench: a model that loads while pages answer, and that serves one at a time."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

import memlens
from memlens.errors import ModelError
from memlens.index.reader import Index
from memlens.models.memory_model import MemoryModel
from memlens.testing import save_tiny
from memlens.web.workbench import Workbench


def test_the_model_loads_in_the_background(index_folder: Path, model_folder: Path) -> None:
    with closing(Workbench(index_folder, str(model_folder))) as workbench:
        assert workbench.status == "loading"
        with pytest.raises(ModelError, match="still loading"), workbench.model():
            pass
        workbench.start()
        for _ in range(600):
            if workbench.status != "loading":
                break
            time.sleep(0.05)
        assert workbench.status == "ready"
        with workbench.model() as model:
            assert len(model.layers) == 3


def test_another_model_than_the_scanned_one_is_refused(index_folder: Path, tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other", "gpt2", seed=5, n_positions=128)
    with closing(Workbench(index_folder, str(other))) as workbench:
        workbench._load()
        assert workbench.status == "failed" and "not the model that was scanned" in workbench.status_text
    with pytest.raises(ModelError, match="not the model"):
        Workbench(index_folder, memlens.load(str(other)))


def test_the_model_is_lent_to_one_thread_at_a_time(workbench: Workbench) -> None:
    inside: list[int] = []

    def use(_number: int) -> int:
        with workbench.model():
            inside.append(1)
            most = len(inside)
            time.sleep(0.002)
            inside.pop()
        return most

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(use, range(40))) == {1}


def test_a_use_that_fails_gives_the_model_back(workbench: Workbench) -> None:
    with pytest.raises(ValueError, match="oops"), workbench.model():
        raise ValueError("oops")
    with workbench.model() as model:
        assert isinstance(model, MemoryModel)


def test_it_says_what_to_do_without_a_model(index: Index) -> None:
    with closing(Workbench(index)) as workbench:
        assert workbench.status == "none" and "--model" in workbench.status_text


def test_one_that_is_closed_while_it_gets_ready_stops_getting_ready(index: Index) -> None:
    for wait in (0, 0.005, 0.02, 0.05, 0.1):
        workbench = Workbench(index)
        workbench.start()
        time.sleep(wait)
        workbench.close()
        assert workbench._preparing is not None and not workbench._preparing.is_alive()
