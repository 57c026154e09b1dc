"""Coherence against naive loops over pairs and directions, and on planted values."""

from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import memlens
from memlens.index.memory import CLEAR, read_value, summarize_values
from memlens.stats import generator
from memlens.testing import tiny_tokenizer
from memlens.vocab import coherence as module, tokens
from memlens.vocab.coherence import coherence, list_similarities, random_similarities
from memlens.vocab.table import NextTokens, ValuesOfLayer, compute_values, values_are_made


def naive_similarity(embedding, listed):
    def cosine(a, b):
        return a @ b / (np.linalg.norm(a) * np.linalg.norm(b))

    return np.mean([cosine(embedding[a], embedding[b]) for a, b in combinations(listed[:10], 2)])


def every_third(embedding, counts):
    return np.arange(len(counts)) % 3 == 1


@pytest.mark.parametrize("untrained", [False, True])
@pytest.mark.parametrize("reading", ["folded", "raw"])
def test_coherence_is_the_share_of_random_directions_whose_top_tokens_are_less_similar(
    fresh, reading, untrained, monkeypatch
):
    index, model = fresh
    monkeypatch.setattr(module, "DIRECTIONS", 30)
    monkeypatch.setattr(tokens, "undertrained", every_third)
    compute_values(index, model, top=12, reading=reading, untrained=untrained)
    embedding = model.lens.embedding.numpy().astype(float)
    allowed = [t for t in range(model.vocabulary) if untrained or t % 3 != 1]

    def top(vector, layer):
        scores = model.lens.value_scores(vector[None], layer, reading)[0]
        return sorted(allowed, key=lambda token: (-float(scores[token]), token))

    directions = torch.from_numpy(generator(0, "coherence").normal(size=(30, model.width)).astype(np.float32))
    null = {
        layer: [naive_similarity(embedding, top(direction, layer)) for direction in directions]
        for layer in index.layers
    }
    for row in index.table("values").to_pylist()[::7]:
        layer, value = row["layer"], model.layers[row["layer"]].values[row["memory"]]
        listed = top(value, layer)
        assert row["tokens"] == listed[:12] and row["bottom_tokens"] == listed[::-1][:12]
        less = sum(other < naive_similarity(embedding, listed) - 1e-6 for other in null[layer])
        assert row["coherence"] == pytest.approx(less / 30)
        scores = model.lens.value_scores(value[None], layer, reading)[0].double()
        assert row["argmax"] == int(scores.argmax())  # also if it is not listed
        assert row["max_p"] == pytest.approx(float(scores.softmax(0).max()), rel=1e-4)
        np.testing.assert_allclose(row["p"], scores.softmax(0)[listed[:12]], rtol=1e-4)
        shown = read_value(index, f"L{layer}N{row['memory']}")
        assert shown is not None and shown.is_clear == (row["coherence"] >= np.float32(CLEAR))
        assert shown.times_uniform == pytest.approx(float(scores.softmax(0).max()) * model.vocabulary, rel=1e-4)
    clear = summarize_values(index)["clear"]
    assert [row["layer"] for row in clear] == list(index.layers)
    assert sum(row["memories"] for row in clear) == index.table("values").num_rows
    assert values_are_made(index, model, top=12, reading=reading, untrained=untrained)
    assert not values_are_made(index, model, top=12, reading=reading, untrained=not untrained)


def test_values_without_direction_and_lists_of_one_token_are_not_clear():
    embedding = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    assert list_similarities(embedding, np.array([[2]])).tolist() == [0]
    embedding[4] = 0
    assert list_similarities(embedding, np.array([[4, 4]])).tolist() == [0]
    assert coherence(np.array([0.1, 0.2, 0.9]), np.array([0.1, 0.2, 0.3, 0.4])).tolist() == [0, 0.25, 1]


def planted_model(clusters, memories, seed=0):
    """A model whose tokens form clusters of 15, and half of whose values point to a cluster."""
    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=3000, n_embd=96, n_layer=1, n_head=4, n_positions=16, n_inner=memories)
    network = GPT2LMHeadModel(config).eval()
    random = torch.randn(3000, 96)
    centers = torch.randn(clusters, 96)
    for cluster, center in enumerate(centers):
        random[15 * cluster : 15 * cluster + 15] = 0.8 * center + 0.6 * torch.randn(15, 96)
    network.transformer.wte.weight.data[:] = random
    values = torch.randn(memories, 96)
    values[::2] = centers[torch.arange(memories)[::2] % clusters] + 0.7 * torch.randn(len(values[::2]), 96)
    network.transformer.h[0].mlp.c_proj.weight.data[:] = values
    return network


@pytest.mark.parametrize("reading", ["folded", "raw"])
def test_planted_values_are_told_from_random_ones_in_95_of_100_cases(reading):
    memories = 400
    model = memlens.load(planted_model(20, memories), tokenizer=tiny_tokenizer())
    following = NextTokens(0, np.full((memories, 1), -1, np.int32), np.zeros(memories, np.int64))
    null = random_similarities(model, [0], reading, None)[0]
    (table,) = ValuesOfLayer(following, 10, reading, null).tables(model, lambda more: None)
    clear = table.column("coherence").to_numpy() >= CLEAR
    assert (clear == (np.arange(memories) % 2 == 0)).mean() > 0.95


def test_layers_that_are_read_alike_share_their_null(monkeypatch):
    model = memlens.load(planted_model(2, 8), tokenizer=tiny_tokenizer())
    passes = []
    monkeypatch.setattr(module, "_similarities_of", lambda *args: passes.append(args[2]) or np.zeros(3))
    layers = SimpleNamespace(
        folded=lambda vectors, layer, reading: vectors * (1 + layer // 2), embedding=torch.ones(3, 3)
    )
    many = SimpleNamespace(lens=layers, width=96, device="cpu", layers=[model.layers[0]] * 4)
    random_similarities(many, range(4), "raw", None)  # type: ignore[arg-type]
    assert passes == [0, 2]
