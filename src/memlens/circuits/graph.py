"""The circuit of one prompt: tokens, memories and the target, connected by edges that sum to relevances.

1. Run the frozen network (frozen.py). One backward pass gives the relevance of every memory at every position.
2. Select the memories with the largest absolute relevance. The other memories of each layer form one "others" node, and
   all biases form one node, so that all sums hold in the graph that is shown.
3. Run one backward pass per node, with all coefficients as leaves. This pass gives the edges into the node from every
   earlier write.
4. With `heads`, split every edge by the first attention head on its paths (step 5 of frozen.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from memlens.circuits.frozen import FrozenPass, Gate, Gradients, check_conservation, frozen_pass
from memlens.circuits.result import Circuit, Edge, HeadPart, Node
from memlens.errors import SettingError, UnsupportedModel
from memlens.index.reader import Index
from memlens.models.memory_model import MemoryModel
from memlens.tracer.prompt import Prompt, Source, open_model, read_prompt, read_token
from memlens.tracer.result import name_memories

_HEADS_SHOWN = 5  # number of strongest heads of an edge to list; the other heads form one part


def circuit(
    model: Source,
    prompt: str,
    *,
    token: str | int | None = None,
    against: str | int | None = None,
    nodes: int = 40,
    gate: Gate = "value",
    heads: bool = False,
    index: Index | str | os.PathLike[str] | None = None,
) -> Circuit:
    """Find the memories behind a prediction and the edges between them.

    Args:
        model: A model, or an index, which loads its model and names the memories.
        prompt: The text. The prediction after its last token is explained.
        token: The token whose logit is explained. Default: the predicted token.
        against: A second token. The difference of the two logits is explained.
        nodes: How many memories to show as separate nodes.
        gate: What carries the relevance of a gated memory: `value` (its input u), or `half` (gate and input equally).
        heads: Split every edge by the first attention head on its paths.
        index: An index of the same model that names the memories.

    Returns:
        The graph. Edges into a memory, and edges out of it, sum to its relevance.

    Raises:
        SettingError: The prompt has fewer than two tokens, or `nodes` is less than 1.
        UnknownName: The model has no such token.
        UnsupportedModel: The frozen network is not linear, so that writes do not add up.

    Example:
        >>> graph = memlens.circuit(model, "The river runs", nodes=5)
        >>> len(graph.memories)
        5
    """
    if nodes < 1:
        raise SettingError(f"--nodes is {nodes}; it must be 1 or more")
    loaded, names = open_model(model, index)
    read = read_prompt(loaded, prompt)
    fed = read.fed().to(loaded.device)
    check_length(fed.shape[1], "the prompt")
    p = loaded.lens.probabilities(loaded.lens.state_logits(loaded.run_body(fed)[0, -1:])[0])
    answer = int(p.argmax()) if token is None else read_token(loaded, token)
    other = None if against is None else read_token(loaded, against)
    if other == answer:
        raise SettingError(f"--token and --against are both token {answer}; name two different tokens")

    def target(logits: Tensor) -> Tensor:
        return logits[answer] if other is None else logits[answer] - logits[other]

    with frozen_pass(loaded, fed, target, gate=gate) as full:
        gradients = full.gradients([full.target])
        check_conservation(loaded, full, gradients)
    del full  # its autograd graph is as large as the model's activations
    with ExitStack() as stack:
        cut = stack.enter_context(frozen_pass(loaded, fed, target, gate=gate, cut=True))
        parts = _Parts(loaded, read, cut, gradients, nodes)
        if heads:
            apart = stack.enter_context(frozen_pass(loaded, fed, target, gate=gate, cut=True, cut_heads=True))
            parts.split_by_heads(apart)
        edges = tuple(parts.edges())
    token_text = loaded.tokenizer.token_text
    return Circuit(
        read.text,
        tuple(token_text(number) for number in fed[0].tolist()),
        token_text(answer),
        None if other is None else token_text(other),
        float(cut.target.detach()),
        (*parts.embeddings(), *parts.memories(names), *parts.others(), parts.bias(), parts.target_node(answer)),
        edges,
        loaded.name,
        len(loaded.layers),
        float(p[answer]),
        read.shift,
    )


def check_length(tokens: int, what: str) -> None:
    """Raise SettingError if a prompt has only one token (including BOS), because a single token has no context."""
    if tokens < 2:
        raise SettingError(f"{what} has one token; a circuit needs at least two")


class _Parts:
    """The nodes and edges of a circuit, computed from a frozen pass whose coefficients are leaves."""

    def __init__(self, model: MemoryModel, prompt: Prompt, cut: FrozenPass, total: Gradients, count: int) -> None:
        self.model, self.prompt, self.cut, self.total = model, prompt, cut, total
        self.coefficients = {layer: graph.coefficients for layer, graph in cut.layers.items()}
        self.constants = {layer: torch.cat(graph.constant, 1) for layer, graph in cut.layers.items()}
        self.relevance = {layer: total.coefficients[layer] * m for layer, m in self.coefficients.items()}
        self.selected = self._largest(count)  # layer -> [(row, number)]; a row is a position among the fed tokens
        self.heads: _HeadSplit | None = None

    def split_by_heads(self, apart: FrozenPass) -> None:
        """Split edges by attention head, given a pass whose coefficients and head outputs are leaves.

        Raises:
            UnsupportedModel: The heads of a layer were not found.
        """
        if len(self.cut.heads) < len(self.model.layers):
            raise UnsupportedModel(f"{self.model.name} has layers without attention heads; leave out --heads")
        self.heads = _HeadSplit(self.cut, apart, self._sources(), [self.model.layers[n].number for n in apart.heads])

    def _sources(self) -> dict[str, list[Tensor]]:
        """Return the write of every node in the form of `FrozenPass.writes`, with 0 for all other writes."""
        none = [torch.zeros_like(write, requires_grad=False) for write in self.cut.writes]
        embedding = self.cut.embedding.detach()
        sources = {f"E{row}": [_only(embedding, row), *none[1:]] for row in range(len(embedding))}
        biases = [bias.detach() for bias in self.cut.biases]
        sources["bias"] = [*none[: len(none) - len(biases)], *biases]
        first = 1
        for layer, graph in self.cut.layers.items():
            sizes = [part.shape[1] for part in graph.used]

            def write(m: Tensor, first: int = first, sizes: list[int] = sizes) -> list[Tensor]:
                return [*none[:first], *torch.split(m, sizes, 1), *none[first + len(sizes) :]]

            m = self.coefficients[layer]
            for row, number in self.selected[layer]:
                single = torch.zeros_like(m)
                single[row, number] = m[row, number]
                sources[_memory_id(str(self.model.names.name(layer, number)), row)] = write(single)
            sources[f"others{layer}"] = write(self._without_selected(layer, m))
            first += len(sizes)
        return sources

    def _largest(self, count: int) -> dict[int, list[tuple[int, int]]]:
        """Return the memories with the largest absolute relevance, by layer."""
        flat = torch.cat([relevance.abs().flatten() for relevance in self.relevance.values()])
        best = flat.topk(min(count, len(flat))).indices.sort().values
        selected: dict[int, list[tuple[int, int]]] = {layer: [] for layer in self.relevance}
        start = 0
        for layer, relevance in self.relevance.items():
            inside = best[(best >= start) & (best < start + relevance.numel())] - start
            selected[layer] = [divmod(place, relevance.shape[1]) for place in inside.tolist()]
            start += relevance.numel()
        return selected

    def embeddings(self) -> Iterator[Node]:
        """Yield one node per input token, including BOS."""
        amounts = (self.cut.embedding.detach() * self.total.embedding).sum(1).tolist()
        for row, (token, amount) in enumerate(zip(self._fed_tokens(), amounts, strict=True)):
            text = self.model.tokenizer.token_text(token)
            yield Node(f"E{row}", "embedding", None, row - self.prompt.shift, text, amount, number=token)

    def _fed_tokens(self) -> list[int]:
        return [int(token) for token in self.prompt.fed()[0].tolist()]

    def memories(self, index: Index | None) -> Iterator[Node]:
        """Yield one node per selected memory and position."""
        places = [(layer, row, number) for layer, chosen in self.selected.items() for row, number in chosen]
        memories = [self.model.names.name(layer, number) for layer, _row, number in places]
        labels = {} if index is None else name_memories(self.model, sorted(set(memories)), 1, index)
        for (layer, row, number), memory in zip(places, memories, strict=True):
            yield Node(
                _memory_id(str(memory), row),
                "memory",
                layer,
                row - self.prompt.shift,
                str(memory),
                float(self.relevance[layer][row, number]),
                float(self.coefficients[layer][row, number]),
                ", ".join(labels[memory].patterns[:2]) if memory in labels else "",
                number,
            )

    def others(self) -> Iterator[Node]:
        """Yield one node per layer for the memories that are not selected, over all positions."""
        for layer, relevance in self.relevance.items():
            amount = float(self._without_selected(layer, relevance).sum())
            yield Node(f"others{layer}", "others", layer, None, f"other memories of layer {layer}", amount)

    def _without_selected(self, layer: int, tensor: Tensor) -> Tensor:
        rest = tensor.clone()
        for row, number in self.selected[layer]:
            rest[row, number] = 0
        return rest

    def bias(self) -> Node:
        """Return one node for all biases."""
        amount = self.total.bias + sum(
            float((constant * self.total.coefficients[layer]).sum()) for layer, constant in self.constants.items()
        )
        return Node("bias", "bias", None, None, "biases", amount)

    def target_node(self, token: int) -> Node:
        """Return the node of the target, at the last position."""
        name = self.model.tokenizer.token_text(token)
        value = float(self.cut.target.detach())
        return Node("target", "target", None, len(self.prompt.tokens) - 1, name, value, number=token)

    def edges(self) -> Iterator[Edge]:
        """Yield all nonzero edges into every selected memory, every "others" node and the target."""
        yield from self._edges_into("target", lambda frozen: [frozen.target], None, 0.0)
        for layer, gradient in self.total.coefficients.items():
            for row, number in self.selected[layer]:
                single = torch.zeros_like(gradient)
                single[row, number] = gradient[row, number]
                name = str(self.model.names.name(layer, number))
                yield from self._edges_into_memories(_memory_id(name, row), layer, single)
            yield from self._edges_into_memories(f"others{layer}", layer, self._without_selected(layer, gradient))

    def _edges_into_memories(self, node: str, layer: int, cotangent: Tensor) -> Iterator[Edge]:
        """Yield the edges into some memories of a layer, given the gradient dt/dm [pos, memories], 0 elsewhere."""
        split = torch.split(cotangent, [part.shape[1] for part in self.cut.layers[layer].linear], 1)
        constant = float((self.constants[layer] * cotangent).sum())
        yield from self._edges_into(node, lambda frozen: frozen.layers[layer].linear, split, constant)

    def _edges_into(
        self,
        node: str,
        outputs: Callable[[FrozenPass], list[Tensor]],
        cotangents: Sequence[Tensor] | None,
        constant: float,
    ) -> Iterator[Edge]:
        """Yield the edges into a node. `outputs` returns the node's tensors, and `cotangents` are their gradients."""
        amounts = self._amounts(self.cut.gradients(outputs(self.cut), cotangents), constant)
        if self.heads is None:
            yield from (Edge(source, node, amount) for source, amount in amounts.items() if amount)
            return
        direct = self._amounts(self.heads.apart.gradients(outputs(self.heads.apart), cotangents), constant)
        by_head = self.heads.split(self.cut.head_gradients(outputs(self.cut), cotangents))
        for source, amount in amounts.items():
            if amount:
                yield Edge(source, node, amount, self.heads.strongest(direct[source], by_head[source]))

    def _amounts(self, gradients: Gradients, constant: float) -> dict[str, float]:
        """Return the contribution of each node: its write times the gradient with respect to it."""
        amounts = {"bias": gradients.bias + constant}
        from_tokens = (self.cut.embedding.detach() * gradients.embedding).sum(1)
        amounts |= {f"E{row}": amount for row, amount in enumerate(from_tokens.tolist())}
        for layer, gradient in gradients.coefficients.items():
            from_memories = self.coefficients[layer] * gradient
            for row, number in self.selected[layer]:
                name = str(self.model.names.name(layer, number))
                amounts[_memory_id(name, row)] = float(from_memories[row, number])
            amounts[f"others{layer}"] = float(self._without_selected(layer, from_memories).sum())
        return amounts


class _HeadSplit:
    """The contributions of every node to the output of every head, along paths without an earlier head."""

    def __init__(self, cut: FrozenPass, apart: FrozenPass, sources: dict[str, list[Tensor]], layers: list[int]) -> None:
        self.apart, self.names = apart, list(sources)
        outputs = [heads.linear for heads in apart.heads.values()]
        self.heads = [
            f"L{layer}H{head}" for layer, one in zip(layers, outputs, strict=True) for head in range(len(one))
        ]
        # outputs are linear in the writes, and gradients are linear in their cotangents, so differentiating the
        # gradient with respect to the cotangents gives the outputs for any writes
        cotangents = [torch.zeros_like(output, requires_grad=True) for output in outputs]
        gradients = torch.autograd.grad(
            outputs, apart.writes, cotangents, create_graph=True, allow_unused=True, materialize_grads=True
        )
        rows = [
            torch.autograd.grad(
                [gradient for gradient in gradients if gradient.requires_grad],
                cotangents,
                [write for write, gradient in zip(writes, gradients, strict=True) if gradient.requires_grad],
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            for writes in sources.values()
        ]
        self.outputs = [torch.stack(layer) for layer in zip(*rows, strict=True)]  # by layer: [nodes, heads, pos, d]

    def split(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return, for each node, the parts of its edge by head, from the gradients with respect to head outputs."""
        pairs = zip(self.outputs, gradients, strict=True)
        parts = torch.cat([torch.einsum("nhpd,hpd->nh", outputs, gradient) for outputs, gradient in pairs], 1)
        return dict(zip(self.names, parts, strict=True))

    def strongest(self, direct: float, by_head: Tensor) -> tuple[HeadPart, ...]:
        """Return the direct part, the strongest heads and the sum of the other heads, largest absolute weight first."""
        best = by_head.abs().topk(min(_HEADS_SHOWN, len(by_head))).indices.tolist()
        parts = [HeadPart("direct", direct), *(HeadPart(self.heads[head], float(by_head[head])) for head in best)]
        rest = by_head.clone()
        rest[best] = 0
        parts.append(HeadPart("other heads", float(rest.sum())))
        return tuple(sorted((part for part in parts if part.weight), key=lambda part: -abs(part.weight)))


def _only(tensor: Tensor, row: int) -> Tensor:
    """Return the tensor with 0 in all rows except `row`."""
    result = torch.zeros_like(tensor)
    result[row] = tensor[row]
    return result


def _memory_id(name: str, row: int) -> str:
    return f"{name}@{row}"
