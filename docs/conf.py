"""The documentation as a site: `make docs` builds these pages with Sphinx and MyST, every warning an error."""

import os
import re

project, author = "memlens", "the authors of memlens"
extensions = ["myst_parser"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = "memlens"
exclude_patterns: list[str] = []
suppress_warnings = ["misc.highlighting_failure"]  # a code block may show what a program prints

COLAB = "https://colab.research.google.com"
REPOSITORY = os.environ.get("GITHUB_REPOSITORY")  # OWNER/NAME where GitHub builds the site; nobody else knows it


def name_files_outside(_app: object, _page: str, source: list[str]) -> None:
    """A link to a file that is no page of the site becomes its name; a notebook also gets a badge that opens it."""
    if REPOSITORY:
        badge = rf"[![Open in Colab]({COLAB}/assets/colab-badge.svg)]({COLAB}/github/{REPOSITORY}/blob/main/\1)"
        source[0] = re.sub(r"\[[^\]]*\]\((?:\.\./)+([^)#]*\.ipynb)\)", rf"\g<0> {badge}", source[0])
    source[0] = re.sub(r"\[([^\]]*)\]\((?:\.\./)+([^)#]*)[^)]*\)", r"\1 (`\2`)", source[0])


def setup(app: object) -> None:
    app.connect("source-read", name_files_outside)  # type: ignore[attr-defined]
