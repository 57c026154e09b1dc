"""`memlens trace`: one prompt, live, with or without memories changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memlens.cli.options import Device, Json, Quiet, Verbose
from memlens.cli.screen import Screen
from memlens.errors import SettingError
from memlens.parallel import import_torch
from memlens.settings import RUN
from memlens.text import plain

if TYPE_CHECKING:
    from memlens.index.reader import Index
    from memlens.models.memory_model import MemoryModel
    from memlens.tracer.intervene import Continuation
    from memlens.tracer.intervention import Intervention

_EDITS, _TEXT = "Changing memories", "Going on with the text"


def trace(
    model: Annotated[
        str, typer.Argument(metavar="MODEL|INDEX", help="A model, or an index folder: its model is loaded.")
    ],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to trace.")],
    position: Annotated[
        int, typer.Option(metavar="N", help="The prompt's token to trace at, from 0; -1 is the last.")
    ] = -1,
    token: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Whose logit to explain. Default: what the model predicts.")
    ] = None,
    top: Annotated[int, typer.Option(metavar="K", help="Tokens and memories to list.")] = 3,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="L3N512=0",
            help="Silence (=0), set (=3.5) or scale (=x2) a memory, or a layer (L3=0). Repeatable.",
            rich_help_panel=_EDITS,
        ),
    ] = None,
    at: Annotated[
        list[int] | None,
        typer.Option("--at", metavar="N", help="Where --set holds. Default: everywhere.", rich_help_panel=_EDITS),
    ] = None,
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="An intervention to replay.", rich_help_panel=_EDITS)
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save the intervention as JSON.", rich_help_panel=_EDITS)
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Save over a file that memlens did not make.", rich_help_panel=_EDITS)
    ] = False,
    generate: Annotated[int, typer.Option(metavar="N", min=0, help="Tokens to go on with.", rich_help_panel=_TEXT)] = 0,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="0: the most likely token; above: drawn.", rich_help_panel=_TEXT)
    ] = 0.0,
    seed: Annotated[int, typer.Option(metavar="N", help="For drawn tokens.", rich_help_panel=_TEXT)] = 0,
    where: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="Where an index's model is now.", rich_help_panel=RUN)
    ] = None,
    device: Device = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="Numbers of the model. Default: float32, or the index's.", rich_help_panel=RUN)
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show what every layer did with a prompt: what fired, what it promotes, what is predicted."""
    screen = Screen(as_json, quiet, verbose)
    intervention = _intervention(sets or [], at, file)
    if save is not None and intervention is None:
        raise SettingError(f"there is nothing to save in {save}; say what to change with --set")
    if save is not None:
        from memlens.outputs import refuse_output
        from memlens.tracer.intervention import is_intervention

        refuse_output(save, is_intervention, force=force)  # now, not after a model was loaded
    if not generate and (temperature != 0 or seed != 0):
        raise SettingError("--temperature and --seed say how a text goes on, but there is no --generate")
    import_torch()
    from memlens.tracer.prompt import open_model

    loaded, index = open_model(model, where=where, device=device, dtype=dtype)
    if intervention is not None and (as_json or save is not None or file is not None):
        intervention = intervention.meant_for(loaded)  # what is printed can be replayed, just as what is saved
    result = _look(loaded, index, prompt, intervention, position=position, token=token, top=top)
    texts = _continue(loaded, prompt, generate, intervention, temperature, seed)
    if save is not None and intervention is not None:
        intervention.save(save, force=force)
        screen.note(f"saved the intervention in {save}")
    if as_json:
        screen.json(plain(result) | {"continuation": texts})
        return
    from memlens.cli.trace_tables import print_continuations, print_effect, print_trace

    print_trace(screen, result if intervention is None else result.before, top)
    if intervention is not None:
        print_effect(screen, result)
    print_continuations(screen, texts)


def _intervention(sets: list[str], at: list[int] | None, file: Path | None) -> Intervention | None:
    """The edits of --file, then those of --set; None where nothing is changed."""
    from memlens.tracer.intervention import Intervention

    if at and not sets:
        raise SettingError("--at says where --set holds, but there is no --set")
    parts = [] if file is None else [Intervention.load(file)]
    if sets:
        parts.append(Intervention.parse(*sets, positions=at or None))
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _look(
    model: MemoryModel, index: Index | None, prompt: str, intervention: Intervention | None, **options: Any
) -> Any:
    """A Trace, or an InterventionEffect where something is changed."""
    from memlens.tracer.intervene import intervene
    from memlens.tracer.trace import trace

    if intervention is None:
        return trace(model, prompt, index=index, **options)
    # its fingerprint was compared with the model's once, which takes a while for a large model
    effect = intervene(model, prompt, intervention.for_any(), index=index, **options)
    return replace(effect, intervention=intervention)


def _continue(
    model: MemoryModel, prompt: str, count: int, intervention: Intervention | None, temperature: float, seed: int
) -> list[Continuation]:
    """Without the edits and, if there are any, with them."""
    from memlens.tracer.intervene import generate

    if not count:
        return []
    variants = [None] if intervention is None else [None, intervention.for_any()]
    return [generate(model, prompt, count, edits, temperature=temperature, seed=seed) for edits in variants]
