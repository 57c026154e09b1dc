"""`memlens report`: an index as one page."""

from typing import Annotated

import typer

from memlens.cli.options import Force, IndexFolder, Json, Quiet, Verbose
from memlens.cli.screen import ScanProgress, Screen
from memlens.text import size, visible


def report(
    index: IndexFolder,
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="FILE.html", help="Default: report.html in the index.")
    ] = None,
    assets: Annotated[
        str | None, typer.Option(metavar="DIR", help="A folder for SVG, PDF and CSV of each chart.")
    ] = None,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write one self-contained page with every chart beside the published one."""
    from memlens.index.reader import Index

    screen = Screen(as_json, quiet, verbose)
    opened = Index(index)
    with ScanProgress(screen) as progress:
        from memlens import api
        from memlens.experiments.registry import EXPERIMENTS

        page = api.report(opened, out=out, assets=assets, force=force, progress=progress)
    missing = [name for name in EXPERIMENTS if not opened.has(f"experiments/{name}")]
    if as_json:
        told = {"index": str(opened.folder), "report": str(page), "bytes": page.stat().st_size}
        screen.json(told | {"assets": assets, "missing_experiments": missing})
        return
    screen.result(visible(str(page)))
    screen.note(f"{size(page.stat().st_size)}, self-contained: open it in a browser, or send it to somebody")
    if assets is not None:
        screen.note(f"the charts as SVG, PDF and CSV are in {visible(assets)}")
    if missing:
        folder = visible(str(opened.folder))
        command = f"memlens experiment {folder} all" if opened.has("values") else f"memlens values {folder}"
        screen.note(f"{len(missing)} of {len(EXPERIMENTS)} experiments are not in it yet; next: {command}")
