"""Stages after a scan: `memlens values`, `patterns` and `roles`, with what their tables have to tell."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

import memlens
from memlens.cli.options import IndexFolder, ModelNow, refuse_unused, with_screen, with_settings
from memlens.cli.screen import ScanProgress, Screen
from memlens.errors import SettingError
from memlens.memory import ROLES
from memlens.settings import PatternSettings, RoleSettings, RunSettings, ValueSettings, option_name
from memlens.text import number, percent, plain_table, quoted, visible

if TYPE_CHECKING:
    from memlens.role.table import RoleEffect


@with_settings(ValueSettings, RunSettings)
@with_screen(json=True)
def values(screen: Screen, index: IndexFolder, model: ModelNow = None, **options: Any) -> None:
    """Find the tokens that every value promotes and pushes down."""

    opened = memlens.Index(index)
    with ScanProgress(screen) as progress:
        from memlens.index.memory import summarize_values

        memlens.values(opened, model=model, progress=progress, **options)
    summary = summarize_values(opened)
    if screen.as_json:
        screen.json(summary)
    elif not screen.quiet:
        _print(screen, summary)


def _print(screen: Screen, summary: dict[str, Any]) -> None:
    agree, compared = summary["agree"], summary["with_target"]
    over = "" if summary["vocabulary"] == "all" else f", over {summary['vocabulary']} tokens"
    facts = {
        "model": summary["model"],
        "values": f"{summary['memories']:,}, read {summary['reading']}, {summary['top']} tokens at each end{over}",
        "max p": f"{number(summary['median_max_p'])} in the median",
        "agree": f"{agree:,} of {compared:,} ({percent(agree / compared if compared else None)}): "
        "the top token is what follows the top trigger",
    }
    if summary["undertrained_on_top"]:
        share = percent(summary["undertrained_on_top"] / summary["memories"])
        facts["hardly met"] = (
            f"{share} have a token on top that the model hardly met in training (--vocabulary trained)"
        )
    table = Table.grid(padding=(0, 2))
    for name, fact in facts.items():
        table.add_row(Text(name, "bold"), Text(visible(fact)))
    screen.result(table)
    screen.result()
    screen.result(Text("the most confident values", "dim"))
    table = plain_table(["memory", "token", ">p", "agrees"])
    for row in summary["most_confident"]:
        mark = Text("–", "dim") if row["agrees"] is None else Text("yes", "green") if row["agrees"] else Text("no")
        table.add_row(row["name"], Text(quoted(row["text"], 24), "cyan"), number(row["p"]), mark)
    screen.result(table)
    screen.note(f"next: memlens experiment {visible(summary['index'])} all")


_BROWSE = "Look instead of compute"
_EXPLAIN = "Proposals of a language model"


@with_settings(PatternSettings)
@with_screen(json=True)
def patterns(
    screen: Screen,
    index: IndexFolder,
    related: Annotated[
        str | None, typer.Option(metavar="MEMORY", help="List memories related to this one.", rich_help_panel=_BROWSE)
    ] = None,
    shared: Annotated[
        bool, typer.Option("--shared", help="List patterns that several memories have.", rich_help_panel=_BROWSE)
    ] = False,
    duplicates: Annotated[
        bool, typer.Option("--duplicates", help="List memories with mostly the same triggers.", rich_help_panel=_BROWSE)
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
    **options: Any,
) -> None:
    """Find what the triggers of each memory have in common, for all memories."""
    if sum((related is not None, shared, duplicates, explainer is not None)) > 1:
        raise SettingError("--related, --shared, --duplicates and --explainer exclude each other; choose one")
    if memory and explainer is None:
        raise SettingError("--memory names memories to explain; say whom to ask with --explainer URL")

    opened = memlens.Index(index)
    if limit < 1:
        raise SettingError(f"--limit is {limit}; it must be 1 or more")
    if related is not None or shared or duplicates:
        _browse(screen, opened, related, shared, limit)
        return
    if explainer is not None:
        _explain(screen, opened, explainer, explainer_model, memory or [], options.get("seed", 0))
        return

    with ScanProgress(screen) as progress:
        memlens.patterns(opened, progress=progress, **options)
    if not opened.has("tokens"):
        screen.note("no classes of last words (months, countries): they need `memlens values`; then run this again")
    _summarize(screen, opened)


def _summarize(screen: Screen, index: "memlens.Index") -> None:
    from memlens.experiments.patterns import KINDS, compute
    from memlens.pattern.table import say_chance, say_ends

    rows = compute(index)
    notes = index.manifest.patterns
    assert notes is not None  # just made
    if screen.as_json:
        screen.json({"index": str(index.folder), **notes.content, "layers": rows})
        return
    if screen.quiet:
        return
    table = [
        [str(row["layer"]), f"{row['memories']:,}", f"{row['patterned_memories']:,}"]
        + [percent(row[kind] / row["prefixes"]) if row["prefixes"] else "" for kind in KINDS]
        for row in rows
    ]
    screen.table(["layer", "memories", "with a pattern", "shallow", "semantic", "both", "not covered"], table)
    for sentence in (*say_chance(notes), *say_ends(notes)):
        screen.note(sentence)


def _browse(screen: Screen, index: "memlens.Index", related: str | None, shared: bool, limit: int) -> None:
    from memlens.pattern.related import related_memories, shared_patterns

    if related is not None:
        memories = related_memories(index, related, limit)
        head = ["memory", "equal triggers", "equal tokens", "equal patterns"]
        rows = [[m.name, m.triggers, "" if m.tokens is None else m.tokens, ", ".join(m.patterns)] for m in memories]
        _list(screen, memories, head, rows)
    elif shared:
        patterns = shared_patterns(index, limit)
        rows = [[len(p.memories), p.description, p.kind, " ".join(map(str, p.memories[:8]))] for p in patterns]
        _list(screen, patterns, ["memories", "pattern", "kind", "which"], rows)
    else:
        from memlens.pattern.related import duplicates

        pairs = duplicates(index)[:limit]
        rows = [[pair.one, pair.other, pair.shared, f"{pair.jaccard:.2f}"] for pair in pairs]
        _list(screen, pairs, ["memory", "other", "equal triggers", "Jaccard"], rows)


def _explain(screen: Screen, index: "memlens.Index", url: str, model: str, memories: list[str], seed: int) -> None:
    from memlens.pattern.explainer import Explainer, propose

    if not memories:
        raise SettingError("say which memories to explain with --memory L3N51 (may be repeated)")
    names = [index.check(name) for name in memories]
    endpoint = Explainer(url, model)
    proposals = [propose(index, name, endpoint, seed) for name in names]
    rows = [[p.memory, p.by, p.description, p.detection_text] for p in proposals]
    _list(screen, proposals, ["memory", "proposed by", "proposal", "detection"], rows)


def _list(screen: Screen, records: Sequence[Any], head: list[str], rows: list[list[Any]]) -> None:
    """The records themselves as JSON, or their rows as a table."""
    if screen.as_json:
        screen.json(records)
    elif rows:
        screen.table(head, rows)
    else:
        screen.note("there are none")


@with_settings(RoleSettings)
@with_screen(json=True)
def roles(
    screen: Screen,
    index: IndexFolder,
    model: ModelNow = None,
    effects: Annotated[
        bool, typer.Option("--effects", help="Silence groups of one role, beside random groups of the same norms.")
    ] = False,
    **options: Any,
) -> None:
    """Find what every memory is for, by stated rules."""
    opened = memlens.Index(index)
    if effects:
        others = {option_name(name): value for name, value in options.items() if name != "seed"}
        refuse_unused(others, "is for finding roles, not for --effects")
        _show_effects(screen, opened, model, RoleSettings(**options).seed)
        return
    with ScanProgress(screen) as progress:
        memlens.roles(opened, model=model, progress=progress, **options)
    from memlens.role.table import roles_by_layer

    layers = roles_by_layer(opened)
    if screen.as_json:
        screen.json({"index": str(opened.folder), **opened.manifest.content["roles"], "layers": layers})
    elif not screen.quiet:
        met = [role for role in ROLES if any(layer.roles[role] for layer in layers)]
        rows = [
            [layer.layer, layer.memories, *(layer.roles[role] or "" for role in met), layer.none] for layer in layers
        ]
        screen.table(["layer", "memories", *met, "none"], rows)
        if not opened.has("counts"):
            screen.note(
                "positional is not looked for: this index has no counts by position, as older scans did not make them; "
                "scan again with --fresh to have them"
            )
        screen.note("a memory with several roles counts for each of them; the rules: docs/roles.md")
        screen.note(f"next: memlens search {visible(str(opened.folder))} --role token")


def _show_effects(screen: Screen, index: "memlens.Index", model: str | None, seed: int) -> None:
    from memlens.role.effects import role_effects
    from memlens.role.table import write_effects

    for table in ("roles", "values"):
        index.path(table)  # refused here, before a model is loaded
    with ScanProgress(screen) as progress:
        effects = role_effects(index, index.load_model(model), seed=seed, progress=progress)
    write_effects(index, effects, seed)
    if screen.as_json:
        screen.json(effects)
        return
    rows = [
        [
            effect.role,
            effect.memories,
            effect.measure,
            *("" if value is None else number(value) for value in (effect.change, max(effect.random, default=None))),
            _more(effect),
            ""
            if effect.norm is None or effect.random_norm is None
            else f"{number(effect.norm)} : {number(effect.random_norm)}",
            effect.verdict,
        ]
        for effect in effects
    ]
    compared = ["random groups at most", "more than random", "norm : theirs"]
    screen.table(["silenced", "memories", "changes", "by (nats)", *compared, "effect"], rows)


def _more(effect: "RoleEffect") -> str:
    if effect.difference is None:
        return ""
    interval = "" if effect.low is None else f" ({effect.low:+.3g} to {effect.high:+.3g})"
    return f"{effect.difference:+.3g}{interval}"
