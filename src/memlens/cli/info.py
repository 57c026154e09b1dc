"""`memlens info`: a model as memories, the proof of it, and what a scan would take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from memlens.cli.options import Device, Dtype, Json, Model, Quiet, Threads, Verbose
from memlens.cli.screen import Screen
from memlens.settings import ScanSettings
from memlens.text import duration, plain, size, visible

if TYPE_CHECKING:
    from memlens.models.info import ModelInfo
    from memlens.models.proof import Proof
    from memlens.scanner.resources import ScanEstimate

# the checks of models/proof.py in the paper's letters
_CHECKS = {
    "coefficients": "m = f(x K + b)",
    "output": "m V + b = the block's output",
    "addition": "o = r + y",
    "stream": "the block reads the stream",
    "norms": "norms by their formula",
    "prediction": "top(o) = the model's own",
}
_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_GATED = "m = f(x G) * (x U)"


def info(
    model: Model,
    device: Device = "auto",
    dtype: Dtype = "float32",
    threads: Threads = None,
    estimate: Annotated[
        bool, typer.Option("--estimate/--no-estimate", help="Measure for a second how fast a scan would be.")
    ] = True,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show a model as memories, with proof, and what a scan takes here."""
    screen = Screen(as_json, quiet, verbose)
    from memlens.models.info import describe
    from memlens.models.load import load
    from memlens.pool import usable_cores
    from memlens.scanner.resources import estimate_scan

    settings = ScanSettings(threads=usable_cores() if threads is None else threads)
    if estimate:
        _note_memory(screen, model, dtype, settings)
    loaded = load(model, device=device, dtype=dtype)
    facts = describe(loaded)
    screen.detail("measuring the speed of a scan on random tokens …" if estimate else "no estimate asked for")
    cost = estimate_scan(loaded, settings) if estimate else None
    if as_json:
        screen.json(_as_json(facts, cost))
    else:
        _print(screen, facts, cost)


def _note_memory(screen: Screen, model: str, dtype: str, settings: ScanSettings) -> None:
    """The memory that a scan will take, before anything is loaded."""
    from memlens.models.info import sizes_before_loading
    from memlens.scanner.resources import free_memory, memory_before_loading

    sizes = sizes_before_loading(model)
    if sizes is None:
        return
    needed = memory_before_loading(sizes, settings, _BYTES.get(dtype, 4))
    parts = ", ".join(f"{name} {size(count)}" for name, count in needed.items() if count)
    total, free = sum(needed.values()), free_memory()
    advice = "" if total < free else "; try --dtype bfloat16, or scan with --layer-budget or --device-map"
    screen.note(f"before loading: a scan takes about {size(total)} of memory ({parts}); {size(free)} are free{advice}")


def _as_json(facts: ModelInfo, cost: ScanEstimate | None) -> dict[str, Any]:
    scan = None
    if cost is not None:
        scan = plain(cost) | {"seconds_per_million": cost.seconds_per_million, "memory_bytes": cost.memory_bytes}
    return plain(facts) | {"total_memories": facts.total_memories, "scan": scan}


def _print(screen: Screen, facts: ModelInfo, cost: ScanEstimate | None) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for name, fact in _facts(facts).items():
        table.add_row(Text(name), Text(visible(fact)))
    if facts.proof is not None:
        words = f"largest relative deviations ({facts.proof.tolerance:g} is allowed):"
        table.add_row(Text("proof"), Text(words))
        table.add_row(Text(), _proof(facts.proof, facts.gated))
    if cost is not None:
        table.add_row(Text("a scan here"), Text("\n".join(_cost(cost))))
    screen.result(table)


def _facts(facts: ModelInfo) -> dict[str, str]:
    sizes = sorted(set(facts.memories))
    each = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    ends = "triggers at both ends" if facts.signed else "top triggers"
    return {
        "model": f"{facts.name} ({facts.family})",
        "memories": f"{facts.total_memories:,}: {facts.layers} layers of {each}, each {facts.width:,} wide",
        "activation": f"{facts.activation}, {'gated' if facts.gated else 'not gated'}; {ends} are kept by default",
        "block": "parallel to attention" if facts.parallel else "after attention (sequential)",
        "norms": f"before {_norm(facts.input_norm)}, after {_norm(facts.post_norm)}, final {_norm(facts.final_norm)}",
        "reading": f"values can be read {' or '.join(facts.readings)} (the first is the default)",
        "vocabulary": f"{facts.vocabulary:,} tokens; output embedding {'tied' if facts.tied else 'not tied'} to input",
        "context": "no limit" if facts.context is None else f"{facts.context:,} tokens",
        "BOS": _bos(facts),
        "parameters": f"{facts.parameters:,} as {facts.dtype} on {facts.device}",
    }


def _norm(name: str | None) -> str:
    return name or "none"


def _bos(facts: ModelInfo) -> str:
    if facts.bos is None:
        return "none"
    return f"{facts.bos}, {'fed' if facts.adds_bos else 'not fed'} before a text, as the tokenizer does"


def _proof(proof: Proof, gated: bool) -> Table:
    lines = Table.grid(padding=(0, 2))
    for check, words in _CHECKS.items():
        shown = _GATED if gated and check == "coefficients" else words
        lines.add_row(Text(shown), Text(f"{getattr(proof, check):.1e}"))
    return lines


def _cost(cost: ScanEstimate) -> list[str]:
    parts = f"weights {size(cost.weights_bytes)}, lists {size(cost.lists_bytes)}, a batch {size(cost.batch_bytes)}"
    threads = f"{cost.threads} thread{'s' * (cost.threads > 1)}"
    return [
        f"about {cost.tokens_per_second:,.0f} tokens/s with {threads}; a million: {duration(cost.seconds_per_million)}",
        f"about {size(cost.memory_bytes)} of memory ({parts}) beside the program itself",
    ]
