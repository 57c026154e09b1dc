"""Files are replaced completely and durably, and a folder has one writer."""

import os
from pathlib import Path

import pytest

from memlens.errors import FilesError
from memlens.files import lock_for_writing, write_json


def test_a_file_is_synced_before_it_is_renamed_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "plan.json", []

    def note(descriptor: int) -> None:
        synced.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, path.exists()))

    monkeypatch.setattr(os, "fsync", note)
    write_json(path, {})
    assert synced == [("plan.json.part", False), (tmp_path.name, True)]


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    with (
        lock_for_writing(tmp_path / ".lock"),
        pytest.raises(FilesError, match="another memlens process is writing to"),
        lock_for_writing(tmp_path / ".lock"),
    ):
        pass
