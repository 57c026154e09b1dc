"""Output of a command: results on stdout, and notes, details and the progress bar on stderr.

On a terminal, results have color and fit its width. In a pipe or a file, lines are plain and complete, and no progress
bar is drawn. If NO_COLOR is set, results have no color.
"""

import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, BinaryIO, TextIO

from rich.console import Console
from rich.text import Text

from memlens.errors import SettingError
from memlens.files import refuse_output, replacing
from memlens.text import MISSING, duration, finite, visible

if TYPE_CHECKING:
    from rich.progress import Progress

_UNLIMITED = 100_000  # width of a line outside of a terminal


class _Stdout:
    """Stdout as a binary file. On a terminal, control characters are made visible."""

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
    """Open the output of an export: stdout, or a file that replaces the named one when the block ends."""
    if file is None:
        if getattr(sys.stdout, "name", None) == 1:  # descriptor 1: stdout was closed and replaced in cli/__init__.py
            raise SettingError(f"stdout is closed; name an output file with {option}")
        yield _Stdout(sys.stdout)
        return
    refuse_output(Path(file), is_ours, force=force)
    with replacing(Path(file)) as beside, beside.open("wb") as handle:
        yield handle


def check_outputs(outputs: Mapping[str, tuple[Path | None, Callable[[bytes], bool]]], *, force: bool) -> None:
    """Raise SettingError or OutputError if a file cannot be written, before anything is computed.

    Args:
        outputs: {option: (file, is_ours)}. The file is None if the option was not given. `is_ours` returns True for
            content that memlens may replace.
        force: Replace files that memlens did not write.
    """
    given = {option: (path, is_ours) for option, (path, is_ours) in outputs.items() if path is not None}
    if force and not given:
        raise SettingError(f"--force has no effect without {' or '.join(outputs)}; leave it out")
    seen: dict[Path, str] = {}
    for option, (path, is_ours) in given.items():
        refuse_output(path, is_ours, force=force)
        if not path.parent.is_dir():
            raise SettingError(f"cannot write {path}: the folder {path.parent} does not exist; create it first")
        if (other := seen.setdefault(path.resolve(), option)) != option:
            raise SettingError(f"{other} and {option} name the same file, {path}; choose two different files")


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # app.py handles this; rich would exit


# A cell of a table. None is shown as a dash. A function receives the width of the column.
Cell = str | Text | int | float | None | Callable[[int], Text]

_GAP = 2  # space between columns of a table
_NARROWEST, _COMFORTABLE = 9, 22  # minimum and readable width of a shortened column of text
_NUMBER = re.compile(r"([+\-−]?[\d.,]+(e[+\-−]?\d+)?%?|–|yes|no|)")


class Screen:
    """Output of one command."""

    def __init__(self, as_json: bool = False, quiet: bool = False, verbose: bool = False) -> None:
        self.as_json, self.quiet, self.verbose = as_json, quiet, verbose
        self.out = _console(sys.stdout)
        self.err = _console(sys.stderr)

    @property
    def styled(self) -> bool:
        """True if results are highlighted by color, False if they are highlighted by characters."""
        return self.out.color_system is not None

    @property
    def shows_progress(self) -> bool:
        return self.err.is_terminal and not self.quiet

    def result(self, content: Any = "") -> None:
        """Print a line of text or a rich object. Markup in text is not interpreted."""
        is_line = isinstance(content, (str, Text))
        if self.out.is_terminal:
            self.out.print(content, soft_wrap=is_line)
            return
        with self.out.capture() as captured:
            self.out.print(content, soft_wrap=is_line)
        for line in captured.get().splitlines():
            print(line.rstrip())

    def paragraph(self, content: str | Text, indent: int = 0) -> None:
        """Print text that is wrapped between words to the width of the terminal."""
        from rich.padding import Padding

        self.result(Padding(content, (0, 0, 0, indent)))

    def flow(self, pieces: Sequence[Text], gap: str = "   ") -> None:
        """Print pieces of text on one line, or on several lines if they do not fit.

        A piece longer than a line is cut.
        """
        lines: list[Text] = []
        for piece in pieces:
            if lines and lines[-1].cell_len + len(gap) + piece.cell_len <= self.out.width:
                lines[-1] = Text.assemble(lines[-1], gap, piece)
            else:
                line = Text.assemble("  " if lines else "", piece)
                line.truncate(self.out.width, overflow="ellipsis")
                lines.append(line)
        for line in lines:
            self.result(line)

    def facts(self, facts: Mapping[str, str | Text]) -> None:
        """Print names and facts in two columns."""
        from rich.table import Table

        table = Table.grid(padding=(0, _GAP))
        table.add_column(no_wrap=True, style="bold")
        table.add_column()
        for name, fact in facts.items():
            table.add_row(Text(name), Text(visible(fact)) if isinstance(fact, str) else fact)
        self.result(table)

    def table(
        self,
        heads: Sequence[str],
        rows: Iterable[Sequence[Any]],
        *,
        wrap: bool = False,
        optional: Sequence[str] = (),
        align_right: Collection[str] = (),
    ) -> None:
        """Print a table that fits the terminal.

        Columns of numbers are aligned right and never shortened. If the table is too wide, `optional` columns are left
        out in the order given. Then the widest columns of text are shortened.

        Args:
            heads: One heading per column.
            rows: One cell (see Cell) per heading.
            wrap: Break texts into lines instead of shortening them.
            optional: Headings of columns to leave out on a narrow terminal.
            align_right: Headings of text columns to align right.
        """
        from rich.table import Table

        cells = [[_as_text(cell) for cell in row] for row in rows]
        columns = [(head, [row[place] for row in cells]) for place, head in enumerate(heads)]
        for head in optional:
            if _comfortable_width(columns) > self.out.width:
                columns = [column for column in columns if column[0] != head]
        widths = _fit_columns(columns, self.out.width)
        table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="dim", pad_edge=False)
        for place, (head, column) in enumerate(columns):
            table.add_column(
                Text(head),
                justify="right" if head in align_right or _is_numeric(head, column) else "left",
                style="bold" if head == "memory" else "",
                no_wrap=not wrap,
                overflow="fold" if wrap else "ellipsis",
                width=widths[place],
            )
        for row in zip(*(column for _, column in columns), strict=True):
            table.add_row(*(cell(width) if callable(cell) else cell for cell, width in zip(row, widths, strict=True)))
        self.result(table)

    def records(
        self,
        records: Any,
        heads: Sequence[str],
        rows: Iterable[Sequence[Any]],
        *,
        empty: str = "none found",
        wrap: bool = False,
    ) -> None:
        """Print records as JSON or as rows of a table. If there are no records, the note `empty` replaces the table."""
        if self.as_json:
            self.json(records)
        elif records:
            self.table(heads, rows, wrap=wrap)
        else:
            self.note(empty)

    def json(self, content: Any) -> None:
        """Print one JSON document on one line, in ASCII."""
        print(json.dumps(finite(content), allow_nan=False))

    def note(self, message: str) -> None:
        """Print a remark on stderr, unless --quiet is given."""
        if not self.quiet:
            self.err.print(message, soft_wrap=True)

    def detail(self, message: str) -> None:
        """Print a remark on stderr if --verbose is given."""
        if self.verbose:
            self.err.print(message, soft_wrap=True)


def _as_text(cell: Cell) -> Text | Callable[[int], Text]:
    if isinstance(cell, Text) or callable(cell):
        return cell
    if cell is None:
        return Text(MISSING)
    if isinstance(cell, float):
        return Text(f"{cell:.3f}")
    return Text(f"{cell:,}" if isinstance(cell, int) else visible(str(cell)))


def _width(cell: Text | Callable[[int], Text]) -> int:
    return (cell(_UNLIMITED) if callable(cell) else cell).cell_len


def _column_width(head: str, cells: Sequence[Any]) -> int:
    return max([Text(head).cell_len, *map(_width, cells)])


def _comfortable_width(columns: Sequence[tuple[str, list[Any]]]) -> int:
    """Return the width of the table if its text columns are shortened as far as they stay readable."""
    widths = [
        _column_width(*column) if _is_numeric(*column) else min(_column_width(*column), _COMFORTABLE)
        for column in columns
    ]
    return sum(widths) + _GAP * (len(columns) - 1)


def _is_numeric(head: str, cells: Sequence[Any]) -> bool:
    return head != "memory" and all(isinstance(cell, Text) and _NUMBER.fullmatch(cell.plain) for cell in cells)


def _fit_columns(columns: Sequence[tuple[str, list[Any]]], width: int) -> list[int]:
    """Return the widths of the columns. Text columns that are too wide are cut to the same width."""
    widths = [_column_width(head, cells) for head, cells in columns]
    texts = [place for place, column in enumerate(columns) if column[0] != "memory" and not _is_numeric(*column)]
    room = width - _GAP * (len(columns) - 1)
    longest = max((widths[place] for place in texts), default=0)
    while sum(widths) > room and longest > _NARROWEST:
        longest = min(longest - 1, room)
        for place in texts:
            widths[place] = min(widths[place], longest)
    return widths


def fit_items(items: Sequence[Text | Callable[[int], Text]], gap: str = "  ") -> Callable[[int], Text]:
    """Return a table cell with as many items as fit. The first item is always included, shortened if necessary."""

    def cell(width: int) -> Text:
        if not items:
            return Text()
        first, *others = items
        line = first(width) if callable(first) else first.copy()
        line.truncate(width, overflow="ellipsis")
        for item in others:
            more = item(_UNLIMITED) if callable(item) else item
            if line.cell_len + len(gap) + more.cell_len > width:
                break
            line = Text.assemble(line, gap, more)
        return line

    return cell


def command_line(*words: object) -> str:
    """Return a command that can be copied into a shell."""
    return visible("memlens " + shlex.join(str(word) for word in words))


def _console(stream: IO[str]) -> Console:
    has_width = stream.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return _Console(
        file=stream,
        width=None if has_width else _UNLIMITED,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        markup=False,
        highlight=False,
        emoji=False,
    )


_REDRAW_SECONDS = 0.1
_ESTIMATE_AFTER = 2.0  # seconds of a step before its remaining time is estimated
_LARGE_TEXT = 10**6  # bytes of text above which the reading speed is printed
_DESCRIPTIONS = {
    "model": "loading the model",
    "corpus": "reading the corpus",
    "scan": "scanning",
    "check": "checking files",
    "tables": "writing tables",
    "values": "projecting values",
    "keys": "projecting keys",
    "words": "reading words",
    "shallow": "finding shallow patterns",
    "topics": "finding semantic patterns",
    "patterns": "combining patterns",
    "prefixes": "running the model on prefixes",
    "local-edits": "running edited prefixes",
    "shuffled": "running shuffled networks",
    "texts": "running the model on texts",
    "probes": "fitting probes",
    "scores": "scoring memories",
    "sizes": "measuring circuits",
    "roles": "assigning roles",
    "effects": "silencing memories by role",
    "report": "writing the report",
    "assets": "drawing charts",
    "site": "writing pages",
    "push": "uploading",
    "pull": "downloading",
}
_UNITS = {
    "values": "memories",
    "shallow": "memories",
    "topics": "memories",
    "keys": "memories",
    "prefixes": "prefixes",
    "local-edits": "prefixes",
    "shuffled": "networks",
}


class ProgressBar:
    """A progress function that draws a bar with the time left for the current step on a terminal.

    The time is estimated from all work of the step that is completed so far. A stage of `analyze` has
    several steps, and the duration of later steps is unknown. The bar therefore names the step that the time is for.
    """

    def __init__(self, screen: Screen, first: str = "model") -> None:
        self.screen, self.first = screen, first
        self.steps: list[str] = []  # steps in order of their start
        self.prefix = ""  # text before the description of a step
        self._bar: Progress | None = None
        self._last_drawn = 0.0
        self._started, self._start_count = 0.0, 0  # start time of the current step, and the work completed before it

    def __enter__(self) -> "ProgressBar":
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
        is_new = not self.steps or self.steps[-1] != stage
        if is_new:
            self._begin(stage, done, total, now)
        elif stage == "corpus":
            self._bytes_read = done
        if self._bar is None or (now - self._last_drawn < _REDRAW_SECONDS and done != total and not is_new):
            return
        self._last_drawn = now
        work = self._describe_work(stage, done, total, now)
        self._bar.update(self._bar.task_ids[0], completed=done, total=total, work=work)

    def _begin(self, stage: str, done: int, total: int | None, now: float) -> None:
        if self.steps and self.steps[-1] == "corpus":
            print_speed = self.screen.note if self._bytes_read >= _LARGE_TEXT else self.screen.detail
            print_speed(f"read {_describe_speed(self._bytes_read, now - self._started)}")
        self.steps.append(stage)
        self._started, self._start_count, self._bytes_read = now, done, done
        if stage == "scan" and done:
            self.screen.note(f"resuming the interrupted scan at {done / max(total or 0, 1):.0%}")
        description = self.prefix + _DESCRIPTIONS.get(stage, stage)
        self.screen.detail(description + " …")
        if self._bar is not None:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._bar.add_task(description, total=total, completed=done, work="")

    def _describe_work(self, stage: str, done: int, total: int | None, now: float) -> str:
        """Return the speed or the completed work of a step, and the time left."""
        seconds, completed = now - self._started, done - self._start_count
        parts = []
        if stage == "corpus":
            parts.append(_describe_speed(done, seconds))
        elif stage in _UNITS:
            parts.append(f"{done:,} {_UNITS[stage]}")
        elif stage == "scan" and completed > 0:
            parts.append(f"{completed / max(seconds, 1e-6):,.0f} tokens/s")
        if total is not None and completed > 0 and done < total and seconds >= _ESTIMATE_AFTER:
            parts.append(f"{duration(seconds * (total - done) / completed)} left in this step")
        return ", ".join(parts)


def _describe_speed(read: int, seconds: float) -> str:
    return f"{read / 1e6:,.1f} MB of text, {read / 1e6 / max(seconds, 1e-6):,.2f} MB/s"


def _make_bar(screen: Screen) -> "Progress":
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn

    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(show_speed=False),
        TextColumn("{task.fields[work]}"),
        console=screen.err,
        transient=True,
    )
