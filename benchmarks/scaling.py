"""What more workers, Ray and longer texts cost, as ratios of one run on one machine.

    python benchmarks/scaling.py [--part workers|ray|memory|flat|all]
                                 [--tokens N] [--short N] [--long N] [--width N] [--layers N]

workers   speed of two local workers with a thread each, over twice the speed of one           (at least 0.85)
ray       speed of two Ray workers on this machine, over that of two local workers             (at least 0.90)
memory    peak memory of the driver for a long text, over that for a short one                 (flat)
flat      processor time a token for a long text, over that for a short one                    (within 5%)

Speed is measured from four tenths to nine tenths of the tokens, so that loading models and starting Ray do not count.
On a machine that does other work, two workers mostly share what one had: so `workers` also says for which share of the
time workers were ready to run and had no processor (as Linux counts it), and the ratio with that time left out.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def write_text(path: Path, tokens: int) -> None:
    """Sentences of made-up words, about so many tokens of the small tokenizer and a few more."""
    syllables = [a + b for a in ("ka", "lo", "mi", "ne", "su", "ra") for b in ("r", "t", "n", "s", "la", "")]
    draw, written = random.Random(0), 0
    with path.open("w", encoding="utf-8") as out:
        while written < 4 * tokens:
            words = ("".join(draw.choices(syllables, k=draw.randint(1, 3))) for _ in range(draw.randint(4, 14)))
            written += out.write(" ".join(words).capitalize() + ".\n")


def save_model(folder: Path, layers: int, width: int) -> Path:
    """A GPT-2 of that size with random weights, and the small tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from memlens.models.huggingface import quiet_transformers
    from memlens.testing import tiny_tokenizer

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gpt2", n_layer=layers, n_embd=width, n_head=4, vocab_size=97, n_positions=128, bos_token_id=1, eos_token_id=1
    )
    with quiet_transformers():
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    return folder


class Pace:
    """A progress function that remembers how fast the middle of the scan was, and how long it stood in line."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int]] = []
        self.times: list[tuple[float, float]] = []  # of processors, beside `seen`

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        if stage == "scan" and total and 0.4 * total <= done <= 0.9 * total:
            self.seen.append((time.monotonic(), done))
            self.times.append(processor_times())

    @property
    def waited(self) -> float:
        """For which share of the time that they wanted to run did processes have no processor?"""
        ran, stood = (last - first for first, last in zip(self.times[0], self.times[-1], strict=True))
        return stood / (ran + stood)

    @property
    def tokens_a_second(self) -> float:
        (began, first), (ended, last) = self.seen[0], self.seen[-1]
        return (last - first) / (ended - began)


def processor_times() -> tuple[float, float]:
    """Seconds that this process and its children have run, and that they were ready to but had no processor."""
    tasks = Path("/proc/self/task").iterdir()
    children = [child for task in tasks for child in (task / "children").read_text().split()]
    ran = stood = 0
    for process in (os.getpid(), *children):
        for task in Path(f"/proc/{process}/task").glob("*/schedstat"):
            numbers = task.read_text().split()
            ran, stood = ran + int(numbers[0]), stood + int(numbers[1])
    return ran / 1e9, stood / 1e9


def pace_of(model: Path, text: Path, tokens: int, **how: object) -> Pace:
    import memlens

    pace = Pace()
    with tempfile.TemporaryDirectory() as folder:
        memlens.scan(model, text, out=folder, max_tokens=tokens, threads=1, progress=pace, **how)
    return pace


def compare_workers(model: Path, text: Path, tokens: int) -> None:
    before, both, after = (pace_of(model, text, tokens, workers=workers) for workers in (1, 2, 1))
    one, two = (before.tokens_a_second + after.tokens_a_second) / 2, both.tokens_a_second
    one_waited = (before.waited + after.waited) / 2
    undisturbed = two / (1 - both.waited) / (2 * one / (1 - one_waited))
    print(
        f"workers: one {one:,.0f} tokens/s, two {two:,.0f} tokens/s; two over twice one {two / (2 * one):.3f}\n"
        f"         without a processor {one_waited:.0%} and {both.waited:.0%} of the time; "
        f"that left out, two over twice one {undisturbed:.3f}",
        flush=True,
    )


def compare_ray(model: Path, text: Path, tokens: int) -> None:
    first, on_ray, again = (
        pace_of(model, text, tokens, workers=2, executor=executor).tokens_a_second
        for executor in ("local", "ray", "local")
    )
    local = (first + again) / 2
    print(
        f"ray: local {local:,.0f} tokens/s, ray {on_ray:,.0f} tokens/s; ray over local {on_ray / local:.3f}", flush=True
    )


# Run apart, so that the peak is of one scan only; prints peak memory in MB and processor seconds of the scan's middle.
PROGRAM = """
import resource, sys, time
import memlens
model, text, out, tokens, workers = sys.argv[1:]
seen = []
def progress(stage, done, total):
    if stage == "scan" and total and 0.4 * total <= done <= 0.9 * total:
        seen.append((time.process_time(), done))
memlens.scan(model, text, out=out, max_tokens=int(tokens), threads=1, workers=int(workers), progress=progress)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
print(peak, (seen[-1][0] - seen[0][0]) / (seen[-1][1] - seen[0][1]))
"""


def apart(model: Path, text: Path, tokens: int, workers: int) -> tuple[int, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", PROGRAM, str(model), str(text), folder, str(tokens), str(workers)]
        answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    return int(answer[0]), float(answer[1])


def compare_memory(model: Path, text: Path, few: int, long: int) -> None:
    short, much = (apart(model, text, tokens, 2)[0] for tokens in (few, long))
    print(f"memory: driver {short} MB for {few:,} tokens, {much} MB for {long:,}; ratio {much / short:.3f}", flush=True)


def compare_cost(model: Path, text: Path, few: int, long: int) -> None:
    short, much = (apart(model, text, tokens, 1)[1] * 1e6 for tokens in (few, long))
    again = apart(model, text, few, 1)[1] * 1e6
    short = (short + again) / 2
    print(
        f"flat: {short:.1f} processor microseconds a token for {few:,} tokens, {much:.1f} for {long:,}; "
        f"ratio {much / short:.3f}",
        flush=True,
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--part", choices=["workers", "ray", "memory", "flat", "all"], default="all")
    arguments.add_argument("--tokens", type=int, default=600_000, help="for workers and ray")
    arguments.add_argument("--short", type=int, default=100_000, help="the short text, for memory and flat")
    arguments.add_argument("--long", type=int, default=2_000_000, help="the long text, for memory and flat")
    arguments.add_argument("--width", type=int, default=256)
    arguments.add_argument("--layers", type=int, default=4)
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder) / "model", chosen.layers, chosen.width)
        text = Path(folder) / "text.txt"
        write_text(text, max(chosen.tokens, chosen.long if chosen.part in ("memory", "flat", "all") else 0))
        if chosen.part in ("workers", "all"):
            compare_workers(model, text, chosen.tokens)
        if chosen.part in ("ray", "all"):
            compare_ray(model, text, chosen.tokens)
        if chosen.part in ("memory", "all"):
            compare_memory(model, text, chosen.short, chosen.long)
        if chosen.part in ("flat", "all"):
            compare_cost(model, text, chosen.short, chosen.long)
    print(f"peak memory of this program {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024:,} MB")


if __name__ == "__main__":
    main()
