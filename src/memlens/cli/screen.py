"""The output of a command: results on stdout, notes, details and a progress bar on stderr.

Colour and the terminal's width are used on a terminal only; elsewhere lines are whole and plain, and no bar is drawn.
NO_COLOR is honoured.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, BinaryIO, TextIO

from rich.console import Console
from rich.text import Text

from memlens.errors import SettingError
from memlens.files import refuse_output, replacing
from memlens.text import finite, visible

if TYPE_CHECKING:
    from rich.progress import Progress

_ENDLESS = 100_000  # columns, where nobody looks at a terminal


class _Stdout:
    """Stdout for UTF-8; on a terminal every control character but the end of a line is made visible."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.is_text = stream, stream.isatty() or not hasattr(stream, "buffer")
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", newline="")

    def write(self, content: Any) -> None:
        if self.is_text:
            self.stream.write("\n".join(map(visible, bytes(content).decode().split("\n"))))
        else:
            self.stream.buffer.write(content)


@contextmanager
def open_output(
    file: str | None, option: str, is_ours: Callable[[bytes], bool], *, force: bool
) -> Iterator[BinaryIO | _Stdout]:
    """Open the output of an export: a new file, a file of memlens to replace in whole, or stdout if none is named."""
    if file is None:
        if getattr(sys.stdout, "name", None) == 1:  # put in the place of a closed one, see cli/__init__.py
            raise SettingError(f"stdout is closed, so the export would go nowhere; name a file with {option}")
        yield _Stdout(sys.stdout)
        return
    refuse_output(Path(file), is_ours, force=force)
    with replacing(Path(file)) as beside, beside.open("wb") as handle:
        yield handle


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # app.py ends the command; rich would end the process


class Screen:
    """One command's output."""

    def __init__(self, as_json: bool = False, quiet: bool = False, verbose: bool = False) -> None:
        self.as_json, self.quiet, self.verbose = as_json, quiet, verbose
        self.out = _console(sys.stdout)
        self.err = _console(sys.stderr)

    @property
    def styled(self) -> bool:
        """Can a result be highlighted by style? Else it is by signs."""
        return self.out.color_system is not None

    @property
    def shows_progress(self) -> bool:
        return self.err.is_terminal and not self.quiet

    def result(self, content: Any = "") -> None:
        """A line of text, or anything rich can draw; text is never read as markup."""
        is_line = isinstance(content, (str, Text))
        if self.out.is_terminal:
            self.out.print(content, soft_wrap=is_line)
            return
        with self.out.capture() as drawn:
            self.out.print(content, soft_wrap=is_line)
        for line in drawn.get().splitlines():  # a table's padding is of no use in a file
            print(line.rstrip())

    def table(self, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """A plain table; None is a dash, a fraction has three places."""
        from rich.table import Table

        table = Table(*head, box=None, pad_edge=False)
        for row in rows:
            table.add_row(*(Text(_cell(value)) for value in row))
        self.result(table)

    def json(self, content: Any) -> None:
        """One JSON document on one line; characters beyond ASCII are escaped, so that it suits any terminal."""
        print(json.dumps(finite(content), allow_nan=False))

    def note(self, message: str) -> None:
        """Something beside the result that a person wants to know."""
        if not self.quiet:
            self.err.print(message, soft_wrap=True)

    def detail(self, message: str) -> None:
        """Something for those who said -v."""
        if self.verbose:
            self.err.print(message, soft_wrap=True)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else visible(str(value))


def _console(stream: IO[str]) -> Console:
    has_width = stream.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return _Console(
        file=stream,
        width=None if has_width else _ENDLESS,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        markup=False,
        highlight=False,
        emoji=False,
    )


_REDRAW = 0.1  # seconds
_WORTH_TELLING = 10**6  # bytes of text from which on its speed is told to everybody
_WORDS = {
    "model": "reading the model",
    "corpus": "reading the corpus",
    "scan": "scanning",
    "check": "checking files",
    "tables": "writing tables",
    "values": "reading values",
    "keys": "reading keys",
    "words": "reading words",
    "shallow": "comparing wordings",
    "topics": "comparing subjects",
    "patterns": "counting patterns",
    "prefixes": "reading prefixes",
    "local-edits": "editing prefixes",
    "texts": "reading texts",
    "probes": "fitting probes",
    "roles": "finding roles",
    "effects": "silencing groups",
    "report": "writing the report",
    "assets": "drawing charts",
}
_COUNTED = {
    "values": "memories",
    "shallow": "memories",
    "topics": "memories",
    "keys": "memories",
    "prefixes": "prefixes",
    "local-edits": "prefixes",
}


class ScanProgress:
    """A progress function for anything that takes long, with a bar where somebody can see it."""

    def __init__(self, screen: Screen, first: str = "model") -> None:
        self.screen, self.first = screen, first
        self.stages: list[str] = []  # as they were reached
        self.heading = ""  # stands before the words of a stage
        self._bar: Progress | None = None
        self._drawn = 0.0
        self._began, self._first = 0.0, 0  # when the stage began, and at which count
        self._read, self._read_since = 0, 0.0  # bytes of the corpus, and since when
        self._is_read_beside = False  # is text still read while it is scanned?

    def __enter__(self) -> "ScanProgress":
        if self.screen.shows_progress:
            self._bar = _make_bar(self.screen)
            self._bar.start()
        self(self.first, 0, None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        self._read = done if stage == "corpus" else self._read
        if stage == "corpus" and self._is_read_beside:
            return  # told when all is read; the bar is the scan's
        is_new = not self.stages or self.stages[-1] != stage
        if is_new:
            self._begin(stage, done, total, now)
        elif self._is_read_beside and total is not None:
            self._tell_speed(now)
        if self._bar is None or (now - self._drawn < _REDRAW and done != total and not is_new):
            return
        self._drawn = now
        task = self._bar.task_ids[0]
        self._bar.update(task, completed=done, total=total, counts=self._counts(stage, done, now))

    def _begin(self, stage: str, done: int, total: int | None, now: float) -> None:
        self._read_since = now if stage == "corpus" else self._read_since
        if self.stages and self.stages[-1] == "corpus":
            if stage == "scan" and total is None:
                self._is_read_beside = True
                self.screen.note("scanning begins while text is still read; how long it takes is known when that ends")
            else:
                self._tell_speed(now)
        self.stages.append(stage)
        self._began, self._first = now, done
        if stage == "scan" and done:
            self.screen.note(f"continuing an interrupted scan at {done / max(total or 0, 1):.0%}")
        words = self.heading + _WORDS.get(stage, stage)
        self.screen.detail(words + " …")
        if self._bar is not None:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._bar.add_task(words, total=total, completed=done, counts="")

    def _tell_speed(self, now: float) -> None:
        self._is_read_beside = False
        tell = self.screen.note if self._read >= _WORTH_TELLING else self.screen.detail
        tell(f"read {_speed(self._read, now - self._read_since)}")

    def _counts(self, stage: str, done: int, now: float) -> str:
        if stage == "corpus":
            return _speed(done, now - self._began)
        if stage in _COUNTED:
            return f"{done:,} {_COUNTED[stage]}"
        if stage != "scan" or done <= self._first:
            return ""
        return f"{(done - self._first) / max(now - self._began, 1e-6):,.0f} tokens/s"


def _speed(read: int, seconds: float) -> str:
    return f"{read / 1e6:,.1f} MB of text, {read / 1e6 / max(seconds, 1e-6):,.2f} MB/s"


def _make_bar(screen: Screen) -> "Progress":
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(show_speed=False),
        TextColumn("{task.fields[counts]}"),
        TimeRemainingColumn(compact=True),
        console=screen.err,
        transient=True,
    )
