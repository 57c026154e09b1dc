"""`analyze` and `demo`, which run all stages, and `experiment`, which runs the paper's experiments on an index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

import memlens
from memlens.cli.explore import suggest_memory
from memlens.cli.index import open_workbench, refuse_without_workbench
from memlens.cli.options import (
    WholeNumber,
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
    refuse_unused_column,
    resume_option,
    setting_option,
    settings_options,
    states_option,
    threads_option,
    validation_option,
    verb,
)
from memlens.cli.screen import ProgressBar, Screen, command_line
from memlens.errors import SettingError
from memlens.settings import CorpusSettings, RunSettings, SampleSettings, ScanSettings, ValueSettings
from memlens.text import curve, cut_left, duration, visible

if TYPE_CHECKING:
    import pyarrow as pa

    from memlens.experiments.experiment import Experiment, Picture, Row, Rows, Write
    from memlens.pipeline import Analysis, Demo, SmallerSample, Stage, StageWatcher
    from memlens.reports.findings import Finding

_VALUES = "Values"
_NAMED = 4  # maximum number of experiments to list by name


@verb(json=True)
@model_argument
@corpus_argument
@out_option
@settings_options(ScanSettings, CorpusSettings, SampleSettings)
@setting_option(ValueSettings, "top", "--tokens", panel=_VALUES)
@setting_option(ValueSettings, "reading", panel=_VALUES)
@setting_option(ValueSettings, "vocabulary", panel=_VALUES)
@validation_option
@device_option
@dtype_option
@states_option
@threads_option
@resume_option
def analyze(
    screen: Screen,
    model: str,
    corpus: tuple[str, ...],
    out: str,
    validation: tuple[str, ...],
    device: str,
    dtype: str,
    resume: bool,
    **options: Any,
) -> None:
    """Run all stages: scan, values, patterns, roles, experiments and report. The command can be resumed."""
    refuse_unused_column(options, [*corpus, *validation])
    with ProgressBar(screen) as progress:
        try:
            analysis = memlens.analyze(
                model,
                corpus,
                out=out,
                resume=resume,
                device=device,
                dtype=dtype,
                validation=validation or None,
                progress=progress,
                watcher=_make_watcher(screen, progress),
                **options,
            )
        except KeyboardInterrupt as error:
            if resume:
                raise
            raise type(error)("interrupted; run the command again without --fresh to resume") from None
    if screen.as_json:
        screen.json(_analysis_json(analysis))
    elif not screen.quiet:
        _print_analysis(screen, analysis)


@verb(json=True)
@option("--out", "-o", default="memlens-demo", metavar="INDEX", help="Folder to write the index to.")
@flag("--serve", help="Start the workbench when the demo is complete.")
@option(
    "--port",
    type=WholeNumber(0, 65535),
    default=8000,
    metavar="N",
    help="Port of the workbench. 0 selects a free port.",
)
@resume_option
def demo(screen: Screen, out: str, serve: bool, port: int, resume: bool) -> None:
    """Analyze the bundled model and text, and print five findings. Takes about two minutes, offline."""
    if serve and screen.as_json:
        raise SettingError("--serve and --json exclude each other; choose one")
    if serve:
        refuse_without_workbench()
    else:
        refuse_options(["--port"], "has no effect without --serve")
    with ProgressBar(screen) as progress:
        result = memlens.demo(out=out, resume=resume, progress=progress, watcher=_make_watcher(screen, progress))
    if screen.as_json:
        screen.json(_demo_json(result))
    else:
        for line in _describe_samples(result.smaller):
            screen.note(line)
        _print_analysis(screen, result)
    if serve:
        open_workbench(screen, str(result.index.folder), "bundled", port=port)


def _make_watcher(screen: Screen, progress: ProgressBar) -> StageWatcher:
    """Return a watcher that numbers the stages on the progress bar and prints one line when a stage ends."""
    from memlens.pipeline import STAGES, StageWatcher

    class Watcher(StageWatcher):
        def begins(self, number: int, name: str) -> None:
            progress.prefix = f"{number + 1}/{len(STAGES)} "

        def ended(self, stage: Stage) -> None:
            screen.note(_describe_stage(stage))

    return Watcher()


def _describe_stage(stage: Stage) -> str:
    if stage.outcome == "kept":
        return f"{stage.name}: already complete"
    few = ", ".join(stage.made) if len(stage.made) <= _NAMED else f"{len(stage.made)} of them"
    which = f" ({few})" if stage.made else ""
    skipped = "".join(f"\n{name} was skipped: {visible(reason)}" for name, reason in stage.skipped)
    return f"{stage.name}: done in {duration(stage.seconds)}{which}{skipped}"


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
        "findings": [asdict(finding) for finding in analysis.findings],
        "verdicts": analysis.verdicts,
    }


def _demo_json(demo: Demo) -> dict[str, Any]:
    return {
        "index": str(demo.index.folder),
        "report": str(demo.report),
        "stages": [{"name": stage.name, "outcome": stage.outcome, "seconds": stage.seconds} for stage in demo.stages],
        "findings": [asdict(finding) for finding in demo.findings],
        "smaller_samples": [asdict(sample) for sample in demo.smaller],
        "verdicts": demo.verdicts,
    }


def _print_analysis(screen: Screen, analysis: Analysis) -> None:
    """Print the findings, the verdicts on the claims of the paper, and what to do next."""
    from memlens.reports.findings import describe_verdicts

    for place, finding in enumerate(analysis.findings, 1):
        _print_finding(screen, place, finding)
    screen.result()
    screen.paragraph(describe_verdicts(analysis.verdicts))
    screen.facts(
        {
            "read": str(analysis.report),
            "browse": command_line("serve", analysis.index.folder),
            "your model": "memlens analyze gpt2 my-texts/ -o my-index",
        }
    )
    memory = next((finding.memory for finding in analysis.findings if finding.memory), None)
    command = command_line("show", analysis.index.folder, memory or suggest_memory(analysis.index))
    screen.note(f"next: {visible(command)}")


def _print_finding(screen: Screen, place: int, finding: Finding) -> None:
    """Print a finding on at most six lines of 80 columns, unless its numbers or its command are longer."""
    room = screen.out.width - 3
    screen.paragraph(Text.assemble((f"{place}. ", "dim"), (visible(finding.title), "bold")))
    for before, token in finding.triggers:
        last = f"[{visible(token)}]" if token == token.lstrip() else f" [{visible(token.lstrip())}]"
        last = cut_left(last, room - 1)  # one column for the … of the text before it
        line = cut_left(visible(before) + last, room)
        screen.result(Text.assemble("   ", line.removesuffix(last), (last, "bold")))
    if finding.curve is not None:
        ours, theirs = finding.curve.numbers, finding.curve.published
        curves = [_describe_curve(finding.curve.label, ours, finding.curve.ends, theirs)]
        if theirs:
            curves += [Text("; "), _describe_curve("paper", theirs, finding.curve.published_ends, ours)]
        screen.result(Text.assemble("   ", *curves))
    for sentence in finding.lines:
        screen.paragraph(Text(visible(sentence)), indent=3)
    screen.result(Text.assemble(("   $ ", "dim"), (visible(finding.command), "cyan")))


def _describe_curve(
    name: str, numbers: Sequence[float | None], ends: tuple[str, str], beside: Sequence[float | None]
) -> Text:
    """Return a curve between its first and last number. The scale is shared with `beside`."""
    return Text.assemble(f"{name} {ends[0]} ", (curve(numbers, 16, beside), "cyan"), f" {ends[1]}")


def _describe_samples(samples: tuple[SmallerSample, ...]) -> list[str]:
    """Return one line for each sample size below its default, with the experiments that use it."""
    by_size: dict[tuple[str, int, int], list[str]] = {}
    for sample in samples:
        by_size.setdefault((sample.counts, sample.here, sample.default), []).append(sample.experiment)
    return [
        f"to save time, {', '.join(names) if len(names) <= _NAMED else f'{len(names)} experiments'} used only {here:,} "
        f"{counts} (default: {default:,})"
        for (counts, here, default), names in by_size.items()
    ]


_LAYERS = 12  # maximum number of layers in the table of an experiment; -v shows all
_LABEL_WIDTH = 15


@verb(json=True)
@index_argument
@argument("names", nargs=-1, metavar="NAME", help="Names of experiments, or `all`. Default: list the experiments.")
@settings_options(SampleSettings, CorpusSettings, RunSettings)
@validation_option
@location_option()
@option(
    "--file",
    type=Path,
    metavar="FILE",
    help="Run the experiments on prefixes with the edits of a saved intervention or circuit. Writes nothing to the "
    "index.",
)
def experiment(
    screen: Screen,
    index: str,
    names: tuple[str, ...],
    validation: tuple[str, ...],
    model: str | None,
    file: Path | None,
    **options: Any,
) -> None:
    """Run the paper's experiments on an index."""
    opened = memlens.Index(index)
    if not names:
        refuse_options(given_options(), "has no effect without a NAME")
        _list_experiments(screen, opened)
        return
    if validation:
        refuse_unused_column(options, validation)
    intervention = None if file is None else memlens.Intervention.load(file)
    skipped: dict[str, str] = {}
    with ProgressBar(screen) as progress:
        from memlens.experiments.run import find_experiments

        selected = find_experiments(names)
        tables = memlens.experiment(
            opened,
            names,
            validation=validation or None,
            model=model,
            intervention=intervention,
            progress=progress,
            skipped=skipped.__setitem__,
            **options,
        )
    completed = [experiment for experiment in selected if experiment.name not in skipped]
    if screen.as_json:
        screen.json(_experiments_json(opened, completed, tables, skipped, intervention))
    else:
        edited = "" if file is None else f"random prefixes, with the edits of {visible(file.name)}"
        for place, experiment in enumerate(completed):
            if place:
                screen.result()
            rows = {name: tables[name].to_pylist() for name in experiment.table_names}
            _print_experiment(screen, opened, experiment, rows, edited)
            _print_claims(screen, opened, experiment, tables)
        if intervention is None:
            _print_shuffled(screen, opened, completed, tables)
    for name, reason in skipped.items():
        screen.note(f"{name} was skipped: {visible(reason)}")
    if intervention is not None:
        screen.note("the model ran with the edits; nothing was written to the index")
        return
    screen.note(f"tables are in {visible(str(opened.folder / 'experiments'))}")
    screen.note(f"next: {command_line('report', opened.folder)}")


def _experiments_json(
    index: memlens.Index,
    completed: list[Experiment],
    tables: dict[str, pa.Table],
    skipped: dict[str, str],
    intervention: memlens.Intervention | None,
) -> dict[str, Any]:
    from memlens.experiments.run import origin

    edited = intervention is not None

    def describe(experiment: Experiment) -> dict[str, Any]:
        """Return the seed, sample size and prefixes in the manifest, or an empty dict for a run with edits."""
        if edited:
            return {}
        recorded = index.manifest.experiments[experiment.name]
        prefixes = origin(index, experiment) or None
        return {"seed": recorded.seed, "sample": recorded.sample, "prefixes": prefixes}

    return {
        "index": str(index.folder),
        "intervention": None if intervention is None else intervention.to_json(),
        "prefixes": next((words for one in completed if not edited and (words := origin(index, one))), None),
        "experiments": [
            {
                "name": experiment.name,
                "figure": experiment.figure,
                "title": experiment.title,
                "sample_of": experiment.sample_of,
                **describe(experiment),
                "tables": {name: tables[name].to_pylist() for name in experiment.table_names},
                "claims": [judged.record for judged in experiment.judge(index, _read_rows(tables))],
            }
            for experiment in completed
        ],
        "skipped": [{"name": name, "reason": reason} for name, reason in skipped.items()],
    }


def _read_rows(tables: dict[str, pa.Table]) -> Callable[[str], list[Row] | None]:
    return lambda name: tables[name].to_pylist()


def _print_claims(screen: Screen, index: memlens.Index, experiment: Experiment, tables: dict[str, pa.Table]) -> None:
    """Print each claim with its verdict and the reason."""
    for judged in experiment.judge(index, _read_rows(tables)):
        judgement = judged.judgement
        assert judgement is not None  # not None, because the numbers were computed above
        screen.paragraph(Text.assemble((judgement.verdict, "bold"), ": ", judged.claim.text))
        screen.paragraph(Text(visible(judgement.reason), "dim"), indent=2)


def _print_shuffled(
    screen: Screen, index: memlens.Index, completed: list[Experiment], tables: dict[str, pa.Table]
) -> None:
    """Print the claims next to the same measurements in shuffled networks, if the index has them."""
    judged = [
        (one.claim, one.judgement) for experiment in completed for one in experiment.judge(index, _read_rows(tables))
    ]
    if not any(judgement and judgement.shuffled for _, judgement in judged):
        return
    rows = [
        [claim.text, visible(judgement.yours), judgement.shuffled or "–", Text(judgement.verdict, "bold")]
        for claim, judgement in judged
        if judgement is not None
    ]
    screen.result()
    screen.table(["claim", "this model", "shuffled network", "verdict"], rows, wrap=True)


def _list_experiments(screen: Screen, index: memlens.Index) -> None:
    """List every experiment and whether the index holds its tables."""
    from memlens.experiments.run import EXPERIMENTS, is_outdated

    states = {}
    for name, experiment in EXPERIMENTS.items():
        if not index.has(f"experiments/{name}"):
            states[name] = "not made"
        else:
            states[name] = "outdated" if is_outdated(index, experiment) else "made"
    if screen.as_json:
        listed = [
            {"name": name, "figure": experiment.figure, "title": experiment.title, "state": states[name]}
            for name, experiment in EXPERIMENTS.items()
        ]
        screen.json({"index": str(index.folder), "experiments": listed})
        return
    styles = {"made": "green", "outdated": "yellow", "not made": "dim"}
    rows = [
        [
            Text(name, "bold"),
            _short_figure(experiment.figure),
            Text(states[name], styles[states[name]]),
            experiment.title,
        ]
        for name, experiment in EXPERIMENTS.items()
    ]
    screen.table(["experiment", "paper", "state", "what it shows"], rows, wrap=True)
    screen.note(f"next: {command_line('experiment', index.folder, 'all')}")


def _short_figure(figure: str) -> str:
    """Return "Fig. 6" for "Figure 6 and Table 2", or a dash for an experiment that is not in the paper."""
    if not figure.startswith(("Figure", "Section")):
        return "–"
    return figure.split(" and ")[0].replace("Figure", "Fig.").replace("Section", "Sec.")


def _print_experiment(
    screen: Screen, index: memlens.Index, experiment: Experiment, tables: Rows, edited: str = ""
) -> None:
    """Print heading, sample, curves next to the paper's, and table. `edited` describes a run with edits."""
    from memlens.experiments.run import origin

    screen.paragraph(Text.assemble((experiment.name, "bold"), "  " + experiment.title))
    prefixes = edited or visible(origin(index, experiment) or "sampled prefixes")
    rows = tables[experiment.name]
    if experiment.terminal is not None:
        sample, parts = experiment.terminal(index, tables, screen.out.width, prefixes)
        screen.paragraph(Text(f"{experiment.figure}: {sample}", "dim"))
        for part in parts:
            screen.result(part)
        return
    picture = experiment.picture
    assert picture is not None  # an experiment without `terminal` has a picture
    layers = picture.by_layer(rows)
    sample = prefixes if experiment.on_prefixes else _describe_sample(index, picture, layers)
    screen.paragraph(Text(f"{experiment.figure}: {sample}", "dim"))
    _print_curves(screen, experiment, picture, rows)
    _print_layers(screen, picture, layers)
    for part in picture.below(tables) if picture.below else ():
        screen.result(part)


def _describe_sample(index: memlens.Index, picture: Picture, rows: list[Row]) -> str:
    """Return how many memories and prefixes were used, and how many were left out."""
    parts = [f"{sum(row.get('memories') or 0 for row in rows):,} memories"]
    if any("prefixes" in row for row in rows):
        parts.append(f"{sum(row['prefixes'] for row in rows):,} prefixes")
    remark = picture.remark(index) if picture.remark else ""
    parts += [remark] if remark else []
    reasons = {
        "no_trigger": "memories without a trigger",
        "no_next": "memories whose trigger ends the text",
        "left_out": "prefixes of one token",
    }
    excluded = [
        f"{sum(row[column] for row in rows):,} {reason}"
        for column, reason in reasons.items()
        if any(row.get(column) for row in rows)
    ]
    return ", ".join(parts) + (f"; left out: {', '.join(excluded)}" if excluded else "")


def _print_curves(screen: Screen, experiment: Experiment, picture: Picture, rows: Sequence[Row]) -> None:
    table = Table.grid(padding=(0, 2, 0, 0))
    published = experiment.tables[0].published()
    theirs = picture.headline(published) if published else []
    for place, (label, numbers, write) in enumerate(picture.headline(rows)):
        table.add_row(
            Text(f"{label:<{_LABEL_WIDTH}}"), Text(curve(numbers, 32), "cyan"), _describe_range(numbers, write)
        )
        paper = theirs[place][1] if theirs else []
        if any(paper):
            in_paper = Text(curve(paper, 32), "magenta")
            table.add_row(Text("  in the paper", "dim"), in_paper, _describe_range(paper, write))
    screen.result(table)


def _describe_range(numbers: Sequence[float | None], write: Write) -> Text:
    measured = [value for value in numbers if value is not None]
    return Text(f"{write(min(measured))} to {write(max(measured))}" if measured else "no numbers", "dim")


def _print_layers(screen: Screen, picture: Picture, rows: list[Row]) -> None:
    """Print the table of an experiment, with at most _LAYERS evenly spaced layers unless --verbose is given."""
    shown = rows
    if len(rows) > _LAYERS and not screen.verbose:
        shown = [rows[round(place * (len(rows) - 1) / (_LAYERS - 1))] for place in range(_LAYERS)]
    heads = ["layer"]
    for column in picture.columns:
        heads += [column.head, *(["95%"] if column.interval else [])]
    cells = [
        [
            str(row["layer"]),
            *(
                text
                for column in picture.columns
                for text in [column.cell(row), *([Text(column.span(row), "dim")] if column.interval else [])]
            ),
        ]
        for row in shown
    ]
    screen.table(heads, cells, optional=["95%"])
    if len(shown) < len(rows):
        screen.note(f"{len(shown)} of {len(rows)} layers listed; see all with -v")
