"""Settings of processes that are memlens' own, the command line's and workers: threads, memory, garbage collector.

Nothing of this is done in somebody else's process that imports memlens.
"""

import gc
import os
import threading
import time
from collections.abc import Callable

# New objects between two collections. torch and transformers make a million objects that stay: with Python's 700 a
# quarter of the time in which they are imported and a model is loaded would go into looking at them.
_OBJECTS = 50_000


def prepare_process(*, for_days: bool = False) -> None:
    """To be called first: before torch and numpy are imported, and by a server before threads are started.

    One that goes on for days, as a server does, gives memory back to the system; others keep it for what they do next.
    """
    gc.set_threshold(_OBJECTS)
    _rest_idle_threads()
    if for_days:
        _return_freed_memory()
    else:
        _keep_freed_memory()


def _rest_idle_threads() -> None:
    """Let torch's threads sleep while they wait. It changes the environment.

    torch's numbers do not change; last bits of numpy's products no longer depend on the number of cores.

    By default a thread spins for some milliseconds after every matrix product, which takes the cores from other
    programs. 10,000 turns are about 50 microseconds: enough to be there for the next product of the same layer.
    numpy gets no threads of its own beside torch's: its products here are small, and starting them takes longer.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


# Parameters of mallopt, by the names under which somebody may have set them for the process.
_MALLOC = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_ARENA_MAX": -8}
_TRIM_SECONDS = 20.0


def _keep_freed_memory() -> None:
    """Have the C library keep the room of large arrays for the next ones.

    By default it goes back to the system, which clears every page before it gives it out again: of a forward pass in
    batches a twentieth of the time for a gated network, a tenth for GPT-2.
    """
    _set_malloc({"MALLOC_TRIM_THRESHOLD_": 1 << 29, "MALLOC_MMAP_THRESHOLD_": 1 << 25})


def _return_freed_memory() -> None:
    """Have the C library give freed memory back to the system.

    By default glibc has a heap per thread, and once a large array was freed it takes arrays of up to 32 MB from there,
    where any small object that was made after them keeps the room of all from the system: a server that computes in
    many threads grows to a multiple of what it holds. Gaps between smaller arrays are given back by a thread, now and
    then. Other C libraries have no such settings and are left alone.
    """
    trim = _set_malloc({"MALLOC_TRIM_THRESHOLD_": 1 << 20, "MALLOC_MMAP_THRESHOLD_": 1 << 18, "MALLOC_ARENA_MAX": 2})
    if trim is None:
        return

    def give_back() -> None:
        while True:
            time.sleep(_TRIM_SECONDS)
            trim(0)

    threading.Thread(target=give_back, name="memlens memory", daemon=True).start()


def _set_malloc(sizes: dict[str, int]) -> Callable[[int], int] | None:
    """Settings of the C library's memory, but those that somebody has made; its malloc_trim, or None without both."""
    import ctypes

    library = ctypes.CDLL(None)
    mallopt, trim = getattr(library, "mallopt", None), getattr(library, "malloc_trim", None)
    if mallopt is None or trim is None:
        return None
    for name, size in sizes.items():
        if name not in os.environ and "glibc.malloc." not in os.environ.get("GLIBC_TUNABLES", ""):
            mallopt(_MALLOC[name], size)
    return trim
