"""What a trace costs beside a bare forward pass and the unembeddings that it shows.

    python benchmarks/trace.py [--tokens 64] [--top 10] [--repeats 9] [--threads 1]

A GPT-2 shape with random weights and a prompt of that many tokens. Bare: the body's forward pass, one product of the
residual's, FFN's and output's states of all layers with the output embedding, and one of the values of the memories
that are shown. They take turns; medians of processor time. The ratio is to stay at or below 1.5; what 1.5 times the
pass alone would allow is printed as well.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import memlens
from memlens.models.memory_model import MemoryModel
from memlens.testing import tiny_tokenizer
from memlens.tracer.prompt import Prompt
from memlens.tracer.result import Trace
from memlens.tracer.trace import trace_prompt


def build() -> MemoryModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt2", n_layer=12, n_embd=768, n_head=12, vocab_size=50257)
    return memlens.load(AutoModelForCausalLM.from_config(config).eval(), tokenizer=tiny_tokenizer(), prove=False)


def bare_pass(model: MemoryModel, prompt: Prompt, shown: int) -> Callable[[], None]:
    states = torch.randn(3 * len(model.layers), model.width)
    values = torch.randn(shown, model.width)

    def run() -> None:
        model.run_body(prompt.fed())
        with torch.no_grad():
            for vectors in (states, values):
                torch.nn.functional.linear(vectors, model.lens.embedding)

    return run


def seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--tokens", type=int, default=64)
    arguments.add_argument("--top", type=int, default=10)
    arguments.add_argument("--repeats", type=int, default=9)
    arguments.add_argument("--threads", type=int, default=1)
    chosen = arguments.parse_args()
    torch.set_num_threads(chosen.threads)
    model = build()
    drawn = torch.randint(0, model.vocabulary, (chosen.tokens,), generator=torch.Generator().manual_seed(1))
    prompt = Prompt("", tuple(drawn.tolist()), None)

    def traced() -> Trace:
        return trace_prompt(model, prompt, chosen.tokens - 1, None, chosen.top, None)[0]

    found = traced()  # compiles what is compiled once a machine
    shown = {one.memory for layer in found.layers for one in (*layer.by_effect, *layer.by_size)}
    bare = bare_pass(model, prompt, len(shown))
    bare()
    programs = (lambda: model.run_body(prompt.fed()), bare, traced)
    turns = [[seconds(program) for program in programs] for _ in range(chosen.repeats)]
    body, bare_time, trace_time = (statistics.median(column) for column in zip(*turns, strict=True))
    allowed = 1.5 * body + (bare_time - body)
    print(
        f"{chosen.tokens} tokens, {len(shown)} memories shown, {chosen.threads} thread(s): forward pass {body:.3f} s, "
        f"with the unembeddings shown {bare_time:.3f} s, trace {trace_time:.3f} s: {trace_time / bare_time:.3f} x both "
        f"together; 1.5 x the pass alone and 1 x the unembeddings would be {allowed:.3f} s"
    )


if __name__ == "__main__":
    main()
