"""Compiled parts work where nothing compiled can be kept: neither beside the code nor in the home folder."""

import subprocess
import sys

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


def test_compiled_parts_do_not_need_a_folder_to_be_kept_in() -> None:
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["no cache", "0.25"]
