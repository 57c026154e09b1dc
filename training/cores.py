"""The number of threads to train with while other work shares the machine."""

import os
import time
from pathlib import Path

STAT = Path("/proc/stat")


class SharedCores:
    """Watches how many cores other processes keep busy (Linux only; elsewhere it takes them for idle).

    The two threads of an operation wait for each other. If other work holds one of two cores, the thread there hardly
    runs, at the low priority of a long training, and the other thread waits for it: a single thread should then do
    better than two (reasoned, not measured: the machine was never quiet enough for a fair comparison).
    """

    def __init__(self) -> None:
        self.time, self.busy = time.monotonic(), self.others()

    @staticmethod
    def others() -> float:
        """Seconds of work all cores have done for other processes than this one, counted from an arbitrary point."""
        if not STAT.exists():
            return 0.0
        user, nice, system = STAT.read_text().split(maxsplit=4)[1:4]
        return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK") - time.process_time()

    def threads(self, most: int) -> int:
        """Threads to use next, by what the others did since the last call: at least one, at most `most`."""
        now, busy = time.monotonic(), self.others()
        cores = (busy - self.busy) / max(now - self.time, 1e-3)
        self.time, self.busy = now, busy
        # A core that is taken a third of the time already costs more than it gives.
        return max(1, most - int(cores + 2 / 3))
