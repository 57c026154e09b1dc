"""Looking something up costs no torch: each such command runs in a process that loads no heavy library."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import memlens
from memlens.index.reader import Index

HEAVY = {"torch", "numba", "transformers", "pandas"}
CODE = (
    "import sys; from memlens.cli import main; code = main(sys.argv[1:]); "
    "print(*sys.modules, file=sys.stderr); sys.exit(code)"
)
COMMANDS = """show INDEX L1N3
show INDEX L1N3 --json
search INDEX river
search INDEX the --in values --layers 0-1
search INDEX ends --in patterns --json
check INDEX
annotate INDEX status
compare INDEX INDEX
compare INDEX INDEX --by values
export INDEX -o OUT
export INDEX -o OUT --format csv""".splitlines()
LIGHT = {
    "import memlens": {"numpy", "rich", "typer"},
    "import memlens, memlens.tracer; memlens.Intervention.parse('L0N0=0')": set(),
    "import memlens; memlens.MemoryId, memlens.Trigger, memlens.MemlensError": set(),
    "from memlens.cli import main; assert main(['--help']) == 0": set(),
    "from memlens.cli import main; assert main(['scan', '--help']) == 0": set(),
    "from memlens.cli import main; assert main(['scan']) == 2": set(),
}


@pytest.fixture(scope="module")
def looked_at(tiny_gpt2_values: Index, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shutil.copytree(tiny_gpt2_values.folder, tmp_path_factory.mktemp("looked-at") / "index")
    return memlens.patterns(folder, rate=0.5).folder


@pytest.mark.parametrize("command", COMMANDS)
def test_looking_something_up_loads_no_heavy_library(command: str, looked_at: Path, tmp_path: Path) -> None:
    names = {"INDEX": str(looked_at), "OUT": str(tmp_path / "out")}
    words = [names.get(word, word) for word in command.split()]
    ran = subprocess.run([sys.executable, "-c", CODE, *words], capture_output=True, text=True, check=True)
    loaded = set(ran.stderr.split())
    assert "memlens.cli" in loaded and not HEAVY & loaded


@pytest.mark.parametrize("code", LIGHT)
def test_nothing_heavy_is_imported_before_it_is_needed(code: str) -> None:
    check = f"import sys; before = set(sys.modules); {code}; print(*(set(sys.modules) - before), file=sys.stderr)"
    ran = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert not (HEAVY | {"pyarrow", "duckdb"} | LIGHT[code]) & set(ran.stderr.splitlines()[-1].split())


def test_the_collector_runs_again_once_torch_is_imported_and_the_environment_decides_how_threads_wait() -> None:
    code = (
        "import gc, os; from memlens.parallel import import_torch, rest_idle_threads; rest_idle_threads(); "
        "import_torch(); print(gc.isenabled(), os.environ.get('GOMP_SPINCOUNT'))"
    )
    for variable, value, spins in (("GOMP_SPINCOUNT", "7", "7"), ("OMP_WAIT_POLICY", "active", "None")):
        environment = {key: kept for key, kept in os.environ.items() if key != "GOMP_SPINCOUNT"} | {variable: value}
        ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert ran.stdout.split() == ["True", spins]
