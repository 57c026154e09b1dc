"""The records of a circuit: nodes, edges and the graph of one prompt. Reading them needs no model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Node:
    """A token, a memory at a position, a layer's memories without their own nodes, all biases, or the target."""

    id: str
    kind: str  # "embedding", "memory", "others", "bias" or "target"
    layer: int | None
    position: int | None  # position in the prompt, counted from 0; -1 is BOS
    name: str  # L5N94 for a memory, the token's text for an embedding
    relevance: float
    coefficient: float | None = None
    label: str = ""  # name of the memory, made from its patterns in the index
    number: int | None = None  # number of the memory in its layer, or id of the token


@dataclass(frozen=True)
class HeadPart:
    """The part of an edge that enters attention through one head ("L3H2"), or that bypasses attention ("direct")."""

    head: str
    weight: float


@dataclass(frozen=True)
class Edge:
    """The contribution of a source node to a target node, in units of the target logit."""

    source: str
    target: str
    weight: float
    heads: tuple[HeadPart, ...] = ()  # parts that sum to the weight; empty if edges are not split


@dataclass(frozen=True)
class Circuit:
    """The graph of one prompt. Edges into a memory, and edges out of it, sum to its relevance."""

    prompt: str
    tokens: tuple[str, ...]
    token: str
    against: str | None
    value: float  # value of the target: a logit, or the difference of two logits
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    model: str
    layers: int
    probability: float  # probability of the token
    shift: int  # index of position 0 in `tokens`: 1 if the first token is BOS, otherwise 0

    def share(self, amount: float) -> str:
        """Return an amount as a share of the target's size, like "+12.3%", or the amount itself if the target is 0."""
        return f"{amount / abs(self.value):+.1%}" if self.value else f"{amount:+.3g}"

    @property
    def memories(self) -> list[Node]:
        """The memory nodes, largest absolute relevance first."""
        return sorted((node for node in self.nodes if node.kind == "memory"), key=lambda node: -abs(node.relevance))

    def edges_into(self, node: str) -> list[Edge]:
        """Return the edges into a node, largest absolute weight first."""
        return sorted((edge for edge in self.edges if edge.target == node), key=lambda edge: -abs(edge.weight))

    def edges_out_of(self, node: str) -> list[Edge]:
        """Return the edges out of a node, largest absolute weight first."""
        return sorted((edge for edge in self.edges if edge.source == node), key=lambda edge: -abs(edge.weight))

    def to_json(self) -> dict[str, Any]:
        """Return the graph as plain data: target, nodes and edges."""
        nodes = [{key: value for key, value in vars(node).items() if value not in (None, "")} for node in self.nodes]
        return {
            "prompt": self.prompt,
            "tokens": list(self.tokens),
            "shift": self.shift,
            "layers": self.layers,
            "target": {"token": self.token, "against": self.against, "value": self.value},
            "nodes": nodes,
            "edges": [
                {"source": edge.source, "target": edge.target, "weight": edge.weight}
                | ({"heads": [vars(part) for part in edge.heads]} if edge.heads else {})
                for edge in self.edges
            ],
        }

    def __repr__(self) -> str:
        strongest = ", ".join(f"{node.name}@{node.position} {node.relevance:+.3g}" for node in self.memories[:3])
        return f"<Circuit of {self.token!r} ({self.value:.3g}): {strongest}, ...>"
