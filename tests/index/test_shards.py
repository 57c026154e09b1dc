"""Shards: parts made apart, joined in any order, give the bytes of one process; anything else is refused."""

import json
import random
import shutil
from pathlib import Path

import pytest
from scale_helpers import OPTIONS, TEXTS, interrupting_after, tables_of

import memlens
from memlens.errors import FilesError, IndexFolderError, MemlensError, SettingError

OF = 3


@pytest.fixture(scope="module")
def parts(small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """All parts of the scan that `alone` is of; only read them."""
    folder = tmp_path_factory.mktemp("parts")
    for number in range(1, OF + 1):
        memlens.scan(small_checkpoint, TEXTS, out=folder / str(number), shard=f"{number}/{OF}", **OPTIONS)
    return [folder / str(number) for number in range(1, OF + 1)]


def test_parts_in_any_order_give_the_bytes_of_one_process(parts: list[Path], alone: Path, tmp_path: Path) -> None:
    shuffled = random.Random(3).sample(parts, OF)
    index = memlens.merge(shuffled, out=tmp_path)
    assert tables_of(tmp_path) == tables_of(alone)
    assert index.manifest == memlens.open_index(alone).manifest
    assert not (tmp_path / "partial").exists()
    assert memlens.check(index).is_whole


def test_a_part_is_no_index_and_says_what_it_is(parts: list[Path]) -> None:
    for part in parts:
        with pytest.raises(IndexFolderError, match="one shard of a scan; join all shards with `memlens merge"):
            memlens.open_index(part)


def test_the_corpus_is_kept_once(parts: list[Path]) -> None:
    kept = [(part / "partial" / "corpus.parquet").is_file() for part in parts]
    assert kept == [True, False, False]


def test_a_part_that_is_complete_is_not_done_again(parts: list[Path], small_checkpoint: Path) -> None:
    stages: list[str] = []
    shard = memlens.scan(
        small_checkpoint, TEXTS, out=parts[1], shard="2/3", progress=lambda stage, *_: stages.append(stage), **OPTIONS
    )
    assert stages == [] and str(shard.id) == "2/3"


def test_an_interrupted_part_is_continued(
    parts: list[Path], small_checkpoint: Path, alone: Path, tmp_path: Path
) -> None:
    options = {"out": tmp_path / "part", "shard": "2/3", **OPTIONS}
    with pytest.raises(KeyboardInterrupt):
        memlens.scan(small_checkpoint, TEXTS, progress=interrupting_after(5), **options)
    with pytest.raises(IndexFolderError, match="unfinished scan; repeat its `memlens scan --shard`"):
        memlens.merge([parts[0], tmp_path / "part", parts[2]], out=tmp_path / "index")
    memlens.scan(small_checkpoint, TEXTS, **options)
    memlens.merge([parts[2], tmp_path / "part", parts[0]], out=tmp_path / "index")
    assert tables_of(tmp_path / "index") == tables_of(alone)


def test_missing_doubled_and_foreign_parts_are_refused(
    parts: list[Path], small_checkpoint: Path, alone: Path, tmp_path: Path
) -> None:
    out = tmp_path / "index"
    with pytest.raises(IndexFolderError, match="missing: 2; make them with --shard 2/3"):
        memlens.merge([parts[0], parts[2]], out=out)
    with pytest.raises(SettingError, match="is one of the shards"):
        memlens.merge(parts, out=parts[2], resume=False)
    with pytest.raises(IndexFolderError, match="both shard 1/3"):
        memlens.merge([*parts, parts[0]], out=out)
    with pytest.raises(IndexFolderError, match="not a shard of a scan"):
        memlens.merge([*parts[:2], alone], out=out)
    for options, words in (
        ({"shard": "2/4"}, "shard 2/4"),
        ({"shard": "2/3", "top": 6}, "--top 6 instead of 5"),
        ({"shard": "2/3", "threads": 2}, "--threads 2 instead of 1"),
    ):
        other = tmp_path / words.replace("/", "-")
        memlens.scan(small_checkpoint, TEXTS, out=other, **{**OPTIONS, **options})
        with pytest.raises(IndexFolderError, match=words):
            memlens.merge([parts[0], other, parts[2]], out=out)
    assert not out.exists()


def test_a_folder_of_another_part_is_not_continued(parts: list[Path], small_checkpoint: Path) -> None:
    for shard in ("3/3", None):
        with pytest.raises(IndexFolderError, match="unfinished scan of shard 2/3"):
            memlens.scan(small_checkpoint, TEXTS, out=parts[1], shard=shard, **OPTIONS)


@pytest.mark.parametrize("kind", ["state", "tokens", "json", "no file"])
def test_a_damaged_part_is_named_and_leaves_no_index(parts: list[Path], tmp_path: Path, kind: str) -> None:
    copies = [Path(shutil.copytree(part, tmp_path / part.name)) for part in parts]
    partial = copies[0] / "partial"
    (state,) = (partial / "parts").glob("*.npz")
    damaged = {"state": state, "tokens": partial / "tokens.bin", "json": partial / "shard.json", "no file": state}[kind]
    content = bytearray(damaged.read_bytes())
    if kind == "json":
        document = json.loads(content)
        del document["shapes"]
        damaged.write_text(json.dumps(document))
    elif kind == "no file":
        damaged.unlink()
    else:
        content[len(content) // 2] ^= 4
        damaged.write_bytes(bytes(content))
    with pytest.raises(MemlensError, match=f"{damaged.name} is (missing or )?damaged"):
        memlens.merge(copies, out=tmp_path / "index")
    with pytest.raises(IndexFolderError):
        memlens.open_index(tmp_path / "index")


def test_a_number_changed_in_a_parts_notes_is_damage(parts: list[Path], tmp_path: Path) -> None:
    copies = [Path(shutil.copytree(part, tmp_path / part.name)) for part in parts]
    for name in ("shard.json", "corpus.json"):
        path = copies[0] / "partial" / name
        document = json.loads(path.read_text())
        whole = path.read_bytes()
        document["counts"]["tokens"] -= 1
        path.write_text(json.dumps(document))
        with pytest.raises(FilesError, match=f"{name} is damaged"):
            memlens.merge(copies, out=tmp_path / "index")
        with pytest.raises(IndexFolderError):
            memlens.open_index(tmp_path / "index")
        path.write_bytes(whole)


def test_a_part_whose_files_are_gone_is_not_called_complete(
    parts: list[Path], small_checkpoint: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(parts[1], tmp_path / "part"))
    (state,) = (copy / "partial" / "parts").glob("*.npz")
    state.unlink()
    with pytest.raises(
        IndexFolderError, match=f"{state.name} is missing or damaged; make shard 2/3 again with --fresh"
    ):
        memlens.scan(small_checkpoint, TEXTS, out=copy, shard="2/3", **OPTIONS)


def test_a_part_that_is_being_thrown_away_is_no_part_any_more(
    parts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memlens.index import staging

    copy = Path(shutil.copytree(parts[1], tmp_path / "part"))
    monkeypatch.setattr(shutil, "rmtree", lambda path: 1 / 0)  # dies before anything else is removed
    with pytest.raises(ZeroDivisionError):
        staging.throw_partial_away(copy)
    with pytest.raises(IndexFolderError, match="unfinished scan"):
        memlens.merge([parts[0], copy, parts[2]], out=tmp_path / "index")


def test_a_merge_that_was_killed_is_done_again(
    parts: list[Path], alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memlens.index import build

    for name in ("write_scan_tables", "make_manifest"):
        monkeypatch.setattr(build, name, lambda *arguments: 1 / 0)  # dies before or after the tables have been moved
        with pytest.raises(ZeroDivisionError):
            memlens.merge(parts, out=tmp_path)
        monkeypatch.undo()
        with pytest.raises(IndexFolderError):
            memlens.open_index(tmp_path)
    memlens.merge(parts, out=tmp_path)
    assert tables_of(tmp_path) == tables_of(alone)


def test_passes_over_few_layers_give_the_bytes_of_one_pass(small_checkpoint: Path, alone: Path, tmp_path: Path) -> None:
    memlens.scan(small_checkpoint, TEXTS, out=tmp_path / "two", layer_budget=2, **OPTIONS)
    assert tables_of(tmp_path / "two") == tables_of(alone)
    with pytest.raises(KeyboardInterrupt):
        memlens.scan(
            small_checkpoint, TEXTS, out=tmp_path / "mixed", layer_budget=2, progress=interrupting_after(130), **OPTIONS
        )
    memlens.scan(small_checkpoint, TEXTS, out=tmp_path / "mixed", layer_budget=1, **OPTIONS)  # another budget goes on
    assert tables_of(tmp_path / "mixed") == tables_of(alone)
