"""What labels and verdicts of people share on the command line: files in and out, and rows as a table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlens.cli.screen import Screen
from memlens.cli.text import visible
from memlens.errors import SettingError

if TYPE_CHECKING:
    from memlens.index.reader import Index


def given(value: str | None, option: str) -> str:
    if value is None:
        raise SettingError(f"{option} is missing; say it")
    return value


def file_format(wanted: str | None, file: str | None) -> str:
    """As said, or by the file's name."""
    if wanted is not None:
        return wanted
    return "csv" if file is not None and file.lower().endswith(".csv") else "json"


def write_export(screen: Screen, index: Index, text: str, file: str | None, what: str) -> None:
    from memlens.index.files import replacing

    if file is None:
        sys.stdout.write(text)
        return
    path = Path(file)
    if path.is_dir() or path.resolve().is_relative_to(index.folder.resolve()):
        raise SettingError(f"--file {file} is a folder or lies inside the index; name a file elsewhere")
    with replacing(path) as beside:
        beside.write_text(text, encoding="utf-8", newline="")
    screen.note(f"{what} written to {visible(file)}")


def read_export(file: str | None) -> str:
    """The text of a file or of stdin; a spreadsheet may have put a byte order mark before it."""
    try:
        content = sys.stdin.buffer.read() if file is None else Path(file).read_bytes()
        return content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        what = "stdin" if file is None else f"--file {file}"
        raise SettingError(f"cannot read {what}: {error}; give an export as UTF-8 text") from error


def print_rows(screen: Screen, rows: list[dict[str, Any]], none: str = "nobody has labelled anything") -> None:
    """Rows with the same keys as a table, or as JSON."""
    if screen.as_json:
        screen.json(rows)
        return
    from rich.table import Table
    from rich.text import Text

    if not rows:
        screen.note(none)
        return
    table = Table(*(name.replace("_", " ") for name in rows[0]), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row.values()))
    screen.result(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else visible(str(value))
