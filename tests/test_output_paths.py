"""Output paths: what memlens may write over, and what it never does."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import pytest

from memlens.errors import OutputError
from memlens.files import FOLDER_MARK, prepare_output_folder, refuse_output


def is_ours(head: bytes) -> bool:
    return head.startswith(b"memlens")


def test_a_new_file_and_one_of_our_own_are_written(tmp_path: Path) -> None:
    refuse_output(tmp_path / "new.txt", is_ours)
    (tmp_path / "own.txt").write_text("memlens made this")
    refuse_output(tmp_path / "own.txt", is_ours)


def test_a_file_of_somebody_else_needs_force(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(OutputError, match="was not made by memlens; name another file, or replace it with --force"):
        refuse_output(tmp_path / "thesis.tex", is_ours)
    refuse_output(tmp_path / "thesis.tex", is_ours, force=True)


@pytest.mark.parametrize("force", [False, True])
def test_nothing_is_written_into_an_index_or_a_model(tiny_gpt2_index, tiny_gpt2, tmp_path, force) -> None:
    index = shutil.copytree(tiny_gpt2_index.folder, tmp_path / "index")
    for folder, words in ((index, "an index"), (index / "experiments", "an index"), (tiny_gpt2, "a model")):
        for name in ("triggers.parquet", "annotations.sqlite", "new.html"):
            with pytest.raises(OutputError, match=words):
                refuse_output(folder / name, is_ours, force=force)
        with pytest.raises(OutputError, match=words):
            prepare_output_folder(folder / "figures", force=force)


@pytest.mark.parametrize("force", [False, True])
def test_devices_fifos_sockets_and_links_are_never_replaced(tmp_path: Path, force: bool) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "anything")
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "socket"))
    for path in (tmp_path / "fifo", tmp_path / "link", tmp_path / "socket", Path("/dev/null")):
        with pytest.raises(OutputError, match="would be replaced"):
            refuse_output(path, is_ours, force=force)
    server.close()


def test_a_folder_of_figures_is_ours_again_but_nobody_elses(tmp_path: Path) -> None:
    prepare_output_folder(tmp_path / "figures")
    (tmp_path / "figures" / "agreement.svg").write_text("<svg/>")
    prepare_output_folder(tmp_path / "figures")
    assert (tmp_path / "figures" / FOLDER_MARK).is_file()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"\xff\xd8")
    with pytest.raises(OutputError, match="did not make"):
        prepare_output_folder(tmp_path / "photos")
    with pytest.raises(OutputError, match="is a file"):
        prepare_output_folder(tmp_path / "photos" / "cat.jpg")


def test_a_name_with_a_nul_is_one_line() -> None:
    with pytest.raises(OutputError, match="NUL"):
        refuse_output(Path("a\0b"), is_ours)


@pytest.mark.parametrize("force", [False, True])
def test_what_lies_beside_under_the_name_that_is_written_first_is_kept(tmp_path: Path, force: bool) -> None:
    (tmp_path / "film.json.part").write_text("half of a download")
    (tmp_path / "book.json.part").mkdir()
    for name in ("film.json", "book.json"):
        with pytest.raises(OutputError, match="part is in the way and was not made by memlens; move it away"):
            refuse_output(tmp_path / name, is_ours, force=force)
    (tmp_path / "own.json.part").write_text("memlens was killed here")
    refuse_output(tmp_path / "own.json", is_ours, force=force)


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("name", ["index.html", FOLDER_MARK])
def test_nothing_is_written_through_a_link_in_a_folder_of_ours(tmp_path: Path, name: str, force: bool) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    prepare_output_folder(tmp_path / "site")
    (tmp_path / "site" / name).unlink(missing_ok=True)
    (tmp_path / "site" / name).symlink_to(tmp_path / "thesis.tex")
    with pytest.raises(OutputError, match=f"{name} is a link, which would be replaced; move it away"):
        prepare_output_folder(tmp_path / "site", force=force)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_fifo_in_the_place_of_the_mark_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FOLDER_MARK)
    with pytest.raises(OutputError, match="is a FIFO"):
        prepare_output_folder(tmp_path, force=True)
