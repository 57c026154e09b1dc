"""Silencing a group changes what it should: against passes with the value taken out of the weights, and controls."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import memlens
from memlens.index.reader import Index
from memlens.role.effects import (
    TargetPrefixes,
    UnusedMemories,
    _divergence,
    _entropy,
    _log_p_of_target,
    _measure,
    role_effects,
    silence,
)
from memlens.testing import tiny_model, tiny_tokenizer


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2_moe"])
def test_a_silenced_group_is_one_whose_values_are_zero(family: str) -> None:
    model = memlens.load(tiny_model(family), tokenizer=tiny_tokenizer(adds_bos=family == "llama"))
    prefixes = TargetPrefixes([[5, 9, 12], [7], [30, 31, 32, 33, 34]], np.array([12, 7, 34]))
    group = [(0, 3), (1, 8), (1, 11), (2, 19)]
    with silence(model, group):
        found = _measure(model, prefixes, _log_p_of_target)
    for layer, memory in group:
        owner, place = model.layers[layer].group_of(memory)
        with torch.no_grad():
            owner.values[place] = 0.0
    bos = [model.tokenizer.bos] if model.tokenizer.adds_bos else []
    naive = [
        torch.log_softmax(model.logits(torch.tensor([bos + tokens]))[0, -1].double(), 0)[tokens[-1]].item()
        for tokens in prefixes.tokens
    ]
    np.testing.assert_allclose(found, naive, atol=1e-5)


def test_measures_are_those_of_their_definitions() -> None:
    p = np.array([0.5, 0.25, 0.25])
    logs, unigram = torch.tensor(np.log(p))[None], np.log([0.2, 0.2, 0.6])
    own = torch.tensor([1])
    assert _entropy(logs, own).item() == pytest.approx(-(p * np.log(p)).sum())
    assert _divergence(logs, own, torch.tensor(unigram)).item() == pytest.approx((p * (np.log(p) - unigram)).sum())
    assert _log_p_of_target(logs, own).item() == pytest.approx(np.log(0.25))


@pytest.fixture
def index(tiny_gpt2_values: Index, copy_of: Callable[..., Index]) -> Index:
    return memlens.roles(copy_of(tiny_gpt2_values), rate=0.99)


def test_random_groups_have_the_size_layers_and_norms_of_the_group(index: Index) -> None:
    rows = {(row["layer"], row["memory"]): row for row in index.table("roles").to_pylist()}
    group = [key for key in rows if key[1] in (0, 7)]
    others, random = UnusedMemories(index, group), np.random.default_rng(0)
    assert others.comparable(random) == group
    drawn = [others.random_group(group, random) for _ in range(10)]
    assert len({tuple(one) for one in drawn}) > 1
    for other in drawn:
        assert len(set(other)) == len(group) and not set(other) & set(group)
        for (layer, memory), (own, place) in zip(other, group, strict=True):
            assert layer == own and "dead" not in rows[layer, memory]["roles"]
            apart = sorted(abs(rows[one]["norm"] - rows[own, place]["norm"]) for one in rows if one[0] == own)
            assert abs(rows[layer, memory]["norm"] - rows[own, place]["norm"]) <= apart[24]
        assert others.norm(other) == pytest.approx(np.mean([rows[one]["norm"] for one in other]))


def test_a_random_group_takes_no_memory_twice_even_where_all_are_near_the_same_ones(index: Index) -> None:
    """The longest of a layer: with 20 nearest for each and some taken twice, a group of 104 was set against 101."""
    rows = [row for row in index.table("roles").to_pylist() if row["layer"] == 1 and "dead" not in row["roles"]]
    longest = [(1, row["memory"]) for row in sorted(rows, key=lambda row: -row["norm"])]
    others, random = UnusedMemories(index, longest[: len(rows) // 2]), np.random.default_rng(0)
    group = others.comparable(random)
    assert len(group) == len(rows) // 2
    for _ in range(5):
        assert len(set(others.random_group(group, random)) - set(group)) == len(group)


def test_of_a_group_that_is_most_of_a_layer_as_many_are_compared_as_there_are_others(index: Index) -> None:
    rows = [row for row in index.table("roles").to_pylist() if row["layer"] == 0 and "dead" not in row["roles"]]
    group = [(0, row["memory"]) for row in rows[3:]]
    others, random = UnusedMemories(index, group), np.random.default_rng(0)
    compared = others.comparable(random)
    assert len(compared) == 3 and set(compared) <= set(group)
    assert set(others.random_group(compared, random)) == {(0, row["memory"]) for row in rows[:3]}
    assert UnusedMemories(index, [(0, row["memory"]) for row in rows]).comparable(random) == []


def test_effects_are_compared_prefix_by_prefix_with_all_random_groups(
    index: Index, run: Callable[..., Any], refused: Callable[..., str], tiny_gpt2_values: Index
) -> None:
    model = index.load_model()
    for effect in role_effects(index, model):
        assert (effect.appears is None) == (effect.prefixes == 0)
        if effect.prefixes:
            assert effect.change is not None and effect.difference is not None and len(effect.random) == 20
            assert effect.norm and effect.random_norm
            assert effect.difference == pytest.approx(effect.change - np.mean(effect.random))
            assert effect.appears == (effect.low is not None and effect.low > 0 and effect.change > max(effect.random))
    code, out, _ = run("roles", index.folder, "--effects")
    assert code == 0 and out.startswith("silenced")
    assert "run `memlens roles" in refused("roles", tiny_gpt2_values.folder, "--effects")
    assert "--seed is -1" in refused("roles", index.folder, "--effects", "--seed", -1)
    assert "--rate has no effect with --effects" in refused("roles", index.folder, "--effects", "--rate", 0.1)
