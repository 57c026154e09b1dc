"""Workers on the nodes of a Ray cluster: they scan, merge what others found, and answer items of a map.

A process of Ray's that runs one is memlens' own. So that it is prepared before torch is loaded, this file imports
neither torch nor what needs it: the work itself does.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from memlens import __version__
from memlens.errors import WorkerError
from memlens.own_process import prepare_process
from memlens.settings import ScanSettings

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from memlens.models.memory_model import MemoryModel
    from memlens.scanner.executors import ModelRecipe
    from memlens.scanner.scanner import PackedSentences, Worker
    from memlens.scanner.state import BatchRange, LayerShape

    Arrays = dict[str, NDArray[Any]]


def versions() -> tuple[str, str, str]:
    """Those that results depend on, of memlens, torch and transformers."""
    import torch
    import transformers

    # torch's is no plain text: as it is, it would have torch imported where it is unpickled
    return __version__, str(torch.__version__), transformers.__version__


def refuse_other_versions(expected: tuple[str, str, str]) -> None:
    if expected != versions():
        theirs, ours = ("memlens {} with torch {} and transformers {}".format(*v) for v in (versions(), expected))
        raise WorkerError(f"a Ray node has {theirs}, the driver {ours}; results would differ: install the same")


class ScanWorker:
    """A worker of a scan that is asked by calls, one after another."""

    def __init__(self, settings: ScanSettings, layers: tuple[int, ...], expected: tuple[str, str, str]) -> None:
        prepare_process()
        self.settings, self.layers, self.expected = settings, layers, expected
        self.worker: Worker | None = None

    def start(self, recipe: "ModelRecipe") -> bool:
        """Load the model; False if this node does not have it."""
        import torch

        from memlens.scanner.scanner import Worker

        refuse_other_versions(self.expected)
        torch.set_num_threads(self.settings.threads)
        model = recipe.load_or_none()
        if model is not None:
            self.worker = Worker(model, self.settings, self.layers)
        return model is not None

    def scan(self, batches: "BatchRange", sentences: "PackedSentences") -> int:
        """Scan some batches; how many tokens were fed comes back."""
        assert self.worker is not None, "start comes first"
        before = self.worker.state.tokens
        self.worker.scan(batches, lambda number: sentences.unpack())
        return self.worker.state.tokens - before

    def hand_over(self) -> "Arrays":
        """The state that was added since the last call."""
        assert self.worker is not None, "start comes first"
        return self.worker.take_state().arrays()


def merge_states(
    settings: ScanSettings, shapes: Mapping[int, "LayerShape"], one: "Arrays", other: "Arrays"
) -> "Arrays":
    """Two disjoint states as one; needs no model."""
    from memlens.scanner.state import ScanState

    states = []
    for arrays in (one, other):
        state = ScanState.empty(shapes, settings)
        state.restore_(arrays)
        states.append(state)
    states[0].merge(states[1])
    return states[0].arrays()


class MapWorker:
    """Answers one item of a map after another."""

    def __init__(self, threads: int, expected: tuple[str, str, str]) -> None:
        prepare_process()
        self.threads, self.expected = threads, expected

    def start(self, recipe: "ModelRecipe", work: Callable[["MemoryModel", Any], Any]) -> bool:
        """Load the model; False if this node does not have it."""
        import torch

        refuse_other_versions(self.expected)
        torch.set_num_threads(self.threads)
        self.work, self.model = work, recipe.load_or_none()
        return self.model is not None

    def answer(self, item: Any) -> Any:
        assert self.model is not None, "start comes first"
        return self.work(self.model, item)
