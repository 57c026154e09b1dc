"""A Ray cluster of two nodes gives the bytes of one process, also when a node is lost or the driver fails."""

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scale_helpers import OPTIONS, TEXTS, interrupting_after, tables_of

import memlens
from memlens.errors import SettingError, WorkerError
from memlens.index.build import build_index
from memlens.parallel import SerialMapper
from memlens.scanner import executors
from memlens.scanner.executors import ModelRecipe
from memlens.scanner.ray import RayExecutor, RayWorker, _versions, merge_states
from memlens.scanner.scanner import PackedSentences, ScanSentence
from memlens.scanner.state import BatchRange, ScanState, shapes_of
from memlens.settings import CorpusSettings, ScanSettings
from memlens.testing import tiny_model, tiny_tokenizer

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of one processor each, as processes of this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    made.second = made.add_node(**NODE)
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def memory_model() -> Any:
    return memlens.load(tiny_model("llama"), tokenizer=tiny_tokenizer(), prove=False)


def test_two_nodes_give_the_bytes_of_one_process(
    cluster: Any, small_checkpoint: Path, alone: Path, tmp_path: Path
) -> None:
    memlens.scan(small_checkpoint, TEXTS, out=tmp_path, executor="ray", workers=2, **OPTIONS)
    assert tables_of(tmp_path) == tables_of(alone)


def test_a_stopped_ray_scan_is_continued_by_one_process(
    cluster: Any, small_checkpoint: Path, alone: Path, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        memlens.scan(small_checkpoint, TEXTS, out=tmp_path, executor="ray", progress=interrupting_after(4), **OPTIONS)
    assert len(list((tmp_path / "partial" / "parts").glob("*.npz"))) == 1, "the driver keeps one part"
    steps: list[int] = []
    memlens.scan(small_checkpoint, TEXTS, out=tmp_path, progress=lambda s, done, total: steps.append(done), **OPTIONS)
    assert steps[0] > 0
    assert tables_of(tmp_path) == tables_of(alone)


def test_a_driver_that_fails_has_kept_what_was_handed_over(
    cluster: Any, small_checkpoint: Path, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "_SAVE_RATIO", 0)
    parts = tmp_path / "partial" / "parts"

    def fail(stage: str, done: int, total: int | None) -> None:
        if stage == "scan" and done > 1000 and any(parts.glob("*.npz")):
            raise ZeroDivisionError

    settings, executor = ScanSettings(**OPTIONS), RayExecutor(1, None, 0)
    with pytest.raises(ZeroDivisionError):
        build_index(
            memlens.load(small_checkpoint),
            CorpusSettings(TEXTS),
            settings,
            tmp_path,
            progress=fail,
            save_seconds=0,
            executor=executor,
        )
    steps: list[int] = []
    memlens.scan(small_checkpoint, TEXTS, out=tmp_path, progress=lambda s, done, total: steps.append(done), **OPTIONS)
    assert steps[0] > 0
    assert tables_of(tmp_path) == tables_of(alone)


def test_values_and_the_pass_over_prefixes_are_the_same_on_ray(cluster: Any, alone: Path, tmp_path: Path) -> None:
    here, there = (Path(shutil.copytree(alone, tmp_path / name)) for name in ("here", "there"))
    for folder, options in ((here, {}), (there, {"executor": "ray"})):
        memlens.values(folder, top=4, threads=1, **options)
        memlens.experiment(folder, ["active", "refinement"], sample=300, threads=1, **options)
    tables = ["values", "keys", "experiments/prefixes", "experiments/prefix-layers", "experiments/active"]
    for table in tables:
        assert (here / f"{table}.parquet").read_bytes() == (there / f"{table}.parquet").read_bytes(), table


def test_a_chunk_of_prefixes_by_itself_is_what_it_is_among_others(
    memory_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memlens.experiments import prefix_pass as aggregate
    from memlens.experiments import prefix_pass as prefix_passes
    from memlens.experiments.prefixes import Prefixes

    draw = np.random.default_rng(3)
    sentences = [draw.integers(0, 97, draw.integers(2, 20)) for _ in range(60)]
    prefixes = Prefixes.given(sentences, [int(draw.integers(0, len(s))) for s in sentences], None)
    promoted = {layer: draw.integers(0, 97, 40).astype(np.int32) for layer in (0, 1, 2)}
    monkeypatch.setattr(aggregate, "chunk_rows", lambda model, rows: 7)
    monkeypatch.setattr(prefix_passes, "_BATCH_TOKENS", 100)
    whole, layers = aggregate.run_pass(memory_model, prefixes, promoted)
    again, layers_again = aggregate.run_pass(memory_model, prefixes, promoted, where=SerialMapper(memory_model))
    for one, other in ((whole, again), *((layers[layer], layers_again[layer]) for layer in layers)):
        assert one.keys() == other.keys()
        for name, column in one.items():
            assert np.asarray(column, object).tolist() == np.asarray(other[name], object).tolist(), name


def test_a_node_removed_mid_run_costs_no_result(
    cluster: Any, small_checkpoint: Path, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "_SAVE_RATIO", 0)  # so that some is in flight when the node goes
    removed: list[int] = []

    def remove_node(stage: str, done: int, total: int | None) -> None:
        if stage == "scan" and done > 1500 and not removed:
            removed.append(done)
            cluster.remove_node(cluster.second, allow_graceful=False)

    build_index(
        memlens.load(small_checkpoint),
        CorpusSettings(TEXTS),
        ScanSettings(**OPTIONS),
        tmp_path / "index",
        progress=remove_node,
        save_seconds=0,
        executor=RayExecutor(2, None, 0),
    )
    assert removed
    assert tables_of(tmp_path / "index") == tables_of(alone)


def test_a_node_without_the_model_says_so_and_works_with_a_copy(memory_model: Any) -> None:
    settings = ScanSettings(top=3)
    recipe = ModelRecipe("/nowhere/model", fingerprint=memory_model.fingerprint())
    worker = RayWorker(settings, (0, 2), _versions())
    assert worker.start(recipe) is False
    assert worker.start(recipe.as_copy(memory_model)) is True
    window = [ScanSentence(i, np.arange(3 + i) % 97, 0) for i in range(5)]
    assert worker.scan(BatchRange(0, 0, 1), PackedSentences.pack(window)) == 3 + 4 + 5 + 6 + 7
    assert worker.hand_over()["counts"].tolist() == [25, 25]
    assert worker.hand_over()["counts"].tolist() == [0, 0], "what was handed over is not handed over again"


def test_a_node_with_other_versions_is_refused() -> None:
    with pytest.raises(WorkerError, match=r"memlens 0\.0\.1 with torch 1\.0; results would differ"):
        RayWorker(ScanSettings(), (0,), ("0.0.1", "1.0")).start(ModelRecipe("x"))


def test_a_window_travels_unchanged() -> None:
    window = [ScanSentence(i * 7, np.arange(i + 1) * 3, i % 2) for i in range(4)]
    for before, after in zip(window, PackedSentences.pack(window).unpack(), strict=True):
        assert (before.id, before.fresh_from) == (after.id, after.fresh_from)
        assert before.tokens.tolist() == after.tokens.tolist()


def test_merging_on_a_node_is_merging_here(memory_model: Any) -> None:
    settings = ScanSettings(top=2)
    shapes = shapes_of(memory_model, (1,), settings)
    states = [ScanState.empty(shapes, settings) for _ in range(2)]
    for number, state in enumerate(states):
        state.done.add(number, 0, 1)
        state.tokens = 10 + number
        state.layers[1].positive += number + 1
    merged = merge_states(settings, shapes, states[0].arrays(), states[1].arrays())
    assert merged["counts"].tolist() == [0, 21]
    assert set(merged["1.positive"].tolist()) == {3}
    assert merged["done"].tolist() == [[0, 0, 1], [1, 0, 1]]


def test_without_ray_there_is_one_line_that_says_what_to_install(
    small_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SettingError, match=r"pip install \"memlens\[ray\]\""):
        memlens.scan(small_checkpoint, TEXTS[0], out=tmp_path / "index", executor="ray", **OPTIONS)


def test_a_changed_model_is_not_taken_for_the_old_one(small_checkpoint: Path) -> None:
    from memlens.errors import ModelError

    recipe = ModelRecipe.of(memlens.load(small_checkpoint, prove=False), "another fingerprint")
    with pytest.raises(ModelError, match="has changed since the scan began"):
        replace(recipe).load()
