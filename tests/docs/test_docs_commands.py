"""Every command, option and link that the documentation shows is there."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click import Context
from docs_pages import PAGES, ROOT, anchors, commands, is_whole, links, lone_options, name_of

from memlens.cli.app import VERBS, program

EVERYWHERE = {"-h", "--help"}
# scripts that the documentation speaks of have options of their own
SCRIPTS = [path for part in ("benchmarks", "training", "examples", "docs") for path in (ROOT / part).rglob("*.py")]

read = {page: page.read_text(encoding="utf-8") for page in PAGES}
by_page = pytest.mark.parametrize("page", PAGES, ids=[name_of(page) for page in PAGES])


@cache
def verbs() -> dict[str, Any]:
    """The program's commands as click parses them."""
    return {name: program.get_command(Context(program), name) for name in VERBS}


def options_of(command: Any) -> set[str]:
    """Return the options of a command and of its subcommands."""
    own = {name for one in command.params for name in (*one.opts, *one.secondary_opts) if name.startswith("-")}
    return own.union(*(options_of(part) for part in getattr(command, "commands", {}).values()))


def options_for(words: list[str]) -> set[str]:
    """Return the options of the subcommand that a command line names, with those of the commands around it."""
    command, known = verbs()[words[0]], set(EVERYWHERE)
    for word in words[1:]:
        if word in getattr(command, "commands", {}):
            known |= {name for one in command.params for name in one.opts if name.startswith("-")}
            command = command.commands[word]
    return known | options_of(command)


def unknown_in(command: list[str]) -> list[str]:
    """The words of a command line that the program does not know: its verb, or options."""
    if command[0].startswith("-"):
        return [] if command[0] in options_of(program) | EVERYWHERE else command[:1]
    if command[0] not in verbs():
        return command[:1]
    known = options_for(command)
    given = [word.split("=")[0].strip("[]") for word in command[1:] if re.match(r"\[?--?[A-Za-z]", word)]
    return [option for option in given if option not in known]


@by_page
def test_every_command_and_option_on_a_page_exists_and_what_can_be_typed_is_accepted(page: Path) -> None:
    assert not [(command, unknown) for command in commands(read[page]) if (unknown := unknown_in(command))]
    for command in filter(is_whole, commands(read[page])):
        verbs()[command[0]].make_context(command[0], list(command[1:]))  # raises for a wrong command line


@by_page
def test_every_option_that_a_page_names_by_itself_exists(page: Path) -> None:
    known = EVERYWHERE.union(*(options_of(command) for command in verbs().values()), options_of(program))
    for script in SCRIPTS:
        known |= set(re.findall(r"\"(--[a-z-]+)\"", script.read_text(encoding="utf-8")))
    assert lone_options(read[page]) <= known


@by_page
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for link in links(read[page]):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), f"{link} leaves the project"
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), link


def test_the_readme_shows_every_verb() -> None:
    assert set(VERBS) <= {command[0] for command in commands(read[ROOT / "README.md"])}


def test_the_checks_find_what_they_look_for() -> None:
    assert any(is_whole(command) for page in PAGES for command in commands(read[page]))
    assert unknown_in(["scam", "gpt2"]) == ["scam"]
    assert unknown_in(["scan", "gpt2", "--tops", "5", "-o", "x"]) == ["--tops"]
    assert unknown_in(["demo", "[-o", "DIR]", "[--serves]"]) == ["--serves"]
    assert unknown_in(["--version"]) == [] and unknown_in(["--versions"]) == ["--versions"]
    text = "Use `memlens show X L0N0` or `--top`.\n```\nmemlens scan A B \\\n  -o C  # why\n```\n"
    text += "[a](b.md#c) [d](https://e)\n# A b, c!\n"
    assert list(commands(text)) == [["scan", "A", "B", "-o", "C"], ["show", "X", "L0N0"]]
    assert lone_options(text) == {"--top"} and links(text) == ["b.md#c"] and anchors(text) == {"a-b-c"}
