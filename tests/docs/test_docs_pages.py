"""Pages that are made from the code, or name its files, are up to date."""

import re
import subprocess
import sys

from docs_pages import PAGES, ROOT, inline

import memlens

EVERY_PAGE = [*PAGES, *(ROOT / "docs" / "decisions").glob("*.md"), *ROOT.glob("C*.md"), ROOT / "training" / "README.md"]


def test_the_api_page_is_what_the_docstrings_say() -> None:
    command = [sys.executable, str(ROOT / "docs" / "make_api.py"), "--check"]
    assert subprocess.run(command, capture_output=True, text=True).stderr == ""


def test_every_public_function_says_what_it_does() -> None:
    assert not [name for name in memlens.__all__ if not (getattr(memlens, name).__doc__ or "").strip()]


def test_every_file_that_a_page_names_is_there() -> None:
    missing = []
    for page in EVERY_PAGE:
        for name in inline(page.read_text(encoding="utf-8")):
            places = (ROOT, ROOT / "src", ROOT / "src" / "memlens", page.parent)
            if re.fullmatch(r"[\w/]+\.py|[a-z_]+/", name) and not any((place / name).exists() for place in places):
                missing.append((str(page.relative_to(ROOT)), name))
    assert not missing
