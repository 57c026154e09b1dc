"""Cost of a scan on a GPU, relative to the bare forward pass over the same batches.

    python benchmarks/gpu.py                                  # a random network of GPT-2's shape
    python benchmarks/gpu.py meta-llama/Llama-3.1-8B --tokens 2000000
    python benchmarks/gpu.py --device cpu --tokens 30000      # the code for GPUs, on the tensors of a CPU

Text is random, with sentence lengths as in an encyclopedia. After a warm-up, the bare pass and the scan take turns on
stretches of batches. Prints tokens per second of both, their ratio (median and range over the stretches) and, on an
NVIDIA GPU with the package nvidia-ml-py, how busy the GPU was during the scan. On a GPU, times are wall times. On a
CPU, they are processor times with one thread.

Share the output, the GPU and the versions of torch and memlens in an issue: nobody has measured this yet.
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from scan_overhead import SHAPES, build_model, compile_kernels, draw_windows

import memlens
from memlens.models.memory_model import MemoryModel
from memlens.process_setup import prepare_process
from memlens.scanner.resources import BATCH_TOKENS
from memlens.scanner.scan import ScanBatch, Scanner, plan_batches
from memlens.scanner.state import ScanState
from memlens.settings import ScanSettings

TOP, STRETCHES = 50, 5
LEAST_WARM_TOKENS = 100_000  # the first tokens change the lists most


def make_batches(model: MemoryModel, settings: ScanSettings, tokens: int) -> list[ScanBatch]:
    """Return shuffled batches of random text, so that long and short sentences are measured alike."""
    batches = []
    for number, window in enumerate(draw_windows(tokens, min(model.vocabulary, 30_000), seed=1)):
        batches += plan_batches(number, window, settings, None)
    random.Random(0).shuffle(batches)
    return batches


def time_call(device: torch.device, program: Callable[[], None]) -> float:
    """Return the seconds that a program takes, including the work that it has given to the device."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    start = clock()
    program()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return clock() - start


@contextmanager
def note_utilization(device: torch.device, shares: list[int]) -> Iterator[None]:
    """Append the utilization of an NVIDIA GPU in percent, ten times per second, if it can be read."""
    done = threading.Event()

    def note() -> None:
        try:
            while not done.wait(0.1):
                shares.append(torch.cuda.utilization(device))
        except Exception as error:  # such as a missing package
            print(f"utilization is not measured ({error})")

    thread = threading.Thread(target=note, daemon=True)
    if device.type == "cuda":
        thread.start()
    try:
        yield
    finally:
        done.set()
        if thread.is_alive():
            thread.join()


def run_bare(model: MemoryModel, batches: Sequence[ScanBatch]) -> None:
    with torch.inference_mode():
        for batch in batches:
            tokens = torch.from_numpy(batch.batch.tokens).to(model.device)
            model.network.base_model(input_ids=tokens, use_cache=False)  # type: ignore[operator]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="gpt2", help=f"A model, or a random one: {', '.join(SHAPES)}.")
    parser.add_argument("--device", default="auto", help="Device: auto, cuda, mps or cpu.")
    parser.add_argument("--dtype", default="auto", help="Weight dtype.")
    parser.add_argument("--tokens", type=int, default=500_000, help="Tokens to measure, after a quarter as a warm-up.")
    parser.add_argument("--batch-tokens", type=int, help="Tokens per batch. Default: that of `memlens scan`.")
    options = parser.parse_args()
    if options.model in SHAPES:
        random_model = build_model(options.model)
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        network = random_model.network.to(device if options.device == "auto" else options.device)
        if options.dtype != "auto":
            network = network.to(getattr(torch, options.dtype))
        model = memlens.load(network, tokenizer=random_model.tokenizer, prove=False)
    else:
        model = memlens.load(options.model, device=options.device, dtype=options.dtype, prove=False)
    kind = model.device.type
    if kind == "cpu":
        torch.set_num_threads(1)
    tokens = options.batch_tokens or BATCH_TOKENS.get(kind, 4096)
    settings = ScanSettings(top=TOP, batch_tokens=tokens, bos="no", threads=torch.get_num_threads())
    state = ScanState.start(model, range(len(model.layers)), settings)
    scanner = Scanner(model, settings, state, on_device=True)
    warm_tokens = max(options.tokens // 4, LEAST_WARM_TOKENS)
    batches = make_batches(model, settings, warm_tokens + options.tokens)
    warm = len(batches) * warm_tokens // (warm_tokens + options.tokens) + 1
    size = max(1, (len(batches) - warm) // STRETCHES)
    compile_kernels()
    run_bare(model, batches[:2])
    scanner.scan(batches[:warm])
    name = torch.cuda.get_device_name(model.device) if kind == "cuda" else kind
    print(f"{model.name} on {name}, {model.dtype}, torch {torch.__version__}, batches of {tokens:,} tokens")
    ratios, speeds, shares = list[float](), list[tuple[float, float]](), list[int]()
    for first in range(warm, warm + size * STRETCHES, size):
        stretch = batches[first : first + size]
        if not stretch:
            break
        count = sum(int(np.sum(batch.batch.lengths)) for batch in stretch)
        bare = time_call(model.device, lambda part=stretch: run_bare(model, part))  # type: ignore[misc]
        with note_utilization(model.device, shares):
            ours = time_call(model.device, lambda part=stretch: scanner.scan(part))  # type: ignore[misc]
        ratios.append(ours / bare)
        speeds.append((count / bare, count / ours))
    bare_speed, speed = (statistics.median(column) for column in zip(*speeds, strict=True))
    print(f"    forward pass {bare_speed:,.0f} tokens/s, scan {speed:,.0f} tokens/s")
    print(f"    scan: {statistics.median(ratios):.3f} x the forward pass ({min(ratios):.3f} to {max(ratios):.3f})")
    if shares:
        print(f"    the GPU was busy {statistics.mean(shares):.0f}% of the time during the scan")


if __name__ == "__main__":
    prepare_process()
    main()
