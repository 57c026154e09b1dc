"""Settings of processes: those that memlens starts have them, and a process that imports memlens keeps its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SPINS = "10000"
WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OPENBLAS_NUM_THREADS")


def run(code: str, *arguments: str, **variables: str) -> str:
    """Run a program without settings of the user except `variables`. Returns its output."""
    environment = {
        name: value for name, value in os.environ.items() if name not in WAITING and not name.startswith("MALLOC_")
    }
    command = [sys.executable, "-c", code, *arguments]
    ran = subprocess.run(command, env=environment | variables, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, [SPINS, "1"]),
        ({"GOMP_SPINCOUNT": "7"}, ["7", "1"]),
        pytest.param({"OMP_WAIT_POLICY": "active"}, ["None", "1"], marks=pytest.mark.sweep),
        pytest.param({"OPENBLAS_NUM_THREADS": "3"}, [SPINS, "3"], marks=pytest.mark.sweep),
    ],
)
def test_settings_of_the_user_are_kept(variables: dict[str, str], expected: list[str]) -> None:
    code = (
        "import os; from memlens.process_setup import prepare_process; prepare_process(); "
        "print(os.environ.get('GOMP_SPINCOUNT'), os.environ['OPENBLAS_NUM_THREADS'])"
    )
    assert run(code, **variables).split() == expected


def test_every_verb_prepares_its_process_before_torch_is_imported() -> None:
    code = """
import gc, os, sys
from memlens.cli import main
from memlens.cli.app import VERBS
out, sys.stdout = sys.stdout, open(os.devnull, "w")
for verb in VERBS:
    os.environ.pop("GOMP_SPINCOUNT", None)
    gc.set_threshold(700)
    sys.argv = ["memlens", verb, "--help"]
    assert main() == 0
    print(os.environ["GOMP_SPINCOUNT"], gc.get_threshold()[0], {"torch", "numpy"} & set(sys.modules), file=out)
"""
    lines = run(code).splitlines()
    assert len(lines) > 20 and set(lines) == {f"{SPINS} 50000 set()"}


def test_a_process_that_uses_memlens_as_a_library_keeps_its_settings() -> None:
    code = """
import gc, os
before = dict(os.environ), gc.get_threshold(), gc.get_freeze_count()
import memlens
from memlens.cli import main
memlens.load, memlens.scan, main(["--help"]), main(["show"]), main(["info", "/nowhere"])
assert (dict(os.environ), gc.get_threshold(), gc.get_freeze_count()) == before
"""
    run(code)


FEW = ("--threads", 1, "--top", 3, "--batch-tokens", 256)
SCAN = """
import os, sys, memlens
before = dict(os.environ)
memlens.scan(*sys.argv[1:3], out=sys.argv[4], workers=2, threads=1, top=3, batch_tokens=256)
assert dict(os.environ) == before
"""


@pytest.mark.sweep
def test_openmp_threads_of_commands_and_workers_wait_passively(
    tiny_gpt2: Path, tiny_text: Path, tmp_path: Path
) -> None:
    def spins(*command: object) -> list[str]:
        """Return the setting that the OpenMP library of each process prints. Only GNU's library prints it."""
        words = [sys.executable, *map(str, command)]
        environment = {name: value for name, value in os.environ.items() if name not in WAITING}
        environment["OMP_DISPLAY_ENV"] = "VERBOSE"
        ran = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        return re.findall(r"GOMP_SPINCOUNT = '(\d+)'", ran.stderr)

    text = tmp_path / "long.txt"
    text.write_text(tiny_text.read_text(encoding="utf-8") * 30, encoding="utf-8")
    arguments = (tiny_gpt2, text, "-o")
    command = spins("-m", "memlens", "scan", *arguments, tmp_path / "command", "--workers", 2, *FEW)
    assert set(command) <= {SPINS}
    library = spins("-c", SCAN, *arguments, tmp_path / "library")
    if sys.platform == "linux":
        assert len(command) == len(library) == 3  # the driver and two workers
        assert library.count(SPINS) == 2


KEPT = """
import resource
import sys
import numpy as np
from memlens.process_setup import prepare_process

if sys.argv[1] == "kept":
    prepare_process()
for turn in range(13):
    if turn == 3:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [np.ones(24 << 20, np.uint8) for _ in range(4)]
    held = []
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_a_command_keeps_the_memory_of_large_arrays_for_the_next_ones() -> None:
    assert 4 * int(run(KEPT, "kept")) < int(run(KEPT, "default"))  # pages that the system had to provide


FREED = """
import threading
import numpy as np
from memlens.process_setup import prepare_process

def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) // 1024

def work():
    arrays = []
    for _ in range(60):
        arrays.append(np.ones(1 << 20, np.uint8))
        kept.append(np.ones(1 << 12, np.uint8))  # allocated after it, and not freed

prepare_process(is_server=True)
kept = []
del [np.ones(24 << 20, np.uint8)][:]  # from here on glibc takes arrays of this size from its heaps
before = resident()
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(resident() - before)
"""


def test_a_server_returns_memory_that_its_threads_have_freed() -> None:
    assert int(run(FREED)) < 60  # MB, of 240 that were freed; all of them without the settings
