"""Pages that are made from the code, or name its files, are up to date."""

import re
import subprocess
import sys

from docs_pages import PAGES, ROOT, blocks, inline

import memlens

EVERY_PAGE = [*PAGES, *(ROOT / "docs" / "decisions").glob("*.md"), *ROOT.glob("C*.md"), ROOT / "training" / "README.md"]


def tree() -> list[str]:
    """The lines of the README's tree."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = [block for block in blocks(readme) if block.code.startswith("src/memlens/")]
    return block.code.splitlines()


def test_the_api_page_is_what_the_docstrings_say() -> None:
    command = [sys.executable, str(ROOT / "docs" / "make_api.py"), "--check"]
    assert subprocess.run(command, capture_output=True, text=True).stderr == ""


def test_every_public_function_says_what_it_does() -> None:
    assert not [name for name in memlens.__all__ if not (getattr(memlens, name).__doc__ or "").strip()]


def test_the_readmes_tree_lists_every_folder_of_the_package_with_a_line_and_nothing_else() -> None:
    package = ROOT / "src" / "memlens"
    # A folder that an earlier version left in a checkout holds caches only, and a cache is no part of the package.
    files = [
        path.relative_to(package) for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    folders = {f"{path.parts[0]}/" for path in files if len(path.parts) > 1}
    lines = {line.split()[0]: line.split()[1:] for line in tree()[1:] if line.startswith("  ")}
    assert folders <= lines.keys(), folders - lines.keys()
    assert all(lines.values()), "a folder without a line"
    named = [(package if line.startswith("  ") else ROOT) / line.split()[0] for line in tree()[1:]]
    assert not [path for path in named if not path.exists()]


def test_every_file_that_a_page_names_is_there() -> None:
    missing = []
    for page in EVERY_PAGE:
        for name in inline(page.read_text(encoding="utf-8")):
            places = (ROOT, ROOT / "src", ROOT / "src" / "memlens", page.parent)
            if re.fullmatch(r"[\w/]+\.py|[a-z_]+/", name) and not any((place / name).exists() for place in places):
                missing.append((str(page.relative_to(ROOT)), name))
    assert not missing


def test_every_test_that_the_page_on_security_names_is_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "security.md").read_text(encoding="utf-8")))
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert named and not [name for name in named if f"def {name}(" not in tests]
