"""Fixtures for every folder of tests: tiny checkpoints, a text, indexes of them, a browser.

`build_once` keeps what is expensive to build on disk for all test processes and later runs. Session fixtures are only
read; `copy_of(index)` returns a copy that a test may change.
"""

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# idle torch threads sleep instead of spinning, so that test processes do not slow each other down
os.environ["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT", "1000")
# Ray starts its workers with a low priority, so that they hardly begin beside other work
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - the name that Ray reads
# keep the Hub libraries away from the user's home, which may be read-only
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="memlens-tests-hub-")

import memlens
from builds import build_once, compile_loops, open_copy, remove_old_builds
from memlens.index.reader import Index
from memlens.models.memory_model import MemoryModel
from memlens.testing import save_tiny, tiny_model, tiny_tokenizer
from waiting import PATIENCE

# `--hypothesis-profile many` tries more examples and counts as a sweep; no profile has a deadline
for profile, examples in (("few", 25), ("many", 400)):
    slow_is_fine = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile(
        profile, max_examples=examples, deadline=None, suppress_health_check=slow_is_fine
    )
hypothesis.settings.load_profile("few")

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
FLAGS = [f"--{flag}" for flag in ("headless", "disable-gpu", "no-first-run", "disable-background-networking",
         "disable-component-update", "disable-sync")]  # fmt: skip


def pytest_configure() -> None:
    """Restore the SIGINT handler, which shells ignore for background jobs: tests send Ctrl-C to child processes."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # until all tests are collected


def pytest_sessionstart(session: pytest.Session) -> None:
    worker = getattr(session.config, "workerinput", None)
    if worker is not None:
        compile_loops(int(worker["workerid"].removeprefix("gw")), worker["workercount"])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark property tests as sweeps when they run with many examples."""
    if config.getoption("--hypothesis-profile", None) == "many":
        for item in items:
            if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
                item.add_marker(pytest.mark.sweep)


def pytest_collection_finish() -> None:
    """Take modules and tests, which stay, out of garbage collection, which would need 6% of the time for them."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        remove_old_builds()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or duckdb reports leaks
    shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True)


@pytest.fixture(scope="session")
def tiny_text() -> Path:
    """The corpus of the tiny indexes: nine sentences in a .txt file."""
    return build_once("text", lambda folder: (folder / "text.txt").write_text(TINY_TEXT, "utf-8")) / "text.txt"


@pytest.fixture(scope="session")
def tiny_gpt2() -> Path:
    """A checkpoint folder: plain blocks, no BOS."""
    return build_once("gpt2", lambda folder: save_tiny(folder, "gpt2"))


@pytest.fixture(scope="session")
def tiny_llama() -> Path:
    """A checkpoint folder: gated blocks (triggers at both ends), fed BOS."""
    return build_once("llama", lambda folder: save_tiny(folder, "llama", adds_bos=True))


@pytest.fixture(scope="session")
def tiny_gpt2_index(tiny_gpt2: Path, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Index:
    """tiny_gpt2 over tiny_text, scanned with top=7; only read it."""

    def build(folder: Path) -> None:
        memlens.scan(tiny_gpt2, tiny_text, out=folder / "index", top=7, threads=1)

    built = build_once("gpt2-index", build)
    return open_copy(built, tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="session")
def tiny_llama_index(tiny_llama: Path, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Index:
    """tiny_llama over tiny_text, scanned with top=7; only read it."""
    built = build_once(
        "llama-index", lambda at: memlens.scan(tiny_llama, tiny_text, out=at / "index", top=7, threads=1)
    )
    return open_copy(built, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def tiny_gpt2_values(tiny_gpt2_index: Index, tmp_path_factory: pytest.TempPathFactory) -> Index:
    """tiny_gpt2_index with its values, top=9; only read it."""

    def build(folder: Path) -> None:
        memlens.values(shutil.copytree(tiny_gpt2_index.folder, folder / "index"), top=9, threads=1)

    return open_copy(build_once("gpt2-values", build), tmp_path_factory.mktemp("gpt2-values"))


@pytest.fixture(scope="session")
def analyzed(tiny_llama: Path, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Index:
    """What `analyze` makes of tiny_llama and tiny_text, with 30 prefixes for each experiment; only read it."""

    def build(folder: Path) -> None:
        options = {"top": 7, "tokens": 9, "sample": 30, "threads": 1, "null_tokens": 0}
        memlens.analyze(tiny_llama, tiny_text, out=folder / "index", **options)

    return open_copy(build_once("llama-analyzed", build), tmp_path_factory.mktemp("llama-analyzed"))


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[..., Index]:
    """`copy_of(index)` returns a copy of the index that the test may change. A second copy needs a name."""

    def copy_of(index: Index, name: str = "index") -> Index:
        return memlens.open_index(shutil.copytree(index.folder, tmp_path / name))

    return copy_of


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """`run("show", folder, "L0N1")` runs memlens in this process. Returns exit code, output and messages."""
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
    """`refused("show", folder, "L9N9")` returns the error line of a command that must fail with exit code 2."""

    def refused(*arguments: object) -> str:
        code, out, err = run(*arguments)
        assert (code, out) == (2, "") and err.startswith("memlens: ") and err.count("\n") == 1, (arguments, err)
        return err

    return refused


@pytest.fixture(scope="session", params=KINDS)
def scanned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, MemoryModel]:
    """A scanned index folder, to be copied and not changed, and its model."""
    family = request.param
    model = memlens.load(tiny_model(family), tokenizer=tiny_tokenizer(adds_bos=family == "llama"))

    def build(folder: Path) -> None:
        (folder / "text.txt").write_text(TEXT, encoding="utf-8")
        memlens.scan(model, folder / "text.txt", out=folder / "index", top=7)

    built = build_once(f"scanned-{family}", build)
    return open_copy(built, tmp_path_factory.mktemp(family)).folder, model


@pytest.fixture(scope="session")
def bundle_cache() -> Path:
    """The folder for the JavaScript of the charts, kept out of the user's cache."""
    return build_once("cache", lambda folder: None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, for one module at a time: while it is open, this process has a running event loop."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.fail("chromium is not on the PATH; install it (Debian: apt-get install chromium)")
    flags = [*FLAGS, "--no-sandbox"] if os.geteuid() == 0 else FLAGS
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=flags, timeout=PATIENCE * 1000)
        opened.on("context", lambda context: context.set_default_timeout(PATIENCE * 1000))
        yield opened
        opened.close()
