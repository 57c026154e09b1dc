"""Time to load a model with discovery and proof.

    python benchmarks/loading.py [--rounds 5] [--threads 1]

Saves random models with the shapes of GPT-2 (float32) and SmolLM2-135M (bfloat16) and loads each in turn with
transformers alone and with memlens. Prints the median processor times. transformers maps the weights into memory
without reading them, which the proof has to do.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import memlens
from memlens.testing import tiny_tokenizer

SMOLLM2 = {
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
SHAPES = {"gpt2": ("gpt2", {}, "float32"), "smollm2": ("llama", SMOLLM2, "bfloat16")}


def save_model(folder: Path, family: str, sizes: dict[str, Any], dtype: str) -> None:
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    network.to(getattr(torch, dtype)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def load_alone(folder: str, dtype: str) -> None:
    AutoTokenizer.from_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))


def time_call(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="Repetitions after a first one that is not counted.")
    parser.add_argument("--threads", type=int, default=1, help="Threads of torch.")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with TemporaryDirectory() as scratch:
        for name, (family, sizes, dtype) in SHAPES.items():
            folder = str(Path(scratch) / name)
            save_model(Path(folder), family, sizes, dtype)
            programs = (lambda: load_alone(folder, dtype), lambda: memlens.load(folder, dtype=dtype))  # noqa: B023
            rounds = [[time_call(program) for program in programs] for _ in range(options.rounds + 1)][1:]
            alone, proven = (median(column) for column in zip(*rounds, strict=True))
            print(
                f"{name}, {dtype}: transformers {alone:.2f} s, memlens {proven:.2f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
