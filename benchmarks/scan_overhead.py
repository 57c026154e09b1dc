"""Cost of a scan relative to the bare forward pass over the same batches.

    python benchmarks/scan_overhead.py [--shape gpt2|llama|experts|bundled|all] [--tokens 60000]

Measures processor time with one thread. The programs take turns on every batch, so that a busy machine affects all of
them alike. Prints the ratio of the sums and the median and quartiles of the ratios per batch, for

    scan        memlens' scan
    cat + topk  a hook that concatenates coefficients and calls torch.topk, as most tools do (dense models only)

each divided by the forward pass of the model body as transformers runs it. Weights are random except for `bundled`.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

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
    "experts": (
        "mixtral",
        {
            "num_hidden_layers": 2,
            "hidden_size": 512,
            "intermediate_size": 512,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "num_local_experts": 64,
            "num_experts_per_tok": 8,
        },
    ),
}
BUNDLED = "bundled"
TOP = 50
WARM_TOKENS = 100_000  # scanned before measuring, because the first tokens change the lists most
TOPK_EVERY = 3  # cat + topk is slow, so it runs on every third batch only


def build_model(shape: str) -> MemoryModel:
    if shape == BUNDLED:
        return memlens.load(BUNDLED)
    family, sizes = SHAPES[shape]
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).eval()
    if shape == "experts":
        network.set_experts_implementation("eager")
    return memlens.load(network, tokenizer=tiny_tokenizer(), prove=False)


def draw_windows(tokens: int, vocabulary: int, seed: int) -> list[list[ScanSentence]]:
    """Return windows of random tokens whose sentence lengths are distributed as in an encyclopedia."""
    rng = np.random.default_rng(seed)
    windows: list[list[ScanSentence]] = [[]]
    total = number = 0
    while total < tokens:
        length = int(np.clip(rng.lognormal(3.2, 0.5), 3, 120))
        windows[-1].append(ScanSentence(number, rng.integers(0, vocabulary, length)))
        number, total = number + 1, total + length
        if len(windows[-1]) == 4096:
            windows.append([])
    return [window for window in windows if window]


class ConcatenateAndTopk:
    """The usual method: keep [top, memories] per layer, concatenate each batch and call torch.topk."""

    def __init__(self, model: MemoryModel) -> None:
        self.model = model
        self.best = [torch.full((TOP, block.memories), -torch.inf) for block in model.layers]
        self.places = [torch.zeros((TOP, block.memories), dtype=torch.int64) for block in model.layers]

    def __call__(self, batch: Batch) -> None:
        tokens = torch.from_numpy(batch.tokens)
        is_token = torch.arange(tokens.shape[1])[None, :] < torch.from_numpy(batch.lengths)[:, None]
        rows = is_token.flatten().nonzero()[:, 0]

        def update(layer: int, block: CoefficientBlock) -> None:
            coefficients = torch.cat([self.best[layer], block.coefficients[rows]])
            places = torch.cat([self.places[layer], rows[:, None].expand(-1, block.coefficients.shape[-1])])
            self.best[layer], order = coefficients.topk(TOP, dim=0)
            self.places[layer] = places.gather(0, order)

        with self.model.watch(update):
            self.model.run_body(tokens)


def time_call(program: Callable[[Batch], None], batch: Batch) -> float:
    start = time.process_time()
    program(batch)
    return time.process_time() - start


def compare(model: MemoryModel, shape: str, warm_tokens: int, tokens: int) -> None:
    """Print the ratios over `tokens` tokens after a scan of `warm_tokens` tokens."""
    settings = ScanSettings(top=TOP, batch_tokens=2048, bos="no")
    scanner = Scanner(model, settings, ScanState.start(model, range(len(model.layers)), settings))
    batches: list[Batch] = []
    for window in draw_windows(warm_tokens + tokens, min(model.vocabulary, 30_000), seed=1):
        window_batches = cut_batches([(s.id, s.tokens) for s in window], settings.batch_tokens, None)
        random.Random(0).shuffle(window_batches)  # so that long and short sentences are measured alike
        batches += window_batches

    def run_scan(batch: Batch) -> None:
        scanner._scan_batch(batch, np.zeros(len(batch.sentences), np.int64), None)

    def run_bare(batch: Batch) -> None:
        model.network.base_model(input_ids=torch.from_numpy(batch.tokens), use_cache=False)

    programs: dict[str, Callable[[Batch], None]] = {"bare": run_bare, "scan": run_scan}
    if shape != "experts":
        programs["cat + topk"] = ConcatenateAndTopk(model)
    seconds: list[dict[str, float]] = []  # one entry per batch
    measured = 0
    with torch.inference_mode():
        run_bare(batches[0])
        for number, batch in enumerate(batches):
            if scanner.state.tokens < warm_tokens:
                run_scan(batch)
                continue
            names = [name for name in programs if name != "cat + topk" or number % TOPK_EVERY == 0]
            random.Random(number).shuffle(names)
            seconds.append({name: time_call(programs[name], batch) for name in names})
            measured += int(batch.lengths.sum())
            if measured >= tokens:
                break
    speed = measured / sum(times["bare"] for times in seconds)
    print(f"{shape} after {warm_tokens:,} tokens: {measured:,} tokens, forward pass {speed:,.0f} tokens/s", flush=True)
    for name in [name for name in programs if name != "bare"]:
        pairs = [(times[name], times["bare"]) for times in seconds if name in times]
        low, median, high = np.percentile([ours / bare for ours, bare in pairs], [25, 50, 75])
        ratio = sum(ours for ours, _ in pairs) / sum(bare for _, bare in pairs)
        print(
            f"    {name}: {ratio:.3f} x the forward pass; "
            f"median of {len(pairs)} batches {median:.3f} (quartiles {low:.3f} to {high:.3f})",
            flush=True,
        )


def compile_kernels() -> None:
    """Compile the scan's loops before measuring."""
    sentences = [ScanSentence(0, np.arange(5)), ScanSentence(1, np.arange(4))]
    for family in ("gpt2", "llama"):
        model = memlens.load(tiny_model(family), tokenizer=tiny_tokenizer())
        settings = ScanSettings(top=2)
        scanner = Scanner(model, settings, ScanState.start(model, [0], settings))
        scanner.scan(plan_batches(0, sentences, settings, scanner.bos))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SHAPES, BUNDLED, "all"], default="all", help="Model shape to measure.")
    parser.add_argument("--tokens", type=int, default=60_000, help="Tokens to measure, after 100,000 others.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    compile_kernels()
    for shape in (*SHAPES, BUNDLED) if options.shape == "all" else [options.shape]:
        model = build_model(shape)
        compare(model, shape, 0, 5_000)
        compare(model, shape, WARM_TOKENS, options.tokens)


if __name__ == "__main__":
    prepare_process()  # as the command does
    main()
