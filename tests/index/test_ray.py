"""A Ray cluster of two nodes gives the bytes of one process, even if a node is lost or the driver fails."""

import os
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
from memlens.errors import ModelError, SettingError
from memlens.experiments import prefix_pass
from memlens.experiments.prefixes import Prefixes
from memlens.index import build
from memlens.models.recipe import ModelRecipe
from memlens.pool import RayPool, ensure_ray_token
from memlens.scanner import scan
from memlens.settings import CorpusSettings, RunSettings, ScanSettings
from memlens.testing import tiny_model, tiny_tokenizer

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of one processor each, as processes of this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray.cluster_utils import Cluster

    ensure_ray_token()
    made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    made.second = made.add_node(**NODE)
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def memory_model() -> Any:
    return memlens.load(tiny_model("llama"), tokenizer=tiny_tokenizer(), prove=False)


@pytest.mark.sweep
def test_two_nodes_give_the_bytes_of_one_process(cluster: Any, scans: Scans, tmp_path: Path) -> None:
    scans.end(tmp_path, executor="ray", workers=2)


@pytest.mark.sweep
def test_a_stopped_ray_scan_is_continued_by_one_process(cluster: Any, scans: Scans, tmp_path: Path) -> None:
    scans.stop(tmp_path, 4, executor="ray", workers=None)
    assert len(list((tmp_path / "partial" / "parts").glob("*.npz"))) == 1, "the driver keeps one part"
    scans.go_on(tmp_path)


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save after every segment of two batches."""
    monkeypatch.setattr(build, "segment_size", lambda *plan: 2)
    monkeypatch.setattr(scan, "SAVE_RATIO", 0)


def run_on_ray(scans: Scans, out: Path, workers: int, progress: Any) -> None:
    options = {"progress": progress, "save_seconds": 0, "workers": workers, "run": RunSettings(executor="ray")}
    build.build_index(scans.model, CorpusSettings(TEXTS), ScanSettings(**OPTIONS), out, **options)


@pytest.mark.sweep
@pytest.mark.usefixtures("short_segments")
def test_a_driver_that_fails_has_saved_what_was_finished(cluster, scans, tmp_path) -> None:
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
def test_workers_are_prepared_and_the_item_of_a_lost_one_is_retried(cluster, memory_model, tmp_path) -> None:
    lost = tmp_path / "lost"

    def look(model: Any, item: int) -> tuple[int, int]:
        import gc

        if item == 2 and not lost.exists():
            lost.touch()
            os._exit(1)
        return item * len(model.layers), gc.get_threshold()[0]

    pool = RayPool(ModelRecipe(memory_model, 1), workers=1, threads=1)
    assert list(pool.map(look, [1, 2, 3])) == [(item * len(memory_model.layers), 50_000) for item in (1, 2, 3)]
    assert lost.exists()


def test_a_ray_worker_does_not_import_torch_before_it_is_prepared() -> None:
    code = "import sys; from memlens.pool import RayWorker, versions; versions(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_a_chunk_of_prefixes_by_itself_is_what_it_is_among_others(memory_model, monkeypatch) -> None:
    draw = np.random.default_rng(3)
    sentences = [draw.integers(0, 97, draw.integers(2, 20)) for _ in range(60)]
    prefixes = Prefixes.given(sentences, [int(draw.integers(0, len(s))) for s in sentences], None)
    promoted = {layer: draw.integers(0, 97, 40).astype(np.int32) for layer in (0, 1, 2)}
    monkeypatch.setattr(prefix_pass, "chunk_rows", lambda model: 7)
    monkeypatch.setattr(prefix_pass, "_BATCH_TOKENS", 100)

    class InChunks:
        def map(self, function: Any, items: Any) -> Any:
            return (function(memory_model, item) for item in items)

    whole, layers = prefix_pass.run_pass(memory_model, prefixes, promoted)
    again, layers_again = prefix_pass.run_pass(memory_model, prefixes, promoted, pool=InChunks())
    for one, other in ((whole, again), *((layers[layer], layers_again[layer]) for layer in layers)):
        assert one.keys() == other.keys()
        for name, column in one.items():
            assert np.asarray(column, object).tolist() == np.asarray(other[name], object).tolist(), name


@pytest.mark.sweep
@pytest.mark.usefixtures("short_segments")
def test_a_node_removed_during_a_scan_costs_no_result(cluster, scans, tmp_path) -> None:
    removed: list[int] = []

    def remove_node(stage: str, done: int, total: int | None) -> None:
        if stage == "scan" and done > 1500 and not removed:
            removed.append(done)
            cluster.remove_node(cluster.second, allow_graceful=False)

    run_on_ray(scans, tmp_path, 2, remove_node)
    assert removed and tables_of(tmp_path) == tables_of(scans.alone)


def test_without_ray_there_is_one_line_that_says_what_to_install(scans, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SettingError, match=r"pip install \"memlens\[ray\]\""):
        scans.run(tmp_path / "index", executor="ray")


def test_a_changed_model_is_not_mistaken_for_the_old_one(scans: Scans) -> None:
    with pytest.raises(ModelError, match="has changed since the scan began"):
        ModelRecipe(scans.model, 1, fingerprint="another").loader()(0)


@pytest.mark.parametrize(("gpus", "device"), [(1.0, "cuda"), (0.0, "cpu")])
def test_a_copy_of_the_model_is_for_the_device_of_the_cluster(memory_model: Any, gpus: float, device: str) -> None:
    loader = ModelRecipe(memory_model, 1).loader(copy=True, gpus=gpus)
    assert loader.device == device and loader.copy and not loader.source


@pytest.mark.parametrize(("home", "is_made"), [("{}", False), ("/proc/nowhere", True)])
def test_a_token_is_set_if_the_home_folder_cannot_be_written_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: str, is_made: bool
) -> None:
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # so that it comes back as it was
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", home.format(tmp_path))
    ensure_ray_token()
    assert ("RAY_AUTH_TOKEN" in os.environ) == is_made
