"""The examples in the docstrings of the public functions run."""

import doctest
import shutil
from importlib import import_module
from pathlib import Path

import pytest

import memlens
from circuits.circuit_pairs import make_pairs
from memlens.index.reader import Index
from memlens.models.memory_model import MemoryModel

BY_PATH = (
    "memlens.api",
    "memlens.settings",
    "memlens.text",
    "memlens.index.reader",
    "memlens.memory",
    "memlens.errors",
    "memlens.models.load",
    "memlens.pipeline",
)
LOADED = (
    *("memlens.tracer.attribution", "memlens.tracer.firing", "memlens.tracer.intervene", "memlens.tracer.intervention"),
    *("memlens.tracer.trace", "memlens.tracer.value_changes"),
    *(
        "memlens.circuits.graph",
        "memlens.circuits.task",
        "memlens.models.sparse_autoencoder",
        "memlens.models.memory_model",
    ),
    *("memlens.probing.probe", "memlens.probing.saved"),
)


@pytest.fixture(scope="module")
def loaded(tiny_gpt2: Path) -> MemoryModel:
    return memlens.load(tiny_gpt2)


@pytest.mark.parametrize("name", [*BY_PATH, *LOADED])
def test_the_examples_of_a_module_run(
    name: str, tiny_gpt2_index: Index, tiny_gpt2: Path, loaded: MemoryModel, tiny_text: Path, tmp_path: Path
) -> None:
    names = {
        "memlens": memlens,
        "model": loaded if name in LOADED else tiny_gpt2,
        "text": tiny_text,
        "folder": tmp_path / "new",
        "pairs": make_pairs(loaded),
        "index": memlens.open_index(shutil.copytree(tiny_gpt2_index.folder, tmp_path / "index")),
    }
    results = doctest.testmod(import_module(name), extraglobs=names)
    assert results.attempted and not results.failed
