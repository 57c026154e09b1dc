"""Templates of a package, as the report and the workbench use them: every text is escaped, every name must be known.

Each chart of the report as SVG and PDF, each table as CSV, in a folder.

A CSV has exactly the rows and columns of its table; lists are written as JSON. Knows files and formats; no experiment.

The report as one HTML text: everything it needs is inside, nothing is loaded, nothing but its own scripts may run.

The scripts are named by their hashes in a Content-Security-Policy; text of the corpus passes through autoescape.
The same index gives the same bytes: there is no date, no path and no random name in it.

make_report: from an index to one HTML file, and the charts as files of their own if asked for.

This module only calls the others in order and writes what comes back.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import altair as alt
import pyarrow as pa
import vl_convert
from jinja2 import Environment, FunctionLoader, StrictUndefined

from memlens import __version__
from memlens.errors import SettingError
from memlens.files import explain_os_errors, replacing
from memlens.index.manifest import Manifest
from memlens.index.reader import Index
from memlens.parallel import Progress, no_progress
from memlens.reports.charts import FORMULA
from memlens.reports.claims import CLAIMS, Claim, judge_all
from memlens.reports.figures import Model, Panel, draw_dead
from memlens.reports.galleries import (
    ALIKE_TOKENS,
    ALIKE_TRIGGERS,
    Change,
    DeadLayer,
    DuplicateGallery,
    PatternCard,
    ValueCard,
    clearest_patterns,
    dead_memories,
    last_layer_changes,
    predictive_values,
    same_triggers,
    same_values,
)
from memlens.reports.judgements import ABSENT, APPEARS, UNCLEAR, Evidence, Finding
from memlens.reports.published import published
from memlens.reports.sections import Section, Tables, make_sections
from memlens.reports.style import Spec, css_variables, export_spec, vega_bundle
from memlens.reports.topics import LAYERS
from memlens.text import cell, token, visible


def template_environment(package: str) -> Environment:
    """For the templates in a package's folder templates/."""
    environment = Environment(
        loader=FunctionLoader(partial(read_template, package)),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(number=cell, visible=visible, token=token)
    return environment


def read_template(package: str, name: str) -> str:
    """A template, or a style or script that lies beside it."""
    return files(package).joinpath("templates", name).read_text(encoding="utf-8")


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


_PACKAGE = "memlens.reports"
VERDICTS = {APPEARS: ("yes", "✓"), ABSENT: ("no", "✕"), UNCLEAR: ("open", "?")}


@dataclass(frozen=True)
class Report:
    """Everything the page shows, computed."""

    index: Index
    tables: Tables
    sections: list[Section]
    claims: list[tuple[Claim, Finding | None]]
    values: list[ValueCard] | None
    patterns: list[PatternCard] | None
    changes: list[Change]
    duplicates: dict[str, DuplicateGallery | None]  # by what they share
    dead: list[DeadLayer]
    dead_panels: list[Panel]

    @property
    def panels(self) -> list[Panel]:
        return [panel for section in self.sections for panel in section.panels] + self.dead_panels


def dead_panels(dead: list[DeadLayer], tables: Tables) -> list[Panel]:
    """A chart of dead memories, where there are any."""
    rows = [{"layer": row.layer, "memories": row.memories, "dead": row.dead, "share": row.share} for row in dead]
    return draw_dead(rows, Model(tables.layers, tables.vocabulary)) if any(row.dead for row in dead) else []


def judge(index: Index, tables: Tables, sections: list[Section]) -> list[tuple[Claim, Finding | None]]:
    """The claims of the paper against the tables that are there."""
    present = {section.topic.name: section.data.to_pylist() for section in sections if section.data is not None}
    memories = {layer: index.memories(layer) for layer in index.layers}
    return judge_all(Evidence(present, tables.layers, memories))


def render(report: Report, bundle: str) -> str:
    """The whole page."""
    script = read_template(_PACKAGE, "report.js")
    manifest = report.index.manifest
    counts = dict.fromkeys(VERDICTS, 0)
    for _, finding in report.claims:
        if finding:
            counts[finding.verdict] += 1
    return (
        template_environment(_PACKAGE)
        .get_template("report.html.j2")
        .render(
            report=report,
            model=manifest.model,
            counts=manifest.counts,
            settings=_settings(manifest),
            index=report.index,
            total=sum(report.index.memories(layer) for layer in report.index.layers),
            dead_total=sum(layer.dead for layer in report.dead),
            verdicts=VERDICTS,
            verdict_counts=counts,
            claim_list=CLAIMS,
            missing=[section for section in report.sections if not section.is_present],
            parts=list(dict.fromkeys(section.topic.part for section in report.sections)),
            passes=report.tables.passes(),
            prefix_part=LAYERS,
            alike={"triggers": ALIKE_TRIGGERS, "values": ALIKE_TOKENS},
            formula=FORMULA,
            version=__version__,
            css=css_variables() + read_template(_PACKAGE, "report.css"),
            bundle=bundle,
            script=script,
            hashes=[_hash(bundle), _hash(script)],
            specs=_json({panel.name: panel.spec for panel in report.panels}),
        )
    )


def _settings(manifest: Manifest) -> list[tuple[str, str]]:
    """Options of the scan and of the values, as a person would type them."""
    scan = {key: value for key, value in manifest.settings.to_json().items() if value is not None}
    shown = [(f"--{key.replace('_', '-')}", cell(value)) for key, value in sorted(scan.items())]
    values = asdict(manifest.values) if manifest.values.top else {}
    return shown + [(f"values: {key}", cell(value)) for key, value in sorted(values.items())]


def _hash(script: str) -> str:
    """How a Content-Security-Policy names a script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _json(content: Any) -> str:
    """JSON that may stand inside a script element: no `<` can end it."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


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
