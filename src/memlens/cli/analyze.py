"""`memlens analyze`: scan, values, patterns, experiments and report in one command that can be continued.

And `memlens demo`: the same on the bundled model and corpus, offline, with five findings to begin with.
"""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

import memlens
from memlens.cli.index import refuse_without_workbench, serve as open_workbench
from memlens.cli.options import (
    Corpus,
    Device,
    Dtype,
    Model,
    Out,
    Resume,
    Threads,
    Validation,
    refuse_unused_column,
    setting,
    with_screen,
    with_settings,
)
from memlens.cli.screen import ScanProgress, Screen
from memlens.errors import SettingError
from memlens.settings import CorpusSettings, SampleSettings, ScanSettings, ValueSettings
from memlens.text import curve, duration, visible

if TYPE_CHECKING:
    from memlens.pipeline import Analysis, Demo, SmallerSample, Stage, StageWatcher

_NAMED = 4  # experiments that are named one by one


@with_settings(ScanSettings, CorpusSettings, SampleSettings)
@with_screen(json=True)
def analyze(
    screen: Screen,
    model: Model,
    corpus: Corpus,
    out: Out,
    tokens: Annotated[int, setting(ValueSettings, "top", "--tokens")] = ValueSettings.top,
    reading: Annotated[str | None, setting(ValueSettings, "reading")] = None,
    vocabulary: Annotated[str, setting(ValueSettings, "vocabulary")] = ValueSettings.vocabulary,
    validation: Validation = None,
    device: Device = "auto",
    dtype: Dtype = "float32",
    threads: Threads = None,
    resume: Resume = True,
    **options: Any,
) -> None:
    """Do everything: scan, values, patterns, experiments and report. Interrupted, it continues."""
    refuse_unused_column(options, [*corpus, *(validation or ())])
    with ScanProgress(screen) as progress:
        try:
            analysis = memlens.analyze(
                model,
                corpus,
                out=out,
                resume=resume,
                device=device,
                dtype=dtype,
                tokens=tokens,
                reading=reading,
                vocabulary=vocabulary,
                validation=validation or None,
                progress=progress,
                watcher=_watcher(screen, progress),
                threads=threads,
                **options,
            )
        except KeyboardInterrupt as error:
            if resume:
                raise
            raise type(error)("interrupted; run the command again without --fresh to continue") from None
    if screen.as_json:
        screen.json(_analysis_json(analysis))
    elif not screen.quiet:
        _print_analysis(screen, analysis)


@with_screen(json=True)
def demo(
    screen: Screen,
    out: Out = "memlens-demo",
    serve: Annotated[bool, typer.Option("--serve", help="Open the workbench on it afterwards.")] = False,
    port: Annotated[
        int | None, typer.Option(metavar="N", help="With --serve; 0 takes any that is free. Default: 8000.")
    ] = None,
    resume: Resume = True,
) -> None:
    """Show what memlens finds, on its own small model and text. Needs no network and about two minutes."""
    if serve and screen.as_json:
        raise SettingError("--serve does not end and --json is for machines; leave one of them out")
    if port is not None and not serve:
        raise SettingError("--port says where --serve listens, but there is no --serve; add it or leave --port out")
    if port is not None and not 0 <= port <= 65535:
        raise SettingError(f"--port is {port}; choose 1 to 65535, or 0 for any that is free")
    if serve:
        refuse_without_workbench()
    with ScanProgress(screen) as progress:
        shown = memlens.demo(out=out, resume=resume, progress=progress, watcher=_watcher(screen, progress))
    if screen.as_json:
        screen.json(_demo_json(shown))
    else:
        _print_demo(screen, shown)
    if serve:
        where = 8000 if port is None else port
        open_workbench(
            index=str(shown.index.folder), model="bundled", port=where, quiet=screen.quiet, verbose=screen.verbose
        )


def _watcher(screen: Screen, progress: ScanProgress) -> StageWatcher:
    """Return a watcher that numbers the stages on the progress bar and prints the outcome of each."""
    from memlens.pipeline import STAGES, StageWatcher

    class Watcher(StageWatcher):
        def begins(self, number: int, name: str) -> None:
            progress.heading = f"{number + 1}/{len(STAGES)} "

        def ended(self, stage: Stage) -> None:
            screen.note(_line(stage))

    return Watcher()


def _line(stage: Stage) -> str:
    if stage.outcome == "kept":
        return f"{stage.name}: complete already"
    few = ", ".join(stage.made) if len(stage.made) <= _NAMED else f"{len(stage.made)} of them"
    which = f" ({few})" if stage.made else ""
    left_out = "".join(f"\n{name} was left out: {visible(reason)}" for name, reason in stage.skipped)
    return f"{stage.name}: done in {duration(stage.seconds)}{which}{left_out}"


def _analysis_json(analysis: Analysis) -> dict[str, Any]:
    from memlens.index.memory import summarize

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


def _print_analysis(screen: Screen, analysis: Analysis) -> None:
    """The curve of every experiment beside the paper's, and where the page is."""

    from memlens.experiments.run import EXPERIMENTS

    index = analysis.index
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("experiment", style="bold", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("layer by layer", style="cyan", no_wrap=True)
    table.add_column("peak", justify="right", no_wrap=True)
    table.add_column("in the paper", style="magenta", no_wrap=True)
    table.add_column("peak", justify="right", no_wrap=True)
    for name, experiment in EXPERIMENTS.items():
        if experiment.picture is None or not index.has(f"experiments/{name}"):
            continue
        published = experiment.tables[0].published()
        ours = experiment.picture.headline(index.table(f"experiments/{name}").to_pylist())
        theirs = experiment.picture.headline(published) if published else []
        for place, (label, numbers, write) in enumerate(ours):
            others = theirs[place][1] if theirs and any(theirs[place][1]) else []
            cells = [*_drawn(numbers, write), *_drawn(others, write)]
            table.add_row(name if place == 0 else "", Text(label), *cells)
    screen.result(table)
    screen.result()
    screen.result(Text.assemble(("report  ", "bold"), visible(str(analysis.report))))
    screen.note(f"next: memlens show {visible(str(index.folder))} {index.names.name(index.layers[0], 0)}")


def _drawn(numbers: list[float | None], write: Any) -> tuple[str, str]:
    """The curve, and the number that stands furthest from zero."""
    known = [value for value in numbers if value is not None]
    return (curve(numbers, 24), write(max(known, key=abs))) if known else ("", "")


def _demo_json(shown: Demo) -> dict[str, Any]:
    return {
        "index": str(shown.index.folder),
        "report": str(shown.report),
        "stages": [{"name": stage.name, "outcome": stage.outcome, "seconds": stage.seconds} for stage in shown.stages],
        "findings": [asdict(finding) for finding in shown.findings],
        "smaller_samples": [asdict(sample) for sample in shown.smaller],
        "verdicts": shown.verdicts,
    }


def _print_demo(screen: Screen, shown: Demo) -> None:
    """The findings with their commands, what was made smaller, and where to go from here."""

    folder = shlex.quote(str(shown.index.folder))
    for number, finding in enumerate(shown.findings, 1):
        screen.result(Text.assemble((f"{number}. ", "dim"), (visible(finding.title), "bold")))
        for line in finding.lines:
            screen.result(Text(f"   {visible(line)}"))
        screen.result(Text.assemble(("   $ ", "dim"), (visible(finding.command), "cyan")))
        screen.result()
    for words in _smaller(shown.smaller):
        screen.note(words)
    counted = ", ".join(f"{count} “{verdict}”" for verdict, count in shown.verdicts.items())
    screen.result(Text(f"The paper's {sum(shown.verdicts.values())} claims, in this model: {counted}."))
    ends = {
        "report": f"{shown.report}  every figure beside the paper's, every verdict with its reason",
        "browse": f"memlens serve {folder}  search, trace and edit memories in the browser",
        "yours": "memlens analyze gpt2 my-texts/ -o my-index  the same for any model and any texts",
    }
    for name, words in ends.items():
        screen.result(Text.assemble((f"{name:<8}", "bold"), visible(words)))


def _smaller(samples: tuple[SmallerSample, ...]) -> list[str]:
    """Say which experiments took a smaller sample than usual, one line per size of sample."""
    alike: dict[tuple[str, int, int], list[str]] = {}
    for sample in samples:
        alike.setdefault((sample.counts, sample.here, sample.default), []).append(sample.experiment)
    return [
        f"to be quick, {', '.join(names)} looked at {here:,} {counts}; the default is {default:,}"
        for (counts, here, default), names in alike.items()
    ]
