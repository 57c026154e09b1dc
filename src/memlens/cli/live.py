"""Verbs that run the model on a text: `trace` one prompt, `probe` for a concept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

import memlens
from memlens.cli.options import (
    WholeNumber,
    argument,
    flag,
    force_option,
    model_or_index_argument,
    open_model_options,
    option,
    refuse_options,
    refuse_others,
    settings_options,
    token_options,
    verb,
)
from memlens.cli.screen import Cell, ProgressBar, Screen, check_outputs, command_line, fit_items
from memlens.errors import SettingError
from memlens.settings import ProbeSettings
from memlens.text import MISSING, cut_left, number, plain, quoted, tail, visible

if TYPE_CHECKING:
    from memlens.models.memory_model import MemoryModel
    from memlens.probing.probe import ProbeResult, ProbeScore
    from memlens.probing.saved import Prediction, SparseProbe
    from memlens.tracer.intervene import Continuation
    from memlens.tracer.intervention import Edit, Intervention
    from memlens.tracer.result import InterventionEffect, LayerTrace, Token, TokenShare, Trace, TracedMemory

_EDITS, _TEXT = "Edit memories", "Generate text"
_TOKEN_WIDTH = 14  # width of a token in quotes
_MIN_PROMPT_WIDTH = 20
_MEMORIES = 10  # memories to list below the layers
_EDITS_SHOWN = 12  # limit the list, because a saved circuit has one edit per memory
_CASE_STYLES = {"composition": "yellow", "ffn": "green", "reversal": "red"}


@verb(json=True)
@model_or_index_argument
@argument("prompt", metavar="PROMPT", help="Text to trace.")
@option("--top", type=int, default=3, metavar="K", help="Number of tokens and memories to list per layer.")
@option(
    "--position",
    type=int,
    default=-1,
    metavar="N",
    help="Position of the token to trace, counted from 0. -1 is the last token.",
)
@token_options()
@option(
    "--set",
    "sets",
    multiple=True,
    panel=_EDITS,
    metavar="L3N51=0",
    help="Silence (=0), set (=3.5) or scale (=x2) the coefficient of a memory, or silence a layer (L3=0). Repeatable.",
)
@option(
    "--at",
    multiple=True,
    type=int,
    panel=_EDITS,
    metavar="N",
    help="Position of a token at which --set applies. Repeatable. Default: all tokens.",
)
@option("--file", type=Path, panel=_EDITS, metavar="FILE", help="Apply the edits of a saved intervention.")
@option("--save", type=Path, panel=_EDITS, metavar="FILE", help="Save the edits as a JSON file.")
@flag("--force", panel=_EDITS, help="Allow --save to replace a file that memlens did not write.")
@option("--generate", type=WholeNumber(0), default=0, panel=_TEXT, metavar="N", help="Number of tokens to generate.")
@option(
    "--temperature",
    type=float,
    default=0.0,
    panel=_TEXT,
    metavar="T",
    help="Sampling temperature. 0 always selects the most likely token.",
)
@option("--seed", type=int, default=0, panel=_TEXT, metavar="N", help="Random seed for sampling.")
@open_model_options
def trace(
    screen: Screen,
    model: str,
    prompt: str,
    top: int,
    position: int,
    token: str | None,
    against: str | None,
    sets: tuple[str, ...],
    at: tuple[int, ...],
    file: Path | None,
    save: Path | None,
    force: bool,
    generate: int,
    temperature: float,
    seed: int,
    place: dict[str, Any],
) -> None:
    """Trace a prompt: show the prediction of each layer and the memories that contribute to it."""
    intervention = _read_intervention(sets, at, file)
    if save is not None and intervention is None:
        raise SettingError(f"there are no edits to save in {save}; add --set")
    from memlens.tracer.intervention import is_intervention

    check_outputs({"--save": (save, is_intervention)}, force=force)
    if not generate:
        refuse_options(["--temperature", "--seed"], "has no effect without --generate")
    if temperature == 0:
        refuse_options(["--seed"], "has no effect with --temperature 0")
    from memlens.tracer.prompt import open_model

    loaded, index = open_model(model, **place)
    if intervention is not None and (screen.as_json or save is not None or file is not None):
        intervention = intervention.meant_for(loaded)  # add the model's fingerprint
    result = _run_trace(loaded, index, prompt, intervention, position=position, token=token, against=against, top=top)
    texts = _generate(loaded, prompt, generate, intervention, temperature, seed)
    if save is not None and intervention is not None:
        intervention.save(save, force=force)
        screen.note(f"saved the intervention in {save}")
    if screen.as_json:
        screen.json(plain(result) | {"continuation": texts})
        return
    print_trace(screen, result if intervention is None else result.before, top)
    if intervention is not None:
        print_effect(screen, result)
    print_continuations(screen, texts)


def _read_intervention(sets: Sequence[str], at: Sequence[int], file: Path | None) -> Intervention | None:
    """Return the edits of --file followed by those of --set, or None without both."""
    from memlens.tracer.intervention import Intervention

    if at and not sets:
        raise SettingError("--at has no effect without --set")
    parts = [] if file is None else [Intervention.load(file)]
    if sets:
        parts.append(Intervention.parse(*sets, positions=list(at) or None))
        _refuse_overwritten(parts[-1].edits)
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _refuse_overwritten(edits: Sequence[Edit]) -> None:
    """Raise SettingError if an edit has no effect because a later edit of the same memory overrides it."""
    last: dict[str, Edit] = {}
    for edit in edits:
        previous = last.get(edit.target, edit)
        if edit.action != "scale" and str(previous) != str(edit):
            raise SettingError(f"--set {previous} has no effect because --set {edit} overrides it; leave one out")
        last[edit.target] = edit


def _run_trace(
    model: MemoryModel, index: memlens.Index | None, prompt: str, intervention: Intervention | None, **options: Any
) -> Any:
    """Return a Trace, or an InterventionEffect if there are edits."""
    from memlens.tracer.intervene import intervene
    from memlens.tracer.trace import trace

    if intervention is None:
        return trace(model, prompt, index=index, **options)
    # skip comparing the fingerprint again, which takes time for a large model
    effect = intervene(model, prompt, intervention.for_any(), index=index, **options)
    return replace(effect, intervention=intervention)


def _generate(
    model: MemoryModel, prompt: str, count: int, intervention: Intervention | None, temperature: float, seed: int
) -> list[Continuation]:
    """Generate a continuation of the prompt without the edits and, if there are edits, one with them."""
    from memlens.tracer.intervene import generate

    if not count:
        return []
    variants = [None] if intervention is None else [None, intervention.for_any()]
    return [generate(model, prompt, count, edits, temperature=temperature, seed=seed) for edits in variants]


def print_trace(screen: Screen, trace: Trace, top: int) -> None:
    """Print the prediction, a row per layer, the parts of the logit, and the memories with the largest effect."""
    place = f"   position {trace.position}   {visible(trace.model)}"
    width = max(screen.out.width - Text(place).cell_len, _MIN_PROMPT_WIDTH)
    screen.flow([Text.assemble((cut_left(visible(trace.text), width), "bold"), place)])
    pieces = [
        Text.assemble(("predicts ", "dim"), _share(trace.prediction)),
        Text.assemble(("settled in layer ", "dim"), str(trace.settled)),
    ]
    if trace.token.id != trace.prediction.id:
        pieces.append(Text.assemble(("traced ", "dim"), _share(trace.token), f" rank {trace.rank}"))
    screen.flow(pieces)
    screen.result()
    rows: list[list[Any]] = [
        [
            Text(str(layer.layer), "bold" if layer.layer == trace.settled else ""),
            _share_cell(layer.residual[0]),
            _share_cell(layer.ffn[0]),
            fit_items([_share_cell(share) for share in layer.output[:top]]),
            _case(layer),
            fit_items([Text(f"{memory.memory}{memory.effect:+.2f}") for memory in layer.by_effect[:top]]),
        ]
        for layer in trace.layers
    ]
    screen.table(["layer", "residual", "ffn", "output", "case", "memories"], rows)
    screen.result()
    _print_parts(screen, trace)
    screen.result()
    _print_memories(screen, trace.memories[: max(top, _MEMORIES)], top)


def _print_parts(screen: Screen, trace: Trace) -> None:
    """Print the logit as a sum of contributions."""
    whole = Text.assemble((f"{trace.logit_name} of ", "dim"), _quote(trace.token))
    if trace.against is not None:
        whole.append_text(Text.assemble((" and ", "dim"), _quote(trace.against)))
    whole.append_text(Text.assemble(f" {number(trace.logit)}", (" =", "dim")))
    parts = [Text(f"{name} {value:+.3f}") for name, value in trace.parts.items() if value != 0]
    screen.flow([whole, *parts], gap="  ")
    if not trace.is_plain_logit:
        words = f"({trace.logit_name}: {trace.logit_is})".split()
        screen.flow([Text(word, "dim") for word in words], gap=" ")


def _print_memories(screen: Screen, memories: Sequence[TracedMemory], top: int) -> None:
    names = ["; ".join(memory.patterns) or (f"… {memory.trigger}" if memory.trigger else "") for memory in memories]
    heads = ["memory", "m", "effect", "promotes", "demotes", *(["known as"] if any(names) else [])]
    rows: list[list[Any]] = [
        [
            str(memory.memory),
            number(memory.coefficient),
            f"{memory.effect:+.3f}",
            fit_items([_token_cell(token) for token in memory.promotes[:top]], gap=" "),
            fit_items([_token_cell(token) for token in memory.demotes[:top]], gap=" "),
            *([Text(visible(name), "dim")] if any(names) else []),
        ]
        for memory, name in zip(memories, names, strict=True)
    ]
    screen.table(heads, rows, optional=["demotes"])


def print_effect(screen: Screen, effect: InterventionEffect) -> None:
    """Print the effect of the edits: in total, on the top tokens, and by layer."""
    before, after = effect.before, effect.after
    screen.result()
    edits = effect.intervention.edits
    names = [Text(visible(str(edit)), "bold") for edit in edits[:_EDITS_SHOWN]]
    more = [Text(f"and {len(edits) - len(names):,} more edits", "dim")] * (len(edits) > len(names))
    screen.flow([Text("with", "dim"), *names, *more], gap="  ")
    changes = [
        Text.assemble(("KL ", "dim"), number(effect.kl)),
        Text.assemble(
            (f"{before.logit_name} of ", "dim"), _quote(before.token), f" {_describe_change(before.logit, after.logit)}"
        ),
        Text.assemble(("p ", "dim"), _describe_change(before.token.p, after.token.p)),
    ]
    screen.flow(changes)
    screen.result()
    pairs = zip(before.layers[-1].output, after.layers[-1].output, strict=True)
    tokens: list[list[Any]] = [
        [rank, _share_cell(left), _share_cell(right)] for rank, (left, right) in enumerate(pairs, start=1)
    ]
    screen.table(["", "before", "after"], tokens)
    screen.result()
    layers: list[list[Any]] = [
        [left.layer, _share_cell(left.output[0]), _share_cell(right.output[0]), _case(left), _case(right)]
        for left, right in zip(before.layers, after.layers, strict=True)
    ]
    screen.table(["layer", "output before", "output after", "case before", "case after"], layers)


def print_continuations(screen: Screen, texts: Sequence[Continuation]) -> None:
    """Print the generated texts, without and with the edits."""
    if texts:
        screen.result()
        shown = [Text.assemble(visible(text.prompt), (visible(text.text), "bold")) for text in texts]
        screen.facts(dict(zip(("continuation", "with edits"), shown, strict=False)))


def _describe_change(before: float, after: float) -> str:
    return f"{number(before)} → {number(after)}"


def _case(layer: LayerTrace) -> Text:
    return Text(layer.case, _CASE_STYLES.get(layer.case, ""))


def _share(share: TokenShare, width: int = _TOKEN_WIDTH) -> Text:
    return Text.assemble(_quote(share, width), (f" {share.p:.2f}", "dim"))


def _share_cell(share: TokenShare) -> Callable[[int], Text]:
    return lambda width: _share(share, min(_TOKEN_WIDTH, width - len(" 0.00")))


def _token_cell(token: Token) -> Callable[[int], Text]:
    return lambda width: Text(_quote(token, min(_TOKEN_WIDTH, width)))


def _quote(token: Token, width: int = _TOKEN_WIDTH) -> str:
    return quoted(token.text, width)


_USE = "Use a probe"


@verb(json=True)
@model_or_index_argument
@argument("labels", metavar="LABELS", help="A .csv or .jsonl file with a text and a label in each row.")
@settings_options(ProbeSettings)
@option("--save", type=Path, panel=_USE, metavar="FILE", help="Save the best probe as JSON.")
@option("--apply", type=Path, panel=_USE, metavar="FILE", help="Apply a saved probe to the texts in LABELS.")
@option(
    "--steer",
    type=Path,
    panel=_USE,
    metavar="FILE",
    help="Write an intervention for `memlens trace --file` that moves predictions towards --towards.",
)
@option("--towards", panel=_USE, metavar="LABEL", help="Label for --steer.")
@option(
    "--strength",
    type=float,
    panel=_USE,
    metavar="X",
    help="Strength of --steer. 1 sets each memory to its mean for the label. Default: 1.",
)
@force_option
@open_model_options
def probe(
    screen: Screen,
    model: str,
    labels: str,
    save: Path | None,
    apply: Path | None,
    steer: Path | None,
    towards: str | None,
    strength: float | None,
    force: bool,
    place: dict[str, Any],
    **options: Any,
) -> None:
    """Find memories that encode a concept by fitting sparse probes to labeled texts."""
    if (steer is None) != (towards is None):
        raise SettingError("--steer and --towards must be given together")
    if strength is not None and (steer is None or not math.isfinite(strength)):
        raise SettingError(
            f"--strength is {strength}; it must be a finite number, and it has an effect only with --steer"
        )
    from memlens.probing.saved import is_probe
    from memlens.tracer.intervention import is_intervention

    check_outputs({"--save": (save, is_probe), "--steer": (steer, is_intervention)}, force=force)
    if apply is None:
        fitted = _fit(screen, model, labels, towards, options, place)
    else:
        allowed = ["--apply", "--column", "--steer", "--towards", "--strength", "--force"]
        refuse_others("--apply", [*allowed, "--model", "--device", "--dtype"])
        fitted = _apply(screen, apply, model, labels, towards, ProbeSettings(**options).column, place)
    if save is not None:
        fitted.save(save, force=force)
        screen.note(f"saved a probe of {len(fitted.memories)} memories in {save}")
    if steer is not None and towards is not None:
        fitted.steer(towards, 1.0 if strength is None else strength).save(steer, force=force)
        screen.note(f"next: {command_line('trace', model, 'PROMPT', '--file', steer, '--generate', 20)}")


def _fit(
    screen: Screen, model: str, labels: str, towards: str | None, options: dict[str, Any], place: dict[str, Any]
) -> SparseProbe:
    """Fit probes to the labels and print their scores. Returns the best one."""
    from memlens.probing.labels import check_label, read_labels

    settings = ProbeSettings(**options)
    if towards is not None:  # check this before fitting, which may take an hour
        check_label(read_labels(labels, settings.column, settings.label, settings.kind).classes, towards)
    from memlens.probing.probe import probe as run

    with ProgressBar(screen) as progress:
        result = run(model, labels, progress=progress, **place, **options)
    if screen.as_json:
        screen.json(result)
    elif not screen.quiet:
        _print_probe(screen, model, result)
    return result.best


def _apply(
    screen: Screen, file: Path, model: str, labels: str, towards: str | None, column: str, place: dict[str, Any]
) -> SparseProbe:
    """Apply a saved probe to the texts and print its predictions. Returns the probe."""
    from memlens.probing.labels import check_label, read_texts
    from memlens.probing.saved import SparseProbe
    from memlens.tracer.prompt import open_model

    saved = SparseProbe.load(file)
    if towards is not None:
        check_label(saved.classes, towards)
    texts = read_texts(labels, column)
    if not texts:
        raise SettingError(f"{labels} contains no texts")
    loaded, _ = open_model(model, **place)
    predictions: Sequence[Prediction] = saved.apply(loaded, texts)
    rows = [[one.label, None if one.p is None else max(one.p.values()), _end_cell(one.text)] for one in predictions]
    screen.records(predictions, ["label", "p", "text"], rows)
    return saved


def _end_cell(text: str) -> Callable[[int], Text]:
    """Return a table cell with the end of a text."""
    shown = tail(text, 60)
    return lambda width: Text(cut_left(shown, width), "dim")


def _print_probe(screen: Screen, model: str, result: ProbeResult) -> None:
    classes = ", ".join(visible(name) for name in result.classes[:8]) or "a number"
    more = f" and {len(result.classes) - 8} more" if len(result.classes) > 8 else ""
    screen.paragraph(
        f"{visible(result.model)}: {classes}{more}; {result.train:,} training texts, {result.test:,} test texts; "
        f"{result.measure} of probes on k memories of a layer"
    )
    if result.repeats:
        screen.note(f"{result.repeats:,} rows were left out because another row has the same text and label")
    if result.cut:
        screen.note(f"only the end of {result.cut:,} texts was read, because of the model's context or --max-length")
    screen.result()
    _print_scores(screen, result)
    screen.result()
    words = next(score for score in result.scores if score.input == "words")
    residual = max((score for score in result.scores if score.input == "residual"), key=lambda score: score.held)
    best = f"layer {result.best.layer}, {len(result.best.memories)} memories"
    facts = {
        "best probe": f"{best}: {_describe_score(*result.best.score)}",
        "residual stream": f"layer {residual.layer}: {_describe_score(residual.score, residual.low, residual.high)}",
        "bag of words": _describe_score(words.score, words.low, words.high),
    }
    if result.chance is not None:
        mean, low, high = result.chance
        facts["permuted labels"] = f"{mean:.3f} on average, 95% from {low:.3f} to {high:.3f}"
    screen.facts(facts)
    screen.note(
        "the best probe has the fewest memories among those within one standard error of the highest validation score"
    )
    screen.result()
    _print_probe_memories(screen, model, result)
    screen.result()
    screen.paragraph(result.verdict)


def _describe_score(score: float, low: float, high: float) -> str:
    return f"{score:.3f} ({low:.3f} to {high:.3f})"


def _print_scores(screen: Screen, result: ProbeResult) -> None:
    """Print the score of every layer and k."""
    by_layer: dict[int, dict[int | None, ProbeScore]] = {}
    for score in result.scores:
        if score.layer is not None:
            by_layer.setdefault(score.layer, {})[score.k] = score
    sizes: Iterable[int] = sorted({k for scores in by_layer.values() for k in scores if k is not None})
    best = result.best.layer, len(result.best.memories)
    rows: list[list[Any]] = []
    for layer, scores in sorted(by_layer.items()):
        cells = []
        for k in (*sizes, None):
            text = f"{scores[k].score:.3f}" if k in scores else MISSING
            cells.append(Text(text, "bold green" if (layer, k) == best else ""))
        rows.append([layer, *cells])
    heads = ["layer", *(f"k={k}" for k in sizes), "residual"]
    # on a narrow terminal, small values of k are left out first, but not k = 1
    screen.table(heads, rows, optional=heads[2:-1])


def _print_probe_memories(screen: Screen, model: str, result: ProbeResult) -> None:
    has_index = any(memory.trigger is not None for memory in result.memories)
    difference = "correlation" if result.kind == "number" else "difference"
    rows: list[list[Any]] = []
    for memory in result.memories:
        cells: list[Cell] = [
            str(memory.memory),
            f"{memory.difference:+.2f}",
            f"{memory.alone:.3f}",
            fit_items([Text(quoted(token, 12), "cyan") for token in memory.promotes[:3]], gap=" "),
        ]
        if has_index:
            trigger = "" if memory.trigger is None else memory.trigger.text
            cells += [Text(visible(memory.summary or "")), _end_cell(trigger)]
        rows.append(cells)
    heads = ["memory", difference, "alone", "promotes", *(["known as", "top trigger"] if has_index else [])]
    screen.table(heads, rows)
    if has_index:
        screen.note(f"next: {command_line('show', model, result.memories[0].memory)}")
