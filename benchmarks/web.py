"""The workbench under load: time of each page, of the first page after the start, and 32 clients at once.

    python benchmarks/web.py [--layers 12 --memories 3840 --top 50 --sentences 100000] [--seconds 30] [--keep FOLDER]
    python benchmarks/web.py --live [--keep FOLDER]        pages that ask a model of 30 x 1,536 memories, too
    python benchmarks/web.py --keep INDEX --live           the same of an index that is there, with its model

Makes an index of 12 x 3,840 = 46,080 memories with 50 triggers each (web_index.py), serves it as `memlens serve` does
in a process of its own, and asks as a browser would. Times are from the question to the last byte of the answer; beside
them stands the processor's time of the server alone, which does not depend on what else the machine does. The load is
what people do: memories at random, searches letter by letter, the overview and its map. A cached cell is any layer and
column of a prompt that was traced before; texts that memories fire on are never the same twice.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event

import httpx
import numpy as np
from web_index import make_index, make_live_index

from memlens.index.reader import Index

TARGETS = {
    "memory page": 60, "search": 150, "overview": 300, "cached cell": 100, "same column": 100, "fires on a text": 1000,
    "try it": 300,
}  # fmt: skip
PROMPT = "The bridge over the river was built in the first year of the war"
WORDS = ["river", "the", "bridge", "Paris", "music", "of the", "king", "war", "a", "water", "first", "city of"]


class Asker:
    """Addresses as people ask for them, at random."""

    def __init__(self, index: Index, seed: int) -> None:
        self.layers, self.memories = len(index.layers), index.memories(index.layers[0])
        self.random, self.tokens = random.Random(seed), known_tokens(index)

    def name(self) -> str:
        return f"L{self.random.randrange(self.layers)}N{self.random.randrange(self.memories)}"

    def typed(self) -> str:
        """A word as far as somebody has typed it."""
        word = self.random.choice(WORDS)
        return word[: self.random.randint(1, len(word))]

    def text(self) -> str:
        return " ".join(self.random.choices(WORDS, k=8))

    def column(self) -> int:
        return self.random.randrange(10)

    def address(self, page: str) -> str:
        filters = self.random.choice(["", "", "&layers=2-5", "&class=semantic", "&agreement=yes"])
        return {
            "memory page": f"/m/{self.name()}",
            "related memories": f"/api/memories/{self.name()}/related",
            "search": f"/search/results?q={self.typed()}{filters}",
            "search in values": f"/search/results?in=values&q={self.random.choice(self.tokens)}{filters}",
            "search in patterns": f"/search/results?in=patterns&q={self.typed()}{filters}",
            "overview": "/",
            "cached cell": f"/trace/cell?prompt={PROMPT}&layer={self.random.randrange(self.layers)}&at={self.column()}",
            "same column": f"/trace/cell?prompt={PROMPT}&layer={self.random.randrange(self.layers)}&at=3",
            "fires on a text": f"/api/fires?text={self.text()}",
            "try it": f"/api/memories/{self.name()}/on?text={self.text()}",
            "nearest memories": f"/api/memories/{self.name()}/nearest?by={self.random.choice(['key', 'value'])}",
            "map": f"/api/map?by={self.random.choice(['max', 'frequency', 'class', 'max_p'])}&room=4000",
        }[page]


def known_tokens(index: Index) -> list[str]:
    """Five words that values can be searched for: what is no token of the model is refused."""
    known = {text.strip() for text in index.vocabulary}
    return [word for word in [*WORDS, *sorted(known, key=len, reverse=True)] if word in known and word.isalpha()][:5]


PAGES = ("memory page", "related memories", "search", "search in values", "search in patterns", "overview", "map")
LIVE = ("same column", "cached cell", "fires on a text", "try it", "nearest memories")


def start_server(folder: Path, *options: str) -> tuple[subprocess.Popen[str], str, float]:
    """The server, its address, and the seconds from the start of the process to the first whole page."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "memlens", "serve", str(folder), "--port", "0", *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    address = server.stdout.readline().strip()
    if not re.match(r"http://", address):
        raise SystemExit(f"the server did not start: {address!r}")
    httpx.get(address, timeout=60).raise_for_status()
    return server, address.rstrip("/"), time.perf_counter() - began


def resident_megabytes(process: int) -> float:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def settle(address: str) -> float:
    """Wait until the tables are in memory: until a search is quick. Seconds."""
    began = time.perf_counter()
    while True:
        one = time.perf_counter()
        httpx.get(f"{address}/api/search?q=zzzz", timeout=120).raise_for_status()
        httpx.get(f"{address}/m/L0N0", timeout=120).raise_for_status()
        if time.perf_counter() - one < 0.5:
            return time.perf_counter() - began


def processor_ms(process: int) -> float:
    """Of all its threads, since it began."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return 1000 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def await_model(address: str) -> None:
    while (status := httpx.get(f"{address}/api/status", timeout=60).json())["status"] == "loading":
        time.sleep(0.5)
    if status["status"] != "ready":
        raise SystemExit(status["text"])


def time_pages(address: str, asker: Asker, times: int, process: int, pages: tuple[str, ...] = PAGES) -> None:
    print(f"\n{'one client':22s} {'p50 ms':>8s} {'p95 ms':>8s} {'target':>8s} {'processor, mean ms':>20s}")
    with httpx.Client(base_url=address, timeout=60) as client:
        for page in pages:
            client.get(asker.address(page)).raise_for_status()
            taken, used = [], processor_ms(process)
            for _ in range(times):
                began = time.perf_counter()
                client.get(asker.address(page)).raise_for_status()
                taken.append(1000 * (time.perf_counter() - began))
            target = f"{TARGETS[page]:8d}" if page in TARGETS else " " * 8
            mean = (processor_ms(process) - used) / times
            print(f"{page:22s} {np.percentile(taken, 50):8.1f} {np.percentile(taken, 95):8.1f} {target} {mean:20.1f}")


def load(address: str, askers: list[Asker], seconds: float, process: int) -> None:
    """Many clients at once, for a while; errors and memory are what counts."""
    until = Event()
    before = resident_megabytes(process)

    def work(asker: Asker) -> tuple[Counter[str], list[float]]:
        seen, taken = Counter[str](), []
        with httpx.Client(base_url=address, timeout=60) as client:
            while not until.is_set():
                page = asker.random.choices(PAGES, [10, 1, 6, 1, 1, 1, 1])[0]
                began = time.perf_counter()
                try:
                    seen[str(client.get(asker.address(page)).status_code)] += 1
                except httpx.HTTPError as error:
                    seen[type(error).__name__] += 1
                taken.append(1000 * (time.perf_counter() - began))
        return seen, taken

    with ThreadPoolExecutor(len(askers)) as pool:
        running = [pool.submit(work, asker) for asker in askers]
        time.sleep(seconds / 3)
        middle = resident_megabytes(process)
        time.sleep(2 * seconds / 3)
        until.set()
        done = [one.result() for one in running]
    seen = sum((counts for counts, _ in done), Counter[str]())
    taken = [one for _, own in done for one in own]
    after = resident_megabytes(process)
    print(f"\n{len(askers)} clients, {seconds:g} s: {sum(seen.values()):,} answers, by status {dict(seen)}")
    print(f"time p50 {np.percentile(taken, 50):.0f} ms, p95 {np.percentile(taken, 95):.0f} ms")
    print(f"memory of the server: {before:.0f} MB before, {middle:.0f} MB after a third, {after:.0f} MB at the end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 12), ("memories", 3840), ("top", 50), ("sentences", 100_000), ("times", 100)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--keep", type=Path, help="a folder for the index, used again if it is there")
    parser.add_argument("--live", action="store_true", help="with a model, and pages that ask it")
    given = parser.parse_args()
    with TemporaryDirectory() as scratch:
        folder = given.keep or Path(scratch) / "index"
        if not (folder / "manifest.json").is_file():
            began = time.perf_counter()
            if given.live:
                make_live_index(folder, Path(scratch) if given.keep is None else given.keep.parent)
            else:
                make_index(folder, given.layers, given.memories, given.top, given.sentences)
            print(f"index made in {time.perf_counter() - began:.0f} s")
        index = Index(folder)
        asker = Asker(index, 0)
        print(f"{asker.layers} x {asker.memories:,} = {asker.layers * asker.memories:,} memories")
        server, address, first = start_server(folder, *([] if given.live else ["--no-model"]))
        try:
            print(f"start to first page: {first:.2f} s (target 3), processor {processor_ms(server.pid) / 1000:.2f} s")
            print(f"tables at hand after a further {settle(address):.1f} s; {resident_megabytes(server.pid):.0f} MB")
            time_pages(address, asker, given.times, server.pid)
            if given.live:
                await_model(address)
                time_pages(address, Asker(index, 1), given.times, server.pid, LIVE)
            load(address, [Asker(index, seed) for seed in range(given.clients)], given.seconds, server.pid)
        finally:
            server.terminate()
            server.wait(30)


if __name__ == "__main__":
    main()
