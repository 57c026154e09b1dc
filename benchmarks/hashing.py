"""What verified reading costs: the time to hash all tables once, and the time that `show` spends on checksums.

    python benchmarks/hashing.py INDEX        # one that `memlens analyze bundled bundled -o INDEX` has made

Times of one run are compared with each other, so that a busy machine slows both sides.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import memlens
from memlens import files
from memlens.index import reader
from memlens.index.memory import read_memory


def seconds(work: Callable[[], Any], times: int = 9) -> float:
    """The fastest of several runs."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return min(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("index", type=Path)
    folder = parser.parse_args().index
    index = memlens.open_index(folder)
    name = f"L{index.layers[-1]}N3"
    look = seconds(lambda: read_memory(memlens.open_index(folder), name))
    verify = reader.is_as_noted
    reader.is_as_noted = lambda path, facts: True  # type: ignore[attr-defined]
    trusting = seconds(lambda: read_memory(memlens.open_index(folder), name))
    reader.is_as_noted = verify  # type: ignore[attr-defined]
    tables = [folder / file for file in index.manifest.files]
    hashed = seconds(lambda: [files.checksum(path) for path in tables])
    print(
        f"show {name}: {look * 1e3:.1f} ms, {trusting * 1e3:.1f} ms without checksums: {(look - trusting) * 1e3:.1f} ms"
    )
    print(f"all tables, {sum(path.stat().st_size for path in tables) / 1e6:.1f} MB: {hashed * 1e3:.1f} ms to hash once")


if __name__ == "__main__":
    main()
