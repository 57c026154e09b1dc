"""The context of a sentence consists of its neighbors in the same document."""

from pathlib import Path

import pytest

from index_by_hand import write_index
from memlens.errors import UnknownName
from memlens.index.memory import read_context

TEXTS = [f"sentence number {number}" for number in range(7)]
SOURCES = ["a.txt:1"] * 3 + ["a.txt:2"] * 4


@pytest.mark.parametrize("around", [0, 1, 2, 20])
def test_neighbours_are_those_of_the_same_document(tmp_path: Path, around: int) -> None:
    index = write_index(tmp_path / "index", TEXTS, {(0, 0): [(0, 1)]}, SOURCES)
    for sentence, text in enumerate(TEXTS):
        found = read_context(index, sentence, around)
        same = [other for other in range(7) if SOURCES[other] == SOURCES[sentence] and abs(other - sentence) <= around]
        assert (found.sentence, found.text, found.source) == (sentence, text, SOURCES[sentence])
        assert found.before == tuple(TEXTS[other] for other in same if other < sentence)
        assert found.after == tuple(TEXTS[other] for other in same if other > sentence)
    with pytest.raises(UnknownName, match="no sentence 7"):
        read_context(index, 7, around)
