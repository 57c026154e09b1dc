"""The tables of patterns and names: what triggers share, what follows them, and whether the value promotes it."""

from pathlib import Path

import pytest

import memlens
from index_by_hand import pieces, write_index
from memlens.errors import SettingError
from memlens.index.memory import read_patterns, read_summary
from memlens.index.reader import Index
from memlens.pattern.table import compute_patterns

WORDS = ("stone", "glass", "paper", "cloth", "metal", "ivory", "amber")
TEXTS = [
    f"On day {n} the free press {'conference' if n < 30 else WORDS[n % 7]} was read by {n} people." for n in range(300)
]
VOCABULARY = sorted({piece for text in TEXTS for piece in pieces(text)})


@pytest.fixture
def index(tmp_path: Path) -> Index:
    places = {(0, 0): [(s, 5) for s in range(20)], (0, 1): [(s, 5) for s in range(40, 60)], (0, 2): []}
    promoted = [VOCABULARY.index(" conference"), VOCABULARY.index(" people")]
    made = write_index(tmp_path / "index", TEXTS, places, values={(0, 0): promoted, (0, 1): promoted, (0, 2): promoted})
    compute_patterns(made, background=5000)
    return made


def test_a_name_says_what_it_fires_on_what_follows_and_that_its_value_agrees(index: Index) -> None:
    row = read_summary(index, "L0N0")
    assert row is not None
    assert row.name == 'ends with "the free press"; before "conference" (20 of 20, promoted by its value)'
    assert [VOCABULARY[token] for token in list(row.follows)] == [" conference"] and list(row.follows_times) == [20]
    assert row.agrees is True and row.covered == 20
    described = {pattern.description: pattern.prefixes for pattern in read_patterns(index, "L0N0") or ()}
    assert described == dict.fromkeys(('ends with "the free press"', 'before "conference"'), tuple(range(20)))
    assert read_summary(index, "L0N2") is None  # without triggers there is no name


def test_tokens_that_follow_now_and_then_are_not_typical(index: Index) -> None:
    row = read_summary(index, "L0N1")
    assert row is not None and list(row.follows) == [] and row.agrees is None
    assert row.name == 'ends with "the free press"'


def test_the_most_frequent_next_token_comes_first(tmp_path: Path) -> None:
    texts = [
        f"On day {n} the free press {'stone' if n < 14 else 'amber' if n < 20 else n} was read." for n in range(300)
    ]
    made = write_index(tmp_path / "index", texts, {(0, 0): [(s, 5) for s in range(20)]})
    compute_patterns(made, background=5000)
    assert read_summary(made, "L0N0").follows_times == (14, 6)  # type: ignore[union-attr]


def test_unknown_options_are_refused_and_known_ones_recorded(index: Index) -> None:
    with pytest.raises(SettingError, match="unknown patterns option 'bogus'; known: background"):
        memlens.patterns(index, bogus=1)
    assert memlens.patterns(index.folder, top=10).manifest.patterns.settings["top"] == 10
