"""One process, two workers, Ray, and three shards in every order give the same bytes, including signs of zeros.

Some memories of each model never fire, and give zeros of either sign or of both.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from scale_helpers import TABLES, TEXTS, tables_of

import memlens
from memlens.models.hooks import watch_coefficients
from memlens.models.huggingface import quiet_transformers
from memlens.pool import ensure_ray_token
from memlens.testing import tiny_model, tiny_tokenizer

OPTIONS: dict[str, Any] = {"top": 5, "batch_tokens": 256, "threads": 1, "max_tokens": 3000, "bottom": "yes"}
SHARDS = 3


def plain() -> Any:
    """Set two memories without a key: the coefficient of one is always -0.0, that of the other 0.0."""
    network = tiny_model("gpt2", activation_function="gelu_new")
    for block in network.transformer.h:
        block.mlp.c_fc.weight[:, :2] = 0
        block.mlp.c_fc.bias[0], block.mlp.c_fc.bias[1] = -100.0, 0.0  # gelu(-100) is -0.0, gelu(0) is 0.0
    return network


def gated() -> Any:
    """Set a gate that is always closed, with an up projection of either sign."""
    network = tiny_model("llama", hidden_act="relu", mlp_bias=True)
    for layer in network.model.layers:
        layer.mlp.gate_proj.weight[:2] = 0
        layer.mlp.gate_proj.bias[:2] = -1.0
    return network


def mixture() -> Any:
    """Set two gates that are always closed in routed experts, in shared experts and in a dense layer."""
    network = tiny_model("qwen2_moe", hidden_act="relu")
    for layer in network.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts.gate_up_proj[:, :2] = 0
        getattr(layer.mlp, "shared_expert", layer.mlp).gate_proj.weight[:2] = 0
    return network


MODELS: dict[str, Callable[[], Any]] = {"plain": plain, "gated": gated, "mixture": mixture}
BY_DEFAULT = "mixture"  # has gated, shared and routed memories


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name == BY_DEFAULT else pytest.mark.sweep) for name in MODELS],
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    with quiet_transformers(), torch.no_grad():
        MODELS[request.param]().save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def alone(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an index from a scan in one process. Tests must not change it."""
    return memlens.scan(checkpoint, TEXTS, out=tmp_path_factory.mktemp("alone"), workers=1, **OPTIONS).folder


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """Start a Ray cluster on this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    ensure_ray_token()
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def test_the_models_have_dead_memories_with_zeros_of_both_signs(checkpoint: Path, alone: Path) -> None:
    model = memlens.load(checkpoint, prove=False)
    tokens = torch.tensor([model.tokenizer.encode([Path(TEXTS[0]).read_text()[:300]])[0].ids[:30]])
    seen: set[bool] = set()
    with ExitStack() as hooks:
        zeros: list[torch.Tensor] = []
        for block in model.layers:
            hooks.enter_context(watch_coefficients(block, lambda m: zeros.append(m.coefficients[..., :2].clone())))
        model.run_body(tokens)
    for found in zeros:
        assert not found.any()
        seen |= set(found.signbit().ravel().tolist())
    assert seen == {True, False}
    rows = pq.read_table(alone / "memories.parquet").to_pylist()
    dead = [row for row in rows if row["memory"] < 2]
    assert dead and all(row["dead"] and row["max"] == row["min"] == 0 for row in dead)
    assert not any(np.signbit([row[name] for row in dead for name in ("max", "min", "mean")]))


@pytest.mark.sweep
def test_two_workers(checkpoint: Path, alone: Path, tmp_path: Path) -> None:
    memlens.scan(checkpoint, TEXTS, out=tmp_path, workers=2, **OPTIONS)
    assert tables_of(tmp_path) == tables_of(alone)


@pytest.mark.usefixtures("ray_cluster")
def test_ray(checkpoint: Path, alone: Path, tmp_path: Path) -> None:
    memlens.scan(checkpoint, TEXTS, out=tmp_path, executor="ray", workers=1, **OPTIONS)
    assert tables_of(tmp_path) == tables_of(alone)


def test_three_shards_in_every_order(checkpoint: Path, alone: Path, tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(1, SHARDS + 1)]
    for number, folder in enumerate(folders, start=1):
        memlens.scan(checkpoint, TEXTS, out=folder, shard=f"{number}/{SHARDS}", **OPTIONS)
    expected = tables_of(alone)
    assert {*TABLES, "counts"} <= set(expected)
    assert ({"experts", "routing"} <= set(expected)) == (memlens.open_index(alone).manifest.model.family == "qwen2_moe")
    for order in permutations(folders):
        out = tmp_path / "-".join(folder.name for folder in order)
        memlens.merge(order, out=out)
        assert tables_of(out) == expected, order
