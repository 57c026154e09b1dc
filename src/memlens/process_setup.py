"""Settings of the processes that memlens starts: commands and workers.

A process that imports memlens as a library keeps its own settings.
"""

import ctypes
import gc
import os

_OBJECTS = 50_000  # number of new objects between garbage collections; saves 6% of the time to load torch and a model
# Parameters of mallopt, under the names of their environment variables.
_MALLOC = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_ARENA_MAX": -8}
# A command keeps freed memory. Otherwise, the system would clear each page again before reuse, which takes 12% of the
# time of a forward pass of a gated network.
_COMMAND = {"MALLOC_TRIM_THRESHOLD_": 1 << 29, "MALLOC_MMAP_THRESHOLD_": 1 << 25}
# A server returns freed memory, and its threads share two heaps. Otherwise, it would use several times the memory that
# its data needs.
_SERVER = {"MALLOC_TRIM_THRESHOLD_": 1 << 20, "MALLOC_MMAP_THRESHOLD_": 1 << 18, "MALLOC_ARENA_MAX": 2}


def prepare_process(*, is_server: bool = False) -> None:
    """Set how this process waits, collects garbage and allocates memory. The user's own settings take precedence.

    Call this function before torch and numpy are imported. It changes environment variables.
    """
    gc.set_threshold(_OBJECTS)
    # with one BLAS thread, the last bits of numpy's matrix products do not depend on the number of cores
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # By default, OpenMP threads spin for milliseconds after every product, which halves the speed on a busy machine.
    # 10,000 spins (50 microseconds) bridge the gap to the next product of the same layer.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has mallopt
    if mallopt is not None and "glibc.malloc." not in os.environ.get("GLIBC_TUNABLES", ""):
        for name, size in (_SERVER if is_server else _COMMAND).items():
            if name not in os.environ:
                mallopt(_MALLOC[name], size)
