"""One warm process and one set of inputs for all tests of faults."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from nursery import Nursery

from hub_stand_in import Hub, running
from memlens.testing import save_tiny

SENTENCES = (
    "The river runs to the sea. The river runs to the hills. The press was free in the city of Paris.",
    "Rain fell on the hills, and the rivers rose. In 1990 a small house opened near the river.",
    "The end of the war came in the spring, as the papers of the day had said. The city was free.",
)


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny gated checkpoint and two texts."""
    folder = tmp_path_factory.mktemp("inputs")
    save_tiny(folder / "model", "llama")
    (folder / "one.txt").write_text("\n".join(SENTENCES) + "\n")
    (folder / "two.txt").write_text("\n".join(sentence.replace("river", "road") for sentence in SENTENCES) + "\n")
    return folder


@pytest.fixture(scope="session")
def hub() -> Iterator[Hub]:
    with running() as started:
        yield started


@pytest.fixture(scope="session")
def nursery(inputs: Path, hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    warm = tmp_path_factory.mktemp("warm") / "index"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.address)
        patch.setenv("HF_TOKEN", "hf_of_the_tests")
        patch.setenv("HF_HUB_DISABLE_XET", "1")
        patch.setenv("HF_HOME", str(warm.parent / "home"))
        options = ["-o", warm, "--threads", "1", "--null-tokens", "0", "--quiet"]
        started = Nursery([["analyze", inputs / "model", inputs / "one.txt", *options]])
    yield started
    started.close()
    shutil.rmtree(warm)
