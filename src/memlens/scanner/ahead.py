"""Compiles the loops of a scan in a process of its own, while this one imports libraries and loads the model.

For commands that scan, on a machine with a second core, where the loops are not kept from an earlier run. Who needs a
loop that the process is at waits for it and loads it; a loop that it has not begun is compiled by who needs it.
"""

import os
import subprocess
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection

import numpy as np

from memlens.errors import WorkerError
from memlens.loop_sources import is_kept
from memlens.processes import leave_signals_to_driver, leave_with, signals_held_back, start_program, usable_cores
from memlens.scanner.block import LayerArrays, take_block_
from memlens.scanner.kernels import Totals
from memlens.scanner.lists import Lists, make_candidates
from memlens.scanner.positions import PositionCounts
from memlens.scanner.quadrants import NO_GATES, Quadrants
from memlens.scanner.sample import OrdinarySample

_PATIENCE = 1.0  # seconds
_started: list[tuple[subprocess.Popen[bytes], Connection]] = []  # held until this process ends


def start_compiling() -> None:
    """Have the loops compiled, if that takes time and there is a core for it."""
    if usable_cores() == 1 or is_kept(take_block_):
        return
    with signals_held_back(), suppress(WorkerError):  # without it, loops are compiled here
        _started.append(start_program(__name__))


def seconds_ahead() -> float:
    """Seconds that the process has taken; 0 where there is none, or where it is not done within a second from now."""
    for _, connection in _started:
        with suppress(EOFError, OSError):
            return float(connection.recv()) if connection.poll(_PATIENCE) else 0.0
    return 0.0


def serve(descriptor: int) -> None:
    """Compile, tell how long it took, and end; at once where the driver is gone."""
    leave_signals_to_driver()
    threading.Thread(target=leave_with, args=(os.getppid(),), daemon=True).start()
    with suppress(Exception):  # whoever needs the loops will meet the same error, and tell it
        began = time.monotonic()
        compile_loops()
        Connection(descriptor).send(time.monotonic() - began)


def compile_loops() -> None:
    """Take an empty block into a layer of one memory, with arguments of the types that a scan's have."""
    nothing = np.zeros(0, np.int64)
    candidates, positions = make_candidates(nothing, nothing, nothing), PositionCounts(1, 0)
    lists, sample = (Lists.empty(1, 1), Lists.empty(1, 1)), OrdinarySample(1, 0, 1)
    arrays = LayerArrays(*lists, Totals.empty(positions.fired), Quadrants.empty(0), sample.kept())
    take_block_(arrays, np.zeros((0, 1), np.float32), NO_GATES, candidates, 0, 1, 0, False, True, False)
    positions.add_prefixes(0, candidates)
