"""A search for memories that promote a token equals plain loops over values.parquet."""

import shutil

import pytest

import memlens
from memlens.errors import IndexFolderError, SettingError, UnknownName
from memlens.index.search import SearchQuery, search, search_values
from memlens.vocab.table import compute_values


@pytest.fixture(scope="module")
def index(scanned, tmp_path_factory):
    folder, model = scanned
    index = memlens.open_index(shutil.copytree(folder, tmp_path_factory.mktemp("values") / "index"))
    compute_values(index, model, top=12)
    return index


def found_in(index, *texts, mode="token", bottom=False, limit=1000):
    return search_values(index, SearchQuery(texts, "values", bottom=bottom, limit=limit), mode).found


def naive(index, tokens, column="tokens", p="p"):
    found = []
    for row in index.table("values").to_pylist():
        places = [place for place, token in enumerate(row[column]) if token in tokens]
        if places:
            found.append((sum(row[p][place] for place in places), row["layer"], row["memory"], places))
    return found


def test_memories_that_promote_a_token_come_by_its_place_then_its_probability(index):
    token = index.vocabulary.index(" the")
    expected = sorted(naive(index, {token}), key=lambda row: (row[3][0], -row[0], row[1], row[2]))
    found = found_in(index, " the")
    assert [(one.name.layer, one.name.memory) for one in found] == [row[1:3] for row in expected]
    assert [[token.rank for token in one.tokens] for one in found] == [row[3] for row in expected]
    assert all(one.tokens[0].text == " the" and one.tokens[0].token == token for one in found)
    assert found_in(index, " the", limit=3) == found[:3]


def test_of_several_tokens_memories_with_more_of_them_come_first(index):
    tokens = {index.vocabulary.index(" the"), index.vocabulary.index("e")}
    expected = sorted(naive(index, tokens), key=lambda row: (-len(row[3]), min(row[3]), -row[0]))
    found = found_in(index, " the", "e")
    assert [len(one.tokens) for one in found] == [len(row[3]) for row in expected]
    assert [one.p for one in found] == pytest.approx([row[0] for row in expected])


def test_a_substring_finds_every_token_that_contains_it(index):
    tokens = {token for token, text in enumerate(index.vocabulary) if "e" in text}
    assert len(tokens) > 1
    found = found_in(index, "e", mode="substring")
    assert len(found) == len(naive(index, tokens))
    assert {token.token for one in found for token in one.tokens} <= tokens
    assert [(one.rank, -one.p) for one in found] == sorted((one.rank, -one.p) for one in found)


def test_a_word_is_its_token_with_or_without_a_space_and_else_what_contains_it(index):
    both = {token for token, text in enumerate(index.vocabulary) if text in ("e", " e")}
    assert {one.name for one in found_in(index, "e", mode="word")} == {
        memlens.MemoryId(row[1], row[2]) for row in naive(index, both)
    }
    part = next(text[:-1] for text in index.vocabulary if len(text) > 3 and text[:-1] not in index.vocabulary)
    assert found_in(index, part, mode="word") == found_in(index, part, mode="substring")
    assert "tokens contain it" in search_values(index, SearchQuery((part,), "values"), "word").note


def test_the_bottom_end_is_searched_by_place(index):
    token = index.vocabulary.index(" the")
    found = found_in(index, " the", bottom=True)
    assert len(found) == len(naive(index, {token}, "bottom_tokens", "bottom_p"))
    assert [one.rank for one in found] == sorted(one.rank for one in found)


def test_a_text_that_is_not_one_token_is_refused_with_its_split(index):
    with pytest.raises(UnknownName, match="is not a token of this model but can be split into ' the' \\+ ' the'"):
        found_in(index, " the the")
    with pytest.raises(UnknownName, match="nor a sequence of tokens"):
        found_in(index, "漢字")
    with pytest.raises(UnknownName, match="no token of this model contains"):
        found_in(index, "漢字", mode="substring")


def test_many_equal_letters_are_split_at_once(index):
    with pytest.raises(UnknownName, match="can be split into") as refused:
        found_in(index, " the" * 5000)
    assert str(refused.value).count(" + ") == 50 and " + …; name one" in str(refused.value)
    with pytest.raises(SettingError, match="has 20,000 characters; give at most 1,000"):
        search(index, SearchQuery((" the" * 5000,), "values"))
    with pytest.raises(SettingError, match="--limit is 99999999999999999999"):
        search(index, SearchQuery((" the",), "values", limit=99999999999999999999))
    with pytest.raises(SettingError, match="limit is -1; give 0 or more"):
        index.triggers("L0N0", limit=-1)


def test_an_empty_query_and_an_index_without_values_are_refused(index, scanned):
    for texts in ((), ("",), (" the", "")):
        with pytest.raises(SettingError, match="query is empty"):
            found_in(index, *texts)
    with pytest.raises(IndexFolderError, match="memlens values"):
        found_in(memlens.open_index(scanned[0]), " the")
