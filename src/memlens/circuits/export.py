"""Files of a circuit: the attribution graph that circuit-tracer and Neuronpedia read, and a drawing as SVG.

In an attribution graph, memories are features of a "cross layer transcoder". The other memories of a layer and the
biases are "mlp reconstruction error" nodes, which viewers draw as the unexplained part. `influence` is defined as in
circuit-tracer: nodes are sorted by absolute relevance, and the influence of a node is the cumulative share of the total
up to this node. A viewer that shows nodes with an influence up to a threshold therefore shows the most relevant nodes.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Literal

import msgspec

from memlens.circuits.result import Circuit, Edge, Node
from memlens.errors import FilesError
from memlens.files import read_limited, refuse_output, replacing
from memlens.text import cut_right, visible

_GRAPH_START = b'{"metadata": {"info": {"generator": {"name": "memlens"'
_SVG_START = b'<svg xmlns="http://www.w3.org/2000/svg" data-generator="memlens"'
_FILE_LIMIT = 256 << 20  # bytes
_TYPES = {
    "memory": "cross layer transcoder",
    "embedding": "embedding",
    "others": "mlp reconstruction error",
    "bias": "mlp reconstruction error",
    "target": "logit",
}


def save_graph(circuit: Circuit, path: str | Path, *, force: bool = False) -> None:
    """Write the attribution graph as JSON. `force` replaces a file that memlens did not write."""
    refuse_output(Path(path), is_graph, force=force)
    with replacing(Path(path)) as beside:
        beside.write_text(json.dumps(attribution_graph(circuit), allow_nan=False) + "\n", encoding="utf-8")


def save_svg(circuit: Circuit, path: str | Path, *, force: bool = False) -> None:
    """Write the drawing. `force` replaces a file that memlens did not write."""
    refuse_output(Path(path), is_svg, force=force)
    with replacing(Path(path)) as beside:
        beside.write_text(draw_svg(circuit), encoding="utf-8")


def is_graph(head: bytes) -> bool:
    """Return True if `head` is the start of a file written by `save_graph`."""
    return head.startswith(_GRAPH_START)


def is_svg(head: bytes) -> bool:
    """Return True if `head` is the start of a file written by `save_svg`."""
    return head.startswith(_SVG_START)


def group_nodes(circuit: Circuit) -> dict[str, list[str]]:
    """Return {name: ids of nodes} of supernodes: memories with the same pattern, or one memory at several positions."""
    groups: dict[str, list[str]] = defaultdict(list)
    for node in circuit.memories:
        groups[node.label or node.name].append(node.id)
    return {name: nodes for name, nodes in groups.items() if len(nodes) > 1}


def attribution_graph(circuit: Circuit, groups: Mapping[str, Sequence[str]] | None = None) -> dict[str, Any]:
    """Return the circuit in the schema of circuit-tracer and Neuronpedia.

    Args:
        circuit: The circuit.
        groups: Supernodes by name, each with the ids of its nodes. Default: the result of `group_nodes`.
    """
    from memlens import __version__

    ids = {node.id: _graph_id(circuit, node) for node in circuit.nodes}
    slug = re.sub(r"[^a-z0-9]+", "-", f"{circuit.prompt} {circuit.token}".lower()).strip("-")[:80]
    influences = _influences(circuit)
    return {
        "metadata": {
            "info": {"generator": {"name": "memlens", "version": __version__}},
            "slug": slug or "circuit",
            "scan": circuit.model,
            "transcoder_list": [],
            "prompt_tokens": list(circuit.tokens),
            "prompt": circuit.prompt,
            "against": circuit.against,
            "shift": circuit.shift,
            "node_threshold": 1.0,
            "schema_version": 1,
        },
        "qParams": {
            "pinnedIds": [ids["target"]],
            "supernodes": [
                [name, *(ids[node] for node in nodes)] for name, nodes in (groups or group_nodes(circuit)).items()
            ],
            "linkType": "both",
            "clickedId": ids["target"],
            "sg_pos": "",
        },
        "nodes": [_graph_node(circuit, node, ids[node.id], influences[node.id]) for node in circuit.nodes],
        "links": [
            {"source": ids[edge.source], "target": ids[edge.target], "weight": edge.weight} for edge in circuit.edges
        ],
    }


class _SavedName(msgspec.Struct):
    id: str
    kind: Literal["memory", "embedding", "others", "bias", "target"]
    name: str
    label: str


class _SavedNode(msgspec.Struct):
    node_id: str
    feature: int
    layer: str
    ctx_idx: int
    relevance: float
    activation: float | None
    token_prob: float
    memlens: _SavedName


class _SavedMetadata(msgspec.Struct):
    prompt: str
    prompt_tokens: list[str]
    scan: str
    against: str | None
    shift: int


class _SavedGraph(msgspec.Struct):
    metadata: _SavedMetadata
    nodes: list[_SavedNode]
    links: list[Edge]


def load_graph(path: str | Path) -> Circuit:
    """Read a circuit that `save_graph` wrote. The file does not store how edges are split by head.

    Raises:
        FilesError: The file cannot be read or is not a circuit that memlens wrote.
    """
    try:
        saved = msgspec.json.decode(read_limited(Path(path), _FILE_LIMIT), type=_SavedGraph)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FilesError(f"{path} is not a circuit saved by memlens ({error}); save it again") from error
    metadata, ids = saved.metadata, {node.node_id: node.memlens.id for node in saved.nodes}
    targets = [node for node in saved.nodes if node.memlens.kind == "target"]
    ends = (end for link in saved.links for end in (link.source, link.target))
    problem = next((f"no node '{end}'" for end in ends if end not in ids), "")
    if problem or len(targets) != 1:
        raise FilesError(f"{path} is not a circuit saved by memlens ({problem or 'no target'}); save it again")
    (target,) = targets
    nodes = []
    for node in saved.nodes:
        kind = node.memlens.kind
        nodes.append(
            Node(
                node.memlens.id,
                kind,
                int(node.layer) if kind in ("memory", "others") and node.layer.isdigit() else None,
                None if kind in ("others", "bias") else node.ctx_idx - metadata.shift,
                node.memlens.name,
                node.relevance,
                node.activation,
                node.memlens.label,
                None if node.feature < 0 else node.feature,
            )
        )
    return Circuit(
        metadata.prompt,
        tuple(metadata.prompt_tokens),
        target.memlens.name,
        metadata.against,
        target.relevance,
        tuple(nodes),
        tuple(Edge(ids[link.source], ids[link.target], link.weight) for link in saved.links),
        metadata.scan,
        int(target.layer),
        target.token_prob,
        metadata.shift,
    )


def _influences(circuit: Circuit) -> dict[str, float]:
    """Return the influence of each node, the cumulative share of absolute relevance in descending order."""
    nodes = sorted((node for node in circuit.nodes if node.kind != "target"), key=lambda node: -abs(node.relevance))
    total = sum(abs(node.relevance) for node in nodes) or 1.0
    influences, reached = {"target": 0.0}, 0.0
    for node in nodes:
        reached += abs(node.relevance) / total
        influences[node.id] = min(reached, 1.0)
    return influences


def _row(circuit: Circuit, node: Node) -> int:
    """Return the position of a node in the model's input. A node without a position gets the last position."""
    return len(circuit.tokens) - 1 if node.position is None else node.position + circuit.shift


def _graph_layer(circuit: Circuit, node: Node) -> str:
    if node.kind in ("embedding", "bias"):
        return "E"
    return str(circuit.layers if node.kind == "target" else node.layer)


def _graph_id(circuit: Circuit, node: Node) -> str:
    middle = node.kind if node.number is None else str(node.number)
    return f"{_graph_layer(circuit, node)}_{middle}_{_row(circuit, node)}"


def _graph_node(circuit: Circuit, node: Node, graph_id: str, influence: float) -> dict[str, Any]:
    layer, row = _graph_layer(circuit, node), _row(circuit, node)
    return {
        "node_id": graph_id,
        "feature": -1 if node.number is None else node.number,
        "layer": layer,
        "ctx_idx": row,
        "feature_type": _TYPES[node.kind],
        "jsNodeId": f"{layer}_{node.kind if node.number is None else node.number}-{row}",
        "clerp": f"{node.name}: {node.label}" if node.label else _target_label(circuit, node),
        "influence": influence,
        "relevance": node.relevance,
        "memlens": {"id": node.id, "kind": node.kind, "name": node.name, "label": node.label},
        "activation": node.coefficient,
        "token_prob": circuit.probability if node.kind == "target" else 0.0,
        "is_target_logit": node.kind == "target",
        "run_idx": 0,
        "reverse_ctx_idx": len(circuit.tokens) - 1 - row,
    }


def _target_label(circuit: Circuit, node: Node) -> str:
    if node.kind != "target":
        return node.name
    difference = "" if circuit.against is None else f" minus {circuit.against!r}"
    return f"Output {circuit.token!r}{difference} (p={circuit.probability:.3f})"


_CELL, _ROW, _RADIUS = 92, 58, 9.0  # pixels
_LEFT, _TOP = 70, 40
_POSITIVE, _NEGATIVE = "#2563eb", "#dc2626"
_EDGES_PER_NODE = 3


def draw_svg(circuit: Circuit) -> str:
    """Return a drawing: layers from bottom to top, tokens from left to right, node areas by absolute relevance.

    Blue nodes and edges raise the target, and red ones lower it. Only the strongest edges into each node are drawn, and
    "others" nodes are left out.
    """
    shown = [node for node in circuit.nodes if node.kind in ("embedding", "memory", "target")]
    levels = sorted({node.layer for node in shown if node.layer is not None})
    height = _TOP + _ROW * (len(levels) + 2)
    cells: dict[tuple[int, int], list[Node]] = defaultdict(list)
    for node in shown:
        level = 0 if node.kind == "embedding" else len(levels) + 1
        level = level if node.layer is None else 1 + levels.index(node.layer)
        cells[level, _row(circuit, node)].append(node)
    widest = max(len(nodes) for nodes in cells.values())
    cell = max(_CELL, 30 * widest)
    places = {
        node.id: (_LEFT + cell * (row + (i + 1) / (len(nodes) + 1)), height - _ROW * (level + 0.6))
        for (level, row), nodes in cells.items()
        for i, node in enumerate(nodes)
    }
    largest = max((abs(node.relevance) for node in shown if node.kind != "target"), default=0.0) or 1.0
    width = _LEFT + cell * len(circuit.tokens) + 20
    parts = [
        f'{_SVG_START.decode()} viewBox="0 0 {width} {height + 20}" width="{width}" height="{height + 20}" '
        'font-family="sans-serif" font-size="11">',
        f"<title>{_xml(f'Circuit of {circuit.token!r} after {circuit.prompt!r}')}</title>",
        f'<rect width="{width}" height="{height + 20}" fill="#ffffff"/>',
    ]
    parts += [
        f'<text x="8" y="{height - _ROW * (level + 1.6) + 4:.1f}" fill="#555555">layer {layer}</text>'
        for level, layer in enumerate(levels)
    ]
    parts += _draw_edges(circuit, places)
    for node in shown:
        parts += _draw_node(circuit, node, places[node.id], largest)
    return "\n".join([*parts, "</svg>", ""])


def _draw_edges(circuit: Circuit, places: dict[str, tuple[float, float]]) -> list[str]:
    """Return lines for the strongest edges into each node, with widths that show the absolute weights."""
    edges = [
        edge
        for target in places
        for edge in [edge for edge in circuit.edges_into(target) if edge.source in places][:_EDGES_PER_NODE]
    ]
    largest = max((abs(edge.weight) for edge in edges), default=0.0) or 1.0
    lines = []
    for edge in edges:
        (x1, y1), (x2, y2) = places[edge.source], places[edge.target]
        color = _POSITIVE if edge.weight > 0 else _NEGATIVE
        thickness = 0.4 + 4 * abs(edge.weight) / largest
        lines.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" stroke-opacity="0.45" '
            f'stroke-width="{thickness:.2f}"><title>{_xml(f"{edge.source} to {edge.target}: {edge.weight:+.3g}")}'
            "</title></line>"
        )
    return lines


def _draw_node(circuit: Circuit, node: Node, place: tuple[float, float], largest: float) -> list[str]:
    x, y = place
    size = 1.0 if node.kind == "target" else math.sqrt(abs(node.relevance) / largest)
    color = _POSITIVE if node.relevance > 0 else _NEGATIVE
    name = repr(node.name) if node.kind in ("embedding", "target") else node.name
    details = f"{node.id} {node.relevance:+.3g} {node.label}".strip()
    below = 18 if node.kind == "embedding" else -13
    return [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{2 + _RADIUS * size:.1f}" fill="{color}" stroke="#ffffff">'
        f"<title>{_xml(details)}</title></circle>",
        f'<text x="{x:.1f}" y="{y + below:.1f}" text-anchor="middle" fill="#111111">{_xml(cut_right(name, 14))}</text>',
    ]


def _xml(text: str) -> str:
    return escape(visible(text))
