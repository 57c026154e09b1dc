"""The workbench asked by many at once: traces, steering, labels and searches mixed; is anything lost, does memory grow?

    python benchmarks/server_load.py [--clients 32 --seconds 60] [--requests 10000] [--tokens 8000] [--keep FOLDER]

Serves an index of the bundled model in a process of its own. For some seconds so many clients ask without a pause: a
trace, a trace with a coefficient changed, a text that goes on steered, a memory silenced, a label saved, a memory kept,
a search, what fires on a text. An answer is right (200), or says that the model is busy (429); a label or kept memory
counts as saved only if the server said so, and all of these must be there in the end. Then one client after another
asks so many requests in all, and the server's memory is read every tenth of them. Ends with code 1 if anything else
happened. Memory may grow by a tenth once pages, tables and the model are in it.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Lock

import httpx

import memlens
from web import resident_megabytes, start_server

PROMPT = "The bridge over the river was"
WORDS = ("river", "the", "bridge", "music", "king", "war", "water", "city")
GROWTH = 1.10
ALLOWED = ("200", "429")
KINDS = ("trace", "steer", "go_on", "silence", "label", "keep", "search", "fires", "page")


class Client:
    """One person: asks at random, and remembers which labels the server said it has saved."""

    def __init__(self, address: str, number: int, memories: list[str], layers: int, width: int) -> None:
        self.random, self.name, self.memories = random.Random(number), f"person{number}", memories
        self.layers, self.width = layers, width
        self.http = httpx.Client(base_url=address, timeout=180)
        self.http.get("/").raise_for_status()
        self.saved: dict[str, int] = {}  # memory -> number of labels
        self.kept: set[str] = set()
        self.seen: Counter[str] = Counter()

    def memory(self) -> str:
        return f"L{self.random.randrange(self.layers)}N{self.random.randrange(self.width)}"

    def ask(self) -> None:
        kind = self.random.choices(KINDS, (2, 2, 1, 1, 3, 1, 3, 1, 2))[0]
        try:
            status = str(getattr(self, kind)().status_code)
        except httpx.HTTPError as error:
            status = type(error).__name__
        self.seen[f"{kind} {status}"] += 1

    def trace(self) -> httpx.Response:
        return self.http.get("/api/trace", params={"prompt": PROMPT})

    def steer(self) -> httpx.Response:
        return self.http.get("/api/trace/cell", params={"prompt": PROMPT, "set": f"{self.memory()}=3"})

    def go_on(self) -> httpx.Response:
        return self.http.get("/api/steer", params={"prompt": PROMPT, "set": f"{self.memory()}=3", "count": 4})

    def keep(self) -> httpx.Response:
        memory = self.random.choice(self.memories)
        content = {"lists": [self.name]} if self.random.random() < 0.5 else {"star": True}
        answer = self.http.patch(f"/api/collections/{memory}", json=content)
        if answer.status_code == 200:
            self.kept.add(memory)
        return answer

    def fires(self) -> httpx.Response:
        return self.http.get("/api/fires", params={"text": PROMPT})

    def silence(self) -> httpx.Response:
        return self.http.post(f"/api/memories/{self.memory()}/silence", json={"prompt": PROMPT})

    def label(self) -> httpx.Response:
        memory = self.random.choice(self.memories)
        pattern = {"description": f"seen {len(self.saved)}", "kind": "semantic", "prefixes": [0, 1, 2]}
        content = {"annotator": self.name, "memory": memory, "patterns": [pattern]}
        answer = self.http.post("/api/annotate/labels", json=content)
        if answer.status_code == 200:
            self.saved[memory] = self.saved.get(memory, 0) + 1
        return answer

    def search(self) -> httpx.Response:
        return self.http.get("/search/results", params={"q": self.random.choice(WORDS)})

    def page(self) -> httpx.Response:
        return self.http.get(f"/m/{self.memory()}")

    def lost(self) -> int:
        """Labels and kept memories that the server said it had saved and does not have."""
        there = self.http.get("/api/annotate/labels", params={"as": self.name}).json()["labels"]
        kept = self.http.get("/api/collections").json()
        return len(set(self.saved) - {label["memory"] for label in there}) + len(
            self.kept - {note["memory"] for note in kept}
        )


def all_at_once(clients: list[Client], seconds: float) -> None:
    until = Event()

    def work(client: Client) -> None:
        while not until.is_set():
            client.ask()

    with ThreadPoolExecutor(len(clients)) as pool:
        running = [pool.submit(work, client) for client in clients]
        time.sleep(seconds)
        until.set()
        for one in running:
            one.result()


def many(clients: list[Client], requests: int, process: int) -> list[float]:
    """So many requests, four at a time; the server's memory after every tenth of them."""
    numbers, lock, memory = count(1), Lock(), [resident_megabytes(process)]

    def work(client: Client) -> None:
        while True:
            with lock:
                number = next(numbers)
            if number > requests:
                return
            client.ask()
            if number % max(1, requests // 10) == 0:
                memory.append(resident_megabytes(process))
                print(f"{number:,} requests: {memory[-1]:.0f} MB", flush=True)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, clients[:4]))
    return memory


def judge(clients: list[Client], memory: list[float], index: memlens.Index) -> bool:
    seen = sum((client.seen for client in clients), Counter[str]())
    wrong = {kind: number for kind, number in seen.items() if kind.split()[1] not in ALLOWED}
    lost = sum(client.lost() for client in clients)
    labels = sum(sum(client.saved.values()) for client in clients)
    print(f"{sum(seen.values()):,} answers: {dict(sorted(seen.items()))}")
    print(f"{labels:,} labels saved, {lost} lost; wrong answers: {wrong or 'none'}")
    print("memory of the server, MB: " + ", ".join(f"{one:.0f}" for one in memory))
    whole = memlens.check(index).is_whole
    flat = memory[-1] <= GROWTH * memory[len(memory) // 3]
    print(f"the index is {'whole' if whole else 'DAMAGED'}; memory {'flat' if flat else 'GROWS'}")
    return not wrong and not lost and whole and flat


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("clients", 32), ("seconds", 60), ("requests", 10_000), ("tokens", 8_000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--keep", type=Path, help="a folder for the index, used again if it is there")
    given = parser.parse_args()
    with TemporaryDirectory() as scratch:
        folder = given.keep or Path(scratch) / "index"
        index = memlens.scan("bundled", "bundled", out=folder, top=10, max_tokens=given.tokens, threads=1)
        server, address, _ = start_server(folder, "--model", "bundled")
        try:
            layers, width = len(index.layers), index.memories(index.layers[0])
            first = Client(address, 0, [], layers, width)
            drawn = first.http.post("/api/annotate/sample", json={"per_layer": 2, "top": 5})
            while (answer := first.trace()).status_code == 409 and "loading" in answer.text:
                time.sleep(1)
            answer.raise_for_status()
            # a pattern of three prefixes needs a memory with three triggers
            sample = drawn.raise_for_status().json()["memories"]
            memories = [name for name in sample if len(index.triggers(name, limit=3)) == 3]
            clients = [Client(address, number, memories, layers, width) for number in range(given.clients)]
            before = resident_megabytes(server.pid)
            all_at_once(clients, given.seconds)
            after = resident_megabytes(server.pid)
            print(
                f"{given.clients} clients for {given.seconds} s; memory {before:.0f} MB before, {after:.0f} MB after",
                flush=True,
            )
            good = judge(clients, [before, after], index) if not given.requests else True
            if given.requests:
                good = judge(clients, many(clients, given.requests, server.pid), index)
            return 0 if good else 1
        finally:
            server.terminate()
            server.wait(30)


if __name__ == "__main__":
    sys.exit(main())
