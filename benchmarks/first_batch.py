"""Seconds from the start of `memlens scan` to its first batch, and memory of its processes while the text is read.

    python benchmarks/first_batch.py TEXT [TEXT ...] [--model bundled] [--seconds 120]

The command runs as anybody would run it, with a line for every batch, until the text is whole or the time is up. Memory
is the largest resident size that was seen of each kind of process, several times a second.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

PROGRAM = """
import sys
from memlens.cli.screen import ScanProgress
show = ScanProgress.__call__
def tell(self, stage, done, total):
    print(stage, done, total, flush=True)
    show(self, stage, done, total)
ScanProgress.__call__ = tell
from memlens.cli import main
main()
"""
KINDS = {
    "memlens.index.corpus_reading": "reader",
    "memlens.corpus.encoding": "text process",
    "memlens.scanner": "worker",
}


def resident_mb(process: Path) -> float:
    for line in (process / "status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def watch(driver: int, peaks: dict[str, float]) -> None:
    """Note the peaks of the driver's process group until it has ended."""
    while True:
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if os.getpgid(int(process.name)) != driver:
                    continue
                command = (process / "cmdline").read_text()
                kind = next((words for module, words in KINDS.items() if module in command), "driver")
                peaks[kind] = max(peaks.get(kind, 0.0), resident_mb(process))
            except OSError:  # it has ended
                continue
        time.sleep(0.3)


def measure(text: Path, model: str, seconds: float, out: str) -> None:
    load = os.getloadavg()[0]
    began = time.monotonic()
    command = [sys.executable, "-c", PROGRAM, "scan", model, str(text), "-o", out]
    first, begun, read, peaks = 0.0, 0.0, 0, dict[str, float]()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as driver:
        threading.Thread(target=watch, args=(driver.pid, peaks), daemon=True).start()
        for line in driver.stdout or ():
            stage, done, total = line.split()[:3]
            begun = begun or (time.monotonic() - began if stage == "corpus" else 0.0)
            read = int(done) if stage == "corpus" else read
            if stage == "scan" and int(done) and not first:
                first = time.monotonic() - began
                print(
                    f"{text.name}: first batch after {first:.1f} s, {begun:.1f} s of it before text was asked for; "
                    f"total then {total}; load {load:.1f} before, {os.getloadavg()[0]:.1f} then",
                    flush=True,
                )
            if time.monotonic() - began > seconds or (stage == "scan" and total != "None" and first):
                break
        took = time.monotonic() - began
        os.killpg(driver.pid, signal.SIGTERM)
    shown = ", ".join(f"{kind} {peak:,.0f} MB" for kind, peak in sorted(peaks.items()))
    print(f"{text.name}: {read / 1e6:,.1f} of {text.stat().st_size / 1e6:,.1f} MB read in {took:.0f} s; peaks: {shown}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--seconds", type=float, default=120)
    given = parser.parse_args()
    for text in given.texts:
        with TemporaryDirectory() as folder:
            measure(text, given.model, given.seconds, f"{folder}/index")


if __name__ == "__main__":
    main()
