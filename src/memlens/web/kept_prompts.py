"""Prompts that were traced, kept for a while: another cell, token or set of edits of theirs needs no other pass."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from memlens.tracer.intervention import Intervention

if TYPE_CHECKING:
    from memlens.models.memory_model import MemoryModel
    from memlens.tracer.prompt import Prompt
    from memlens.tracer.trace import TracedPrompt

_MOST_BYTES = 64 << 20  # of states; what is read from them takes about half as much again
_MOST_ANSWERS = 32  # each lists the strongest memories of all layers, some megabytes
T = TypeVar("T")


class KeptPrompts:
    """Runs and what was read from them; those not asked for longest are dropped. For whoever has the model just now."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._runs: OrderedDict[tuple[str, tuple[str, ...]], TracedPrompt] = OrderedDict()
        self._answers: OrderedDict[Hashable, Any] = OrderedDict()

    def run(self, model: MemoryModel, prompt: Prompt, edits: tuple[str, ...] = ()) -> TracedPrompt:
        """The prompt with these edits, all positions; refused before anything runs if they cannot be made."""
        from memlens.tracer.intervene import apply_edits
        from memlens.tracer.trace import TracedPrompt

        key = (prompt.text, edits)
        if key not in self._runs:
            with apply_edits(model, Intervention.of(edits), prompt) if edits else nullcontext():
                self._runs[key] = TracedPrompt.run(model, prompt)
        self._runs.move_to_end(key)
        # the two newest stay, whatever their size: a page compares them
        while len(self._runs) > 2 and sum(run.nbytes for run in self._runs.values()) > self._most_bytes:
            self._runs.popitem(last=False)
        return self._runs[key]

    def answer(self, key: Hashable, make: Callable[[], T]) -> T:
        """The result of `make`, computed once for a key that says everything it depends on."""
        if key not in self._answers:
            self._answers[key] = make()
        self._answers.move_to_end(key)
        while len(self._answers) > _MOST_ANSWERS:
            self._answers.popitem(last=False)
        found: T = self._answers[key]
        return found
