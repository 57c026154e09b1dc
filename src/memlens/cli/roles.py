"""`memlens roles`: what every memory is for, counted by layer."""

from typing import Any

import memlens
from memlens.cli.options import IndexFolder, Json, ModelNow, Quiet, Verbose, with_settings
from memlens.cli.screen import ScanProgress, Screen
from memlens.settings import ROLES, RoleSettings
from memlens.text import visible


@with_settings(RoleSettings)
def roles(
    index: IndexFolder,
    model: ModelNow = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    **options: Any,
) -> None:
    """Find what every memory is for, by stated rules."""
    screen = Screen(as_json, quiet, verbose)
    opened = memlens.Index(index)
    with ScanProgress(screen) as progress:
        memlens.roles(opened, model=model, progress=progress, **options)
    from memlens.role.table import roles_by_layer

    layers = roles_by_layer(opened)
    if as_json:
        screen.json({"index": str(opened.folder), **opened.manifest.content["roles"], "layers": layers})
    elif not quiet:
        met = [role for role in ROLES if any(one.roles[role] for one in layers)]
        rows = [[one.layer, one.memories, *(one.roles[role] or "" for role in met), one.none] for one in layers]
        screen.table(["layer", "memories", *met, "none"], rows)
        screen.note("a memory with several roles counts for each of them; the rules: docs/roles.md")
        screen.note(f"next: memlens search {visible(str(opened.folder))} --role token")
