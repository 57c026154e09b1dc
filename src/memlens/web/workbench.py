"""The state that all pages share: the open index, the model, which loads in the background, and a second index.

Pages run in several threads at once. Looking at an index is safe in all of them; a model serves one at a time, so it
is lent out: `with workbench.model() as model`. Requests wait for it outside of threads (Turns): a few may, for others
there is a clear answer, and one that nobody waits for any longer, or that takes too long, ends at the next layer.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any, TypeVar

from memlens.errors import BusyError, MemlensError, ModelError, SettingError
from memlens.index.reader import Index
from memlens.index.search import TriggerText
from memlens.settings import LiveSettings
from memlens.tracer.intervention import Intervention
from memlens.web.served_index import ServedIndex, read_statistics

if TYPE_CHECKING:
    from memlens.models.memory_model import MemoryModel
    from memlens.tracer.prompt import Prompt
    from memlens.tracer.trace import TracedPrompt

NONE, LOADING, READY, FAILED = "none", "loading", "ready", "failed"
T = TypeVar("T")
MOST_TEXTS = 8  # that go on at once, each borrowing the model token by token
_MOST_BYTES = 64 << 20  # of states; what is read from them takes about half as much again
_MOST_ANSWERS = 32  # each lists the strongest memories of all layers, some megabytes
_AFTER, _LONGEST, _IN_ALL = 1.0, 2.0, 10.0  # seconds that loading waits: after a page, for a long one, for all of them
_STEP = 0.02


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


class PagesFirst:
    """Loading of the model begins, and goes on from step to step, while nobody opens a page.

    It takes seconds of Python, mostly for importing, with which pages would have to share the interpreter. A page that
    needs the model ends the wait. Requests are counted on the server's event loop; one thread loads.
    """

    def __init__(self) -> None:
        self._answered = 0  # requests, now
        self._since = 0.0  # when the first of them came, or the last was answered
        self._left = _IN_ALL

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Around the answer to a request."""
        if not self._answered:
            self._since = time.monotonic()
        self._answered += 1
        try:
            yield
        finally:
            self._answered -= 1
            if not self._answered:
                self._since = time.monotonic()

    def hurry(self) -> None:
        """Somebody has asked for something that needs the model."""
        self._left = 0.0

    def wait_for(self, thread: Thread) -> None:
        """Wait until a thread has ended, or somebody needs the model."""
        while thread.is_alive() and self._left > 0:
            thread.join(_STEP)

    def wait(self) -> None:
        """Wait until the last page is some moments old, or one takes long; _IN_ALL seconds at most in all."""
        while self._left > 0 and time.monotonic() - self._since < (_LONGEST if self._answered else _AFTER):
            time.sleep(_STEP)
            self._left -= _STEP


class KeptPrompts:
    """Prompts that were traced, with the answers read from them: another cell, token or edit needs no other pass.

    Those not asked for longest are dropped. To be used by whoever has the model just now.
    """

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
        answer: T = self._answers[key]
        return answer


def trigger_text(index: ServedIndex) -> TriggerText | None:
    """The texts of the triggers as they are now, made once; None where they would be too large."""
    return index.remember(("triggers", "corpus"), ("trigger text",), lambda: TriggerText.read(index))


class Workbench:
    """An index to look at, and what else was given with it."""

    def __init__(
        self,
        index: Index | str | Path,
        model: MemoryModel | str | None = None,
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
                index.reload()

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
            for library in (
                "memlens.models.load",
                "transformers.modeling_utils",
            ):  # with torch, most of the time it takes
                import_module(library)
            self.pages_first.wait()
            loaded = self.index.load_model(self._source)
        except Exception as error:  # whatever it is, the other pages can be used, and the status says why
            self._failure = " ".join(str(error).split()) or type(error).__name__
            self.tell_failure(self.status_text)
        else:
            self._model = loaded
