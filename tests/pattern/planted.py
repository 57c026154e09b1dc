"""Planted corpora: sixty memories whose triggers follow known patterns, or none, over generated text.

Memories 0-7 share an ending, 8-15 an n-gram anywhere, 16-23 a shape of the last word, 24-33 a topic, 34-39 an ending or
shape in some prefixes and a topic in others; 40-59 have random triggers. A few triggers of every patterned memory are
noise. What is true is decided by looking at the prefix itself, not by how it came about: a prefix is about a topic if
two of the topic's words are in it.
"""

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace as Lexicon

from index_by_hand import Place, pieces, write_index
from memlens.index.reader import Index

TRIGGERS, MEMORIES, RANDOM_FROM = 25, 60, 40
CANDIDATES = 32_000  # prefixes that may become triggers
Test = Callable[[str], bool]


@dataclass
class Planted:
    """By memory, which trigger ranks are truly shallow and truly semantic."""

    shallow: dict[int, set[int]] = field(default_factory=dict)
    semantic: dict[int, set[int]] = field(default_factory=dict)


def read_lexicon(name: str) -> Lexicon:
    """The words of a planted corpus: "first", which the method was made with, or "second", which it had not seen."""
    content = json.loads((Path(__file__).parent / "lexicons.json").read_text(encoding="utf-8"))[name]
    topics = {topic: words.split() for topic, words in content.pop("TOPICS").items()}
    return Lexicon(
        TOPICS=topics, **{k: words.split() if isinstance(words, str) else words for k, words in content.items()}
    )


def plant(folder: Path, words: Lexicon, seed: int) -> tuple[Index, Planted]:
    draw = random.Random(seed)
    texts, sources = _write_corpus(words, draw)
    cut = [pieces(text) for text in texts]
    prefixes = sorted(draw.sample([(s, p) for s, own in enumerate(cut) for p in range(len(own))], CANDIDATES))
    text_of = {place: "".join(cut[place[0]][: place[1] + 1]) for place in prefixes}
    words_of = {place: set(re.findall(r"\w+", text)) for place, text in text_of.items()}
    shallow, semantic = _truths(words)
    chosen: dict[tuple[int, int], list[Place]] = {}
    planted = Planted()
    for memory in range(MEMORIES):
        test, topic = shallow.get(memory), semantic.get(memory)
        places: list[Place] = []
        taken: set[int] = set()
        share = 9 if test and topic else draw.randint(17, 23)

        def add(candidates: list[Place], count: int, places: list[Place] = places, taken: set[int] = taken) -> None:
            draw.shuffle(candidates)
            for place in candidates:
                if count and place[0] not in taken:
                    places.append(place)
                    taken.add(place[0])
                    count -= 1
            assert count == 0

        has_test = {place for place in prefixes if test and test(text_of[place])}
        has_topic = {
            place for place in prefixes if topic and len(words_of[place].intersection(words.TOPICS[topic])) >= 2
        }
        if test:
            add(sorted(has_test), share)
        if topic:
            add(sorted(has_topic - has_test), share + 2 if test else share)
        add([place for place in prefixes if place not in has_test and place not in has_topic], TRIGGERS - len(places))
        draw.shuffle(places)
        chosen[memory // 20, memory % 20] = places
        planted.shallow[memory] = {rank for rank, place in enumerate(places) if place in has_test}
        planted.semantic[memory] = {rank for rank, place in enumerate(places) if place in has_topic}
    return write_index(folder, texts, chosen, sources), planted


def _truths(words: Lexicon) -> tuple[dict[int, Test], dict[int, str]]:
    def ends(phrase: str) -> Test:
        return lambda text: text.endswith(" " + phrase)

    def contains(phrase: str) -> Test:
        return lambda text: f" {phrase} " in f" {text} "

    def last(form: str) -> Test:
        return lambda text: re.search(rf"(?:^|\s)(?:{form})$", text) is not None

    forms = [r"1[0-9]{3}|20[0-9]{2}", r"[a-z]{2,}ing", '"', "|".join(words.CAPITALS), r"[0-9]{3}", r"[a-z]{2,}tion"]
    shapes = [last(form) for form in (*forms, r"[0-9]+(?:st|nd|rd|th)", r"1[0-9]{2}0s")]
    shallow = {i: ends(phrase) for i, phrase in enumerate(words.ENDINGS)}
    shallow |= {8 + i: contains(phrase) for i, phrase in enumerate(words.NGRAMS)}
    shallow |= {16 + i: shape for i, shape in enumerate(shapes)}
    topics = list(words.TOPICS)
    semantic = {24 + i: topic for i, topic in enumerate(topics)}
    mixed = [ends(words.ENDINGS[0]), shapes[0], ends(words.ENDINGS[4]), shapes[1], contains(words.NGRAMS[0]), shapes[2]]
    shallow |= {34 + i: test for i, test in enumerate(mixed)}
    semantic |= {34 + i: topics[i] for i in range(6)}
    return shallow, semantic


def _write_corpus(words: Lexicon, draw: random.Random) -> tuple[list[str], list[str]]:
    """Sentences, and where each is from."""
    texts, sources = [], []
    names = [*words.TOPICS, *[""] * len(words.TOPICS)]
    for paragraph in range(900):
        topic = draw.choice(names)
        for _ in range(draw.randint(3, 5)):
            texts.append(_sentence(words, topic, draw))
            sources.append(f"text.txt:{paragraph}")
    return texts, sources


def _sentence(words: Lexicon, topic: str, draw: random.Random) -> str:
    own = words.TOPICS[topic] if topic else []
    ranks = [1 / (i + 5) for i in range(len(words.FILLER))]
    parts: list[str] = []
    for _ in range(draw.randint(9, 22)):
        kind = draw.random()
        if kind < 0.42:
            parts.append(draw.choice(words.FUNCTION))
        elif own and kind < 0.62:
            parts.append(draw.choice(own))
        elif kind < 0.90:
            parts.append(draw.choices(words.FILLER, ranks)[0])
        elif kind < 0.93:
            parts.append(draw.choice(words.NAMES))
        else:
            parts.append(_special(words, draw))
    return parts[0].capitalize() + " " + " ".join(parts[1:]) + "."


def _special(words: Lexicon, draw: random.Random) -> str:
    number = draw.randint(100, 999)
    forms = [draw.choice(of) for of in (words.ENDINGS, words.NGRAMS, words.ENDINGS, words.NGRAMS)]
    forms += [str(draw.randint(1500, 2030)), str(number)]
    forms += [draw.choice(of) for of in (words.STEMS_ING, words.STEMS_TION, words.CAPITALS)]
    forms += [f"{draw.randint(1, 40) * 10 + 4}th", f"{draw.randint(100, 199)}0s"]
    return draw.choice([*forms, f'"{draw.choice(words.FILLER)} {draw.choice(words.FILLER)}"'])
