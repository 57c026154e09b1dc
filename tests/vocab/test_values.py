"""The tables of values and keys against naive formulas, on a plain, a gated, a parallel and a post-norm model."""

import numpy as np
import pytest
import torch

import memlens
from memlens.errors import ModelError, SettingError
from memlens.experiments import agreement, rank
from memlens.index.memory import read_value, summarize_values
from memlens.testing import VOCABULARY, tiny_model, tiny_tokenizer
from memlens.vocab import kernels as blocks, tokens
from memlens.vocab.table import compute_values, values_are_made

TOP = 10


def top_triggers(index):
    """(layer, memory) -> next tokens of its top triggers by rank."""
    found: dict[tuple[int, int], list[int | None]] = {}
    for row in sorted(index.table("triggers").to_pylist(), key=lambda row: row["rank"]):
        if row["end"] == "top":
            found.setdefault((row["layer"], row["memory"]), []).append(row["next_token"])
    return found


def naive_value(model, layer, memory, reading, left_out=()):
    value = model.layers[layer].values[memory : memory + 1]
    scores = model.lens.value_scores(value, layer, reading)[0].double()
    scores[list(left_out)] = -torch.inf
    return scores, scores.softmax(-1)


def every_third(embedding, counts):
    return np.arange(len(counts)) % 3 == 1


@pytest.mark.parametrize("reading", ["folded", "raw", "trained"])
def test_every_value_is_what_the_naive_formula_says(fresh, reading, monkeypatch):
    index, model = fresh
    monkeypatch.setattr(blocks, "rows_per_block", lambda vocabulary: 7)  # several blocks, the last one short
    left_out = set()
    if reading == "trained":
        monkeypatch.setattr(tokens, "undertrained", every_third)
        compute_values(index, model, top=TOP, vocabulary="trained")
        reading, left_out = None, set(range(1, model.vocabulary, 3))
        assert index.manifest.values.tokens == model.vocabulary - len(left_out)
        assert tokens.tokens_read(index).tolist() == [t for t in range(model.vocabulary) if t not in left_out]
    else:
        compute_values(index, model, top=TOP, reading=reading)
    triggers = {
        memory: [None if token in left_out else token for token in following]
        for memory, following in top_triggers(index).items()
    }
    rows = index.table("values").to_pylist()
    assert [(row["layer"], row["memory"]) for row in rows] == [
        (layer, memory) for layer in index.layers for memory in range(index.memories(layer))
    ]
    for row in rows:
        scores, p = naive_value(model, row["layer"], row["memory"], reading, left_out)
        order = torch.argsort(-scores, stable=True).tolist()[: model.vocabulary - len(left_out)]
        p = p.clamp(min=1e-300)
        assert row["argmax"] == row["tokens"][0] == int(scores.argmax())
        assert row["tokens"] == order[:TOP] and row["bottom_tokens"] == order[::-1][:TOP]
        np.testing.assert_allclose(row["p"], p[order[:TOP]], rtol=1e-4)
        np.testing.assert_allclose(row["bottom_p"], p[order[::-1][:TOP]], rtol=1e-4)
        np.testing.assert_allclose(row["max_p"], p.max(), rtol=1e-4)
        np.testing.assert_allclose(row["entropy"], -(p * p.log()).sum(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(row["norm"], model.layers[row["layer"]].values[row["memory"]].norm(), rtol=1e-5)
        following = triggers.get((row["layer"], row["memory"]), [])
        target = following[0] if following else None
        assert row["target"] == target
        assert row["target_rank"] == (None if target is None else 1 + int((scores > scores[target]).sum()))
        assert [p is None for p in row["trigger_p"]] == [token is None for token in following]
        known = [token for token in following if token is not None]
        np.testing.assert_allclose([p for p in row["trigger_p"] if p is not None], p[known], rtol=1e-4)
        check_histogram(row["histogram"], scores[order].double().numpy())


def check_histogram(counts, scores):
    """Scores between equal edges; one that is an edge but for its last bits may be on either side of it."""
    edges, slack = np.linspace(scores.min(), scores.max(), len(counts) + 1)[1:-1], 1e-4 * np.ptp(scores)
    assert sum(counts) == len(scores) and len(counts) == blocks.SCORE_BINS
    for place, edge in enumerate(edges, 1):
        assert (scores >= edge + slack).sum() <= sum(counts[place:]) <= (scores >= edge - slack).sum()


def test_scores_that_are_all_alike_are_one_bin_and_those_that_are_no_numbers_harm_nothing():
    scores = np.array([[2.0, 2.0, 2.0], [np.nan, 0.0, 1.0], [-1.0, 0.0, 3.0]], np.float32)
    ends = blocks.find_ends(scores, 1)
    counts = blocks.count_scores(scores, ends)
    assert counts[0].tolist() == [3] + [0] * (blocks.SCORE_BINS - 1)
    assert counts.sum(1).tolist() == [3, 3, 3] and counts[2, [0, 10, -1]].tolist() == [1, 1, 1]


def test_keys_are_matched_with_embeddings_through_the_norm_before_the_block(fresh):
    index, model = fresh
    compute_values(index, model, top=TOP)
    embedding = model.lens.input_embedding
    for row in index.table("keys").to_pylist():
        memories = model.layers[row["layer"]]
        seen = embedding if memories.input_norm is None else memories.input_norm.folded(embedding)
        scores = seen.double() @ memories.keys[row["memory"]].double()
        assert row["tokens"] == torch.argsort(-scores, stable=True)[:TOP].tolist()
        np.testing.assert_allclose(row["scores"], scores[row["tokens"]], rtol=1e-3, atol=1e-4)


def test_computing_again_gives_the_same_bytes_and_the_manifest_knows_them_and_how_they_were_read(fresh):
    index, model = fresh
    made = []
    for _ in range(2):
        compute_values(index, model, top=500)
        made.append([index.path(name).read_bytes() for name in ("values", "keys", "tokens")])
    assert made[0] == made[1]
    manifest = memlens.open_index(index.folder).manifest.content
    sizes = [manifest["files"][name]["bytes"] for name in ("values.parquet", "keys.parquet", "tokens.parquet")]
    assert sizes == [len(content) for content in made[0]]
    made_with = {"top": VOCABULARY, "reading": "folded", "threads": torch.get_num_threads()}
    triggers = manifest["files"]["triggers.parquet"]["sha256"]
    assert manifest["values"] == made_with | {"from": {"triggers": triggers}}
    for vocabulary in (97, 50_257, 267_744):  # a block of scores never outgrows its budget
        assert blocks.rows_per_block(vocabulary) * vocabulary * 4 <= 140 << 20


@pytest.mark.parametrize("preset", ["paper", "released"])
def test_the_presets_of_the_paper_read_values_raw_and_of_scanned_layers_only(tiny_llama, tiny_text, tmp_path, preset):
    memlens.scan(tiny_llama, tiny_text, out=tmp_path / "index", preset=preset, layers="1")
    index = memlens.values(tmp_path / "index")
    assert index.manifest.values.reading == "raw" and set(index.table("values")["layer"].to_pylist()) == {1}


def test_another_model_and_wrong_settings_are_refused_and_nothing_is_written(fresh):
    index, model = fresh
    other = memlens.load(tiny_model(model.family, seed=1), tokenizer=tiny_tokenizer())
    before = (index.folder / "manifest.json").read_bytes()
    with pytest.raises(ModelError, match="fingerprint differs"):
        compute_values(index, other)
    with pytest.raises(SettingError, match="--top is 0"):
        compute_values(index, model, top=0)
    with pytest.raises(SettingError, match="folded or raw"):
        compute_values(index, model, reading="upside down")
    assert not index.has("values") and not index.has("keys")
    assert (index.folder / "manifest.json").read_bytes() == before


def test_values_over_trained_tokens_are_noted_shown_and_made_again_when_asked_otherwise(fresh, monkeypatch):
    index, model = fresh
    monkeypatch.setattr(tokens, "undertrained", every_third)
    compute_values(index, model, top=TOP)
    for vocabulary in ("all", "trained"):
        compute_values(index, model, top=TOP, vocabulary=vocabulary)
        assert values_are_made(index, model, top=TOP, vocabulary=vocabulary)
        assert not values_are_made(index, model, top=TOP, vocabulary={"all": "trained"}.get(vocabulary, "all"))
        value = read_value(index, "L0N0")
        assert value.vocabulary == vocabulary
        assert [one.trained for one in value.promotes] == [one.token % 3 != 1 for one in value.promotes]
        summary = summarize_values(index)
        tops = [row["argmax"] for row in index.table("values").to_pylist()]
        assert (
            summary["undertrained_on_top"] == sum(top % 3 == 1 for top in tops) and summary["vocabulary"] == vocabulary
        )
    assert summary["undertrained_on_top"] == 0
    trained = sum(token % 3 != 1 for token in range(model.vocabulary))
    assert {row["vocabulary"] for row in rank.compute(index)} == {index.manifest.value_tokens} == {trained}
    assert {row["baseline"] for row in agreement.compute(index)} == {1 / trained}
    with pytest.raises(SettingError, match="--vocabulary is 'some'; choose one of: all, trained"):
        memlens.values(index, model=model, vocabulary="some")
