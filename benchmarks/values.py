"""Values and keys of a GPT-2-shaped model: time beside the bare blocked matrix product, and peak memory.

    python benchmarks/values.py [--memories 36864] [--threads 1 2] [--top 50]

Layer by layer, in one interleaved run: the product of all values with the output embedding and nothing else (blocks of
512 rows into one buffer that is used again), then the same layer's rows of values.parquet written to disk, with both
ends, probabilities, entropy and ranks; then its rows of keys.parquet. Weights are random, which changes no time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import memlens
from memlens.files import write_table
from memlens.models.memory_model import MemoryModel
from memlens.testing import tiny_model, tiny_tokenizer
from memlens.vocab.table import KEYS_SCHEMA, VALUES_SCHEMA, folded_keys, key_tables, value_tables

LAYER_MEMORIES, WIDTH, VOCABULARY, BLOCK = 3072, 768, 50_257, 512


def bare_product(vectors: torch.Tensor, embedding: torch.Tensor, buffer: torch.Tensor) -> None:
    for first in range(0, len(vectors), BLOCK):
        part = vectors[first : first + BLOCK]
        torch.matmul(part, embedding.T, out=buffer[: len(part)])


class Stopwatch:
    """Wall and processor seconds; on a busy machine only the latter mean something."""

    def __init__(self) -> None:
        self.wall = self.processor = 0.0

    def run(self, work: Callable[[], None]) -> None:
        wall, processor = time.perf_counter(), time.process_time()
        work()
        self.wall += time.perf_counter() - wall
        self.processor += time.process_time() - processor


def peak_megabytes() -> float:
    """The highest resident size since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def run_and_weigh(stopwatch: Stopwatch, work: Callable[[], None]) -> float:
    """Peak memory of the process while the work is done, in megabytes."""
    forget_peak()
    stopwatch.run(work)
    return peak_megabytes()


def make_index(folder: Path, layers: int) -> tuple[memlens.Index, MemoryModel]:
    network = tiny_model(
        "gpt2", n_layer=layers, n_embd=WIDTH, n_head=12, n_inner=LAYER_MEMORIES, vocab_size=VOCABULARY, n_positions=128
    )
    model = memlens.load(network, tokenizer=tiny_tokenizer())
    text = folder / "text.txt"
    text.write_text("\n".join(f"The river runs to the sea, {i} and {i * i} of the city." for i in range(60)))
    return memlens.scan(model, text, out=folder / "index", unit="line"), model


def measure(index: memlens.Index, model: MemoryModel, threads: int, top: int, folder: Path) -> None:
    torch.set_num_threads(threads)
    reading = model.lens.readings[0]
    values_alone, values_table, keys_alone, keys_table = (Stopwatch() for _ in range(4))
    peak = 0.0
    embedding, inputs = model.lens.embedding, model.lens.input_embedding
    for layer in index.layers:
        values = model.lens.folded(model.layers[layer].values, layer, reading)
        keys = folded_keys(model.layers[layer])
        buffer = torch.empty(BLOCK, VOCABULARY)
        values_alone.run(partial(bare_product, values, embedding, buffer))
        keys_alone.run(partial(bare_product, keys, inputs, buffer))
        del buffer  # it is not part of the tables' memory
        parts = value_tables(index, model, top, reading, layers=[layer])
        write = partial(write_table, folder / "values.parquet", VALUES_SCHEMA, parts)
        peak = max(peak, run_and_weigh(values_table, write))
        parts = key_tables(index, model, top, layers=[layer])
        write = partial(write_table, folder / "keys.parquet", KEYS_SCHEMA, parts)
        peak = max(peak, run_and_weigh(keys_table, write))
    memories = sum(index.memories(layer) for layer in index.layers)
    print(f"{threads} threads, {memories:,} memories x {VOCABULARY:,} tokens, top {top}")
    for name, table, alone in (("values", values_table, values_alone), ("keys", keys_table, keys_alone)):
        print(
            f"  {name}: {table.wall:.1f} s, bare product {alone.wall:.1f} s, ratio {table.wall / alone.wall:.2f}; "
            f"processor {table.processor:.1f} s and {alone.processor:.1f} s, "
            f"ratio {table.processor / alone.processor:.2f}"
        )
    print(f"  peak memory of the process while the tables are made, model included: {peak:,.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memories", type=int, default=36_864, help="rounded up to whole layers of 3,072")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--top", type=int, default=50)
    options = parser.parse_args()
    with TemporaryDirectory() as name, torch.inference_mode():
        folder = Path(name)
        index, model = make_index(folder, -(-options.memories // LAYER_MEMORIES))
        write_table(folder / "warm.parquet", VALUES_SCHEMA, value_tables(index, model, options.top, "raw", layers=[0]))
        for threads in options.threads:
            measure(index, model, threads, options.top, folder)


if __name__ == "__main__":
    main()
