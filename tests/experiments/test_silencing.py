"""Silencing against naive loops: the candidates, the probabilities with and without a memory, and continuations."""

import math
from collections import Counter

import pytest

import memlens
from memlens.experiments import silencing
from memlens.experiments.run import run


@pytest.fixture
def rows(fresh, monkeypatch):
    monkeypatch.setattr(silencing, "_LEAST", 1)
    monkeypatch.setattr(silencing, "LIKELY", 0.0)
    index, model = fresh
    return index, model, run(index, "silencing", model)["silencing"].to_pylist()


def test_candidates_promote_a_token_that_follows_their_triggers(rows):
    index, _, table = rows
    words = silencing.word_tokens(index)
    best = {}
    for value in index.table("values").to_pylist():
        triggers = index.triggers(index.names.name(value["layer"], value["memory"]))
        following = Counter(one.next_token for one in triggers if one.next_token is not None)
        shares = {token: following[token] / following.total() for token in value["tokens"][:10] if following[token]}
        if shares:
            best[value["layer"], value["memory"]] = shares
    any_word = any(words & set(shares) for shares in best.values())
    expected = {}
    for memory, shares in best.items():
        shares = {token: share for token, share in shares.items() if token in words or not any_word}
        if shares:
            expected[memory] = max(shares, key=lambda token: (shares[token], -token))
    candidates = silencing.select_candidates(index)
    assert {(row["layer"], row["memory"]): row["token"] for row in candidates} == expected and len(expected) > 3
    shares = [row["follows"] / row["followed"] for row in candidates]
    assert shares == sorted(shares, reverse=True)
    measured = {(row["layer"], row["memory"]) for row in table}
    assert measured <= {(row["layer"], row["memory"]) for row in candidates[: silencing.CANDIDATES]}


def test_probabilities_are_those_of_an_intervention(rows):
    index, model, table = rows
    assert table
    for row in table[:12]:
        name = index.names.name(row["layer"], row["memory"])
        effect = memlens.intervene(model, row["prompt"], f"{name}=0", token=row["token"])
        assert row["p"] == pytest.approx(effect.before.token.p, rel=1e-4)
        assert row["p_without"] == pytest.approx(effect.after.token.p, rel=1e-4)
        trigger = index.triggers(name)[row["rank"]]
        assert (row["prompt"], row["last_token"]) == (trigger.text, trigger.token)
        assert trigger.next_token == row["token"]


def test_the_factor_is_the_geometric_mean_and_sorts_the_memories(rows):
    _, _, table = rows
    by_memory = {}
    for row in table:
        by_memory.setdefault((row["layer"], row["memory"]), []).append(row)
    for own in by_memory.values():
        product = math.prod(row["p"] / row["p_without"] for row in own)
        assert own[0]["factor"] == pytest.approx(product ** (1 / len(own)))
        assert own[0]["p_mean"] == pytest.approx(sum(row["p"] for row in own) / len(own))
        lengths = [len(row["prompt"]) for row in own]
        assert lengths == sorted(lengths) and len({row["prompt"] for row in own}) == len(own) <= 3
    factors = [own[0]["factor"] for own in by_memory.values()]
    assert factors == sorted(factors, reverse=True)


def test_the_strongest_memories_have_continuations_with_and_without_them(rows):
    index, model, table = rows
    firsts = silencing.first_prompts(table)
    continued = [row for row in table if row["continuation"] is not None]
    assert continued == firsts[: len(continued)] and len(continued) == min(5, len(firsts))
    for row in continued[:2]:
        name = index.names.name(row["layer"], row["memory"])
        assert row["continuation"] == memlens.generate(model, row["prompt"], 4).text
        assert row["continuation_without"] == memlens.generate(model, row["prompt"], 4, f"{name}=0").text


def test_without_candidates_the_table_is_empty(fresh):
    index, model = fresh
    table = run(index, "silencing", model, sample=1)["silencing"]
    assert table.num_rows <= 3 and table.schema.equals(silencing.SCHEMA)
