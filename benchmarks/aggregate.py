"""What section 5 costs beside the bare unembedding products that its definition needs, and how much memory it takes.

    python benchmarks/aggregate.py [--prefixes 1000] [--threads 1] [--memory]

A GPT-2 shape with random weights. Chunk by chunk, the bare products (sampled positions x 3 sites x layers against the
whole vocabulary, in the same blocks) and memlens take turns, so that a noisy machine hurts both alike; processor time.
The body's forward pass up to the sampled positions is measured by itself: how much of it a prefix needs depends on how
long prefixes are and how many of them share a sentence, not on the definition. `--memory` runs the whole pass in one
piece instead and prints its peak beyond the loaded model.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import memlens
from memlens.experiments.prefix_pass import LayerReader, PrefixReader, Unembedding, run_pass
from memlens.experiments.prefixes import Prefixes, SampledSentence
from memlens.models.memory_model import MemoryModel
from memlens.testing import tiny_model, tiny_tokenizer
from memlens.vocab.kernels import thread_pool


def build() -> MemoryModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt2", n_layer=12, n_embd=768, n_head=12, vocab_size=50257)
    return memlens.load(AutoModelForCausalLM.from_config(config).eval(), tokenizer=tiny_tokenizer(), prove=False)


def draw(count: int, corpus_tokens: int, vocabulary: int) -> Prefixes:
    """Uniform over the prefixes of sentences with lengths like those of an encyclopedia."""
    numbers = np.random.default_rng(1)
    sentences: list[SampledSentence] = []
    total = 0
    while total < corpus_tokens:
        length = int(np.clip(numbers.lognormal(3.2, 0.5), 3, 120))
        sentences.append(SampledSentence(len(sentences), numbers.integers(0, vocabulary, length)))
        total += length
    ends = np.cumsum([len(sentence.tokens) for sentence in sentences])
    drawn = np.sort(numbers.choice(total, count, replace=False))
    owner = np.searchsorted(ends, drawn, side="right")
    used, rows = np.unique(owner, return_inverse=True)
    starts = np.concatenate([[0], ends])[owner]
    return Prefixes([sentences[i] for i in used], rows, drawn - starts, None, "synthetic")


def random_tops(model: MemoryModel) -> dict[int, np.ndarray]:
    numbers = np.random.default_rng(2)
    return {
        block.layer: numbers.integers(0, model.vocabulary, block.memories).astype(np.int32) for block in model.layers
    }


def compare(model: MemoryModel, prefixes: Prefixes, label: str) -> None:
    embedding = model.lens.embedding
    seconds = {"bare": 0.0, "look": 0.0, "body": 0.0}
    with torch.inference_mode(), thread_pool() as pool:
        layers = LayerReader(model, random_tops(model), Unembedding(model.lens))
        reader = PrefixReader(prefixes, random_tops(model))
        began = time.process_time()
        for chunk in range(reader.chunks(model)):
            _, positions = reader.states(model, chunk)
            seconds["body"] += time.process_time() - began
            began = time.process_time()
            for layer in range(len(model.layers)):
                for states in (positions.r[layer], positions.y[layer], positions.o[layer]):
                    torch.nn.functional.linear(states, embedding)
            seconds["bare"] += time.process_time() - began
            began = time.process_time()
            layers.read(positions, pool)
            seconds["look"] += time.process_time() - began
            began = time.process_time()
    fed = sum(int(prefixes.positions[prefixes.rows == row].max()) + 1 for row in range(len(prefixes.sentences)))
    bare = seconds["bare"]
    print(
        f"{label}: {len(prefixes):,} prefixes, {fed:,} tokens fed; bare products {bare:.1f} s; "
        f"memlens beside the body {seconds['look'] / bare:.3f} x; body {seconds['body'] / bare:.3f} x; "
        f"together {(seconds['look'] + seconds['body']) / bare:.3f} x bare products, "
        f"{(seconds['look'] + seconds['body']) / (bare + seconds['body']):.3f} x bare products and body",
        flush=True,
    )


def in_status(field: str) -> int:
    """A line of this process's status, in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) // 1024
    raise RuntimeError(f"this system does not tell {field}")


def measure_memory(model: MemoryModel, prefixes: Prefixes) -> None:
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = in_status("VmRSS")
    began = time.process_time()
    run_pass(model, prefixes, random_tops(model))
    print(
        f"{len(prefixes):,} prefixes: peak {in_status('VmHWM') - before:,} MB beyond the model ({before:,} MB), "
        f"{time.process_time() - began:.0f} s of processor time"
    )


def warm_compiled_code() -> None:
    """Compile before measuring: it happens once a machine and is kept on disk."""
    model = memlens.load(tiny_model("gpt2"), tokenizer=tiny_tokenizer())
    run_pass(model, Prefixes.given([[5, 6, 7]], [2], None), random_tops(model))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--prefixes", type=int, default=4000)
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--memory", action="store_true")
    chosen = arguments.parse_args()
    torch.set_num_threads(chosen.threads)
    warm_compiled_code()
    model = build()
    if chosen.memory:
        measure_memory(model, draw(chosen.prefixes, 40 * chosen.prefixes, 30_000))
        return
    compare(model, draw(chosen.prefixes, 3 * chosen.prefixes // 2, 30_000), "most prefixes of a small text")
    compare(model, draw(chosen.prefixes, 40 * chosen.prefixes, 30_000), "few prefixes of a large text")


if __name__ == "__main__":
    main()
