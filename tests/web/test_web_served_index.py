"""An index that stays open: the same answers from memory as from files, from many threads, also when tables change."""

from __future__ import annotations

import html
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from own_server import fewer_patterns, without_labels

import memlens
from memlens.errors import IndexFolderError
from memlens.index.memory import read_value
from memlens.index.reader import Index
from memlens.models.memory_model import MemoryModel
from memlens.web.served_index import ServedIndex


@pytest.fixture(scope="module")
def served(index_folder: Path) -> Iterator[ServedIndex]:
    with closing(ServedIndex(index_folder)) as opened:
        opened.keep_in_memory()
        yield opened


def test_it_answers_from_memory_what_the_files_say(index: Index, served: ServedIndex) -> None:
    assert served._source_of("triggers") == '"triggers"' and "read_parquet" in index._source_of("triggers")
    for table in ("memories", "triggers", "corpus", "values", "patterns", "names", "keys"):
        query = f"SELECT * FROM {{{table}}}"
        assert served.sql(query) == index.sql(query)
    for name in ("L0N0", "L2N39"):
        assert served.triggers(name) == index.triggers(name)
        assert served[name] == index[name] and read_value(served, name) == read_value(index, name)


def test_tables_that_do_not_fit_are_read_from_their_files(index_folder: Path, index: Index) -> None:
    with closing(ServedIndex(index_folder, most_bytes=0)) as small:
        small.keep_in_memory()
        assert "read_parquet" in small._source_of("memories")
        assert small.triggers("L1N1") == index.triggers("L1N1")


def test_many_threads_at_once_get_their_own_answers(index: Index, served: ServedIndex) -> None:
    names = [f"L{layer}N{memory}" for layer in index.layers for memory in range(20)] * 3
    expected = {name: index[name] for name in set(names)}
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(served.facts, names)) == [expected[name] for name in names]


def test_cursors_are_handed_out_to_any_number_of_threads(index_folder: Path) -> None:
    with closing(ServedIndex(index_folder)) as served, ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda number: served.sql(f"SELECT {number} AS n"), range(800))) == [
            [{"n": number}] for number in range(800)
        ]


def test_a_closed_index_says_so(index_folder: Path) -> None:
    served = ServedIndex(index_folder)
    with ThreadPoolExecutor(1) as pool:
        copying = pool.submit(served.keep_in_memory)
        served.close()
        assert copying.exception() is None or isinstance(copying.exception(), IndexFolderError)
    with pytest.raises(IndexFolderError, match="closed"):
        served["L0N0"]


def test_one_that_is_closed_before_a_question_is_asked_says_so(index_folder: Path) -> None:
    served = ServedIndex(index_folder)
    with pytest.raises(IndexFolderError, match="closed"), served._explain_errors(), served._connect() as cursor:
        served.close()
        cursor.close()  # as it is closed with the database, if that is not in use at this moment
        cursor.execute("SELECT 1")


def test_a_table_that_is_replaced_meanwhile_is_read_anew(own_index: Index) -> None:
    served = ServedIndex(own_index.folder)
    served.keep_in_memory()
    count = "SELECT count(*) AS n FROM {patterns}"
    before = served.sql(count)
    fewer_patterns(own_index)
    after = served.sql(count)
    assert after == own_index.sql(count) != before
    served.keep_in_memory()
    assert served._source_of("patterns") == '"patterns"' and served.sql(count) == after


def test_what_was_made_of_a_table_is_made_once_until_it_changes(own_index: Index) -> None:
    served = ServedIndex(own_index.folder)
    made: list[int] = []

    def make() -> int:
        made.append(1)
        return len(made)

    assert [served.remember(("patterns",), ("count",), make) for _ in range(3)] == [1, 1, 1]
    fewer_patterns(own_index)
    assert served.remember(("patterns",), ("count",), make) == 2
    for number in range(200):
        served.remember((), ("other", number), lambda: 0)
    assert len(served._results) <= 64


def test_a_damaged_table_is_one_line(own_index: Index) -> None:
    path = own_index.folder / "memories.parquet"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(IndexFolderError, match="damaged"):
        ServedIndex(own_index.folder)["L0N0"]


@pytest.fixture
def other_folder(model: MemoryModel, tmp_path: Path) -> Path:
    """An index of the same model over another text."""
    (tmp_path / "other.txt").write_text("Snow fell on the roads. The roads were closed, and the trains were late.\n")
    return memlens.scan(model, tmp_path / "other.txt", out=tmp_path / "other", top=7, threads=1).folder


PATHS = ["/", "/search", "/search?q=the", "/m/L0N0", "/trace", "/annotate", "/annotate?as=ann", "/compare"]
PATHS += ["/trace?prompt=The", "/api/status", "/api/counts", "/api/map", "/api/layers", "/api/search?q=the", "/m/L9N9"]
PATHS += ["/api/memories/L0N0", "/api/memories/L0N0/related", "/api/memories/L0N0/coefficients", "/api/annotate"]
PATHS += ["/api/trace?prompt=The", "/api/trace/cell?prompt=The", "/api/annotate/labels?as=ann"]
REFUSED = "was replaced or removed since it was opened; run the command again"


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("by", ["another scan", "nothing", "a file"])
def test_after_its_index_was_replaced_every_page_says_so(
    own_index: Index,
    other_folder: Path,
    model: MemoryModel,
    client_of: Callable[..., TestClient],
    by: str,
    is_warm: bool,
) -> None:
    client = client_of(without_labels(own_index), model)
    if is_warm:
        client.app.state.workbench.index.keep_in_memory()  # type: ignore[attr-defined]
        for path in PATHS:
            assert client.get(path).status_code in (200, 404, 422), path
    shutil.rmtree(own_index.folder)
    if by == "another scan":
        shutil.copytree(other_folder, own_index.folder)
    elif by == "a file":
        own_index.folder.write_text("nothing of the kind")
    for _ in range(2):
        for path in PATHS:
            answer = client.get(path)
            message = answer.json()["error"] if path.startswith("/api/") else html.unescape(answer.text)
            assert answer.status_code == 409 and REFUSED in message and "Snow" not in answer.text, path
        draw = client.post("/api/annotate/sample", json={"per_layer": 1})
        assert draw.status_code == 409 and REFUSED in draw.json()["error"]
    if by == "another scan":
        assert memlens.check(own_index.folder).is_whole and not (own_index.folder / "annotations.sqlite").exists()
    assert client.get("/static/style.css").status_code == 200


def test_an_index_replaced_while_an_answer_is_made_is_refused(
    own_index: Index, other_folder: Path, client_of: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every look at a table in turn: the answer is the whole old one or a refusal."""
    client = client_of(own_index)
    expected = client.get("/api/memories/L0N0").json()
    look, looks, moved = Index.stream, [0], own_index.folder.with_name("moved")
    refused = 0

    def replace_then_look(self: Index, *arguments: Any) -> Iterator[Any]:
        looks[0] -= 1
        if looks[0] == 0:
            own_index.folder.rename(moved)
            shutil.copytree(other_folder, own_index.folder)
        return look(self, *arguments)

    monkeypatch.setattr(Index, "stream", replace_then_look)
    for place in range(1, 20):
        looks[0] = place
        answer = client.get("/api/memories/L0N0")
        if looks[0] > 0:  # it does not look so often
            break
        assert answer.status_code == 409 and REFUSED in answer.json()["error"]
        refused += 1
        shutil.rmtree(own_index.folder)
        moved.rename(own_index.folder)
        looks[0] = 0
        assert client.get("/api/memories/L0N0").json() == expected
    assert refused >= 3


def test_a_second_index_that_was_replaced_is_refused_too(
    own_index: Index, index_folder: Path, other_folder: Path, client_of: Callable[..., TestClient]
) -> None:
    client = client_of(index_folder, other=own_index)
    assert client.get("/compare").status_code == 200
    shutil.rmtree(own_index.folder)
    shutil.copytree(other_folder, own_index.folder)
    for path in ("/compare", "/api/status"):
        assert client.get(path).status_code == 409
