"""Settings of processes: those of memlens' own, and none in somebody else's."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


def test_the_collector_runs_seldom_and_the_environment_decides_how_threads_wait() -> None:
    code = (
        "import gc, os; from memlens.own_process import prepare_process; prepare_process(); "
        "print(gc.isenabled(), gc.get_threshold()[0], os.environ.get('GOMP_SPINCOUNT'))"
    )
    for variable, value, spins in (("GOMP_SPINCOUNT", "7", "7"), ("OMP_WAIT_POLICY", "active", "None")):
        environment = {key: kept for key, kept in os.environ.items() if key != "GOMP_SPINCOUNT"} | {variable: value}
        ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert ran.stdout.split() == ["True", "50000", spins]


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


def test_neither_the_library_nor_a_command_inside_of_somebody_elses_process_changes_its_settings() -> None:
    code = """
import gc, os
before = dict(os.environ), gc.get_threshold(), gc.get_freeze_count()
import memlens
from memlens.cli import main
memlens.load, memlens.scan, main(["--help"]), main(["show"]), main(["info", "/nowhere"])
assert (dict(os.environ), gc.get_threshold(), gc.get_freeze_count()) == before
"""
    subprocess.run([sys.executable, "-c", code], env=unset(), capture_output=True, text=True, check=True)


FEW = ("--threads", 1, "--top", 3, "--batch-tokens", 256)
SCAN = """
import os, sys, memlens
before = dict(os.environ)
memlens.scan(*sys.argv[1:3], out=sys.argv[4], workers=2, threads=1, top=3, batch_tokens=256)
assert dict(os.environ) == before
"""


@pytest.mark.sweep
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


FREED = """
import threading
import numpy as np
from memlens.own_process import prepare_process

def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) // 1024

def work():
    arrays = []
    for _ in range(60):
        arrays.append(np.ones(1 << 20, np.uint8))
        kept.append(np.ones(1 << 12, np.uint8))  # made after it, and stays

prepare_process(for_days=True)
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


KEPT = """
import resource
import sys
import numpy as np
from memlens.own_process import prepare_process

if sys.argv[1] == "kept":
    prepare_process()

def cleared():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt  # pages, small or large

held = []
for _ in range(3):
    held = [np.ones(24 << 20, np.uint8) for _ in range(4)]
    held = []
before = cleared()
for _ in range(10):
    held = [np.ones(24 << 20, np.uint8) for _ in range(4)]
    held = []
print(cleared() - before)
"""


GAPS = """
import time
import numpy as np
from memlens import own_process

own_process._TRIM_SECONDS = 0.2
own_process.prepare_process(for_days=True)

def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) // 1024

before = resident()
arrays = [np.ones(1 << 16, np.uint8) for _ in range(4000)]
kept = arrays[::10]
grown = resident() - before
del arrays
while resident() - before > grown // 2:  # a test that hangs here is one that fails
    time.sleep(0.1)
print(grown)
"""


def test_memory_of_large_arrays_is_kept_for_the_next_ones() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    cleared = {}
    for name in ("kept", "as usual"):
        command = [sys.executable, "-c", KEPT, name]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        cleared[name] = int(done.stdout)
    assert 4 * cleared["kept"] < cleared["as usual"]  # pages that the system gave out anew


def test_gaps_between_what_stays_are_given_back_now_and_then() -> None:
    command = [sys.executable, "-c", GAPS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert int(done.stdout) > 200  # megabytes, of which a tenth stays


def test_memory_that_threads_have_freed_goes_back_to_the_system() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, "-c", FREED], env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 60  # megabytes, of 240 that were freed; all of them without the settings
