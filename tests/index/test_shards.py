"""Shards merged in any order give the bytes of one process. Shards that do not fit together are rejected."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from scale_helpers import OPTIONS, TEXTS, Scans, tables_of

import memlens
from memlens.corpus import sentences
from memlens.errors import IndexFolderError, MemlensError, SettingError
from memlens.files import read_sealed, write_sealed
from memlens.index import staging
from memlens.index.shards import open_shard

OF = 3


@pytest.fixture(scope="module")
def parts(small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return all shards of the scan of `alone`. Tests must not change them."""
    folder = tmp_path_factory.mktemp("parts")
    for number in range(1, OF + 1):
        memlens.scan(small_checkpoint, TEXTS, out=folder / str(number), shard=f"{number}/{OF}", **OPTIONS)
    return [folder / str(number) for number in range(1, OF + 1)]


def test_parts_in_any_order_give_the_bytes_of_one_process(parts: list[Path], alone: Path, tmp_path: Path) -> None:
    index = memlens.merge(random.Random(3).sample(parts, OF), out=tmp_path)
    assert tables_of(tmp_path) == tables_of(alone)
    assert index.manifest == memlens.open_index(alone).manifest
    assert not (tmp_path / "partial").exists() and memlens.check(index).is_whole


def test_a_part_is_no_index_and_says_what_it_is_and_the_corpus_is_kept_once(parts: list[Path]) -> None:
    for part in parts:
        with pytest.raises(IndexFolderError, match="one shard of a scan; merge all shards with `memlens merge"):
            memlens.open_index(part)
    assert [(part / "partial" / "corpus.parquet").is_file() for part in parts] == [True, False, False]


def test_a_part_that_is_complete_is_not_done_again(parts: list[Path], scans: Scans) -> None:
    stages: list[str] = []
    shard = scans.run(parts[1], shard="2/3", progress=lambda stage, *_: stages.append(stage))
    assert stages == [] and str(shard.id) == "2/3"


def test_an_interrupted_part_is_continued(parts: list[Path], scans: Scans, tmp_path: Path) -> None:
    scans.stop(tmp_path / "part", 5, shard="2/3")
    with pytest.raises(IndexFolderError, match="unfinished scan; repeat its `memlens scan --shard`"):
        memlens.merge([parts[0], tmp_path / "part", parts[2]], out=tmp_path / "index")
    scans.run(tmp_path / "part", shard="2/3")
    memlens.merge([parts[2], tmp_path / "part", parts[0]], out=tmp_path / "index")
    assert tables_of(tmp_path / "index") == tables_of(scans.alone)


def test_parts_of_another_kind_of_processor_are_joined_and_told(
    parts: list[Path], scans: Scans, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run
) -> None:
    """torch reads ATEN_CPU_CAPABILITY when it is loaded. Here the variable changes only the note in the shard."""
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "other")
    scans.run(tmp_path / "part", shard="2/3")
    code, _, err = run("merge", parts[0], tmp_path / "part", parts[2], "-o", tmp_path / "index")
    assert code == 0 and err.count("parts of this scan were made with torch") == 1 and " other; the last bits" in err
    hands = memlens.open_index(tmp_path / "index").manifest.scanned_with
    assert [hand["processor"].endswith("other") for hand in hands] == [False, True]
    assert tables_of(tmp_path / "index") == tables_of(scans.alone)
    assert "parts of this scan" not in run("merge", *parts, "-o", tmp_path / "same")[2]


def test_a_scan_that_is_continued_on_another_kind_of_processor_says_so(
    scans: Scans, small_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run
) -> None:
    command = ["scan", small_checkpoint, *TEXTS, "-o", tmp_path, "--threads", 1, "--top", 5, "--batch-tokens", 64]
    scans.stop(tmp_path, 4)
    shutil.copytree(tmp_path, tmp_path.with_name("again"))
    with monkeypatch.context() as patch:
        patch.setenv("ATEN_CPU_CAPABILITY", "other")
        code, _, err = run(*command)
    assert code == 0 and err.count("parts of this scan were made with torch") == 1
    assert len(memlens.open_index(tmp_path).manifest.scanned_with) == 2
    command[-7] = tmp_path.with_name("again")
    code, _, err = run(*command)
    assert code == 0 and "parts of this scan" not in err


def test_missing_doubled_and_foreign_parts_are_refused(parts: list[Path], scans: Scans, tmp_path: Path) -> None:
    out = tmp_path / "index"
    with pytest.raises(SettingError, match="is one of the shards"):
        memlens.merge(parts, out=parts[2], resume=False)
    others = {"2/4": {}, "top 6 instead of 5": {"top": 6}, "threads 2 instead of 1": {"threads": 2}}
    for number, (words, options) in enumerate(others.items()):
        scans.run(tmp_path / str(number), shard=words if "/" in words else "2/3", **options)
    for given, words in (
        ([parts[0], parts[2]], "missing: 2; scan them, starting with --shard 2/3"),
        ([*parts, parts[0]], "both shard 1/3"),
        ([*parts[:2], scans.alone], "not a shard of a scan"),
        *(([parts[0], tmp_path / str(number), parts[2]], words) for number, words in enumerate(others)),
    ):
        with pytest.raises(IndexFolderError, match=words):
            memlens.merge(given, out=out)
    assert not out.exists()


def test_a_part_whose_sentences_begin_elsewhere_is_refused(
    parts: list[Path], scans: Scans, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version of sentencex may divide the same tokens into other sentences."""
    cut = sentences.cut_sentences

    def cut_more(line: str, language: str) -> Iterator[str]:
        for sentence in cut(line, language):
            at = sentence.rfind(".")
            is_within_the_context = 0 < at < 40  # longer ones lose their last tokens
            yield from (sentence[:at], sentence[at:]) if is_within_the_context else (sentence,)

    with monkeypatch.context() as patch:
        patch.setattr(sentences, "cut_sentences", cut_more)
        scans.run(tmp_path / "part", shard="2/3")
    ours, theirs = (open_shard(folder).document.tokens.split() for folder in (parts[1], tmp_path / "part"))
    assert ours[0] == theirs[0] and ours[1] != theirs[1]
    with pytest.raises(IndexFolderError, match="a scan of another division of the corpus into sentences"):
        memlens.merge([parts[0], tmp_path / "part", parts[2]], out=tmp_path / "index")
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize("name", ["plan", "model", "shapes", "counts", "tokens", "scanned_with", "files"])
def test_a_sealed_document_of_other_kinds_is_refused(parts: list[Path], tmp_path: Path, name: str) -> None:
    part = shutil.copytree(parts[1], tmp_path / "part")
    content = read_sealed(part / "partial" / "shard.json")
    write_sealed(part / "partial" / "shard.json", {key: content[key] for key in content if key != "seal"} | {name: 7})
    with pytest.raises(IndexFolderError, match=rf"damaged \(Expected .* at `\$.{name}`\); scan this shard again"):
        memlens.merge([parts[0], part, parts[2]], out=tmp_path / "index")
    assert not (tmp_path / "index").exists()


def test_a_folder_of_another_part_is_not_continued(parts: list[Path], scans: Scans) -> None:
    for shard in ("3/3", None):
        with pytest.raises(IndexFolderError, match="unfinished scan of shard 2/3"):
            scans.run(parts[1], shard=shard)


def less_a_token(content: bytes) -> bytes:
    document = json.loads(content)
    document["counts"]["tokens"] -= 1
    return json.dumps(document).encode()


def without_shapes(content: bytes) -> bytes:
    return json.dumps({name: part for name, part in json.loads(content).items() if name != "shapes"}).encode()


def with_a_flipped_bit(content: bytes) -> bytes:
    return content[: len(content) // 2] + bytes([content[len(content) // 2] ^ 4]) + content[len(content) // 2 + 1 :]


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("parts/*.npz", with_a_flipped_bit),
        ("parts/*.npz", None),
        ("tokens.bin", with_a_flipped_bit),
        ("shard.json", without_shapes),
        ("shard.json", less_a_token),
        ("corpus.json", less_a_token),
    ],
)
def test_a_damaged_part_is_named_and_leaves_no_index(parts, tmp_path, name, damage) -> None:
    copies = [Path(shutil.copytree(part, tmp_path / part.name)) for part in parts]
    (damaged,) = (copies[0] / "partial").glob(name)
    if damage is None:
        damaged.unlink()
    else:
        damaged.write_bytes(damage(damaged.read_bytes()))
    with pytest.raises(MemlensError, match=f"{damaged.name} is (missing or )?damaged"):
        memlens.merge(copies, out=tmp_path / "index")
    assert not (tmp_path / "index").exists()


def test_a_part_whose_files_are_gone_is_not_called_complete(parts: list[Path], scans: Scans, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(parts[1], tmp_path / "part"))
    (state,) = (copy / "partial" / "parts").glob("*.npz")
    state.unlink()
    with pytest.raises(
        IndexFolderError, match=f"{state.name} is missing or damaged; scan shard 2/3 again with --fresh"
    ):
        scans.run(copy, shard="2/3")


def test_a_part_that_is_being_thrown_away_is_no_part_any_more(parts, tmp_path, monkeypatch) -> None:

    copy = Path(shutil.copytree(parts[1], tmp_path / "part"))
    monkeypatch.setattr(shutil, "rmtree", lambda path: 1 / 0)  # dies before anything else is removed
    with pytest.raises(ZeroDivisionError):
        staging.remove_partial(copy)
    with pytest.raises(IndexFolderError, match="unfinished scan"):
        memlens.merge([parts[0], copy, parts[2]], out=tmp_path / "index")


def test_passes_over_few_layers_give_the_bytes_of_one_pass(scans: Scans, tmp_path: Path) -> None:
    scans.end(tmp_path / "two", layer_budget=2)
    scans.stop(tmp_path / "mixed", 130, layer_budget=2)
    scans.end(tmp_path / "mixed", layer_budget=1)  # another budget goes on
