"""The experiments of sections 3.2 and 4 against naive loops, on a plain, a gated, a parallel and a post-norm model."""

from itertools import pairwise

import numpy as np
import pytest
import torch

import memlens
from memlens import stats as bootstrap
from memlens.experiments import local_edits, predictive_values
from memlens.experiments.run import run
from memlens.testing import tiny_model, tiny_tokenizer
from memlens.vocab.table import compute_values


def memories_of(index, model, layer):
    """(memory, argmax, max p, scores, top triggers by rank) of a layer, from the model and the triggers alone."""
    triggers: dict[int, list[dict]] = {memory: [] for memory in range(index.memories(layer))}
    for row in sorted(index.table("triggers").to_pylist(), key=lambda row: row["rank"]):
        if row["layer"] == layer and row["end"] == "top":
            triggers[row["memory"]].append(row)
    scores = model.lens.value_scores(model.layers[layer].values, layer)
    for memory, own in triggers.items():
        yield memory, int(scores[memory].argmax()), float(scores[memory].softmax(0).max()), scores[memory], own


def test_agreement_counts_values_that_promote_what_follows_the_top_trigger(fresh):
    index, model = fresh
    table = run(index, "agreement")["agreement"].to_pylist()
    for row in table:
        pairs, no_trigger, no_next = [], 0, 0
        for _, argmax, _, _, triggers in memories_of(index, model, row["layer"]):
            if not triggers:
                no_trigger += 1
            elif triggers[0]["next_token"] is None:
                no_next += 1
            else:
                pairs.append((argmax, triggers[0]["next_token"]))
        agree = sum(argmax == target for argmax, target in pairs)
        shuffled = np.mean([argmax == target for argmax, _ in pairs for _, target in pairs])
        assert (row["memories"], row["agree"]) == (len(pairs), agree)
        assert (row["no_trigger"], row["no_next"]) == (no_trigger, no_next)
        assert row["rate"] == agree / len(pairs) and row["low"] <= row["rate"] <= row["high"]
        assert row["shuffled"] == pytest.approx(shuffled) and row["baseline"] == 1 / model.vocabulary
    assert [row["layer"] for row in table] == list(index.layers)


def test_rank_gives_the_quartiles_of_the_targets_places(fresh):
    index, model = fresh
    for row in run(index, "rank")["rank"].to_pylist():
        ranks = [
            1 + int((scores > scores[triggers[0]["next_token"]]).sum())
            for _, _, _, scores, triggers in memories_of(index, model, row["layer"])
            if triggers and triggers[0]["next_token"] is not None
        ]
        assert row["memories"] == len(ranks)
        assert [row["q1"], row["median"], row["q3"]] == np.percentile(ranks, [25, 50, 75]).tolist()
        assert row["low"] <= row["median"] <= row["high"] and row["vocabulary"] == model.vocabulary


def test_shuffled_ranks_are_those_of_the_next_memorys_target(fresh):
    index, model = fresh
    for row in run(index, "rank")["rank"].to_pylist():
        having = [
            (scores, triggers[0]["next_token"])
            for _, _, _, scores, triggers in memories_of(index, model, row["layer"])
            if triggers and triggers[0]["next_token"] is not None
        ]
        targets = [target for _, target in having]
        ranks = [
            1 + int((scores > scores[target]).sum())
            for (scores, _), target in zip(having, targets[1:] + targets[:1], strict=True)
        ]
        assert row["shuffled"] == np.median(ranks)


def test_promotion_is_the_standing_of_what_follows_among_all_tokens(fresh):
    index, model = fresh
    table = run(index, "promotion", model, sample=9)["promotion"].to_pylist()
    for layer in index.layers:
        rows = [row for row in table if row["layer"] == layer]
        known = {memory: (scores, triggers) for memory, _, _, scores, triggers in memories_of(index, model, layer)}
        following = {
            memory: [row["next_token"] for row in triggers if row["next_token"] is not None]
            for memory, (_, triggers) in known.items()
        }
        assert len(rows) == 9
        for row, other in zip(rows, rows[1:] + rows[:1], strict=True):
            scores = known[row["memory"]][0]
            own, shuffled = (
                [float((scores < scores[token]).sum()) / (model.vocabulary - 1) for token in following[one["memory"]]]
                for one in (row, other)
            )
            assert row["standing"] == pytest.approx(np.mean(own)) and row["shuffled"] == pytest.approx(
                np.mean(shuffled)
            )
            assert row["triggers"] == len(own)
            assert (row["top"], row["bottom"]) == (sum(s >= 0.9 for s in own), sum(s <= 0.1 for s in own))


def test_predictive_values_are_the_most_confident_with_their_precision_and_chance(fresh):
    index, model = fresh
    table = run(index, "predictive-values", sample=20)["predictive-values"].to_pylist()
    naive, pools = [], {layer: [] for layer in index.layers}
    for layer in index.layers:
        for memory, argmax, max_p, _, triggers in memories_of(index, model, layer):
            following = [row["next_token"] for row in triggers if row["next_token"] is not None]
            pools[layer] += following
            if following:
                matches = following.count(argmax)
                naive.append((-max_p, layer, memory, argmax, matches / len(following), matches > 0, len(following)))
    naive.sort()
    columns = ("layer", "memory", "token", "precision", "agrees", "triggers")
    assert [tuple(row[name] for name in columns) for row in table] == [row[1:] for row in naive[:20]]
    np.testing.assert_allclose([row["max_p"] for row in table], [-row[0] for row in naive[:20]], rtol=1e-5)
    random = np.random.default_rng(0)
    for row in table[:6]:  # chance is that of tokens dealt at random within the layer
        pool = pools[row["layer"]]
        agreeing = (random.choice(pool, (20_000, row["triggers"])) == row["token"]).any(1).mean()
        assert row["chance"] == pytest.approx(1 - (1 - pool.count(row["token"]) / len(pool)) ** row["triggers"])
        assert row["chance"] == pytest.approx(agreeing, abs=0.02)


def test_the_bins_hold_every_memory_with_a_target_once(fresh):
    index, _model = fresh
    made = run(index, ["predictive-values", "agreement"])
    bins, layers = made["predictive-values-bins"].to_pylist(), made["agreement"].to_pylist()
    for column in ("memories", "agree"):
        assert sum(row[column] for row in bins) == sum(row[column] for row in layers)
    values = [row for row in index.table("values").to_pylist() if row["target"] is not None]
    for row in bins:
        low = row["from_p"] if row["bin"] else 0.0
        high = row["to_p"] if row["bin"] < len(bins) - 1 else 2.0
        inside = [value for value in values if low <= value["max_p"] < high]
        assert row["memories"] == len(inside)
        assert row["agree"] == sum(value["argmax"] == value["target"] for value in inside)


def test_the_auroc_of_max_p_is_the_share_of_pairs_in_the_right_order(fresh):
    index, _model = fresh
    row = run(index, "predictive-values")["predictive-values-bins"].to_pylist()[0]
    values = [value for value in index.table("values").to_pylist() if value["target"] is not None]
    values.sort(key=lambda value: (value["layer"], value["memory"]))
    by_layer = [[value for value in values if value["layer"] == layer] for layer in index.layers]
    own = [[value["target"] for value in layer] for layer in by_layer]
    shuffled = [targets[1:] + targets[:1] for targets in own]
    for name, targets in (("auroc", own), ("auroc_shuffled", shuffled)):
        agreeing = [(value, value["argmax"] == target) for layer, of_layer in zip(by_layer, targets, strict=True)
                    for value, target in zip(layer, of_layer, strict=True)]  # fmt: skip
        ones = [value["max_p"] for value, agrees in agreeing if agrees]
        others = [value["max_p"] for value, agrees in agreeing if not agrees]
        pairs = [(one > other) + (one == other) / 2 for one in ones for other in others]
        assert row[name] is None if not pairs else row[name] == pytest.approx(np.mean(pairs))


def test_confidence_is_a_multiple_of_the_uniform_distribution(fresh):
    index, model = fresh
    for row in run(index, "predictive-values", sample=5)["predictive-values"].to_pylist():
        assert row["times_uniform"] == pytest.approx(row["max_p"] * model.vocabulary)


def test_bins_are_equally_wide_on_the_chosen_scale():
    max_p = np.array([0.001, 0.5, 0.1])
    assert np.allclose(np.diff(np.log(predictive_values.bin_edges(max_p, True))), np.log(500) / 8)
    assert np.allclose(np.diff(predictive_values.bin_edges(max_p, False)), 0.499 / 8)


def naive_change(model, tokens, memory, layer, m, place):
    """(m' - m) / m with the token at `place` removed, run alone."""
    bos = [model.tokenizer.bos] if model.tokenizer.adds_bos else []
    with model.record(states=False) as recording:
        model.run_body(torch.tensor([bos + [token for i, token in enumerate(tokens) if i != place]]))
    return (float(recording.coefficients[layer][0, -1, memory]) - m) / m


def test_local_edits_are_the_mean_change_of_coefficients_run_one_by_one(fresh, monkeypatch):
    index, model = fresh
    monkeypatch.setattr(local_edits, "random_positions", lambda lengths, random: (lengths // 2).tolist())
    table = local_edits.compute(index, model, sample=6)
    sentences = {row["sentence"]: row["tokens"] for row in index.table("corpus").to_pylist()}
    for layer in index.layers:
        listed = {memory: triggers for memory, _, _, _, triggers in memories_of(index, model, layer) if triggers}
        alive = np.array(sorted(listed))
        sampled = bootstrap.draw(alive, 6, bootstrap.generator(0, "local-edits", layer))
        rows = {row["edit"]: row for row in table if row["layer"] == layer}
        found = {}
        for edit, place in (("first", lambda n: 0), ("last", lambda n: n - 1), ("random", lambda n: n // 2)):
            means, left_out = [], 0
            for memory in sampled.tolist():
                prefixes = [(sentences[t["sentence"]][: t["position"] + 1], t["coefficient"]) for t in listed[memory]]
                left_out += sum(len(tokens) == 1 for tokens, _ in prefixes)
                longer = [(tokens, m) for tokens, m in prefixes if len(tokens) > 1]
                changes = [naive_change(model, tokens, memory, layer, m, place(len(tokens))) for tokens, m in longer]
                means += [np.mean(changes)] if changes else []
            row = rows[edit]
            np.testing.assert_allclose(row["change"], np.mean(means), rtol=1e-3, atol=1e-4)
            np.testing.assert_allclose(row["median"], np.median(means), rtol=1e-3, atol=1e-4)
            if row["low"] is None:  # memories that all change alike say nothing of how much others may differ
                assert np.ptp(means) < 1e-3
            else:
                assert row["low"] <= row["change"] <= row["high"]
            assert (row["memories"], row["left_out"]) == (len(means), left_out)
            found[edit] = np.array(means)
        for edit, row in rows.items():  # memory by memory, since they are the same
            expected = np.mean(found[edit] - found["last"])
            np.testing.assert_allclose(row["beside_last"], expected, rtol=1e-3, atol=2e-4)
            if edit == "last":  # beside itself nothing varies, so that there is no interval
                assert row["beside_last"] == 0 and row["beside_last_low"] is None
            else:
                assert row["beside_last_low"] <= row["beside_last"] <= row["beside_last_high"]


def test_no_edited_prefix_is_run_twice_or_as_the_beginning_of_another(fresh, monkeypatch):
    index, model = fresh
    fed, real = [], model.run_to
    monkeypatch.setattr(model, "run_to", lambda layer, tokens: (fed.extend(tokens.tolist()), real(layer, tokens)))
    local_edits.compute(index, model, sample=None)
    stripped = sorted(tuple(np.trim_zeros(np.array(row), "b").tolist()) for row in fed)
    assert all(right[: len(left)] != left for left, right in pairwise(stripped))


def test_a_pass_ends_with_the_layer_it_is_run_to(fresh):
    model = fresh[1]
    tokens, deepest = torch.tensor([[5, 3, 9, 1]]), len(model.layers) - 1
    with model.record() as whole:
        model.run_body(tokens)
    for layer in range(deepest + 1):
        seen = {}
        with model.watch(lambda number, block, seen=seen: seen.update({number: block.everywhere().clone()})):
            model.run_to(layer, tokens)
        assert list(seen) == list(range(layer + 1))
        assert all(torch.equal(seen[number], whole.coefficients[number]) for number in seen)


def test_planted_values_agree_exactly_where_they_were_planted(tmp_path):
    (tmp_path / "text.txt").write_text("The river runs to the sea. Rain fell on the hills, and the rivers rose.\n" * 2)
    network = tiny_model("gpt_neox")  # its output embedding is its own, so that changing it changes no coefficient
    output, tokenizer = network.get_output_embeddings().weight, tiny_tokenizer()
    with torch.no_grad():
        output.div_(output.norm(dim=1, keepdim=True))
    model = memlens.load(network, tokenizer=tokenizer)
    index = memlens.scan(model, tmp_path / "text.txt", out=tmp_path / "first")
    last = index.layers[-1]
    targets = {
        row["memory"]: row["next_token"]
        for row in index.table("triggers").to_pylist()
        if row["layer"] == last and row["end"] == "top" and row["rank"] == 0 and row["next_token"] is not None
    }
    planted = sorted(targets)[::2]
    with torch.no_grad():
        for memory, target in targets.items():
            sign = 1.0 if memory in planted else -1.0
            network.gpt_neox.layers[-1].mlp.dense_4h_to_h.weight[:, memory] = sign * 9 * output[target]
    model = memlens.load(network, tokenizer=tokenizer)
    index = memlens.scan(model, tmp_path / "text.txt", out=tmp_path / "second")
    compute_values(index, model, reading="raw")
    row = run(index, "agreement")["agreement"].to_pylist()[-1]
    assert 0 < len(planted) < len(targets) == row["memories"] and row["agree"] == len(planted)
    values = [row for row in index.table("values").to_pylist() if row["layer"] == last]
    assert [row["memory"] for row in values if row["target"] is not None and row["argmax"] == row["target"]] == planted


def test_any_token_of_a_prefix_may_be_removed_at_random() -> None:
    places = local_edits.random_positions(np.full(99, 3), np.random.default_rng(0))
    assert set(places) == {0, 1, 2}
