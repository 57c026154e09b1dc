"""Lookups import neither torch nor other heavy libraries."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import memlens
from memlens.index.reader import Index

HEAVY = {"torch", "numba", "transformers", "pandas"}
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
LIGHT = {  # statements run one after another in one process, and what each must not import besides HEAVY
    "import memlens": {"numpy", "rich", "click"},
    "import memlens, memlens.tracer; memlens.Intervention.parse('L0N0=0')": set(),
    "import memlens; memlens.MemoryId, memlens.Trigger, memlens.MemlensError": set(),
    "from memlens.cli import main; assert main(['--help']) == 0": set(),
    "from memlens.cli import main; assert main(['scan', '--help']) == 0": set(),
    "from memlens.cli import main; assert main(['scan']) == 2": set(),
}


@pytest.fixture(scope="module")
def index_folder(tiny_gpt2_values: Index, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shutil.copytree(tiny_gpt2_values.folder, tmp_path_factory.mktemp("lookups") / "index")
    return memlens.patterns(folder, rate=0.5).folder


def test_lookups_import_no_heavy_library(index_folder: Path, tmp_path: Path) -> None:
    lines = COMMANDS.replace("INDEX", shlex.quote(str(index_folder)))
    lines = lines.replace("OUT", shlex.quote(str(tmp_path / "out")))
    code = f"""
import shlex, sys
from memlens.cli import main
for line in sys.argv[1].splitlines():
    assert main(shlex.split(line)) == 0, line
    assert not {HEAVY} & set(sys.modules), line
"""
    process = subprocess.run([sys.executable, "-c", code, lines], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "out.csv").stat().st_size and (tmp_path / "out.jsonl").stat().st_size


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    heavy = HEAVY | {"pyarrow", "duckdb"}
    checks = [f"{code}\nassert not {heavy | modules} & set(sys.modules), {code!r}" for code, modules in LIGHT.items()]
    command = [sys.executable, "-c", "\n".join(["import sys", *checks])]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
