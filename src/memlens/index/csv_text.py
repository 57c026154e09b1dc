"""People's work as CSV for a spreadsheet, written and read with one table of columns. Knows text and rows only."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from memlens.errors import SettingError


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")  # quotes both signs within a cell, which "\n" alone would not
    writer.writerow(columns)
    writer.writerows(rows)
    return out.getvalue()


def csv_rows(text: str, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Every row and where it is; refused where the text has other columns or is no CSV."""
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        if tuple(reader.fieldnames or ()) != tuple(columns):
            raise SettingError(
                f"the file's first line is not {','.join(columns)}; is it an export of `memlens annotate`?"
            )
        for row in reader:
            where = f"line {reader.line_num} of the file"
            if None in row or None in row.values():
                raise SettingError(f"{where} has not {len(columns)} columns")
            yield where, row
    except csv.Error as error:
        raise SettingError(
            f"line {reader.line_num + 1} of the file is no CSV ({error}); save it as CSV again"
        ) from error
