"""Invalid input: each line of bad_inputs.txt fails soon, with exit code 2 and one line on stderr, and changes nothing.

A line is a command and, after =>, the start of the error message. Names in braces are replaced. The first line of each
section runs by default; the others are a sweep. Limits of settings are tested in tests/test_settings.py.
"""

from __future__ import annotations

import gzip
import json
import os
import shlex
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import Run, checksums, is_refused
from safetensors.torch import load_file, save_file

from memlens.annotations.records import Annotations, Label
from memlens.files import FOLDER_MARK
from memlens.index.reader import Index
from memlens.memory import MemoryId

LINES = (Path(__file__).parent / "bad_inputs.txt").read_text(encoding="utf-8").splitlines()


def read_cases() -> Iterator[Any]:
    """Yield (command, message) of every line."""
    previous = ""
    for line in LINES:
        if not line.startswith("#"):
            command, _, message = line.partition(" => ")
            marks = [] if previous.startswith("#") else [pytest.mark.sweep]
            yield pytest.param(command, message, id=command, marks=marks)
        previous = line


SIGNS = {
    "nul": "\0",
    "newline": "\n",
    "escape": "\x1b",
    "surrogate": "\ud800",
    "letters": "q" * 100,
    "long": "q" * 100_000,
    "name-too-long": "/tmp/" + "n" * 300,
}


@pytest.fixture(scope="module")
def places(
    models: dict[str, Path],
    text: Path,
    made: dict[str, Path],
    tiny_gpt2_values: Index,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, str]:
    """The files behind the words in braces: copies that a wrong refusal may harm, and a folder of bad things."""
    room = tmp_path_factory.mktemp("bad-inputs")
    copied = {
        "index": made["plain"],
        "labelled": made["plain"],
        "gated": made["gated"],
        "valued": tiny_gpt2_values.folder,
        "model": models["plain"],
        "other": models["other"],
    }
    for name, folder in copied.items():
        shutil.copytree(folder, room / name)
    shutil.copy(text, room)
    _make_bad_indexes(room / "bad", made["plain"])
    notes = Annotations(Index(room / "labelled"))
    notes.save(Label("bob", MemoryId(0, 0), ()))
    _make_bad_files(room / "bad")
    _make_bad_labels(room / "bad" / "probes")
    _make_bad_models(room / "bad", models["plain"])
    return {name: str(room / name) for name in (*copied, "bad")} | {"text": str(room / text.name)} | SIGNS


def _make_bad_files(bad: Path) -> None:
    for folder in ("folder", "letters", "texts", "manifest-array", "manifest-broken", "manifest-fifo"):
        (bad / folder).mkdir(parents=True)
    (bad / "manifest-folder" / "manifest.json").mkdir(parents=True)
    for fifo in ("fifo", "fifo.txt", "fifo.gguf", "manifest-fifo/manifest.json"):
        os.mkfifo(bad / fifo)
    (bad / "link").symlink_to(bad / "folder")
    (bad / "loop").symlink_to(bad / "loop")
    (bad / "zero.txt").symlink_to("/dev/zero")
    contents = {
        "empty.txt": b"\n \n",
        "latin.txt": b"The river.\nA caf\xe9 opened.\n",
        "nul.txt": b"The\0river.\n",
        "body.jsonl": b'{"body": "The river."}\n',
        "broken.jsonl": b'{"text": "The river."}\n{"text": \n',
        "cut.txt.gz": gzip.compress(b"The river runs to the sea. " * 50)[:-12],
        "not.txt.gz": b"The river.",
        "not.txt.zst": b"The river.",
        "not.parquet": b"The river.",
        "not.gguf": b"The river.",
        "picture.png": b"\x89PNG",
        "letters/dear.txt": b"Dear",
        "texts/a.txt": b"The river.\n",
        "manifest-array/manifest.json": b"[]",
        "manifest-broken/manifest.json": b'{"schema": ',
        "large.json": b" " * (65 << 20),
        "deep.json": b"[" * 100_000,
        "edits.json": json.dumps({"kind": "memlens intervention", "schema": 99}).encode(),
        "labels.csv": b"annotator,memory\nann,L0N0\n",
        "labels3.json": b'{"memlens_annotations": 3, "task": "labels", "events": []}',
        "labels-of-none.json": b'{"memlens_annotations": null, "task": "labels", "events": []}',
    }
    for name, content in contents.items():
        (bad / name).write_bytes(content)


def _make_bad_labels(bad: Path) -> None:
    """Labelled texts, and files of probes and of memories that are kept."""
    (bad / "site").mkdir(parents=True)
    (bad / "linked").mkdir()
    (bad / "linked" / "index.html").symlink_to(bad / "mine.txt")
    for fifo in ("fifo.csv", "fifo.json"):
        os.mkfifo(bad / fifo)
    good = [(f"The river {number}", "ab"[number % 2]) for number in range(40)]
    tables = {
        "head": [],
        "one": good[:1],
        "same": [("The river", "a")] * 40,
        "good": good,
        "ragged": [("The river", ""), *good],
        "many": [(f"The river {number}", f"l{number}") for number in range(40)],
        "nan": [(text, "nan") for text, _ in good],
        "inf": [(text, "inf" if number == 3 else str(number)) for number, (text, _) in enumerate(good)],
        "huge": [(text, "1e308" if label == "a" else "-1e308") for text, label in good],
        "blank": [("", label) for _, label in good],
        "latin": [("caf\xe9", "a"), *good],
        "nul": [("The\0river", "a"), *good],
        "quote": [('"The river', "a"), *good],
    }
    for name, rows in tables.items():
        lines = "".join(f"{text},{label}\n" for text, label in [("text", "label"), *rows])
        (bad / f"{name}.csv").write_bytes(lines.encode("latin-1"))
    contents = {
        "empty.csv": "",
        "body.csv": "body,kind\nThe river,a\n",
        "dup.csv": "text,text,label\na,b,c\n",
        "body.jsonl": '{"body": "x"}\n',
        "broken.jsonl": '{"text": "a", "label": "b"}\n{"text":\n',
        "array.jsonl": "[1, 2]\n",
        "nested.jsonl": '{"text": "a", "label": {"x": 1}}\n',
        "number.jsonl": '{"text": 7, "label": "x"}\n',
        "nolabel.jsonl": '{"text": "a", "label": null}\n',
        "surrogate.jsonl": '{"text": "\\ud800", "label": "a"}\n',
        "deep.jsonl": "[" * 100_000,
        "deep.json": "[" * 100_000,
        "not.json": "The river",
        "array.json": "[]",
        "probe99.json": '{"kind": "memlens probe", "schema": 99}',
        "probe0.json": '{"kind": "memlens probe", "schema": 1}',
        "kept.csv": "memory,name\nL9N9,x\n",
        "kept.json": '{"kind": "memlens collections", "schema": 1}',
        "mine.txt": "my own text",
        "mine.json": '{"a": 1}',
        "mine.csv": "a,b\n1,2\n",
        "site/index.html": "hello",
        "log.json": '{\n "at": "noon"\n}',
        "film.json.part": "half of a download",
        f"linked/{FOLDER_MARK}": "",
    }
    for name, content in contents.items():
        (bad / name).write_text(content)


def _make_bad_indexes(bad: Path, good: Path) -> None:
    """Without a lock, as a copy from elsewhere: one that is left behind shows."""
    for name in ("index-newer", "index-without-corpus"):
        shutil.copytree(good, bad / name, ignore=shutil.ignore_patterns(".lock"))
    (bad / "index-without-corpus" / "corpus.parquet").unlink()
    manifest = bad / "index-newer" / "manifest.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(content | {"schema": 99}))


def _make_bad_models(bad: Path, good: Path) -> None:
    configs = {
        "bert": json.dumps({"model_type": "bert"}),
        "t5": json.dumps({"model_type": "t5", "is_encoder_decoder": True}),
        "config-array": "[]",
        "config-broken": '{"model_type": ',
    }
    for name, config in configs.items():
        shutil.copytree(good, bad / name)
        (bad / name / "config.json").write_text(config)
    missing = {
        "config-fifo": "config.json",
        "no-tokenizer": "tokenizer.json",
        "no-weights": "model.safetensors",
        "weights-fifo": "model.safetensors",
    }
    for name, file in missing.items():
        shutil.copytree(good, bad / name)
        (bad / name / file).unlink()
        if name.endswith("fifo"):
            os.mkfifo(bad / name / file)
    shutil.copytree(good, bad / "weights-cut")
    weights = bad / "weights-cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    shutil.copytree(good, bad / "nan")
    numbers = load_file(good / "model.safetensors")
    numbers["transformer.h.1.mlp.c_fc.weight"][0, 0] = float("nan")
    save_file(numbers, bad / "nan" / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def unchanged(places: dict[str, str]) -> Iterator[None]:
    """Check at the end that every file is unchanged, except for lock files and the folder `new` that some create."""
    room = Path(places["bad"]).parent
    before = checksums(room)
    yield
    after = {name: digest for name, digest in checksums(room).items() if not name.startswith("bad/new/")}
    assert after == before | {name: after[name] for name in after if name.endswith(".lock")}


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(("command", "words"), read_cases())
def test_it_is_refused(run: Run, places: dict[str, str], command: str, words: str) -> None:
    arguments = [_filled(argument, places) for argument in shlex.split(command)]
    with bounded():
        ran = run(*arguments)
    assert is_refused(ran)
    assert words and ran.err.startswith(f"memlens: {_filled(words, places)}"), ran.err


class WaitedForEver(BaseException):
    """Not an Exception, so that memlens does not turn it into a message."""


@contextmanager
def bounded() -> Iterator[None]:
    """Fail if the block takes five minutes, which is for ever, or 1 GB more memory than the process has."""

    def give_up(*_: object) -> None:
        raise WaitedForEver("nothing was said for five minutes")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(300)
    Path("/proc/self/clear_refs").write_text("5")  # the peak of memory counts from here
    memory = _status("VmRSS")
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert _status("VmHWM") - memory < 1 << 30


def _status(name: str) -> int:
    """Bytes that the system notes of this process under that name."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _filled(text: str, places: dict[str, str]) -> str:
    for name, meaning in places.items():
        text = text.replace(f"{{{name}}}", meaning)
    return text
