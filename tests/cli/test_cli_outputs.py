"""Outputs of verbs: never into an index or a model, never in the place of a device or a link, and over a file
that memlens did not make only when told so."""

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_helpers import Paths, Run, checksums, is_refused

from memlens.errors import OutputError
from memlens.tracer.value_changes import save_changed

WRITERS: dict[str, Callable[[Path], list[object]]] = {
    "report": lambda index: ["report", index, "-o"],
    "trace": lambda index: ["trace", index, "The river", "--set", "L0N0=0", "--save"],
    **{name: lambda index, name=name: ["export", index, "--format", name, "-o"] for name in ("jsonl", "csv")},
}
FOLDERS: dict[str, Callable[[Path, Path, Path], list[object]]] = {
    "assets": lambda index, model, text: ["report", index, "--assets"],
    "demo": lambda index, model, text: ["demo", "-o"],
    "scan": lambda index, model, text: ["scan", model, text, "--threads", 1, "-o"],
    "analyze": lambda index, model, text: ["analyze", model, text, "--threads", 1, "--null-tokens", 0, "-o"],
    "merge": lambda index, model, text: ["merge", index, "-o"],
    "site": lambda index, model, text: ["site", index, "-o"],
    "neuronpedia": lambda index, model, text: ["export", index, "--format", "neuronpedia", "-o"],
}


@pytest.fixture
def model(tiny_gpt2: Path, tmp_path: Path) -> Path:
    """A copy of the model that a test may endanger."""
    return Path(shutil.copytree(tiny_gpt2, tmp_path / "model"))


@pytest.mark.parametrize("force", [(), ("--force",)])
@pytest.mark.parametrize("writer", WRITERS)
def test_no_verb_writes_into_an_index_or_a_model(run, plain, made, model, writer, force, tmp_path) -> None:
    before = checksums(plain), checksums(model)
    (tmp_path / "link").symlink_to(plain, target_is_directory=True)
    names = ("manifest.json", "triggers.parquet", "annotations.jsonl", "new.txt", "experiments/rank.parquet")
    targets = [plain / name for name in names] + [tmp_path / "link" / "new.txt", model / "model.safetensors"]
    for target in targets:
        ran = run(*WRITERS[writer](made["plain"]), target, *force)
        assert is_refused(ran, "lies inside", "a model" if target.parent == model else "an index")
    assert (checksums(plain), checksums(model)) == before


@pytest.mark.parametrize("writer", WRITERS)
def test_no_verb_replaces_what_memlens_did_not_make(run: Run, made: Paths, writer: str, tmp_path: Path) -> None:
    files = {"corpus.txt": "The river.", "corpus.jsonl": '{"text": "The river."}\n', "page.html": "<!doctype html>"}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
        ran = run(*WRITERS[writer](made["plain"]), tmp_path / name)
        assert is_refused(ran, f"{name} was not made by memlens", "--force")
        assert (tmp_path / name).read_text() == content
    (tmp_path / "loading.part").write_text("half of a film")  # --force is said of another file
    for force in ((), ("--force",)):
        ran = run(*WRITERS[writer](made["plain"]), tmp_path / "loading", *force)
        assert is_refused(ran, "loading.part exists and was not made by memlens", "move it")
    assert (tmp_path / "loading.part").read_text() == "half of a film"


@pytest.mark.parametrize("force", [(), ("--force",)])
@pytest.mark.parametrize("writer", WRITERS)
def test_no_verb_replaces_a_device_a_fifo_a_socket_a_link_or_a_folder(run, made, writer, force, tmp_path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "thesis").write_text("years")
    (tmp_path / "link").symlink_to(tmp_path / "thesis")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for target in (*(tmp_path / name for name in ("fifo", "link", "socket")), Path("/dev/null"), tmp_path):
            ran = run(*WRITERS[writer](made["plain"]), target, *force)
            assert is_refused(ran, "is a folder" if target == tmp_path else "would be replaced")
    assert (tmp_path / "thesis").read_text() == "years" and Path("/dev/null").is_char_device()


@pytest.mark.parametrize("writer", WRITERS)
def test_what_a_verb_has_written_it_may_write_again_and_with_force_over_anything_else(run, made, writer, tmp_path):
    command = WRITERS[writer](made["plain"])
    assert run(*command, tmp_path / "out").code == 0
    first = (tmp_path / "out").read_bytes()
    (tmp_path / "empty").touch()
    assert run(*command, tmp_path / "out").code == run(*command, tmp_path / "empty").code == 0
    (tmp_path / "other").write_text("not ours")
    assert run(*command, tmp_path / "other", "--force").code == 0
    assert {(tmp_path / name).read_bytes() for name in ("out", "empty", "other")} == {first}


@pytest.mark.parametrize("verb", FOLDERS)
def test_no_folder_is_made_inside_an_index_or_a_model(run, plain, made, models, model, text, verb) -> None:
    before = checksums(plain), checksums(model)
    for folder in (plain / "more", plain / "experiments" / "more", model / "more"):
        assert is_refused(run(*FOLDERS[verb](made["plain"], models["plain"], text), folder), "lies inside")
        assert not folder.exists()
    assert (checksums(plain), checksums(model)) == before


def test_charts_go_into_a_folder_of_charts(run: Run, made: Paths, plain: Path, model: Path) -> None:
    place = plain.parent
    page = ["report", made["plain"], "-o", place / "page.html", "--assets"]
    assert run(*page, place / "charts").code == run(*page, place / "charts").code == 0
    (place / "photos").mkdir()
    (place / "photos" / "cat.jpg").write_text("cat")
    assert is_refused(run(*page, place / "photos"), "did not make", "--force")
    for folder in (plain, model):
        before = checksums(folder)
        assert is_refused(run(*page, folder, "--force"), "is an index" if folder == plain else "is a model")
        assert checksums(folder) == before
    assert run(*page, place / "photos", "--force").code == 0
    assert (place / "photos" / "cat.jpg").read_text() == "cat"


def test_the_index_has_its_own_place_for_the_report(run: Run, plain: Path) -> None:
    assert run("report", plain).code == run("report", plain).code == 0
    assert run("report", plain, "-o", plain / "report.html").code == 0
    (plain / "report.html").unlink()
    (plain / "report.html").symlink_to(plain / "manifest.json")
    before = checksums(plain)
    assert is_refused(run("report", plain), "is a link")
    assert checksums(plain) == before


def test_a_path_with_dots_out_of_an_index_is_no_path_into_it(run: Run, plain: Path) -> None:
    assert run("export", plain, "-o", plain / ".." / "out.jsonl").code == 0
    assert (plain.parent / "out.jsonl").is_file()


def test_an_edited_model_is_not_saved_into_an_index_or_a_model(tiny_gpt2_index, copy_of, model) -> None:
    index = copy_of(tiny_gpt2_index).folder
    before = checksums(index), checksums(model)
    for folder in (index / "edited", model / "edited"):
        with pytest.raises(OutputError, match="lies inside"):
            save_changed(model, [], folder)
    assert (checksums(index), checksums(model)) == before
