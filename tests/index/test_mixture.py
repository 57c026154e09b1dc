"""The index of a mixture of experts equals a naive count, and has the same bytes however the scan is divided."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scale_helpers import OPTIONS, TEXTS, Scans, start, tables_of

import memlens
from memlens.errors import UnknownName
from memlens.index.memory import read_expert
from memlens.models.memory_model import MemoryModel
from memlens.testing import save_tiny

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("mixture"), "qwen2_moe")


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> MemoryModel:
    return memlens.load(checkpoint)


@pytest.fixture(scope="module")
def scans(model: MemoryModel, tmp_path_factory: pytest.TempPathFactory) -> Scans:
    alone = memlens.scan(model, TEXTS, out=tmp_path_factory.mktemp("alone"), workers=1, **OPTIONS)
    return Scans(model, alone.folder)


def test_a_stopped_scan_and_shards_give_the_bytes_of_one_process(scans: Scans, tmp_path: Path) -> None:
    assert {"counts", "quadrants", "experts", "routing"} <= tables_of(scans.alone).keys()
    scans.stop(tmp_path / "stopped", 5)
    scans.go_on(tmp_path / "stopped")
    for number in (1, 2):
        scans.run(tmp_path / str(number), shard=f"{number}/2")
    index = memlens.merge([tmp_path / "2", tmp_path / "1"], out=tmp_path / "merged")
    assert tables_of(index.folder) == tables_of(scans.alone) and memlens.check(index).is_whole


@pytest.mark.sweep
def test_a_killed_scan_is_continued(checkpoint: Path, scans: Scans, tmp_path: Path) -> None:
    with start(checkpoint, tmp_path, until=1500) as process:
        process.kill()
    scans.go_on(tmp_path)


def naive_routing(model: MemoryModel, index: memlens.Index, layer: int) -> dict[tuple[int, int], dict[int, float]]:
    """Return {(sentence, position): experts with their weights}. Every sentence is run on its own."""
    found: dict[tuple[int, int], dict[int, float]] = {}
    seen: set[tuple[int, ...]] = set()
    for row in index.table("corpus").to_pylist():
        tokens, blocks = row["tokens"], []
        with model.watch(lambda _, block, blocks=blocks: blocks.append(block), [layer]):
            model.run_body(torch.tensor([tokens]))
        for p in range(len(tokens)):
            if tuple(tokens[: p + 1]) in seen:
                continue  # a repeated prefix is no candidate
            seen.add(tuple(tokens[: p + 1]))
            found[row["sentence"], p] = {
                block.group.expert: float(block.weights[block.rows == p])
                for block in blocks
                if block.group.kind == "routed" and (block.rows == p).any()
            }
    return found


def test_experts_are_counted_weighed_and_listed_as_by_hand(model: MemoryModel, scans: Scans) -> None:
    index = memlens.open_index(scans.alone)
    routing = naive_routing(model, index, 2)
    assert len(routing) == index.manifest.counts.prefixes and all(len(own) == 2 for own in routing.values())
    for expert in range(5):
        weights = {prefix: own[expert] for prefix, own in routing.items() if expert in own}
        record = read_expert(index, f"L2E{expert}")
        assert record.chosen == len(weights) and record.share == len(weights) / len(routing)
        assert record.weight == pytest.approx(np.mean(list(weights.values())), abs=1e-5)
        assert record.top_k == pytest.approx(2)
        best: dict[int, float] = {}
        for (sentence, _), weight in weights.items():
            best[sentence] = max(best.get(sentence, 0.0), weight)
        expected = sorted(best.values(), reverse=True)[: OPTIONS["top"]]
        assert [one.coefficient for one in record.heaviest] == pytest.approx(expected, abs=1e-5)
        drawn = index.sql(f"SELECT * FROM {{routing}} WHERE layer = 2 AND expert = {expert} AND list = 'drawn'")
        places = {(row["sentence"], row["position"]) for row in drawn}
        assert places <= weights.keys() and len(places) == record.drawn == min(100, len(weights))
        rows = {row["sentence"]: row["tokens"] for row in index.table("corpus").to_pylist()}
        counts = Counter(rows[sentence][position] for sentence, position in places)
        assert {one.token: one.number for one in record.tokens} == {t: n / len(places) for t, n in counts.items()}


def test_an_expert_and_its_memories_are_shown_searched_and_exported(scans: Scans, tmp_path: Path, run: Run) -> None:
    import json
    import shutil

    folder = shutil.copytree(scans.alone, tmp_path / "index")
    memlens.values(folder, top=5)
    code, out, _ = run("show", folder, "L2E3")
    assert code == 0 and "chosen for" in out and "router" in out and "L2E3N" in out
    assert "it processes every token" in run("show", folder, "L0S0")[1]
    shown = json.loads(run("show", folder, "L2E3N7", "--json")[1])
    assert shown["name"] == "L2E3N7" and shown["memory"] == 12 + 3 * 20 + 7 and shown["seen"] < 9999
    index = memlens.open_index(folder)
    assert shown["max"] == index.table("memories", filters=[("layer", "=", 2), ("memory", "=", 79)])["max"][0].as_py()
    assert "that are routed to its expert" in run("show", folder, "L2E3N7")[1]
    assert json.loads(run("show", folder, "L2E3", "--json", "--top", "2")[1])["name"] == "L2E3"
    for wrong in ("L2E9", "L1E0", "L2S1"):
        with pytest.raises(UnknownName, match=f"{wrong} does not exist"):
            read_expert(index, wrong)
    run("export", folder, "--out", tmp_path / "all.jsonl")
    names = [json.loads(line)["name"] for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert names == [str(index.names.name(layer, n)) for layer in range(3) for n in range(index.memories(layer))]
    found: Any = json.loads(run("search", folder, "L2E3", "--in", "name", "--json", "--limit", "3")[1])
    assert [hit["name"] for hit in found["found"]] == ["L2E3N0", "L2E3N1", "L2E3N2"]


def test_the_router_is_read_through_the_norm_and_the_embedding(model: MemoryModel, scans: Scans, copy_of: Any) -> None:
    index = memlens.values(copy_of(memlens.open_index(scans.alone)).folder, top=4)
    norm, router = model.layers[2].input_norm, model.network.model.layers[2].mlp.gate.weight  # type: ignore[union-attr]
    scores = (norm.folded(model.lens.input_embedding) @ router.detach()[3]).sort(descending=True)
    record = read_expert(index, "L2E3")
    assert [one.token for one in record.router] == scores.indices[:4].tolist()
    assert [one.number for one in record.router] == pytest.approx(scores.values[:4].tolist(), 1e-4)
