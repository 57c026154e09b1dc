"""Scores of patterns on triggers that were held out, against plain counting; the labels of memories read by hand."""

import json
from pathlib import Path

import numpy as np
import pytest

from index_by_hand import pieces, write_index
from memlens.pattern.find import in_senses
from memlens.pattern.naming import Pattern
from memlens.pattern.score import Scores, is_subject_refuted
from memlens.pattern.table import compute_patterns
from memlens.settings import PatternSettings
from memlens.stats import roc_area

TEXTS = [f"On day {n} the free press was read by {n} people of the press." for n in range(300)]


def test_the_score_of_an_ending_is_that_of_counting(tmp_path: Path) -> None:
    places = [(s, 5) for s in range(20)] + [(s, 2) for s in range(20, 25)]  # five of those held out end otherwise
    index = write_index(tmp_path / "index", TEXTS, {(0, 0): places})
    compute_patterns(index, PatternSettings(top=15))
    (row,) = (row for row in index.table("patterns").to_pylist() if row["pattern"].startswith("ending:"))
    phrase = " " + row["description"].split('"')[1]

    def has(sentence: int, position: int) -> bool:
        return (" " + "".join(pieces(TEXTS[sentence])[: position + 1])).lower().endswith(phrase)

    mine = np.mean([has(*place) for place in places[15:]])
    random = np.mean([has(s, p) for s, text in enumerate(TEXTS) for p in range(len(pieces(text)))])
    assert mine == 0.5 and row["auroc"] == pytest.approx(0.5 + (mine - random) / 2)
    assert row["precision"] == np.mean([has(*place) for place in places[15:25]])


def test_no_trigger_held_out_gives_no_score(tmp_path: Path) -> None:
    index = write_index(tmp_path / "index", TEXTS, {(0, 0): [(s, 5) for s in range(20)]})
    compute_patterns(index)
    assert {row["auroc"] for row in index.table("patterns").to_pylist()} == {None}


def test_the_area_is_the_share_of_pairs_in_the_right_order() -> None:
    random = np.random.default_rng(0)
    mine, others = random.integers(0, 9, 31) / 1.0, random.integers(0, 7, 43) / 1.0
    pairs = [(one > other) + (one == other) / 2 for one in mine for other in others]
    assert roc_area(mine, others) == pytest.approx(np.mean(pairs))
    assert roc_area(mine[:0], others) is None


def test_labels_of_read_memories_are_whole() -> None:
    path = Path(__file__).parent / "data" / "labelled_memories.json"
    read = json.loads(path.read_text(encoding="utf-8"))
    first, second, swapped = read["labels"], read["second_reader"], read["swapped"]
    assert len(first) == 60 and first.keys() == second.keys() and len(swapped) == 30 and swapped.keys() <= first.keys()
    for label in [label for labels in (first, second, swapped) for own in labels.values() for label in own]:
        assert label["kind"] in ("shallow", "semantic") and len(label["prefixes"]) >= 3
        assert label["prefixes"] == sorted(set(label["prefixes"])) and set(label["prefixes"]) <= set(range(25))


def test_a_pattern_of_some_prefixes_of_a_larger_one_has_its_sense() -> None:
    patterns = [Pattern(str(size), "shallow", "", (1 << size) - 1, 0.0, 0.0, Scores(None, None)) for size in (12, 4)]
    assert [pattern.sense for pattern in in_senses(patterns, 25)] == [0, 0]


def test_a_topic_that_held_out_triggers_do_not_confirm_is_refuted() -> None:
    """Of rank sums of independent numbers, 95% lie below the bar; ten triggers at least are needed to say so."""
    random = np.random.default_rng(5)
    held, same = np.arange(25), np.arange(100)
    areas = [roc_area(random.normal(size=25), random.normal(size=100)) for _ in range(2000)]
    refuted = np.mean([is_subject_refuted(Scores(0.9, area), held, same) for area in areas])
    assert 0.93 <= refuted <= 0.97
    assert not is_subject_refuted(Scores(0.9, 0.75), held, same)
    assert not is_subject_refuted(Scores(0.9, 0.4), held[:9], same[:36]) and not is_subject_refuted(
        Scores(0.9, None), held, same[:0]
    )


def test_a_prefix_that_was_drawn_four_times_is_one_observation() -> None:
    """Of 25 others, each drawn four times, rank sums spread as those of 25: 95% must still lie below the bar."""
    random = np.random.default_rng(6)
    held, same = np.arange(25), np.tile(np.arange(25), 4)
    areas = [roc_area(random.normal(size=25), np.tile(random.normal(size=25), 4)) for _ in range(2000)]
    assert 0.93 <= np.mean([is_subject_refuted(Scores(0.9, area), held, same) for area in areas]) <= 0.97
    drawn = np.repeat(np.arange(28), [19, *[3] * 27])  # a common prefix among others
    areas = [roc_area(random.normal(size=25), random.normal(size=28)[drawn]) for _ in range(2000)]
    assert 0.93 <= np.mean([is_subject_refuted(Scores(0.9, area), held, drawn) for area in areas]) <= 0.97
