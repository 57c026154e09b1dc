"""Names: the best patterns by evidence, words as in the text, and the endings of memories without a clear pattern."""

import random

import pytest

from index_by_hand import write_index
from memlens.index.memory import read_patterns, read_summary
from memlens.index.reader import Index
from memlens.pattern.following import FollowingTokens
from memlens.pattern.naming import Pattern, name_memory
from memlens.pattern.score import Scores
from memlens.pattern.table import compute_patterns

VOCABULARY = [" fun", " rain"]


def pattern(name: str, auroc: float | None, kind: str = "shallow", members: int = 0b111, sense: int = 0) -> Pattern:
    token = 0 if kind == "next" else None
    return Pattern(name, kind, name, members, 0.1, 0.0, Scores(auroc, None), sense, token)


def test_the_two_patterns_with_the_best_evidence_make_the_name() -> None:
    patterns = [pattern("a", 0.71), pattern("b", 0.95), pattern("c", 0.8), pattern("d", 0.7)]
    assert name_memory(patterns, FollowingTokens(), [("of", 5)], VOCABULARY, 25, 25) == ("b, c", 0.95)
    patterns[1] = pattern("b", 0.95, sense=1)
    assert name_memory(patterns, FollowingTokens(), [], VOCABULARY, 25, 25)[0] == "b or c"


def test_without_a_clear_pattern_the_name_is_its_endings() -> None:
    patterns = [pattern("a", 0.7), pattern("b", None)]
    name = name_memory(patterns, FollowingTokens(), [("of", 5), ("The", 2)], VOCABULARY, 25, 25)
    assert name == ('no clear pattern; common endings: "of" (5), "The" (2)', None)
    assert name_memory([], FollowingTokens(), [], VOCABULARY, 25, 25) == ("no clear pattern", None)


def test_with_few_held_out_triggers_the_triggers_themselves_are_evidence() -> None:
    patterns = [pattern("a", 0.1, members=(1 << 20) - 1)]
    assert name_memory(patterns, FollowingTokens(), [], VOCABULARY, 25, 9) == ("a", pytest.approx(0.5 + 0.7 / 2))
    assert name_memory(patterns, FollowingTokens(), [], VOCABULARY, 25, 10)[1] is None


@pytest.mark.parametrize(
    ("promoted", "auroc", "name"),
    [((0, 1), 0.9, "before (3 of 25, promoted by its value)"), ((1,), 0.9, "before (3 of 25)"),
     ((0,), 0.6, 'no clear pattern; before "fun" (3 of 25, promoted by its value)'), ((1,), 0.6, "no clear pattern")],
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
