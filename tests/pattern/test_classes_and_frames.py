"""Planted classes of the last word, frames with a gap and pieces inside words are found again, with their prefixes."""

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from index_by_hand import pieces, write_index
from memlens.index.reader import Index
from memlens.pattern.table import compute_patterns
from memlens.vocab.tokens import CLASSES as CLASS_COLUMNS, TOKENS_SCHEMA

MONTHS = ["may", "june", "july", "march", "april", "august"]
TOOLS = ["anvil", "chisel", "hammer", "mallet", "pliers", "wrench"]
FRUIT = ["apple", "cherry", "lemon", "mango", "peach", "plum"]
CLASSES = (MONTHS, TOOLS, FRUIT)
VERBS = ["launched", "opened", "founded", "burned", "closed", "sold"]
FRAMES = (("was", "on"), ("has", "by"), ("were", "near"))
FILLER = [
    f"{a}{b}"
    for a in ["ka", "le", "mi", "no", "pu", "ra", "so", "ti"]
    for b in ["ber", "dal", "fen", "gor", "hul", "jin"]
]
TRIGGERS = 25


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """Memories 0-5: two of each class, 6-11: two of each frame; a fifth of their triggers are noise. 12-20: noise."""
    draw = random.Random(4)
    texts = []
    for _ in range(4000):
        words = draw.choices(FILLER, k=9)
        words.insert(draw.randrange(4, 9), draw.choice(draw.choice(CLASSES)))
        first, last = draw.choice(FRAMES)
        words[draw.randrange(4, 8) :] = [first, draw.choice(VERBS), last, *draw.choices(FILLER, k=2)]
        texts.append(" ".join(words))
    tests = [*(lambda text, own=own: text.split()[-1] in own for own in CLASSES * 2)]
    tests += [
        lambda text, own=own: len(text.split()) > 2 and (text.split()[-3], text.split()[-1]) == own
        for own in FRAMES * 2
    ]
    places = [(s, p) for s, text in enumerate(texts) for p in range(2, len(pieces(text)))]
    triggers = {}
    for memory in range(21):
        draw.shuffle(places)
        text_of = {place: "".join(pieces(texts[place[0]])[: place[1] + 1]) for place in places[:20000]}
        right = [place for place, text in text_of.items() if memory < 12 and tests[memory](text)]
        triggers[0, memory] = draw.sample(right[:20] + list(text_of)[: TRIGGERS - len(right[:20])], TRIGGERS)
    made = write_index(tmp_path_factory.mktemp("classes") / "index", texts, triggers)
    numbers = [next((n for n, own in enumerate(CLASSES) if text.strip() in own), -1) for text in made.vocabulary]
    column = pa.array(numbers, pa.int32(), mask=np.array(numbers) < 0)
    tokens = {"token": range(len(numbers)), "count": [1] * len(numbers), "norm": [1.0] * len(numbers)}
    tokens |= {"trained": [True] * len(numbers), **dict.fromkeys(CLASS_COLUMNS, column)}
    made.write({"tokens": (TOKENS_SCHEMA, [pa.table(tokens).cast(TOKENS_SCHEMA)])}, dict)
    compute_patterns(made)
    return made


def truth(index: Index, memory: int) -> set[int]:
    found = set()
    for trigger in index.triggers(f"L0N{memory}"):
        words = (trigger.before + trigger.token).split()
        is_class = memory < 6 and words[-1] in CLASSES[memory % 3]
        is_frame = 6 <= memory < 12 and len(words) > 2 and (words[-3], words[-1]) == FRAMES[memory % 3]
        if is_class or is_frame:
            found.add(trigger.rank)
    return found


@pytest.mark.parametrize(("kind", "memories"), [("class", range(6)), ("frame", range(6, 12))])
def test_planted_patterns_are_found_with_their_prefixes(index: Index, kind: str, memories: range) -> None:
    hits = false = missed = 0
    for memory in range(21):
        rows = index.sql("SELECT pattern, prefixes FROM {patterns} WHERE memory = $1", [memory])
        found = {rank for row in rows if row["pattern"].startswith(f"{kind}:") for rank in row["prefixes"]}
        right = truth(index, memory) if memory in memories else set()
        hits, false, missed = hits + len(found & right), false + len(found - right), missed + len(right - found)
    assert hits / (hits + false) >= 0.8 and hits / (hits + missed) >= 0.8, (hits, false, missed)


def test_a_class_is_called_what_a_person_calls_it(index: Index) -> None:
    rows = index.sql("SELECT memory, description FROM {patterns} WHERE starts_with(pattern, 'class:')")
    said = {row["memory"]: row["description"] for row in rows}
    assert said[0].startswith("ends with a month: ") and said[1].startswith("ends with a word like ")
    frames = index.sql("SELECT description FROM {patterns} WHERE starts_with(pattern, 'frame:') AND memory = 6")
    assert 'ends with "was … on"' in [row["description"] for row in frames]


def test_a_piece_inside_a_word_is_named(tmp_path: Path) -> None:
    from memlens.pattern.features import Feature

    assert Feature("piece", shape="oph").describe([], ["philosophy"]) == 'ends inside a word with "oph": philosophy'
