"""An index is complete or does not exist: stopped, killed and resumed scans, and folders with other files."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scale_helpers import TABLES, TEXTS, Scans, tables_of

import memlens
from memlens.errors import CorpusError, FilesError, IndexFolderError, ModelError, SettingError, UnknownName
from memlens.index import build, staging
from memlens.models.memory_model import MemoryModel
from memlens.testing import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def model() -> MemoryModel:
    return memlens.load(tiny_model("llama"), tokenizer=tiny_tokenizer())


@pytest.fixture(scope="module")
def finished(model: MemoryModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an index of the first text. Tests must not change it."""
    return memlens.scan(model, TEXTS[0], out=tmp_path_factory.mktemp("finished"), top=3).folder


@pytest.fixture
def index(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of the index that a test may change."""
    return Path(shutil.copytree(finished, tmp_path / "index"))


def test_triggers_are_sorted_by_memory_then_end_then_rank(finished: Path) -> None:
    rows = memlens.open_index(finished).table("triggers").select(["layer", "memory", "end", "rank"]).to_pylist()
    order = [(row["layer"], row["memory"], row["end"] == "bottom", row["rank"]) for row in rows]
    assert order == sorted(order)


def test_an_index_has_no_manifest_while_its_tables_are_replaced(index: Path) -> None:
    staging.replace_tables(index, index / "partial", ())
    assert not (index / "manifest.json").exists()


def test_a_new_scan_keeps_what_others_put_into_the_folder_of_experiments(model: MemoryModel, index: Path) -> None:
    notes = index / "experiments" / "mine" / "notes.txt"
    notes.parent.mkdir(parents=True)
    notes.write_text("my notes")
    (index / "experiments" / "old.parquet.part").write_text("left by a killed stage")
    memlens.scan(model, TEXTS[1], out=index, top=3, resume=False)
    assert memlens.check(index).is_whole
    assert list((index / "experiments").rglob("*")) == [notes.parent, notes]


def begin_scan(model: MemoryModel, text: Any, out: Path, **options: Any) -> None:
    """Start a scan that is interrupted before its first batch."""

    def interrupt(stage: str, done: int, total: int | None) -> None:
        if stage == "scan":
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        memlens.scan(model, text, out=out, top=3, progress=interrupt, **options)


@pytest.mark.parametrize("batches", [1, 5, 23])
def test_an_interrupted_scan_saves_its_state_and_continues(scans: Scans, tmp_path: Path, batches: int) -> None:
    scans.stop(tmp_path, batches)
    assert len(list((tmp_path / "partial" / "parts").glob("*.npz"))) == 1
    scans.go_on(tmp_path)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_same_command_again_changes_nothing(model: MemoryModel, index: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in index.iterdir() if path.name != ".lock"}
    memlens.scan(model, TEXTS[0], out=index, top=3)
    assert {path: path.stat().st_mtime_ns for path in index.iterdir() if path.name != ".lock"} == before


def test_two_threads_find_the_same_triggers_as_one(model: MemoryModel, tmp_path: Path) -> None:
    one = memlens.scan(model, TEXTS[0], out=tmp_path / "one", top=5, threads=1).table("triggers")
    two = memlens.scan(model, TEXTS[0], out=tmp_path / "two", top=5, threads=2).table("triggers")
    assert one.num_rows == two.num_rows
    np.testing.assert_allclose(one["coefficient"].to_numpy(), two["coefficient"].to_numpy(), rtol=1e-4, atol=1e-5)


def test_an_index_of_something_else_is_refused_and_left_alone(model: MemoryModel, index: Path) -> None:
    other = memlens.load(tiny_model("llama", seed=1), tokenizer=tiny_tokenizer())
    before = tables_of(index)
    for given, text, top, words in (
        (other, TEXTS[0], 3, "another model"),
        (model, TEXTS[1], 3, "another corpus"),
        (model, TEXTS[0], 4, "--top 3 instead of 4"),
    ):
        with pytest.raises(IndexFolderError, match=words):
            memlens.scan(given, text, out=index, top=top)
    assert tables_of(index) == before
    memlens.scan(other, TEXTS[0], out=index, top=3, resume=False)
    assert tables_of(index) != before


def test_an_index_stays_whole_until_its_replacement_is_complete(model, index, tmp_path) -> None:
    text, before = tmp_path / "text.jsonl", tables_of(index)
    text.write_text('{"story": "no column of the usual name"}\n')
    with pytest.raises(CorpusError):
        memlens.scan(model, text, out=index, top=3, resume=False)
    assert tables_of(index) == before
    begin_scan(model, TEXTS[1], index, resume=False)
    assert tables_of(index) == before
    assert memlens.open_index(index).triggers("L0N0")
    memlens.scan(model, TEXTS[1], out=index, top=3)  # the same command without --fresh goes on
    assert tables_of(index) == tables_of(memlens.scan(model, TEXTS[1], out=tmp_path / "new", top=3).folder)


def test_a_scan_that_failed_on_its_corpus_does_not_stand_in_the_way(model: MemoryModel, tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"story": "A story."}\n')
    for name in ("misspelt.txt", "text.jsonl"):
        with pytest.raises(CorpusError):
            memlens.scan(model, tmp_path / name, out=tmp_path / "index", top=3)
    assert memlens.scan(model, tmp_path / "text.jsonl", out=tmp_path / "index", top=3, column="story").layers


def test_a_scan_killed_while_it_publishes_is_finished_by_the_same_command(model, finished, tmp_path, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(build.Manifest, "write", lambda *arguments: 1 / 0)  # dies when the tables have been moved
        memlens.scan(model, TEXTS[0], out=tmp_path, top=3)
    with pytest.raises(IndexFolderError, match="unfinished scan"):
        memlens.open_index(tmp_path)
    memlens.scan(model, TEXTS[0], out=tmp_path, top=3)
    assert tables_of(tmp_path) == tables_of(finished)


@pytest.mark.parametrize("moment", ["before", "scan"])
def test_people_s_annotations_are_never_deleted(model: MemoryModel, index: Path, moment: str) -> None:
    def annotate(stage: str, done: int = 0, total: int | None = None) -> None:
        if stage == moment:
            (index / "annotations.jsonl").write_bytes(b"work of days")

    annotate("before")
    with pytest.raises(IndexFolderError, match="annotations"):
        memlens.scan(model, TEXTS[0], out=index, top=4, resume=False, progress=annotate)
    assert (index / "annotations.jsonl").read_bytes() == b"work of days"
    assert memlens.open_index(index).manifest.settings.top == 3


def test_files_that_appear_during_a_scan_are_left_alone(model: MemoryModel, tmp_path: Path) -> None:
    note = tmp_path / "index" / "notes.txt"
    memlens.scan(model, TEXTS[0], out=note.parent, top=3, progress=lambda *step: note.write_text("mine"))
    assert note.read_text() == "mine"


@pytest.mark.parametrize("name", ["layer=0", "sentence=0", "i[1]", "i?", "a*", "run:1", "it's", "{x}", "ü ñ%20"])
def test_a_folder_s_name_changes_nothing(model: MemoryModel, finished: Path, tmp_path: Path, name: str) -> None:
    plain = memlens.open_index(finished)
    odd = memlens.scan(model, TEXTS[0], out=tmp_path / name, top=3)
    assert tables_of(odd.folder) == tables_of(plain.folder)
    assert odd.triggers("L1N3") == plain.triggers("L1N3")
    assert odd.table("memories").equals(plain.table("memories"))


def test_a_scan_killed_while_it_tidies_up_is_complete(model: MemoryModel, index: Path) -> None:
    before = tables_of(index)
    for left in ({"tokens.bin": b""}, {"plan.json": b"{}"}, {"plan.json": b"{", "tokens.bin": b""}):
        (index / "partial").mkdir()
        for name, content in left.items():
            (index / "partial" / name).write_bytes(content)
        memlens.scan(model, TEXTS[0], out=index, top=3)
        assert tables_of(index) == before
        assert not (index / "partial").exists()


def test_a_damaged_plan_does_not_stand_in_the_way_of_a_fresh_scan(model: MemoryModel, tmp_path: Path) -> None:
    begin_scan(model, TEXTS[0], tmp_path)
    (tmp_path / "partial" / "plan.json").write_text("{")
    with pytest.raises(FilesError, match="--fresh"):
        memlens.scan(model, TEXTS[0], out=tmp_path, top=3, threads=1)
    memlens.scan(model, TEXTS[0], out=tmp_path, top=3, threads=1, resume=False)


def test_an_index_of_a_newer_memlens_is_named_and_left_and_replaced_if_asked_for(
    model: MemoryModel, finished: Path, index: Path, tmp_path: Path
) -> None:
    memlens.scan(model, TEXTS[0], out=tmp_path / "shard", top=3, shard="1/1")
    manifest = index / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"schema": 99}))
    (index / ".lock").unlink()
    before = {path.name: path.read_bytes() for path in index.iterdir()}
    with pytest.raises(IndexFolderError, match=r"newer memlens \(schema version 99.*choose another folder with -o"):
        memlens.scan(model, TEXTS[0], out=index, top=3)
    with pytest.raises(IndexFolderError, match="an index of a newer memlens"):
        memlens.merge([tmp_path / "shard"], out=index)
    assert {path.name: path.read_bytes() for path in index.iterdir()} == before
    memlens.scan(model, TEXTS[0], out=index, top=3, resume=False)
    assert tables_of(index) == tables_of(finished)


@pytest.mark.parametrize("table", TABLES)
def test_a_damaged_table_is_named_not_a_bug(model: MemoryModel, index: Path, table: str) -> None:
    opened, path = memlens.open_index(index), index / f"{table}.parquet"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(IndexFolderError, match=f"{table}.parquet is damaged"):
        opened.table(table)
    with pytest.raises(IndexFolderError, match="--fresh"):
        memlens.scan(model, TEXTS[0], out=index, top=3)


@pytest.mark.parametrize("part", ["layers", "model", "plan", "counts", "files", "histogram_edges"])
def test_a_manifest_without_a_part_is_refused(index: Path, part: str) -> None:
    manifest = json.loads((index / "manifest.json").read_text())
    del manifest[part]
    (index / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(IndexFolderError, match=f"is damaged .*`{part}`"):
        memlens.open_index(index)


def test_an_index_inside_the_corpus_and_a_folder_with_other_files_are_refused_and_left_alone(model, tmp_path) -> None:
    shutil.copy(TEXTS[0], tmp_path / "triggers.txt")
    with pytest.raises(IndexFolderError, match="inside the corpus folder"):
        memlens.scan(model, tmp_path, out=tmp_path / "index", top=3)
    for resume in (True, False):
        with pytest.raises(IndexFolderError, match="not part of an index"):
            memlens.scan(model, TEXTS[0], out=tmp_path, resume=resume)
    assert [path.name for path in tmp_path.iterdir()] == ["triggers.txt"]


def test_two_scans_into_one_folder_are_refused(model: MemoryModel, tmp_path: Path) -> None:
    refused = []

    def scan_again(*step: Any) -> None:
        with pytest.raises(FilesError, match="another memlens process"):
            memlens.scan(model, TEXTS[0], out=tmp_path / "index", top=3)
        refused.append(step)

    memlens.scan(model, TEXTS[0], out=tmp_path / "index", top=3, progress=scan_again)
    assert refused


def test_a_changed_corpus_is_not_continued(model: MemoryModel, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    shutil.copy(TEXTS[0], text)
    begin_scan(model, text, tmp_path / "index")
    text.write_text(text.read_text() + "\nOne sentence more.\n")
    with pytest.raises(IndexFolderError, match="unfinished scan of another corpus"):
        memlens.scan(model, text, out=tmp_path / "index", top=3)


def test_long_sentences_are_cut_and_counted_and_max_tokens_ends_the_text(model: MemoryModel, tmp_path: Path) -> None:
    counts = memlens.scan(model, TEXTS[0], out=tmp_path / "cut", top=3, max_length=10).manifest.counts
    assert counts.cut_sentences > 10 and counts.cut_tokens > 100 and counts.tokens <= 10 * counts.sentences
    counts = memlens.scan(model, TEXTS[0], out=tmp_path / "short", top=3, max_tokens=50).manifest.counts
    assert 50 <= counts.tokens < 50 + 32


@pytest.mark.parametrize("layers", ["0,2", [2, 0, 2]])
def test_chosen_layers_only_are_scanned(model: MemoryModel, tmp_path: Path, layers: Any) -> None:
    index = memlens.scan(model, TEXTS[0], out=tmp_path, top=3, layers=layers)
    assert index.layers == (0, 2)
    assert {row["layer"] for row in index.table("memories").to_pylist()} == {0, 2}
    with pytest.raises(UnknownName, match="layer 1 is not in this index"):
        index.triggers("L1N0")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"layers": "7"}, UnknownName, "layers 0 to 2"),
        ({"layers": "2-1"}, SettingError, "empty"),
        ({"layers": "a"}, SettingError, "0-5,11"),
        ({"layers": "²"}, SettingError, "0-5,11"),
        ({"preset": "mine"}, SettingError, "paper, released"),
        ({"threads": 100_000}, SettingError, "512 or less"),
        ({"top": 10**18}, SettingError, "100,000 or less"),
        ({"seed": 2**63}, SettingError, "or less"),
        ({"preset": "released", "dedup": "prefix"}, SettingError, "counts the BOS token alone"),
        ({"tops": 3}, SettingError, "unknown scan option 'tops'"),
        ({"workers": 0}, SettingError, "--workers is 0"),
        ({"executor": "slurm"}, SettingError, "local, ray"),
        ({"ray_address": "auto"}, SettingError, "has no effect without --executor ray"),
        ({"shard": "0/4"}, SettingError, "1 to 4"),
        ({"layer_budget": 0}, SettingError, "--layer-budget is 0"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_written(model, tmp_path, options, error, words) -> None:
    with pytest.raises(error, match=words):
        memlens.scan(model, TEXTS[0], out=tmp_path / "index", **options)
    assert not (tmp_path / "index").exists()


def test_a_corpus_without_text_is_refused(model: MemoryModel, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(CorpusError, match="no text"):
        memlens.scan(model, tmp_path / "empty.txt", out=tmp_path / "index")
    assert not (tmp_path / "index").exists()  # nothing that could be continued, so nothing


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.sweep)])
def test_a_coefficient_that_is_not_a_number_is_named_also_by_a_worker(tmp_path: Path, workers: int) -> None:
    network = tiny_model("llama")
    model = memlens.load(network, tokenizer=tiny_tokenizer())
    network.model.layers[1].mlp.up_proj.weight.data[17] = float("nan")
    with pytest.raises(ModelError, match=r"L1N17 .* NaN"):
        memlens.scan(model, TEXTS[0], out=tmp_path / "index", top=3, workers=workers, threads=1)
