"""Recurring next tokens: found like endings, against counting by hand, and not where the last token explains them."""

import random

import pytest

from index_by_hand import Place, pieces, write_index
from memlens.index.memory import read_patterns, read_summary
from memlens.index.reader import Index
from memlens.pattern.table import compute_patterns

ENDINGS = ("quiet", "heavy", "narrow", "early", "public", "broken", "little", "common")
NEXT = ("fun", "rain", "work", "press", "hours")
FUN, EXPLAINED = (0, 0), (0, 1)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """L0N0 fires before " fun" after any ending; L0N1 fires after " machine", which " gun" nearly always follows."""
    draw = random.Random(3)
    texts = [f"Day {n} of the {draw.choice(ENDINGS)} {draw.choice(NEXT)} went by." for n in range(600)]
    texts += [f"Day {n} of the machine {'gun' if n % 10 else 'age'} went by." for n in range(200)]
    before_fun = [(s, 4) for s, text in enumerate(texts) if " fun " in text]
    others = [(s, 4) for s, text in enumerate(texts[:600]) if " fun " not in text]
    triggers: dict[Place, list[Place]] = {FUN: [*before_fun[:15], *others[:10], *before_fun[15:30], *others[10:20]]}
    triggers[EXPLAINED] = [(s, 4) for s in range(600, 650)]
    made = write_index(tmp_path_factory.mktemp("next") / "index", texts, triggers)
    compute_patterns(made)
    return made


def test_a_next_token_has_the_ranks_and_the_scores_of_counting(index: Index) -> None:
    (pattern,) = [pattern for pattern in read_patterns(index, "L0N0") or () if pattern.kind == "next"]
    texts = [row["text"] for row in index.table("corpus").to_pylist()]
    follows = [[own[p + 1 : p + 2] == [" fun"] for p in range(len(own))] for own in map(pieces, texts)]
    listed = [follows[t.prefix.sentence][t.prefix.position] for t in index.triggers("L0N0")]
    held, everywhere = listed[25:], [is_before for own in follows for is_before in own]
    assert pattern.description == 'before "fun"' and pattern.pattern == "next: fun"
    assert pattern.prefixes == tuple(rank for rank in range(25) if listed[rank])
    random_share = sum(everywhere) / len(everywhere)
    assert pattern.auroc == pytest.approx(0.5 + (sum(held) / len(held) - random_share) / 2)
    assert pattern.auroc_same_token is not None and 0.5 < pattern.auroc_same_token < pattern.auroc


def test_a_token_that_the_last_token_explains_is_typical_but_no_pattern(index: Index) -> None:
    kinds = {pattern.kind for pattern in read_patterns(index, "L0N1") or ()}
    summary = read_summary(index, "L0N1")
    assert kinds == {"shallow"}
    assert summary is not None and index.vocabulary[summary.follows[0]] == " gun"


def test_next_tokens_cover_no_prefix(index: Index) -> None:
    summary = read_summary(index, "L0N0")
    assert summary is not None
    in_prefix = [p for p in read_patterns(index, "L0N0") or () if p.kind != "next"]
    assert summary.patterns == len(in_prefix)
    assert summary.covered == len({rank for pattern in in_prefix for rank in pattern.prefixes})
