"""`memlens.patterns`, the verb."""

from __future__ import annotations

from pathlib import Path

import pytest

import memlens
from index_by_hand import write_index
from memlens.errors import SettingError


def test_unknown_options_are_refused_and_known_ones_recorded(tmp_path: Path) -> None:
    texts = [f"The river number {n} runs to the sea" for n in range(30)]
    index = write_index(tmp_path / "index", texts, {(0, 0): [(n, 1) for n in range(25)]})
    with pytest.raises(SettingError, match="unknown patterns option 'bogus'; known: background"):
        memlens.patterns(index, bogus=1)
    assert memlens.patterns(index.folder, top=10).manifest.content["patterns"]["top"] == 10
