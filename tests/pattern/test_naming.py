"""Names: the best patterns by evidence, words as in the text, and the endings of memories without a clear pattern."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from index_by_hand import write_index
from memlens.index.memory import read_patterns, read_summary
from memlens.index.reader import Index
from memlens.pattern.following import FollowingTokens
from memlens.pattern.naming import Pattern, join_endings, name_memory
from memlens.pattern.score import Scores
from memlens.pattern.table import compute_patterns
from memlens.settings import PatternSettings

VOCABULARY = [" fun", " rain"]


def pattern(
    name: str,
    auroc: float | None,
    kind: str = "shallow",
    members: int = 25,
    *,
    place: str = "",
    skip: int = 0,
    **fields: Any,
) -> Pattern:
    """Return a pattern of `members` triggers after the first `skip`, with many further prefixes in the text."""
    token, mask = 0 if kind == "next" else None, ((1 << members) - 1) << skip
    fields = {"share": 0.01, "further": 1000.0, **fields}
    return Pattern(name, kind, name, mask, q=0.0, scores=Scores(auroc, None), token=token, place=place, **fields)


def name_of_patterns(*patterns: Pattern, held: int = 25) -> str:
    return name_memory(patterns, FollowingTokens(), [], VOCABULARY, 25, held)[0]


def test_two_clear_patterns_about_different_things_make_the_name() -> None:
    patterns = [pattern("a", 0.75, "semantic"), pattern("b", 0.95, place="last"), pattern("c", 0.9, place="last")]
    name, evidence = name_memory(patterns, FollowingTokens(), [("of", 5)], VOCABULARY, 25, 25)
    rate = (1 + 0.9 + 0.01) / 2  # of "b": of the triggers, and of the held-out triggers
    assert name == "b; a" and evidence == pytest.approx(0.5 + (rate - 0.01) / 2)
    assert name_of_patterns(pattern("c", 0.52, place="before", share=0.2), patterns[1]) == "b"


def test_a_pattern_of_few_triggers_is_no_name() -> None:
    """Before, 'ends inside a word with "ur"' was the name of a memory with 3 such triggers of 25."""
    assert name_of_patterns(pattern("a", 0.95, members=3), pattern("b", 0.8, members=20, share=0.2)) == "b"


def test_the_more_specific_pattern_comes_before_one_with_more_evidence() -> None:
    """Before, a memory whose triggers end with a quotation mark was named "a plural before the last word"."""
    quote, plural = pattern("quote", 0.9, place="last"), pattern("plural", 0.93, place="last", share=0.06)
    assert name_of_patterns(plural, quote) == "quote"


def test_a_wording_that_the_triggers_use_up_cannot_be_held_out() -> None:
    rare = pattern("tens", 0.5, members=21, place="last", further=2.0)
    assert (
        name_of_patterns(rare) == "tens" and name_of_patterns(replace(rare, further=40.0)) == "partly tens (21 of 25)"
    )
    half = pattern("cat", 0.68, members=17, place="last", further=15.0)  # 9 of the 15 further ones are held out
    rate = (17 / 25 + (2 * 0.68 - 1 + 0.01) * 25 / 15) / 2
    assert half.evidence(25, 25) == pytest.approx(0.5 + (rate - 0.01) / 2) and name_of_patterns(half) == "cat"


def test_endings_of_different_triggers_form_one_pattern() -> None:
    """Before, a memory with the endings did, could and should was named by the words before them."""
    endings = [pattern("did", 0.69, members=10, ending='"did"', place="last"),
               pattern("could", 0.66, members=9, skip=10, ending='"could"', place="last"),
               pattern("it did", 0.6, members=4, ending='"it did"', place="last"),
               pattern("should", 0.55, members=5, skip=19, ending='"should"', place="last")]  # fmt: skip
    assert name_of_patterns(*endings[::-1]) == 'ends with "did", "could" or "should"'
    joined = join_endings(endings)
    assert joined is not None and len(joined.ranks) == 24 and joined.scores.auroc == pytest.approx(0.5 + 0.4)
    assert join_endings(endings[:1]) is None and join_endings([endings[0], endings[2]]) is None


def test_a_subject_needs_triggers_and_held_out_triggers() -> None:
    assert name_of_patterns(pattern("s", 0.95, "semantic", 6)) == "partly s (6 of 25)"
    assert name_of_patterns(pattern("s", 0.6, "semantic")) == "partly s (25 of 25)"
    assert name_of_patterns(pattern("s", 0.6, "semantic"), held=5) == "s"  # too few held-out triggers


def test_without_a_clear_pattern_the_name_is_its_endings() -> None:
    patterns = [pattern("a", 0.5, members=4), pattern("b", None, members=3)]
    name = name_memory(patterns, FollowingTokens(), [("of", 5), ("The", 2)], VOCABULARY, 25, 25)
    assert name == ('no clear pattern; common endings: "of" (5), "The" (2)', None)
    assert name_memory([], FollowingTokens(), [], VOCABULARY, 25, 25) == ("no clear pattern", None)


def test_with_few_held_out_triggers_the_triggers_themselves_are_evidence() -> None:
    patterns = [pattern("a", 0.1, members=20, share=0.1)]
    assert name_memory(patterns, FollowingTokens(), [], VOCABULARY, 25, 9) == ("a", pytest.approx(0.5 + 0.7 / 2))
    assert name_memory(patterns, FollowingTokens(), [], VOCABULARY, 25, 10) == ("partly a (20 of 25)", None)


@pytest.mark.parametrize(
    ("promoted", "auroc", "name"),
    [((0, 1), 0.9, "before (25 of 25, promoted by its value)"), ((1,), 0.9, "before (25 of 25)"),
     ((0,), 0.5, "partly before (25 of 25, promoted by its value)"), ((1,), 0.5, "partly before (25 of 25)")],
)  # fmt: skip
def test_a_name_says_if_the_value_promotes_what_follows(promoted: tuple[int, ...], auroc: float, name: str) -> None:
    following = FollowingTokens(((0, 3),), promoted)
    assert name_memory([pattern("before", auroc, "next")], following, [], VOCABULARY, 25, 25)[0] == name


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """L0N0 ends with "Paris"; L0N1 inside "because" and "beyond"; L0N2 is random, with one-letter words around it."""
    draw = random.Random(5)
    filler = [f"{a}{b}" for a in ("ka", "le", "mi", "no", "pu") for b in ("ber", "dal", "fen", "gor", "hul", "jin")]
    words = [[*draw.choices(filler, k=6), draw.choice(["Paris", "because", "beyond", "b"]), draw.choice(filler)]
             for _ in range(1000)]  # fmt: skip
    texts = [" ".join(own) for own in words]
    cut = [[f" {word}" if n else word for n, word in enumerate(text.split())] for text in texts]
    cut = [[*own[:6], " be", own[6][3:], own[7]] if own[6][:3] == " be" else own for own in cut]
    by_text = dict(zip(texts, cut, strict=True))
    ends = {word: [(s, 6) for s, own in enumerate(cut) if own[6] == word] for word in (" Paris", " be", " b")}
    triggers = {(0, m): ends[word][:50] for m, word in enumerate((" Paris", " be"))}
    triggers[0, 2] = [(s, draw.choice(range(2, 6))) for s in draw.sample(range(1000), 50)]
    triggers[0, 3] = [(s, 7) for s, _ in ends[" b"][:50]]
    made = write_index(tmp_path_factory.mktemp("names") / "index", texts, triggers, tokenize=by_text.__getitem__)
    compute_patterns(made)
    return made


def name_of(index: Index, memory: int) -> str:
    summary = read_summary(index, f"L0N{memory}")
    assert summary is not None
    return summary.name


def test_names_are_written_as_the_text_with_whole_words(index: Index) -> None:
    assert name_of(index, 0).startswith('ends with "Paris"')
    assert name_of(index, 1).startswith('ends with "be" of "because", "beyond"') or name_of(index, 1).startswith(
        'ends with "be" of "beyond", "because"'
    )
    assert name_of(index, 2).startswith("no clear pattern")


def test_single_letters_are_no_content(index: Index) -> None:
    described = [pattern.description for pattern in read_patterns(index, "L0N3") or ()]
    assert described and not any(text.startswith("contains") for text in described)


def test_prefixes_that_end_inside_years_and_names_say_so(tmp_path: Path) -> None:
    """Before, these memories were named "ends with a number" and "ends inside a word that goes on"."""
    draw = random.Random(2)
    plain = [f"{a}{b}{c}" for a in "bdfk" for b in "aeo" for c in ("lin", "ret", "sum")]
    inside = ["1934", "1871", "2005", "Warhol", "Mandel", "Kropot", "4711", "56", *plain]
    texts, cut = [], {}
    for _ in range(1500):
        word, own = draw.choice(inside), draw.choices(plain, k=5)
        tokens = [own[0], *(f" {other}" for other in own[1:]), f" {word[: len(word) // 2]}", word[len(word) // 2 :]]
        texts.append("".join([*tokens, " had had may" if draw.random() < 0.5 else " had had May"]))
        cut[texts[-1]] = [*tokens, " had", " had", texts[-1][-4:]]
    of_word = {word: [(s, 5) for s, text in enumerate(texts) if text.split()[5] == word] for word in inside}
    groups = (inside[:3], inside[3:6], [*inside[6:8], *inside[:3]])
    triggers = {}
    for memory, group in enumerate(groups):
        places = [place for word in group for place in of_word[word]]
        triggers[0, memory] = draw.sample(places, 50)
    triggers[0, 3] = draw.sample([(s, 9) for s, text in enumerate(texts) if text.endswith("May")], 50)
    index = write_index(tmp_path / "index", texts, triggers, tokenize=cut.__getitem__)
    compute_patterns(index, PatternSettings(background=1000))
    said = [[pattern.description for pattern in read_patterns(index, f"L0N{m}") or ()] for m in range(4)]
    assert any(text.startswith("ends inside a year: ") and "19|34" in text for text in said[0])
    assert any(text.startswith("ends inside a capitalized word: ") and "War|hol" in text for text in said[1])
    assert any(text.startswith("ends inside a number: ") for text in said[2])
    assert 'ends with "had had May"' in said[3]  # not "may", which is as frequent in the text
