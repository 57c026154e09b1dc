"""Gated memories have two ends: patterns of the most negative triggers are found as well, in a table of their own."""

import random
from pathlib import Path

import pytest

from index_by_hand import pieces, write_index
from memlens.cli import main
from memlens.index.memory import read_memory
from memlens.index.reader import Index
from memlens.pattern.table import compute_patterns, describe_ends

WORDS = [f"{a}{b}" for a in ["ka", "le", "mi", "no", "pu"] for b in ["ber", "dal", "fen", "gor", "hul", "jin"]]
MEMORIES = 6


def make(folder: Path, has_lower: bool) -> Index:
    """Memories 0 and 1 end with one word at the top, 2 and 3 at the bottom; all else is noise."""
    draw = random.Random(3)
    texts = [" ".join(draw.choices([*WORDS, "press", "river"], k=12)) for _ in range(2000)]
    places = [(s, p) for s, text in enumerate(texts) for p in range(2, len(pieces(text)))]
    noise = [draw.sample(places, 50) for _ in range(2 * MEMORIES)]
    word = {own: [(s, p) for s, p in places if pieces(texts[s])[p].strip() == own][:50] for own in ("press", "river")}
    upper = {(0, m): word[("press", "river")[m]] if m < 2 else noise[m] for m in range(MEMORIES)}
    lower = {(0, m): word[("press", "river")[m - 2]] if m in (2, 3) else noise[m + MEMORIES] for m in range(MEMORIES)}
    index = write_index(folder, texts, upper, lower=lower if has_lower else None)
    compute_patterns(index)
    return index


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    return make(tmp_path_factory.mktemp("lower") / "index", True)


def test_each_end_has_its_own_patterns(index: Index) -> None:
    for table, memories in (("patterns", (0, 1)), ("lower_patterns", (2, 3))):
        rows = index.sql(f"SELECT memory, pattern, prefixes FROM {{{table}}}")
        found = {row["memory"]: row["pattern"] for row in rows if len(row["prefixes"]) == 25}
        assert found == dict(zip(memories, ("ending:press", "ending:river"), strict=True))
    record = read_memory(index, "L0N2")
    assert record.patterns == () and [own.pattern for own in record.patterns_at("bottom")] == ["ending:press"]
    assert record.patterns_of(4, "bottom") == [0] and record.patterns_of(4) == []


def test_the_share_at_the_stronger_end_is_noted_beside_that_at_the_top(index: Index) -> None:
    noted = index.manifest.patterns
    assert noted is not None
    ends = noted.content["ends"]
    for end in ("top", "bottom", "stronger"):  # at the bottom coefficients are twice as large here
        assert ends[end]["memories"] == MEMORIES
        assert ends[end]["patterned"] == pytest.approx(2 / 6) and ends[end]["covered"] == pytest.approx(2 / 6)
    assert "most negative coefficients: 33.3% of memories have a pattern" in describe_ends(noted)[0]


def test_the_table_of_the_upper_end_is_the_same_with_and_without_a_lower_one(index: Index, tmp_path: Path) -> None:
    alone = make(tmp_path / "index", False)
    assert not alone.has("lower_patterns") and "ends" not in alone.manifest.content["patterns"]
    assert alone.path("patterns").read_bytes() == index.path("patterns").read_bytes()


def test_show_says_what_the_most_negative_triggers_have_in_common(
    index: Index, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(index.folder), "L0N3", "--bottom"]) == 0
    assert 'ends with "river"' in capsys.readouterr().out
