"""`memlens annotate INDEX SUBCOMMAND`: every subcommand has its own options."""

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., Any]
OPTIONS = {
    "sample": {"--per-layer", "--top", "--seed", "--json"},
    "label": {"--annotator", "--memory", "--pattern"},
    "status": {"--json"},
    "export": {"--annotator", "--format", "--file", "--force"},
    "import": {"--format", "--file"},
    "agreement": {"--json"},
    "verdicts judge": {"--annotator", "--example", "--verdict"},
}
EVERY_OPTION = set().union(*OPTIONS.values())


@pytest.mark.parametrize("subcommand", OPTIONS)
def test_the_help_of_a_subcommand_shows_only_its_own_options(run: Run, subcommand: str) -> None:
    ran = run("annotate", "INDEX", *subcommand.split(), "--help")
    assert ran.code == 0 and {option for option in EVERY_OPTION if option in ran.out} == OPTIONS[subcommand]


def test_the_help_of_annotate_lists_its_subcommands(run: Run) -> None:
    ran = run("annotate", "--help")
    assert ran.code == 0 and all(subcommand.split()[0] in ran.out for subcommand in OPTIONS)
