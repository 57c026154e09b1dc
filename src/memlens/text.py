"""Content made fit for JSON, which has no infinity and no NaN. Knows nothing of memories.

Text of a corpus on a screen: harmless, cut to a width, with the token at the trigger position marked.

A corpus may hold anything; no escape sequence, control character or invisible sign of it may reach a terminal.
This module knows strings only; styles are the callers' matter.

Text of a corpus or a vocabulary, made fit to be shown: every character visible, every string valid UTF-8.

Escaping for HTML is the template's business; this module only makes sure that there is something to see.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Any
from unicodedata import category


def plain(record: Any) -> dict[str, Any]:
    """A dataclass as a JSON object of its fields: `--json` and the workbench write every record this way."""
    return {field.name: finite(getattr(record, field.name)) for field in fields(record)}


def finite(content: Any) -> Any:
    """Content as JSON has it: records by their fields or their own `to_json`, None for numbers that JSON lacks."""
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if hasattr(content, "to_json"):
        return content.to_json()
    if is_dataclass(content):
        return plain(content)
    if isinstance(content, dict):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [finite(value) for value in content]
    return content


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


_SIGNS = {"\n": "⏎", "\r": "⏎", "\t": "⇥"}
_NOT_SHOWN = ("Cc", "Cs", "Co", "Cn", "Zl", "Zp")
_DIRECTIONS = frozenset(
    "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)  # would turn the page's own text round


def text_visible(text: str) -> str:
    """The text on one line; what cannot be shown is U+FFFD."""
    return "".join(_SIGNS.get(sign) or ("\ufffd" if _is_hidden(sign) else sign) for sign in text)


def _is_hidden(sign: str) -> bool:
    return sign in _DIRECTIONS or category(sign) in _NOT_SHOWN


def token(text: str) -> str:
    """A token with the spaces at its ends made visible."""
    shown = text_visible(text)
    inner = shown.strip(" ")
    if not inner:
        return "␣" * len(shown) or "∅"
    begin = len(shown) - len(shown.lstrip(" "))
    end = len(shown) - len(shown.rstrip(" "))
    return "␣" * begin + inner + "␣" * end


def tail(text: str, room: int) -> str:
    """The last characters of a text, with a mark where something was left out."""
    shown = text_visible(text)
    return shown if len(shown) <= room else "…" + shown[-room:]


def head(text: str, room: int) -> str:
    shown = text_visible(text)
    return shown if len(shown) <= room else shown[:room] + "…"


def text_number(value: Any) -> str:
    """A cell of a table."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}".replace("-", "−")
    if isinstance(value, float):
        return f"{value:.4g}".replace("-", "−")
    if isinstance(value, (list, tuple)):
        return ", ".join(text_number(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{key}: {text_number(item)}" for key, item in value.items())
    return text_visible(str(value))
