"""make_report: from an index to one HTML file, and the charts as files of their own if asked for.

This module only calls the others in order and writes what comes back.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from memlens.errors import SettingError
from memlens.index.build import Progress, no_progress
from memlens.index.files import explain_os_errors, replacing
from memlens.index.reader import Index
from memlens.report.assets import assets_folder, write_chart, write_csv
from memlens.report.bundle import vega_bundle
from memlens.report.duplicates import same_triggers, same_values
from memlens.report.galleries import clearest_patterns, dead_memories, last_layer_changes, predictive_values
from memlens.report.page import Report, dead_panels, judge, render
from memlens.report.published import published
from memlens.report.sections import make_sections
from memlens.report.tables import Tables


def make_report(index: Index, out: Path, assets: Path | None = None, progress: Progress = no_progress) -> Path:
    """Write the report of an index to `out`, and SVG, PDF and CSV of each chart into `assets`; `out` comes back."""
    if out.is_dir():
        raise SettingError(f"-o is {out}, which is a folder; name a file like {out / 'report.html'}")
    folder = None if assets is None else assets_folder(assets)
    progress("report", 0, None)
    report = gather(index)
    page = render(report, vega_bundle())
    with explain_os_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as beside:
        beside.write_text(page, encoding="utf-8", newline="\n")
    if folder is not None:
        write_assets(report, folder, progress)
    return out


def gather(index: Index) -> Report:
    """Everything the report says."""
    tables = Tables(index)
    sections = make_sections(tables)
    dead = dead_memories(index)
    return Report(
        index,
        tables,
        sections,
        judge(index, tables, sections),
        predictive_values(index, tables),
        clearest_patterns(index),
        last_layer_changes(tables),
        {"triggers": same_triggers(index), "values": same_values(index)},
        dead,
        dead_panels(dead, tables),
    )


def write_assets(report: Report, folder: Path, progress: Progress = no_progress) -> None:
    """NAME.svg, NAME.pdf and NAME.csv for each chart and table of the report."""
    for done, panel in enumerate(report.panels):
        progress("assets", done, len(report.panels))
        write_chart(folder, panel.name, panel.spec)
        paper = panel.name.removesuffix("-paper")
        if paper != panel.name:
            write_csv(folder, panel.name, pa.Table.from_pylist(published(paper)))
    for section in report.sections:
        if section.data is not None:
            write_csv(folder, section.topic.name, section.data)
    dead = [{"layer": row.layer, "memories": row.memories, "dead": row.dead} for row in report.dead]
    write_csv(folder, "dead", pa.Table.from_pylist(dead))
    progress("assets", len(report.panels), len(report.panels))
