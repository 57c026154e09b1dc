"""`memlens experiment`: the paper's experiments on an index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import memlens
from memlens.cli.options import (
    IndexFolder,
    ModelNow,
    Validation,
    refuse_unused_column,
    with_screen,
    with_settings,
)
from memlens.cli.screen import ScanProgress, Screen
from memlens.errors import SettingError
from memlens.settings import CorpusSettings, RunSettings, SampleSettings, option_name
from memlens.text import curve, plain_table, visible

if TYPE_CHECKING:
    import pyarrow as pa

    from memlens.experiments.experiment import Experiment, Picture, Row, Rows, Write

_LAYERS = 12  # rows of a table; -v shows every layer
_LABEL = 15


@with_settings(SampleSettings, CorpusSettings, RunSettings)
@with_screen(json=True)
def experiment(
    screen: Screen,
    index: IndexFolder,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME|all", help="Without a name the experiments are listed.")
    ] = None,
    validation: Validation = None,
    model: ModelNow = None,
    **options: Any,
) -> None:
    """Run the paper's experiments on an index, layer by layer."""

    opened = memlens.Index(index)
    if not names:
        for given in (*options, *(["validation"] if validation else []), *(["model"] if model else [])):
            raise SettingError(f"{option_name(given)} counts for experiments that are named; name some, or all")
        _list(screen, opened)
        return
    if validation:
        refuse_unused_column(options, validation)
    skipped: dict[str, str] = {}
    with ScanProgress(screen) as progress:
        from memlens.experiments.run import find_experiments

        chosen = find_experiments(names)
        tables = memlens.experiment(
            opened,
            names,
            validation=validation or None,
            model=model,
            progress=progress,
            skipped=skipped.__setitem__,
            **options,
        )
    run = [experiment for experiment in chosen if experiment.name not in skipped]
    if screen.as_json:
        screen.json(_as_json(opened, run, tables, skipped))
    else:
        for number, experiment in enumerate(run):
            if number:
                screen.result()
            print_experiment(
                screen, opened, experiment, {name: tables[name].to_pylist() for name in experiment.table_names}
            )
            _print_claims(screen, opened, experiment, tables)
    for name, reason in skipped.items():
        screen.note(f"{name} was left out: {visible(reason)}")
    screen.note(f"tables are in {visible(str(opened.folder / 'experiments'))}; next: memlens report {visible(index)}")


def _as_json(
    index: memlens.Index, run: list[Experiment], tables: dict[str, pa.Table], skipped: dict[str, str]
) -> dict[str, Any]:
    from memlens.experiments.run import origin

    noted = index.manifest.experiments
    return {
        "index": str(index.folder),
        "prefixes": next((words for experiment in run if (words := origin(index, experiment))), None),
        "experiments": [
            {
                "name": experiment.name,
                "figure": experiment.figure,
                "title": experiment.title,
                "seed": noted[experiment.name].seed,
                "sample": noted[experiment.name].sample,
                "sample_of": experiment.sample_of,
                "prefixes": origin(index, experiment) or None,
                "tables": {name: tables[name].to_pylist() for name in experiment.table_names},
                "claims": [judged.record for judged in experiment.judge(index, _rows_of(tables))],
            }
            for experiment in run
        ],
        "skipped": [{"name": name, "reason": reason} for name, reason in skipped.items()],
    }


def _rows_of(tables: dict[str, pa.Table]) -> Callable[[str], list[Row] | None]:
    return lambda name: tables[name].to_pylist()


def _print_claims(screen: Screen, index: memlens.Index, experiment: Experiment, tables: dict[str, pa.Table]) -> None:
    """Each claim with its verdict, and the reason below."""
    for judged in experiment.judge(index, _rows_of(tables)):
        judgement = judged.judgement
        assert judgement is not None  # its table has just been made
        screen.result(Padding(Text.assemble((judgement.verdict, "bold"), ": ", judged.claim.text), 0))
        screen.result(Padding(Text(visible(judgement.reason), "dim"), (0, 0, 0, 2)))


def _list(screen: Screen, index: memlens.Index) -> None:
    """Every experiment in a line, and whether this index has it."""
    from memlens.experiments.run import EXPERIMENTS

    states = {name: _state(index, experiment) for name, experiment in EXPERIMENTS.items()}
    if screen.as_json:
        listed = [
            {
                "name": experiment.name,
                "figure": experiment.figure,
                "title": experiment.title,
                "state": states[experiment.name],
            }
            for experiment in EXPERIMENTS.values()
        ]
        screen.json({"index": str(index.folder), "experiments": listed})
        return

    table = plain_table(["experiment", "paper", "made", "what it shows"], last_wraps=True)
    styles = {"made": "green", "outdated": "yellow"}
    words = {"made": "yes", "not made": "no"}
    for experiment in EXPERIMENTS.values():
        state = states[experiment.name]
        table.add_row(
            Text(experiment.name, "bold"),
            _short(experiment.figure),
            Text(words.get(state, state), styles.get(state, "dim")),
            experiment.title,
        )
    screen.result(table)
    screen.note(f"run some by name, or all: memlens experiment {visible(str(index.folder))} all")


def _state(index: memlens.Index, experiment: Experiment) -> str:
    from memlens.experiments.run import is_outdated

    if not index.has(f"experiments/{experiment.name}"):
        return "not made"
    return "outdated" if is_outdated(index, experiment) else "made"


def _short(figure: str) -> str:
    """Fig. 6 for `Figure 6 and Table 2`; a dash for what the paper does not have."""
    if not figure.startswith(("Figure", "Section")):
        return "–"
    return figure.split(" and ")[0].replace("Figure", "Fig.").replace("Section", "Sec.")


def print_experiment(screen: Screen, index: memlens.Index, experiment: Experiment, tables: Rows) -> None:
    """Heading, what took part, curves beside the paper's, table."""

    from memlens.experiments.experiment import Picture
    from memlens.experiments.run import origin

    screen.result(Text.assemble((experiment.name, "bold"), "  " + experiment.title))
    prefixes = visible(origin(index, experiment) or "sampled prefixes")
    rows = tables[experiment.name]
    if experiment.terminal is not None:
        words, shown = experiment.terminal(index, tables, screen.out.width, prefixes)
    else:
        picture = experiment.picture or Picture.plain(rows)
        layers = picture.by_layer(rows)
        words = prefixes if experiment.on_prefixes else _took_part(index, picture, layers)
        shown = [_curves(experiment, picture, rows), _table(picture, layers, None if screen.verbose else _LAYERS)]
    screen.result(Padding(Text(f"{experiment.figure}: {words}", "dim"), 0))  # broken between words where it is long
    for part in shown:
        screen.result(part)
    if experiment.terminal is not None:
        return
    if len(layers) > _LAYERS and not screen.verbose:
        screen.note(f"{_LAYERS} of {len(layers)} layers are listed; see all with -v")
    for part in picture.below(tables) if picture.below else ():
        screen.result(part)


def _took_part(index: memlens.Index, picture: Picture, rows: list[Row]) -> str:
    """Say how many memories and prefixes took part, and what was left out."""
    parts = [f"{sum(row.get('memories') or 0 for row in rows):,} memories"]
    if any("prefixes" in row for row in rows):
        parts.append(f"{sum(row['prefixes'] for row in rows):,} prefixes")
    remark = picture.remark(index) if picture.remark else ""
    parts += [remark] if remark else []
    reasons = {
        "no_trigger": "without a trigger",
        "no_next": "with nothing to compare with after the trigger",
        "left_out": "prefixes of one token",
    }
    left = [f"{sum(row[c] for row in rows):,} {w}" for c, w in reasons.items() if any(row.get(c) for row in rows)]
    return ", ".join(parts) + (f"; left out: {', '.join(left)}" if left else "")


def _curves(experiment: Experiment, picture: Picture, rows: Sequence[Row]) -> Any:

    table = Table.grid(padding=(0, 2, 0, 0))
    published = experiment.tables[0].published()
    theirs = picture.headline(published) if published else []
    for place, (label, numbers, write) in enumerate(picture.headline(rows)):
        table.add_row(Text(f"{label:<{_LABEL}}"), Text(curve(numbers), "cyan"), _span(numbers, write))
        paper = theirs[place][1] if theirs else []
        if any(paper):
            table.add_row(Text("  in the paper", "dim"), Text(curve(paper), "magenta"), _span(paper, write))
    return table


def _span(numbers: Sequence[float | None], write: Write) -> Any:

    known = [value for value in numbers if value is not None]
    return Text(f"{write(min(known))} to {write(max(known))}" if known else "no numbers", "dim")


def _table(picture: Picture, rows: list[Row], most: int | None) -> Any:
    """The table with at most so many layers, the first and the last among them."""
    table = plain_table([">layer"])
    for column in picture.columns:
        table.add_column(column.head, justify="right", no_wrap=True)
        if column.interval:
            table.add_column("95%", no_wrap=True, style="dim")
    if most is not None and len(rows) > most:
        rows = [rows[round(place * (len(rows) - 1) / (most - 1))] for place in range(most)]
    for row in rows:
        cells = [[column.cell(row), *([column.span(row)] if column.interval else [])] for column in picture.columns]
        table.add_row(str(row["layer"]), *(text for cell in cells for text in cell))
    return table
