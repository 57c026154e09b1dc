"""Text of a corpus on a screen: harmless, cut to a width, with the token at the trigger position marked.

A corpus may hold anything; no escape sequence, control character or invisible sign of it may reach a terminal.
This module knows strings only; styles are the callers' matter.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from itertools import pairwise

_NAMED = {"\n": "⏎", "\t": "⇥", "\r": "␍", "\x7f": "␡"}
_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # controls, format signs (also those that reverse a line), separators
_JOINERS = "\u200c\u200d"  # parts of words and emoji, not of tricks


class _Visible(dict[int, str]):
    """For str.translate: what each character is shown as; filled as characters are met."""

    def __missing__(self, code: int) -> str:
        sign = chr(code)
        if sign in _NAMED:
            shown = _NAMED[sign]
        elif unicodedata.category(sign) not in _HIDDEN or sign in _JOINERS:
            shown = sign
        elif code < 0x20:
            shown = chr(0x2400 + code)  # the pictures of control characters: ESC is ␛
        else:
            shown = f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
        self[code] = shown
        return shown


_VISIBLE = _Visible()


def visible(text: str) -> str:
    """The text on one line, with a visible sign for every character that would act instead of being seen."""
    return text.translate(_VISIBLE)


def cut_left(text: str, room: int) -> str:
    """The end of a text that fits `room` columns of a terminal; what is left out becomes one …"""
    from rich.cells import cell_len

    if cell_len(text) <= room:
        return text
    kept = len(text)
    left = max(room, 1) - 1
    while kept > 0 and cell_len(text[kept - 1]) <= left:
        kept -= 1
        left -= cell_len(text[kept])
    return "…" + text[kept:]


def cut_right(text: str, room: int) -> str:
    """The beginning of a text that fits `room` columns."""
    return cut_left(text[::-1], room)[::-1]


def sparkline(counts: list[int]) -> str:
    """Counts as a row of small bars, as high as their share of the largest; a dot where there is none."""
    bars, largest = "▁▂▃▄▅▆▇█", max(counts, default=0)
    return "".join(bars[(count * 8 - 1) // largest] if count else "·" for count in counts)


def curve(numbers: Sequence[float | None], room: int = 64) -> str:
    """Numbers as a row of small bars on a scale that begins (or ends) at zero; a dot where there is none.

    More numbers than `room` are drawn as the means of neighbours.
    """
    drawn = list(numbers) if len(numbers) <= room else _means(numbers, room)
    known = [value for value in drawn if value is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    low, high = min(low, 0.0), max(high, 0.0)
    bars, scale = "▁▂▃▄▅▆▇█", (high - low) or 1.0
    return "".join("·" if value is None else bars[min(int(8 * (value - low) / scale), 7)] for value in drawn)


def _means(numbers: Sequence[float | None], room: int) -> list[float | None]:
    edges = [len(numbers) * place // room for place in range(room + 1)]
    parts = [[v for v in numbers[a:b] if v is not None] for a, b in pairwise(edges)]
    return [sum(part) / len(part) if part else None for part in parts]


def quoted(text: str, room: int = 16) -> str:
    """A token in quotes, so that its own spaces are seen; cut to `room` columns."""
    return f"'{cut_right(visible(text), room - 2)}'"


def percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def number(value: float) -> str:
    """Four digits that matter, trailing zeros kept so that columns line up."""
    return f"{value:#.4g}".removesuffix(".") if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.3e}"


def size(count: float) -> str:
    """Bytes as people say them."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit in ("bytes", "kB") else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 1 else "under a second"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 100 * 3600 else f"{seconds / 86400:.0f} days"
