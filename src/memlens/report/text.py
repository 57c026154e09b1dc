"""Text of a corpus or a vocabulary, made fit to be shown: every character visible, every string valid UTF-8.

Escaping for HTML is the template's business; this module only makes sure that there is something to see.
"""

from __future__ import annotations

from typing import Any
from unicodedata import category

_SIGNS = {"\n": "⏎", "\r": "⏎", "\t": "⇥"}
_NOT_SHOWN = ("Cc", "Cs", "Co", "Cn", "Zl", "Zp")
_DIRECTIONS = frozenset(
    "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)  # would turn the page's own text round


def visible(text: str) -> str:
    """The text on one line; what cannot be shown is U+FFFD."""
    return "".join(_SIGNS.get(sign) or ("\ufffd" if _is_hidden(sign) else sign) for sign in text)


def _is_hidden(sign: str) -> bool:
    return sign in _DIRECTIONS or category(sign) in _NOT_SHOWN


def token(text: str) -> str:
    """A token with the spaces at its ends made visible."""
    shown = visible(text)
    inner = shown.strip(" ")
    if not inner:
        return "␣" * len(shown) or "∅"
    begin = len(shown) - len(shown.lstrip(" "))
    end = len(shown) - len(shown.rstrip(" "))
    return "␣" * begin + inner + "␣" * end


def tail(text: str, room: int) -> str:
    """The last characters of a text, with a mark where something was left out."""
    shown = visible(text)
    return shown if len(shown) <= room else "…" + shown[-room:]


def head(text: str, room: int) -> str:
    shown = visible(text)
    return shown if len(shown) <= room else shown[:room] + "…"


def number(value: Any) -> str:
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
        return ", ".join(number(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{key}: {number(item)}" for key, item in value.items())
    return visible(str(value))
