"""Of overlapping features the one is named that a person would name."""

from pathlib import Path

import pytest

from index_by_hand import pieces, write_index
from memlens.index.reader import Index
from memlens.pattern.features import ANYWHERE, ENDING, FAMILIES, Feature, read_key, shapes_of
from memlens.pattern.shallow import Candidate, choose
from memlens.pattern.table import compute_patterns
from memlens.pattern.words import Words, read_prefix_words
from memlens.settings import PatternSettings

FREE, PRESS, THE = 1, 2, 3
CUTS = (1e-6,) * len(FAMILIES)


def ranks(*given: range) -> int:
    return sum(1 << rank for part in given for rank in part)


def test_a_key_reads_back_as_what_it_was_made_from() -> None:
    for kind, name in ((ENDING, "ending"), (ANYWHERE, "n-gram")):
        for words in ((7,), (7, 8), (1, 2, (1 << 20) - 1)):
            body = sum(word << 20 * place for place, word in enumerate(reversed(words)))
            assert read_key((kind + len(words)) << 60 | body, []) == Feature(name, words)


@pytest.mark.parametrize(("covered", "named"), [(19, "long"), (9, "short")])
def test_the_longer_ending_is_named_if_it_covers_as_much_and_else_the_shorter(covered: int, named: str) -> None:
    short = Candidate(Feature("ending", (PRESS,)), ranks(range(20)), 1e-3, 60, 0.0)
    long = Candidate(Feature("ending", (FREE, PRESS)), ranks(range(covered)), 1e-4, 6, 0.0)
    assert choose([short, long], 25, [(0, 0, PRESS)] * 25, set(), CUTS).patterns == (
        {"long": long, "short": short}[named],
    )


def test_one_word_over_and_over_is_no_shape() -> None:
    shape = Candidate(Feature("shape", shape="-ess"), ranks(range(20)), 1e-3, 60, 0.0)
    assert choose([shape], 25, [(0, 0, PRESS)] * 25, set(), CUTS).patterns == ()
    assert choose([shape], 25, [(0, 0, word) for word in range(1, 26)], set(), CUTS).patterns == (shape,)


def test_a_content_word_in_few_prefixes_waits_for_the_topics() -> None:
    word = Candidate(Feature("n-gram", (PRESS,)), ranks(range(6)), 1e-3, 60, 0.0)
    chosen = choose([word], 25, [(0, 0, THE)] * 25, {PRESS}, CUTS)
    assert chosen.patterns == () and chosen.waiting == (word,)


@pytest.mark.parametrize(
    ("word", "expected"),
    [("1990", "year"), ("1990s", "decade"), ("21st", "ordinal"), ("17", "number"), ("NASA", "capitals"),
     ("Paris", "capital"), ("walking", "-ing"), ("undone", "un-")],
)  # fmt: skip
def test_words_have_the_shapes_that_people_see(word: str, expected: str) -> None:
    assert expected in shapes_of(word)


def test_prefixes_are_cut_into_the_words_of_their_text(tmp_path: Path) -> None:
    import numpy as np

    texts = ["The free press of Paris.", "It was a “new” press!", "Rain fell in 1990"]
    index = write_index(tmp_path / "index", texts, {(0, 0): [(0, 0)]})
    places = [(s, p) for s, text in enumerate(texts) for p in range(len(pieces(text)))][::-1]
    words = Words()
    sentences, positions = (np.array(column, np.int64) for column in zip(*places, strict=True))
    read = read_prefix_words(index, sentences, positions, words)
    for row, (s, p) in enumerate(places):
        own = [words.texts[w] for w in read.words[read.offsets[row] : read.offsets[row + 1]]]
        assert own == [piece.strip().lower() for piece in pieces(texts[s])[: p + 1] if piece.strip()]
        assert read.opens[row] == (own[-1] == "“")


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    texts = [f"The {word} of the press was read in the morning by {n} people." for n in range(40)
             for word in ("paper", "news", "story")]  # fmt: skip
    places = [(s, 3) for s in range(0, 120, 4)][:25]
    made = []
    for name in ("one", "two"):
        index = write_index(tmp_path / name, texts, {(0, 0): places, (0, 1): []})
        compute_patterns(index, PatternSettings(background=1000))
        made.append([Index(tmp_path / name).path(table).read_bytes() for table in ("patterns", "names")])
    assert made[0] == made[1]


def test_the_family_of_a_key_is_that_of_its_feature() -> None:
    import numpy as np

    from memlens.pattern.features import (
        BEFORE,
        BITS,
        EARLY,
        FIRST,
        FIRST_LIST,
        FOLLOWING,
        FRAME,
        INSIDE,
        KIND,
        LAST_CLASS,
        SHAPE,
        families_of,
    )

    keys = [(kind + n) << KIND | sum(7 << BITS * place for place in range(n)) for kind in (ENDING, ANYWHERE)
            for n in (1, 2, 3)]  # fmt: skip
    keys += [FRAME << KIND | 7 << 2 * BITS | 7]
    keys += [SHAPE << KIND | about << 2 * BITS | 1 for about in (0, FIRST, FIRST_LIST, EARLY, FOLLOWING)]
    keys += [SHAPE << KIND | about << 2 * BITS | 1 + (about == LAST_CLASS) for about in (BEFORE, INSIDE, LAST_CLASS)]
    features = [read_key(key, ["list a month", "class 0.1"]) for key in keys]
    assert families_of(np.array(keys)).tolist() == [feature.family for feature in features]
    assert {feature.family for feature in features} == set(range(len(FAMILIES)))


def test_words_that_no_sampled_prefix_has_are_read_for_topics(tmp_path: Path) -> None:
    texts = [f"On day word{n} the free press was read by other{n} people." for n in range(300)]
    index = write_index(tmp_path / "index", texts, {(0, 0): [(s, 5) for s in range(20)]})
    compute_patterns(index, PatternSettings(background=1000))
    assert {row["description"] for row in index.table("patterns").to_pylist()} == {'ends with "the free press"'}
