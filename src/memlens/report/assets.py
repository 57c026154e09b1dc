"""Each chart of the report as SVG and PDF, each table as CSV, in a folder.

A CSV has exactly the rows and columns of its table; lists are written as JSON. Knows files and formats; no experiment.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import altair as alt
import pyarrow as pa
import vl_convert

from memlens.errors import SettingError
from memlens.index.files import explain_os_errors, replacing
from memlens.report.chart_style import Spec, export_spec

_VERSION = ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])


def assets_folder(folder: Path) -> Path:
    """The folder, made if need be; a file in its place is refused."""
    if folder.exists() and not folder.is_dir():
        raise SettingError(f"--assets is {folder}, which is a file; name a folder, it is made if need be")
    with explain_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_chart(folder: Path, name: str, spec: Spec) -> None:
    """NAME.svg and NAME.pdf."""
    exported = export_spec(spec)
    svg: str = vl_convert.vegalite_to_svg(exported, vl_version=_VERSION)
    pdf: bytes = vl_convert.vegalite_to_pdf(exported, vl_version=_VERSION)
    _write(folder / f"{name}.svg", svg.encode())
    _write(folder / f"{name}.pdf", pdf)


def write_csv(folder: Path, name: str, table: pa.Table) -> None:
    """NAME.csv."""
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    writer.writerow(table.column_names)
    for row in table.to_pylist():
        writer.writerow([_cell(row[column]) for column in table.column_names])
    _write(folder / f"{name}.csv", sink.getvalue().encode(errors="replace"))


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, tuple, Mapping)) else value


def _write(path: Path, content: bytes) -> None:
    with replacing(path) as beside:
        beside.write_bytes(content)
