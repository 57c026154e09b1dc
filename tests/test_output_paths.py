"""Unusual output paths: NUL characters, .part files of the user, links, FIFOs. See also cli/test_cli_outputs.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memlens.errors import OutputError
from memlens.files import FOLDER_MARK, prepare_output_folder, refuse_output


def is_ours(head: bytes) -> bool:
    return head.startswith(b"memlens")


def test_a_name_with_a_nul_is_one_line() -> None:
    with pytest.raises(OutputError, match="NUL"):
        refuse_output(Path("a\0b"), is_ours)


@pytest.mark.parametrize("force", [False, True])
def test_a_part_file_of_the_user_is_kept(tmp_path: Path, force: bool) -> None:
    (tmp_path / "film.json.part").write_text("half of a download")
    (tmp_path / "book.json.part").mkdir()
    for name in ("film.json", "book.json"):
        with pytest.raises(OutputError, match="part exists and was not made by memlens; move it"):
            refuse_output(tmp_path / name, is_ours, force=force)
    (tmp_path / "own.json.part").write_text("memlens was killed here")
    refuse_output(tmp_path / "own.json", is_ours, force=force)


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("name", ["index.html", FOLDER_MARK])
def test_nothing_is_written_through_a_link_in_an_output_folder(tmp_path: Path, name: str, force: bool) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    prepare_output_folder(tmp_path / "site")
    (tmp_path / "site" / name).unlink(missing_ok=True)
    (tmp_path / "site" / name).symlink_to(tmp_path / "thesis.tex")
    with pytest.raises(OutputError, match=f"{name} is a link, which would be replaced; move it away"):
        prepare_output_folder(tmp_path / "site", force=force)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_fifo_in_place_of_the_mark_is_rejected_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FOLDER_MARK)
    with pytest.raises(OutputError, match="is a FIFO"):
        prepare_output_folder(tmp_path, force=True)
