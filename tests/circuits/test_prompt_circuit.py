"""The circuit of one prompt: nodes, edges and "others" nodes that keep the sums valid."""

import json
from pathlib import Path

import pytest

import memlens
from memlens.circuits.graph import Circuit, circuit
from memlens.errors import SettingError, UnknownName
from memlens.models.memory_model import MemoryModel


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> MemoryModel:
    return memlens.load(tiny_llama)


@pytest.fixture(scope="module")
def graph(model: MemoryModel) -> Circuit:
    return circuit(model, "The river runs", nodes=7)


def test_it_has_as_many_memories_as_asked_for(graph: Circuit) -> None:
    assert len(graph.memories) == 7


def test_the_selected_memories_have_the_largest_relevance(model: MemoryModel, graph: Circuit) -> None:
    everything = circuit(model, "The river runs", nodes=60)
    assert [node.id for node in everything.memories[:7]] == [node.id for node in graph.memories]


def test_edges_into_every_node_sum_to_its_relevance(graph: Circuit) -> None:
    for node in graph.nodes:
        if node.kind in ("memory", "others", "target"):
            assert sum(edge.weight for edge in graph.edges_into(node.id)) == pytest.approx(node.relevance, abs=1e-4)


def test_edges_out_of_every_node_sum_to_its_relevance(graph: Circuit) -> None:
    for node in graph.nodes:
        if node.kind != "target":
            assert sum(edge.weight for edge in graph.edges_out_of(node.id)) == pytest.approx(node.relevance, abs=1e-4)


def test_edges_point_forward(graph: Circuit) -> None:
    layers = {node.id: node.layer for node in graph.nodes}
    pairs = [(layers[edge.source], layers[edge.target]) for edge in graph.edges]
    assert all(source < target for source, target in pairs if source is not None and target is not None)


def test_bos_is_at_position_minus_one(graph: Circuit) -> None:
    assert [node.position for node in graph.nodes if node.kind == "embedding"][:2] == [-1, 0]


def test_the_difference_of_two_logits_can_be_explained(model: MemoryModel) -> None:
    both = circuit(model, "The river runs", token=5, against=9)
    single = [circuit(model, "The river runs", token=token).value for token in (5, 9)]
    assert both.value == pytest.approx(single[0] - single[1], abs=1e-4)


def test_json_has_target_nodes_and_edges(graph: Circuit) -> None:
    document = json.loads(json.dumps(graph.to_json()))
    assert document["target"]["value"] == graph.value
    assert {edge["source"] for edge in document["edges"]} <= {node["id"] for node in document["nodes"]}


def test_unknown_tokens_are_rejected(model: MemoryModel) -> None:
    with pytest.raises(UnknownName, match="does not exist"):
        circuit(model, "The river runs", token=10**6)


def test_the_same_token_twice_is_rejected(model: MemoryModel) -> None:
    with pytest.raises(SettingError, match="two different tokens"):
        circuit(model, "The river runs", token=5, against=5)


def test_an_empty_prompt_is_rejected(model: MemoryModel) -> None:
    with pytest.raises(SettingError, match="no tokens"):
        circuit(model, "")


def test_a_prompt_of_one_token_is_rejected(tiny_gpt2: Path) -> None:
    with pytest.raises(SettingError, match="the prompt has one token; a circuit needs at least two"):
        circuit(tiny_gpt2, "b")
