"""The public names of memlens."""

import re
from pathlib import Path

import pytest

import memlens

ROOT = Path(__file__).parents[2]
TYPES = ["Index", "MemlensError", "MemoryId", "MemoryModel", "Prefix", "SparseProbe", "Trigger"]
VERBS = ["analyze", "check", "compare", "experiment", "load", "merge", "open_index", "report", "scan", "values"]
VERBS += ["as_sae", "chart", "demo", "patterns", "probe", "pull", "push", "repair", "roles", "site"]
TRACING = [
    "Edit",
    "Intervention",
    "ValueChange",
    "generate",
    "hooked",
    "in_common",
    "integrate",
    "intervene",
    "promoting",
]
TRACING += ["coefficients_on", "fires_on", "save_changed", "side_effects", "silence_each", "trace", "trying"]
TRACING += ["circuit", "task_circuit"]
PUBLIC = sorted([*TYPES, *VERBS, *TRACING])


def test_the_public_names_are_these_and_all_can_be_had() -> None:
    assert sorted(memlens.__all__) == PUBLIC
    for name in memlens.__all__:
        assert getattr(memlens, name).__name__ == name
    assert set(memlens.__all__) <= set(dir(memlens))


def test_no_package_has_the_name_of_a_verb() -> None:
    package = ROOT / "src" / "memlens"
    assert not [name for name in memlens.__all__ if (package / name).exists() or (package / f"{name}.py").exists()]


@pytest.mark.parametrize("name", [name for name in TRACING if name.islower()])
def test_a_function_about_one_prompt_shows_how_it_is_called(name: str) -> None:
    assert f"memlens.{name}(" in (getattr(memlens, name).__doc__ or "")


def test_what_the_readme_calls_is_public() -> None:
    called = set(re.findall(r"\bmemlens\.(\w+)\(", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert called and called <= set(memlens.__all__)
