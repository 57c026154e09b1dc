"""What a scan of a mixture of experts costs beside its bare forward pass, run as transformers runs it (eager).

    python benchmarks/experts.py [--batches 40]

64 experts of which 8 are chosen, width 512, two layers, one thread, processor time; the two programs take turns on
every batch. Warm: the second half of the batches, when the lists are full. Memory: what the scan itself holds, which
grows with memories, and the growth of the process from the middle to the end, which more tokens must not cause.
"""

import argparse
import resource
import time

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import memlens
from memlens.corpus.sentences import ScanSentence
from memlens.models.memory_model import MemoryModel
from memlens.scanner.scan import Scanner, plan_batches
from memlens.scanner.state import ScanState
from memlens.settings import ScanSettings
from memlens.testing import tiny_tokenizer

LENGTH, ROWS, TOP = 64, 32, 50


def build() -> MemoryModel:
    """Random weights; what an expert has learned does not matter for the cost."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8}
    experts = {"num_key_value_heads": 8, "num_local_experts": 64, "num_experts_per_tok": 8}
    config = AutoConfig.for_model("mixtral", vocab_size=97, **sizes, **experts)
    return memlens.load(AutoModelForCausalLM.from_config(config).eval(), tokenizer=tiny_tokenizer())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=40)
    batches = parser.parse_args().batches
    torch.set_num_threads(1)
    model = build()
    model.network.set_experts_implementation("eager")  # type: ignore[operator]
    settings = ScanSettings(top=TOP, batch_tokens=ROWS * LENGTH, threads=1)
    worker = Scanner(model, settings, ScanState.start(model, range(2), settings))
    numbers, bare, scan, peaks = np.random.default_rng(0), [], [], []
    for number in range(batches):
        tokens = numbers.integers(0, 97, (ROWS, LENGTH))
        began = time.process_time()
        with torch.inference_mode():
            model.network.base_model(torch.from_numpy(tokens), use_cache=False)  # type: ignore[operator]
        bare.append(time.process_time() - began)
        sentences = [ScanSentence(number * ROWS + row, tokens[row]) for row in range(ROWS)]
        began = time.process_time()
        worker.scan(plan_batches(number, sentences, settings, worker.bos))
        scan.append(time.process_time() - began)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    warm = slice(batches // 2, None)
    ratios = np.array(scan[warm]) / np.array(bare[warm])
    low, median, high = np.percentile(ratios, [25, 50, 75])
    print(f"{sum(layer.memories for layer in model.layers):,} memories, {batches} batches of {ROWS * LENGTH} tokens")
    both = sum(bare[warm]), sum(scan[warm])
    print(f"bare {both[0]:.1f} s, scan {both[1]:.1f} s: x{both[1] / both[0]:.3f}, median of batches x{median:.3f}")
    print(f"quartiles of batches x{low:.3f} to x{high:.3f}")
    held = sum(array.nbytes for array in worker.state.arrays().values()) / 2**20
    grown = peaks[-1] - peaks[batches // 2]
    print(f"the scan holds {held:.0f} MB; the process grew by {grown:.0f} MB in the second half")


if __name__ == "__main__":
    main()
