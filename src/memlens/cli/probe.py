"""`memlens probe`: which memories know what labels say of texts; a probe saved, applied to new texts, steered along."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from memlens.cli.options import Device, Force, refuse_unused, with_screen, with_settings
from memlens.cli.screen import ScanProgress, Screen
from memlens.errors import SettingError
from memlens.files import refuse_output
from memlens.settings import RUN, ProbeSettings, divide
from memlens.text import plain_table, quoted, tail, visible

if TYPE_CHECKING:
    from memlens.probing.probe import ProbeResult, ProbeScore
    from memlens.probing.saved import Prediction, SparseProbe

_USE = "Using a probe"
_SHOWN = 60  # characters of a text or a trigger


@with_settings(ProbeSettings)
@with_screen(json=True)
def probe(
    screen: Screen,
    model: Annotated[
        str, typer.Argument(metavar="MODEL|INDEX", help="A model, or an index folder: its model is loaded.")
    ],
    labels: Annotated[str, typer.Argument(metavar="LABELS", help="A .csv or .jsonl file: a text and a label per row.")],
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save the best probe as JSON.", rich_help_panel=_USE)
    ] = None,
    apply: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Apply a saved probe to the texts of LABELS.", rich_help_panel=_USE),
    ] = None,
    steer: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write an intervention for `memlens trace --file`; see --towards.",
            rich_help_panel=_USE,
        ),
    ] = None,
    towards: Annotated[
        str | None, typer.Option(metavar="LABEL", help="The label that --steer goes towards.", rich_help_panel=_USE)
    ] = None,
    strength: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="With --steer, 1: as in texts with that label; 2: twice as far. Default: 1.",
            rich_help_panel=_USE,
        ),
    ] = None,
    force: Force = False,
    where: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="Where an index's model is now.", rich_help_panel=RUN)
    ] = None,
    device: Device = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="Numbers of the model. Default: float32, or the index's.", rich_help_panel=RUN)
    ] = None,
    **options: Any,
) -> None:
    """Find the memories that know a concept, from texts and their labels."""
    _refuse_together(save, steer, towards, strength, force)
    (given,) = divide("probe", options, ProbeSettings)
    place = {"where": where, "device": device, "dtype": dtype}
    if apply is None:
        known = _fit(screen, model, labels, towards, given, place)
    else:
        if save is not None:
            raise SettingError("--save keeps a probe that is fitted now, --apply uses one that is saved; choose one")
        if unused := sorted(given.keys() - {"column"}):
            raise SettingError(f"--{unused[0].replace('_', '-')} is for a probe that is fitted now; --apply has one")
        known = _apply(screen, apply, model, labels, towards, ProbeSettings(**given).column, place)
    if save is not None:
        known.save(save, force=force)
        screen.note(f"saved the probe of {len(known.memories)} memories in {save}")
    if steer is not None and towards is not None:
        known.steer(towards, 1.0 if strength is None else strength).save(steer, force=force)
        screen.note(f'steer with: memlens trace {visible(model)} "PROMPT" --file {steer} --generate 20')


def _refuse_together(
    save: Path | None, steer: Path | None, towards: str | None, strength: float | None, force: bool
) -> None:
    """Refuse options that need each other, and files that must not be written, before anything is computed."""
    if (steer is None) != (towards is None):
        raise SettingError("--steer names a file and --towards a label; give both or neither")
    if strength is not None and (steer is None or not math.isfinite(strength)):
        raise SettingError(f"--strength is {strength}; it is a finite number that goes with --steer")
    if save is None and steer is None:
        refuse_unused({"--force": force}, "is for --save and --steer, which are not there")
    _refuse_outputs(save, steer, force)


def _fit(
    screen: Screen, model: str, labels: str, towards: str | None, given: dict[str, Any], place: dict[str, Any]
) -> SparseProbe:
    """Fit probes to the labels, show their scores, and give the best one."""
    from memlens.probing.labels import check_label, read_labels

    settings = ProbeSettings(**given)
    if towards is not None:  # before an hour of work
        check_label(read_labels(labels, settings.column, settings.label, settings.kind).classes, towards)
    from memlens.probing.probe import probe as run

    with ScanProgress(screen) as progress:
        result = run(model, labels, progress=progress, **place, **given)
    if screen.as_json:
        screen.json(result)
    elif not screen.quiet:
        _show(screen, result)
    return result.best


def _apply(
    screen: Screen, file: Path, model: str, labels: str, towards: str | None, column: str, place: dict[str, Any]
) -> SparseProbe:
    """Apply a saved probe to the texts, show what it predicts, and give it."""
    from memlens.probing.labels import check_label, read_texts
    from memlens.probing.saved import SparseProbe
    from memlens.tracer.prompt import open_model

    known = SparseProbe.load(file)
    if towards is not None:
        check_label(known.classes, towards)
    texts = read_texts(labels, column)
    if not texts:
        raise SettingError(f"{labels} holds no texts; there is nothing to apply the probe to")
    loaded, _ = open_model(model, **place)
    _show_predictions(screen, known.apply(loaded, texts))
    return known


def _refuse_outputs(save: Path | None, steer: Path | None, force: bool) -> None:
    """Refuse files that must not be written, before anything is computed."""
    from memlens.probing.saved import is_probe
    from memlens.tracer.intervention import is_intervention

    for path, is_ours in ((save, is_probe), (steer, is_intervention)):
        if path is not None:
            refuse_output(path, is_ours, force=force)
            if not path.parent.is_dir():
                raise SettingError(f"cannot write {path}: there is no folder {path.parent}; make it first")
    if save is not None and steer is not None and save.resolve() == steer.resolve():
        raise SettingError(f"--save and --steer both name {save}; give each a file of its own")


def _show_predictions(screen: Screen, predictions: Sequence[Prediction]) -> None:
    if screen.as_json:
        screen.json(predictions)
        return
    rows = [
        [prediction.label, None if prediction.p is None else max(prediction.p.values()), tail(prediction.text, _SHOWN)]
        for prediction in predictions
    ]
    screen.table(["label", "p", "text"], rows)


def _show(screen: Screen, result: ProbeResult) -> None:
    what = ", ".join(visible(name) for name in result.classes[:8]) or "a number"
    more = f" and {len(result.classes) - 8} more" if len(result.classes) > 8 else ""
    screen.result(
        f"{visible(result.model)}: {what}{more}; learnt from {result.train:,} texts, tested on {result.test:,}; "
        f"{result.measure} of probes on k memories of a layer"
    )
    if result.repeats:
        screen.note(f"{result.repeats:,} rows were left out: their text was there before, with the same label")
    if result.cut:
        screen.note(
            f"of {result.cut:,} texts only the end was read: they are longer than the model (or --max-length) allows"
        )
    screen.result()
    screen.result(_score_table(result))
    words = next(score for score in result.scores if score.input == "words")
    residual = max((score for score in result.scores if score.input == "residual"), key=lambda score: score.held)
    screen.result()
    best, probe = result.best.score, result.best
    lines = {
        "best probe": f"layer {probe.layer}, {len(probe.memories)} memories: {_with_interval(*best)}",
        "residual stream": f"layer {residual.layer}: {_with_interval(residual.score, residual.low, residual.high)}",
        "bag of words": _with_interval(words.score, words.low, words.high),
    }
    if result.chance is not None:
        mean, low, high = result.chance
        lines["shuffled labels"] = f"{mean:.3f} in the mean, 95% from {low:.3f} to {high:.3f}: the best probe by chance"
    table = Table.grid(padding=(0, 2))
    for name, line in lines.items():
        table.add_row(Text(name, "bold"), Text(line))
    screen.result(table)
    screen.note("layer and k were chosen on a fifth of the training part, never on the test part")
    screen.result()
    _show_memories(screen, result)


def _with_interval(score: float, low: float, high: float) -> str:
    return f"{score:.3f} ({low:.3f} to {high:.3f})"


def _score_table(result: ProbeResult) -> Table:
    by_layer: dict[int, dict[int | None, ProbeScore]] = {}
    for score in result.scores:
        if score.layer is not None:
            by_layer.setdefault(score.layer, {})[score.k] = score
    ks = sorted({k for scores in by_layer.values() for k in scores if k is not None})
    best = result.best.layer, len(result.best.memories)
    table = plain_table([">layer", *(f">k={k}" for k in ks), ">residual"])
    for layer, scores in sorted(by_layer.items()):
        cells = [scores.get(k) for k in (*ks, None)]
        is_best = [cell is not None and (layer, cell.k) == best for cell in cells]
        table.add_row(
            str(layer),
            *(Text("–" if cell is None else f"{cell.score:.3f}", "bold green" if is_it else "")
              for cell, is_it in zip(cells, is_best, strict=True)),
        )  # fmt: skip
    return table


def _show_memories(screen: Screen, result: ProbeResult) -> None:
    has_index = any(memory.trigger is not None for memory in result.memories)
    apart = "correlation" if result.kind == "number" else "difference"
    table = plain_table(["memory", apart, "alone", "promotes", *(["known as", "top trigger"] if has_index else [])])
    for memory in result.memories:
        trigger = "" if memory.trigger is None else tail(memory.trigger.text, _SHOWN)
        table.add_row(
            Text(str(memory.memory), "bold"),
            f"{memory.difference:+.2f}",
            f"{memory.alone:.3f}",
            Text(" ".join(quoted(token, 12) for token in memory.promotes[:3]), "cyan"),
            *([Text(visible(memory.summary or "")), Text(visible(trigger), "dim")] if has_index else []),
        )
    screen.result(table)
    if has_index:
        screen.note(f"see one of them: memlens show INDEX {result.memories[0].memory}")
