"""How far a scan is, drawn on stderr while it runs; silent where stderr is not a terminal.

Knows the stages that index/build.py reports, and nothing else of them.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from memlens.cli.screen import Screen

if TYPE_CHECKING:
    from rich.progress import Progress

_REDRAW = 0.1  # seconds
_WORDS = {"model": "reading the model", "corpus": "reading the corpus", "scan": "scanning", "tables": "writing tables"}


class ScanProgress:
    """A progress function for build_index, with a bar where somebody can see it."""

    def __init__(self, screen: Screen) -> None:
        self.screen = screen
        self.stages: list[str] = []  # as they were reached
        self._bar: Progress | None = None
        self._drawn = 0.0
        self._began, self._first = 0.0, 0  # when the stage began, and at which count

    def __enter__(self) -> ScanProgress:
        if self.screen.shows_progress:
            self._bar = _make_bar(self.screen)
            self._bar.start()
        self("model", 0, None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        is_new = not self.stages or self.stages[-1] != stage
        if is_new:
            self._begin(stage, done, total, now)
        if self._bar is None or (now - self._drawn < _REDRAW and done != total and not is_new):
            return
        self._drawn = now
        task = self._bar.task_ids[0]
        self._bar.update(task, completed=done, total=total, counts=self._counts(stage, done, now))

    def _begin(self, stage: str, done: int, total: int | None, now: float) -> None:
        self.stages.append(stage)
        self._began, self._first = now, done
        if stage == "scan" and done:
            self.screen.note(f"continuing an interrupted scan at {done / max(total or 0, 1):.0%}")
        self.screen.detail(_WORDS.get(stage, stage) + " …")
        if self._bar is not None:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._bar.add_task(_WORDS.get(stage, stage), total=total, completed=done, counts="")

    def _counts(self, stage: str, done: int, now: float) -> str:
        if stage == "corpus":
            return f"{done:,} sentences"
        if stage != "scan" or done <= self._first:
            return ""
        return f"{(done - self._first) / max(now - self._began, 1e-6):,.0f} tokens/s"


def _make_bar(screen: Screen) -> Progress:
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
