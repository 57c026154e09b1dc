"""Files of a circuit: the attribution graph has the schema of its viewers, and the drawing is valid XML."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from memlens.circuits.export import attribution_graph, draw_svg, load_graph, save_graph, save_svg
from memlens.circuits.graph import circuit
from memlens.circuits.result import Circuit
from memlens.errors import FilesError, OutputError

# circuit-tracer's graph_models.py and Neuronpedia's graph-schema.json: required fields and their types
METADATA = {"slug": str, "scan": str, "prompt_tokens": list, "prompt": str, "schema_version": int}
PARAMETERS = {"pinnedIds": list, "supernodes": list, "linkType": str, "clickedId": str, "sg_pos": str}
NODE: dict[str, Any] = {
    "node_id": str,
    "feature": int,
    "layer": str,
    "ctx_idx": int,
    "feature_type": str,
    "jsNodeId": str,
    "clerp": str,
    "influence": float,
    "activation": (float, type(None)),
    "token_prob": float,
    "is_target_logit": bool,
    "run_idx": int,
    "reverse_ctx_idx": int,
}
LINK = {"source": str, "target": str, "weight": float}
TYPES = {"cross layer transcoder", "embedding", "mlp reconstruction error", "logit"}


@pytest.fixture(scope="module")
def graph(tiny_llama: Path) -> Circuit:
    return circuit(tiny_llama, "The <river> & runs", nodes=9)


@pytest.fixture(scope="module")
def document(graph: Circuit) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(json.dumps(attribution_graph(graph)))
    return content


def mismatches(record: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    return [name for name, kind in schema.items() if name not in record or not isinstance(record[name], kind)]


def test_every_part_has_the_fields_of_the_schema(document: dict[str, Any]) -> None:
    parts = [(document["metadata"], METADATA), (document["qParams"], PARAMETERS)]
    parts += [(node, NODE) for node in document["nodes"]] + [(link, LINK) for link in document["links"]]
    assert not [wrong for record, schema in parts if (wrong := mismatches(record, schema))]


def test_node_types_and_layers_are_known_to_viewers(document: dict[str, Any]) -> None:
    assert {node["feature_type"] for node in document["nodes"]} == TYPES
    assert all(node["layer"] == "E" or node["layer"].isdigit() for node in document["nodes"])


def test_node_ids_are_distinct_and_links_connect_them(document: dict[str, Any]) -> None:
    ids = [node["node_id"] for node in document["nodes"]]
    assert len(set(ids)) == len(ids)
    assert {end for link in document["links"] for end in (link["source"], link["target"])} <= set(ids)


def test_positions_lie_within_the_prompt(document: dict[str, Any]) -> None:
    last = len(document["metadata"]["prompt_tokens"]) - 1
    assert all(node["ctx_idx"] + node["reverse_ctx_idx"] == last for node in document["nodes"])


def test_more_relevant_nodes_are_kept_by_lower_thresholds(document: dict[str, Any]) -> None:
    nodes = [node for node in document["nodes"] if not node["is_target_logit"]]
    by_relevance = sorted(nodes, key=lambda node: -abs(node["relevance"]))
    assert [node["influence"] for node in by_relevance] == sorted(node["influence"] for node in nodes)
    assert by_relevance[-1]["influence"] == pytest.approx(1)


def test_memories_with_one_name_are_a_supernode(graph: Circuit) -> None:
    first, second, third = (node.id for node in graph.memories[:3])
    labels = {first: "rivers", second: "rivers", third: "seas"}
    named = replace(graph, nodes=tuple(replace(node, label=labels.get(node.id, "")) for node in graph.nodes))
    supernodes = {name: ids for name, *ids in attribution_graph(named)["qParams"]["supernodes"]}
    of_labels = {node["node_id"] for node in attribution_graph(named)["nodes"] if node["clerp"].endswith(": rivers")}
    assert set(supernodes["rivers"]) == of_labels and len(of_labels) == 2 and "seas" not in supernodes


def test_the_drawing_is_xml_with_a_circle_per_node(graph: Circuit) -> None:
    root = ElementTree.fromstring(draw_svg(graph))
    circles = root.findall("{http://www.w3.org/2000/svg}circle")
    assert len(circles) == len(graph.tokens) + 9 + 1


@pytest.mark.parametrize("save", [save_graph, save_svg])
def test_files_of_users_are_not_replaced(save: Any, graph: Circuit, tmp_path: Path) -> None:
    save(graph, tmp_path / "mine")
    save(graph, tmp_path / "mine")  # its own file is replaced
    (tmp_path / "mine").write_text("my notes", encoding="utf-8")
    with pytest.raises(OutputError, match="was not made by memlens"):
        save(graph, tmp_path / "mine")


def test_a_saved_circuit_is_read_again(graph: Circuit, tmp_path: Path) -> None:
    save_graph(graph, tmp_path / "graph.json")
    assert load_graph(tmp_path / "graph.json").to_json() == graph.to_json()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{]", "is not a circuit saved by memlens"),
        ('{"metadata": {}, "nodes": [], "links": []}', "missing required field `prompt`"),
        (None, "no node 'L9'"),
    ],
)
def test_files_that_are_no_circuits_are_rejected(
    document: dict[str, Any], tmp_path: Path, content: str | None, message: str
) -> None:
    broken = {**document, "links": [{"source": "L9", "target": "L9", "weight": 1.0}]}
    (tmp_path / "graph.json").write_text(json.dumps(broken) if content is None else content, encoding="utf-8")
    with pytest.raises(FilesError, match=message):
        load_graph(tmp_path / "graph.json")
