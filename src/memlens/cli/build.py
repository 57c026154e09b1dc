"""Verbs that build an index step by step: `info`, `scan`, `merge`, `values`, `patterns` and `roles`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

import memlens
from memlens.cli.explore import suggest_memory
from memlens.cli.options import (
    argument,
    corpus_argument,
    device_option,
    dtype_option,
    flag,
    given_options,
    index_argument,
    location_option,
    model_argument,
    option,
    out_option,
    refuse_options,
    refuse_others,
    refuse_unused_column,
    resume_option,
    settings_options,
    states_option,
    threads_option,
    verb,
)
from memlens.cli.screen import ProgressBar, Screen, command_line
from memlens.errors import SettingError
from memlens.memory import ROLES
from memlens.settings import (
    CorpusSettings,
    PatternSettings,
    RoleSettings,
    RunSettings,
    ScanRunSettings,
    ScanSettings,
    ValueSettings,
)
from memlens.text import duration, number, percent, plain, quoted, size, visible

if TYPE_CHECKING:
    from memlens.index.shards import Shard
    from memlens.models.info import ModelInfo
    from memlens.models.proof import Proof
    from memlens.scanner.resources import ScanEstimate

# the checks of models/proof.py in the paper's notation
_CHECKS = {
    "coefficients": "m = f(x K + b)",
    "output": "m V + b = the block's output",
    "addition": "o = r + y",
    "stream": "the block reads the residual stream",
    "norms": "norms match their formula",
    "prediction": "top(o) = the model's prediction",
}
_GATED = "m = f(x G) * (x U)"
_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@verb(json=True)
@model_argument
@device_option
@dtype_option
@threads_option
@option(
    "--estimate/--no-estimate",
    default=True,
    help="Measure the speed of a scan, which takes about a second. Default: yes.",
)
def info(screen: Screen, model: str, device: str, dtype: str, threads: int | None, estimate: bool) -> None:
    """Describe a model, verify that its memories are read correctly, and estimate the cost of a scan."""
    from memlens.models.info import describe, faster_dtype_note
    from memlens.models.load import load
    from memlens.pool import usable_cores
    from memlens.scanner.resources import estimate_scan

    settings = ScanSettings(threads=usable_cores() if threads is None else threads)
    if estimate:
        _note_memory(screen, model, dtype)
    loaded = load(model, device=device, dtype=dtype)
    facts = describe(loaded)
    if line := faster_dtype_note(loaded):
        screen.note(line)
    if estimate:
        screen.detail("measuring the speed of a scan on random tokens …")
    cost = estimate_scan(loaded, settings) if estimate else None
    if screen.as_json:
        scan = None
        if cost is not None:
            scan = plain(cost) | {"seconds_per_million": cost.seconds_per_million, "memory_bytes": cost.memory_bytes}
        screen.json(plain(facts) | {"total_memories": facts.total_memories, "scan": scan})
    else:
        _print_model(screen, facts, cost)


def _note_memory(screen: Screen, model: str, dtype: str) -> None:
    """Before the model is loaded, print how much memory its weights need."""
    from memlens.models.info import count_parameters
    from memlens.scanner.resources import free_memory

    if (parameters := count_parameters(model)) is not None:
        needed, free = parameters * _BYTES.get(dtype, 4), free_memory()
        advice = "" if needed < free else "; try --dtype bfloat16 or --device-map"
        screen.note(f"the weights need about {size(needed)} of memory; {size(free)} are free{advice}")


def _print_model(screen: Screen, facts: ModelInfo, cost: ScanEstimate | None) -> None:
    sizes = sorted(set(facts.memories))
    each = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    ends = "top and bottom triggers" if facts.signed else "top triggers"
    norms = {"input": facts.input_norm, "output": facts.post_norm, "final": facts.final_norm}
    bos = "none"
    if facts.bos is not None:
        bos = f"{facts.bos}, {'added' if facts.adds_bos else 'not added'} by the tokenizer"
    lines: dict[str, Any] = {
        "model": f"{facts.name} ({facts.family})",
        "memories": f"{facts.total_memories:,}: {facts.layers} layers of {each}, width {facts.width:,}",
        "activation": f"{facts.activation}, {'gated' if facts.gated else 'not gated'}; a scan keeps {ends} by default",
        "block": "parallel to attention" if facts.parallel else "after attention (sequential)",
        "norms": ", ".join(f"{place} {name or 'none'}" for place, name in norms.items()),
        "reading": f"values can be read {' or '.join(facts.readings)} (default: {facts.readings[0]})",
        "vocabulary": f"{facts.vocabulary:,} tokens; output embedding {'tied' if facts.tied else 'not tied'} to input",
        "context": "no limit" if facts.context is None else f"{facts.context:,} tokens",
        "BOS": bos,
        "parameters": f"{facts.parameters:,} as {facts.dtype} on {facts.device}",
    }
    if facts.proof is not None:
        lines["proof"] = f"largest relative deviations (limit {facts.proof.tolerance:g}):"
        lines[""] = _proof_table(facts.proof, facts.gated)
    if cost is not None:
        threads = f"{cost.threads} thread{'s' * (cost.threads > 1)}"
        million = duration(cost.seconds_per_million)
        parts = f"weights {size(cost.weights_bytes)}, lists {size(cost.lists_bytes)}, batch {size(cost.batch_bytes)}"
        lines["scan speed"] = (
            f"about {cost.tokens_per_second:,.0f} tokens/s on {threads} ({million} per million tokens)"
        )
        lines["scan memory"] = f"about {size(cost.memory_bytes)} ({parts}) plus the program itself"
    screen.facts(lines)


def _proof_table(proof: Proof, gated: bool) -> Table:
    table = Table.grid(padding=(0, 2))
    for check, formula in _CHECKS.items():
        shown = _GATED if gated and check == "coefficients" else formula
        table.add_row(Text(shown), Text(f"{getattr(proof, check):.1e}"))
    return table


@verb(json=True)
@model_argument
@corpus_argument
@out_option
@settings_options(ScanSettings, CorpusSettings, ScanRunSettings)
@device_option
@dtype_option
@resume_option
def scan(
    screen: Screen, model: str, corpus: tuple[str, ...], out: str, device: str, dtype: str, resume: bool, **options: Any
) -> None:
    """Find the exact top triggers of every memory in one pass over a corpus."""
    refuse_unused_column(options, corpus)
    with ProgressBar(screen) as progress:
        from memlens.index.staging import has_resumable_scan, resumed_hardware_warning

        if resume and (line := resumed_hardware_warning(Path(out))):
            screen.note(line)
        run: Any = memlens.scan  # returns an Index, or a Shard if --shard is given
        try:
            result = run(
                model, corpus, out=out, resume=resume, device=device, dtype=dtype, progress=progress, **options
            )
        except KeyboardInterrupt as error:
            if resume:
                raise
            advice = "run the command again without --fresh to resume"
            raise type(error)(f"interrupted; {advice if has_resumable_scan(Path(out)) else 'start over'}") from None
    if progress.steps == ["model"]:
        screen.note(f"{out} is already complete, so nothing was done")
    if "shard" in options:
        _print_shard(screen, result)
    else:
        _print_index(screen, result)


@verb(json=True)
@argument("shards", nargs=-1, required=True, metavar="SHARD", help="Folders that `memlens scan --shard I/N` wrote.")
@out_option
@resume_option
def merge(screen: Screen, shards: tuple[str, ...], out: str, resume: bool) -> None:
    """Merge the shards of a scan, in any order, into one index."""
    with ProgressBar(screen, first="check") as progress:
        index = memlens.merge(shards, out=out, resume=resume, progress=progress)
    from memlens.index.staging import mixed_hardware_warning

    if line := mixed_hardware_warning(index.manifest.scanned_with):
        screen.note(line)
    _print_index(screen, index)


def _print_index(screen: Screen, index: memlens.Index) -> None:
    from memlens.index.memory import summarize

    summary = summarize(index)
    if screen.as_json:
        screen.json(summary)
        return
    if screen.quiet:
        return
    dead = [f"{count:,} in layer {layer}" for layer, count in summary["dead"].items() if count]
    cut = f" ({summary['cut_sentences']:,} cut to fit, {summary['cut_tokens']:,} tokens lost)"
    screen.facts(
        {
            "model": summary["model"],
            "memories": f"{summary['memories']:,} in {len(summary['layers'])} layers",
            "dead": f"{', '.join(dead)} (never active on this corpus)" if dead else "none",
            "sentences": f"{summary['sentences']:,}{cut if summary['cut_sentences'] else ''}",
            "tokens": f"{summary['tokens']:,}",
            "prefixes": f"{summary['prefixes']:,} ({summary['repeated_prefixes']:,} repeated prefixes left out)",
            "index": summary["index"],
        }
    )
    screen.note(f"next: {command_line('show', index.folder, suggest_memory(index))}")


def _print_shard(screen: Screen, shard: Shard) -> None:
    if screen.as_json:
        counts = shard.document.counts
        screen.json({"folder": str(shard.folder), "shard": shard.id.number, "of": shard.id.of, **counts})
        return
    if not screen.quiet:
        screen.result(f"shard {shard.id} is complete: {visible(str(shard.folder))}")
    screen.note(f"next: when all {shard.id.of} shards are complete, run `memlens merge`")


@verb(json=True)
@index_argument
@settings_options(ValueSettings, RunSettings)
@location_option()
def values(screen: Screen, index: str, model: str | None, **options: Any) -> None:
    """Find the tokens that every value promotes and demotes."""
    opened = memlens.Index(index)
    with ProgressBar(screen) as progress:
        from memlens.index.memory import summarize_values

        memlens.values(opened, model=model, progress=progress, **options)
    summary = summarize_values(opened)
    if screen.as_json:
        screen.json(summary)
        return
    if screen.quiet:
        return
    agree, compared = summary["agree"], summary["with_target"]
    over = "" if summary["vocabulary"] == "all" else f", over {summary['vocabulary']} tokens"
    facts = {
        "model": summary["model"],
        "values": f"{summary['memories']:,}, read {summary['reading']}, {summary['top']} tokens at each end{over}",
        "max p": f"median {number(summary['median_max_p'])} ({summary['max_p_times_uniform']:.2f} x uniform)",
        "clear lists": _clear_lists(summary["clear"]),
        "agreement": f"{agree:,} of {compared:,} ({percent(agree / compared if compared else None)}): "
        "the top token is the token after the top trigger",
    }
    if summary["undertrained_on_top"]:
        share = percent(summary["undertrained_on_top"] / summary["memories"])
        facts["undertrained"] = f"for {share}, the top token is undertrained (see --vocabulary trained)"
    screen.facts(facts)
    screen.result()
    screen.result(Text("most confident values", "dim"))
    rows = [
        [row["name"], Text(quoted(row["text"], 24), "cyan"), number(row["p"]), _yes_or_no(row["agrees"])]
        for row in summary["most_confident"]
    ]
    screen.table(["memory", "token", "p", "agrees"], rows)
    screen.note(f"next: {command_line('experiment', summary['index'], 'all')}")


def _clear_lists(layers: list[dict[str, int]]) -> str:
    """Return the share of token lists that are clearer than a random direction's, overall and by layer."""
    shares = [row["clear"] / row["memories"] for row in layers]
    total = sum(row["clear"] for row in layers) / sum(row["memories"] for row in layers)
    return f"{percent(total)}, by layer {percent(min(shares))} to {percent(max(shares))} (random directions: 1%)"


def _yes_or_no(agrees: bool | None) -> Text | None:
    return None if agrees is None else Text("yes", "green") if agrees else Text("no")


_NAMES = 12  # memories of a shared pattern to list on a terminal
_BROWSE = "List instead of compute (choose one)"
_EXPLAIN = "Ask a language model for descriptions"


@verb(json=True)
@index_argument
@settings_options(PatternSettings)
@option(
    "--related",
    panel=_BROWSE,
    metavar="MEMORY",
    help="List memories that share triggers, tokens or patterns with this memory.",
)
@flag("--shared", panel=_BROWSE, help="List patterns shared by several memories.")
@flag("--duplicates", panel=_BROWSE, help="List pairs of memories that share most of their triggers.")
@option("--limit", type=int, default=20, panel=_BROWSE, metavar="N", help="Number of rows to list.")
@location_option()
@states_option
@option(
    "--explainer", panel=_EXPLAIN, metavar="URL", help="URL of an OpenAI-compatible server that describes memories."
)
@option(
    "--explainer-model",
    default="default",
    panel=_EXPLAIN,
    metavar="NAME",
    help="Name of the language model on the server given by --explainer.",
)
@option("--memory", multiple=True, panel=_EXPLAIN, metavar="MEMORY", help="Name of a memory to describe. Repeatable.")
def patterns(
    screen: Screen,
    index: str,
    related: str | None,
    shared: bool,
    duplicates: bool,
    limit: int,
    model: str | None,
    states: bool,
    explainer: str | None,
    explainer_model: str,
    memory: tuple[str, ...],
    **options: Any,
) -> None:
    """Find what the triggers of each memory have in common, or list related memories."""
    modes = {"--related": ["--limit"], "--shared": ["--limit"], "--duplicates": ["--limit"]}
    modes["--explainer"] = ["--explainer-model", "--memory", "--seed"]
    selected = [name for name in given_options() if name in modes]
    if len(selected) > 1:
        raise SettingError(f"{' and '.join(selected)} exclude each other; choose one")
    if selected:
        refuse_others(selected[0], [*selected, *modes[selected[0]]])
    else:
        refuse_options(["--limit"], "has no effect without --related, --shared or --duplicates")
        refuse_options(["--explainer-model", "--memory"], "has no effect without --explainer")
    if not states:
        refuse_options(["--model"], "has no effect with --no-states")
    opened = memlens.Index(index)
    if explainer is not None:
        _explain(screen, opened, explainer, explainer_model, memory, options.get("seed", 0))
    elif selected:
        _list_related(screen, opened, related, shared, limit)
    else:
        with ProgressBar(screen) as progress:
            memlens.patterns(opened, model=model, states=states, progress=progress, **options)
        noted = opened.manifest.patterns
        if states and noted is not None and "states" not in noted.content:
            screen.note(
                "the model was not found, so its states were not searched for subjects; locate the model with --model"
            )
        if not opened.has("tokens"):
            screen.note(
                "to also find patterns like months and countries, run `memlens values` and then this command again"
            )
        _print_patterns_by_layer(screen, opened)


def _print_patterns_by_layer(screen: Screen, index: memlens.Index) -> None:
    from memlens.experiments.patterns import KINDS, compute
    from memlens.pattern.table import describe_chance, describe_ends

    layers = compute(index)
    settings = index.manifest.patterns
    assert settings is not None  # the index has patterns, because the caller has computed them
    if screen.as_json:
        screen.json({"index": str(index.folder), **settings.content, "layers": layers})
        return
    if screen.quiet:
        return
    rows = [
        [layer["layer"], layer["memories"], layer["patterned_memories"]]
        + [percent(layer[kind] / layer["prefixes"]) if layer["prefixes"] else "" for kind in KINDS]
        for layer in layers
    ]
    screen.table(["layer", "memories", "with pattern", "shallow", "semantic", "both", "not covered"], rows)
    for sentence in (*describe_chance(settings), *describe_ends(settings)):
        screen.note(sentence)


def _list_related(screen: Screen, index: memlens.Index, related: str | None, shared: bool, limit: int) -> None:
    """List the memories related to `related`, patterns if `shared` is True, and otherwise duplicates."""
    if limit < 1:
        raise SettingError(f"--limit is {limit}; it must be 1 or more")
    from memlens.pattern.related import duplicates, related_memories, shared_patterns

    if related is not None:
        memories = related_memories(index, related, limit)
        heads = ["memory", "equal triggers", "equal tokens", "equal patterns"]
        rows: list[list[Any]] = [
            [str(one.name), one.triggers, "" if one.tokens is None else one.tokens, ", ".join(one.patterns)]
            for one in memories
        ]
        screen.records(memories, heads, rows, wrap=True)
    elif shared:
        patterns = shared_patterns(index, limit)
        most = _NAMES if screen.out.is_terminal else None
        rows = []
        for one in patterns:
            more = f" and {len(one.memories) - most:,} more" if most and len(one.memories) > most else ""
            rows.append([len(one.memories), one.description, one.kind, " ".join(map(str, one.memories[:most])) + more])
        screen.records(patterns, ["memories", "pattern", "kind", "which"], rows, wrap=True)
    else:
        pairs = duplicates(index)[:limit]
        rows = [[str(pair.one), str(pair.other), pair.shared, f"{pair.jaccard:.2f}"] for pair in pairs]
        screen.records(pairs, ["memory", "other", "equal triggers", "Jaccard"], rows, wrap=True)


def _explain(screen: Screen, index: memlens.Index, url: str, model: str, memories: Sequence[str], seed: int) -> None:
    from memlens.pattern.explainer import Explainer, propose

    if not memories:
        raise SettingError("--explainer needs the memories to describe; add --memory L3N51")
    names = [index.check(name) for name in memories]
    endpoint = Explainer(url, model)
    proposals = [propose(index, name, endpoint, seed) for name in names]
    rows = [[str(one.memory), one.by, one.detection_text, one.description] for one in proposals]
    screen.records(proposals, ["memory", "proposed by", "detection", "proposal"], rows, wrap=True)


_ROLE_WIDTH, _COUNT_WIDTH = 18, 8  # column widths of the table of roles by layer


@verb(json=True)
@index_argument
@settings_options(RoleSettings)
@location_option()
@flag("--effects", help="Measure how predictions change without the memories of each role.")
def roles(screen: Screen, index: str, model: str | None, effects: bool, **options: Any) -> None:
    """Classify every memory by its role: token, n-gram, positional, entropy and others."""
    opened = memlens.Index(index)
    if effects:
        refuse_others("--effects", ["--effects", "--seed", "--model"])
        _print_effects(screen, opened, model, RoleSettings(**options).seed)
        return
    with ProgressBar(screen) as progress:
        memlens.roles(opened, model=model, progress=progress, **options)
    from memlens.role.table import roles_by_layer

    layers = roles_by_layer(opened)
    if screen.as_json:
        screen.json({"index": str(opened.folder), **opened.manifest.content["roles"], "layers": layers})
        return
    if screen.quiet:
        return
    shown = ["memories", *(role for role in ROLES if any(layer.roles[role] for layer in layers)), "none"]
    per_table = max((screen.out.width - _ROLE_WIDTH) // _COUNT_WIDTH, 1)
    for start in range(0, len(layers), per_table):
        part = layers[start : start + per_table]
        counts = [{"memories": layer.memories, **layer.roles, "none": layer.none} for layer in part]
        rows = [[name, *(count[name] or "" for count in counts)] for name in shown]
        screen.table(["layer", *(str(layer.layer) for layer in part)], rows)
    if not opened.has("counts"):
        screen.note(
            "the index has no counts by position, so no memory has the role positional; scan again with --fresh"
        )
    screen.note("a memory can have several roles; see docs/roles.md")
    screen.note(f"next: {command_line('search', opened.folder, '--role', 'token')}")


def _print_effects(screen: Screen, index: memlens.Index, model: str | None, seed: int) -> None:
    from memlens.role.effects import role_effects
    from memlens.role.table import write_effects

    for table in ("roles", "values"):
        index.path(table)  # report a missing table before the model is loaded
    with ProgressBar(screen) as progress:
        effects = role_effects(index, index.load_model(model), seed=seed, progress=progress)
    write_effects(index, effects, seed)
    if screen.as_json:
        screen.json(effects)
        return
    rows = []
    for effect in effects:
        difference = "" if effect.difference is None else f"{effect.difference:+.3g}"
        if difference and effect.low is not None:
            difference += f" ({effect.low:+.3g} to {effect.high:+.3g})"
        has_norms = effect.norm is not None and effect.random_norm is not None
        rows.append(
            [
                effect.role,
                effect.memories,
                effect.measure,
                *(
                    "" if value is None else number(value)
                    for value in (effect.change, max(effect.random, default=None))
                ),
                difference,
                f"{number(effect.norm or 0)} : {number(effect.random_norm or 0)}" if has_norms else "",
                effect.verdict,
            ]
        )
    heads = ["silenced", "memories", "measure", "change (nats)", "random at most", "more than random"]
    screen.table([*heads, "norm : random", "effect"], rows, optional=["norm : random", "random at most", "memories"])
