"""Wires: static connections between memories, compared with sums written out and with silencing."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import memlens
from memlens.circuits.wires import folded_keys, shared_triggers, validate_wires, wires
from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.models.memory_model import MemoryModel
from memlens.testing import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> MemoryModel:
    return memlens.load(tiny_llama)


def brute_force(model: MemoryModel, earlier: tuple[int, int], later: tuple[int, int], by: str) -> float:
    """Return the cosine of a value with a key of a gated block after an RMSNorm, by loops."""
    block = model.layers[later[0]]
    rows = block.groups[0].keys if by == "key" else block.groups[0].up
    assert rows is not None and block.input_norm is not None and block.input_norm.gain is not None
    key = [float(k * gain) for k, gain in zip(rows[later[1]], block.input_norm.gain, strict=True)]
    value = [float(v) for v in model.layers[earlier[0]].values[earlier[1]]]
    return sum(k * v for k, v in zip(key, value, strict=True)) / math.hypot(*key) / math.hypot(*value)


def test_the_strongest_wires_are_those_of_all_pairs(model: MemoryModel, tiny_llama_index: Index) -> None:
    found = wires(tiny_llama_index, model, "L1N3", top=4)
    everything = [
        (brute_force(model, (0, i), (1, 3), by), MemoryId(0, i), by)
        for i in range(model.layers[0].memories)
        for by in ("key", "up")
    ]
    expected = sorted(everything, key=lambda wire: -abs(wire[0]))[:4]
    assert [(wire.memory, wire.by) for wire in found.reads] == [(name, by) for _, name, by in expected]
    assert [wire.cosine for wire in found.reads] == pytest.approx([cosine for cosine, _, _ in expected], abs=1e-6)
    assert found.reads[0].z == pytest.approx(expected[0][0] * math.sqrt(model.width), abs=1e-5)


def test_what_a_value_feeds_is_what_the_later_memory_reads(model: MemoryModel, tiny_llama_index: Index) -> None:
    strongest = wires(tiny_llama_index, model, "L0N2", top=1).feeds[0]
    read = wires(tiny_llama_index, model, strongest.memory, top=1000).reads
    assert strongest.cosine in [wire.cosine for wire in read if str(wire.memory) == "L0N2"]


def test_tokens_are_input_embeddings_that_a_key_responds_to(model: MemoryModel, tiny_llama_index: Index) -> None:
    best = wires(tiny_llama_index, model, "L0N2", top=1).tokens[0]
    everything = [
        torch.cosine_similarity(model.lens.input_embedding, rows[2][None]).abs().max()
        for rows in folded_keys(model.layers[0]).values()
    ]
    assert abs(best.cosine) == pytest.approx(float(max(everything)), abs=1e-6)


def test_shared_triggers_are_counted(tiny_llama_index: Index) -> None:
    def places(name: str) -> set[tuple[int, int]]:
        return {
            (row["sentence"], row["position"])
            for row in tiny_llama_index.table("triggers").to_pylist()
            if f"L{row['layer']}N{row['memory']}" == name and row["end"] == "top"
        }

    other = MemoryId(1, 4)
    expected = len(places("L0N2") & places(str(other))) / len(places("L0N2"))
    assert shared_triggers(tiny_llama_index, MemoryId(0, 2), [other]) == {other: expected}


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])
def test_silencing_changes_later_memories_as_predicted(family: str, tiny_text: Path, tmp_path: Path) -> None:
    model = memlens.load(tiny_model(family).double(), tokenizer=tiny_tokenizer())
    index = memlens.scan(model, tiny_text, out=tmp_path / "index", top=3, threads=1)
    pairs = [(f"L0N{i}", f"L1N{j}") for i in range(4) for j in range(4)]
    assert validate_wires(index, model, pairs, triggers=1).correlation > 0.8


def test_the_command_prints_tokens_and_memories(
    run: Callable[..., tuple[int, str, str]], tiny_llama_index: Index
) -> None:
    code, out, _ = run("wires", tiny_llama_index.folder, "L1N3", "--top", 3)
    assert code == 0 and "reads" in out and "feeds" in out


def test_json_has_the_same_numbers(
    run: Callable[..., tuple[int, str, str]], model: MemoryModel, tiny_llama_index: Index
) -> None:
    document = json.loads(run("wires", tiny_llama_index.folder, "L1N3", "--json")[1])
    expected = wires(tiny_llama_index, model, "L1N3").feeds[0].cosine
    assert document["feeds"][0]["cosine"] == pytest.approx(expected)


def test_unknown_memories_are_refused(refused: Callable[..., str], tiny_llama_index: Index) -> None:
    assert "layer 9 is not in this index" in refused("wires", tiny_llama_index.folder, "L9N9")
