"""Sphinx configuration of the documentation. `make docs` builds it and treats warnings as errors."""

import os
import re

project, author = "memlens", "the authors of memlens"
extensions = ["myst_parser"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = "memlens"
html_favicon = "../src/memlens/web/static/icon.svg"
exclude_patterns: list[str] = []
suppress_warnings = ["misc.highlighting_failure"]  # code blocks may contain program output

COLAB = "https://colab.research.google.com"
REPOSITORY = os.environ.get("GITHUB_REPOSITORY")  # OWNER/NAME; set only if GitHub builds the site


def name_files_outside(_app: object, _page: str, source: list[str]) -> None:
    """Replace links to files outside the site by their names, and add a Colab badge to notebooks."""
    if REPOSITORY:
        badge = rf"[![Open in Colab]({COLAB}/assets/colab-badge.svg)]({COLAB}/github/{REPOSITORY}/blob/main/\1)"
        source[0] = re.sub(r"\[[^\]]*\]\((?:\.\./)+([^)#]*\.ipynb)\)", rf"\g<0> {badge}", source[0])
    source[0] = re.sub(r"\[([^\]]*)\]\((?:\.\./)+([^)#]*)[^)]*\)", r"\1 (`\2`)", source[0])


def setup(app: object) -> None:
    app.connect("source-read", name_files_outside)  # type: ignore[attr-defined]
