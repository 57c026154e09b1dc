"""`memlens scan`: the exact top triggers of every memory, in one pass; and `memlens merge`, which joins its shards."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

import memlens
from memlens.cli.options import (
    Corpus,
    Device,
    Dtype,
    Model,
    Out,
    Resume,
    refuse_unused_column,
    with_screen,
    with_settings,
)
from memlens.cli.screen import ScanProgress, Screen
from memlens.settings import CorpusSettings, ScanRunSettings, ScanSettings
from memlens.text import visible

if TYPE_CHECKING:
    from memlens.index.shards import Shard


@with_settings(ScanSettings, CorpusSettings, ScanRunSettings)
@with_screen(json=True)
def scan(
    screen: Screen,
    model: Model,
    corpus: Corpus,
    out: Out,
    device: Device = "auto",
    dtype: Dtype = "float32",
    resume: Resume = True,
    **options: Any,
) -> None:
    """Find the exact top triggers of every memory in a corpus, in one pass."""
    refuse_unused_column(options, corpus)
    with ScanProgress(screen) as progress:
        from memlens.index.staging import has_resumable_scan, resumed_hardware_warning

        if resume and (line := resumed_hardware_warning(Path(out))):
            screen.note(line)
        run: Any = memlens.scan  # an Index, or with --shard a Shard comes back
        try:
            result = run(
                model, corpus, out=out, resume=resume, device=device, dtype=dtype, progress=progress, **options
            )
        except KeyboardInterrupt as error:
            if resume:
                raise
            advice = "run the command again without --fresh to continue"
            raise type(error)(f"interrupted; {advice if has_resumable_scan(Path(out)) else 'start over'}") from None
    if progress.stages == ["model"]:
        screen.note(f"{out} was complete already; nothing was done")
    if "shard" in options:
        _print_shard(screen, result)
    else:
        _print_index(screen, result)


@with_screen(json=True)
def merge(
    screen: Screen,
    shards: Annotated[
        list[str], typer.Argument(metavar="SHARD", help="Folders that `memlens scan --shard I/N` has made.")
    ],
    out: Out,
    resume: Resume = True,
) -> None:
    """Join the shards of a scan, given in any order, into one index."""
    with ScanProgress(screen, first="check") as progress:
        index = memlens.merge(shards, out=out, resume=resume, progress=progress)
    from memlens.index.staging import mixed_hardware_warning

    if line := mixed_hardware_warning(index.manifest.scanned_with):
        screen.note(line)
    _print_index(screen, index)


def _print_index(screen: Screen, index: "memlens.Index") -> None:
    from memlens.index.memory import summarize

    summary = summarize(index)
    if screen.as_json:
        screen.json(summary)
    elif not screen.quiet:
        _print_summary(screen, summary)
        screen.note(f"next: memlens show {visible(summary['index'])} {index.names.name(index.layers[0], 0)}")


def _print_shard(screen: Screen, shard: "Shard") -> None:
    if screen.as_json:
        counts = shard.document.counts
        screen.json({"folder": str(shard.folder), "shard": shard.id.number, "of": shard.id.of, **counts})
        return
    if not screen.quiet:
        screen.result(f"shard {shard.id} of the scan is complete in {visible(str(shard.folder))}")
    screen.note("next: when all shards are there, memlens merge SHARD... -o INDEX")


def _print_summary(screen: Screen, summary: dict[str, Any]) -> None:

    table = Table.grid(padding=(0, 2))
    rows = {
        "model": summary["model"],
        "memories": f"{summary['memories']:,} in {len(summary['layers'])} layers",
        "dead": _dead_by_layer(summary["dead"]),
        "sentences": f"{summary['sentences']:,}{_cut(summary)}",
        "tokens": f"{summary['tokens']:,}",
        "prefixes": f"{summary['prefixes']:,} ({summary['repeated_prefixes']:,} repeated, left out)",
        "index": summary["index"],
    }
    for name, fact in rows.items():
        table.add_row(Text(name, "bold"), Text(visible(fact)))
    screen.result(table)


def _cut(summary: dict[str, Any]) -> str:
    if not summary["cut_sentences"]:
        return ""
    return f" ({summary['cut_sentences']:,} cut to fit, {summary['cut_tokens']:,} tokens lost)"


def _dead_by_layer(dead: dict[str, int]) -> str:
    parts = [f"{count:,} in layer {layer}" for layer, count in dead.items() if count]
    return ", ".join(parts) + " (nothing in this corpus triggers them)" if parts else "none"
