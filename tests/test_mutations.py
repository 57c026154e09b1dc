"""The rows of mutations.py fit the sources and the tests."""

import re

import pytest

from mutations import FAULTS, ROOT


@pytest.mark.parametrize(("file", "text", "wrong", "fault", "tests"), FAULTS, ids=[row[3] for row in FAULTS])
def test_a_fault_is_in_one_place_and_its_tests_exist(file: str, text: str, wrong: str, fault: str, tests: str) -> None:
    assert (ROOT / "src/memlens" / file).read_text("utf-8").count(text) == 1 and text != wrong
    for path, _, name in (test.partition("::") for test in tests.split()):
        assert re.search(rf"def {name or 'test_'}", (ROOT / "tests" / path).read_text("utf-8"))
