"""A command line run inside the tests' process, and small indexes to run it on."""

from collections.abc import Callable
from pathlib import Path

import pytest
from cli_helpers import Paths, Ran

from memlens.index.reader import Index
from memlens.testing import save_tiny


@pytest.fixture
def run(run: Callable[..., tuple[int, str, str]]) -> Callable[..., Ran]:
    """The same with names for what comes back."""
    return lambda *arguments: Ran(*run(*arguments))


@pytest.fixture(scope="session")
def models(tiny_gpt2: Path, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Paths:
    """Checkpoint folders: a plain model, the same with other weights, and a gated one that is fed BOS."""
    other = save_tiny(tmp_path_factory.mktemp("models") / "other", "gpt2", seed=1)
    return {"plain": tiny_gpt2, "other": other, "gated": tiny_llama}


@pytest.fixture(scope="session")
def text(tiny_text: Path) -> Path:
    return tiny_text


@pytest.fixture(scope="session")
def made(tiny_gpt2_index: Index, tiny_llama_index: Index) -> Paths:
    """Complete indexes of the plain and the gated model; only read them."""
    return {"plain": tiny_gpt2_index.folder, "gated": tiny_llama_index.folder}


@pytest.fixture(scope="session")
def valued(tiny_gpt2_values: Index) -> Path:
    """The plain index with values; only read it."""
    return tiny_gpt2_values.folder


@pytest.fixture
def whole(analyzed: Index, copy_of: Callable[..., Index]) -> Path:
    """A copy of the index that has everything."""
    return copy_of(analyzed, "whole").folder


@pytest.fixture
def with_values(tiny_gpt2_values: Index, copy_of: Callable[..., Index]) -> Path:
    """A copy of the index with values that a test may endanger."""
    return copy_of(tiny_gpt2_values, "valued").folder


@pytest.fixture
def plain(tiny_gpt2_index: Index, copy_of: Callable[..., Index]) -> Path:
    """A copy of the plain index that a test may endanger."""
    return copy_of(tiny_gpt2_index).folder
