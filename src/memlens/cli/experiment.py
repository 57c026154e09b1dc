"""`memlens experiment`: the paper's experiments on an index."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from memlens.cli.options import IndexFolder, Json, ModelNow, Quiet, Validation, Verbose, with_settings
from memlens.cli.screen import ScanProgress, Screen
from memlens.corpus.settings import CorpusSettings
from memlens.settings import RunSettings, SampleSettings
from memlens.text import visible

if TYPE_CHECKING:
    import pyarrow as pa

    from memlens.experiments.registry import Experiment
    from memlens.index.reader import Index


@with_settings(SampleSettings, CorpusSettings, RunSettings)
def experiment(
    index: IndexFolder,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME|all", help="Without a name the experiments are listed.")
    ] = None,
    validation: Validation = None,
    model: ModelNow = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    **options: Any,
) -> None:
    """Run the paper's experiments on an index, layer by layer."""
    from memlens.index.reader import Index

    screen = Screen(as_json, quiet, verbose)
    opened = Index(index)
    if not names:
        _list(screen, opened)
        return
    skipped: dict[str, str] = {}
    with ScanProgress(screen) as progress:
        from memlens import api
        from memlens.experiments.registry import find_experiments

        chosen = find_experiments(names)
        made = api.experiment(
            opened,
            names,
            validation=validation or None,
            model=model,
            progress=progress,
            skipped=skipped.__setitem__,
            **options,
        )
    run = [one for one in chosen if one.name not in skipped]
    if as_json:
        screen.json(_as_json(opened, run, made, skipped))
    else:
        from memlens.cli.experiment_tables import print_experiment

        for number, one in enumerate(run):
            if number:
                screen.result()
            print_experiment(screen, opened, one, {name: made[name].to_pylist() for name in one.table_names})
    for name, reason in skipped.items():
        screen.note(f"{name} was left out: {visible(reason)}")
    screen.note(f"tables are in {visible(str(opened.folder / 'experiments'))}; next: memlens report {visible(index)}")


def _as_json(index: Index, run: list[Experiment], made: dict[str, pa.Table], skipped: dict[str, str]) -> dict[str, Any]:
    from memlens.experiments.run import origin

    noted = index.manifest.experiments
    return {
        "index": str(index.folder),
        "prefixes": next((words for one in run if (words := origin(index, one))), None),
        "experiments": [
            {
                "name": one.name,
                "figure": one.figure,
                "title": one.title,
                "seed": noted[one.name].seed,
                "sample": noted[one.name].sample,
                "sample_of": one.sample_of,
                "prefixes": origin(index, one) or None,
                "tables": {name: made[name].to_pylist() for name in one.table_names},
            }
            for one in run
        ],
        "skipped": [{"name": name, "reason": reason} for name, reason in skipped.items()],
    }


def _list(screen: Screen, index: Index) -> None:
    """Every experiment in a line, and whether this index has it."""
    from memlens.experiments.registry import EXPERIMENTS

    states = {name: _state(index, one) for name, one in EXPERIMENTS.items()}
    if screen.as_json:
        listed = [
            {"name": one.name, "figure": one.figure, "title": one.title, "state": states[one.name]}
            for one in EXPERIMENTS.values()
        ]
        screen.json({"index": str(index.folder), "experiments": listed})
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for head in ("experiment", "paper", "made", "what it shows"):
        table.add_column(head, no_wrap=head != "what it shows")
    styles = {"made": "green", "outdated": "yellow"}
    words = {"made": "yes", "not made": "no"}
    for one in EXPERIMENTS.values():
        state = states[one.name]
        table.add_row(
            Text(one.name, "bold"),
            _short(one.figure),
            Text(words.get(state, state), styles.get(state, "dim")),
            one.title,
        )
    screen.result(table)
    screen.note(f"run some by name, or all: memlens experiment {visible(str(index.folder))} all")


def _state(index: Index, experiment: Experiment) -> str:
    from memlens.experiments.run import is_outdated

    if not index.has(f"experiments/{experiment.name}"):
        return "not made"
    return "outdated" if is_outdated(index, experiment) else "made"


def _short(figure: str) -> str:
    """Fig. 6 for `Figure 6 and Table 2`; a dash for what the paper does not have."""
    if not figure.startswith(("Figure", "Section")):
        return "–"
    return figure.split(" and ")[0].replace("Figure", "Fig.").replace("Section", "Sec.")
