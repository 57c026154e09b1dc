"""The state shared by all pages: the open index, an optional second index to compare with, and the model.

Pages run in several threads, which can all read the index. The model loads in the background. One thread at a time can
use it: `with workbench.model() as model`. rendering.run_model queues the requests that need it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from shlex import quote
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any, TypeVar

from memlens.annotations.records import Annotations
from memlens.errors import MemlensError, ModelError, SettingError
from memlens.files import file_stamp, parquet_sql
from memlens.index.format import MANIFEST
from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.settings import LiveSettings
from memlens.tracer.intervention import Intervention
from memlens.web.memory_map import read_statistics

if TYPE_CHECKING:
    from memlens.models.memory_model import MemoryModel
    from memlens.tracer.prompt import Prompt
    from memlens.tracer.trace import TracedPrompt

T = TypeVar("T")
NONE, LOADING, READY, FAILED = "none", "loading", "ready", "failed"

_COPIED = (
    "memories", "triggers", "corpus", "values", "names", "patterns", "keys", "tokens", "ordinary", "counts", "roles",
    "quadrants",
)  # fmt: skip
_MAX_PARQUET_BYTES = 400_000_000  # copied tables take about four times as much memory as in Parquet
_MAX_RESULTS = 64
_MAX_STATE_BYTES = 64 << 20  # maximum size of traced prompts; their answers need half as much memory in addition
_MAX_ANSWERS = 32  # maximum number of answers; each takes some megabytes


class ServedIndex(Index):
    """An index that stays open and answers many queries from many threads.

    Tables are copied into memory as far as they fit. A lookup in memory takes 1 ms, compared with tens of milliseconds
    in Parquet. Copies and remembered results are valid for one manifest. If a stage writes a new manifest, the
    workbench opens a new ServedIndex.
    """

    def __init__(self, folder: str | Path, max_bytes: int = _MAX_PARQUET_BYTES) -> None:
        super().__init__(folder)
        self._max_bytes = max_bytes
        self._copied_tables: set[str] = set()
        self._results: OrderedDict[Hashable, tuple[Hashable, Any]] = OrderedDict()
        self._results_lock = Lock()

    @cached_property
    def annotations(self) -> Annotations:
        """The annotations, one object for all requests, so that each request reads only new lines."""
        return Annotations(self)

    @property
    def example(self) -> MemoryId:
        """The name of a memory from the middle of the index, for examples."""
        layer = self.layers[len(self.layers) // 2]
        return self.names.name(layer, self.memories(layer) // 2)

    def is_current(self) -> bool:
        """Return False if the folder's manifest was replaced or removed since this index was opened."""
        return file_stamp(self.folder / MANIFEST) == self._manifest_stamp

    def reload(self) -> None:
        """Do nothing, because the workbench reopens changed indexes itself."""
        # `reopen_changed` compares the manifest once per request

    def copy_tables(self) -> None:
        """Copy tables into memory as far as they fit, most used tables first."""
        room = self._max_bytes
        for table in _COPIED:
            facts = self.manifest.files.get(f"{table}.parquet")
            if facts is None or facts.bytes > room or table in self._copied_tables:
                continue
            room -= facts.bytes
            with self._explain_errors(), self._connect() as cursor:
                cursor.execute(f'CREATE TABLE "{table}" AS SELECT * FROM {parquet_sql(self.path(table))}')
                self._check_opened([table])
                if table == "corpus":
                    cursor.execute("CREATE INDEX sentences ON corpus (sentence)")
            self._copied_tables.add(table)

    def remember(self, key: Hashable, make: Callable[[], T], version: Hashable = None) -> T:
        """Return the result of `make`, computed once per key and version. The last 64 results are kept."""
        with self._results_lock:
            if key in self._results and self._results[key][0] == version:
                self._results.move_to_end(key)
                known: T = self._results[key][1]
                return known
        result = make()
        with self._results_lock:
            self._results[key] = (version, result)
            self._results.move_to_end(key)
            while len(self._results) > _MAX_RESULTS:
                self._results.popitem(last=False)
        return result

    def _source_of(self, table: str) -> str:
        return f'"{table}"' if table in self._copied_tables else super()._source_of(table)

    def _check_opened(self, tables: Iterable[str]) -> None:
        super()._check_opened(table for table in tables if table not in self._copied_tables)


class KeptPrompts:
    """A cache of traced prompts and answers. Another cell or token of a cached prompt needs no new forward pass.

    The least recently used entries are dropped. Only a thread that holds the model may use the cache.
    """

    def __init__(self, max_bytes: int = _MAX_STATE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._runs: OrderedDict[tuple[str, tuple[str, ...]], TracedPrompt] = OrderedDict()
        self._answers: OrderedDict[Hashable, Any] = OrderedDict()

    def run(self, model: MemoryModel, prompt: Prompt, edits: tuple[str, ...] = ()) -> TracedPrompt:
        """Return the traced prompt, with these edits, at all positions.

        Raises:
            MemlensError: An edit is not possible. In this case, the model is not run.
        """
        from memlens.tracer.intervene import apply_edits
        from memlens.tracer.trace import TracedPrompt

        key = (prompt.text, edits)
        if key not in self._runs:
            with apply_edits(model, Intervention.of(edits), prompt) if edits else nullcontext():
                self._runs[key] = TracedPrompt.run(model, prompt)
        self._runs.move_to_end(key)
        # always keep the two newest entries, because a page compares them
        while len(self._runs) > 2 and sum(run.nbytes for run in self._runs.values()) > self._max_bytes:
            self._runs.popitem(last=False)
        return self._runs[key]

    def answer(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of `make`, computed once per key."""
        if key not in self._answers:
            self._answers[key] = make()
        self._answers.move_to_end(key)
        while len(self._answers) > _MAX_ANSWERS:
            self._answers.popitem(last=False)
        answer: T = self._answers[key]
        return answer


class Workbench:
    """An index to browse, with an optional model and an optional second index to compare with."""

    def __init__(
        self,
        index: Index | str | Path,
        model: MemoryModel | str | None = None,
        other: Index | str | Path | None = None,
        live: LiveSettings | None = None,
    ) -> None:
        """Open the index.

        Args:
            model: The scanned model: loaded, or a path or Hub id that start() loads in the background.
            other: A second index for the Compare page.
            live: Limits of requests that run the model.
        """
        self.index = ServedIndex(index.folder if isinstance(index, Index) else index)
        self.other = None if other is None else ServedIndex(other.folder if isinstance(other, Index) else other)
        self.live = live or LiveSettings()
        self.kept = KeptPrompts()
        # if the model cannot be loaded, this is called with the reason
        self.on_failure: Callable[[str], object] = lambda reason: None
        self._source = model if isinstance(model, str) else None
        self._model: MemoryModel | None = None
        self._failure = ""
        self._model_lock = Lock()
        self._closing = Event()
        self._preparing: Thread | None = None
        if model is not None and not isinstance(model, str):
            self.index.check_model(model)
            self._model = model

    def reopen_changed(self) -> None:
        """Open both indexes again if the manifest of one has changed.

        Raises:
            IndexFolderError: A folder no longer holds an index.
        """
        if self.index.is_current() and (self.other is None or self.other.is_current()):
            return
        fingerprint = self.index.manifest.model.fingerprint
        self.index = ServedIndex(self.index.folder)
        self.other = None if self.other is None else ServedIndex(self.other.folder)
        self.kept = KeptPrompts()
        if self._model is not None and self.index.manifest.model.fingerprint != fingerprint:
            self._model = None
            self._failure = "the index was replaced by an index of another model; start `memlens serve` again"
        if self._preparing is not None:
            self._start_preparing()

    @property
    def folder(self) -> str:
        """The index folder, quoted for a shell command."""
        return quote(str(self.index.folder))

    # The model

    @property
    def status(self) -> str:
        """The state of the model: "none" (no model), "loading", "ready" or "failed"."""
        if self._model is not None:
            return READY
        if self._failure:
            return FAILED
        return NONE if self._source is None else LOADING

    @property
    def status_text(self) -> str:
        """The state of the model in one sentence, with advice."""
        return {
            READY: "the model is loaded",
            LOADING: "the model is still loading; try again in a moment",
            NONE: f"no model is loaded; start the workbench with `memlens serve {self.folder} --model MODEL`",
            FAILED: f"the model could not be loaded: {self._failure}",
        }[self.status]

    @contextmanager
    def model(self) -> Iterator[MemoryModel]:
        """Lend the model to one thread at a time, for at most `live.seconds` seconds.

        Raises:
            ModelError: There is no model, or it is still loading.
            SettingError: The computation took too long. The time is checked before every layer.
        """
        if self._model is None:
            raise ModelError(self.status_text)
        from memlens.models.hooks import on_input

        with self._model_lock, ExitStack() as stack:
            deadline = time.monotonic() + self.live.seconds

            def check_deadline(*_input: object) -> None:
                if time.monotonic() > deadline:
                    advice = "shorten the prompt, or start the workbench with a larger --seconds"
                    raise SettingError(f"the request took longer than {self.live.seconds:g} seconds; {advice}")

            for layer in self._model.layers:
                stack.enter_context(on_input(layer.block, check_deadline))
            yield self._model

    def start(self) -> None:
        """Start copying tables and loading the model in the background."""
        self._start_preparing()
        if self.status == LOADING:
            Thread(target=self._load, name="memlens model", daemon=True).start()

    def close(self) -> None:
        """Stop background work and close the indexes. Waits until the current step has ended."""
        self._closing.set()
        if self._preparing is not None:
            self._preparing.join()
        self.index.close()
        if self.other is not None:
            self.other.close()

    def _start_preparing(self) -> None:
        self._preparing = Thread(target=self._prepare, args=(self.index, self.other), name="memlens index", daemon=True)
        self._preparing.start()

    def _prepare(self, index: ServedIndex, other: ServedIndex | None) -> None:
        """Read and copy the tables that pages need. A damaged index is reported later, by the page that reads it."""
        steps: list[Callable[[], object]] = [
            partial(read_statistics, index),
            index.copy_tables,
            *([] if other is None else [other.copy_tables]),
            partial(import_module, "memlens.pattern.related"),
        ]
        with suppress(MemlensError, OSError):
            for step in steps:
                if self._closing.is_set():
                    return
                step()

    def _load(self) -> None:
        try:
            self._model = self.index.load_model(self._source)
        except Exception as error:  # pages that do not need the model still work, and the status shows the reason
            self._failure = " ".join(str(error).split()) or type(error).__name__
            self.on_failure(self.status_text)
