"""What verified reading costs: the time to hash all tables once, what `show` spends on checksums, and a scan's share.

    python benchmarks/hashing.py INDEX        # one that `memlens analyze bundled bundled -o INDEX` has made

The scan is one of the bundled model and corpus; every SHA-256 in it is timed: of the model, the text, the tables and
the parts. All times are of the processor, which a busy machine changes little.
"""

import argparse
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import memlens
from memlens import files
from memlens.index import reader
from memlens.index.memory import read_memory


def seconds(work: Callable[[], Any], times: int = 9) -> float:
    """Of the processor, in the fastest of several runs."""
    taken = []
    for _ in range(times):
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return min(taken)


class TimedHash:
    """SHA-256 that adds the processor time of this thread to `spent`."""

    spent = 0.0
    make = hashlib.sha256

    def __init__(self, content: Any = b"") -> None:
        self.hash = TimedHash.make()
        self.update(content)

    def update(self, content: Any) -> None:
        began = time.thread_time()
        self.hash.update(content)
        TimedHash.spent += time.thread_time() - began

    def hexdigest(self) -> str:
        return self.hash.hexdigest()


def scan(tokens: int) -> None:
    with TemporaryDirectory() as scratch:
        memlens.scan("bundled", "bundled", out=Path(scratch) / "index", max_tokens=tokens, threads=1)


def share_of_a_scan(tokens: int) -> None:
    scan(500)  # libraries are imported, loops compiled
    hashlib.sha256 = TimedHash  # type: ignore[assignment, misc]
    began = time.process_time()
    scan(tokens)
    whole = time.process_time() - began
    hashlib.sha256 = TimedHash.make
    print(
        f"scan of {tokens:,} tokens: {whole:.1f} s of the processor, {TimedHash.spent:.2f} s of it for hashes: "
        f"{TimedHash.spent / whole:.2%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("index", type=Path)
    parser.add_argument("--tokens", type=int, default=50_000, help="of the scan")
    given = parser.parse_args()
    share_of_a_scan(given.tokens)
    folder = given.index
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
