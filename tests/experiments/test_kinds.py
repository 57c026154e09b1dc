"""Figures of a mixture by kind of memory, against counting and against the network's own weights."""

from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

import memlens
from memlens.experiments.experiment import ModelShape
from memlens.experiments.run import EXPERIMENTS
from memlens.memory import KINDS
from memlens.models.memory_model import MemoryModel
from memlens.testing import save_tiny

TEXT = str(Path(memlens.__file__).parent / "bundled" / "prose" / "birds.txt")
NAMES = ["agreement", "rank", "patterns", "active", "contributions"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> MemoryModel:
    """Shared and routed experts in layers 0 and 2, a dense layer between them."""
    return memlens.load(save_tiny(tmp_path_factory.mktemp("mixture"), "qwen2_moe"))


@pytest.fixture(scope="module")
def index(model: MemoryModel, tmp_path_factory: pytest.TempPathFactory) -> memlens.Index:
    folder = tmp_path_factory.mktemp("index")
    memlens.scan(model, [TEXT], out=folder, top=8, max_tokens=1500, threads=1)
    memlens.values(folder, model=model, top=4, threads=1)
    memlens.patterns(folder)
    memlens.experiment(folder, NAMES, model=model, sample=40, threads=1)
    return memlens.open_index(folder)


def told_apart(index: memlens.Index, name: str, column: str) -> dict[tuple[int, str], Any]:
    """(layer, kind) -> what a table says of it; kinds that a layer lacks are left out."""
    rows = index.table(f"experiments/{name}").to_pylist()
    found = {(row["layer"], kind): row[f"{kind}_{column}"] for row in rows for kind in KINDS}
    return {key: value for key, value in found.items() if value is not None}


def by_kind(index: memlens.Index, rows: list[dict[str, Any]]) -> dict[tuple[int, str], list[dict[str, Any]]]:
    found = defaultdict(list)
    for row in rows:
        found[row["layer"], index.names.name(row["layer"], row["memory"]).kind].append(row)
    return found


def test_agreement_and_rank_are_counted_among_the_memories_of_a_kind(index: memlens.Index) -> None:
    memlens.experiment(index.folder, ["agreement", "rank"], threads=1)  # all memories instead of a sample
    values = [row for row in index.table("values").to_pylist() if row["target"] is not None]
    known = by_kind(index, values)
    assert set(known) == {(0, "shared"), (0, "routed"), (1, "dense"), (2, "shared"), (2, "routed")}
    agree = {key: sum(row["argmax"] == row["target"] for row in rows) for key, rows in known.items()}
    assert told_apart(index, "agreement", "agree") == agree
    rates = {key: agree[key] / len(rows) for key, rows in known.items()}
    assert told_apart(index, "agreement", "rate") == pytest.approx(rates)
    medians = {key: median(row["target_rank"] for row in rows) for key, rows in known.items()}
    assert told_apart(index, "rank", "median") == pytest.approx(medians)


def test_memories_with_a_pattern_are_counted_among_those_of_a_kind_that_have_triggers(index: memlens.Index) -> None:
    memlens.experiment(index.folder, ["patterns"], threads=1)
    triggers = index.sql("""SELECT DISTINCT layer, memory FROM {triggers} WHERE "end" = 'top'""")
    patterned = {(row["layer"], row["memory"]) for row in index.table("patterns").to_pylist()}
    known = by_kind(index, triggers)
    shares = {key: np.mean([(row["layer"], row["memory"]) in patterned for row in rows]) for key, rows in known.items()}
    assert told_apart(index, "patterns", "patterned") == pytest.approx(shares)


def test_active_memories_and_what_they_add_are_those_of_every_prefix_by_itself(
    index: memlens.Index, model: MemoryModel
) -> None:
    network: Any = model.network
    tokens = {row["sentence"]: row["tokens"] for row in index.table("corpus").to_pylist()}
    active, given = defaultdict(list), defaultdict(list)
    for row in index.table("experiments/prefixes").to_pylist():
        prefix = torch.tensor([tokens[row["sentence"]][: row["position"] + 1]])
        blocks: list[Any] = []
        with model.watch(lambda layer, block, blocks=blocks: blocks.append((layer, block))), torch.no_grad():
            last = model.run_body(prefix)[0, -1]
        away = network.lm_head.weight - network.lm_head.weight.mean(0)
        direction = network.model.norm.weight / last.square().mean().sqrt() * away[row["final_token"]]
        fired, reached, added = defaultdict(int), defaultdict(int), defaultdict(float)
        for layer, block in blocks:
            here = range(prefix.shape[1]) if block.rows is None else block.rows.tolist()
            if prefix.shape[1] - 1 in here:
                m = block.coefficients[list(here).index(prefix.shape[1] - 1)].double()
                fired[layer, block.group.kind] += int((m > 0).sum())
                reached[layer, block.group.kind] += len(m)
                added[layer, block.group.kind] += float(m @ block.group.values.double() @ direction.double())
        for key, count in reached.items():
            active[key].append(fired[key] / count)
            given[key].append(added[key])
    assert told_apart(index, "active", "median") == pytest.approx({key: median(own) for key, own in active.items()})
    expected = {key: np.mean(own) for key, own in given.items()}
    assert told_apart(index, "contributions", "given") == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_mixture_has_a_chart_by_kind_and_a_dense_model_none(
    name: str, index: memlens.Index, tiny_gpt2_values: memlens.Index
) -> None:
    rows, draw = index.table(f"experiments/{name}").to_pylist(), EXPERIMENTS[name].tables[0].draw
    assert draw is not None
    panels = {panel.name: panel for panel in draw(rows, ModelShape.of(index))}
    assert "by kind of memory" in panels[f"{name}-kinds"].alt
    apart = [{key: None if key.startswith(KINDS) else value for key, value in row.items()} for row in rows]
    assert f"{name}-kinds" not in {panel.name for panel in draw(apart, ModelShape.of(tiny_gpt2_values))}
