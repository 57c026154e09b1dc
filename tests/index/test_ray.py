"""A Ray cluster of two nodes gives the bytes of one process, also when a node is lost or the driver fails."""

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scale_helpers import OPTIONS, TEXTS, Scans, tables_of

import memlens
from memlens.errors import ModelError, SettingError, WorkerError
from memlens.experiments import prefix_pass
from memlens.experiments.prefixes import Prefixes
from memlens.index.build import build_index
from memlens.parallel import SerialMapper
from memlens.scanner import executors, ray_worker
from memlens.scanner.executors import ModelRecipe
from memlens.scanner.ray import RayExecutor
from memlens.scanner.ray_cluster import ensure_secret
from memlens.scanner.ray_map import RayMapper
from memlens.scanner.ray_worker import MapWorker, ScanWorker, merge_states, versions
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

    ensure_secret()
    made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    made.second = made.add_node(**NODE)
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def memory_model() -> Any:
    return memlens.load(tiny_model("llama"), tokenizer=tiny_tokenizer(), prove=False)


def test_two_nodes_give_the_bytes_of_one_process(cluster: Any, scans: Scans, tmp_path: Path) -> None:
    scans.end(tmp_path, executor="ray", workers=2)


@pytest.mark.sweep
def test_a_stopped_ray_scan_is_continued_by_one_process(cluster: Any, scans: Scans, tmp_path: Path) -> None:
    scans.stop(tmp_path, 4, executor="ray", workers=None)
    assert len(list((tmp_path / "partial" / "parts").glob("*.npz"))) == 1, "the driver keeps one part"
    scans.go_on(tmp_path)


def run_on_ray(scans: Scans, out: Path, workers: int, progress: Any) -> None:
    """Handing over whatever there is all the time."""
    settings, executor = ScanSettings(**OPTIONS), RayExecutor(workers, None, 0)
    options = {"progress": progress, "save_seconds": 0, "executor": executor}
    build_index(scans.model, CorpusSettings(TEXTS), settings, out, **options)


@pytest.mark.sweep
def test_a_driver_that_fails_has_kept_what_was_handed_over(cluster, scans, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(executors, "_SAVE_RATIO", 0)

    def fail(stage: str, done: int, total: int | None) -> None:
        if stage == "scan" and done > 1000 and any((tmp_path / "partial" / "parts").glob("*.npz")):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_on_ray(scans, tmp_path, 1, fail)
    scans.go_on(tmp_path)


@pytest.mark.sweep
def test_values_edits_and_the_pass_over_prefixes_are_the_same_on_ray(cluster: Any, alone: Path, tmp_path: Path) -> None:
    here, there = (Path(shutil.copytree(alone, tmp_path / name)) for name in ("here", "there"))
    for folder, options in ((here, {}), (there, {"executor": "ray"})):
        memlens.values(folder, top=4, threads=1, **options)
        memlens.experiment(folder, ["active", "local-edits"], sample=300, threads=1, **options)
    tables = ["values", "keys", "experiments/prefixes", "experiments/prefix-layers", "experiments/active"]
    tables += ["experiments/local-edits"]
    for table in tables:
        assert (here / f"{table}.parquet").read_bytes() == (there / f"{table}.parquet").read_bytes(), table


@pytest.mark.sweep
def test_workers_of_a_map_are_prepared_and_one_that_dies_costs_no_answer(
    cluster: Any, memory_model: Any, tmp_path: Path
) -> None:
    died = tmp_path / "died"

    def look(model: Any, item: int) -> tuple[int, int]:
        import gc

        if item == 2 and not died.exists():
            died.touch()
            os._exit(1)
        return item * len(model.layers), gc.get_threshold()[0]

    mapper = RayMapper(memory_model, threads=1, workers=1, address=None, gpus_per_worker=0)
    assert list(mapper.map(look, [1, 2, 3])) == [(item * len(memory_model.layers), 50_000) for item in (1, 2, 3)]
    assert died.exists()


def test_a_process_of_ray_has_no_torch_before_it_is_prepared() -> None:
    """The class and the first call's arguments are unpickled before."""
    arguments = pickle.dumps((ScanWorker, MapWorker, ScanSettings(), (0,), versions()))
    code = f"import pickle, sys; pickle.loads({arguments!r}); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_a_chunk_of_prefixes_by_itself_is_what_it_is_among_others(memory_model, monkeypatch) -> None:
    draw = np.random.default_rng(3)
    sentences = [draw.integers(0, 97, draw.integers(2, 20)) for _ in range(60)]
    prefixes = Prefixes.given(sentences, [int(draw.integers(0, len(s))) for s in sentences], None)
    promoted = {layer: draw.integers(0, 97, 40).astype(np.int32) for layer in (0, 1, 2)}
    monkeypatch.setattr(prefix_pass, "chunk_rows", lambda model, rows: 7)
    monkeypatch.setattr(prefix_pass, "_BATCH_TOKENS", 100)
    whole, layers = prefix_pass.run_pass(memory_model, prefixes, promoted)
    again, layers_again = prefix_pass.run_pass(memory_model, prefixes, promoted, where=SerialMapper(memory_model))
    for one, other in ((whole, again), *((layers[layer], layers_again[layer]) for layer in layers)):
        assert one.keys() == other.keys()
        for name, column in one.items():
            assert np.asarray(column, object).tolist() == np.asarray(other[name], object).tolist(), name


@pytest.mark.sweep
def test_a_node_removed_mid_run_costs_no_result(cluster, scans, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(executors, "_SAVE_RATIO", 0)  # so that some is in flight when the node goes
    removed: list[int] = []

    def remove_node(stage: str, done: int, total: int | None) -> None:
        if stage == "scan" and done > 1500 and not removed:
            removed.append(done)
            cluster.remove_node(cluster.second, allow_graceful=False)

    run_on_ray(scans, tmp_path, 2, remove_node)
    assert removed and tables_of(tmp_path) == tables_of(scans.alone)


@pytest.fixture
def unprepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker in this process, which is the tests'."""
    monkeypatch.setattr(ray_worker, "prepare_process", lambda: None)


@pytest.mark.usefixtures("unprepared")
def test_a_node_without_the_model_says_so_and_works_with_a_copy(memory_model: Any) -> None:
    settings = ScanSettings(top=3)
    recipe = ModelRecipe("/nowhere/model", fingerprint=memory_model.fingerprint())
    worker = ScanWorker(settings, (0, 2), versions())
    assert worker.start(recipe) is False
    assert worker.start(recipe.as_copy(memory_model)) is True
    window = [ScanSentence(i, np.arange(3 + i) % 97, 0) for i in range(5)]
    assert worker.scan(BatchRange(0, 0, 1), PackedSentences.pack(window)) == 3 + 4 + 5 + 6 + 7
    assert worker.hand_over()["counts"].tolist() == [25, 25]
    assert worker.hand_over()["counts"].tolist() == [0, 0], "what was handed over is not handed over again"


@pytest.mark.usefixtures("unprepared")
def test_a_node_with_other_versions_is_refused() -> None:
    with pytest.raises(
        WorkerError, match=r"memlens 0\.0\.1 with torch 1\.0 and transformers 2\.0; results would differ"
    ):
        ScanWorker(ScanSettings(), (0,), ("0.0.1", "1.0", "2.0")).start(ModelRecipe("x"))
    with pytest.raises(
        WorkerError, match=r"memlens 0\.0\.1 with torch 1\.0 and transformers 2\.0; results would differ"
    ):
        MapWorker(1, ("0.0.1", "1.0", "2.0")).start(ModelRecipe("x"), lambda model, item: item)


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
        state.layers[1].positions.fired += number + 1
    merged = merge_states(settings, shapes, states[0].arrays(), states[1].arrays())
    assert merged["counts"].tolist() == [0, 21]
    assert set(merged["1.positions.fired"].ravel().tolist()) == {3}
    assert merged["done"].tolist() == [[0, 0, 1], [1, 0, 1]]


def test_without_ray_there_is_one_line_that_says_what_to_install(scans, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SettingError, match=r"pip install \"memlens\[ray\]\""):
        scans.run(tmp_path / "index", executor="ray")


def test_a_changed_model_is_not_taken_for_the_old_one(scans: Scans) -> None:
    with pytest.raises(ModelError, match="has changed since the scan began"):
        ModelRecipe.of(scans.model, "another fingerprint").load()


@pytest.mark.parametrize(("home", "is_made"), [("{}", False), ("/proc/nowhere", True)])
def test_a_cluster_has_its_secret_where_nobody_can_write_to_the_home_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: str, is_made: bool
) -> None:
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # so that it comes back as it was
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", home.format(tmp_path))
    ensure_secret()
    assert ("RAY_AUTH_TOKEN" in os.environ) == is_made
