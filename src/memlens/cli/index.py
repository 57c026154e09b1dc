"""Verbs on a finished index: `check`, `repair`, `export`, `report`, `serve`, `site`, `push` and `pull`."""

from __future__ import annotations

from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import click
from rich.text import Text

import memlens
from memlens.cli.explore import suggest_memory
from memlens.cli.options import (
    WholeNumber,
    argument,
    flag,
    force_option,
    index_argument,
    location_option,
    option,
    refuse_options,
    resume_option,
    settings_options,
    verb,
)
from memlens.cli.screen import ProgressBar, Screen, command_line, open_output
from memlens.errors import FilesError, IndexFolderError, SettingError, needing
from memlens.settings import LiveSettings, option_name
from memlens.signals import Terminated
from memlens.text import size, visible

if TYPE_CHECKING:
    from memlens.web.security import Access

repo_argument = argument("repo", metavar="REPO", help="Dataset repository, written OWNER/NAME or OWNER/NAME@REVISION.")
_STYLES = {
    "whole": "green",
    "damaged": "bold red",
    "unreadable": "bold yellow",
    "outdated": "yellow",
    "not listed": "yellow",
}


@verb(json=True)
@index_argument
def check(screen: Screen, index: str) -> None:
    """Verify every file of an index. The exit code is 2 if a file is damaged or cannot be read."""
    with ProgressBar(screen, first="check") as progress:
        checked = memlens.check(index, progress=progress)
    if screen.as_json:
        findings = [asdict(finding) for finding in checked.findings]
        screen.json({"index": str(checked.folder), "whole": checked.is_whole, "files": findings})
    elif not screen.quiet:
        rows = [
            [visible(finding.file), Text(finding.state, _STYLES[finding.state]), visible(finding.detail)]
            for finding in checked.findings
        ]
        screen.table(["file", "state", "detail"], rows, wrap=True)
    from memlens.index.format import ANNOTATIONS

    for finding in checked.damaged:
        if finding.file == ANNOTATIONS:  # annotations cannot be rebuilt, so the advice below does not apply
            raise IndexFolderError(finding.detail)
    if checked.damaged:
        names = [visible(finding.file) for finding in checked.damaged]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise IndexFolderError(
            f"{checked.folder} is damaged: {', '.join(names[:3])}{more}; rebuild tables of later stages with "
            f"`{command_line('repair', checked.folder)}`, or scan again with --fresh"
        )
    if checked.unreadable:
        first = checked.unreadable[0]
        raise FilesError(f"{visible(first.file)} could not be checked: {first.detail}")


@verb(json=True)
@index_argument
@location_option()
def repair(screen: Screen, index: str, model: str | None) -> None:
    """Restore a damaged manifest, and rebuild damaged or outdated tables of values, patterns and experiments."""
    with ProgressBar(screen, first="check") as progress:
        names = memlens.repair(index, model=model, progress=progress)
    if screen.as_json:
        screen.json({"index": str(index), "made": names})
    elif not screen.quiet:
        screen.result(f"rebuilt: {', '.join(names)}" if names else "all tables are intact, so nothing was rebuilt")


_NEURONPEDIA_TOP = 20
_RECORDS = {"jsonl": "memories", "csv": "triggers"}  # format -> name of its records


@verb(json=False)
@index_argument
@option(
    "--format",
    "format_",
    default="jsonl",
    type=click.Choice(("jsonl", "csv", "neuronpedia")),
    metavar="jsonl|csv|neuronpedia",
    help="jsonl: one memory per line. csv: one trigger per row. neuronpedia: a folder of files, which needs the model.",
)
@option("--out", "-o", metavar="FILE", help="File to write, or folder with --format neuronpedia. Default: stdout.")
@option(
    "--top",
    type=WholeNumber(1),
    metavar="N",
    help="Number of triggers per memory and end. Default: all, or 20 with --format neuronpedia.",
)
@force_option
@location_option()
def export(
    screen: Screen, index: str, format_: str, out: str | None, top: int | None, force: bool, model: str | None
) -> None:
    """Export all memories and triggers as JSON Lines or CSV, or in the format of Neuronpedia."""
    from memlens.index.export import FORMATS, MOST_TRIGGERS, is_export

    if format_ == "neuronpedia":
        _export_neuronpedia(screen, index, out, model, top or _NEURONPEDIA_TOP, force)
        return
    refuse_options(["--model"], f"has no effect with --format {format_}")
    if out is None:
        refuse_options(["--force"], "has no effect without -o")
    opened = memlens.Index(index)
    with open_output(out, "-o", is_export, force=force) as handle:
        count = FORMATS[format_](opened, handle, top or MOST_TRIGGERS)
    screen.note(f"wrote {count:,} {_RECORDS[format_]}{'' if out is None else ' to ' + visible(out)}")


def _export_neuronpedia(screen: Screen, index: str, out: str | None, model: str | None, top: int, force: bool) -> None:
    if out is None:
        raise SettingError("--format neuronpedia writes a folder; name the folder with -o")
    opened = memlens.Index(index)
    with ProgressBar(screen, first="model") as progress:
        from memlens.index.neuronpedia import export_neuronpedia

        loaded = opened.load_model(model)
        count = export_neuronpedia(opened, Path(out), loaded, top=top, force=force, progress=progress)
    screen.result(visible(out))
    screen.note(f"wrote {count:,} memories in {len(opened.layers)} sources")


@verb(json=True)
@index_argument
@option("--out", "-o", metavar="FILE.html", help="HTML file to write. Default: report.html in the index.")
@option("--assets", metavar="DIR", help="Folder to which each chart is written as SVG, PDF and CSV.")
@force_option
def report(screen: Screen, index: str, out: str | None, assets: str | None, force: bool) -> None:
    """Write an HTML report with every chart next to the published one."""
    opened = memlens.Index(index)
    with ProgressBar(screen) as progress:
        from memlens.experiments.run import EXPERIMENTS

        page = memlens.report(opened, out=out, assets=assets, force=force, progress=progress)
    missing = [name for name in EXPERIMENTS if not opened.has(f"experiments/{name}")]
    if screen.as_json:
        from memlens.reports.sections import Tables

        record = {"index": str(opened.folder), "report": str(page), "bytes": page.stat().st_size}
        claims = [judged.record for judged in Tables(opened).judge() if judged.judgement]
        screen.json(record | {"assets": assets, "missing_experiments": missing, "claims": claims})
        return
    screen.result(visible(str(page)))
    screen.note(f"{size(page.stat().st_size)}; the file is complete in itself, so you can open or send it")
    if assets is not None:
        screen.note(f"the charts as SVG, PDF and CSV are in {visible(assets)}")
    if missing:
        command = command_line(
            *(("experiment", opened.folder, "all") if opened.has("values") else ("values", opened.folder))
        )
        screen.note(f"{len(missing)} of {len(EXPERIMENTS)} experiments were not run; next: {command}")


@verb(json=True)
@index_argument
@option("--out", "-o", required=True, metavar="DIR", help="Folder or .zip file to write the site to.")
@option("--layers", metavar="0-5,11", help="Layers to include. Default: all.")
@option("--top", type=int, default=10, metavar="N", help="Number of top and of bottom triggers per memory.")
@option(
    "--circuit", multiple=True, metavar="FILE", help="File written by `memlens circuit --save` to include. Repeatable."
)
@force_option
def site(
    screen: Screen, index: str, out: str, layers: str | None, top: int, circuit: tuple[str, ...], force: bool
) -> None:
    """Write the workbench as static files that work on any web host and from disk, as a folder or a .zip file."""
    refuse_without_workbench()
    with ProgressBar(screen, first="site") as progress:
        first = memlens.site(index, out=out, layers=layers, top=top, circuits=circuit, force=force, progress=progress)
    if first.suffix == ".html":
        sizes = [path.stat().st_size for path in first.parent.rglob("*") if path.is_file()]
        record = {"site": str(first.parent), "page": str(first), "files": len(sizes), "bytes": sum(sizes)}
        advice = (
            f"{len(sizes):,} files, {size(sum(sizes))}; open the page in a browser, or copy the folder to a web host"
        )
    else:
        record = {"site": str(first), "bytes": first.stat().st_size}
        advice = f"{size(first.stat().st_size)}; unpack it and open index.html in a browser"
    if screen.as_json:
        screen.json(record)
        return
    screen.result(visible(str(first)))
    screen.note(advice)


def refuse_without_workbench() -> None:
    """Raise SettingError if the packages of the workbench, an optional extra, are not installed."""
    with needing("serve", "the workbench"):
        import_module("memlens.web.app")


def _find_model(screen: Screen, index: str) -> str | None:
    """Return the location of the scanned model. If the model is no longer there, print a note and return None."""
    from memlens.models.load import is_available_offline

    source = memlens.Index(index).manifest.model.source
    if source and is_available_offline(source):
        return source
    where = f"The model is no longer at '{visible(source)}'" if source else "The model was not loaded from a file"
    screen.note(f"{where}. Live pages need --model MODEL. Other pages work without it.")
    return None


@verb(json=False)
@index_argument
@flag("--open", "open_page", help="Open the workbench in a browser.")
@option("--port", type=int, default=8000, metavar="N", help="Port to listen on. 0 selects a free port.")
@option("--model", metavar="MODEL", help="Folder or name of the scanned model. Default: as recorded in the index.")
@flag("--no-model", help="Do not load the model. Live pages do not work without it.")
@option("--compare", metavar="INDEX", help="Second index to show on the Compare page.")
@option(
    "--host",
    default="127.0.0.1",
    metavar="ADDRESS",
    help="Address to listen on. Requests from other machines need a token.",
)
@settings_options(LiveSettings)
def serve(
    screen: Screen,
    index: str,
    open_page: bool,
    port: int,
    model: str | None,
    no_model: bool,
    compare: str | None,
    host: str,
    **options: Any,
) -> None:
    """Serve the workbench: browse, search and trace in the browser."""
    if no_model:
        refuse_options(["--model"], "and --no-model exclude each other")
        refuse_options(map(option_name, options), "has no effect with --no-model")
    refuse_without_workbench()
    if model is not None and not (model and Path(model).is_dir()):  # a folder is checked when it is loaded
        from memlens.models.load import check_model_exists

        check_model_exists(model)
    source = model or (None if no_model else _find_model(screen, index))
    limits = LiveSettings(**options)
    open_workbench(screen, index, source, port=port, host=host, compare=compare, limits=limits, open_page=open_page)


def open_workbench(
    screen: Screen,
    index: str,
    model: str | None,
    *,
    port: int,
    host: str = "127.0.0.1",
    compare: str | None = None,
    limits: LiveSettings | None = None,
    open_page: bool = False,
) -> None:
    """Serve the workbench until Ctrl-C."""
    from memlens.web.app import serve as serve_workbench
    from memlens.web.workbench import Workbench

    workbench = Workbench(index, model, compare, limits or LiveSettings())
    workbench.on_failure = lambda reason: screen.note(f"live pages do not work: {reason}")

    def print_address(address: str, access: Access) -> None:
        screen.result(address)
        if access.token is not None:
            screen.note(f"other machines can reach {host}; access requires the token in the address")
        screen.note("stop with Ctrl-C")
        if open_page:
            import webbrowser

            # in a thread, because opening a text browser waits until it is closed
            Thread(target=webbrowser.open, args=(address,), daemon=True).start()

    try:
        serve_workbench(workbench, host, port, print_address, "info" if screen.verbose else "error")
    except Terminated:
        raise Terminated("terminated") from None
    except KeyboardInterrupt:
        return  # Ctrl-C is the usual way to stop the server


@verb(json=True)
@index_argument
@repo_argument
@flag("--private", help="If the repository is created, make it private.")
def push(screen: Screen, index: str, repo: str, private: bool) -> None:
    """Upload an index to the Hugging Face Hub, without annotations."""
    with ProgressBar(screen, first="push") as progress:
        pushed = memlens.push(index, repo, private=private, progress=progress)
    if screen.as_json:
        screen.json(asdict(pushed))
        return
    screen.result(pushed.address)
    command = command_line("show", f"hf:{pushed.repository}", suggest_memory(memlens.Index(index)))
    screen.note(f"{pushed.files} files, {size(pushed.bytes)}; to use the uploaded index: {command}")


@verb(json=True)
@repo_argument
@option("--out", "-o", metavar="INDEX", help="Folder to write the index to. Default: the name of the repository.")
@resume_option
def pull(screen: Screen, repo: str, out: str | None, resume: bool) -> None:
    """Download an index from the Hugging Face Hub and verify its checksums."""
    with ProgressBar(screen, first="pull") as progress:
        index = memlens.pull(repo, out=out, resume=resume, progress=progress)
    folder = str(index.folder)
    if screen.as_json:
        screen.json({"index": folder, "model": index.manifest.model.name, "files": len(index.manifest.files)})
        return
    screen.result(visible(folder))
    screen.note(f"all checksums match; next: {command_line('show', folder, suggest_memory(index))}")
