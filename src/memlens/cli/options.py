"""Arguments and options that more than one verb has, each written once."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face id, a folder, a .gguf file, or bundled.")]
IndexFolder = Annotated[str, typer.Argument(metavar="INDEX", help="The folder that `memlens scan -o` has made.")]

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, for machines.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but results and errors.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say more about what is done, on stderr.")]

RUN = "How it runs"
Device = Annotated[str, typer.Option(help="Where the model runs: auto, cpu, cuda, mps.", rich_help_panel=RUN)]
Dtype = Annotated[
    str, typer.Option(help="Numbers of the model: float32, bfloat16, float16, float64.", rich_help_panel=RUN)
]
Threads = Annotated[
    int | None,
    typer.Option(metavar="N", help="Threads to compute with. Default: all usable cores.", rich_help_panel=RUN),
]
ModelNow = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="MODEL", help="Where the model is now. Default: where it was scanned.", rich_help_panel=RUN
    ),
]
Seed = Annotated[int, typer.Option(min=0, metavar="N", help="Of everything that is drawn at random.")]
Reading = Annotated[
    str | None,
    typer.Option(
        metavar="folded|raw",
        help="With the final norm's gain folded in, or plain v E. Default: folded where there is a final norm.",
    ),
]
Sample = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Prefixes to look at; for one named experiment, what it counts. Default: each one's own."
    ),
]
Validation = Annotated[
    list[str] | None,
    typer.Option(metavar="CORPUS", help="Text to draw prefixes from, repeatable. Default: the scanned corpus."),
]
StopWords = Annotated[
    str | None, typer.Option(metavar="en|frequent", help="Stop words: a language's list, or the most frequent tokens.")
]
