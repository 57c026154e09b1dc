"""A memory's histogram as plain numbers for an SVG: bars, and the few coefficients that are written below them."""

from __future__ import annotations

from dataclasses import dataclass

_WIDTH, _HEIGHT = 320.0, 72.0


@dataclass(frozen=True)
class Bar:
    x: float
    y: float
    width: float
    height: float
    told: str


@dataclass(frozen=True)
class Histogram:
    """Bars by bin; bins double in width outwards, so equal bars on the screen are no equal ranges."""

    width: float
    height: float
    bars: list[Bar]
    marks: list[tuple[float, str]]  # where, and which coefficient


def draw_histogram(counts: list[int], edges: list[float]) -> Histogram | None:
    """The filled part; None without a sample. Heights are square roots: rare bins are the interesting ones."""
    filled = [number for number, count in enumerate(counts) if count]
    if not filled or len(counts) != len(edges) + 1:
        return None
    first, last = filled[0], filled[-1]
    width = _WIDTH / (last - first + 1)
    most, total = max(counts), sum(counts)
    bars = []
    for place, number in enumerate(range(first, last + 1)):
        height = _HEIGHT * (counts[number] / most) ** 0.5
        told = f"{_range(number, edges)}: {counts[number]:,} of {total:,}"
        bars.append(Bar(place * width, _HEIGHT - height, max(width - 1.5, 0.5), height, told))
    inner = [(place + 1, edges[number]) for place, number in enumerate(range(first, last))]
    step = max(1, -(-len(inner) // 6))
    marks = [(place * width - 0.75, _number(edge)) for place, edge in inner[::step]]
    return Histogram(_WIDTH, _HEIGHT, bars, marks)


def _range(number: int, edges: list[float]) -> str:
    if number == 0:
        return f"below {_number(edges[0])}"
    if number == len(edges):
        return f"{_number(edges[-1])} and above"
    return f"{_number(edges[number - 1])} to {_number(edges[number])}"


def _number(edge: float) -> str:
    """Short: bins end at powers of two."""
    text = f"{edge:g}" if abs(edge) >= 0.01 or edge == 0 else f"{edge:.0e}".replace("e-0", "e-")
    return text.replace("-", "−", 1) if edge < 0 else text
