"""Section 5 against brute force: one prefix at a time, no batches, no blocks, no look-ups."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import memlens
from memlens.errors import CorpusError, IndexFolderError, SettingError
from memlens.experiments import composition
from memlens.experiments.prefix_pass import read_given_prefixes
from memlens.experiments.prefixes import Prefixes, sample_prefixes, sample_validation, stop_targets, word_at
from memlens.experiments.run import run
from memlens.models.memory_model import MemoryModel
from memlens.settings import CorpusSettings
from memlens.vocab import tokens as token_table
from memlens.vocab.table import compute_values

Fresh = tuple[memlens.Index, MemoryModel]
NAMES = ["active", "composition", "refinement", "confidence", "cases", "last-layer", "contributions", "vetoes",
         "suppression"]  # fmt: skip
SAMPLE = 40
one_family = pytest.mark.parametrize("scanned", ["gpt2"], indirect=True)


def naive_states(index: memlens.Index, model: MemoryModel, prefix: list[int]) -> Any:
    """Coefficients, r, y, o at the last position of one prefix, by layer."""
    bos = index.manifest.model.bos
    with model.record() as own:
        model.run_body(torch.tensor([[*([] if bos is None else [bos]), *prefix]]))
    layers = range(len(model.layers))
    return [tuple(part[layer][0, -1] for part in (own.coefficients, own.r, own.y, own.o)) for layer in layers]


def top(model: MemoryModel, state: torch.Tensor) -> int:
    return int(model.lens.state_logits(state[None])[0].argmax())


def top_added(model: MemoryModel, layer: int, y: torch.Tensor, reading: str = "folded") -> int:
    """top(y): y is a sum of values, so the final norm's gain is folded in as into these, and there is no bias."""
    norm, post_norm = model.lens.final_norm, model.layers[layer].post_norm
    assert norm is not None
    if reading == "raw":
        return int((model.lens.embedding @ (y if post_norm is None else y / post_norm.gain)).argmax())
    return int((model.lens.embedding @ ((y - y.mean() if norm.centers else y) * norm.gain)).argmax())


def naive_rows(
    index: memlens.Index, model: MemoryModel, prefixes: Prefixes, reading: str = "folded"
) -> list[dict[str, Any]]:
    """One row a prefix and layer, from the definitions."""
    rows = []
    for tokens, position in zip(*places(prefixes), strict=True):
        states = naive_states(index, model, tokens[: position + 1])
        final = top(model, states[-1][3])
        for layer, (m, r, y, o) in enumerate(states):
            values = model.layers[layer].values
            promoted = model.lens.value_scores(values, layer, reading).argmax(1)
            loud = m.abs() * values.norm(dim=1)
            row = {"layer": layer, "final": final, "r": top(model, r), "o": top(model, o)}
            row["y"] = top_added(model, layer, y, reading)
            row |= {"added": y, "last": states[-1][3]}
            row["p"] = float(model.lens.probabilities(model.lens.state_logits(r[None]))[0, final])
            row["share"] = float((m > 0).float().mean())
            row["effective"] = float(loud.sum() ** 2 / loud.square().sum())
            row["zero"] = row["y"] not in promoted.tolist()
            row["zero_active"] = row["y"] not in promoted[m > 0].tolist()
            rows.append(row)
    return rows


def push_of(model: MemoryModel, layer: int, row: dict[str, Any]) -> float:
    """The block's part of the final token's logit less the mean of all, at the scale of the last state's norm."""
    norm, E = model.lens.final_norm, model.lens.embedding
    assert norm is not None and norm.gain is not None
    y, last = ((x - x.mean() if norm.centers else x) for x in (row["added"], row["last"]))
    return float((E[row["final"]] - E.mean(0)) @ (y * norm.gain / (last.square().mean() + norm.epsilon).sqrt()))


def test_every_table_equals_brute_force(fresh: Fresh) -> None:
    index, model = fresh
    tables = {name: table.to_pylist() for name, table in run(index, NAMES, model, sample=SAMPLE, seed=3).items()}
    rows = naive_rows(index, model, sample_prefixes(index, SAMPLE, seed=3))
    before = [row for row in rows if row["layer"] == index.layers[0]]
    for layer in index.layers:
        own = [row for row in rows if row["layer"] == layer]
        assert len(own) == SAMPLE
        active, confidence = tables["active"][layer], tables["confidence"][layer]
        for name, percent in (("q1", 25), ("median", 50), ("q3", 75)):
            share, loud, p = (np.percentile([row[of] for row in own], percent) for of in ("share", "effective", "p"))
            assert active[name] == pytest.approx(share) and active[f"effective_{name}"] == pytest.approx(loud, rel=1e-4)
            assert confidence[name] == pytest.approx(p, rel=1e-3)
        composition, refinement, cases = (tables[name][layer] for name in ("composition", "refinement", "cases"))
        for column in ("zero", "zero_active"):
            assert composition[column] == sum(row[column] for row in own)
        assert composition["low"] <= composition["rate"] == composition["zero"] / SAMPLE <= composition["high"]
        assert refinement["match"] == sum(row["r"] == row["final"] for row in own)
        pushed = [push_of(model, layer, row) for row in own]
        found = tables["suppression"][layer]
        assert found["push"] == pytest.approx(np.mean(pushed), rel=1e-3, abs=1e-4)
        assert found["against"] == sum(push < 0 for push in pushed)
        assert found["suppressed"] == sum(p < 0 for p, row in zip(pushed, own, strict=True) if row["r"] == row["final"])
        steps = [int(b["r"] == b["final"]) - int(a["r"] == a["final"]) for a, b in zip(before, own, strict=True)]
        if layer > index.layers[0]:
            assert refinement["step"] == pytest.approx(np.mean(steps))
            assert refinement["step_low"] <= refinement["step"] <= refinement["step_high"]
        before = own
        assert cases["residual"] == sum(row["o"] == row["r"] != row["y"] for row in own)
        assert cases["ffn"] == sum(row["o"] == row["y"] != row["r"] for row in own)
        assert cases["agreement"] == sum(row["o"] == row["r"] == row["y"] for row in own)
        assert cases["composition"] == sum(len({row["o"], row["r"], row["y"]}) == 3 for row in own)
        assert cases["reversal"] == sum(row["r"] == row["y"] != row["o"] for row in own)
        assert sum(cases[case] for case in ("residual", "ffn", "agreement", "composition", "reversal")) == SAMPLE
    settled = np.array([[row["r"] == row["final"] for row in rows if row["layer"] == n] for n in index.layers], float)
    depths = [(layer + 0.5) / len(index.layers) for layer in index.layers]
    slopes = [np.polyfit(depths[1:], settled[1:, prefix], 1)[0] for prefix in range(SAMPLE)]
    assert tables["refinement"][0]["trend"] == pytest.approx(np.mean(slopes), rel=1e-5, abs=1e-9)
    deeper = [row for row in rows if row["layer"] > 0]
    kept = np.mean([row["o"] == row["r"] for row in deeper])
    changed = [row["o"] == row["y"] for row in deeper if row["o"] != row["r"]]
    if changed:
        assert tables["cases"][0]["compromises"] == pytest.approx(1 - np.mean(changed))
    assert tables["cases"][0]["kept"] == pytest.approx(kept) and tables["cases"][0]["kept_low"] < kept
    assert tables["refinement"][-1]["match"] == tables["cases"][-1]["residual"] + tables["cases"][-1]["agreement"]


def test_contributions_add_up_to_the_logit_and_shares_to_one(fresh: Fresh) -> None:
    index, model = fresh
    rows = run(index, "contributions", model, sample=SAMPLE)["contributions"].to_pylist()
    logits = []
    for row, position in zip(*places(sample_prefixes(index, SAMPLE)), strict=True):
        state = naive_states(index, model, row[: position + 1])[-1][3]
        logits.append(model.lens.state_logits(state[None])[0])
    assert rows[0]["logit"] == pytest.approx(np.mean([float(own.max()) for own in logits]), rel=1e-4)
    assert rows[0]["above_mean"] == pytest.approx(np.mean([float(own.max() - own.mean()) for own in logits]), rel=1e-4)
    logit = sum(row["ffn_logit"] + row["attention_logit"] for row in rows)
    assert logit + rows[0]["embedding_logit"] + rows[0]["constant_logit"] == pytest.approx(rows[0]["logit"], abs=1e-4)
    share = sum(row["ffn_share"] + row["attention_share"] for row in rows)
    assert share + rows[0]["embedding_share"] + rows[0]["constant_share"] == pytest.approx(1, abs=1e-4)
    assert all(0 < row["top1"] < row["top10"] < row["top100"] for row in rows)
    assert all(row["top100"] >= row["ffn"] - 1e-4 for row in rows if model.layers[0].groups[0].value_bias is None)


def places(prefixes: Prefixes) -> tuple[list[list[int]], list[int]]:
    return [prefixes.sentences[row].tokens.tolist() for row in prefixes.rows], prefixes.positions.tolist()


def naive_pushes(model: MemoryModel, layer: int, m: torch.Tensor, o: torch.Tensor, direction: torch.Tensor) -> Any:
    """Each memory's part of a logit along a row of E (or a difference of rows), by finite silence: with the final
    norm's scale held, the change of the logit when the memory's own part is taken out."""
    memories, norm = model.layers[layer], model.lens.final_norm
    parts = m[:, None] * memories.values  # [memories, d]
    if memories.post_norm is not None:
        bias = memories.groups[0].value_bias
        output = parts.sum(0) + (0 if bias is None else bias)
        parts = parts * memories.post_norm.gain / (output.square().mean() + memories.post_norm.epsilon).sqrt()
    assert norm is not None
    centre = (lambda x: x - x.mean(-1, keepdim=True)) if norm.centers else (lambda x: x)
    scale = (centre(o).square().mean() + norm.epsilon).sqrt()
    return (centre(parts) / scale * norm.gain) @ direction


def test_last_layer_names_both_words_and_the_memories_that_pushed(fresh: Fresh) -> None:
    index, model = fresh
    table = run(index, "last-layer", model, sample=SAMPLE)["last-layer"].to_pylist()
    cases = run(index, "cases", model, sample=SAMPLE)["cases"].to_pylist()[-1]
    assert len(table) == cases["composition"] == table[0]["compositions"] > 0
    E, last = model.lens.embedding, len(model.layers) - 1
    for row in table[:5]:
        sentence = index.sentences([row["sentence"]])[row["sentence"]]
        m, r, _y, o = naive_states(index, model, sentence["tokens"][: row["position"] + 1])[-1]
        assert (row["residual"], row["output"]) == (top(model, r), top(model, o))
        assert row["output_text"] == index.vocabulary[row["output"]]
        assert row["text"] == sentence["text"][: sentence["ends"][row["position"]]]
        before, after = E[row["residual"]], E[row["output"]]
        assert row["cosine"] == pytest.approx(float(before @ after / before.norm() / after.norm()), abs=1e-5)
        pushes = naive_pushes(model, last, m, o, after - before)
        expected = pushes.topk(10)
        assert row["pushes"] == pytest.approx(expected.values.tolist(), rel=1e-3, abs=1e-4)
        assert row["memories"][0] == int(expected.indices[0])


def test_vetoes_count_the_memories_that_take_most_from_the_residuals_token(fresh: Fresh) -> None:
    index, model = fresh
    table = run(index, "vetoes", model, sample=SAMPLE)["vetoes"].to_pylist()
    E, layer = model.lens.embedding, 1
    times: dict[int, list[float]] = {}
    compositions = 0
    for tokens, position in zip(*places(sample_prefixes(index, SAMPLE)), strict=True):
        m, r, y, o = naive_states(index, model, tokens[: position + 1])[layer]
        if len({top(model, r), top_added(model, layer, y), top(model, o)}) == 3:
            compositions += 1
            lowest = (-naive_pushes(model, layer, m, o, E[top(model, r)] - E.mean(0))).topk(10)
            for memory, amount in zip(lowest.indices.tolist(), lowest.values.tolist(), strict=True):
                if amount > 0:
                    times.setdefault(memory, []).append(-amount)
    found = {row["memory"]: row for row in table if row["layer"] == layer}
    assert {memory: row["times"] for memory, row in found.items()} == {i: len(pushes) for i, pushes in times.items()}
    assert all(row["compositions"] == compositions for row in found.values())
    for memory, pushes in times.items():
        assert found[memory]["push"] == pytest.approx(np.mean(pushes), rel=1e-3)
        assert 1 <= found[memory]["token_times"] <= len(pushes)


@pytest.mark.parametrize("scanned", ["gpt2", "gemma2"], indirect=True)
def test_the_same_seed_gives_the_same_bytes_and_one_pass_serves_all(fresh: Fresh, monkeypatch: Any) -> None:
    index, model = fresh
    run(index, NAMES, model, sample=SAMPLE)
    first = {file: file.read_bytes() for file in (index.folder / "experiments").iterdir()}
    for file in first:
        file.unlink()
    passes, own = [], type(model)._run_body
    monkeypatch.setattr(type(model), "_run_body", lambda self, tokens: passes.append(1) or own(self, tokens))
    made = []
    for _ in range(2):
        run(index, NAMES, model, sample=SAMPLE)
        made.append(len(passes))
        assert {file: file.read_bytes() for file in first} == first
    assert made[0] == made[1] > 0
    other = run(index, "cases", model, sample=SAMPLE, seed=1)["cases"]
    assert len(passes) > made[1] and other.num_rows == len(index.layers)


@one_family
def test_a_sample_is_spread_over_all_prefixes_and_contains_every_smaller_one(fresh: Fresh) -> None:
    index, _model = fresh
    small, large, everything = (
        {(prefixes.sentences[row].id, at) for row, at in zip(prefixes.rows, prefixes.positions, strict=True)}
        for prefixes in (sample_prefixes(index, count) for count in (10, 30, 10**6))
    )
    rows = index.sql("SELECT sentence, len(tokens) AS n FROM {corpus}")
    assert everything == {(row["sentence"], position) for row in rows for position in range(row["n"])}
    assert len(small) == 10 and small < large


@pytest.mark.parametrize("scanned", ["gpt2", "llama"], indirect=True)
def test_given_prefixes_may_be_bos_alone(valued: Any) -> None:
    folder, model = valued
    index = memlens.open_index(folder)
    bos = index.manifest.model.bos
    if bos is None:
        with pytest.raises(SettingError, match="position -1 of sentence 0 does not exist"):
            Prefixes.given([[5, 6]], [-1], bos)
        return
    seen = read_given_prefixes(index, model, Prefixes.given([[5, 6], [7, 8, 9]], [-1, 2], bos))
    for row, prefix in enumerate(([], [7, 8, 9])):
        states = naive_states(index, model, prefix)
        assert seen.prefixes.column("final_token")[row].as_py() == top(model, states[-1][3])
    assert seen.prefixes.column("target").to_pylist() == [5, None]


@one_family
def test_prefixes_of_a_validation_corpus_come_from_its_text(fresh: Fresh, tmp_path: Any) -> None:
    index, model = fresh
    (tmp_path / "other.txt").write_text("The sea of the press.\nThe hills.\n", encoding="utf-8")
    corpus = CorpusSettings((str(tmp_path / "other.txt"),), unit="line")
    prefixes = sample_validation(index, model, corpus, 5)
    assert len(prefixes) == 5 and "other.txt" in prefixes.origin
    texts = ("The sea of the press.", "The hills.")
    assert all(any(text.startswith(prefix or "") for text in texts) for prefix in prefixes.texts)
    run(index, "cases", model, sample=5, validation=corpus)
    assert memlens.open_index(index.folder).manifest.content["aggregate"]["origin"] == prefixes.origin


@one_family
def test_stop_words_are_whole_words_of_the_text(valued: Any) -> None:
    folder, _model = valued
    index = memlens.open_index(folder)
    prefixes = sample_prefixes(index, 10**6)
    stops = stop_targets(index, prefixes)
    sentence = prefixes.sentences[0]
    assert sentence.text == "The river runs to the sea."
    words = [word_at(sentence, position) for position in range(len(sentence.tokens))]
    assert list(dict.fromkeys(words)) == ["The", "river", "runs", "to", "the", "sea", None]
    own = [stop for stop, row in zip(stops, prefixes.rows, strict=True) if row == 0]
    assert own == [word in ("The", "to", "the") for word in words[1:]] + [None]
    frequent = stop_targets(index, prefixes, "frequent")
    assert [stop is None for stop in frequent] == [stop is None for stop in stops] and any(frequent)


@one_family
def test_shares_of_stop_words_and_short_prefixes_are_of_the_prefixes_with_agreement(fresh: Fresh) -> None:
    index, model = fresh
    table = run(index, "composition", model, sample=SAMPLE)["composition"].to_pylist()
    prefixes = sample_prefixes(index, SAMPLE)
    stops = stop_targets(index, prefixes)
    seen = read_given_prefixes(index, model, prefixes, stops)
    for layer, columns in seen.by_layer():
        some = [i for i in range(SAMPLE) if columns["promoted"][i]]
        known = [stops[i] for i in some if stops[i] is not None]
        row = table[layer]
        assert row["stop_words"] == (pytest.approx(sum(known) / len(known)) if known else None)
        short = [prefixes.positions[i] + 1 < 5 for i in some]
        assert row["short"] == (pytest.approx(sum(short) / len(short)) if short else None)
        assert row["without_target"] == sum(stop is None for stop in stops)


@one_family
def test_wrong_input_is_refused_with_what_to_do(fresh: Fresh, tmp_path: Any) -> None:
    index, model = fresh
    nowhere = CorpusSettings((str(tmp_path / "nowhere.txt"),))
    for error, words, wrong in (
        (SettingError, "no list of stop words for 'xx'; use en or frequent", {"stop_words": "xx"}),
        (CorpusError, "nowhere", {"validation": nowhere}),
    ):
        with pytest.raises(error, match=words):
            run(index, "composition", model, **wrong)
    (index.folder / "values.parquet").unlink()
    with pytest.raises(IndexFolderError, match="memlens repair"):
        run(index, "cases", model)


def test_an_index_without_the_last_layer_has_no_last_layer_experiment(
    tiny_gpt2: Path, tiny_text: Path, tmp_path: Path
) -> None:
    memlens.scan(tiny_gpt2, tiny_text, out=tmp_path / "index", layers="0-1")
    index, model = memlens.values(tmp_path / "index"), memlens.load(tiny_gpt2)
    naive = naive_rows(index, model, sample_prefixes(index, 9))
    for row in run(index, "refinement", model, sample=9)["refinement"].to_pylist():
        assert row["match"] == sum(own["r"] == own["final"] for own in naive if own["layer"] == row["layer"])
    with pytest.raises(IndexFolderError, match="last layer, 2, was not scanned"):
        run(index, "last-layer", model, sample=9)


@pytest.mark.parametrize("scanned", ["gpt2", "gemma2"], indirect=True)
def test_values_and_what_a_block_adds_are_read_as_the_values_table_says(fresh: Fresh) -> None:
    index, model = fresh
    tables = run(index, ["composition", "cases"], model, sample=SAMPLE)
    compute_values(index, model, reading="raw")
    raw = {name: table.to_pylist() for name, table in run(index, [*tables], model, sample=SAMPLE).items()}
    rows = naive_rows(index, model, sample_prefixes(index, SAMPLE), "raw")
    for layer in index.layers:
        own = [row for row in rows if row["layer"] == layer]
        assert raw["composition"][layer]["zero"] == sum(row["zero"] for row in own)
        assert raw["cases"][layer]["composition"] == sum(len({row["o"], row["r"], row["y"]}) == 3 for row in own)
    assert raw["cases"] != tables["cases"].to_pylist()


@one_family
def test_what_a_block_adds_is_read_over_the_tokens_that_values_are_read_over(
    fresh: Fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, model = fresh
    monkeypatch.setattr(token_table, "undertrained", lambda embedding, counts: np.arange(len(counts)) % 3 == 1)
    compute_values(index, model, vocabulary="trained")
    values = index.table("values").to_pylist()
    prefixes = sample_prefixes(index, SAMPLE)
    seen = dict(read_given_prefixes(index, model, prefixes).by_layer())
    trained = torch.arange(model.vocabulary) % 3 != 1
    for number, (sentence, position) in enumerate(zip(*places(prefixes), strict=True)):
        for layer, (_, _, y, _) in enumerate(naive_states(index, model, sentence[: position + 1])):
            scores = model.lens.addition_scores(y[None], layer)[0]
            promoted = {row["argmax"] for row in values if row["layer"] == layer}
            expected = int(scores.masked_fill(~trained, -torch.inf).argmax())
            assert seen[layer]["ffn_token"][number] == expected
            assert seen[layer]["promoted"][number] == (expected in promoted)


def test_where_all_prefixes_agree_alike_there_is_no_excess_and_no_doubt_about_it() -> None:
    holds = np.arange(50) % 3 == 0
    row = composition._excess("short", holds, np.ones(50), seed=0)
    assert row["short_pooled"] == holds.mean() and row["short_excess"] == pytest.approx(0, abs=1e-12)
    assert (row["short_excess_low"], row["short_excess_high"]) in [(None, None), pytest.approx((0, 0), abs=1e-12)]
