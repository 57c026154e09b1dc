"""An index of a tiny model with part of the bundled prose, and the workbench with it.

They are shared by the session: only read them. `client` answers in this process, `address` is that of a real server.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from own_server import opened, serving

import memlens
from builds import build_once, open_copy
from memlens.index.reader import Index
from memlens.models.memory_model import MemoryModel
from memlens.pattern.table import compute_patterns
from memlens.testing import save_tiny
from memlens.vocab.table import compute_values
from memlens.web.app import create_app
from memlens.web.workbench import Workbench

BASE = "http://127.0.0.1:8000"
EVIL = "<script>alert('evil')</script> & <b>bold</b>"
BROKEN = "A word turned \u202eround\u202c, a \ufffd broken one, a \x07 bell and a \u2028 line."


@pytest.fixture(scope="session", autouse=True)
def use_bundle_cache(bundle_cache: Path) -> Iterator[None]:
    """Set the cache folder for servers in other threads as well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(bundle_cache))
        yield


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return build_once("web-model", lambda folder: save_tiny(folder / "tiny", "gpt2", n_positions=128)) / "tiny"


@pytest.fixture(scope="session")
def model(model_folder: Path) -> MemoryModel:
    return memlens.load(str(model_folder))


@pytest.fixture(scope="session")
def index_folder(model: MemoryModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All stages and two fast experiments, over part of the bundled prose and some hostile sentences."""

    def build(folder: Path) -> None:
        corpus = folder / "text.txt"
        hostile = [f"The river {EVIL} runs to the sea, take {number}." for number in range(4)]
        corpus.write_text("\n".join([*bundled_sentences(200), *hostile, BROKEN]), encoding="utf-8")
        index = memlens.scan(model, corpus, out=folder / "index", top=30, threads=1, unit="line", max_length=64)
        compute_values(index, model, top=30)
        compute_patterns(index, rate=0.5)  # so little text gives no certain patterns
        memlens.experiment(index, ["agreement", "rank"], model=model, threads=1)

    return open_copy(build_once("web-index", build), tmp_path_factory.mktemp("web")).folder


def bundled_sentences(count: int) -> list[str]:
    """Return the first sentences of the bundled corpus."""
    from memlens.corpus.sentences import read_units
    from memlens.settings import CorpusSettings

    return [unit.text for unit in islice(read_units(CorpusSettings(("bundled:prose",))), count)]


@pytest.fixture(scope="session")
def index(index_folder: Path) -> Index:
    return memlens.open_index(index_folder)


@pytest.fixture
def own_index(index_folder: Path, tmp_path: Path) -> Index:
    """A copy that one test may change."""
    return memlens.open_index(shutil.copytree(index_folder, tmp_path / "index"))


@pytest.fixture(scope="session")
def workbench(index_folder: Path, model: MemoryModel) -> Iterator[Workbench]:
    """A workbench whose model is loaded."""
    opened = Workbench(index_folder, model)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def client(workbench: Workbench) -> Iterator[TestClient]:
    with TestClient(create_app(workbench), base_url=BASE) as client:
        yield client


@pytest.fixture
def client_of() -> Iterator[Callable[..., TestClient]]:
    """`client_of(index, model=None, other=None)` returns a client of a new workbench."""
    with ExitStack() as stack:

        def make(*arguments: Any, **named: Any) -> TestClient:
            workbench = Workbench(*arguments, **named)
            stack.callback(workbench.close)
            return stack.enter_context(TestClient(create_app(workbench), base_url=BASE))

        yield make


@pytest.fixture(scope="session")
def address(workbench: Workbench) -> Iterator[str]:
    """The address of a running server whose model is loaded."""
    with serving(workbench) as opened:
        yield opened


@pytest.fixture
def open_page(browser: Any, address: str) -> Iterator[Callable[..., Any]]:
    """`open_page("/search", width=390, scheme="dark", javascript=True)` opens a page of the shared server."""
    with ExitStack() as stack:

        def open_it(path: str, width: int = 1280, scheme: str = "light", javascript: bool = True) -> Any:
            page = stack.enter_context(opened(browser, address, width, javascript, scheme))
            page.goto(address + path)
            return page

        yield open_it
