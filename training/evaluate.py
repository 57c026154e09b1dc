"""Held-out perplexity of an exported model against a bigram model, and its dead memories.

    python training/evaluate.py --work DIR MODEL

Both models see the same held-out sequences and are asked for the same tokens. The text is cut in two ways: into runs
of sentences of up to 128 tokens, and into single sentences, which is how memlens feeds a model.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
from bigram import Bigram
from data import Text, batch, epoch_plan
from model import IGNORED, validate
from transformers import AutoModelForCausalLM


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="folder written by export.py")
    parser.add_argument("--work", type=Path, required=True, help="directory with train.npz and valid.npz")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model).float().eval()
    held_out = Text.load(options.work / "valid.npz")
    bigram = Bigram(Text.load(options.work / "train.npz"), model.config.vocab_size)

    figures = {}
    for name, single in (("runs", 0.0), ("sentences", 1.0)):
        plan = epoch_plan(held_out, model.config.n_positions, 4096, single, seed=0, epoch=0)
        batches = [batch(held_out, spans) for spans in plan]
        loss, dead = validate(model, batches)
        inputs, targets = (
            np.concatenate([part.flatten().numpy() for part in side]) for side in zip(*batches, strict=True)
        )
        asked = targets != IGNORED
        baseline = -bigram.log_probability(inputs[asked], targets[asked]).mean()
        figures[name] = {
            "tokens": int(asked.sum()),
            "perplexity": round(math.exp(loss), 2),
            "bigram_perplexity": round(math.exp(baseline), 2),
            "dead": round(sum(dead) / len(dead), 4),
            "dead_by_layer": [round(share, 4) for share in dead],
        }
        print(name, json.dumps(figures[name]))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
