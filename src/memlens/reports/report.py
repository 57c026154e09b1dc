"""The report of an index as one self-contained HTML file, and its charts and tables as files.

The page loads nothing: scripts and styles are embedded, a Content-Security-Policy lists the hashes of the scripts, and
text of the corpus is escaped. The same index gives the same bytes: the page contains no date, path or random name.
In the workbench and on the static site, names of memories are links (with_links).
"""

import base64
import csv
import hashlib
import io
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import vl_convert
from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from memlens import __version__
from memlens.errors import FilesError, OutputError
from memlens.experiments.experiment import (
    ABSENT,
    APPEARS,
    LAYERS,
    NOT_APPLICABLE,
    NOT_JUDGED,
    PAPER_LAYERS,
    PARTLY,
    SAME,
    UNCLEAR,
    UNCOMPARED,
    JudgedClaim,
    Panel,
)
from memlens.experiments.run import all_tables
from memlens.experiments.style import COLOURS, EXPORT_WIDTH, css_variables, export_spec
from memlens.files import explain_os_errors, prepare_output_folder, refuse_content, refuse_nul, refuse_output, replacing
from memlens.index.format import REPORT, Manifest
from memlens.index.memory import LayerRouting, read_routing
from memlens.index.reader import Index
from memlens.progress import Progress, no_progress
from memlens.reports import galleries
from memlens.reports.findings import Finding, count_verdicts, select_findings
from memlens.reports.pictures import (
    ClaimMark,
    MemoryPicture,
    PromptPicture,
    describe_text,
    mark_claim,
    picture_memory,
    picture_prompt,
    picture_roles,
)
from memlens.reports.sections import RoleSection, Section, Tables, make_sections, role_section
from memlens.text import cell, harmless_cell, token, visible

_PACKAGE = "memlens.reports"
_GENERATOR = b'<meta name="generator" content="memlens">'  # one of the first lines of report.html.j2
_SNIPPET = "window.vegaEmbed = vegaEmbed;"
_MEMORY = re.compile(r"\bL\d+(?:[ES]\d+)?N\d+\b")
VERDICTS = {
    APPEARS: ("yes", "✓"),
    PARTLY: ("partly", "≈"),
    SAME: ("no", "="),
    ABSENT: ("no", "✕"),
    UNCLEAR: ("open", "?"),
    UNCOMPARED: ("open", "?"),
    NOT_APPLICABLE: ("none", "–"),
    NOT_JUDGED: ("none", "·"),
}


@dataclass(frozen=True)
class Addresses:
    """The targets of a report's links: the start page, and the first part of a memory's address."""

    home: str
    memory: str


WORKBENCH, SITE = Addresses("/", "/m/"), Addresses("index.html", "memory.html?name=")


@dataclass(frozen=True)
class Report:
    """The content of the page."""

    index: Index
    tables: Tables
    findings: list[Finding]
    sections: list[Section]
    claims: list[JudgedClaim]
    values: list[galleries.ValueCard] | None
    patterns: list[galleries.PatternCard] | None
    changes: list[galleries.ChangeCard]
    duplicates: dict[str, galleries.DuplicateGallery | None]  # "triggers" or "values", which the memories share
    dead: list[galleries.DeadLayer]
    dead_charts: list[Panel]
    routing: list[LayerRouting]  # empty for a model without experts
    roles: RoleSection | None
    role_charts: list[Panel]
    memory: MemoryPicture | None
    prompt: PromptPicture | None

    @property
    def charts(self) -> list[Panel]:
        pictures = [picture.panel for picture in (self.memory, self.prompt) if picture and picture.panel]
        charts = [chart for section in self.sections for chart in section.charts]
        return pictures + charts + self.dead_charts + self.role_charts

    def data(self) -> dict[str, pa.Table]:
        """Return the tables of all sections and charts, by file name."""
        tables = {section.name: self.tables.table(section.name) for section in self.sections if section.is_present}
        for _, table in all_tables():
            if table.name in tables and table.published():
                rows = table.published()
                columns = dict.fromkeys(
                    column for row in rows for column in row
                )  # the first layer may have fewer columns
                tables[f"{table.name}-paper"] = pa.table({name: [row.get(name) for row in rows] for name in columns})
        dead = [{"layer": row.layer, "memories": row.memories, "dead": row.dead} for row in self.dead]
        tables["dead"] = pa.Table.from_pylist(dead)
        return tables | ({"roles": pa.Table.from_pylist(self.roles.by_layer)} if self.roles else {})


def make_report(
    index: Index,
    out: Path,
    assets: Path | None = None,
    progress: Progress = no_progress,
    *,
    force: bool = False,
    links: Addresses | None = None,
) -> Path:
    """Write the report of an index to `out`, and SVG, PDF and CSV of each chart to `assets`. Returns `out`.

    `force` also overwrites files that memlens did not write. `links` are the targets of memory names.
    """
    refuse_nul(out)
    place = Path(os.path.realpath(out))  # circular links are rejected below
    if assets is not None:
        refuse_nul(assets)
        if Path(os.path.realpath(assets)).is_relative_to(place):
            raise OutputError(
                f"{assets} cannot be the folder for charts, because {out} is the page; use another folder"
            )
    if place == Path(os.path.realpath(index.folder / REPORT)):  # the report in the index folder
        refuse_content(out, is_report, force=True)
    else:
        refuse_output(out, is_report, force=force)
    if assets is not None:
        prepare_output_folder(assets, force=force)
    progress("report", 0, None)
    report = gather(index)
    page = render(report, vega_bundle())
    page = page if links is None else with_links(page, links)
    with explain_os_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as beside:
        beside.write_text(page, encoding="utf-8", newline="\n")
    if assets is not None:
        write_assets(report, assets, progress)
    return out


def is_report(head: bytes) -> bool:
    """Return True if `head` is the start of a report."""
    return _GENERATOR in head


def with_links(page: str, to: Addresses) -> str:
    """Turn names of memories and the title into links. Corpus text is escaped, so it stays unchanged."""
    page = page.replace("<a data-home>", f'<a data-home href="{to.home}">')
    return re.sub(r'<a data-memory="([^"]*)">', rf'<a data-memory="\1" href="{to.memory}\1">', page)


def gather(index: Index) -> Report:
    """Compute the content of the report."""
    tables = Tables(index)
    dead = galleries.dead_memories(index)
    findings, roles = select_findings(index, tables), role_section(index)
    return Report(
        index,
        tables,
        findings,
        make_sections(tables),
        tables.judge(),
        galleries.predictive_values(index, tables),
        galleries.clearest_patterns(index),
        galleries.last_layer_changes(index, tables),
        {"triggers": galleries.same_triggers(index), "values": galleries.same_values(index)},
        dead,
        _draw_dead(dead, tables.layers),
        read_routing(index),
        roles,
        picture_roles(roles.by_layer, [row.role for row in roles.roles]) if roles else [],
        picture_memory(index, findings),
        picture_prompt(index),
    )


def _draw_dead(dead: list[galleries.DeadLayer], layers: int) -> list[Panel]:
    """Draw dead memories by layer, if there are any."""
    from memlens.experiments import charts

    if not any(row.dead for row in dead):
        return []
    rows = [{"layer": row.layer, "memories": row.memories, "dead": row.dead, "value": row.share} for row in dead]
    chart = charts.bars(charts.with_depth(rows, layers), "share of dead memories", ".1%", layers)
    return [charts.panel("dead", chart, "Share of memories without any trigger, by depth", rows, "value", "%")]


def render(report: Report, bundle: str) -> str:
    """Return the HTML of the page. `bundle` is the script that `vega_bundle` returns."""
    script = read_template(_PACKAGE, "report.js")
    manifest = report.index.manifest
    environment = template_environment(_PACKAGE)
    environment.filters["memories"] = _name_memories
    return environment.get_template("report.html.j2").render(
        report=report,
        model=manifest.model,
        counts=manifest.counts,
        settings=_settings(manifest),
        index=report.index,
        total=sum(report.index.memories(layer) for layer in report.index.layers),
        tied_share=galleries.tied_share(report.index),
        dead_total=sum(layer.dead for layer in report.dead),
        unreached_total=sum(layer.unreached for layer in report.routing),
        verdicts=VERDICTS,
        verdict_counts=count_verdicts(report.tables),
        sparkline=sparkline,
        marks={judged.claim.slug: mark_claim(judged) for judged in report.claims},
        mark_at=ClaimMark.place,
        text_amount=describe_text(report.index),
        missing=[section for section in report.sections if not section.is_present],
        parts=list(dict.fromkeys(section.part for section in report.sections)),
        passes=report.tables.passes(),
        prefix_part=LAYERS,
        alike={"triggers": galleries.ALIKE_TRIGGERS, "values": galleries.ALIKE_TOKENS},
        least={"precision": galleries.LEAST_PRECISION, "auroc": galleries.LEAST_AUROC},
        paper_layers=PAPER_LAYERS,
        csv={name: _data_address(csv_text(table)) for name, table in report.data().items()},
        formula="(layer + ½) / L",
        version=__version__,
        css=css_variables() + read_template(_PACKAGE, "report.css"),
        bundle=bundle,
        script=script,
        hashes=[_hash(bundle), _hash(script)],
        drawn=_json(
            {
                "charts": {chart.name: chart.spec for chart in report.charts},
                "light": {name: light for name, (light, _) in COLOURS.items()},
                "width": EXPORT_WIDTH,
            }
        ),
    )


def sparkline(numbers: Sequence[float | None], beside: Sequence[float | None]) -> list[tuple[float, float]]:
    """Return the points of a curve in a box of 100 x 20. The scale includes 0 and the numbers of `beside`."""
    heights = [value for value in [*numbers, *beside, 0.0] if value is not None]
    low, high = min(heights), max(heights)
    return [
        (round(100 * (place + 0.5) / len(numbers), 1), round(19 - 18 * (value - low) / ((high - low) or 1), 1))
        for place, value in enumerate(numbers)
        if value is not None
    ]


def _name_memories(text: str) -> Markup:
    """Mark the names of memories in a text, so that with_links can find them."""
    return Markup(_MEMORY.sub(r'<a data-memory="\g<0>">\g<0></a>', str(escape(text))))


def _data_address(text: str) -> str:
    """Return a file as a data URL, so that a link can save it without a server."""
    return "data:text/csv;charset=utf-8;base64," + base64.b64encode(text.encode(errors="replace")).decode()


def _settings(manifest: Manifest) -> list[tuple[str, str]]:
    """Return the settings of the scan and of the values table, as pairs of an option and its value."""
    scan = {key: value for key, value in manifest.settings.to_json().items() if value is not None}
    shown = [(f"--{key.replace('_', '-')}", cell(value)) for key, value in sorted(scan.items())]
    values = msgspec.structs.asdict(manifest.values) if manifest.values.top else {}
    return shown + [(f"values: {key}", cell(value)) for key, value in sorted(values.items())]


def _hash(script: str) -> str:
    """Return the hash by which a Content-Security-Policy allows a script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _json(content: Any) -> str:
    """Return JSON that is safe inside a script element."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def template_environment(package: str) -> Environment:
    """Return the Jinja environment for a package's templates folder."""
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
    """Return a template, style or script."""
    return files(package).joinpath("templates", name).read_text(encoding="utf-8")


def vega_bundle() -> str:
    """Return Vega, Vega-Lite and their embedder for a module script, which sets `window.vegaEmbed`.

    Building the bundle takes a second or more and depends only on the version of the library, so it is cached.
    """
    path = _cache_folder() / f"vega-{version('vl-convert-python')}.js"
    with suppress(OSError):
        return path.read_bytes().decode()
    bundle: str = vl_convert.javascript_bundle(_SNIPPET)
    bundle = bundle.replace("</script", "<\\/script")  # "</script" would end the script element
    with suppress(OSError, FilesError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as beside:
            beside.write_bytes(bundle.encode())
    return bundle


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME", "")
    # a relative path is ignored, as the XDG specification requires
    return (Path(root) if Path(root).is_absolute() else Path.home() / ".cache") / "memlens"


def write_assets(report: Report, folder: Path, progress: Progress = no_progress) -> None:
    """Write NAME.svg, NAME.pdf and NAME.csv for each chart and table of the report."""
    for done, chart in enumerate(report.charts):
        progress("assets", done, len(report.charts))
        write_chart(folder, chart)
    for name, table in report.data().items():
        _write(folder / f"{name}.csv", csv_text(table).encode(errors="replace"))
    progress("assets", len(report.charts), len(report.charts))


def write_chart(folder: Path, chart: Panel) -> None:
    """Write a chart as NAME.svg and NAME.pdf."""
    import altair as alt

    exported, schema = export_spec(chart.spec), ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])
    svg: str = vl_convert.vegalite_to_svg(exported, vl_version=schema)
    pdf: bytes = vl_convert.vegalite_to_pdf(exported, vl_version=schema)
    _write(folder / f"{chart.name}.svg", svg.encode())
    _write(folder / f"{chart.name}.pdf", pdf)


def csv_text(table: pa.Table) -> str:
    """Return a table as CSV."""
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    writer.writerow(table.column_names)
    for row in table.to_pylist():
        writer.writerow([_cell(row[column]) for column in table.column_names])
    return sink.getvalue()


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, tuple, Mapping)) else harmless_cell(value)


def _write(path: Path, content: bytes) -> None:
    with replacing(path) as beside:
        beside.write_bytes(content)
