"""The state that all pages share: the open index, the model, which loads in the background, and a second index.

Pages run in several threads at once. Looking at an index is safe in all of them; a model serves one at a time, so it
is lent out: `with workbench.model() as model`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING

from memlens.errors import MemlensError, ModelError
from memlens.index.layout import ANNOTATIONS
from memlens.index.reader import Index
from memlens.index.trigger_text import TriggerText
from memlens.web.served_index import ServedIndex, read_statistics

if TYPE_CHECKING:
    from memlens.models.memory_model import MemoryModel

NONE, LOADING, READY, FAILED = "none", "loading", "ready", "failed"


def trigger_text(index: ServedIndex) -> TriggerText | None:
    """The texts of the triggers as they are now, made once; None where they would be too large."""
    return index.remember(("triggers", "corpus"), ("trigger text",), lambda: TriggerText.read(index))


class Workbench:
    """An index to look at, and what else was given with it."""

    def __init__(
        self, index: Index | str | Path, model: MemoryModel | str | None = None, other: Index | str | Path | None = None
    ) -> None:
        """`model` is the one that was scanned: where it is, to be loaded by start(), or the loaded one itself."""
        self.index = ServedIndex(index.folder if isinstance(index, Index) else index)
        self.other = None if other is None else ServedIndex(other.folder if isinstance(other, Index) else other)
        self._source = model if isinstance(model, str) else None
        self._model: MemoryModel | None = None
        self._failure = ""
        self._lock = Lock()
        self._closing = Event()
        self._preparing: Thread | None = None
        if model is not None and not isinstance(model, str):
            self.index.check_model(model)
            self._model = model

    @property
    def annotations_path(self) -> Path:
        """Where people's labels are, or will be; opened through memlens.annotations.store only."""
        return self.index.folder / ANNOTATIONS

    # The model

    @property
    def status(self) -> str:
        """none (no --model was given), loading, ready, or failed."""
        if self._model is not None:
            return READY
        if self._failure:
            return FAILED
        return NONE if self._source is None else LOADING

    @property
    def status_text(self) -> str:
        """The status in one line, with what to do where there is something to do."""
        command = f"memlens serve {self.index.folder} --model MODEL"
        return {
            READY: "the model is loaded",
            LOADING: "the model is still loading; this takes a moment",
            NONE: f"no model is loaded; start the workbench with `{command}`",
            FAILED: f"the model could not be loaded: {self._failure}",
        }[self.status]

    @contextmanager
    def model(self) -> Iterator[MemoryModel]:
        """The model, lent to one thread at a time; refused with one line while there is none."""
        if self._model is None:
            raise ModelError(self.status_text)
        with self._lock:
            yield self._model

    def start(self) -> None:
        """Begin what may take a while, in the background: pages answer meanwhile."""
        self._preparing = Thread(target=self._prepare, name="memlens index", daemon=True)
        self._preparing.start()
        if self.status == LOADING:
            Thread(target=self._load, name="memlens model", daemon=True).start()

    def close(self) -> None:
        """Let go of the tables; no page can be asked for any more. Waits for the step that is under way with them."""
        self._closing.set()
        if self._preparing is not None:
            self._preparing.join()
        for index in (self.index, self.other):
            if index is not None:
                index.close()

    def _prepare(self) -> None:
        """Have at hand what pages will ask for. Whatever is wrong with the index, the page that meets it will say."""
        with suppress(MemlensError, OSError):
            for step in self._steps():
                if self._closing.is_set():
                    return
                step()

    def _steps(self) -> Iterator[Callable[[], object]]:
        yield partial(read_statistics, self.index)
        yield self.index.keep_in_memory
        yield partial(trigger_text, self.index)
        if self.other is not None:
            yield self.other.keep_in_memory
        if self.index.has("patterns"):
            yield partial(import_module, "memlens.pattern.related")

    def _load(self) -> None:
        try:
            loaded = self.index.load_model(self._source)
        except (MemlensError, OSError, MemoryError) as error:
            self._failure = " ".join(str(error).split()) or type(error).__name__
        else:
            self._model = loaded
