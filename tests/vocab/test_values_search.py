"""Which memories promote a token, from the index alone."""

from __future__ import annotations

import pytest

from memlens.errors import IndexFolderError, SettingError, UnknownName
from memlens.models.tokenizer import Tokenizer
from memlens.testing import tiny_tokenizer
from memlens.vocab.search import search_values
from memlens.vocab.table import compute_values


@pytest.fixture
def index(fresh):
    index, model = fresh
    compute_values(index, model, top=12)
    return index


def naive(index, tokens, column="tokens", p="p"):
    found = []
    for row in index.table("values").to_pylist():
        places = [place for place, token in enumerate(row[column]) if token in tokens]
        if places:
            found.append((sum(row[p][place] for place in places), row["layer"], row["memory"], places))
    return found


def test_memories_that_promote_a_token_come_by_its_probability(index):
    token = index.vocabulary.index(" the")
    expected = sorted(naive(index, {token}), key=lambda row: (-row[0], row[3][0], row[1], row[2]))
    found = search_values(index, " the", limit=None)
    assert [(one.memory.layer, one.memory.memory) for one in found] == [row[1:3] for row in expected]
    assert [[token.rank for token in one.found] for one in found] == [row[3] for row in expected]
    assert all(one.found[0].text == " the" and one.found[0].token == token for one in found)
    assert search_values(index, " the", limit=3) == found[:3]


def test_of_several_tokens_memories_with_more_of_them_come_first(index):
    tokens = {index.vocabulary.index(" the"), index.vocabulary.index("e")}
    expected = sorted(naive(index, tokens), key=lambda row: (-len(row[3]), -row[0]))
    found = search_values(index, [" the", "e"], limit=None)
    assert [len(one.found) for one in found] == [len(row[3]) for row in expected]
    assert [one.p for one in found] == pytest.approx([row[0] for row in expected])


def test_a_substring_finds_every_token_that_contains_it(index):
    tokens = {token for token, text in enumerate(index.vocabulary) if "e" in text}
    assert len(tokens) > 1
    found = search_values(index, "e", "substring", limit=None)
    assert len(found) == len(naive(index, tokens))
    assert {token.token for one in found for token in one.found} <= tokens
    assert [one.p for one in found] == sorted((one.p for one in found), reverse=True)


def test_the_bottom_end_is_searched_by_place(index):
    token = index.vocabulary.index(" the")
    found = search_values(index, " the", end="bottom", limit=None)
    assert len(found) == len(naive(index, {token}, "bottom_tokens", "bottom_p"))
    assert [one.rank for one in found] == sorted(one.rank for one in found)


def test_a_text_that_is_not_one_token_is_refused_with_its_split(index):
    with pytest.raises(UnknownName) as refusal:
        search_values(index, " the the")
    assert "is not one token of this model but can be written as ' the' + ' the'" in str(refusal.value)
    with pytest.raises(UnknownName) as refusal:
        search_values(index, " the the", tokenizer=Tokenizer(tiny_tokenizer()))
    assert "is not one token of this model but ' the' + ' the'" in str(refusal.value)
    with pytest.raises(UnknownName, match="nor made of several"):
        search_values(index, "漢字")
    with pytest.raises(UnknownName, match="no token of this model contains"):
        search_values(index, "漢字", "substring")


def test_wrong_searches_are_refused(index):
    for query in ("", [], [" the", ""]):
        with pytest.raises(SettingError, match="query is empty"):
            search_values(index, query)
    with pytest.raises(UnknownName, match="token or substring"):
        search_values(index, " the", "regex")
    with pytest.raises(UnknownName, match="'top' and 'bottom'"):
        search_values(index, " the", end="middle")
    with pytest.raises(SettingError, match="--limit is 0"):
        search_values(index, " the", limit=0)


def test_an_index_without_values_says_which_command_to_run(fresh):
    index, _model = fresh
    with pytest.raises(IndexFolderError, match="memlens values"):
        search_values(index, " the")
