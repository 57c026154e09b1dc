"""Where the processor time of whole commands goes: imports, compiling, loading, proof, text, scan, tables, writing.

    python benchmarks/whole.py WORK [COMMAND ...] [--cold] [--kernels]      # demo analyze trace info show by default

Each command runs in a process of its own. A thread looks every few milliseconds where the threads are, and books the
processor time of each since the last look: to compiling or importing if the stack passes through that, else to the
innermost of PARTS on it. What belongs to none (threads of libraries) is the main thread's. --cold
gives every command an empty cache of compiled loops; --kernels prints the seconds of each compiled function, what it
calls not counted. "arithmetic" is what the definitions need, measured in this process with one thread: a forward pass
over every token that the scan fed, the product of all values with the output embedding, and for each sampled prefix two
products with it a layer. Parts and compiled functions are those of the command's own process; what processes that it
starts take is told in one line.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

PARTS = (  # name, then what a file on the stack ends with, and the function there
    ("compiling", ("numba/core/dispatcher.py", "compile")),
    ("loading compiled", ("numba/core/caching.py", "load_overload")),
    ("imports", ("<frozen importlib._bootstrap>", "_find_and_load")),
    ("writing", ("memlens/files.py", ""), ("memlens/index/tables.py", ""), ("pyarrow/parquet/core.py", "write_table")),
    ("proof", ("memlens/models/proof.py", "")),
    ("loading", ("memlens/models/load.py", "")),
    ("text", ("memlens/index/build.py", "corpus_stage"), ("memlens/index/build.py", "make_plan")),
    ("scan", ("memlens/scanner/resources.py", ""), ("memlens/index/build.py", "")),
    ("values", ("memlens/vocab/table.py", "")),
    ("patterns", ("memlens/pattern/find.py", ""), ("memlens/pattern/table.py", "compute_patterns")),
    ("local edits", ("memlens/experiments/local_edits.py", "")),
    ("prefixes", ("memlens/experiments/prefix_pass.py", "")),
    ("experiments", ("memlens/experiments/run.py", "")),
    ("report", ("memlens/reports/report.py", "")),
    ("findings", ("memlens/reports/findings.py", ""), ("memlens/reports/silencing.py", "")),
    ("waiting for patterns", ("memlens/pattern/beside.py", "")),
    ("trace", ("memlens/tracer/trace.py", "")),
)
ANYWHERE = 3  # so many of these count wherever they are on a stack
SECONDS = 0.004  # between two looks
COMMANDS = {
    "demo": ["demo", "-o", "{work}/demo", "--fresh"],
    "analyze": ["analyze", "bundled", "bundled", "-o", "{work}/analyze", "--max-tokens", "100000", "--fresh"],
    "trace": ["trace", "bundled", "The people of the city were"],
    "info": ["info", "bundled"],
    "show": ["show", "{work}/demo", "L3N5"],
}


def part_of(frame: FrameType | None) -> str | None:
    """Compiling, loading compiled code or importing, if the stack passes through it; else the innermost of PARTS."""
    stack = []
    with suppress(AttributeError):  # the thread goes on meanwhile: a frame that has just ended is none any more
        while frame is not None:
            stack.append((frame.f_code.co_filename, frame.f_code.co_name))
            frame = frame.f_back
    matched = [name for place in stack if (name := _part_at(*place))]
    return next((name for name, *_ in PARTS[:ANYWHERE] if name in matched), matched[0] if matched else None)


def _part_at(path: str, function: str) -> str | None:
    for name, *places in PARTS:
        if any(path.endswith(file) and wanted in ("", function) for file, wanted in places):
            return name
    return None


class Watch:
    """Processor seconds of this process by part, and of compiled functions by name."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = defaultdict(float)
        self.kernels: dict[str, float] = defaultdict(float)
        self._main = threading.get_ident()
        self._booked = 0.0  # what the interpreter took to start is the first part's
        self._of_threads: dict[int, float] = defaultdict(float)
        self._compiling: list[list[float]] = []
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            self.book()
            time.sleep(SECONDS)

    def book(self) -> None:
        """The time since the last look."""
        stacks = sys._current_frames()
        at = part_of(stacks.get(self._main)) or "other"
        now = time.process_time()
        rest, self._booked = now - self._booked, now
        for thread in threading.enumerate():
            if thread.ident in stacks and thread.ident not in (self._main, threading.get_ident()):
                part = part_of(stacks[thread.ident])
                if part:
                    try:
                        spent = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
                    except OSError:  # it has just ended
                        continue
                    own = min(max(spent - self._of_threads[thread.ident], 0.0), rest)
                    self.parts[part] += own
                    rest -= own
                    self._of_threads[thread.ident] = spent
        self.parts[at] += rest

    def time_kernels(self) -> None:
        """Book what numba compiles; that of a function called by another is taken from the other's."""
        from numba.core import event

        watch = self

        class Listener(event.Listener):
            def on_start(self, told: Any) -> None:
                watch._compiling.append([time.process_time(), 0.0])

            def on_end(self, told: Any) -> None:
                began, inner = watch._compiling.pop()
                took = time.process_time() - began
                function = told.data["dispatcher"].py_func
                watch.kernels[f"{function.__module__}.{function.__name__}"] += took - inner
                if watch._compiling:
                    watch._compiling[-1][1] += took

        event.register("numba:compile", Listener())


def run_child(out: Path, arguments: list[str], kernels: bool) -> None:
    """One command in this process, and its account as a file."""
    watch = Watch()
    if kernels:
        watch.time_kernels()
    from memlens.cli import main
    from memlens.process_setup import prepare_process

    prepare_process()  # as the command does
    code = 0
    try:
        code = main(arguments)
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        watch.book()
        children = os.times().children_user + os.times().children_system
        account = {"code": code, "parts": watch.parts, "kernels": watch.kernels, "whole": time.process_time()}
        account["children"] = children
        out.write_text(json.dumps(account), encoding="utf-8")


def account_of(name: str, work: Path, cold: bool, kernels: bool) -> dict[str, Any]:
    out = work / f"{name}.json"
    environment = dict(os.environ)
    if cold:
        environment["NUMBA_CACHE_DIR"] = str(work / f"cache-{name}-{time.time_ns()}")
    command = [sys.executable, __file__, str(work), "--child", name] + ["--kernels"] * kernels
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    account: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return account


def arithmetic(folder: Path) -> dict[str, float]:
    """Processor seconds of what the definitions need, for an index of the bundled model, with one thread."""
    import torch

    import memlens

    torch.set_num_threads(1)
    index, model = memlens.open_index(folder), memlens.load("bundled")
    tokens = torch.randint(0, model.vocabulary, (64, 32))
    embedding = model.lens.weight if hasattr(model.lens, "weight") else torch.randn(model.vocabulary, model.width)
    states = torch.randn(512, model.width)

    def seconds(work: Any) -> float:
        took = []
        for _ in range(6):
            began = time.process_time()
            with torch.inference_mode():
                work()
            took.append(time.process_time() - began)
        return min(took)

    a_token = seconds(lambda: model.run_body(tokens)) / tokens.numel()
    a_row = seconds(lambda: states @ embedding.T) / len(states)
    memories = sum(block.memories for block in model.layers)
    prefixes = index.manifest.prefix_pass.content.get("sample") or 0
    return {
        "scan": a_token * index.manifest.content["counts"]["tokens_fed"],
        "values": a_row * memories,
        "prefixes": a_row * prefixes * (2 * len(model.layers) + 1),
    }


def show(name: str, account: dict[str, Any], needed: dict[str, float]) -> None:
    whole = account["whole"]
    print(f"\n{name}: {whole:.1f} s of processor time" + (f", exit code {account['code']}" * bool(account["code"])))
    if account["children"] > 0.1:
        print(f"  and {account['children']:.1f} s in processes that it started (loops compiled ahead, patterns)")
    for part, seconds in sorted(account["parts"].items(), key=lambda item: -item[1]):
        ratio = f"   {seconds / needed[part]:.2f} x its arithmetic ({needed[part]:.2f} s)" if needed.get(part) else ""
        print(f"  {part:<17}{seconds:7.2f} s {seconds / whole:6.1%}{ratio}")
    if needed:
        print(f"  all of it: {whole / sum(needed.values()):.1f} x the arithmetic ({sum(needed.values()):.1f} s)")
    if account["kernels"]:
        print(f"  compiled functions: {sum(account['kernels'].values()):.1f} s")
        for kernel, seconds in sorted(account["kernels"].items(), key=lambda item: -item[1]):
            print(f"    {seconds:6.2f} s  {kernel}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("commands", nargs="*", choices=[*COMMANDS, []])
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    given.work = given.work.resolve()
    if given.child:
        arguments = [word.format(work=given.work) for word in COMMANDS[given.child]]
        run_child(given.work / f"{given.child}.json", arguments, given.kernels)
        return
    for name in given.commands or COMMANDS:
        account = account_of(name, given.work, given.cold, given.kernels)
        folder = given.work / name
        show(name, account, arithmetic(folder) if name in ("demo", "analyze") and not account["code"] else {})


if __name__ == "__main__":
    main()
