"""The page of a task's circuit: its memories, and the faithfulness by size as a drawing and as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from memlens.experiments.style import css_variables
from memlens.files import refuse_output, replacing
from memlens.reports.report import read_template, template_environment

if TYPE_CHECKING:
    from memlens.circuits.task import TaskCircuit

_START = b'<!doctype html>\n<html lang="en" data-generator="memlens circuit">'
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 640, 300, 44, 34  # sizes of the drawing
_LOW, _HIGH = -0.25, 1.5  # range of the vertical axis; values outside are drawn at its ends


@dataclass(frozen=True)
class TaskMemory:
    """A memory of the circuit with the top tokens of its value and, if there is an index, patterns and a trigger."""

    name: str
    score: float
    promotes: tuple[str, ...]
    patterns: tuple[str, ...]
    trigger: str


def is_task_page(head: bytes) -> bool:
    """Return True if `head` is the start of a page written by `write_task_page`."""
    return head.startswith(_START)


def write_task_page(
    result: TaskCircuit, memories: Sequence[TaskMemory], model: str, task: str, path: Path, *, force: bool = False
) -> None:
    """Write the page as one self-contained file. `force` also replaces a file that memlens did not write."""
    refuse_output(path, is_task_page, force=force)
    lines = {
        "faithfulness": _polyline([(point.size, point.faithfulness) for point in result.curve], result),
        "complement": _polyline([(point.size, point.complement) for point in result.curve], result),
        "random": _polyline([(point.size, point.random) for point in result.curve], result),
    }
    page = template_environment("memlens.reports").get_template("task.html.j2")
    text = page.render(
        result=result,
        memories=memories,
        model=model,
        task=task,
        lines=lines,
        sizes=[(point.size, _x(point.size, result)) for point in result.curve],
        levels=[(level, _y(level)) for level in (0.0, 0.5, 1.0, 1.5)],
        width=_WIDTH,
        height=_HEIGHT,
        left=_LEFT,
        css=css_variables() + read_template("memlens.reports", "report.css"),
    )
    with replacing(path) as beside:
        beside.write_text(text, encoding="utf-8", errors="replace")


def _polyline(points: Sequence[tuple[int, float]], result: TaskCircuit) -> str:
    """Return the points of a line in the drawing."""
    return " ".join(f"{_x(size, result):.1f},{_y(value):.1f}" for size, value in points)


def _x(size: int, result: TaskCircuit) -> float:
    """Return the position of a size on the logarithmic axis."""
    first, last = (math.log(result.curve[end].size) for end in (0, -1))
    return _LEFT + 12 + (_WIDTH - _LEFT - 40) * (math.log(size) - first) / ((last - first) or 1)


def _y(value: float) -> float:
    """Return the position of a value on the vertical axis."""
    share = (min(max(value, _LOW), _HIGH) - _LOW) / (_HIGH - _LOW)
    return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - 12) * share
