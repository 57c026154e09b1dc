"""The wheel is the same, byte for byte, wherever, whenever and with whatever permissions it is built."""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "src")


def built(folder: Path, mode: int, moment: int) -> Path:
    """The wheel of a copy of the sources whose files have this mode and were last changed at this moment."""
    left_out = shutil.ignore_patterns("__pycache__", "*.part")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=left_out)
        else:
            folder.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)
            os.utime(path, (moment, moment))
    command = [sys.executable, "-P", "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def test_two_builds_of_one_tree_are_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    one = built(tmp_path / "here", 0o644, 1_700_000_000)
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    other = built(tmp_path / "another folder", 0o600, 1_800_000_000)
    assert one.name == other.name
    digests = {hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in (one, other)}
    assert len(digests) == 1
    with zipfile.ZipFile(one) as wheel:
        names = wheel.namelist()
    assert "memlens/cli/app.py" in names
    assert not [name for name in names if name.endswith((".pyc", ".nbi", ".nbc", ".part", ".lock"))]
