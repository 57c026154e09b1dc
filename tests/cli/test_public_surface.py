"""The public names of memlens, and the cost of importing them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import memlens

ROOT = Path(__file__).parents[2]
TYPES = ["Index", "MemlensError", "MemoryId", "MemoryModel", "Prefix", "Trigger"]
VERBS = ["analyze", "check", "compare", "experiment", "load", "merge", "open_index", "report", "scan", "values"]
VERBS += ["demo", "patterns", "repair"]
TRACING = ["Edit", "Intervention", "ValueChange", "generate", "in_common", "integrate", "intervene", "promoting"]
TRACING += ["save_changed", "side_effects", "silence_each", "trace", "trying"]
PUBLIC = sorted([*TYPES, *VERBS, *TRACING])
HEAVY = ("torch", "transformers", "pyarrow", "duckdb", "numba")


def test_the_public_names_are_these_and_all_can_be_had() -> None:
    assert sorted(memlens.__all__) == PUBLIC
    for name in memlens.__all__:
        assert getattr(memlens, name).__name__ == name
    assert set(memlens.__all__) <= set(dir(memlens))


def test_no_package_has_the_name_of_a_verb() -> None:
    package = ROOT / "src" / "memlens"
    assert not [name for name in memlens.__all__ if (package / name).exists() or (package / f"{name}.py").exists()]


@pytest.mark.parametrize("name", [name for name in TRACING if name not in ("Edit", "Intervention", "ValueChange")])
def test_a_function_about_one_prompt_shows_how_it_is_called(name: str) -> None:
    assert f"memlens.{name}(" in (getattr(memlens, name).__doc__ or "")


def test_what_the_readme_calls_is_public() -> None:
    called = set(re.findall(r"\bmemlens\.(\w+)\(", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert called and called <= set(memlens.__all__)


@pytest.mark.parametrize(
    "code",
    [
        "import memlens",
        "import memlens, memlens.tracer; memlens.Intervention.parse('L0N0=0')",
        "import memlens; memlens.MemoryId, memlens.Trigger, memlens.MemlensError",
        "from memlens.cli import main; assert main(['--help']) == 0",
        "from memlens.cli import main; assert main(['scan', '--help']) == 0",
        "from memlens.cli import main; assert main(['scan']) == 2",
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(code: str) -> None:
    check = f"{code}; import sys; print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    ran = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert ran.stderr.splitlines()[-1] == "[]"
