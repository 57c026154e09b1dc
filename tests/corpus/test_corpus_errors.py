"""Every invalid corpus raises a one-line error that names the place and says what to do."""

import gzip
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from memlens.corpus.readers import DOCUMENT_LIMIT
from memlens.corpus.sentences import corpus_fingerprint, read_passages, read_units
from memlens.errors import CorpusError, SettingError
from memlens.settings import CorpusSettings, HubSpec


def refusal(source: Path | str, **settings: str) -> str:
    """Return the message of the CorpusError that reading the source raises."""
    with pytest.raises(CorpusError) as error:
        list(read_passages(CorpusSettings((str(source),), **settings)))
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


def has(message: str, *parts: str) -> None:
    """Assert that a message contains all parts."""
    for part in parts:
        assert part in message, f"{part!r} is not in {message!r}"


def test_a_source_that_does_not_exist(tmp_path: Path) -> None:
    has(refusal(tmp_path / "no.txt"), "no.txt", "does not exist", "check the path")
    has(refusal(tmp_path / ("x" * 300 + ".txt")), "xxx.txt", "check the path")
    (tmp_path / "a.txt").symlink_to(tmp_path / "gone.txt")
    has(refusal(tmp_path), "a.txt", "No such file")


@pytest.mark.parametrize("name", ["a.md", "a", "a.gz", "a.csv.gz", "txt"])
def test_a_file_of_an_unknown_type_and_a_folder_with_no_other_files(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("x")
    has(refusal(tmp_path / name), f"{name}'", "unknown file type", ".jsonl")
    has(refusal(tmp_path), tmp_path.name, "no file that memlens can read", ".txt, .jsonl or .parquet")


def test_a_pipe_is_rejected_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.txt")
    has(refusal(tmp_path / "a.txt"), "a.txt", "not a regular file")
    with pytest.raises(CorpusError, match="not a regular file"):
        corpus_fingerprint(CorpusSettings((str(tmp_path),)))


@contextmanager
def without_rights() -> Iterator[None]:
    """Run as another user if this one is root, who may read everything."""
    user = os.geteuid()
    try:
        os.seteuid(user or 65534)
        yield
    finally:
        os.seteuid(user)


def test_a_file_and_a_folder_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # relative names, because other users may not enter the folders above
    for folder in (tmp_path, Path("shut")):
        folder.mkdir(exist_ok=True)
    tmp_path.chmod(0o755)
    Path("a.txt").write_text("x")
    Path("a.txt").chmod(0)
    Path("shut").chmod(0)
    try:
        with without_rights():
            has(refusal("a.txt"), "a.txt", "Permission denied", "permissions")
            has(refusal("shut"), "shut", "Permission denied", "permissions")
            with pytest.raises(CorpusError, match=r"a\.txt.*Permission denied"):
                corpus_fingerprint(CorpusSettings(("a.txt",)))
    finally:
        Path("shut").chmod(0o755)


@pytest.mark.parametrize(
    ("name", "data", "parts"),
    [
        *(
            (f"a{e}", b'"one"\n"caf\xe9"\n', (f"a{e}' line 2", "not valid UTF-8 at byte 5", "0xe9", "iconv"))
            for e in (".txt", ".jsonl")
        ),
        ("a.txt", "one\ntwo".encode("utf-16-le"), ("a.txt' line 1", "NUL at byte 2", "iconv")),
    ],
)
def test_text_that_is_not_utf8(tmp_path: Path, name: str, data: bytes, parts: tuple[str, ...]) -> None:
    (tmp_path / name).write_bytes(data)
    has(refusal(tmp_path / name), *parts)


def test_binary_data_without_line_ends_is_rejected_at_its_first_nul(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\nx")
    os.truncate(tmp_path / "a.txt", 8 << 30)  # append a hole of zeros, which would be read as one line of 8 GB
    has(refusal(tmp_path / "a.txt"), "a.txt' line 3", "NUL at byte 2")


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ('{"text": "x"', ("not JSON", "column 13", "one object or string per line")),
        ("[" * 200_000, ("not JSON",)),
        ("9" * 5000, ("not JSON",)),
        ("17", ("a JSON number", "not an object or string")),
        ("null", ("a JSON null",)),
        ('["x"]', ("a JSON list",)),
        ('{"txt": "x", "id": 3}', ("no column 'text'", "--column: txt, id")),
        ("{}", ("no column 'text'", "--column: none")),
        ('{"text": 3}', ("column 'text' is a number, not text", "--column")),
        ('{"text": ["x"]}', ("column 'text' is a list, not text",)),
        ('{"text": "a\\u0000b"}', ("NUL at character 2", "remove")),
        ('"ab\\ud800"', ("unpaired surrogate (U+D800) at character 3", "remove")),
    ],
)
def test_a_bad_record_of_jsonl(tmp_path: Path, line: str, parts: tuple[str, ...]) -> None:
    (tmp_path / "a.jsonl").write_text(f'"fine"\n\n{line}\n')
    has(refusal(tmp_path / "a.jsonl"), "a.jsonl' line 3", *parts)


@pytest.mark.parametrize(
    ("table", "parts"),
    [
        (pa.table({"body": ["x"], "id": [1]}), ("no column 'text'", "--column: body, id")),
        (pa.table({"text": [1]}), ("column 'text' is", "not text")),
        (pa.table({"text": [["x"]]}), ("column 'text' is", "not text")),
        (pa.table({"text": [b"x"]}), ("column 'text' is", "not text")),
        (pa.Table.from_arrays([pa.array(["x"])] * 2, names=["text", "text"]), ("more than once",)),
    ],
)
def test_a_parquet_column_that_cannot_be_read(tmp_path: Path, table: pa.Table, parts: tuple[str, ...]) -> None:
    pq.write_table(table, tmp_path / "a.parquet")
    has(refusal(tmp_path / "a.parquet"), "a.parquet' record 1", *parts)


def test_a_parquet_text_that_is_not_utf8_or_holds_a_nul(tmp_path: Path) -> None:
    offsets = pa.py_buffer(bytes([0, 0, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0]))
    for data, problem in ((b"xa\xff", "not valid UTF-8 at byte 2"), (b"xa\0", "NUL at character 2")):
        column = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(data)])
        pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
        has(refusal(tmp_path / "a.parquet"), "a.parquet' record 2", problem)


def test_a_file_that_is_not_parquet_or_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 but no more")
    has(refusal(path), "a.parquet' record 1", "not a .parquet file", "write it again")
    pq.write_table(pa.table({"text": ["one", "two"] * 1000}), path)
    data = bytearray(path.read_bytes())
    data[10:40] = b"\xff" * 30
    path.write_bytes(data)
    has(refusal(path), "a.parquet' record 1", "not a .parquet file")


@pytest.mark.parametrize("kind", [".txt", ".jsonl", ".parquet"])
@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["truncated", "not compressed"])
def test_a_compressed_file_that_is_damaged(tmp_path, compress, kind, ending, damage) -> None:
    plain = b'"a line of text"\n' * 500
    path = tmp_path / f"a{kind}{ending}"
    path.write_bytes(compress(plain, ending)[:-5] if damage == "truncated" else plain)
    has(refusal(path), f"a{kind}{ending}'", f"truncated or not a {ending} file", "again")


LONG = """
import resource, sys
from memlens.corpus.sentences import read_units
from memlens.errors import CorpusError
from memlens.settings import CorpusSettings
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    for unit in read_units(CorpusSettings((sys.argv[1],), unit="line")):
        pass
except CorpusError as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", pytest.param("a.parquet", marks=pytest.mark.sweep)])
def test_an_endless_line_is_rejected_with_its_number_before_it_fills_the_memory(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name.endswith(".parquet"):  # 20 texts within the limit and one beyond it
        texts = pa.array(["x" * (15 << 20)] * 20 + ["y" * (17 << 20)], pa.large_string())
        pq.write_table(pa.table({"text": texts}), path, compression="zstd", use_dictionary=False, row_group_size=4)
    else:
        with gzip.open(path, "wb", compresslevel=1) as file:
            file.write(b'"fine"\n')
            for _ in range(400):
                file.write(b"x" * (1 << 20))
    process = subprocess.run([sys.executable, "-c", LONG, str(path)], capture_output=True, text=True, check=True)
    message, growth = process.stdout.splitlines()
    place = "record 21" if name.endswith(".parquet") else "line 2"
    has(message, f"{name}' {place} is longer than 16 million characters", "split the text")
    assert int(growth) < 250_000  # kilobytes


def test_a_txt_file_too_large_for_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes((b"x" * (1 << 20) + b"\n") * ((DOCUMENT_LIMIT >> 20) + 1))
    has(refusal(tmp_path / "a.txt", unit="document"), "a.txt'", "64 million", ".jsonl", "block:N")
    assert sum(1 for _ in read_passages(CorpusSettings((str(tmp_path / "a.txt"),), unit="block:8"))) > 1


@pytest.mark.parametrize(
    ("source", "spec"),
    [
        ("hf:wikitext", HubSpec("wikitext", None, "train")),
        ("hf:Salesforce/wikitext:wikitext-2-v1", HubSpec("Salesforce/wikitext", "wikitext-2-v1", "train")),
        ("hf:a/b:c:validation", HubSpec("a/b", "c", "validation")),
        ("hf:a/b::test", HubSpec("a/b", None, "test")),
        ("hf:a/b::", HubSpec("a/b", None, "train")),
    ],
)
def test_a_hub_source_is_parsed(source: str, spec: HubSpec) -> None:
    assert HubSpec.parse(source) == HubSpec.parse(str(spec)) == spec


def test_a_hub_source_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    has(refusal("hf:wikitext"), "hf:wikitext", "datasets", 'pip install "memlens[datasets]"')
    with pytest.raises(CorpusError, match="pip install"):
        corpus_fingerprint(CorpusSettings(("hf:wikitext",)))


def test_a_hub_source_is_streamed_and_its_errors_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "One. Two."}\n{"text": null}\n{"text": "Three."}\n')
    name = f"hf:{tmp_path}"
    units = list(read_units(CorpusSettings((name,))))
    assert [unit.text for unit in units] == ["One.", "Two.", "Three."]
    assert [unit.source.rpartition(":")[2] for unit in units] == ["1", "1", "3"]
    assert len(corpus_fingerprint(CorpusSettings((name,)))) == 64
    has(refusal(f"{name}::nowhere"), "nowhere", "check name, config, split")
    has(refusal(name, column="body"), "record 1", "no column 'body'", "--column: text")


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        *(({"sources": sources}, "is not a valid name") for sources in ((" ",), ("a\0.txt",))),
        *(({"sources": sources}, "hf:NAME") for sources in (("hf:",), ("hf:a:b:c:d",))),
        ({"sources": ()}, "the list of corpora is empty"),
        ({"unit": "word"}, "--unit is 'word'; choose sentence, line, document or block:N"),
        *(({"unit": unit}, "choose sentence") for unit in ("block", "block:0", "block:-3", "block:1.5", "block:٣")),
        ({"column": ""}, "column"),
        ({"language": "English"}, "write it like en"),
        ({"language": ""}, "language"),
    ],
)
def test_invalid_settings_are_rejected_at_once(settings: dict[str, object], part: str) -> None:
    with pytest.raises(SettingError) as error:
        CorpusSettings(**{"sources": ("a.txt",), **settings})  # type: ignore[arg-type]
    assert part in str(error.value) and len(str(error.value).splitlines()) == 1


def test_the_block_length_is_read_from_the_unit() -> None:
    assert CorpusSettings(("a.txt",), unit="block:128").block == 128 and CorpusSettings(("a.txt",)).block is None
