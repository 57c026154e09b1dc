"""Compiled functions: where they are kept, that they are made once, and that they work where nothing can be kept."""

import fcntl
import os
import subprocess
import sys
from collections import Counter
from itertools import count
from pathlib import Path

import pytest
from numba import njit
from numba.core import event

from memlens import parallel
from memlens.parallel import compiled_part

# numba looks for a folder it may write to; here it finds none, as on a read-only system with a read-only home
CODE = """
from numba.core import caching
for locator in caching.CacheImpl._locator_classes:
    locator.from_function = classmethod(lambda cls, function, file: None)
import numba
try:
    numba.njit(cache=True)(lambda: 1)
except RuntimeError:
    print("no cache")
import memlens.pattern.find, memlens.vocab.kernels, memlens.scanner.kernels  # and with them every compiled part
from memlens.parallel import compiled
print(compiled(lambda number: number / 2)(0.5))
"""


MODULE = """
import sys
from memlens.parallel import compiled

@compiled
def halves(numbers):
    total = 0.0
    for number in numbers:
        total += number / 2
    return total

import numpy as np
print("ready", flush=True)
sys.stdin.readline()  # all begin together
print(halves(np.arange(3.0)), sum(halves.stats.cache_misses.values()), sum(halves.stats.cache_hits.values()))
"""


def start(module: Path, **environment: str) -> "subprocess.Popen[str]":
    own = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"} | environment
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, str(module)], env=own, **pipes)  # type: ignore[call-overload]


def results(processes: "list[subprocess.Popen[str]]") -> list[tuple[str, int, int]]:
    """Of each process what it computed, how often it compiled and how often it loaded."""
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    found = []
    for process in processes:  # nobody waits for another one's answer before it is told to begin
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        answer, misses, hits = process.communicate()[0].split()
        found.append((answer, int(misses), int(hits)))
    return found


def test_what_is_compiled_is_kept_in_the_users_folder_where_the_package_cannot_be_written_to(tmp_path: Path) -> None:
    module = tmp_path / "package" / "part.py"
    module.parent.mkdir()
    module.write_text(MODULE)
    (module.parent / "__pycache__").write_text("a file, so that no folder can be made; permissions do not stop root")
    cache = tmp_path / "cache"
    places = {"XDG_CACHE_HOME": str(cache), "HOME": str(tmp_path)}
    assert results([start(module, **places)]) == [("1.5", 1, 0)]
    assert results([start(module, **places)]) == [("1.5", 0, 1)]
    if sys.platform == "linux":  # elsewhere the user's folder for caches has another name
        assert list(cache.rglob("*.nbc"))


def test_it_can_be_told_whether_a_function_is_kept_as_its_sources_are_now(tmp_path: Path) -> None:
    module = tmp_path / "part.py"
    asked = MODULE.replace(
        'print("ready"', 'from memlens.loop_sources import is_kept\nkept = is_kept(halves)\nprint("ready"'
    )
    module.write_text(asked.replace("print(halves(", "print(kept * 10 + halves("))
    assert [results([start(module)])[0][0] for _ in range(2)] == ["1.5", "11.5"]
    module.write_text(f"{module.read_text()}\n# changed")
    assert results([start(module)])[0][:2] == ("1.5", 1)


def test_processes_that_begin_together_compile_once(tmp_path: Path) -> None:
    module = tmp_path / "part.py"
    module.write_text(MODULE)
    found = results([start(module) for _ in range(3)])
    assert [answer for answer, _, _ in found] == ["1.5"] * 3
    assert sorted((misses, hits) for _, misses, hits in found) == [(0, 1), (0, 1), (1, 0)]


PARTS = """
from typing import NamedTuple
from memlens.parallel import compiled, compiled_part

STEP = {step}

class Pair(NamedTuple):
    {names}

@compiled
def _inner(number):
    return number * {times}

@compiled_part
def step(number):
    return _inner(number) + {add}
"""
USER = """
import parts
from memlens.parallel import compiled
from parts import STEP, Pair

@compiled
def use(number):
    pair = Pair(parts.step(number), STEP)
    return pair.one * 100 + pair.two

print(use(7), *(sum(counts.values()) for counts in (use.stats.cache_misses, use.stats.cache_hits)))
"""


def test_what_another_file_has_of_a_loop_is_compiled_again_when_it_changes(tmp_path: Path) -> None:
    """numba looks at the file of the function alone, and would go on with what the others had."""

    def run(is_new: bool = True, **changes: str) -> list[int]:
        if is_new:
            (tmp_path / "parts.py").write_text(PARTS.format(**{**first, **changes}))
            os.utime(tmp_path / "parts.py", (0, next(times)))  # also where the times of files are coarse
        ran = subprocess.run([sys.executable, "-B", str(tmp_path / "user.py")], capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        return [int(number) for number in ran.stdout.split()]

    times = count(1_800_000_000)
    first = {"step": "1", "names": "one: int; two: int", "times": "2", "add": "3"}
    (tmp_path / "user.py").write_text(USER)
    assert run() == [1701, 1, 0]
    assert run(is_new=False) == [1701, 0, 1]
    assert run(step="5") == [1705, 1, 0]
    assert run(add="4") == [1801, 1, 0]
    assert run(times="3") == [2401, 1, 0]
    assert run(names="two: int; one: int") == [117, 1, 0]
    assert run() == [1701, 1, 0]


RENAMED = """
from typing import NamedTuple
from memlens.parallel import compiled

class {name}(NamedTuple):
    one: int

@compiled
def use(given):
    return given.one + 1

print(use({name}(7)), *(sum(counts.values()) for counts in (use.stats.cache_misses, use.stats.cache_hits)))
"""


def test_what_an_older_version_has_kept_is_made_again_also_where_it_cannot_be_read(tmp_path: Path) -> None:
    module = tmp_path / "renamed.py"

    def run(name: str) -> str:
        module.write_text(RENAMED.format(name=name))
        program = "import sys; sys.path.insert(0, sys.argv[1]); import renamed"  # as a module: classes have its name
        ran = subprocess.run([sys.executable, "-B", "-c", program, str(tmp_path)], capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.strip()

    assert run("Pair") == "8 1 0"
    assert run("Couple") == "8 1 0"
    (kept,) = tmp_path.rglob("*.nbi")
    kept.write_bytes(kept.read_bytes()[:-20])
    assert run("Couple") == "8 1 0"


def test_nobody_waits_for_ever_for_a_process_that_does_not_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "_given_up", set())
    monkeypatch.setattr(parallel, "_MOST_SECONDS", 0.2)
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with parallel._turn_in(str(tmp_path)):
        pass
    monkeypatch.setattr(parallel, "_MOST_SECONDS", float("inf"))
    with parallel._turn_in(str(tmp_path)):  # at once: every function would have to wait
        pass
    os.close(held)


@compiled_part
def _next(number):
    return number + 1


def _use(number):
    return _next(number) + _next(3) + _next(-7)


def test_a_part_is_compiled_once_for_constants_and_variables_and_can_be_called_from_python() -> None:
    made: Counter[str] = Counter()

    class Listener(event.Listener):
        def on_start(self, happening: event.Event) -> None:
            made[happening.data["dispatcher"].py_func.__name__] += 1

        def on_end(self, happening: event.Event) -> None:
            pass

    with event.install_listener("numba:compile", Listener()):
        assert _use(5) == njit(_use)(5) == 4
    assert made["_next"] == 1
    assert _next(1) == 2


def test_compiled_parts_do_not_need_a_folder_to_be_kept_in() -> None:
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["no cache", "0.25"]


def test_what_cannot_be_kept_is_made_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "loops.py").write_text(
        "from memlens.parallel import compiled\n\n\n@compiled\ndef add(a, b):\n    return a + b\n"
    )
    code = "import resource, loops; resource.setrlimit(resource.RLIMIT_FSIZE, (9, 9)); print(loops.add(1, 2))"
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "kept"), "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert ran.stdout == "3\n", ran.stderr
