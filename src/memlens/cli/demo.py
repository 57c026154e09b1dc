"""`memlens demo`: everything on the bundled model and corpus, offline, and five findings to begin with."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memlens.cli.options import Json, Quiet, Verbose
from memlens.cli.scan import Resume
from memlens.cli.screen import ScanProgress, Screen
from memlens.errors import SettingError
from memlens.text import duration, visible

if TYPE_CHECKING:
    from memlens.pipeline import Demo, SmallerSample, Stage


def demo(
    out: Annotated[
        str, typer.Option("--out", "-o", metavar="DIR", help="The folder to write the index to.")
    ] = "memlens-demo",
    serve: Annotated[bool, typer.Option("--serve", help="Open the workbench on it afterwards.")] = False,
    port: Annotated[int, typer.Option(metavar="N", help="With --serve; 0 takes any that is free.")] = 8000,
    resume: Resume = True,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show what memlens finds, on its own small model and text. Needs no network and about two minutes."""
    if serve and as_json:
        raise SettingError("--serve does not end and --json is for machines; leave one of them out")
    screen = Screen(as_json, quiet, verbose)
    with ScanProgress(screen) as progress:
        from memlens.pipeline import STAGES, StageWatcher
        from memlens.pipeline import demo as run

        class Watcher(StageWatcher):
            def begins(self, number: int, name: str) -> None:
                progress.heading = f"{number + 1}/{len(STAGES)} "

            def ended(self, stage: Stage) -> None:
                screen.note(_line(stage))

        found = run(out=out, resume=resume, progress=progress, watcher=Watcher())
    if as_json:
        screen.json(_as_json(found))
    else:
        _print(screen, found)
    if serve:
        from memlens.cli.serve import serve as open_workbench

        open_workbench(str(found.index.folder), model="bundled", port=port, quiet=quiet, verbose=verbose)


def _line(stage: Stage) -> str:
    return f"{stage.name}: complete already" if stage.outcome == "kept" else f"{stage.name}: {duration(stage.seconds)}"


def _as_json(found: Demo) -> dict[str, Any]:
    return {
        "index": str(found.index.folder),
        "report": str(found.report),
        "stages": [{"name": one.name, "outcome": one.outcome, "seconds": one.seconds} for one in found.stages],
        "findings": [asdict(told) for told in found.findings],
        "smaller_samples": [asdict(one) for one in found.smaller],
    }


def _print(screen: Screen, found: Demo) -> None:
    """The findings with their commands, what was made smaller, and where to go from here."""
    from rich.text import Text

    folder = shlex.quote(str(found.index.folder))
    for number, told in enumerate(found.findings, 1):
        screen.result(Text.assemble((f"{number}. ", "dim"), (visible(told.title), "bold")))
        for line in told.lines:
            screen.result(Text(f"   {visible(line)}"))
        screen.result(Text.assemble(("   $ ", "dim"), (visible(told.command), "cyan")))
        screen.result()
    for words in _smaller(found.smaller):
        screen.note(words)
    screen.result(Text.assemble(("report  ", "bold"), visible(str(found.report))))
    screen.result(Text.assemble(("browse  ", "bold"), visible(f"memlens serve {folder} --model bundled")))


def _smaller(samples: tuple[SmallerSample, ...]) -> list[str]:
    """Which experiments looked at less than usual; those with the same sample in one line."""
    alike: dict[tuple[str, int, int], list[str]] = {}
    for one in samples:
        alike.setdefault((one.counts, one.here, one.default), []).append(one.experiment)
    return [
        f"to be quick, {', '.join(names)} looked at {here:,} {counts}; the default is {default:,}"
        for (counts, here, default), names in alike.items()
    ]
