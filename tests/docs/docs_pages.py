"""The documentation as tests see it: pages, code blocks, commands and links."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        ROOT / "README.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs" / "api").glob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    ]
)

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


class Block(NamedTuple):
    language: str
    code: str


def blocks(text: str) -> list[Block]:
    """The fenced code blocks of a page."""
    return [Block(match[1], match[2]) for match in _FENCE.finditer(text)]


def without_blocks(text: str) -> str:
    return _FENCE.sub("", text)


def inline(text: str) -> list[str]:
    """The texts between single backticks."""
    return _INLINE.findall(without_blocks(text))


def commands(text: str) -> Iterator[list[str]]:
    """Every `memlens ...` command of a page as words, from code blocks and from the running text."""
    for block in blocks(text):
        if block.language != "python":
            for line in block.code.replace("\\\n", " ").splitlines():
                yield from _command(line.strip().removeprefix("$ "))
    for code in inline(text):
        yield from _command(code)


def _command(line: str) -> Iterator[list[str]]:
    if line.startswith("memlens "):
        yield shlex.split(line, comments=True)[1:]


def is_whole(command: list[str]) -> bool:
    """Is it a command to be typed, and not the form of one (`memlens demo [-o DIR]`)?"""
    return len(command) > 1 and not any(set(word) & set("[]|…") or "..." in word for word in command)


def lone_options(text: str) -> set[str]:
    """Options that the running text names by themselves, like `--top` or `--unit line`."""
    return {code.split()[0].split("=")[0] for code in inline(text) if re.match(r"--[a-z]", code)}


def links(text: str) -> list[str]:
    """Targets of links and pictures that are no addresses."""
    return [link for link in _LINK.findall(without_blocks(text)) if not re.match(r"[a-z]+:", link)]


def anchors(text: str) -> set[str]:
    """The anchors of headings, as GitHub makes them."""
    headings = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in _HEADING.findall(without_blocks(text)))
    return {heading.strip().replace(" ", "-") for heading in headings}
