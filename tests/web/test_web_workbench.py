"""The model of the workbench: it loads in the background and serves one thread at a time."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Lock

import pytest

import memlens
from memlens.errors import ModelError
from memlens.index.reader import Index
from memlens.models.memory_model import MemoryModel
from memlens.testing import save_tiny
from memlens.web.workbench import Workbench


def test_until_the_model_is_loaded_its_use_is_refused(index_folder: Path, model_folder: Path) -> None:
    workbench = Workbench(index_folder, str(model_folder))
    assert workbench.status == "loading"
    with pytest.raises(ModelError, match="still loading"), workbench.model():
        pass
    workbench._load()
    assert workbench.status == "ready"
    with workbench.model() as model:
        assert len(model.layers) == 3


def test_another_model_than_the_scanned_one_is_refused(index_folder: Path, tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other", "gpt2", seed=5, n_positions=128)
    workbench = Workbench(index_folder, str(other))
    workbench._load()
    assert workbench.status == "failed" and "not the model that was scanned" in workbench.status_text
    with pytest.raises(ModelError, match="not the model"):
        Workbench(index_folder, memlens.load(str(other)))


def test_any_error_while_loading_is_reported(index_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ImportError("no such library")

    monkeypatch.setattr("memlens.web.workbench.ServedIndex.load_model", fail)
    workbench, reasons = Workbench(index_folder, "some-model"), []
    workbench.on_failure = reasons.append
    workbench._load()
    assert "no such library" in workbench.status_text and reasons == [workbench.status_text]


def test_the_model_is_lent_to_one_thread_at_a_time(workbench: Workbench) -> None:
    inside = Lock()

    def use(_number: int) -> None:
        with workbench.model():
            assert inside.acquire(blocking=False)
            inside.release()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(40)))


def test_a_use_that_fails_gives_the_model_back(workbench: Workbench) -> None:
    with pytest.raises(ValueError, match="oops"), workbench.model():
        raise ValueError("oops")
    with workbench.model() as model:
        assert isinstance(model, MemoryModel)


def test_without_a_model_the_status_says_what_to_do(index: Index) -> None:
    with closing(Workbench(index)) as workbench:
        assert workbench.status == "none" and f"memlens serve {index.folder} --model" in workbench.status_text
