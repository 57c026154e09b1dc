"""`memlens annotate INDEX SUBCOMMAND`: every subcommand has its own options."""

from collections.abc import Callable

import pytest

Run = Callable[..., tuple[int, str, str]]
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
    code, out, _ = run("annotate", "INDEX", *subcommand.split(), "--help")
    assert code == 0 and {option for option in EVERY_OPTION if option in out} == OPTIONS[subcommand]


def test_the_help_of_annotate_lists_its_subcommands(run: Run) -> None:
    code, out, _ = run("annotate", "--help")
    assert code == 0 and all(subcommand.split()[0] in out for subcommand in OPTIONS)
