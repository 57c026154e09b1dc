"""All file types, compressions and units, and the order in which files are read."""

import gzip
import json
import os
import tracemalloc
from collections.abc import Callable
from importlib.resources import files
from itertools import islice, pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, strategies as st

from memlens.corpus.readers import Passage, _split_lines
from memlens.corpus.sentences import corpus_fingerprint, cut_sentences, read_passages, read_units
from memlens.errors import CorpusError
from memlens.settings import CorpusSettings

Compress = Callable[[bytes, str], bytes]
TEXT = "The first paragraph. It has two sentences.\n\n  A second one, by Mr. Smith.  \n"
SENTENCES = ["The first paragraph.", "It has two sentences.", "A second one, by Mr. Smith."]


def parquet_bytes(**columns: list[str | None]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()}), sink)
    return sink.getvalue().to_pybytes()


def write(path: Path, data: bytes | str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return str(path)


def texts(source: str, **settings: str) -> list[str]:
    return [unit.text for unit in read_units(CorpusSettings((source,), **settings))]


def passages(source: str, **settings: str) -> list[tuple[str, str]]:
    return [(passage.text, passage.source) for passage in read_passages(CorpusSettings((source,), **settings))]


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", [".txt", ".jsonl", ".parquet"])
def test_every_kind_and_compression_gives_the_same_sentences(tmp_path, compress, kind, compression) -> None:
    data = {
        ".txt": TEXT.encode(),
        ".jsonl": json.dumps({"text": TEXT}).encode(),
        ".parquet": parquet_bytes(other=["x"], text=[TEXT]),
    }[kind]
    for name in (f"a{kind}{compression}", f"A{kind}{compression}".upper()):
        assert texts(write(tmp_path / name, compress(data, compression))) == SENTENCES


def test_a_jsonl_passage_is_an_object_or_a_string_and_blank_lines_and_nulls_are_skipped(tmp_path: Path) -> None:
    lines = ['{"text": "one", "id": 1}', "", '"two"', '{"text": null}', '{"text": " "}', '{"text": "\\ud83d\\ude00"}']
    source = write(tmp_path / "a.jsonl", "\n".join(lines))
    assert passages(source) == [("one", "a.jsonl:1"), ("two", "a.jsonl:3"), ("😀", "a.jsonl:6")]


@pytest.mark.parametrize("type_", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_a_parquet_passage_is_a_row_of_the_selected_column_for_every_string_type(tmp_path, type_) -> None:
    texts = [None if i == 2 else f"t{i}" for i in range(1, 1001)]
    table = pa.table({"text": ["no"] * 1000, "body": pa.array(texts, pa.string()).cast(type_)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=300)  # rows are numbered across groups and batches
    expected = [(text, f"a.parquet:{i}") for i, text in enumerate(texts, 1) if text]
    assert passages(str(tmp_path / "a.parquet"), column="body") == expected


def test_the_units_cut_the_same_text_differently(tmp_path: Path) -> None:
    lines = ["The first paragraph. It has two sentences.", "A second one, by Mr. Smith."]
    units = {"sentence": SENTENCES, "line": lines, "document": [TEXT.strip()], "block:4": [TEXT.strip()]}
    for source in (write(tmp_path / "a.txt", TEXT), write(tmp_path / "a.jsonl", json.dumps(TEXT))):
        assert {unit: texts(source, unit=unit) for unit in units} == units


def test_a_passage_is_a_line_with_its_number_and_a_unit_keeps_its_source(tmp_path: Path) -> None:
    source = write(tmp_path / "a.txt", TEXT)
    assert [place for _, place in passages(source)] == ["a.txt:1", "a.txt:3"]
    assert [unit.source for unit in read_units(CorpusSettings((source,)))] == ["a.txt:1", "a.txt:1", "a.txt:3"]
    assert [unit.source for unit in read_units(CorpusSettings((source,), unit="document"))] == ["a.txt"]


def test_a_long_txt_file_for_blocks_is_split_into_documents_at_line_ends(tmp_path: Path) -> None:
    lines = [f"line {number} " + "x" * 1000 for number in range(1, 3001)]
    documents = passages(write(tmp_path / "a.txt", "\n".join(lines)), unit="block:8")
    assert len(documents) == 3
    assert "\n".join(text for text, _ in documents).split("\n") == lines
    for text, source in documents:
        assert lines[int(source.removeprefix("a.txt:")) - 1] == text.split("\n")[0]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_only_line_feeds_and_carriage_returns_end_a_line(tmp_path: Path, end: str) -> None:
    lines = ["one\x0bone", "two\x0ctwo", "three\u2028three", "four\x85four"]
    for name, text in (("a.txt", end.join(lines)), ("a.jsonl", json.dumps(end.join(lines)))):
        assert texts(write(tmp_path / name, text), unit="line") == lines


@given(st.text("ab\r\n", max_size=30).map(str.encode), st.lists(st.integers(0, 30), max_size=6))
def test_lines_do_not_depend_on_where_chunks_are_cut(data: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(data)]
    chunks = [data[a:b] for a, b in pairwise(edges)]
    lines = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    numbered = list(enumerate(lines if lines[-1] else lines[:-1], start=1))
    assert list(_split_lines(iter(chunks))) == numbered
    assert list(_split_lines(iter(chunks), blank=False)) == [(number, line) for number, line in numbered if line]


def test_many_empty_lines_are_counted_and_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"\n" * (3 << 20) + b"last", 1))
    passages = list(read_passages(CorpusSettings((str(tmp_path / "a.txt.gz"),))))
    assert [passage.source for passage in passages] == [f"a.txt.gz:{(3 << 20) + 1}"]


def test_a_chunk_of_empty_lines_is_not_split() -> None:
    """Splitting 200 MB of them took a minute."""

    class Chunk(bytes):
        def split(self, *_: object) -> list[bytes]:  # type: ignore[override]
            raise AssertionError

    assert list(_split_lines(iter([Chunk(b"\n" * 5), b"last"]), blank=False)) == [(6, b"last")]


def test_a_byte_order_mark_is_dropped_at_the_start_only(tmp_path: Path) -> None:
    assert texts(write(tmp_path / "a.txt", "\ufeffone\n\ufefftwo\n"), unit="line") == ["one", "\ufefftwo"]
    assert texts(write(tmp_path / "a.jsonl", '\ufeff{"text": "one"}')) == ["one"]


@given(st.text(st.sampled_from("Ab. !?\"'\xa0\u2028\u3000é。日😀"), max_size=40))
@example("Vitamin C\xa0. More.")
@example("Plan B\u2028. More.")
def test_sentences_joined_are_the_line(line: str) -> None:
    assert "".join(cut_sentences(line, "en")) == line


def test_a_folder_is_read_in_sorted_order_and_sources_in_their_own_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/B.jsonl", "a.txt", "notes.md", ".hidden.txt", ".git/x.txt"):
        write(tmp_path / name, '"x"')
    assert [source for _, source in passages(str(tmp_path))] == ["a/B.jsonl:1", "a/z.txt:1", "a.txt:1", "b.txt:1"]
    b, a = write(tmp_path / "b.txt", "b"), write(tmp_path / "a.txt", "a")
    assert list(read_passages(CorpusSettings((b, a)))) == [Passage("b", "b.txt:1"), Passage("a", "a.txt:1")]


def test_a_folder_that_links_to_itself_is_walked_once(tmp_path: Path) -> None:
    write(tmp_path / "in" / "a.txt", "a")
    write(tmp_path / "elsewhere" / "b.txt", "b")
    (tmp_path / "in" / "loop").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "other").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "in")
    assert [source for _, source in passages(str(tmp_path / "in"))] == ["a.txt:1", "other/b.txt:1"]


def test_the_bundled_prose_is_text_files_and_the_bundled_articles_are_jsonl_records() -> None:
    prose, train, bundled, held_out = (
        list(islice(read_units(CorpusSettings((source,))), 50))
        for source in ("bundled:prose", "bundled:train", "bundled", "bundled:held-out")
    )
    assert len(prose) == len(train) == len(held_out) == 50 and train == bundled
    assert all(unit.source.partition(":")[0].endswith(".txt") and "/" not in unit.source for unit in prose)
    assert train[0].source == "train.jsonl.gz:1" and held_out[0].source == "held-out.jsonl.gz:1"
    with pytest.raises(
        CorpusError, match=r"no bundled text 'bundled:news'; choose one of bundled:train, bundled:held-out"
    ):
        next(read_passages(CorpusSettings(("bundled:news",))))


def test_no_article_is_in_both_training_and_held_out_text_and_every_article_has_a_source() -> None:
    folder, titles = Path(str(files("memlens"))) / "bundled" / "wikipedia", {}
    for name in ("train", "held-out"):
        with gzip.open(folder / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
            titles[name] = [json.loads(line)["title"] for line in lines]
    assert titles["train"] and titles["held-out"] and not set(titles["train"]) & set(titles["held-out"])
    sources = (folder / "SOURCES.txt").read_text(encoding="utf-8").splitlines()
    links = [line for line in sources if line.startswith("https://en.wikipedia.org/wiki/")]
    assert len(links) == len(titles["train"]) + len(titles["held-out"])


def test_file_names_that_are_not_valid_text_give_valid_sources(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/a\xff\n.txt")).write_text("x")
    assert [source for _, source in passages(str(tmp_path))] == ["a\ufffd\ufffd.txt:1"]


def test_reading_the_first_passages_of_a_huge_file_reads_no_further(tmp_path: Path) -> None:
    path = tmp_path / "huge.txt"
    write(path, "A line of text.\n" * 200_000)
    os.truncate(path, 8 << 30)  # append a hole of zeros, which raise an error when they are read
    assert len(list(islice(read_passages(CorpusSettings((str(path),))), 10))) == 10


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst", "a.jsonl", "a.parquet"])
def test_a_large_file_is_read_in_bounded_memory(tmp_path: Path, compress: Compress, name: str) -> None:
    lines = [f"Line {number} says: {'word ' * 200}" for number in range(20_000)]  # 20 MB
    if name == "a.parquet":
        pq.write_table(pa.table({"text": lines}), tmp_path / name, row_group_size=5000)
    else:
        data = "\n".join(json.dumps({"text": line}) if "jsonl" in name else line for line in lines).encode()
        write(tmp_path / name, compress(data, Path(name).suffix))
    del lines
    settings = CorpusSettings((str(tmp_path / name),))
    list(islice(read_passages(settings), 1))  # so that imports are not measured
    tracemalloc.start()
    arrow_before = pa.total_allocated_bytes()
    count = arrow_peak = 0
    for _ in read_passages(settings):
        count += 1
        arrow_peak = max(arrow_peak, pa.total_allocated_bytes() - arrow_before)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 20_000 and peak + arrow_peak < 10 << 20


def test_one_very_long_line_is_read_whole(tmp_path: Path) -> None:
    sentence = "This is a sentence of a very long line. "
    assert texts(write(tmp_path / "a.txt", sentence * 250_000)) == [sentence.strip()] * 250_000  # 10 MB


def test_the_fingerprint_depends_on_where_a_file_ends_but_not_on_the_location_of_the_folder(tmp_path: Path) -> None:
    fingerprints = []
    for folder, first, second in (("here", "one", "two"), ("there/deep", "one", "two"), ("other", "onetwo", "")):
        write(tmp_path / folder / "a.txt", first)
        write(tmp_path / folder / "b" / "c.txt", second)
        fingerprints.append(corpus_fingerprint(CorpusSettings((str(tmp_path / folder),))))
    assert fingerprints[0] == fingerprints[1] != fingerprints[2] and len(fingerprints[0]) == 64


def test_the_fingerprint_changes_with_every_byte_name_order_and_setting(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.txt", "one"), write(tmp_path / "b.txt", "two")
    settings = [CorpusSettings((a, b)), CorpusSettings((b, a)), CorpusSettings((a,))]
    for change in ({"unit": "line"}, {"column": "body"}, {"language": "de"}):
        settings.append(CorpusSettings((a, b), **change))
    fingerprints = {corpus_fingerprint(corpus) for corpus in settings}
    write(tmp_path / "b.txt", "twO")
    fingerprints.add(corpus_fingerprint(settings[0]))
    write(tmp_path / "b.txt", "two")
    fingerprints.add(corpus_fingerprint(CorpusSettings((a, str(Path(b).rename(tmp_path / "c.txt"))))))
    assert len(fingerprints) == len(settings) + 2
