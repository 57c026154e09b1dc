"""A scan alone and beside one busy program, by how torch's threads wait: seconds by the clock and of processor time.

    python benchmarks/busy.py [--rounds 3] [--tokens 30000]

    rest      as the command line sets it (process_setup.prepare_process)
    spin      as torch's OpenMP does by itself: some milliseconds after every matrix product
    passive   not at all (OMP_WAIT_POLICY=PASSIVE)

Ways take turns within a round, so that what else the machine does falls on all of them; the least of the rounds counts.
The goals, on a machine that does nothing else: `rest` beside one busy program at most 1.6 times `rest` alone, and alone
at most 1.03 times `spin`. The load of the machine is printed: where it is above 1 before, the clock says little.
"""

import argparse
import os
import resource
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

WAYS = {"rest": {}, "spin": {"GOMP_SPINCOUNT": "300000"}, "passive": {"OMP_WAIT_POLICY": "PASSIVE"}}
BUSY = "while True: pass"


def run(tokens: int, way: str, out: Path) -> tuple[float, float]:
    """Seconds by the clock and of processor time of one scan."""
    command = ["scan", "bundled", "bundled:prose", "--max-tokens", str(tokens), "-o", str(out), "--quiet"]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run([sys.executable, "-m", "memlens", *command], env=environment | WAYS[way], check=True)
    took, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=30_000)
    given = parser.parse_args()
    seconds: dict[tuple[str, bool], list[tuple[float, float]]] = defaultdict(list)
    with TemporaryDirectory() as scratch:
        run(given.tokens, "rest", Path(scratch) / "first")  # loops are compiled
        print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        for number in range(given.rounds):
            for beside in (False, True):
                for way in WAYS:
                    busy = subprocess.Popen([sys.executable, "-c", BUSY]) if beside else None
                    try:
                        seconds[way, beside].append(run(given.tokens, way, Path(scratch) / f"{number}{beside}{way}"))
                    finally:
                        if busy is not None:
                            busy.kill()
                            busy.wait()
    print(f"load after: {os.getloadavg()[0]:.1f}")
    least = {case: tuple(map(min, zip(*own, strict=True))) for case, own in seconds.items()}
    for (way, beside), (clock, processor) in least.items():
        print(
            f"{way:<8} {'beside one' if beside else 'alone':<11} {clock:6.1f} s, {processor:6.1f} s of processor time"
        )
    alone, beside = (least["rest", where][0] for where in (False, True))
    print(
        f"rest: beside one {beside / alone:.2f} x alone (goal 1.6); alone {alone / least['spin', False][0]:.2f} x spin"
    )


if __name__ == "__main__":
    main()
