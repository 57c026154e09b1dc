"""`memlens analyze`: scan, values, patterns, experiments and report in one command that can be continued."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memlens.cli.options import (
    Device,
    Dtype,
    Json,
    Model,
    Quiet,
    Reading,
    Sample,
    Seed,
    StopWords,
    Threads,
    Validation,
    Verbose,
)
from memlens.cli.scan import (
    BatchTokens,
    Bos,
    Bottom,
    Column,
    Corpus,
    Dedup,
    Layers,
    MaxLength,
    MaxTokens,
    Out,
    PerSentence,
    Preset,
    Resume,
    Top,
    Unit,
)
from memlens.cli.screen import ScanProgress, Screen
from memlens.text import curve, duration, visible

if TYPE_CHECKING:
    from memlens.pipeline import Analysis, Stage

_NAMED = 4  # experiments that are named one by one


def analyze(
    model: Model,
    corpus: Corpus,
    out: Out,
    tokens: Annotated[int, typer.Option(metavar="N", help="Tokens to list at each end of a value.")] = 50,
    reading: Reading = None,
    sample: Sample = None,
    validation: Validation = None,
    stop_words: StopWords = None,
    seed: Seed = 0,
    top: Top = None,
    per_sentence: PerSentence = None,
    dedup: Dedup = None,
    bottom: Bottom = None,
    layers: Layers = None,
    preset: Preset = None,
    unit: Unit = "sentence",
    column: Column = "text",
    max_tokens: MaxTokens = None,
    max_length: MaxLength = None,
    bos: Bos = None,
    batch_tokens: BatchTokens = None,
    device: Device = "auto",
    dtype: Dtype = "float32",
    threads: Threads = None,
    resume: Resume = True,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Do everything: scan, values, patterns, experiments and report. Interrupted, it continues."""
    screen = Screen(as_json, quiet, verbose)
    with ScanProgress(screen) as progress:
        from memlens.pipeline import STAGES, StageWatcher
        from memlens.pipeline import analyze as run

        class Watcher(StageWatcher):
            def begins(self, number: int, name: str) -> None:
                progress.heading = f"{number + 1}/{len(STAGES)} "

            def ended(self, stage: Stage) -> None:
                screen.note(_line(stage))

        try:
            analysis = run(
                model,
                corpus,
                out=out,
                resume=resume,
                unit=unit,
                column=column,
                device=device,
                dtype=dtype,
                threads=threads,
                seed=seed,
                tokens=tokens,
                reading=reading,
                sample=sample,
                validation=validation or None,
                stop_words=stop_words,
                progress=progress,
                watcher=Watcher(),
                top=top,
                per_sentence=per_sentence,
                dedup=dedup,
                bottom=bottom,
                layers=layers,
                preset=preset,
                bos=bos,
                max_tokens=max_tokens,
                max_length=max_length,
                batch_tokens=batch_tokens,
            )
        except KeyboardInterrupt:
            if resume:
                raise
            raise KeyboardInterrupt("interrupted; run the command again without --fresh to continue") from None
    if as_json:
        screen.json(_as_json(analysis))
    elif not quiet:
        _print(screen, analysis)


def _line(stage: Stage) -> str:
    if stage.outcome == "kept":
        return f"{stage.name}: complete already"
    few = ", ".join(stage.made) if len(stage.made) <= _NAMED else f"{len(stage.made)} of them"
    which = f" ({few})" if stage.made else ""
    left_out = "".join(f"\n{name} was left out: {visible(reason)}" for name, reason in stage.skipped)
    return f"{stage.name}: done in {duration(stage.seconds)}{which}{left_out}"


def _as_json(analysis: Analysis) -> dict[str, Any]:
    from memlens.index.reader import summarize

    stages = [
        asdict(stage) | {"skipped": [{"name": name, "reason": reason} for name, reason in stage.skipped]}
        for stage in analysis.stages
    ]
    return {
        "index": str(analysis.index.folder),
        "report": str(analysis.report),
        "stages": stages,
        "scan": summarize(analysis.index),
    }


def _print(screen: Screen, analysis: Analysis) -> None:
    """The curve of every experiment beside the paper's, and where the page is."""
    from rich.table import Table
    from rich.text import Text

    from memlens.cli.experiment_tables import PICTURES, by_layer, headline
    from memlens.reports.published import published

    index = analysis.index
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("experiment", style="bold", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("layer by layer", style="cyan", no_wrap=True)
    table.add_column("peak", justify="right", no_wrap=True)
    table.add_column("in the paper", style="magenta", no_wrap=True)
    table.add_column("peak", justify="right", no_wrap=True)
    for name in PICTURES:
        if not index.has(f"experiments/{name}"):
            continue
        ours = headline(name, by_layer(name, index.table(f"experiments/{name}").to_pylist()))
        theirs = headline(name, by_layer(name, published(name))) if published(name) else []
        for place, (label, numbers, write) in enumerate(ours):
            others = theirs[place][1] if theirs and any(theirs[place][1]) else []
            cells = [*_drawn(numbers, write), *_drawn(others, write)]
            table.add_row(name if place == 0 else "", Text(label), *cells)
    screen.result(table)
    screen.result()
    screen.result(Text.assemble(("report  ", "bold"), visible(str(analysis.report))))
    screen.note(f"next: memlens show {visible(str(index.folder))} L{index.layers[0]}N0")


def _drawn(numbers: list[float | None], write: Any) -> tuple[str, str]:
    """The curve, and the number that stands furthest from zero."""
    known = [value for value in numbers if value is not None]
    return (curve(numbers, 24), write(max(known, key=abs))) if known else ("", "")
