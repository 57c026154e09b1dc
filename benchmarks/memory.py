"""Peak memory of every verb, next to the bound that docs/scaling.md states for it.

    python benchmarks/memory.py [--width 512 --layers 6 --vocabulary 16000] [--tokens 20000] [VERB ...]
    python benchmarks/memory.py --growth

Makes a GPT-2-shaped model with random weights, scans random words, and runs each verb in a separate process. The exit
code is 1 if a verb exceeds its bound. `--growth` instead compares a scan of 1,000,000 tokens with one of 100,000.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

MB = 1 << 20
PROGRAM = 750 * MB  # torch, transformers, numba; 300 MB less once loops are compiled
LOOKUP = 260 * MB  # DuckDB and Arrow, without torch
PROMPT = "river stone river"
TEXTS = 100  # labeled texts of the probe
GROWTH = 1.15  # largest allowed ratio of --growth


class Sizes:
    """Sizes on which the bounds depend."""

    def __init__(self, options: argparse.Namespace) -> None:
        body = options.layers * 12 * options.width**2
        self.embedding = 4 * options.vocabulary * options.width
        self.weights = 4 * body + self.embedding + 4 * 256 * options.width
        self.memories = options.layers * 4 * options.width
        self.triggers = self.memories * options.top
        self.lists = self.memories * (24 * options.top + 600)
        self.heap = 28 * 2048 * 4 * 4 * options.width  # memory of a batch that the C library keeps for the next one
        self.tokens = options.tokens
        self.logits = 4 * options.vocabulary * options.layers * 8


# docs/scaling.md shows the same table
BOUNDS: dict[str, Callable[[Sizes], float]] = {
    "info": lambda s: PROGRAM + s.weights + s.lists + s.heap,
    "scan": lambda s: PROGRAM + s.weights + 3 * s.lists + s.heap + 64 * s.tokens,
    "values": lambda s: PROGRAM + s.weights + s.embedding + 300 * MB,
    "patterns": lambda s: PROGRAM + 300 * s.triggers + 200 * s.tokens,
    "experiment": lambda s: PROGRAM + s.weights + s.embedding + 700 * MB,
    "trace": lambda s: PROGRAM + s.weights + s.embedding + 3 * s.logits,
    "report": lambda s: PROGRAM + 64 * s.triggers,
    "roles": lambda s: PROGRAM + s.weights + s.embedding + 600 * MB,
    "probe": lambda s: PROGRAM + s.weights + s.heap + 8 * TEXTS * s.memories + 300 * MB,
    "merge": lambda s: PROGRAM + 3 * s.lists + 64 * s.tokens,
    "repair": lambda s: PROGRAM + s.weights + s.embedding + 300 * MB,
    "site": lambda s: PROGRAM + 300 * s.triggers + 64 * s.tokens,
    "annotate": lambda s: LOOKUP + 64 * s.triggers,
    "collect": lambda s: LOOKUP + 64 * s.triggers,
    "show": lambda s: LOOKUP + 32 * s.memories + 24 * s.tokens,
    "search": lambda s: LOOKUP + 300 * s.triggers,
    "export": lambda s: LOOKUP + 64 * s.triggers + 64 * s.tokens,
    "compare": lambda s: LOOKUP + 300 * s.triggers,
    "check": lambda s: LOOKUP + 64 * s.triggers + 24 * s.tokens,
}


def make_model(folder: Path, options: argparse.Namespace) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    words = {"<unk>": 0, "river": 1, "stone": 2} | {f"w{number}": number for number in range(3, options.vocabulary)}
    raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>").save_pretrained(folder)
    sizes = {
        "bos_token_id": 0,
        "eos_token_id": 0,
        "n_layer": options.layers,
        "n_embd": options.width,
        "n_head": 8,
        "n_positions": 256,
    }
    GPT2LMHeadModel(GPT2Config(vocab_size=options.vocabulary, **sizes)).save_pretrained(folder)


def make_text(path: Path, options: argparse.Namespace) -> None:
    draw = random.Random(0)
    names = ["river", "stone", *(f"w{number}" for number in range(3, options.vocabulary))]
    lines = [" ".join(draw.choices(names, k=20)) for _ in range(options.tokens // 20)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def make_labels(path: Path) -> None:
    rows = [f'"{("river", "stone")[row % 2]} w{row + 3} river",{row % 2}' for row in range(TEXTS)]
    path.write_text("\n".join(["text,label", *rows]) + "\n", encoding="utf-8")


def measure_peak(command: list[str]) -> int:
    """Return the peak memory of a command and its children, in bytes."""
    process = subprocess.Popen([sys.executable, "-m", "memlens", *command], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"memlens {' '.join(command)} failed with exit code {os.waitstatus_to_exitcode(status)}")
    return usage.ru_maxrss * 1024


def compare_growth(model: str, text: str, options: argparse.Namespace) -> bool:
    """Return True if the memory of a scan hardly depends on the length of the text."""
    peaks = []
    for tokens in (100_000, 1_000_000):
        make_text(Path(text), argparse.Namespace(vocabulary=options.vocabulary, tokens=tokens))
        limits = ["--top", str(options.top), "--threads", "1", "--workers", "1"]
        peaks.append(measure_peak(["scan", model, text, "-o", f"{model}-{tokens}", *limits]))
        print(f"{tokens:>9,} tokens: peak {peaks[-1] / MB:,.0f} MB", flush=True)
    print(f"ratio {peaks[1] / peaks[0]:.2f} (target {GROWTH})")
    return peaks[1] <= GROWTH * peaks[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 512), ("layers", 6), ("vocabulary", 16_000)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"The model's {name}.")
    parser.add_argument("--tokens", type=int, default=20_000, help="Tokens of text.")
    parser.add_argument("--top", type=int, default=25, help="Triggers per memory.")
    parser.add_argument(
        "verbs", nargs="*", choices=[*BOUNDS, []], help="Verbs to measure. Default: all. A scan always runs first."
    )
    parser.add_argument("--growth", action="store_true", help="Compare scans of 100,000 and 1,000,000 tokens.")
    options = parser.parse_args()
    sizes, good = Sizes(options), True
    with TemporaryDirectory() as scratch:
        model, text, index = (str(Path(scratch) / name) for name in ("model", "text.txt", "index"))
        maker = get_context("spawn").Process(target=make_model, args=(Path(model), options))
        maker.start()  # in another process, because children inherit the peak of their parent
        maker.join()
        make_text(Path(text), options)
        labels, site = Path(scratch) / "labels.csv", Path(scratch) / "site"
        shards = [f"{index}-{shard}" for shard in (1, 2)]
        make_labels(labels)
        alone = ["--top", str(options.top), "--threads", "1", "--workers", "1"]
        commands = {
            "info": ["info", model],
            "scan": ["scan", model, text, "-o", index, *alone],
            "values": ["values", index, "--threads", "1"],
            "patterns": ["patterns", index],
            "experiment": ["experiment", index, "agreement", "active", "refinement", "--sample", "400"],
            "roles": ["roles", index],
            "trace": ["trace", model, PROMPT],
            "probe": ["probe", model, str(labels)],
            "merge": ["merge", *shards, "-o", f"{index}-merged"],
            "repair": ["repair", index],
            "site": ["site", index, "-o", str(site)],
            "annotate": ["annotate", index, "status"],
            "collect": ["collect", index, "L0N0", "--star"],
            "report": ["report", index, "-o", str(Path(scratch) / "report.html")],
            "show": ["show", index, "L0N0"],
            "search": ["search", index, "river"],
            "export": ["export", index, "-o", str(Path(scratch) / "index.jsonl")],
            "compare": ["compare", index, index],
            "check": ["check", index],
        }
        if options.growth:
            return 0 if compare_growth(model, text, options) else 1
        print(f"{'verb':12s} {'peak MB':>8s} {'bound MB':>9s} {'peak / bound':>13s}")
        for verb, command in commands.items():
            if options.verbs and verb not in (*options.verbs, "scan"):
                continue
            for number, shard in enumerate(shards if verb == "merge" else (), 1):
                measure_peak(["scan", model, text, "-o", shard, *alone, "--shard", f"{number}/2"])
            taken, bound = measure_peak(command), BOUNDS[verb](sizes)
            good &= taken <= bound
            mark = "" if taken <= bound else "  EXCEEDED"
            print(f"{verb:12s} {taken / MB:8.0f} {bound / MB:9.0f} {taken / bound:13.2f}{mark}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
