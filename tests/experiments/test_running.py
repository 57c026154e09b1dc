"""Running experiments by name: the same bytes again, samples and seeds, charts, refusals."""

import json

import pyarrow.parquet as pq
import pytest

import memlens
from memlens.errors import ModelError, SettingError
from memlens.experiments.run import EXPERIMENTS, find_experiments, is_made, run
from memlens.testing import tiny_model, tiny_tokenizer

SECTION4 = ("agreement", "rank", "predictive-values", "local-edits")


@pytest.fixture
def plain(tiny_gpt2, tiny_gpt2_values, copy_of):
    """An index of one family, for what depends on none; the report's tests draw all charts of a gated one."""
    return copy_of(tiny_gpt2_values), memlens.load(tiny_gpt2)


def files(index):
    return {path.name: path.read_bytes() for path in sorted((index.folder / "experiments").iterdir())}


def test_running_again_with_the_same_seed_gives_the_same_bytes_in_any_order(fresh):
    index, model = fresh
    run(index, SECTION4, model, seed=3, sample=9)
    first = files(index)
    for name in reversed(SECTION4):
        run(index, name, model, seed=3, sample=9)
    assert files(index) == first
    run(index, SECTION4, model, seed=4, sample=9)
    assert files(index)["local-edits.parquet"] != first["local-edits.parquet"]
    manifest = json.loads((index.folder / "manifest.json").read_text())
    for name in SECTION4:
        assert manifest["files"][f"experiments/{name}.parquet"]["bytes"] == len(files(index)[f"{name}.parquet"])
        assert manifest["experiments"][name]["seed"] == 4


def test_with_all_the_sample_counts_prefixes_and_by_name_what_the_experiment_counts(plain):
    index, model = plain
    run(index, ["all", "rank"], model, sample=7)
    noted = index.manifest.content["experiments"]
    on_prefixes = {name for name, one in EXPERIMENTS.items() if one.on_prefixes}
    assert {name for name, note in noted.items() if note["sample"] == 7} == {"rank"} | on_prefixes
    assert [noted[name]["sample"] for name in ("agreement", "predictive-values", "local-edits")] == [None, 100, 100]
    in_order_once = [one.name for one in find_experiments(["rank", "agreement", "rank"])]
    assert in_order_once == ["agreement", "rank"]
    assert [one.name for one in find_experiments(["all"])] == list(EXPERIMENTS)


def test_each_table_says_what_it_was_made_with_and_where_its_prefixes_came_from(plain):
    index, model = plain
    run(index, ["active", "rank"], model, sample=7, seed=1)
    run(index, "cases", model, sample=5, seed=2)
    note = json.loads(pq.read_schema(index.path("experiments/rank")).metadata[b"memlens"])
    values = index.manifest.content["files"]["values.parquet"]["sha256"]
    assert note == {"seed": 1, "sample": 7, "from": {"values": values}}
    assert set(index.table("experiments/rank")["memories"].to_pylist()) == {7}
    noted = index.manifest.content["experiments"]
    assert noted["active"]["origin"] == "7 random prefixes of the scanned corpus, seed 1"
    assert noted["cases"]["origin"] == "5 random prefixes of the scanned corpus, seed 2"
    assert "origin" not in noted["rank"]
    assert is_made(index, EXPERIMENTS["active"], sample=7, seed=1)
    assert not is_made(index, EXPERIMENTS["active"], sample=5, seed=2)


def test_every_chart_of_a_notebook_is_drawn_from_the_tables(plain):
    index, model = plain
    run(index, "all", model, sample=30, skipped=lambda name, reason: None)
    for experiment in EXPERIMENTS.values():
        if experiment.obstacle(index) is None:
            charts = experiment.charts(index)
            assert charts or not index.table(f"experiments/{experiment.name}").num_rows  # no memory can be silenced
            assert all("var(--" not in chart.to_json() for chart in charts)


def test_another_model_and_wrong_settings_are_refused(fresh):
    index, model = fresh
    other = memlens.load(tiny_model(model.family, seed=1), tokenizer=tiny_tokenizer())
    with pytest.raises(ModelError, match="fingerprint differs"):
        run(index, "local-edits", other)
    with pytest.raises(ModelError, match="--model"):
        run(index, "local-edits")  # it was in memory, so the index cannot know where it is
    with pytest.raises(SettingError, match="takes the option 'validation'"):
        run(index, "rank", validation="text.txt")
    for words, wrong in (("--sample is 0", {"sample": 0}), ("--seed is -1", {"seed": -1})):
        with pytest.raises(SettingError, match=words):
            memlens.experiment(index, "rank", **wrong)


def test_a_layer_in_which_nothing_fires_has_empty_numbers(tiny_gpt2, tmp_path):
    (tmp_path / "text.txt").write_text("A\n")
    memlens.scan(tiny_gpt2, tmp_path / "text.txt", out=tmp_path / "index")
    made = run(memlens.values(tmp_path / "index"), SECTION4, memlens.load(tiny_gpt2))
    assert set(made["agreement"]["rate"].to_pylist()) == set(made["rank"]["median"].to_pylist()) == {None}
    assert made["predictive-values"].num_rows == made["predictive-values-bins"].num_rows == 0
    assert set(made["local-edits"]["change"].to_pylist()) == {None}
    assert min(made["local-edits"]["left_out"].to_pylist()) > 0
