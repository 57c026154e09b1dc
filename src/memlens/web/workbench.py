"""The state that all pages share: the open index, the model, which loads in the background, and a second index.

Pages run in several threads at once. Looking at an index is safe in all of them; a model serves one at a time, so it
is lent out: `with workbench.model() as model`. Requests wait for it outside of threads (Turns): a few may, for others
there is a clear answer, and one that nobody waits for any longer, or that takes too long, ends at the next layer.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any, TypeVar

from memlens.errors import BusyError, MemlensError, ModelError, SettingError
from memlens.index.reader import Index
from memlens.index.trigger_text import TriggerText
from memlens.parallel import import_torch
from memlens.settings import LiveSettings
from memlens.web.kept_prompts import KeptPrompts
from memlens.web.pages_first import PagesFirst
from memlens.web.served_index import ServedIndex, read_statistics

if TYPE_CHECKING:
    from memlens.models.memory_model import MemoryModel

NONE, LOADING, READY, FAILED = "none", "loading", "ready", "failed"
T = TypeVar("T")
MOST_TEXTS = 8  # that go on at once, each borrowing the model token by token


class Turn:
    """A live request's time with the model; `check` ends the computation, from within, once it is over."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._until = seconds, time.monotonic() + seconds
        self.is_abandoned = False

    def check(self, *_seen: object) -> None:
        if self.is_abandoned:
            raise SettingError("nobody waits for this any longer; ask again")
        if time.monotonic() > self._until:
            advice = "shorten the prompt, or start the workbench with a larger --seconds"
            raise SettingError(f"this takes longer than the {self._seconds:g} seconds that it may; {advice}")


_TURN: ContextVar[Turn | None] = ContextVar("memlens live turn", default=None)  # of the request being answered


class Turns:
    """The row of live requests: one is computed, some wait, the others are refused at once. For one event loop."""

    def __init__(self, settings: LiveSettings) -> None:
        self._settings = settings
        self._model = asyncio.Semaphore(1)
        self._taken = 0  # computed or waiting

    async def take(self, compute: Callable[[], Awaitable[T]], until_gone: Callable[[], Awaitable[Any]]) -> T:
        """The result of `compute`, which waits for its turn; `until_gone` returns when the client has gone."""
        if self._taken > self._settings.waiting:
            raise BusyError(f"the model is busy, and {self._taken - 1} requests wait already; try again in a moment")
        self._taken += 1
        first = asyncio.ensure_future(self._model.acquire())
        gone = asyncio.ensure_future(until_gone())
        try:
            await asyncio.wait((first, gone), return_when=asyncio.FIRST_COMPLETED)
            turn = Turn(self._settings.seconds)
            gone.add_done_callback(lambda _: setattr(turn, "is_abandoned", True))
            if not first.done():
                turn.is_abandoned = True
                turn.check()
            _TURN.set(turn)
            return await compute()
        finally:
            self._taken -= 1
            gone.cancel()
            if first.done() and not first.cancelled():
                self._model.release()
            first.cancel()

    async def step(self, compute: Callable[[], Awaitable[T]]) -> T:
        """The result of `compute`, a part of an answer that is being sent: it waits its turn, but is never refused."""
        async with self._model:
            turn = Turn(self._settings.seconds)
            _TURN.set(turn)
            try:
                return await compute()
            except asyncio.CancelledError:
                turn.is_abandoned = True
                raise


def trigger_text(index: ServedIndex) -> TriggerText | None:
    """The texts of the triggers as they are now, made once; None where they would be too large."""
    return index.remember(("triggers", "corpus"), ("trigger text",), lambda: TriggerText.read(index))


class Workbench:
    """An index to look at, and what else was given with it."""

    def __init__(
        self,
        index: Index | str | Path,
        model: "MemoryModel | str | None" = None,
        other: Index | str | Path | None = None,
        live: LiveSettings | None = None,
    ) -> None:
        """`model` is the one that was scanned: where it is, to be loaded by start(), or the loaded one itself."""
        self.index = ServedIndex(index.folder if isinstance(index, Index) else index)
        self.other = None if other is None else ServedIndex(other.folder if isinstance(other, Index) else other)
        self.live = live or LiveSettings()
        self._source = model if isinstance(model, str) else None
        self._model: MemoryModel | None = None
        self.kept = KeptPrompts()
        self.pages_first = PagesFirst()
        self.texts = 0  # that go on now
        self._failure = ""
        self.tell_failure: Callable[[str], object] = lambda why: None  # to whoever has started it
        self._lock = Lock()
        self._closing = Event()
        self._preparing: Thread | None = None
        if model is not None and not isinstance(model, str):
            self.index.check_model(model)
            self._model = model

    def refuse_replaced(self) -> None:
        """Refuse to answer if a folder holds another index than the one that is served."""
        for index in (self.index, self.other):
            if index is not None:
                index.refuse_replaced()

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
    def model(self) -> "Iterator[MemoryModel]":
        """The model, lent to one thread at a time; refused with one line while there is none."""
        if self._model is None:
            raise ModelError(self.status_text)
        turn = _TURN.get()
        with self._lock, ExitStack() as stack:
            if turn is not None:
                from memlens.models.hooks import on_input

                turn.check()
                for layer in self._model.layers:
                    stack.enter_context(on_input(layer.block, turn.check))
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
            if self._preparing is not None:
                self.pages_first.wait_for(self._preparing)  # tables are needed by every page
            self.pages_first.wait()
            import_torch()
            self.pages_first.wait()
            loaded = self.index.load_model(self._source)
        except Exception as error:  # whatever it is, the other pages can be used, and the status says why
            self._failure = " ".join(str(error).split()) or type(error).__name__
            self.tell_failure(self.status_text)
        else:
            self._model = loaded
