"""Fixtures for every folder of tests: tiny checkpoints, a text, indexes of them, a browser.

Session fixtures are made once and only read; `copy_of(index)` gives a test one that it may change.
"""

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# waiting threads of torch sleep instead of spinning: several test runs on one machine do not slow each other down
os.environ["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT", "1000")
# what the Hub's libraries keep is nothing of the person's who runs the tests, whose home may be read-only
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="memlens-tests-hub-")

import memlens
from memlens.index.reader import Index
from memlens.models.memory_model import MemoryModel
from memlens.testing import save_tiny, tiny_model, tiny_tokenizer

# a slow machine is no failure
hypothesis.settings.register_profile("memlens", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("memlens")

KINDS = ("gpt2", "llama", "gpt_neox", "gemma2")  # plain, gated, parallel and with a post-norm
TEXT = """The river runs to the sea. The river runs to the hills. The press was free in the city of Paris.
Rain fell on the hills, and the rivers rose. Rain fell on the city. A
In 1990 a café opened near the river; it was the first of its kind, and the people of the city read the news.
The end of the war came in the spring, as the papers of the day had said it would. The river
"""
TINY_TEXT = """The river runs to the sea. The river runs to the hills. The press was free in the city of Paris.
Rain fell on the hills, and the rivers rose. In 1990 a café opened near the river; it was the first of its kind.
The end of the war came in the spring, as the papers of the day had said it would. The River City was free.
"""
LONG = ("cli/test_cli_demo.py", "docs/test_paper_example.py", "faults/test_crash_points.py", "index/test_ray.py",
        "index/test_ray_lost.py", "index/test_same_bytes.py", "index/test_scan_while_read.py", "index/test_workers.py",
        "models/test_types.py", "test_distribution.py", "test_own_process.py", "web/test_web_browser.py")  # fmt: skip
FLAGS = [f"--{flag}" for flag in ("headless", "disable-gpu", "no-first-run", "disable-background-networking",
         "disable-component-update", "disable-sync")]  # fmt: skip


def pytest_configure() -> None:
    """Ctrl-C is tested: a job in the background is started with SIGINT ignored, and so would be all its children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take a minute or more come first: at the end no process of the tests waits long for another."""
    long = [Path(__file__).parent / name for name in LONG]
    if gone := [str(path) for path in long if not path.is_file()]:
        raise pytest.UsageError(f"{gone[0]} is among LONG in tests/conftest.py, and there is no such file")
    items.sort(key=lambda item: item.path not in long)


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True)


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus of the tiny indexes: nine sentences in a .txt file."""
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text(TINY_TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tiny_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder: plain blocks, no BOS."""
    return save_tiny(tmp_path_factory.mktemp("tiny") / "gpt2", "gpt2")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder: gated blocks (triggers at both ends), fed BOS."""
    return save_tiny(tmp_path_factory.mktemp("tiny") / "llama", "llama", adds_bos=True)


@pytest.fixture(scope="session")
def tiny_gpt2_index(tiny_gpt2: Path, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Index:
    """tiny_gpt2 over tiny_text, scanned with top=7; only read it."""
    return memlens.scan(tiny_gpt2, tiny_text, out=tmp_path_factory.mktemp("gpt2") / "index", top=7, threads=1)


@pytest.fixture(scope="session")
def tiny_llama_index(tiny_llama: Path, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Index:
    """tiny_llama over tiny_text, scanned with top=7; only read it."""
    return memlens.scan(tiny_llama, tiny_text, out=tmp_path_factory.mktemp("llama") / "index", top=7, threads=1)


@pytest.fixture(scope="session")
def tiny_gpt2_values(tiny_gpt2_index: Index, tmp_path_factory: pytest.TempPathFactory) -> Index:
    """tiny_gpt2_index with its values, top=9; only read it."""
    folder = shutil.copytree(tiny_gpt2_index.folder, tmp_path_factory.mktemp("gpt2-values") / "index")
    return memlens.values(folder, top=9, threads=1)


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[..., Index]:
    """`copy_of(index)`: the index in a folder of this test, which may change it; a second one needs a name."""

    def copy_of(index: Index, name: str = "index") -> Index:
        return memlens.open_index(shutil.copytree(index.folder, tmp_path / name))

    return copy_of


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """`run("show", folder, "L0N1")`: exit code, output and messages of memlens, in this process."""
    from memlens.cli import main

    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def refused(run: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """`refused("show", folder, "L9N9")`: the one line with which memlens ends, with code 2 and nothing printed."""

    def refused(*arguments: object) -> str:
        code, out, err = run(*arguments)
        assert (code, out) == (2, "") and err.startswith("memlens: ") and err.count("\n") == 1, (arguments, err)
        return err

    return refused


@pytest.fixture(scope="session", params=KINDS)
def scanned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, MemoryModel]:
    """A scanned index folder, to be copied and not changed, and its model."""
    family = request.param
    folder = tmp_path_factory.mktemp(family)
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    model = memlens.load(tiny_model(family), tokenizer=tiny_tokenizer(adds_bos=family == "llama"))
    memlens.scan(model, folder / "text.txt", out=folder / "index", top=7)
    return folder / "index", model


@pytest.fixture(scope="session")
def bundle_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for the charts' JavaScript, which is made once, and not in the cache of whoever runs the tests."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium. For one module at a time: while it is open, this process has a running event loop."""
    from playwright.sync_api import sync_playwright

    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.fail("no chromium was found on the PATH: install it (Debian: apt-get install chromium)")
    flags = [*FLAGS, "--no-sandbox"] if os.geteuid() == 0 else FLAGS
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found, args=flags)
        yield opened
        opened.close()
