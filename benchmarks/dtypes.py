"""What bfloat16 changes on this processor: speed of a scan, and agreement of the trigger lists with float32.

    python benchmarks/dtypes.py MODEL [CORPUS] [--tokens 20000]

Both models take turns on the same batches. Prints processor times with one thread, the share of memories with the same
top trigger, the mean share of the ten top triggers that both have, and the share of full lists that end in a tie: their
last two coefficients are equal.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

import memlens
from memlens.corpus.encoding import encode_corpus
from memlens.corpus.sentences import ScanSentence
from memlens.process_setup import prepare_process
from memlens.scanner.scan import Scanner, bos_to_feed, plan_batches
from memlens.scanner.state import ScanState
from memlens.settings import CorpusSettings, ScanSettings

TOP, MAX_LENGTH = 10, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("corpus", nargs="?", default="bundled:held-out")
    parser.add_argument("--tokens", type=int, default=20_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = ScanSettings(top=TOP, batch_tokens=2048, bottom="no")
    scanners = {}
    for dtype in ("float32", "bfloat16"):
        model = memlens.load(options.model, device="cpu", dtype=dtype, prove=False)
        state = ScanState.start(model, range(len(model.layers)), settings)
        scanners[dtype] = Scanner(model, settings, state, on_device=False)
    first = scanners["float32"].model
    chunks = encode_corpus(
        CorpusSettings((options.corpus,)), first.tokenizer, max_length=MAX_LENGTH, max_tokens=options.tokens
    )
    rows = [tokens for chunk in chunks for tokens in chunk.rows.column("tokens").to_pylist()]
    sentences = [ScanSentence(number, np.array(tokens)) for number, tokens in enumerate(rows)]
    seconds = dict.fromkeys(scanners, 0.0)
    for batch in plan_batches(0, sentences, settings, bos_to_feed(first, settings)):
        for dtype, scanner in scanners.items():
            start = time.process_time()
            scanner.scan([batch])
            seconds[dtype] += time.process_time() - start
    print(f"{first.name}: {sum(map(len, rows)):,} tokens")
    print(f"    float32 {seconds['float32']:.1f} s, bfloat16 {seconds['bfloat16']:.1f} s of processor time")
    print(f"    bfloat16 is {seconds['float32'] / seconds['bfloat16']:.2f} times as fast")
    same_top, common, ties = list[float](), list[float](), dict[str, list[float]]({dtype: [] for dtype in scanners})
    for layer in range(len(first.layers)):
        lists = {d: scanner.state.layers[layer].triggers.result()["top"] for d, scanner in scanners.items()}
        full = np.minimum(lists["float32"].filled, lists["bfloat16"].filled) == TOP
        keys = {d: (own.sentences * MAX_LENGTH + own.positions)[full] for d, own in lists.items()}
        same_top += (keys["float32"][:, 0] == keys["bfloat16"][:, 0]).tolist()
        is_common = (keys["float32"][:, :, None] == keys["bfloat16"][:, None]).any(2)
        common += is_common.mean(1).tolist()
        for dtype, own in lists.items():
            ties[dtype] += (own.coefficients[full, -1] == own.coefficients[full, -2]).tolist()
    print(f"    same top trigger: {np.mean(same_top):.1%} of {len(same_top):,} memories with full lists")
    print(f"    common top {TOP} triggers: {np.mean(common):.1%}")
    print(f"    lists that end in a tie: {np.mean(ties['bfloat16']):.2%} (float32: {np.mean(ties['float32']):.2%})")


if __name__ == "__main__":
    prepare_process()
    main()
