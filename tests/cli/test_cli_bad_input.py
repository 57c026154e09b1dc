"""Wrong input: one line that says what to do, exit code 2, and an index that is there already stays as it is."""

from __future__ import annotations

import ctypes
import gzip
import json
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cli_helpers import Run, checksums, is_refused
from safetensors.torch import load_file, save_file


def test_a_model_or_corpus_that_is_not_there_is_refused_and_the_index_stays(
    run: Run, models: dict[str, Path], text: Path, plain: Path, tmp_path: Path
) -> None:
    before = checksums(plain)
    assert is_refused(run("info", tmp_path / "no-model"), "no-model")
    assert is_refused(run("scan", tmp_path / "no-model", text, "-o", plain), "no-model", "folder")
    for mode in ("--resume", "--fresh"):
        assert is_refused(run("scan", models["plain"], tmp_path / "nothing.txt", "-o", plain, mode), "nothing.txt")
    assert checksums(plain) == before


@pytest.mark.parametrize(
    ("config", "word"),
    [({"model_type": "bert"}, "encoder"), ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder")],
)
def test_a_model_that_is_no_causal_language_model_is_refused(
    run: Run, models: dict[str, Path], tmp_path: Path, text: Path, config: dict[str, object], word: str
) -> None:
    shutil.copytree(models["plain"], tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert is_refused(run("info", tmp_path / "model"), word)
    assert is_refused(run("scan", tmp_path / "model", text, "-o", tmp_path / "out"), word)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.txt", b"\n \n", ["no text"]),
        ("a.jsonl", b'{"body": "The river."}\n', ["text", "a.jsonl"]),
        ("latin.txt", b"The river.\nA caf\xe9 opened.\n", ["latin.txt", "UTF-8", "2"]),
        ("a.txt.gz", gzip.compress(b"The river runs to the sea. " * 50)[:-12], ["a.txt.gz"]),
    ],
)
def test_a_corpus_that_cannot_be_read_is_refused_by_file_and_line(
    run: Run, models: dict[str, Path], tmp_path: Path, name: str, content: bytes, words: list[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    assert is_refused(run("scan", models["plain"], tmp_path / name, "-o", tmp_path / "out", "--threads", 1), *words)


def test_a_folder_with_another_index_is_refused_and_stays(
    run: Run, models: dict[str, Path], plain: Path, text: Path
) -> None:
    before = checksums(plain)
    assert is_refused(run("scan", models["other"], text, "-o", plain, "--top", 7), "another model", "--fresh")
    assert is_refused(run("scan", models["plain"], text, "-o", plain, "--top", 8), "--top 7 instead of 8")
    assert checksums(plain) == before


def test_a_folder_that_holds_something_else_is_refused_and_stays(
    run: Run, models: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").write_text("Dear")
    before = checksums(tmp_path / "letters")
    for mode in ("--resume", "--fresh"):
        assert is_refused(run("scan", models["plain"], text, "-o", tmp_path / "letters", mode), "dear.txt")
    assert checksums(tmp_path / "letters") == before


def test_a_read_only_folder_is_refused(run: Run, models: dict[str, Path], text: Path, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked").chmod(0o555)
    with _as_ordinary_user():
        ran = run("scan", models["plain"], text, "-o", tmp_path / "locked" / "index")
    assert is_refused(ran, "not permitted", "-o")


def test_a_read_only_index_can_be_read_but_not_replaced(
    run: Run, models: dict[str, Path], plain: Path, text: Path
) -> None:
    before = checksums(plain)
    (plain / ".lock").chmod(0o444)
    plain.chmod(0o555)
    with _as_ordinary_user():
        shown = run("show", plain, "L0N0")
        replaced = run("scan", models["plain"], text, "-o", plain, "--fresh", "--threads", 1)
    plain.chmod(0o755)
    assert shown.code == 0
    assert is_refused(replaced, "not permitted")
    assert checksums(plain) == before


def test_a_full_disk_is_named(run: Run, models: dict[str, Path], text: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))
    try:
        ran = run("scan", models["plain"], text, "-o", tmp_path / "out", "--threads", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert is_refused(ran, "cannot write")


def test_weights_that_are_not_numbers_are_refused(
    run: Run, models: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    broken = Path(shutil.copytree(models["plain"], tmp_path / "broken"))
    weights = load_file(broken / "model.safetensors")
    weights["transformer.h.1.mlp.c_fc.weight"][0, 0] = float("nan")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    assert is_refused(run("scan", broken, text, "-o", tmp_path / "out"), "NaN", "h.1.mlp.c_fc.weight")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--layers", "0-3"], ["layer 3", "0 to 2"]),
        (["--layers", "two"], ["--layers", "0-5,11"]),
        (["--top", "0"], ["--top is 0", "1 or more"]),
        (["--top", "many"], ["--top", "integer", "memlens scan --help"]),
        (["--tpo", "3"], ["--tpo", "memlens scan --help"]),
        (["--per-sentence", "some"], ["--per-sentence", "best, all"]),
        (["--unit", "word"], ["unit", "block:N"]),
        (["--preset", "mine"], ["--preset", "paper"]),
        (["--threads", "0"], ["--threads is 0"]),
        (["--batch-tokens", "-1"], ["--batch-tokens is -1"]),
        (["--device", "abacus"], ["abacus"]),
        (["--dtype", "int8"], ["int8", "float32"]),
        (["--bottom", "maybe"], ["--bottom", "auto"]),
        (["--workers", "0"], ["--workers is 0"]),
        (["--shard", "5"], ["3/16"]),
        (["--executor", "slurm"], ["local, ray"]),
        (["--ray-address", "auto"], ["--executor ray only"]),
        (["--layer-budget", "0"], ["--layer-budget is 0"]),
    ],
)
def test_an_option_that_cannot_work_is_refused_and_the_index_stays(
    run: Run, models: dict[str, Path], plain: Path, text: Path, options: list[str], words: list[str]
) -> None:
    before = checksums(plain)
    assert is_refused(run("scan", models["plain"], text, "-o", plain, "--fresh", *options), *words)
    assert checksums(plain) == before


def test_incomplete_commands_are_refused_with_the_help_to_read(run: Run, text: Path) -> None:
    assert is_refused(run("scan"), "MODEL", "memlens scan --help")
    assert is_refused(run("scan", "model", text), "--out", "memlens scan --help")
    assert is_refused(run("polish"), "polish", "memlens --help")
    assert is_refused(run("--loud"), "--loud")


def test_names_that_an_index_lacks_are_refused(run: Run, made: dict[str, Path], tmp_path: Path) -> None:
    index = made["plain"]
    assert is_refused(run("show", index, "L3N0"), "layer 3")
    assert is_refused(run("show", index, "L0N40"), "0 to 39")
    assert is_refused(run("show", index, "first"), "L3N512")
    assert is_refused(run("show", index, "L0N0", "--top", 0), "--top")
    assert is_refused(run("show", tmp_path / "none", "L0N0"), "no index folder")
    assert is_refused(run("search", index, ""), "empty")
    assert is_refused(run("search", index, "river", "--limit", 0), "--limit is 0")
    assert is_refused(run("search", index, "river", "--in", "keys"), "--in is 'keys'", "triggers")
    assert is_refused(run("search", index, "river", "--in", "patterns"), "memlens patterns")
    assert is_refused(run("export", index, "--format", "xml"), "xml", "jsonl, csv")


def test_a_message_with_control_characters_stays_one_harmless_line(run: Run) -> None:
    ran = run("show", "no\n\x1b[31mindex", "L0N0")
    assert is_refused(ran, "no⏎␛[31mindex")


_DAC_OVERRIDE, _CAPABILITY_VERSION = 1, 0x20080522


@contextmanager
def _as_ordinary_user() -> Iterator[None]:
    """Root may write anywhere; within, this thread may not (Linux: without the capability to pass over modes)."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    data = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, data) == 0
    kept = data[0]
    data[0] = kept & ~(1 << _DAC_OVERRIDE)
    assert libc.capset(header, data) == 0  # giving up a capability is always allowed
    try:
        yield
    finally:
        data[0] = kept
        libc.capset(header, data)
