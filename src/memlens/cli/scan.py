"""`memlens scan`: the exact top triggers of every memory, in one pass."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memlens.cli.options import RUN, Device, Dtype, Json, Model, Quiet, Threads, Verbose
from memlens.cli.screen import ScanProgress, Screen

if TYPE_CHECKING:
    from memlens.index.reader import Index
    from memlens.index.shards import Shard

_KEPT, _TEXT = "What is kept", "How the text is cut"

Corpus = Annotated[
    list[str],
    typer.Argument(metavar="CORPUS...", help="Files or folders of .txt, .jsonl, .parquet; hf:NAME; or bundled."),
]
Out = Annotated[str, typer.Option("--out", "-o", metavar="INDEX", help="The folder to write the index to.")]
Top = Annotated[int | None, typer.Option(help="Triggers to keep for a memory. Default: 50.", rich_help_panel=_KEPT)]
PerSentence = Annotated[
    str | None,
    typer.Option(
        metavar="best|all", help="One prefix a sentence for a memory, or all. Default: best.", rich_help_panel=_KEPT
    ),
]
Dedup = Annotated[
    str | None,
    typer.Option(
        metavar="prefix|sentence|none",
        help="List an equal prefix once, drop repeated sentences only, or neither. Default: prefix.",
        rich_help_panel=_KEPT,
    ),
]
Bottom = Annotated[
    str | None,
    typer.Option(
        metavar="auto|yes|no",
        help="Keep the most negative triggers too. Default: auto, for gated blocks.",
        rich_help_panel=_KEPT,
    ),
]
Layers = Annotated[
    str | None,
    typer.Option(metavar="0-5,11", help="Layers to scan, from 0. Default: all.", rich_help_panel=_KEPT),
]
Preset = Annotated[
    str | None,
    typer.Option(
        metavar="paper|released",
        help="Settings of the paper's text or of its released program; other options overrule it.",
        rich_help_panel=_KEPT,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(help="Seed of the sample of ordinary prefixes. Default: 0.", rich_help_panel=_KEPT),
]
Unit = Annotated[
    str,
    typer.Option(metavar="sentence|line|document|block:N", help="What is read in one piece.", rich_help_panel=_TEXT),
]
Column = Annotated[
    str, typer.Option(help="The field of .jsonl, .parquet and hf: that holds the text.", rich_help_panel=_TEXT)
]
MaxTokens = Annotated[
    int | None, typer.Option(metavar="N", help="Stop reading after N tokens. Default: all.", rich_help_panel=_TEXT)
]
MaxLength = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Cut sentences after N tokens. Default: what the model can read.", rich_help_panel=_TEXT
    ),
]
Bos = Annotated[
    str | None,
    typer.Option(
        metavar="auto|yes|no", help="Feed BOS before a sentence. Default: auto, as the tokenizer does.",
        rich_help_panel=_TEXT,
    ),
]  # fmt: skip
BatchTokens = Annotated[
    int | None, typer.Option(metavar="N", help="Tokens in one batch. Default: 4096.", rich_help_panel=RUN)
]
_SCALE = "Many cores, many machines, large models"
Workers = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Processes that share the work. Default: the fastest split of the cores, if the scan is long.",
        rich_help_panel=_SCALE,
    ),
]
Executor = Annotated[
    str, typer.Option(metavar="local|ray", help="Where workers run: here, or on a Ray cluster.", rich_help_panel=_SCALE)
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        metavar="A", help="The Ray cluster to use. Default: $RAY_ADDRESS, or one on this machine.",
        rich_help_panel=_SCALE,
    ),
]  # fmt: skip
GpusPerWorker = Annotated[
    float, typer.Option(metavar="N", help="GPUs for each Ray worker; 0 runs on processors.", rich_help_panel=_SCALE)
]
ShardOption = Annotated[
    str | None,
    typer.Option(
        metavar="I/N", help="Do part I of N only, from 1; `memlens merge` joins them.", rich_help_panel=_SCALE
    ),
]
LayerBudget = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Scan at most N layers in one pass, in several passes. Default: all in one.",
        rich_help_panel=_SCALE,
    ),
]
DeviceMap = Annotated[
    str | None,
    typer.Option(
        metavar="auto|balanced|sequential",
        help="Spread the layers of a large model over several GPUs, as accelerate does.",
        rich_help_panel=_SCALE,
    ),
]
Resume = Annotated[
    bool,
    typer.Option("--resume/--fresh", help="Continue what is in the folder, or replace it.", rich_help_panel=RUN),
]


def scan(
    model: Model,
    corpus: Corpus,
    out: Out,
    top: Top = None,
    per_sentence: PerSentence = None,
    dedup: Dedup = None,
    bottom: Bottom = None,
    layers: Layers = None,
    preset: Preset = None,
    seed: Seed = None,
    unit: Unit = "sentence",
    column: Column = "text",
    max_tokens: MaxTokens = None,
    max_length: MaxLength = None,
    bos: Bos = None,
    batch_tokens: BatchTokens = None,
    device: Device = "auto",
    dtype: Dtype = "float32",
    threads: Threads = None,
    workers: Workers = None,
    executor: Executor = "local",
    ray_address: RayAddress = None,
    gpus_per_worker: GpusPerWorker = 0,
    shard: ShardOption = None,
    layer_budget: LayerBudget = None,
    device_map: DeviceMap = None,
    resume: Resume = True,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Find the exact top triggers of every memory in a corpus, in one pass."""
    screen = Screen(as_json, quiet, verbose)
    with ScanProgress(screen) as progress:
        from memlens import api
        from memlens.index.staging import can_continue

        run: Any = api.scan  # an index or, of a shard, a part comes back
        try:
            made = run(
                model,
                corpus,
                out=out,
                resume=resume,
                unit=unit,
                column=column,
                device=device,
                dtype=dtype,
                layers=layers,
                preset=preset,
                progress=progress,
                top=top,
                per_sentence=per_sentence,
                dedup=dedup,
                bottom=bottom,
                seed=seed,
                bos=bos,
                max_tokens=max_tokens,
                max_length=max_length,
                batch_tokens=batch_tokens,
                threads=threads,
                workers=workers,
                executor=executor,
                ray_address=ray_address,
                gpus_per_worker=gpus_per_worker,
                shard=shard,
                layer_budget=layer_budget,
                device_map=device_map,
            )
        except KeyboardInterrupt:
            if resume:
                raise
            advice = "run the command again without --fresh to continue"
            raise KeyboardInterrupt(f"interrupted; {advice if can_continue(Path(out)) else 'start over'}") from None
    if progress.stages == ["model"]:
        screen.note(f"{out} was complete already; nothing was done")
    if shard is not None:
        _print_shard(screen, made)
        return
    print_index(screen, made)


def print_index(screen: Screen, index: Index) -> None:
    """What was read and found, as the command was asked to say it."""
    from memlens.index.reader import summarize

    summary = summarize(index)
    if screen.as_json:
        screen.json(summary)
    elif not screen.quiet:
        _print_summary(screen, summary)


def _print_shard(screen: Screen, shard: Shard) -> None:
    from memlens.text import visible

    if screen.as_json:
        counts = shard.content["counts"]
        screen.json({"folder": str(shard.folder), "shard": shard.share.number, "of": shard.share.of, **counts})
        return
    if not screen.quiet:
        screen.result(f"part {shard.share} of the scan is complete in {visible(str(shard.folder))}")
    screen.note("next: when all parts are there, memlens merge PART... -o INDEX")


def _print_summary(screen: Screen, summary: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    from memlens.text import visible

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
    first = summary["layers"][0]
    screen.note(f"next: memlens show {visible(summary['index'])} L{first}N0")


def _cut(summary: dict[str, Any]) -> str:
    if not summary["cut_sentences"]:
        return ""
    return f" ({summary['cut_sentences']:,} cut to fit, {summary['cut_tokens']:,} tokens lost)"


def _dead_by_layer(dead: dict[str, int]) -> str:
    found = [f"{count:,} in layer {layer}" for layer, count in dead.items() if count]
    return ", ".join(found) + " (nothing in this corpus triggers them)" if found else "none"
