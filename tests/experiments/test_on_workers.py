"""Values, local edits and the prefix pass on worker processes: the same bytes as one process."""

import shutil
from pathlib import Path

import pytest

import memlens
from memlens.models.memory_model import MemoryModel
from memlens.testing import tiny_model, tiny_tokenizer

WORDS = ("the old harbour", "ships sail", "a small garden", "rain falls", "her brother", "the night train")


@pytest.fixture(scope="module")
def valued(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, MemoryModel]:
    """An index folder with values, to be copied and not changed, and its model; one kind: processes are slow."""
    folder, model = scan_lines("llama", tmp_path_factory.mktemp("workers"), batch_tokens=128)
    memlens.values(folder, model=model)
    return folder, model


def scan_lines(family: str, folder: Path, batch_tokens: int) -> tuple[Path, MemoryModel]:
    """A new index folder, and its model."""
    lines = [f"{one} {two} {three}" for one in WORDS for two in WORDS for three in WORDS[:2]]
    (folder / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    model = memlens.load(tiny_model(family), tokenizer=tiny_tokenizer(adds_bos=family == "llama"))
    memlens.scan(model, folder / "text.txt", out=folder / "index", top=7, unit="line", batch_tokens=batch_tokens)
    return folder / "index", model


def bytes_of(folder: Path, *tables: str) -> list[bytes]:
    return [(folder / f"{table}.parquet").read_bytes() for table in tables]


@pytest.mark.parametrize("name", ["refinement", pytest.param("local-edits", marks=pytest.mark.sweep)])
def test_an_experiment_on_two_workers_has_the_bytes_of_one_process(
    valued: tuple[Path, MemoryModel], tmp_path: Path, name: str
) -> None:
    here, there = (shutil.copytree(valued[0], tmp_path / name) for name in ("here", "there"))
    for folder, workers in ((here, None), (there, 2)):
        memlens.experiment(folder, name, model=valued[1], sample=40, threads=1, workers=workers)
    made = [f"experiments/{path.stem}" for path in (here / "experiments").iterdir()]
    assert f"experiments/{name}" in made and bytes_of(here, *made) == bytes_of(there, *made)


@pytest.mark.sweep
def test_values_on_two_workers_have_the_bytes_of_one_process(valued: tuple[Path, MemoryModel], tmp_path: Path) -> None:
    here, there = (shutil.copytree(valued[0], tmp_path / name) for name in ("here", "there"))
    for folder, workers in ((here, None), (there, 2)):
        memlens.values(folder, model=valued[1], threads=1, workers=workers)
    assert bytes_of(here, "values", "keys") == bytes_of(there, "values", "keys")
