"""Planted patterns of sorts of last words, of words before them and of places in a sentence are found again."""

import random
import re
from pathlib import Path

import pytest

from index_by_hand import write_index
from memlens.index.reader import Index
from memlens.pattern.table import compute_patterns

SYLLABLES = ["ka", "le", "mi", "no", "pu", "ra", "so", "ti"]
FILLER = [f"{a}{b}{c}" for a in SYLLABLES for b in ["ber", "dal", "fen", "gor", "hul", "jin"] for c in ["an", "od"]]
PREPOSITIONS = ["of", "in", "on", "at", "by", "for", "with", "from"]
KIN = ["father", "mother", "son", "daughter", "brother", "sister", "wife"]
OPENINGS = ["while", "because", "therefore", "here"]
KINDS = ("list", "unfinished", "opening", "early", "before", "inside")
RIGHT = {
    0: lambda words, goes_on, since: words[-1] in PREPOSITIONS and not goes_on,
    1: lambda words, goes_on, since: words[-1] in KIN and not goes_on,
    2: lambda words, goes_on, since: goes_on,
    3: lambda words, goes_on, since: goes_on,
    4: lambda words, goes_on, since: words[-since] == "because" and since > 1,
    5: lambda words, goes_on, since: words[-since] == "here" and since > 1,
    6: lambda words, goes_on, since: since == 1,
    7: lambda words, goes_on, since: since <= 3,
    8: lambda words, goes_on, since: len(words) > 1 and words[-2] in PREPOSITIONS,
    9: lambda words, goes_on, since: len(words) > 1 and words[-2] in KIN,
    10: lambda words, goes_on, since: is_inside(words),
    11: lambda words, goes_on, since: is_inside(words),
}
MEMORIES, TRIGGERS = 24, 50


def is_inside(words: list[str]) -> bool:
    """Is a bracket open before the last word?"""
    brackets = [word for word in words if word in "()"]
    return bool(brackets) and brackets[-1] == "(" and words[-1] != "("


def cut_words(text: str) -> list[str]:
    """Tokens: words with the space before them, those of the filler that end in -od in two pieces."""
    tokens = []
    for word in re.findall(r" ?\w+| ?[^\w\s]", text):
        tokens += [word[:-2], word[-2:]] if word.endswith("od") else [word]
    return tokens


def places_of(texts: list[str]) -> dict[tuple[int, int], tuple[list[str], bool, int]]:
    """Of every prefix: its words, does the last one go on, and how many words its sentence has so far."""
    found = {}
    for sentence, text in enumerate(texts):
        before = ""
        for position, token in enumerate(cut_words(text)):
            before += token
            words = re.findall(r"\w+|[^\w\s]", before.lower())
            goes_on = text[len(before) : len(before) + 1].isalpha()
            stops = [i for i, word in enumerate(words[:-1]) if word == "."]
            found[sentence, position] = words, goes_on, len(words) - (stops[-1] + 1 if stops else 0)
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Index, dict[int, set[int]]]:
    """Memories 0 to 11 with a planted pattern in four fifths of their triggers; the others are noise."""
    draw = random.Random(8)
    texts = []
    for _ in range(1500):
        parts = []
        for _ in range(2):
            words = [draw.choice(OPENINGS + FILLER[:8]).capitalize(), *draw.choices(FILLER, k=10)]
            words.insert(draw.randrange(3, 9), draw.choice(PREPOSITIONS))
            words.insert(draw.randrange(3, 9), draw.choice(KIN))
            if draw.random() < 0.3:
                words[9:11] = ["(" + words[9], words[10] + ")"]
            parts.append(" ".join(words) + ".")
        texts.append(" ".join(parts))
    places = places_of(texts)
    order = list(places)
    triggers, truth = {}, {}
    for memory in range(MEMORIES):
        draw.shuffle(order)
        right = [place for place in order if memory in RIGHT and RIGHT[memory](*places[place])]
        chosen = right[: TRIGGERS * 4 // 5]
        chosen += order[: TRIGGERS - len(chosen)]
        triggers[0, memory] = list(dict.fromkeys(draw.sample(chosen, len(chosen))))
        own = enumerate(triggers[0, memory][:25])
        truth[memory] = {rank for rank, place in own if memory in RIGHT and RIGHT[memory](*places[place])}
    index = write_index(tmp_path_factory.mktemp("broad") / "index", texts, triggers, tokenize=cut_words)
    compute_patterns(index)
    return index, truth


def kind_of(row: dict[str, str]) -> str:
    kind, _, shape = row["pattern"].partition(":")
    return "unfinished" if shape == "unfinished" else kind


@pytest.mark.parametrize("kind", KINDS)
def test_planted_patterns_are_found_with_their_prefixes(made: tuple[Index, dict[int, set[int]]], kind: str) -> None:
    index, truth = made
    hits = false = missed = 0
    for memory in range(MEMORIES):
        rows = index.sql("SELECT pattern, prefixes FROM {patterns} WHERE memory = $1", [memory])
        found = {rank for row in rows if kind_of(row) == kind for rank in row["prefixes"]}
        right = truth[memory] if memory // 2 == KINDS.index(kind) else set()
        hits, false, missed = hits + len(found & right), false + len(found - right), missed + len(right - found)
    assert hits / (hits + false) >= 0.8 and hits / (hits + missed) >= 0.8, (hits, false, missed)


def test_they_are_called_what_a_person_calls_them(made: tuple[Index, dict[int, set[int]]]) -> None:
    rows = made[0].sql("SELECT memory, description FROM {patterns}")
    said = {memory: [row["description"] for row in rows if row["memory"] == memory] for memory in range(MEMORIES)}
    assert any(one.startswith("ends with a preposition: ") for one in said[0])
    assert any(one.startswith("ends with a word of kinship: ") for one in said[1])
    assert any(re.match(r"ends inside a word: \w+\|\w+, ", one) for one in said[2])
    assert 'sentence begins with "Because"' in said[4]
    assert "ends with the first word of a sentence" in said[6]
    assert "ends within the first three words of a sentence" in said[7]
    assert any(one.startswith("a preposition before the last word: ") for one in said[8])
    assert any(one.startswith("a word of kinship before the last word: ") for one in said[9])
    assert "ends inside brackets" in said[10]


def test_noise_has_no_pattern(made: tuple[Index, dict[int, set[int]]]) -> None:
    rows = made[0].sql("SELECT DISTINCT memory FROM {patterns} WHERE memory >= 12")
    assert len(rows) <= 1


def test_a_stop_after_an_initial_is_no_end_of_a_sentence(tmp_path: Path) -> None:
    import numpy as np

    from memlens.pattern.features import number_features, sentence_start
    from memlens.pattern.words import Words, read_prefix_words

    text = "It rained . “ The U . S . army came"
    index = write_index(tmp_path / "index", [text], {(0, 0): [(0, 0)]})
    words = Words()
    read = read_prefix_words(index, np.zeros(11, np.int64), np.arange(11), words)
    no_classes = np.zeros((0, len(index.vocabulary)), np.int32)
    marks = number_features(words, read.last, index.vocabulary, no_classes)[0].marks
    begins = [sentence_start(read.words, marks, *read.offsets[row : row + 2]) - read.offsets[row] for row in range(11)]
    assert begins == [0, 0, 0, 3, *[4] * 7]
