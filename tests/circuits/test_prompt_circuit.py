"""The circuit of one prompt: nodes, edges and "others" nodes that keep the sums valid."""

import json
from pathlib import Path

import pytest
import torch

import memlens
from memlens.circuits.frozen import frozen_pass
from memlens.circuits.graph import circuit
from memlens.circuits.result import Circuit
from memlens.errors import SettingError, UnknownName
from memlens.models.memory_model import MemoryModel
from memlens.testing import tiny_model, tiny_network, tiny_tokenizer
from memlens.tracer.prompt import read_prompt


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


@pytest.mark.parametrize("checkpoint", ["tiny_llama", "tiny_gpt2"])  # without and with biases of keys
def test_edges_into_every_node_sum_to_its_relevance(checkpoint: str, request: pytest.FixtureRequest) -> None:
    graph = circuit(memlens.load(request.getfixturevalue(checkpoint)), "The river runs", nodes=7)
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


PROMPT = "The river"


@pytest.mark.parametrize("family", ["gpt2", "phi3", "gpt_neox", "gemma2", "qwen2_moe", "bloom", "gpt_oss"])
def test_parts_of_an_edge_by_head_sum_to_it(family: str) -> None:
    network = (tiny_network if family == "phi3" else tiny_model)(family).double()
    edges = circuit(memlens.load(network, tokenizer=tiny_tokenizer()), PROMPT, nodes=8, heads=True).edges
    assert all(sum(part.weight for part in edge.heads) == pytest.approx(edge.weight, abs=1e-9) for edge in edges)
    assert any(part.head.startswith("L1H") and abs(part.weight) > 1e-4 for edge in edges for part in edge.heads)


def test_the_part_through_a_head_is_the_product_of_its_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A memory of layer 0, through head 1 of layer 1, to the target: every matrix of the head written out."""
    monkeypatch.setattr("memlens.circuits.graph._HEADS_SHOWN", 99)
    network = tiny_model("gpt2").double()
    network.set_attn_implementation("eager")
    model = memlens.load(network, tokenizer=tiny_tokenizer())
    graph = circuit(model, PROMPT, nodes=20, heads=True)
    source = next(node for node in graph.nodes if node.kind == "memory" and node.layer == 0)
    layer, head, row, block = 1, 1, source.position or 0, network.transformer.h[1]
    states: list[torch.Tensor] = []
    with block.ln_1.register_forward_pre_hook(lambda _module, arguments: states.append(arguments[0][0].detach())):
        fed = read_prompt(model, PROMPT).fed()
        weights = network(fed, output_attentions=True).attentions[layer][0, head]  # [pos, pos]
        answer = next(node.number for node in graph.nodes if node.kind == "target")
        with frozen_pass(model, fed, lambda logits: logits[answer], cut=True) as cut:
            (gradient,) = cut.head_gradients([cut.target])[layer : layer + 1]
    write = (source.coefficient or 0) * model.layers[0].values[source.number or 0]
    deviation = (states[0][row].var(unbiased=False) + block.ln_1.eps).sqrt()
    normed = (write - write.mean()) / deviation * block.ln_1.weight
    value = normed @ block.attn.c_attn.weight[:, 48 + 8 * head : 56 + 8 * head]  # after 24 columns each of Q and K
    expected = sum(float((weights[q, row] * (value @ gradient[head, q])).detach()) for q in range(fed.shape[1]))
    (edge,) = [edge for edge in graph.edges_out_of(source.id) if edge.target == "target"]
    assert {part.head: part.weight for part in edge.heads}["L1H1"] == pytest.approx(expected, abs=1e-9)


def test_heads_are_in_the_json_only_if_asked_for(model: MemoryModel, graph: Circuit) -> None:
    split = circuit(model, "The river runs", nodes=7, heads=True)
    assert split.nodes == graph.nodes and all("heads" not in edge for edge in graph.to_json()["edges"])
    parts = split.to_json()["edges"][0]["heads"]
    assert sum(part["weight"] for part in parts) == pytest.approx(split.edges[0].weight, abs=1e-5)
