"""The documentation builds as a site without a warning, so every link inside it leads somewhere."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    options = ["--quiet", "--fail-on-warning", "--keep-going", "-b", "html", "-d", tmp_path / "doctrees"]
    command = [sys.executable, "-m", "sphinx", *options, DOCS, tmp_path / "site"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    made = {path.stem for path in (tmp_path / "site").rglob("*.html")}
    assert {path.stem for path in DOCS.rglob("*.md")} <= made


def test_where_github_builds_the_site_the_notebook_has_a_badge_that_opens_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = ["a [notebook](../notebooks/first_hour.ipynb) with the first steps"]
    monkeypatch.setenv("GITHUB_REPOSITORY", "owner/name")
    runpy.run_path(str(DOCS / "conf.py"))["name_files_outside"](None, "guide", page)
    assert "colab.research.google.com/github/owner/name/blob/main/notebooks/first_hour.ipynb)" in page[0]
    assert (DOCS.parent / "notebooks" / "first_hour.ipynb").is_file()


@pytest.mark.sweep
def test_a_link_that_leads_nowhere_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "conf.py").write_text((DOCS / "conf.py").read_text())
    (tmp_path / "docs" / "index.md").write_text("# Title\n\n[a page](nothing.md) and [a place](#nowhere)\n")
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", "-b", "html"]
    ran = subprocess.run([*command, tmp_path / "docs", tmp_path / "site"], capture_output=True, text=True)
    assert ran.returncode != 0 and "nothing.md" in ran.stderr and "nowhere" in ran.stderr
