"""Formatting of tokens, texts, numbers, durations and tables for terminals, pages, reports and errors.

A corpus may contain anything, so control characters and invisible characters are replaced by visible ones, and every
string is valid UTF-8. HTML is escaped by the templates.
"""

import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from itertools import pairwise
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

_NAMED = {"\n": "⏎", "\t": "⇥", "\r": "␍", "\x7f": "␡"}
# Unicode categories: control and format characters (including text direction), separators
_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
_JOINERS = "\u200c\u200d"  # joiners are kept because words and emoji may contain them
_BARS = "▁▂▃▄▅▆▇█"
MISSING = "–"
_MOST_DECIMALS = 6  # maximum number of decimals in a column of numbers
FORMULA = re.compile(r"'*[=+\-@\t\r]")  # start of a cell that spreadsheets treat as a formula


def plain(record: Any) -> dict[str, Any]:
    """Return a dataclass as a JSON object of its fields, as in `--json` and the workbench."""
    return {field.name: finite(getattr(record, field.name)) for field in fields(record)}


def finite(content: Any) -> Any:
    """Convert content to JSON types.

    A record becomes the result of its `to_json()` or a dictionary. NaN and infinite numbers become None.
    """
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


def plain_table(heads: Sequence[str], rows: Sequence[Sequence[Any]] = (), last_wraps: bool = False) -> "Table":
    """Return a terminal table without borders. A heading that starts with > aligns its column to the right."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for place, head in enumerate(heads):
        table.add_column(
            head.lstrip(">"),
            justify="right" if head.startswith(">") else "left",
            style="bold" if head == "memory" else "",
            no_wrap=not (last_wraps and place == len(heads) - 1),
        )
    for row in rows:
        table.add_row(*row)
    return table


class _Visible(dict[int, str]):
    """A table for str.translate that maps each character to a visible one. Entries are added on first use."""

    def __missing__(self, code: int) -> str:
        sign = chr(code)
        if sign in _NAMED:
            picture = _NAMED[sign]
        elif unicodedata.category(sign) not in _HIDDEN or sign in _JOINERS:
            picture = sign
        elif code < 0x20:
            picture = chr(0x2400 + code)  # control characters have pictures: ESC is ␛
        else:
            picture = f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
        self[code] = picture
        return picture


_VISIBLE = _Visible()


def visible(text: str) -> str:
    """Return the text on one line, with a visible sign for every control or invisible character."""
    return text.translate(_VISIBLE)


# Texts and tokens, shortened to a width


def token(text: str) -> str:
    """Return a token with ␣ for leading and trailing spaces."""
    text = visible(text)
    inner = text.strip(" ")
    if not inner:
        return "␣" * len(text) or "∅"
    begin = len(text) - len(text.lstrip(" "))
    end = len(text) - len(text.rstrip(" "))
    return "␣" * begin + inner + "␣" * end


def quoted(text: str, room: int = 16) -> str:
    """Return a token in quotes, cut to `room` columns of a terminal."""
    return f"'{cut_right(visible(text), room - 2)}'"


def tail(text: str, room: int) -> str:
    """Return the last `room` characters of a text, preceded by … if the text was cut."""
    text = visible(text)
    return text if len(text) <= room else "…" + text[-room:]


def head(text: str, room: int) -> str:
    """Return the first `room` characters of a text, followed by … if the text was cut."""
    text = visible(text)
    return text if len(text) <= room else text[:room] + "…"


def cut_left(text: str, room: int) -> str:
    """Return the end of a text that fits into `room` terminal columns, preceded by … if the text was cut."""
    from rich.cells import cell_len

    if cell_len(text) <= room:
        return text
    begin = len(text)
    remaining = max(room, 1) - 1
    while begin > 0 and cell_len(text[begin - 1]) <= remaining:
        begin -= 1
        remaining -= cell_len(text[begin])
    return "…" + text[begin:]


def cut_right(text: str, room: int) -> str:
    """Return the start of a text that fits into `room` terminal columns, followed by … if the text was cut."""
    return cut_left(text[::-1], room)[::-1]


# Numbers


def number(value: float) -> str:
    """Return a number with four significant digits, with trailing zeros to align columns."""
    return f"{value:#.4g}".removesuffix(".") if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.3e}"


def cell(value: Any) -> str:
    """Return a value as the text of a table cell. Numbers have at most four significant digits."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}".replace("-", "−")
    if isinstance(value, float):
        return f"{value:.4g}".replace("-", "−")
    if isinstance(value, (list, tuple)):
        return ", ".join(cell(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{key}: {cell(item)}" for key, item in value.items())
    return visible(str(value))


def column_cells(values: Sequence[Any]) -> list[str]:
    """Return the cells of a column. Its numbers have the same number of decimals, or all use scientific notation."""
    sizes = [abs(value) for value in values if isinstance(value, float) and value and math.isfinite(value)]
    if not sizes:
        return [cell(value) for value in values]
    # the largest number has four significant digits, the smallest at least two
    decimals = max(0, 3 - math.floor(math.log10(max(sizes))), 1 - math.floor(math.log10(min(sizes))))
    form = f",.{decimals}f" if decimals <= _MOST_DECIMALS else ".2e"
    return [format(value, form).replace("-", "−") if isinstance(value, float) else cell(value) for value in values]


def harmless_cell(value: Any) -> Any:
    """Return a CSV cell with a leading ' if a spreadsheet would treat its text as a formula."""
    return f"'{value}" if isinstance(value, str) and FORMULA.match(value) else value


def cell_text(text: str) -> str:
    """Return the original text of a cell that `harmless_cell` wrote."""
    return text[1:] if text.startswith("'") and FORMULA.match(text) else text


def signed(value: float, digits: int = 2) -> str:
    """Return a number with its sign: +1.20, −0.35. A number that rounds to 0 has no sign."""
    number = f"{value:+.{digits}f}"
    return number.replace("-", "−") if number.strip("+-0.") else number[1:]


def percent(share: float | None, digits: int = 1) -> str:
    """Return a share as a percentage: 12.3%."""
    return MISSING if share is None else f"{100 * share:.{digits}f}%".replace("-", "−")


def probability(value: float | None) -> str:
    """Return a probability or frequency as a percentage with significant digits: 12.3%, 0.04%, 3.0e-5%."""
    if value is None or not math.isfinite(value):
        return MISSING
    number = f"{100 * value:.3g}" if value == 0 or value >= 1e-5 else f"{100 * value:.1e}".replace("e-0", "e-")
    return f"{number}%"


def edge(value: float) -> str:
    """Format the edge of a histogram bin, which is a power of two."""
    text = f"{value:g}" if abs(value) >= 0.01 or value == 0 else f"{value:.0e}".replace("e-0", "e-")
    return text.replace("-", "−", 1) if value < 0 else text


def size(count: float) -> str:
    """Return a number of bytes in the unit that suits it.

    >>> [size(count) for count in (999, 1500, 1_500_000, 2.5e9, 3e12)]
    ['999 bytes', '2 kB', '1.5 MB', '2.5 GB', '3.0 TB']
    """
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit in ("bytes", "kB") else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration(seconds: float) -> str:
    """Return a duration in the unit that suits it.

    >>> [duration(seconds) for seconds in (0.5, 42, 600, 7200, 10**6)]
    ['under a second', '42 s', '10 min', '2.0 h', '12 days']
    """
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 1 else "under a second"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 100 * 3600 else f"{seconds / 86400:.0f} days"


def letter(place: int) -> str:
    """Return the letter that marks the triggers of a pattern: a, b, … z, then (26), (27), …"""
    return ascii_lowercase[place] if place < len(ascii_lowercase) else f"({place})"


# Bar charts in one line of text


def sparkline(counts: Sequence[int]) -> str:
    """Return counts as a row of small bars, scaled to the largest count, with a dot for 0."""
    largest = max(counts, default=0)
    return "".join(_BARS[(count * 8 - 1) // largest] if count else "·" for count in counts)


def curve(numbers: Sequence[float | None], room: int = 64, beside: Sequence[float | None] = ()) -> str:
    """Return numbers as a row of small bars on a scale that includes zero, with a dot for None.

    If there are more than `room` numbers, each bar is the mean of neighboring numbers. The scale also includes the
    numbers of `beside`, so that two curves can share it.
    """
    bars = list(numbers) if len(numbers) <= room else _means(numbers, room)
    heights = [value for value in [*bars, *beside] if value is not None]
    low, high = min(heights, default=0.0), max(heights, default=0.0)
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (high - low) or 1.0
    return "".join("·" if value is None else _BARS[min(int(8 * (value - low) / scale), 7)] for value in bars)


def _means(numbers: Sequence[float | None], room: int) -> list[float | None]:
    edges = [len(numbers) * place // room for place in range(room + 1)]
    parts = [[v for v in numbers[a:b] if v is not None] for a, b in pairwise(edges)]
    return [sum(part) / len(part) if part else None for part in parts]
