"""`memlens patterns`: what each memory's triggers have in common, and which memories belong together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from memlens.cli.options import IndexFolder, Json, Quiet, Verbose, with_settings
from memlens.cli.screen import ScanProgress, Screen
from memlens.errors import SettingError
from memlens.settings import PatternSettings
from memlens.text import percent, visible

if TYPE_CHECKING:
    from memlens.index.reader import Index

_BROWSE = "Look instead of compute"
_EXPLAIN = "Proposals of a language model"
_KINDS = ("shallow", "semantic", "both", "not_covered")


@with_settings(PatternSettings)
def patterns(
    index: IndexFolder,
    related: Annotated[
        str | None,
        typer.Option(metavar="MEMORY", help="List memories related to this one.", rich_help_panel=_BROWSE),
    ] = None,
    shared: Annotated[
        bool, typer.Option("--shared", help="List patterns that several memories have.", rich_help_panel=_BROWSE)
    ] = False,
    duplicates: Annotated[
        bool,
        typer.Option("--duplicates", help="List memories with mostly the same triggers.", rich_help_panel=_BROWSE),
    ] = False,
    limit: Annotated[int, typer.Option(metavar="N", help="How many to list.", rich_help_panel=_BROWSE)] = 20,
    explainer: Annotated[
        str | None,
        typer.Option(metavar="URL", help="An OpenAI-compatible endpoint to ask; optional.", rich_help_panel=_EXPLAIN),
    ] = None,
    explainer_model: Annotated[
        str, typer.Option(metavar="NAME", help="The model to ask for there.", rich_help_panel=_EXPLAIN)
    ] = "default",
    memory: Annotated[
        list[str] | None,
        typer.Option(metavar="MEMORY", help="A memory to ask about; may be repeated.", rich_help_panel=_EXPLAIN),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    **options: Any,
) -> None:
    """Find what the triggers of each memory have in common, for all memories."""
    screen = Screen(as_json, quiet, verbose)
    if sum((related is not None, shared, duplicates, explainer is not None)) > 1:
        raise SettingError("--related, --shared, --duplicates and --explainer exclude each other; choose one")
    if memory and explainer is None:
        raise SettingError("--memory names memories to explain; say whom to ask with --explainer URL")
    from memlens.index.reader import Index

    opened = Index(index)
    if limit < 1:
        raise SettingError(f"--limit is {limit}; it must be 1 or more")
    if related is not None or shared or duplicates:
        _browse(screen, opened, related, shared, limit)
        return
    if explainer is not None:
        _explain(screen, opened, explainer, explainer_model, memory or [], options.get("seed", 0))
        return
    from memlens import api

    with ScanProgress(screen) as progress:
        api.patterns(opened, progress=progress, **options)
    _summarize(screen, opened)


def _summarize(screen: Screen, index: Index) -> None:
    from memlens.experiments.patterns import compute

    rows = compute(index).to_pylist()
    notes = index.manifest.patterns
    assert notes is not None  # just made
    if screen.as_json:
        screen.json({"index": str(index.folder), **notes.content, "layers": rows})
        return
    if screen.quiet:
        return
    table = [
        [str(row["layer"]), f"{row['memories']:,}", f"{row['patterned_memories']:,}"]
        + [percent(row[kind] / row["prefixes"]) if row["prefixes"] else "" for kind in _KINDS]
        for row in rows
    ]
    _print(screen, ["layer", "memories", "with a pattern", "shallow", "semantic", "both", "not covered"], table)
    tested = f"{notes.hypotheses:,} hypotheses"
    screen.note(f"expected share of chance among these patterns: at most {notes.rate:g} ({tested})")


def _browse(screen: Screen, index: Index, related: str | None, shared: bool, limit: int) -> None:
    from memlens.pattern.related import duplicates, related_memories, shared_patterns

    if related is not None:
        found = related_memories(index, related, limit)
        head = ["memory", "equal triggers", "equal tokens", "equal patterns"]
        rows = [
            [str(r.memory), str(r.triggers), "" if r.tokens is None else str(r.tokens), ", ".join(r.patterns)]
            for r in found
        ]
    elif shared:
        head = ["memories", "pattern", "kind", "which"]
        rows = [
            [str(len(s.memories)), s.description, s.kind, " ".join(map(str, s.memories[:8]))]
            for s in shared_patterns(index, limit)
        ]
    else:
        pairs = duplicates(index)
        head = ["memory", "other", "equal triggers", "Jaccard"]
        rows = [[str(d.one), str(d.other), str(d.shared), f"{d.jaccard:.2f}"] for d in pairs[:limit]]
    if screen.as_json:
        screen.json([dict(zip(head, row, strict=True)) for row in rows])
    elif rows:
        _print(screen, head, rows)
    else:
        screen.note("there are none")


def _explain(screen: Screen, index: Index, url: str, model: str, memories: list[str], seed: int) -> None:
    from memlens.pattern.explainer import Explainer, propose

    if not memories:
        raise SettingError("say which memories to explain with --memory L3N512 (may be repeated)")
    names = [index.check(name) for name in memories]
    asked = Explainer(url, model)
    found = [propose(index, name, asked, seed) for name in names]
    if screen.as_json:
        screen.json([proposal.to_json() for proposal in found])
        return
    head = ["memory", "proposed by", "proposal", "detection"]
    _print(screen, head, [[str(p.memory), p.by, p.description, p.score_text] for p in found])


def _print(screen: Screen, head: list[str], rows: list[list[Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in head:
        table.add_column(name)
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    screen.result(table)
