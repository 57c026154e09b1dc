"""A command line run inside the tests' process, and small indexes to run it on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_helpers import Ran

from memlens import api
from memlens.cli import main
from memlens.pipeline import Analysis, analyze
from memlens.testing import save_tiny

TEXT = """The river runs to the sea. The river runs to the hills. The press was free in the city of Paris.
Rain fell on the hills, and the rivers rose. In 1990 a café opened near the river; it was the first of its kind.
The end of the war came in the spring, as the papers of the day had said it would. The River City was free.
"""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: object) -> Ran:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Ran(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoint folders: a plain model, the same with other weights, and a gated one that is fed BOS."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "plain": save_tiny(folder / "plain", "gpt2"),
        "other": save_tiny(folder / "other", "gpt2", seed=1),
        "gated": save_tiny(folder / "gated", "llama", adds_bos=True),
    }


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def made(models: dict[str, Path], text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Complete indexes of the plain and the gated model; only read them."""
    folder = tmp_path_factory.mktemp("indexes")
    for kind in ("plain", "gated"):
        api.scan(models[kind], text, out=folder / kind, top=7, threads=1)
    return {kind: folder / kind for kind in ("plain", "gated")}


@pytest.fixture(scope="session")
def valued(made: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plain index with values; only read it."""
    folder = Path(shutil.copytree(made["plain"], tmp_path_factory.mktemp("valued") / "index"))
    api.values(folder, top=9, threads=1)
    return folder


@pytest.fixture(scope="session")
def analyzed(models: dict[str, Path], text: Path, tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    """Everything there is about the gated model; only read it."""
    out = tmp_path_factory.mktemp("analyzed") / "index"
    return analyze(models["gated"], text, out=out, top=7, tokens=9, sample=30, threads=1)


@pytest.fixture
def with_values(valued: Path, tmp_path: Path) -> Path:
    """A copy of the index with values that a test may endanger."""
    return Path(shutil.copytree(valued, tmp_path / "valued"))


@pytest.fixture
def plain(made: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the plain index that a test may endanger."""
    return Path(shutil.copytree(made["plain"], tmp_path / "index"))
