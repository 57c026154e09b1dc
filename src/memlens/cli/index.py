"""Verbs on a finished index: `check`, `repair`, `export`, `report`, `serve`, `site`; `push` and `pull` for the Hub."""

from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

import memlens
from memlens.cli.options import Force, IndexFolder, ModelNow, Resume, refuse_unused, with_screen, with_settings
from memlens.cli.screen import ScanProgress, Screen, open_output
from memlens.errors import FilesError, IndexFolderError, SettingError, needing
from memlens.settings import LiveSettings, option_name
from memlens.text import plain_table, size, visible

if TYPE_CHECKING:
    from memlens.index.check import Check
    from memlens.web.security import Access

Repo = Annotated[str, typer.Argument(metavar="REPO", help="A dataset repository: OWNER/NAME, or OWNER/NAME@REVISION.")]
_STYLE = {
    "whole": "green",
    "damaged": "bold red",
    "unreadable": "bold yellow",
    "outdated": "yellow",
    "not noted": "yellow",
}


@with_screen(json=True)
def check(screen: Screen, index: IndexFolder) -> None:
    """Verify every file of an index; exit code 2 if any is damaged."""
    with ScanProgress(screen, first="check") as progress:
        checked = memlens.check(index, progress=progress)
    if screen.as_json:
        findings = [asdict(finding) for finding in checked.findings]
        screen.json({"index": str(checked.folder), "whole": checked.is_whole, "files": findings})
    elif not screen.quiet:
        _print(screen, checked)
    from memlens.index.format import ANNOTATIONS

    for finding in checked.damaged:
        if finding.file == ANNOTATIONS:  # nobody can make it again, and no advice for tables may cost it
            raise IndexFolderError(finding.detail)
    if checked.damaged:
        names = [visible(finding.file) for finding in checked.damaged]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise IndexFolderError(
            f"{checked.folder} is damaged: {', '.join(names[:3])}{more}; make tables of later stages again with "
            f"`memlens repair {checked.folder}`, or scan again with --fresh"
        )
    if checked.unreadable:
        first = checked.unreadable[0]
        raise FilesError(f"{visible(first.file)} was not checked: {first.detail}")


@with_screen(json=True)
def repair(screen: Screen, index: IndexFolder, model: ModelNow = None) -> None:
    """Restore a damaged manifest, and make damaged or outdated tables of values, patterns and experiments again."""
    from memlens.index.check import restore_manifest
    from memlens.index.format import located

    for line in restore_manifest(located(index)):
        screen.note(line)
    with ScanProgress(screen, first="check") as progress:
        from memlens.pipeline import repair as make_again

        names = make_again(index, model=model, progress=progress)
    if screen.as_json:
        screen.json({"index": str(index), "made": names})
    elif not screen.quiet:
        screen.result(f"made again: {', '.join(names)}" if names else "every table is whole; nothing was done")


def _print(screen: Screen, checked: "Check") -> None:
    table = plain_table(["file", "state", ""], last_wraps=True)
    for finding in checked.findings:
        state = Text(finding.state, _STYLE[finding.state])
        table.add_row(Text(visible(finding.file)), state, Text(visible(finding.detail)))
    screen.result(table)


_UNITS = {"jsonl": "memories", "csv": "triggers"}


@with_screen(json=False)
def export(
    screen: Screen,
    index: IndexFolder,
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="jsonl|csv|neuronpedia",
            help="One memory per line, one trigger per row, or a folder in the layout that Neuronpedia imports.",
        ),
    ] = "jsonl",
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="FILE", help="Default: stdout. For neuronpedia a folder.")
    ] = None,
    model: ModelNow = None,
    top: Annotated[
        int | None, typer.Option(metavar="N", help="Triggers of a memory, for neuronpedia only. Default: 20.")
    ] = None,
    force: Force = False,
) -> None:
    """Write all memories and triggers as JSON Lines or CSV, or in Neuronpedia's layout, for which the model is run."""
    from memlens.index.export import FORMATS, is_export

    if format_ == "neuronpedia":
        _export_neuronpedia(screen, index, out, model, top, force)
        return
    if format_ not in FORMATS:
        raise SettingError(f"--format is '{format_}'; choose one of: {', '.join(FORMATS)}, neuronpedia")
    if model is not None or top is not None:
        raise SettingError(f"--model and --top are for --format neuronpedia, not for {format_}; leave them out")
    if out is None:
        refuse_unused({"--force": force}, "is for -o, which is not there")
    opened = memlens.Index(index)
    with open_output(out, "-o", is_export, force=force) as handle:
        count = FORMATS[format_](opened, handle)
    screen.note(f"{count:,} {_UNITS[format_]} written{'' if out is None else ' to ' + visible(out)}")


def _export_neuronpedia(
    screen: Screen, index: str, out: str | None, model: str | None, top: int | None, force: bool
) -> None:
    if out is None:
        raise SettingError("--format neuronpedia writes a folder; name it with -o")
    opened = memlens.Index(index)
    with ScanProgress(screen, first="model") as progress:
        from memlens.index.neuronpedia import TOP, export_neuronpedia

        loaded = opened.load_model(model)
        count = export_neuronpedia(
            opened, Path(out), loaded, top=TOP if top is None else top, force=force, progress=progress
        )
    screen.result(visible(out))
    screen.note(f"{count:,} memories in {len(opened.layers)} sources written")


@with_screen(json=True)
def report(
    screen: Screen,
    index: IndexFolder,
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="FILE.html", help="Default: report.html in the index.")
    ] = None,
    assets: Annotated[
        str | None, typer.Option(metavar="DIR", help="A folder for SVG, PDF and CSV of each chart.")
    ] = None,
    force: Force = False,
) -> None:
    """Write one self-contained page with every chart beside the published one."""

    opened = memlens.Index(index)
    with ScanProgress(screen) as progress:
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
    screen.note(f"{size(page.stat().st_size)}, self-contained: open it in a browser, or send it to somebody")
    if assets is not None:
        screen.note(f"the charts as SVG, PDF and CSV are in {visible(assets)}")
    if missing:
        folder = visible(str(opened.folder))
        command = f"memlens experiment {folder} all" if opened.has("values") else f"memlens values {folder}"
        screen.note(f"{len(missing)} of {len(EXPERIMENTS)} experiments are not in it yet; next: {command}")


@with_screen(json=True)
def site(
    screen: Screen,
    index: IndexFolder,
    out: Annotated[str, typer.Option("--out", "-o", metavar="DIR", help="The folder to write the site to.")],
    layers: Annotated[str | None, typer.Option(metavar="LIST", help="Layers like 0-5,11. Default: all.")] = None,
    top: Annotated[int, typer.Option(metavar="N", help="Triggers of each end of a memory.")] = 10,
    force: Force = False,
) -> None:
    """Write the workbench as static files: for any web host, or to be opened from the disk."""
    refuse_without_workbench()
    with ScanProgress(screen, first="site") as progress:
        first = memlens.site(index, out=out, layers=layers, top=top, force=force, progress=progress)
    files = [path.stat().st_size for path in first.parent.rglob("*") if path.is_file()]
    if screen.as_json:
        screen.json({"site": str(first.parent), "page": str(first), "files": len(files), "bytes": sum(files)})
        return
    screen.result(visible(str(first)))
    screen.note(f"{len(files):,} files, {size(sum(files))}: open it in a browser, or copy the folder to any web host")


def refuse_without_workbench() -> None:
    """The packages of the workbench are an extra."""
    with needing("serve", "the workbench"):
        import_module("memlens.web.app")


def _own_model(screen: Screen, index: str) -> str | None:
    """The model that the index was scanned from, if it is still there; else None, and a note how to get it."""
    from memlens.models.load import is_here

    source = memlens.Index(index).manifest.model.source
    if source and is_here(source):
        return source
    where = f"'{visible(source)}', where it was scanned from" if source else "a file: it was scanned from memory"
    screen.note(f"the model is not at {where}; live pages need `--model MODEL`, all others work")
    return None


@with_settings(LiveSettings)
@with_screen(json=False)
def serve(
    screen: Screen,
    index: IndexFolder,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Where the index's model is now. Default: where it was scanned.")
    ] = None,
    no_model: Annotated[bool, typer.Option("--no-model", help="Load no model: live pages say so.")] = False,
    port: Annotated[int, typer.Option(metavar="N", help="0 takes any that is free.")] = 8000,
    host: Annotated[str, typer.Option(help="Where to listen. Beyond this machine a token is needed.")] = "127.0.0.1",
    compare: Annotated[str | None, typer.Option(metavar="INDEX", help="A second index, for the page Compare.")] = None,
    **options: Any,
) -> None:
    """Browse, search and trace in the browser, on this machine."""
    refuse_without_workbench()
    from memlens.web.app import serve as serve_workbench
    from memlens.web.workbench import Workbench

    if model is not None and no_model:
        raise SettingError("--model names a model and --no-model leaves it out; give one of them")
    if no_model:
        refuse_unused({option_name(name): True for name in options}, "is a limit of live pages, which need a model")
    if model is not None and not (model and Path(model).is_dir()):  # else it is loaded, or refused, while pages answer
        from memlens.models.load import refuse_missing

        refuse_missing(model)
    chosen = model or (None if no_model else _own_model(screen, index))
    workbench = Workbench(index, chosen, compare, LiveSettings(**options))
    workbench.on_failure = lambda reason: screen.note(f"live pages do not work: {reason}")

    def opened(address: str, access: "Access") -> None:
        screen.result(address)
        if access.token is not None:
            screen.note(
                f"others on the network can reach {host}: whoever has the whole address, token included, may look"
            )
        screen.note("stop with Ctrl-C")

    with suppress(KeyboardInterrupt):  # this is how one stops it
        serve_workbench(workbench, host, port, opened, "info" if screen.verbose else "error")


@with_screen(json=True)
def push(
    screen: Screen,
    index: IndexFolder,
    repo: Repo,
    private: Annotated[bool, typer.Option("--private", help="If the repository is made: for yourself only.")] = False,
) -> None:
    """Put an index on the Hugging Face Hub, in one commit, with a card. People's labels stay here."""
    with ScanProgress(screen, first="push") as progress:
        done = memlens.push(index, repo, private=private, progress=progress)
    if screen.as_json:
        screen.json(asdict(done))
        return
    screen.result(done.address)
    screen.note(f"{done.files} tables, {size(done.bytes)}; others look at it with `memlens show hf:{done.repository}`")


@with_screen(json=True)
def pull(
    screen: Screen,
    repo: Repo,
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="INDEX", help="Default: a folder of the repository's name.")
    ] = None,
    resume: Resume = True,
) -> None:
    """Copy an index from the Hugging Face Hub; every file is compared with its checksum. Stopped, it continues."""
    with ScanProgress(screen, first="pull") as progress:
        index = memlens.pull(repo, out=out, resume=resume, progress=progress)
    folder = str(index.folder)
    if screen.as_json:
        screen.json({"index": folder, "model": index.manifest.model.name, "files": len(index.manifest.files)})
        return
    screen.result(visible(folder))
    screen.note(f"every file is as its manifest says; next: memlens show {visible(folder)} MEMORY")
