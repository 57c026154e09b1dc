"""`memlens push` puts an index on the Hugging Face Hub; `memlens pull` copies one from there."""

from dataclasses import asdict
from typing import Annotated

import typer

import memlens
from memlens.cli.options import IndexFolder, Json, Quiet, Resume, Verbose
from memlens.cli.screen import ScanProgress, Screen
from memlens.text import size, visible

Repo = Annotated[str, typer.Argument(metavar="REPO", help="A dataset repository: OWNER/NAME, or OWNER/NAME@REVISION.")]


def push(
    index: IndexFolder,
    repo: Repo,
    private: Annotated[bool, typer.Option("--private", help="If the repository is made: for yourself only.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Put an index on the Hugging Face Hub, in one commit, with a card. People's labels stay here."""
    screen = Screen(as_json, quiet, verbose)
    with ScanProgress(screen, first="push") as progress:
        done = memlens.push(index, repo, private=private, progress=progress)
    if as_json:
        screen.json(asdict(done))
        return
    screen.result(done.address)
    screen.note(f"{done.files} tables, {size(done.bytes)}; others look at it with `memlens show hf:{done.repository}`")


def pull(
    repo: Repo,
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="INDEX", help="Default: a folder of the repository's name.")
    ] = None,
    resume: Resume = True,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Copy an index from the Hugging Face Hub; every file is compared with its checksum. Stopped, it continues."""
    screen = Screen(as_json, quiet, verbose)
    with ScanProgress(screen, first="pull") as progress:
        index = memlens.pull(repo, out=out, resume=resume, progress=progress)
    folder = str(index.folder)
    if as_json:
        screen.json({"index": folder, "model": index.manifest.model.name, "files": len(index.manifest.files)})
        return
    screen.result(visible(folder))
    screen.note(f"every file is as its manifest says; next: memlens show {visible(folder)} MEMORY")
