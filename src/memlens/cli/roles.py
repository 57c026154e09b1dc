"""`memlens roles`: what every memory is for, counted by layer."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

import memlens
from memlens.cli.options import IndexFolder, Json, ModelNow, Quiet, Verbose, refuse_unused, with_settings
from memlens.cli.screen import ScanProgress, Screen
from memlens.memory import ROLES
from memlens.settings import RoleSettings, option_name
from memlens.text import number, visible

if TYPE_CHECKING:
    from memlens.role.effect_table import RoleEffect


@with_settings(RoleSettings)
def roles(
    index: IndexFolder,
    model: ModelNow = None,
    effects: Annotated[
        bool, typer.Option("--effects", help="Silence groups of one role, beside random groups of the same norms.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    **options: Any,
) -> None:
    """Find what every memory is for, by stated rules."""
    screen = Screen(as_json, quiet, verbose)
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
    if as_json:
        screen.json({"index": str(opened.folder), **opened.manifest.content["roles"], "layers": layers})
    elif not quiet:
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
    from memlens.role.effect_table import write_effects
    from memlens.role.effects import role_effects

    for table in ("roles", "values"):
        index.path(table)  # refused here, before a model is loaded
    with ScanProgress(screen) as progress:
        found = role_effects(index, index.load_model(model), seed=seed, progress=progress)
    write_effects(index, found, seed)
    if screen.as_json:
        screen.json(found)
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
        for effect in found
    ]
    compared = ["random groups at most", "more than random", "norm : theirs"]
    screen.table(["silenced", "memories", "changes", "by (nats)", *compared, "effect"], rows)


def _more(effect: "RoleEffect") -> str:
    if effect.difference is None:
        return ""
    interval = "" if effect.low is None else f" ({effect.low:+.3g} to {effect.high:+.3g})"
    return f"{effect.difference:+.3g}{interval}"
