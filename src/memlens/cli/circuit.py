"""Verbs about connections between memories: `circuit` for a prompt or a task, `wires` for one memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.text import Text

from memlens.cli.options import (
    WholeNumber,
    argument,
    flag,
    force_option,
    given_options,
    index_argument,
    location_option,
    model_or_index_argument,
    open_model_options,
    option,
    refuse_options,
    settings_options,
    token_options,
    verb,
)
from memlens.cli.screen import ProgressBar, Screen, check_outputs, command_line, fit_items
from memlens.errors import SettingError
from memlens.settings import TASK, TaskSettings
from memlens.text import cut_left, cut_right, number, percent, quoted, visible

if TYPE_CHECKING:
    from memlens.circuits.result import Circuit, Edge, Node
    from memlens.circuits.task import TaskCircuit
    from memlens.circuits.wires import Wires
    from memlens.index.reader import Index
    from memlens.models.memory_model import MemoryModel

_PROMPT = "Circuit of a prompt"
_SOURCES = 3  # number of printed edges into a memory, strongest first
_REPORTED = 200  # number of memories in the report of a task's circuit
_MEMORIES = 20  # number of printed memories of a task's circuit


@verb(json=True)
@model_or_index_argument
@argument("prompt", required=False, metavar="PROMPT", help="Text whose predicted next token is explained.")
@token_options(_PROMPT)
@option("--nodes", type=WholeNumber(1), default=40, panel=_PROMPT, metavar="N", help="Number of memories in the graph.")
@option(
    "--gate",
    type=click.Choice(("value", "half")),
    default="value",
    panel=_PROMPT,
    metavar="value|half",
    help="How to divide the relevance of a gated memory: all to the up product (value), or half to the gate (half).",
)
@flag("--heads", panel=_PROMPT, help="Also show which attention heads carry each edge.")
@option("--svg", type=Path, panel=_PROMPT, metavar="FILE", help="Draw the graph as an SVG file.")
@option(
    "--pairs",
    type=Path,
    panel=TASK,
    metavar="FILE",
    help="File of prompt pairs (.jsonl, .json or .csv) with the fields clean_prefix, patch_prefix, clean_answer and "
    "patch_answer.",
)
@option(
    "--held-out",
    type=Path,
    panel=TASK,
    metavar="FILE",
    help="File of pairs for measuring the circuit. Default: a part of --pairs.",
)
@settings_options(TaskSettings)
@option("--report", type=Path, panel=TASK, metavar="FILE", help="Write the result to an HTML page.")
@option(
    "--save",
    type=Path,
    metavar="FILE",
    help="Save the graph for Neuronpedia. With --pairs, save an intervention for `memlens trace --file` instead.",
)
@force_option
@open_model_options
def circuit(
    screen: Screen,
    model: str,
    prompt: str | None,
    svg: Path | None,
    pairs: Path | None,
    held_out: Path | None,
    report: Path | None,
    save: Path | None,
    force: bool,
    place: dict[str, Any],
    **options: Any,
) -> None:
    """Find the memories behind a prediction or a task, and the edges between them."""
    from memlens.circuits.export import is_graph, is_svg
    from memlens.reports.task_page import is_task_page
    from memlens.tracer.intervention import is_intervention

    if (prompt is None) == (pairs is None):
        raise SettingError("name either a PROMPT or --pairs FILE")
    if pairs is None:
        refuse_options(given_options(TASK), "has no effect with a prompt")
    else:
        refuse_options(given_options(_PROMPT), "has no effect with --pairs")
    if held_out is not None:
        refuse_options(["--test"], "has no effect with --held-out")
    if (method := options.get("method")) in ("relevance", "patching"):
        refuse_options(["--steps"], f"has no effect with --method {method}")
    is_ours = is_graph if pairs is None else is_intervention
    check_outputs({"--save": (save, is_ours), "--svg": (svg, is_svg), "--report": (report, is_task_page)}, force=force)
    if pairs is None:
        _show_prompt(screen, model, prompt or "", {"save": save, "svg": svg}, force, place, options)
    else:
        _show_task(screen, model, pairs, held_out, save, report, force, place, options)


def _show_prompt(
    screen: Screen,
    model: str,
    prompt: str,
    files: dict[str, Path | None],
    force: bool,
    place: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Find, save and print the circuit of a prompt."""
    from memlens.circuits.export import save_graph, save_svg
    from memlens.circuits.graph import circuit as find_circuit
    from memlens.tracer.prompt import open_model

    loaded, index = open_model(model, **place)
    graph = find_circuit(loaded, prompt, index=index, **options)
    for name, write in (("save", save_graph), ("svg", save_svg)):
        if (path := files[name]) is not None:
            write(graph, path, force=force)
            screen.note(f"saved the circuit in {path}")
    screen.json(graph) if screen.as_json else _print_circuit(screen, graph)


def _print_circuit(screen: Screen, graph: Circuit) -> None:
    """Print the target, its parts, and the memories by layer with their strongest sources."""
    difference = [] if graph.against is None else [Text.assemble(("minus ", "dim"), quoted(graph.against))]
    predicted = Text.assemble(("logit of ", "dim"), (quoted(graph.token), "bold"))
    screen.flow(
        [
            Text(cut_left(visible(graph.prompt), max(20, min(screen.out.width, 80) - 30)), "bold"),
            predicted,
            *difference,
            Text(number(graph.value)),
        ],
    )
    tokens = [node for node in graph.nodes if node.kind == "embedding"]
    biases = sum(node.relevance for node in graph.nodes if node.kind == "bias")
    parts = {"tokens": sum(node.relevance for node in tokens), "biases": biases}
    screen.flow(
        [
            *(Text.assemble((f"{name} ", "dim"), graph.share(amount)) for name, amount in parts.items()),
            Text("add up to the target; memories are on the way from tokens to target", "dim"),
        ],
    )
    screen.result()
    names = {node.id: node for node in graph.nodes}
    for layer in sorted({node.layer for node in graph.memories if node.layer is not None}, reverse=True):
        total = sum(node.relevance for node in graph.nodes if node.layer == layer)
        heading = Text.assemble((f"layer {layer}", "bold"), (f"   all its memories {graph.share(total)}", "dim"))
        screen.result(heading)
        for node in [node for node in graph.memories if node.layer == layer]:
            _print_memory(screen, graph, node, names)
    screen.result(Text("tokens", "bold"))
    shares = [Text(f"{quoted(node.name, 14)} {graph.share(node.relevance)}") for node in tokens]
    screen.flow([Text(" "), *shares], gap="  ")


def _print_memory(screen: Screen, graph: Circuit, node: Node, names: dict[str, Node]) -> None:
    width = min(screen.out.width, 100_000)
    token = quoted(_token_at(graph, node), 14)
    head = f"  {graph.share(node.relevance):>7}  {node.name:<8} at {token:<14} m {number(node.coefficient or 0.0)}"
    room = width - Text(head).cell_len - 2
    label = f"  {cut_right(visible(node.label), room)}" if node.label and room > 8 else ""
    screen.result(Text.assemble(head, (label, "cyan")))
    sources = [edge for edge in graph.edges_into(node.id) if edge.weight][:_SOURCES]
    items = [
        Text(f"{_source_name(names[edge.source], graph)} {graph.share(edge.weight)}{_strongest_head(edge)}")
        for edge in sources
    ]
    screen.result(Text.assemble(("           from ", "dim"), fit_items(items, gap=", ")(width - 16)))


def _strongest_head(edge: Edge) -> str:
    """Return " by L3H2" if head L3H2 carries the largest part of the edge."""
    if not edge.heads or edge.heads[0].head in ("direct", "other heads"):
        return ""
    return f" by {edge.heads[0].head}"


def _token_at(graph: Circuit, node: Node) -> str:
    row = len(graph.tokens) - 1 if node.position is None else node.position + graph.shift
    return graph.tokens[row]


def _source_name(node: Node, graph: Circuit) -> str:
    if node.kind == "embedding":
        return quoted(node.name, 14)
    if node.kind == "others":
        return f"rest of layer {node.layer}"
    return node.name if node.kind == "bias" else f"{node.name} at {quoted(_token_at(graph, node), 10)}"


def _show_task(
    screen: Screen,
    model: str,
    pairs: Path,
    held_out: Path | None,
    save: Path | None,
    report: Path | None,
    force: bool,
    place: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Find and print the circuit of a task, and save it as an intervention."""
    from memlens.circuits.task import read_pairs, task_circuit
    from memlens.tracer.prompt import open_model

    TaskSettings(**options)  # reject an invalid option before the model is loaded
    rows = read_pairs(pairs)
    held_out_rows = None if held_out is None else read_pairs(held_out)
    with ProgressBar(screen) as progress:
        loaded, index = open_model(model, **place)
        result = task_circuit(loaded, rows, held_out=held_out_rows, progress=progress, **options)
    if save is not None:
        result.ablation().save(save, loaded, force=force)
        screen.note(f"saved the circuit in {save}")
        screen.note(f"next: {command_line('trace', model, 'PROMPT', '--file', save)}")
    if report is not None:
        _write_report(loaded, index, result, pairs.stem, report, force)
        screen.note(f"wrote the page {report}")
    screen.json(result) if screen.as_json else _print_task(screen, loaded, index, result)


def _write_report(
    model: MemoryModel, index: Index | None, result: TaskCircuit, task: str, path: Path, force: bool
) -> None:
    """Write the page of a task's circuit with its first 200 memories."""
    from memlens.reports.task_page import TaskMemory, write_task_page
    from memlens.tracer.result import name_memories

    memories = result.memories[:_REPORTED]
    names = name_memories(model, memories, 5, index)
    text = model.tokenizer.token_text
    rows = [
        TaskMemory(
            str(memory),
            result.scores[memory],
            tuple(text(token) for token in names[memory].top),
            tuple(names[memory].patterns),
            names[memory].triggers.get("top") or "",
        )
        for memory in memories
    ]
    write_task_page(result, rows, model.name, task, path, force=force)


def _print_task(screen: Screen, model: MemoryModel, index: Index | None, result: TaskCircuit) -> None:
    screen.paragraph(
        f"{visible(model.name)} prefers the clean answer in {result.accuracy:.0%} of {result.pairs} pairs; "
        f"{result.held_out} pairs are held out. Logit difference {number(result.metric)}; "
        f"{number(result.ablated)} with every memory at its mean over patch prompts"
    )
    screen.result()
    rows: list[list[Any]] = [
        [
            Text(f"{point.size:,}", "bold" if point == result.smallest else ""),
            f"{point.share:.2%}",
            f"{point.faithfulness:.2f}",
            Text(f"{point.low:.2f} to {point.high:.2f}", "dim"),
            f"{point.complement:.2f}",
            Text(f"{point.complement_low:.2f} to {point.complement_high:.2f}", "dim"),
            f"{point.random:.2f}",
        ]
        for point in result.curve
    ]
    screen.table(["memories", "share", "faithfulness", "95% interval", "complement", "95% interval", "random"], rows)
    screen.result()
    if result.smallest is None:
        screen.paragraph(
            "No size has a faithfulness between 0.9 and 1.1. The circuit is taken to be the "
            f"{len(result.memories):,} memories with the largest scores"
        )
    else:
        screen.paragraph(
            f"Smallest faithful circuit: {result.smallest.size} memories, faithfulness "
            f"{result.smallest.faithfulness:.2f}, complement {result.smallest.complement:.2f}"
        )
    screen.result()
    _print_task_memories(screen, model, index, result)


def _print_task_memories(screen: Screen, model: MemoryModel, index: Index | None, result: TaskCircuit) -> None:
    from memlens.tracer.result import name_memories

    memories = result.memories[:_MEMORIES]
    names = name_memories(model, memories, 3, index)
    rows: list[list[Any]] = []
    for memory in memories:
        tokens = [Text(quoted(model.tokenizer.token_text(one), 12), "cyan") for one in names[memory].top]
        cells: list[Any] = [str(memory), f"{result.scores[memory]:+.3f}", fit_items(tokens, gap=" ")]
        if index is not None:
            trigger = names[memory].triggers.get("top", "")
            cells += ["; ".join(names[memory].patterns), Text(visible(trigger), "dim")]
        rows.append(cells)
    screen.table(["memory", "score", "promotes", *(["known as", "top trigger"] if index is not None else [])], rows)
    if len(result.memories) > len(memories):
        screen.note(f"{len(result.memories) - len(memories):,} more memories are listed with --json")


@verb(json=True)
@index_argument
@argument("memory", metavar="MEMORY", help="Name of the memory, like L3N51.")
@option("--top", type=WholeNumber(1), default=10, metavar="N", help="Number of tokens and memories to list.")
@location_option()
def wires(screen: Screen, index: str, memory: str, top: int, model: str | None) -> None:
    """Show possible connections of a memory to tokens and other memories, computed from weights alone."""
    from memlens.circuits.wires import wires as find_wires
    from memlens.index.reader import Index

    opened = Index(index)
    opened.check(memory)  # reject an unknown memory before the model is loaded
    print_wires(screen, find_wires(opened, opened.load_model(model), memory, top))


def print_wires(screen: Screen, result: Wires) -> None:
    """Print the tokens and memories that the key responds to, and the memories that respond to the value."""
    if screen.as_json:
        screen.json(result)
        return
    screen.result(Text(f"{result.memory} reads tokens", "bold"))
    tokens = [[quoted(wire.text, 22), wire.by, f"{wire.cosine:+.3f}", f"{wire.z:+.1f}"] for wire in result.tokens]
    screen.table(["token", "by", "cosine", "z"], tokens)
    for heading, found in (("reads earlier memories", result.reads), ("feeds later memories", result.feeds)):
        screen.result()
        screen.result(Text(f"{result.memory} {heading}", "bold"))
        rows: list[list[Any]] = [
            [
                str(wire.memory),
                wire.by,
                f"{wire.cosine:+.3f}",
                f"{wire.z:+.1f}",
                percent(wire.shared),
                Text(visible(wire.summary or ""), "cyan"),
            ]
            for wire in found
        ]
        screen.table(["memory", "by", "cosine", "z", "shared triggers", "summary"], rows)
    screen.note(
        "z is the cosine times the square root of the width. For random directions, z has a standard deviation of 1."
    )
