"""Colors, fonts and sizes of every chart, and the Vega-Lite specification for a page or a file.

On a page, colors are CSS variables, so that charts adapt to light and dark screens and to print. Exported files use the
light colors. Series differ in shape or dash as well as in color, and color-blind readers can distinguish the colors.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

Spec = dict[str, Any]

# name -> (light page, dark page); report.css has the same names
COLOURS: dict[str, tuple[str, str]] = {
    "page": ("#fbfaf7", "#171614"),
    "ink": ("#1c1b19", "#eceae4"),
    "soft": ("#5f5b53", "#a8a49a"),
    "line": ("#dedad1", "#3b3a36"),
    "yours": ("#0067a5", "#62b6f0"),
    "paper": ("#c4500c", "#f2a25c"),
    "c1": ("#0067a5", "#62b6f0"),
    "c2": ("#c4500c", "#f2a25c"),
    "c3": ("#2a9d78", "#a5e8a0"),
    "c4": ("#6a1b57", "#b35598"),
    "c5": ("#e4e1d8", "#4a4740"),
}
CATEGORIES = ("c1", "c2", "c3", "c4", "c5")
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross")
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif"

PAGE_HEIGHT, ROW_HEIGHT, EXPORT_WIDTH = 190, 15, 480

_COUNTED = re.compile(r"^(view|param)_\d+(?=$|_)")
_DATA = ("data", "datasets")


def colour(name: str) -> str:
    """Return the CSS variable of a color."""
    return f"var(--{name})"


def page_config() -> Spec:
    """Return the fonts, lines and spacing that all charts share."""
    ink, soft, line = colour("ink"), colour("soft"), colour("line")
    return {
        "font": FONT,
        "background": "transparent",
        "view": {"stroke": None},
        "axis": {
            "labelColor": soft,
            "titleColor": soft,
            "gridColor": line,
            "domainColor": line,
            "tickColor": line,
            "domain": False,
            "ticks": False,
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
            "labelPadding": 6,
            "titlePadding": 10,
        },
        "axisX": {"grid": False, "domain": True},
        "legend": {
            "orient": "top",
            "title": None,
            "direction": "horizontal",
            "labelColor": ink,
            "titleColor": soft,
            "labelFontSize": 12,
            "symbolSize": 90,
            "symbolStrokeWidth": 2,
            "symbolOpacity": 1,
            "columnPadding": 16,
            "rowPadding": 4,
            "offset": 12,
            "labelLimit": 300,
            "layout": {"top": {"direction": "vertical", "anchor": "start", "margin": 4}},
        },
        "title": {"color": ink, "anchor": "start", "frame": "bounds", "fontSize": 13, "fontWeight": 600, "offset": 12},
        "mark": {"color": colour("yours")},
        "line": {"strokeWidth": 2},
        "area": {"line": False},
        "range": {"category": [colour(name) for name in CATEGORIES]},
    }


def page_spec(chart: Any) -> Spec:
    """Return the Vega-Lite specification of a chart for a page, with full width and the colors of the page."""
    # skip validation, which would take half of the time: Altair has already validated the parts
    spec = _steady(chart if isinstance(chart, Mapping) else chart.to_dict(validate=False))
    spec["config"] = {**spec.get("config", {}), **page_config()}
    if not {"hconcat", "vconcat", "concat", "facet", "repeat"} & spec.keys():
        spec["width"] = "container"
        spec["height"] = ROW_HEIGHT * _count_names_on_y(spec) or PAGE_HEIGHT
        spec["autosize"] = {"type": "fit-x", "contains": "padding"}
    return spec


def export_spec(spec: Spec) -> Spec:
    """Return a page's chart specification for a file: fixed size, light colors, white background."""
    text = json.dumps(spec)
    for name, (light, _) in COLOURS.items():
        text = text.replace(colour(name), light)
    exported: Spec = json.loads(text)
    if exported.get("width") == "container":
        exported["width"] = EXPORT_WIDTH
        exported.pop("autosize", None)
    exported["config"] = {**exported["config"], "font": "sans-serif", "background": "white"}
    return exported


def notebook_chart(spec: Spec) -> Any:
    """Return a page's chart specification as an Altair chart, for a notebook."""
    import altair as alt

    exported = export_spec(spec)
    del exported["config"]["legend"]["layout"]  # accepted by Vega-Lite, but not by its schema
    return alt.Chart.from_dict(exported)


def _count_names_on_y(spec: Spec) -> int:
    """Return the number of names on the y axis, or 0. Vega cannot combine a full width with a height per name."""
    y = spec.get("encoding", {}).get("y", {})
    if y.get("type") not in ("nominal", "ordinal"):
        return 0
    data = spec.get("data", {})
    rows = data.get("values") or spec.get("datasets", {}).get(data.get("name"), ())
    return len({row.get(y["field"]) for row in rows})


def _steady(spec: Mapping[str, Any]) -> Spec:
    """Renumber views and selections from 1, because Altair counts them over all charts of the process."""
    names: dict[str, str] = {}

    def walk(node: Any) -> Any:
        if isinstance(node, Mapping):
            return {_renamed(key, names): value if key in _DATA else walk(value) for key, value in node.items()}
        if isinstance(node, (list, tuple)):
            return [walk(value) for value in node]
        return _renamed(node, names) if isinstance(node, str) else node

    steady: Spec = walk(spec)
    return steady


def _renamed(text: str, names: dict[str, str]) -> str:
    match = _COUNTED.match(text)
    if not match:
        return text
    new = names.setdefault(match[0], f"{match[1]}_{len(names) + 1}")
    return new + text[match.end() :]


def css_variables() -> str:
    """Return the colors as CSS variables: dark colors for dark screens, light colors otherwise."""
    light, dark = (" ".join(f"--{name}: {pair[which]};" for name, pair in COLOURS.items()) for which in (0, 1))
    return f":root {{ {light} }}\n@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
