"""Looking something up costs no torch: each such command runs in a process that loads no heavy library."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import memlens
from memlens.index.reader import Index

HEAVY = {"torch", "numba", "transformers", "pandas", "pydantic"}
COMMANDS = """show INDEX L1N3
show INDEX L1N3 --json
search INDEX river
search INDEX the --in values --layers 0-1
search INDEX ends --in patterns --json
check INDEX
annotate INDEX status
compare INDEX INDEX
compare INDEX INDEX --by values
export INDEX -o OUT.jsonl
export INDEX -o OUT.csv --format csv"""
LIGHT = {  # what must not be loaded after each, in one process; most is loaded by the last
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


def test_looking_something_up_loads_no_heavy_library(looked_at: Path, tmp_path: Path) -> None:
    lines = COMMANDS.replace("INDEX", shlex.quote(str(looked_at))).replace("OUT", shlex.quote(str(tmp_path / "out")))
    code = f"""
import shlex, sys
from memlens.cli import main
for line in sys.argv[1].splitlines():
    assert main(shlex.split(line)) == 0, line
    assert not {HEAVY} & set(sys.modules), line
"""
    ran = subprocess.run([sys.executable, "-c", code, lines], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "out.csv").stat().st_size and (tmp_path / "out.jsonl").stat().st_size


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    never = HEAVY | {"pyarrow", "duckdb"}
    checks = [f"{code}\nassert not {never | more} & set(sys.modules), {code!r}" for code, more in LIGHT.items()]
    ran = subprocess.run([sys.executable, "-c", "\n".join(["import sys", *checks])], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_the_collector_runs_again_once_torch_is_imported_and_the_environment_decides_how_threads_wait() -> None:
    code = (
        "import gc, os; from memlens.parallel import import_torch, rest_idle_threads; rest_idle_threads(); "
        "import_torch(); print(gc.isenabled(), os.environ.get('GOMP_SPINCOUNT'))"
    )
    for variable, value, spins in (("GOMP_SPINCOUNT", "7", "7"), ("OMP_WAIT_POLICY", "active", "None")):
        environment = {key: kept for key, kept in os.environ.items() if key != "GOMP_SPINCOUNT"} | {variable: value}
        ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert ran.stdout.split() == ["True", spins]


RESTED = "10000"
WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OPENBLAS_NUM_THREADS")


def unset(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in WAITING} | more


def test_every_verb_lets_threads_rest_before_torch_is_loaded() -> None:
    code = """
import os, sys
from memlens.cli import main
from memlens.cli.app import VERBS
for verb in VERBS:
    os.environ.pop("GOMP_SPINCOUNT", None)
    sys.argv = ["memlens", verb, "--help"]
    assert main() == 0
    print(verb, os.environ["GOMP_SPINCOUNT"], os.environ["OPENBLAS_NUM_THREADS"], {"torch", "numpy"} & set(sys.modules),
          file=sys.stderr)
"""
    ran = subprocess.run([sys.executable, "-c", code], env=unset(), capture_output=True, text=True, check=True)
    lines = [line.split() for line in ran.stderr.splitlines()]
    assert len(lines) > 20 and all(found == [RESTED, "1", "set()"] for _, *found in lines)


def test_a_number_of_numpys_threads_that_somebody_has_set_stays() -> None:
    code = "import os, sys; from memlens.cli import main; sys.argv = ['memlens', '--version']; main(); print(os.environ"
    code += "['OPENBLAS_NUM_THREADS'])"
    environment = unset(OPENBLAS_NUM_THREADS="3")
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split()[-1] == "3"


def test_neither_the_library_nor_a_command_inside_of_somebody_elses_process_changes_the_environment() -> None:
    code = """
import os
before = dict(os.environ)
import memlens
from memlens.cli import main
memlens.load, memlens.scan, main(["--help"]), main(["show"])
assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())
"""
    subprocess.run([sys.executable, "-c", code], env=unset(), capture_output=True, text=True, check=True)


FEW = ("--threads", 1, "--top", 3, "--batch-tokens", 256)
SCAN = """
import os, sys, memlens
before = dict(os.environ)
memlens.scan(*sys.argv[1:3], out=sys.argv[4], workers=2, threads=1, top=3, batch_tokens=256)
assert dict(os.environ) == before
"""


def test_threads_of_the_command_and_of_workers_rest_and_those_of_somebody_elses_process_do_as_they_did(
    tiny_gpt2: Path, tiny_text: Path, tmp_path: Path
) -> None:
    def spins(*command: object) -> list[str]:
        """The setting that every process's OpenMP library prints; only GNU's prints it, which torch has on Linux."""
        words = [sys.executable, *map(str, command)]
        ran = subprocess.run(words, env=unset(OMP_DISPLAY_ENV="VERBOSE"), capture_output=True, text=True, check=True)
        return re.findall(r"GOMP_SPINCOUNT = '(\d+)'", ran.stderr)

    text = tmp_path / "long.txt"
    text.write_text(tiny_text.read_text(encoding="utf-8") * 30, encoding="utf-8")
    given = (tiny_gpt2, text, "-o")
    own = spins("-m", "memlens", "scan", *given, tmp_path / "command", "--workers", 2, *FEW)
    assert set(own) <= {RESTED}
    theirs = spins("-c", SCAN, *given, tmp_path / "library")
    if sys.platform == "linux":
        assert len(own) == len(theirs) == 3  # the driver and two workers
        assert theirs.count(RESTED) == 2
