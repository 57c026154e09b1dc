"""What finding the top triggers costs beside the bare forward pass over the same batches.

    python benchmarks/scan_overhead.py [--shape gpt2|llama|llama15m|bundled] [--tokens 60000] [--plain] [--memory]

One thread, processor time, the programs take turns on every batch, so that a noisy machine hurts all alike; what other
programs do to caches and memory still shows, hence the median and quartiles over the batches beside the sum.
The programs:
the bare body, as transformers runs it; memlens' scan; the body's matrix products alone, without norms, attention,
activations and Python; and for comparison a hook that concatenates and calls torch.topk, as most tools do.
All of them keep freed memory and collect garbage seldom, as commands and workers do; not so with `--plain`.
`--memory` instead prints the peak memory of scanning 100k and 1M tokens into an index.
"""

from __future__ import annotations

import argparse
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import memlens
from memlens.corpus.sentences import Batch, ScanSentence, cut_batches
from memlens.models.groups import CoefficientBlock
from memlens.models.memory_model import MemoryModel
from memlens.process_setup import prepare_process
from memlens.scanner.scan import Scanner, plan_batches
from memlens.scanner.state import ScanState
from memlens.settings import ScanSettings
from memlens.testing import tiny_model, tiny_tokenizer

SHAPES = {
    "gpt2": ("gpt2", {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257}),
    "llama": (
        "llama",
        {"num_hidden_layers": 8, "hidden_size": 512, "intermediate_size": 1376, "num_attention_heads": 8},
    ),
    "llama15m": (
        "llama",
        {"num_hidden_layers": 6, "hidden_size": 288, "intermediate_size": 768, "num_attention_heads": 6},
    ),
}
BUNDLED = "bundled"
TOP = 50
USUAL_EVERY = 3  # the usual way is slow and known: every third batch is enough


def build(shape: str) -> MemoryModel:
    if shape == BUNDLED:
        return memlens.load(BUNDLED)
    family, settings = SHAPES[shape]
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
    return memlens.load(network.eval(), tokenizer=tiny_tokenizer(), prove=False)


def windows(tokens: int, vocabulary: int, seed: int) -> list[list[ScanSentence]]:
    """Windows of sentences with lengths like those of an encyclopedia; the words do not matter for the cost."""
    numbers = np.random.default_rng(seed)
    made: list[list[ScanSentence]] = [[]]
    count = identifier = 0
    while count < tokens:
        length = int(np.clip(numbers.lognormal(3.2, 0.5), 3, 120))
        made[-1].append(ScanSentence(identifier, numbers.integers(0, vocabulary, length)))
        identifier, count = identifier + 1, count + length
        if len(made[-1]) == 4096:
            made.append([])
    return [window for window in made if window]


class ConcatenateAndTopk:
    """The usual way: keep [memories, top] per layer, concatenate each batch, torch.topk."""

    def __init__(self, model: MemoryModel) -> None:
        self.model = model
        self.best = [torch.full((TOP, block.memories), -torch.inf) for block in model.layers]
        self.where = [torch.zeros((TOP, block.memories), dtype=torch.int64) for block in model.layers]

    def __call__(self, batch: Batch) -> None:
        tokens = torch.from_numpy(batch.tokens)
        keep = torch.arange(tokens.shape[1])[None, :] < torch.from_numpy(batch.lengths)[:, None]
        rows = keep.flatten().nonzero()[:, 0]

        def take(layer: int, block: CoefficientBlock) -> None:
            everything = torch.cat([self.best[layer], block.coefficients[rows]])
            labels = torch.cat([self.where[layer], rows[:, None].expand(-1, block.coefficients.shape[-1])])
            self.best[layer], chosen = everything.topk(TOP, dim=0)
            self.where[layer] = labels.gather(0, chosen)

        with self.model.watch(take):
            self.model.run_body(tokens)


class Products:
    """The body's products with its matrices, and nothing else: what no scan can do without."""

    def __init__(self, model: MemoryModel) -> None:
        layers = [layer.block for layer in model.layers]
        self.matrices = [matrix.detach() for block in layers for matrix in block.parameters() if matrix.dim() == 2]
        # transformers' GPT-2 keeps its matrices [in, out], everybody else [out, in]
        self.is_transposed = any(type(module).__name__ == "Conv1D" for block in layers for module in block.modules())

    def __call__(self, batch: Batch) -> None:
        for matrix in self.matrices:
            matrix = matrix if self.is_transposed else matrix.T
            torch.ones(batch.tokens.size, matrix.shape[0]) @ matrix


def timed(program: Callable[[Batch], None], batch: Batch) -> float:
    began = time.process_time()
    program(batch)
    return time.process_time() - began


def compare(model: MemoryModel, warm_tokens: int, tokens: int, label: str) -> None:
    """Ratios over `tokens` tokens after the scan has seen `warm_tokens`."""
    settings = ScanSettings(top=TOP, batch_tokens=2048, bos="no")
    worker = Scanner(model, settings, ScanState.start(model, range(len(model.layers)), settings))
    usual = ConcatenateAndTopk(model)
    vocabulary = min(model.vocabulary, 30000)
    batches: list[Batch] = []
    for window in windows(warm_tokens + tokens, vocabulary, seed=1):
        part = cut_batches([(s.id, s.tokens) for s in window], settings.batch_tokens, None)
        random.Random(0).shuffle(part)  # long and short sentences alike in what is measured
        batches += part

    def scan(batch: Batch) -> None:
        worker._scan_batch(batch, np.zeros(len(batch.sentences), np.int64), None)

    def bare(batch: Batch) -> None:
        model.network.base_model(input_ids=torch.from_numpy(batch.tokens), use_cache=False)

    programs = {"bare": bare, "scan": scan, "products": Products(model), "usual": usual}
    seconds: list[dict[str, float]] = []  # one entry a batch
    with torch.inference_mode():
        bare(batches[0])
        measured = 0
        for number, batch in enumerate(batches):
            if worker.state.tokens < warm_tokens:
                scan(batch)
                continue
            order = list(programs) if number % USUAL_EVERY == 0 else ["bare", "scan", "products"]
            random.Random(number).shuffle(order)
            seconds.append({name: timed(programs[name], batch) for name in order})
            measured += int(batch.lengths.sum())
            if measured >= tokens:
                break
    print(f"{label}: {measured:,} tokens, bare {measured / sum(s['bare'] for s in seconds):,.0f} tokens/s", flush=True)
    pairs = (("scan", "scan", "bare"), ("usual", "cat + topk", "bare"), ("scan", "scan", "products"))
    for name, words, other in (*pairs, ("bare", "bare", "products")):
        both = [(s[name], s[other]) for s in seconds if name in s]
        low, median, high = np.percentile([ours / theirs for ours, theirs in both], [25, 50, 75])
        ratio = sum(ours for ours, _ in both) / sum(theirs for _, theirs in both)
        print(
            f"    {words}: {ratio:.3f} x {other} in all; "
            f"median of {len(both)} batches {median:.3f} (quartiles {low:.3f} and {high:.3f})",
            flush=True,
        )


def warm_compiled_code() -> None:
    """Compile before measuring: it happens once a machine and is kept on disk."""

    sentences = [ScanSentence(0, np.arange(5)), ScanSentence(1, np.arange(4))]
    for family in ("gpt2", "llama"):
        model = memlens.load(tiny_model(family), tokenizer=tiny_tokenizer())
        settings = ScanSettings(top=2)
        worker = Scanner(model, settings, ScanState.start(model, [0], settings))
        worker.scan(plan_batches(0, sentences, settings, worker.bos))


MEMORY_PROGRAM = """
import resource, sys
import torch
torch.set_num_threads(1)
from transformers import AutoConfig, AutoModelForCausalLM
import memlens
from memlens.testing import tiny_model, tiny_tokenizer
network = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_layer=2, n_embd=128, n_head=4, vocab_size=97))
memlens.scan(network.eval(), sys.argv[1], out=sys.argv[2], tokenizer=tiny_tokenizer(), max_tokens=int(sys.argv[3]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def compare_memory() -> None:
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        words = [f"{a}{b}" for a in ("ka", "lo", "mi", "ne", "su") for b in ("r", "t", "n", "s", "la")]
        draw = random.Random(0)
        with text.open("w") as out:
            for _ in range(60_000):
                out.write(" ".join(draw.choices(words, k=12)).capitalize() + ".\n")
        peaks = []
        for tokens in (100_000, 1_000_000):
            command = [sys.executable, "-c", MEMORY_PROGRAM, str(text), f"{folder}/index{tokens}", str(tokens)]
            peaks.append(int(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
            print(f"{tokens:>9,} tokens: peak {peaks[-1]:,} MB", flush=True)
        print(f"ratio {peaks[1] / peaks[0]:.3f}")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--shape", choices=[*SHAPES, BUNDLED, "all"], default="all")
    arguments.add_argument("--tokens", type=int, default=60_000, help="tokens that are measured, after 100k others")
    arguments.add_argument("--plain", action="store_true", help="memory and garbage as in any program")
    arguments.add_argument("--memory", action="store_true")
    chosen = arguments.parse_args()
    if chosen.memory:
        compare_memory()
        return
    if not chosen.plain:
        prepare_process()
    torch.set_num_threads(1)
    warm_compiled_code()
    for shape in (*SHAPES, BUNDLED) if chosen.shape == "all" else [chosen.shape]:
        model = build(shape)
        compare(model, 0, 5_000, f"{shape}, first 5k tokens")
        compare(model, 100_000, chosen.tokens, f"{shape}, after 100k tokens")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024:,} MB")


if __name__ == "__main__":
    main()
