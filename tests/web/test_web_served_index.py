"""An index that stays open: the same answers from memory as from files, from many threads, also when tables change."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from own_server import fewer_patterns

from memlens.errors import IndexFolderError
from memlens.index.memory import read_value
from memlens.index.reader import Index
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
        assert served.facts(name) == index.facts(name) and read_value(served, name) == read_value(index, name)


def test_tables_that_do_not_fit_are_read_from_their_files(index_folder: Path, index: Index) -> None:
    with closing(ServedIndex(index_folder, most_bytes=0)) as small:
        small.keep_in_memory()
        assert "read_parquet" in small._source_of("memories")
        assert small.triggers("L1N1") == index.triggers("L1N1")


def test_many_threads_at_once_get_their_own_answers(index: Index, served: ServedIndex) -> None:
    names = [f"L{layer}N{memory}" for layer in index.layers for memory in range(20)] * 3
    expected = {name: index.facts(name) for name in set(names)}
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
        served.facts("L0N0")


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
        ServedIndex(own_index.folder).facts("L0N0")
