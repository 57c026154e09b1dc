"""An index that stays open: the same answers from memory as from files, from many threads, and after changes."""

import html
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from own_server import fewer_patterns

import memlens
from memlens.errors import IndexFolderError
from memlens.index.memory import read_value
from memlens.index.reader import Index
from memlens.models.memory_model import MemoryModel
from memlens.web.workbench import ServedIndex, Workbench

ClientOf = Callable[..., TestClient]


@pytest.fixture(scope="module")
def served(index_folder: Path) -> ServedIndex:
    served = ServedIndex(index_folder)
    served.copy_tables()
    return served


def test_answers_from_memory_are_those_of_the_files(index: Index, served: ServedIndex) -> None:
    assert served._source_of("triggers") == '"triggers"' and "read_parquet" in index._source_of("triggers")
    for table in ("memories", "triggers", "corpus", "values", "patterns", "names", "keys"):
        query = f"SELECT * FROM {{{table}}}"
        assert served.sql(query) == index.sql(query)
    for name in ("L0N0", "L2N39"):
        assert served.triggers(name) == index.triggers(name)
        assert served[name] == index[name] and read_value(served, name) == read_value(index, name)


def test_tables_that_do_not_fit_are_read_from_their_files(index_folder: Path, index: Index) -> None:
    small = ServedIndex(index_folder, max_bytes=0)
    small.copy_tables()
    assert "read_parquet" in small._source_of("memories")
    assert small.triggers("L1N1") == index.triggers("L1N1")


def test_many_threads_at_once_get_their_own_answers(index: Index, served: ServedIndex) -> None:
    names = [f"L{layer}N{memory}" for layer in index.layers for memory in range(20)] * 3
    expected = {name: index[name] for name in set(names)}
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(served.__getitem__, names)) == [expected[name] for name in names]


def test_a_result_is_computed_once_per_version_and_the_latest_are_kept(index_folder: Path) -> None:
    served = ServedIndex(index_folder)
    calls: list[int] = []

    def make() -> int:
        calls.append(1)
        return len(calls)

    assert [served.remember("count", make) for _ in range(3)] == [1, 1, 1]
    assert [served.remember("count", make, version) for version in ("new", "new", "newer")] == [2, 2, 3]
    for number in range(200):
        served.remember(("other", number), lambda: 0)
    assert len(served._results) <= 64


def test_a_damaged_table_is_one_line(own_index: Index) -> None:
    path = own_index.folder / "memories.parquet"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(IndexFolderError, match="damaged"):
        ServedIndex(own_index.folder)["L0N0"]


def test_a_table_that_a_stage_replaced_is_shown_by_the_next_request(own_index: Index, client_of: ClientOf) -> None:
    client = client_of(own_index.folder)
    before = client.get("/api/layers").json()
    fewer_patterns(own_index)
    after = client.get("/api/layers").json()
    assert sum(layer["with_pattern"] for layer in after) < sum(layer["with_pattern"] for layer in before)


@pytest.fixture
def other_folder(model: MemoryModel, tmp_path: Path) -> Path:
    """An index of the same model with another corpus."""
    (tmp_path / "other.txt").write_text("Snow fell on the roads. The roads were closed, and the trains were late.\n")
    return memlens.scan(model, tmp_path / "other.txt", out=tmp_path / "other", top=7, threads=1).folder


def replace_folder(folder: Path, other: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(other, folder)


def test_an_index_that_was_replaced_is_opened_again(
    own_index: Index, other_folder: Path, model: MemoryModel, client_of: ClientOf
) -> None:
    client = client_of(own_index.folder, model)
    assert "Snow" not in client.get("/m/L0N0").text
    replace_folder(own_index.folder, other_folder)
    expected = client_of(other_folder, model)
    for path in ("/api/counts", "/api/memories/L0N0", "/api/layers", "/api/search?q=snow", "/api/status"):
        assert client.get(path).json() == expected.get(path).json(), path
    assert client.get("/m/L0N0").text == expected.get("/m/L0N0").text.replace(str(other_folder), str(own_index.folder))
    assert client.get("/api/trace", params={"prompt": "The river"}).status_code == 200


def test_the_model_of_an_index_that_was_replaced_is_not_used_for_another_model(
    own_index: Index, model: MemoryModel, tiny_gpt2_values: Index, client_of: ClientOf
) -> None:
    client = client_of(own_index.folder, model)
    replace_folder(own_index.folder, tiny_gpt2_values.folder)
    answer = client.get("/api/trace", params={"prompt": "The river"})
    assert answer.status_code == 409 and "another model" in answer.json()["error"]
    assert client.get("/m/L0N0").status_code == 200


def test_a_second_index_that_was_replaced_is_opened_again(
    own_index: Index, index_folder: Path, other_folder: Path, client_of: ClientOf
) -> None:
    client = client_of(index_folder, other=own_index)
    assert client.get("/api/compare").json()["same_corpus"] is True
    replace_folder(own_index.folder, other_folder)
    assert client.get("/api/compare").json()["same_corpus"] is False


@pytest.mark.parametrize("content", [None, "not an index"])
def test_after_its_index_was_removed_every_page_says_so(
    own_index: Index, client_of: ClientOf, content: str | None
) -> None:
    client = client_of(own_index.folder)
    shutil.rmtree(own_index.folder)
    if content is not None:
        own_index.folder.write_text(content)
    for path in ("/", "/m/L0N0", "/search?q=the", "/trace", "/annotate", "/compare", "/api/status", "/api/map"):
        answer = client.get(path)
        assert answer.status_code == 409 and "index" in html.unescape(answer.text), path
    assert client.get("/static/style.css").status_code == 200


@pytest.mark.parametrize(
    ("table", "page"),
    [
        ("memories", "/"),
        ("triggers", "/m/L0N0"),
        ("values", "/api/memories/L0N0"),
        ("patterns", "/m/L0N0"),
        ("corpus", "/search?q=the"),
        ("vocabulary", "/m/L0N0"),
    ],
)
def test_a_page_that_needs_a_missing_table_names_it(
    own_index: Index, client_of: ClientOf, table: str, page: str
) -> None:
    (own_index.folder / f"{table}.parquet").unlink()
    answer = client_of(own_index.folder).get(page)
    assert answer.status_code == 409 and f"{table}.parquet is missing" in html.unescape(answer.text)


def test_preparing_stops_when_the_workbench_is_closed(index: Index) -> None:
    workbench = Workbench(index)
    workbench.start()
    workbench.close()
    assert workbench._preparing is not None and not workbench._preparing.is_alive()
