"""`memlens values`: what every value promotes."""

from typing import Any

from memlens.cli.options import IndexFolder, Json, ModelNow, Quiet, Verbose, with_settings
from memlens.cli.screen import ScanProgress, Screen
from memlens.settings import RunSettings, ValueSettings
from memlens.text import number, percent, quoted, visible


@with_settings(ValueSettings, RunSettings)
def values(
    index: IndexFolder,
    model: ModelNow = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    **options: Any,
) -> None:
    """Find the tokens that every value promotes and pushes down."""
    from memlens.index.reader import Index

    screen = Screen(as_json, quiet, verbose)
    opened = Index(index)
    with ScanProgress(screen) as progress:
        from memlens import api
        from memlens.index.memory import summarize_values

        api.values(opened, model=model, progress=progress, **options)
    summary = summarize_values(opened)
    if as_json:
        screen.json(summary)
    elif not quiet:
        _print(screen, summary)


def _print(screen: Screen, summary: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    agree, compared = summary["agree"], summary["with_target"]
    facts = {
        "model": summary["model"],
        "values": f"{summary['memories']:,}, read {summary['reading']}, {summary['top']} tokens at each end",
        "max p": f"{number(summary['median_max_p'])} in the median",
        "agree": f"{agree:,} of {compared:,} ({percent(agree / compared if compared else None)}): "
        "the top token is what follows the top trigger",
    }
    table = Table.grid(padding=(0, 2))
    for name, fact in facts.items():
        table.add_row(Text(name, "bold"), Text(visible(fact)))
    screen.result(table)
    screen.result()
    screen.result(Text("the most confident values", "dim"))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("memory", style="bold")
    table.add_column("token")
    table.add_column("p", justify="right")
    table.add_column("agrees")
    for row in summary["most_confident"]:
        mark = Text("–", "dim") if row["agrees"] is None else Text("yes", "green") if row["agrees"] else Text("no")
        table.add_row(row["name"], Text(quoted(row["text"], 24), "cyan"), number(row["p"]), mark)
    screen.result(table)
    screen.note(f"next: memlens experiment {visible(summary['index'])} all")
