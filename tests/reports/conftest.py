"""Two indexes of a tiny model of 16 layers: one as a scan and `values` leave it, one with every table of a report."""

import shutil
from pathlib import Path

import pytest
from report_tables import EVIL, write_all

import memlens
from memlens.reports.report import make_report
from memlens.testing import tiny_model, tiny_tokenizer
from memlens.vocab.table import compute_values

TEXT = f"""The river runs to the sea. The river runs to the hills. The press was free in the city of Paris.
Rain fell on the hills, and the rivers rose. Rain fell on the city. A {EVIL} in the city of Paris.
In 1990 a café opened near the river; it was the first of its kind, and the people of the city read the news.
The end of the war came in the spring, as the papers of the day had said it would. The river & the <b>sea</b>.
A word turned \u202eround\u202c and a \ufffd broken one. Rain fell.
"""


@pytest.fixture(autouse=True)
def use_bundle_cache(bundle_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(bundle_cache))


@pytest.fixture(scope="session")
def bare_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bare")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    model = memlens.load(tiny_model("gpt2", n_layer=16, activation_function="relu"), tokenizer=tiny_tokenizer())
    compute_values(memlens.scan(model, folder / "text.txt", out=folder / "index", top=8), model)
    return folder / "index"


@pytest.fixture(scope="session")
def full_folder(bare_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shutil.copytree(bare_folder, tmp_path_factory.mktemp("full") / "index")
    write_all(memlens.open_index(folder))
    return folder


@pytest.fixture
def bare(bare_folder: Path, tmp_path: Path) -> memlens.Index:
    """An index without experiments, for one test to change."""
    return memlens.open_index(shutil.copytree(bare_folder, tmp_path / "index"))


@pytest.fixture
def full(full_folder: Path, tmp_path: Path) -> memlens.Index:
    """An index with every table, for one test to change."""
    return memlens.open_index(shutil.copytree(full_folder, tmp_path / "index"))


@pytest.fixture(scope="session")
def full_page(full_folder: Path, bundle_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of an index with every table, to be read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(bundle_cache))
        return make_report(memlens.open_index(full_folder), tmp_path_factory.mktemp("page") / "report.html")
