"""`check` names damaged files and no others; schema versions; lazy reading of large tables."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scale_helpers import TABLES

import memlens
from memlens.cli import main
from memlens.errors import IndexFolderError, MemlensError
from memlens.files import checksum, facts_of, is_sealed, read_json, write_sealed
from memlens.index.check import DAMAGED, NOT_LISTED, OUTDATED
from memlens.index.format import SCHEMA_VERSION, TRIGGERS_SCHEMA


@pytest.fixture
def index(alone: Path, tmp_path: Path) -> Path:
    """Return a copy of the index that a test may damage."""
    return Path(shutil.copytree(alone, tmp_path / "index"))


@contextmanager
def changing_manifest(index: Path, sealed: bool = True) -> Iterator[dict[str, Any]]:
    """Yield the content of the manifest, and write it again after a test has changed it."""
    path = index / "manifest.json"
    content = json.loads(path.read_text())
    yield content
    if sealed:
        write_sealed(path, {name: part for name, part in content.items() if name != "seal"})
    else:
        path.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def with_values(alone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(alone, tmp_path_factory.mktemp("valued") / "index"))
    memlens.values(folder, top=4, threads=1)
    memlens.experiment(folder, ["agreement"], threads=1)
    return folder


def damaged_files(folder: Path) -> list[str]:
    return [finding.file for finding in memlens.check(folder).damaged]


def test_a_whole_index_is_whole(alone: Path, with_values: Path) -> None:
    for folder in (alone, with_values):
        check = memlens.check(folder)
        assert check.is_whole
        assert {f"{table}.parquet" for table in TABLES} < {finding.file for finding in check.findings}
    assert "experiments/agreement.parquet" in {finding.file for finding in memlens.check(with_values).findings}


@pytest.mark.parametrize("how", ["truncated", "bit flipped", "missing", "empty", "longer"])
def test_a_damaged_file_is_named_and_no_other(with_values: Path, tmp_path: Path, how: str) -> None:
    draw = random.Random(how)
    names = [f"{table}.parquet" for table in (*TABLES, "values", "keys", "tokens", "experiments/agreement")]
    for name in names:
        folder = Path(shutil.copytree(with_values, tmp_path / name.replace("/", "-")))
        path = folder / name
        content = bytearray(path.read_bytes())
        if how == "bit flipped":
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        damaged = {"truncated": content[: draw.randrange(1, len(content))], "empty": b"", "longer": content + b"\0"}
        path.write_bytes(damaged.get(how, content))
        if how == "missing":
            path.unlink()
        assert damaged_files(folder) == [name]


def test_a_changed_manifest_is_named(index: Path) -> None:
    path = index / "manifest.json"
    whole = path.read_bytes()
    draw = random.Random(1)
    for _ in range(60):
        content = bytearray(whole)
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(7)
        path.write_bytes(content)
        with suppress(ValueError):
            if json.loads(content) == json.loads(whole):
                continue
        assert "manifest.json" in damaged_files(index)
    path.write_bytes(whole[: len(whole) // 2])
    assert damaged_files(index) == ["manifest.json"]


@pytest.mark.parametrize("change", [lambda m: m["model"]["memories"].update({"1": 39}), lambda m: m.pop("seal")])
def test_an_index_whose_manifest_was_changed_or_has_no_seal_does_not_open(index: Path, change: Any) -> None:
    with changing_manifest(index, sealed=False) as manifest:
        change(manifest)
    with pytest.raises(IndexFolderError, match=r"manifest.json was changed after it was written"):
        memlens.open_index(index)


def test_a_seal_does_not_depend_on_whether_names_are_numbers(tmp_path: Path) -> None:
    write_sealed(tmp_path / "notes.json", {"layers": {2: "a", 10: "b"}})
    assert is_sealed(read_json(tmp_path / "notes.json"))


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("memory", 40, "memory 40, which does not exist"),
        ("layer", 7, "layer 7, which was not scanned"),
        ("sentence", 10**9, "sentence 1000000000, which does not exist"),
        ("position", 1000, "which is shorter"),
    ],
)
def test_files_that_are_whole_but_of_different_scans_are_not_of_one_piece(index, column, value, words) -> None:
    change_a_trigger(index, column, lambda row: value)
    (finding,) = memlens.check(index).damaged
    assert finding.file == "triggers.parquet" and words in finding.detail


def test_a_position_at_the_end_of_a_sentence_is_one_too_many(index: Path) -> None:
    sentences = pq.read_table(index / "corpus.parquet").to_pylist()
    change_a_trigger(index, "position", lambda row: len(sentences[row["sentence"]]["tokens"]))
    (finding,) = memlens.check(index).damaged
    assert finding.file == "triggers.parquet" and "which is shorter" in finding.detail


def change_a_trigger(index: Path, column: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a row of the triggers, and update the checksum in the manifest."""
    path = index / "triggers.parquet"
    rows = pq.read_table(path).to_pylist()
    rows[5][column] = change(rows[5])
    pq.write_table(pa.Table.from_pylist(rows, TRIGGERS_SCHEMA), path)
    with changing_manifest(index) as manifest:
        manifest["files"][path.name] = {"bytes": path.stat().st_size, "sha256": checksum(path)}


def test_rows_are_counted(index: Path) -> None:
    with changing_manifest(index) as manifest:
        manifest["counts"]["sentences"] += 1
    (finding,) = memlens.check(index).damaged
    assert finding.file == "corpus.parquet" and "rows instead of" in finding.detail


def test_an_experiment_made_from_earlier_values_is_outdated_not_damaged(with_values: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(with_values, tmp_path / "index"))
    memlens.values(folder, top=6, threads=1)
    check = memlens.check(folder)
    assert check.is_whole
    assert {f.file for f in check.findings if f.state == OUTDATED} == {"experiments/agreement.parquet"}


def test_what_a_killed_stage_has_left_is_told_but_no_damage(index: Path) -> None:
    shutil.copy(index / "memories.parquet", index / "values.parquet")
    (index / "keys.parquet.part").write_bytes(b"half")
    check = memlens.check(index)
    assert check.is_whole
    assert {f.file for f in check.findings if f.state == NOT_LISTED} == {"values.parquet", "keys.parquet.part"}


def test_damaged_annotations_are_named_and_a_folder_that_is_no_index_is_refused(index: Path, tmp_path: Path) -> None:
    (index / "annotations.jsonl").write_bytes(b"\xff" * 500 + b"\n")
    assert [f.file for f in memlens.check(index).findings if f.state == DAMAGED] == ["annotations.jsonl"]
    with pytest.raises(IndexFolderError, match="not an index"):
        memlens.check(tmp_path)


@pytest.mark.parametrize(("version", "words"), [(SCHEMA_VERSION + 1, "install a newer memlens"), (0, "scan again")])
def test_another_schema_is_refused(index: Path, version: int, words: str) -> None:
    with changing_manifest(index, sealed=False) as manifest:
        manifest["schema"] = version
    with pytest.raises(IndexFolderError, match=f"schema version {version}.*{words}"):
        memlens.open_index(index)


def test_one_memory_of_many_is_found_in_few_row_groups(index: Path) -> None:
    """All but one of the 200 row groups of a table are overwritten with nonsense. A lookup must not read them."""
    path = index / "triggers.parquet"
    groups, memories, wanted = 200, 40, 117
    row = pq.read_table(path).slice(0, 1).to_pylist()[0] | {"layer": 1, "end": "top", "rank": 0}
    with pq.ParquetWriter(path, TRIGGERS_SCHEMA, compression="zstd") as writer:
        for group in range(groups):
            rows = [{**row, "memory": group * memories + m} for m in range(memories)]
            writer.write_table(pa.Table.from_pylist(rows, TRIGGERS_SCHEMA))
    metadata, content = pq.ParquetFile(path).metadata, bytearray(path.read_bytes())
    for group, column in product(set(range(groups)) - {wanted}, range(metadata.num_columns)):
        chunk = metadata.row_group(group).column(column)
        start = chunk.dictionary_page_offset or chunk.data_page_offset
        content[start : start + chunk.total_compressed_size] = b"\xee" * chunk.total_compressed_size
    path.write_bytes(content)
    with changing_manifest(index) as manifest:
        manifest["model"]["memories"]["1"] = groups * memories
        manifest["files"]["triggers.parquet"] = facts_of(path)
    opened = memlens.open_index(index)
    (trigger,) = opened.triggers(f"L1N{wanted * memories + 7}")
    assert trigger.coefficient == pytest.approx(row["coefficient"])
    with pytest.raises(IndexFolderError, match="a query failed on"):
        opened.triggers(f"L1N{(wanted + 1) * memories}")


def rewrite_table(index: Path, table: str, change: Any, **options: Any) -> None:
    """Change a table and give it a valid checksum."""
    path = index / f"{table}.parquet"
    pq.write_table(change(pq.read_table(path)), path, **options)
    with changing_manifest(index) as manifest:
        manifest["files"][path.name] = facts_of(path)


def set_number(column: str, number: int) -> Any:
    def change(table: pa.Table) -> pa.Table:
        rows = table.to_pylist()
        rows[0][column] = [number] * len(rows[0][column]) if isinstance(rows[0][column], list) else number
        return pa.Table.from_pylist(rows, table.schema)

    return change


def set_list(column: str, value: list[Any]) -> Any:
    return lambda table: pa.Table.from_pylist(
        [{**table.to_pylist()[0], column: value}, *table.to_pylist()[1:]], table.schema
    )


def clear_text(table: pa.Table) -> pa.Table:
    return table.set_column(table.column_names.index("text"), "text", pa.nulls(len(table), pa.string()))


@pytest.mark.parametrize(
    ("table", "change", "words"),
    [
        ("triggers", set_number("memory", 10**6), "memory 1000000"),
        ("triggers", set_number("layer", 9), "layer 9"),
        ("triggers", set_number("sentence", -5), "sentence -5"),
        ("triggers", set_number("position", -7), "position -7"),
        ("triggers", set_number("position", 10**6), "position 1000000 of sentence"),
        ("triggers", set_number("next_token", 10**8), "next_token 100000000"),
        ("triggers", lambda table: table.drop_columns(["rank"]), "no column 'rank'"),
        ("triggers", lambda table: table.set_column(0, "layer", table.column("layer").cast(pa.string())), "'layer'"),
        ("corpus", set_number("tokens", -1), "tokens -1"),
        ("corpus", lambda table: table.slice(1), "rows instead of"),
        ("corpus", lambda table: table.drop_columns(["ends"]), "no column 'ends'"),
        ("vocabulary", lambda table: table.slice(0, 3), "rows instead of"),
        ("memories", lambda table: table.slice(0, 3), "rows instead of"),
        ("memories", lambda table: table.drop_columns(["histogram"]), "no column 'histogram'"),
        ("vocabulary", clear_text, "column 'text' has missing values"),
        ("corpus", clear_text, "column 'text' has missing values"),
        ("values", set_number("tokens", 10**8), "tokens 100000000"),
        ("values", set_number("max_p", None), "column 'max_p' has missing values"),
        ("keys", set_list("scores", [0.5]), "'tokens' and 'scores' have lists of different lengths"),
        ("keys", set_list("scores", [None] * 4), "column 'scores' has missing values"),
        ("counts", set_list("fired", [1]), "column 'fired' has lists of other lengths"),
        ("counts", set_list("quadrants", [None] * 4), "column 'quadrants' has lists of other lengths"),
        ("values", lambda table: table.drop_columns(["max_p"]), "no column 'max_p'"),
    ],
)
def test_a_valid_checksum_with_invalid_content_is_one_line(
    with_values: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], table: str, change: Any, words: str
) -> None:
    index = Path(shutil.copytree(with_values, tmp_path / "index"))
    rewrite_table(index, table, change)
    assert main(["show", str(index), "L0N0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("memlens: ") and words in line


def test_a_table_without_statistics_is_one_line(
    alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = Path(shutil.copytree(alone, tmp_path / "index"))
    rewrite_table(index, "triggers", lambda table: table, write_statistics=False)
    assert main(["show", str(index), "L0N0"]) == 2
    assert "its column 'layer' has no statistics" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("query", "words"),
    [
        (
            "SELECT * FROM patterns",
            r"Table with name patterns does not exist!; write tables in braces, like \{memories\}",
        ),
        ("SELECT nothing FROM {memories}", "nothing"),
        ("SELECT", "the query is invalid: SELECT clause without selection list"),
        ("SELECT * FROM {memories", r"write tables in braces, like \{memories\}"),
        ("SELECT * FROM {patterns}", "has no table 'patterns'; run `memlens patterns"),
    ],
)
def test_a_query_that_cannot_run_is_one_line(alone: Path, query: str, words: str) -> None:
    with pytest.raises(MemlensError, match=words) as raised:
        memlens.open_index(alone).sql(query)
    assert "\n" not in str(raised.value)


def test_a_query_may_contain_a_number_in_braces(alone: Path) -> None:
    query = r"SELECT regexp_matches('1999', '^\d{4}$') AS is_year FROM {memories} LIMIT 1"
    assert memlens.open_index(alone).sql(query) == [{"is_year": True}]
