"""The report as one HTML text: everything it needs is inside, nothing is loaded, nothing but its own scripts may run.

The scripts are named by their hashes in a Content-Security-Policy; text of the corpus passes through autoescape.
The same index gives the same bytes: there is no date, no path and no random name in it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from memlens import __version__
from memlens.index.reader import Index
from memlens.report.chart_style import css_variables
from memlens.report.claims import CLAIMS, Claim, judge_all
from memlens.report.depth import FORMULA
from memlens.report.duplicates import ALIKE_TOKENS, ALIKE_TRIGGERS, DuplicateGallery
from memlens.report.evidence import ABSENT, APPEARS, UNCLEAR, Evidence, Finding
from memlens.report.figures import Model, Panel, draw_dead
from memlens.report.galleries import Change, DeadLayer, PatternCard, ValueCard
from memlens.report.sections import Section
from memlens.report.tables import Tables
from memlens.report.templating import read_template, template_environment
from memlens.report.text import number
from memlens.report.topics import LAYERS

_PACKAGE = "memlens.report"
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
            model=manifest["model"],
            counts=manifest["counts"],
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


def _settings(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    """Options of the scan and of the values, as a person would type them."""
    scan = {key: value for key, value in manifest["plan"]["settings"].items() if value is not None}
    shown = [(f"--{key.replace('_', '-')}", number(value)) for key, value in sorted(scan.items())]
    return shown + [(f"values: {key}", number(value)) for key, value in sorted(manifest.get("values", {}).items())]


def _hash(script: str) -> str:
    """How a Content-Security-Policy names a script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _json(content: Any) -> str:
    """JSON that may stand inside a script element: no `<` can end it."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
