"""Response times of the workbench, and its behavior under load.

    python benchmarks/web.py INDEX [--times 100] [--clients 32] [--seconds 30]

Copies the index, serves the copy with `memlens serve` in a separate process, and measures

1. the time from starting the process to the first page;
2. the response time of each page with one client, next to the processor time of the server;
3. many clients at once: pages, searches, traces, steering, labels and collections.

Under load, every response must be 200, or 429 if the model is busy. Every label and collection entry that the server
confirmed must be there afterwards, the index must pass its check, and memory may grow by at most 10% after the first
third of the time. The exit code is 1 otherwise. `memlens demo` makes a suitable index.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
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

import memlens

TARGETS = {  # milliseconds, 95th percentile
    "memory page": 60,
    "search in triggers": 150,
    "overview": 300,
    "trace, cached": 100,
    "memories active on a text": 1000,
    "coefficients on a text": 300,
}
PROMPT = "The bridge over the river was built in the first year of the war"
WORDS = ["river", "the", "bridge", "music", "of the", "king", "war", "a", "water", "first", "city of"]
LOAD = {  # weight of each kind of request
    "page": 2,
    "search": 3,
    "trace": 2,
    "edited_trace": 2,
    "steer": 1,
    "silence": 1,
    "active": 1,
    "label": 3,
    "collect": 1,
}
GROWTH = 1.10


class Client:
    """A user who sends random requests and remembers what the server confirmed."""

    def __init__(self, address: str, index: memlens.Index, number: int, sample: list[str] | None = None) -> None:
        self.random, self.name, self.sample = random.Random(number), f"person{number}", sample or []
        self.layers, self.memories = len(index.layers), index.memories(index.layers[0])
        self.http = httpx.Client(base_url=address, timeout=180)
        self.http.get("/").raise_for_status()
        self.labeled: set[str] = set()
        self.collected: set[str] = set()
        self.responses: Counter[str] = Counter()

    def draw_memory(self) -> str:
        return f"L{self.random.randrange(self.layers)}N{self.random.randrange(self.memories)}"

    def draw_text(self) -> str:
        return " ".join(self.random.choices(WORDS, k=8))

    def path(self, page: str) -> str:
        """Return a random address of this kind of page."""
        word = self.random.choice(WORDS)
        typed = word[: self.random.randint(1, len(word))]
        layer, position = self.random.randrange(self.layers), self.random.randrange(10)
        return {
            "overview": "/",
            "map": f"/api/map?by={self.random.choice(['max', 'frequency'])}&room=4000",
            "memory page": f"/m/{self.draw_memory()}",
            "related memories": f"/api/memories/{self.draw_memory()}/related",
            "search in triggers": f"/search/results?q={typed}",
            "search in patterns": f"/search/results?in=patterns&q={typed}",
            "trace, cached": f"/trace/cell?prompt={PROMPT}&layer={layer}&at={position}",
            "memories active on a text": f"/api/fires?text={self.draw_text()}",
            "coefficients on a text": f"/api/memories/{self.draw_memory()}/on?text={self.draw_text()}",
            "nearest memories": f"/api/memories/{self.draw_memory()}/nearest?by=value",
        }[page]

    def send(self) -> None:
        """Send one random request and count its status."""
        kind = self.random.choices(list(LOAD), list(LOAD.values()))[0]
        try:
            status = str(getattr(self, kind)().status_code)
        except httpx.HTTPError as error:
            status = type(error).__name__
        self.responses[f"{kind} {status}"] += 1

    def page(self) -> httpx.Response:
        return self.http.get(self.path("memory page"))

    def search(self) -> httpx.Response:
        return self.http.get(self.path("search in triggers"))

    def trace(self) -> httpx.Response:
        return self.http.get("/api/trace", params={"prompt": PROMPT})

    def edited_trace(self) -> httpx.Response:
        return self.http.get("/api/trace/cell", params={"prompt": PROMPT, "set": f"{self.draw_memory()}=3"})

    def steer(self) -> httpx.Response:
        return self.http.get("/api/steer", params={"prompt": PROMPT, "set": f"{self.draw_memory()}=3", "count": 4})

    def silence(self) -> httpx.Response:
        return self.http.post(f"/api/memories/{self.draw_memory()}/silence", json={"prompt": PROMPT})

    def active(self) -> httpx.Response:
        return self.http.get(self.path("memories active on a text"))

    def label(self) -> httpx.Response:
        memory = self.random.choice(self.sample)
        pattern = {"description": f"pattern {len(self.labeled)}", "kind": "semantic", "prefixes": [0, 1, 2]}
        content = {"annotator": self.name, "memory": memory, "patterns": [pattern]}
        response = self.http.post("/api/annotate/labels", json=content)
        if response.status_code == 200:
            self.labeled.add(memory)
        return response

    def collect(self) -> httpx.Response:
        memory = self.random.choice(self.sample)
        response = self.http.patch(f"/api/collections/{memory}", json={"lists": [self.name]})
        if response.status_code == 200:
            self.collected.add(memory)
        return response

    def count_lost(self) -> int:
        """Return how many confirmed labels and collection entries are missing."""
        labels = self.http.get("/api/annotate/labels", params={"as": self.name}).json()["labels"]
        notes = self.http.get("/api/collections").json()
        lost_labels = self.labeled - {label["memory"] for label in labels}
        return len(lost_labels) + len(self.collected - {note["memory"] for note in notes})


def start_server(folder: Path) -> tuple[subprocess.Popen[str], str, float]:
    """Return the server, its address and the seconds until its first page."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "memlens", "serve", str(folder), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    address = server.stdout.readline().strip()
    if not address.startswith("http://"):
        raise SystemExit(f"the server did not start: {address!r}")
    httpx.get(address, timeout=60).raise_for_status()
    return server, address.rstrip("/"), time.perf_counter() - start


def wait_for_model(address: str) -> None:
    while (status := httpx.get(f"{address}/api/status", timeout=60).json())["status"] == "loading":
        time.sleep(0.5)
    if status["status"] != "ready":
        raise SystemExit(status["text"])


def resident_mb(process: int) -> float:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def processor_ms(process: int) -> float:
    """Return the processor time that all threads of a process have used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return 1000 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


PAGES = (
    *("overview", "map", "memory page", "related memories", "search in triggers", "search in patterns"),
    *("trace, cached", "memories active on a text", "coefficients on a text", "nearest memories"),
)


def time_pages(client: Client, times: int, process: int) -> None:
    print(f"{'page':26s} {'p50 ms':>8s} {'p95 ms':>8s} {'target':>8s} {'processor ms':>13s}")
    for page in PAGES:
        for _ in range(5):
            client.http.get(client.path(page)).raise_for_status()
        taken, used = [], processor_ms(process)
        for _ in range(times):
            start = time.perf_counter()
            client.http.get(client.path(page)).raise_for_status()
            taken.append(1000 * (time.perf_counter() - start))
        p50, p95 = np.percentile(taken, [50, 95])
        mean = (processor_ms(process) - used) / times
        print(f"{page:26s} {p50:8.1f} {p95:8.1f} {TARGETS.get(page, ''):>8} {mean:13.1f}", flush=True)


def send_at_once(clients: list[Client], seconds: float, process: int) -> list[float]:
    """Send requests from all clients. Returns the server memory before, after a third of the time, and at the end."""
    stop = Event()
    memory = [resident_mb(process)]

    def work(client: Client) -> None:
        while not stop.is_set():
            client.send()

    with ThreadPoolExecutor(len(clients)) as pool:
        futures = [pool.submit(work, client) for client in clients]
        time.sleep(seconds / 3)
        memory.append(resident_mb(process))
        time.sleep(2 * seconds / 3)
        stop.set()
        for future in futures:
            future.result()
    return [*memory, resident_mb(process)]


def judge_load(clients: list[Client], memory: list[float], folder: Path) -> bool:
    responses = sum((client.responses for client in clients), Counter[str]())
    failures = {kind: count for kind, count in responses.items() if kind.split()[1] not in ("200", "429")}
    lost = sum(client.count_lost() for client in clients)
    is_whole = memlens.check(folder).is_whole
    print(f"{len(clients)} clients: {sum(responses.values()):,} responses, {dict(sorted(responses.items()))}")
    print(f"failures: {failures or 'none'}; confirmed labels and entries lost: {lost}; index whole: {is_whole}")
    print("server memory before, after a third, at the end: " + ", ".join(f"{size:.0f} MB" for size in memory))
    return not failures and not lost and is_whole and memory[2] <= GROWTH * memory[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("index", type=Path, help="Index with values and patterns; its model is loaded.")
    parser.add_argument("--times", type=int, default=100, help="Requests per page.")
    parser.add_argument("--clients", type=int, default=32, help="Clients under load.")
    parser.add_argument("--seconds", type=float, default=30, help="Duration of the load.")
    options = parser.parse_args()
    with TemporaryDirectory() as scratch:
        folder = Path(shutil.copytree(options.index, Path(scratch) / "index"))
        index = memlens.open_index(folder)
        server, address, first = start_server(folder)
        try:
            print(f"first page after {first:.2f} s (target 3 s)")
            wait_for_model(address)
            client = Client(address, index, 0)
            time_pages(client, options.times, server.pid)
            drawn = client.http.post("/api/annotate/sample", json={"per_layer": 2, "top": 5})
            # a label of three prefixes needs a memory with three triggers
            sample = [name for name in drawn.raise_for_status().json()["memories"] if len(index.triggers(name)) >= 3]
            clients = [Client(address, index, number, sample) for number in range(1, options.clients + 1)]
            memory = send_at_once(clients, options.seconds, server.pid)
            return 0 if judge_load(clients, memory, folder) else 1
        finally:
            server.terminate()
            server.wait(30)


if __name__ == "__main__":
    sys.exit(main())
