"""Peak memory of every verb beside the bound that docs/scaling.md states for it, each in a process of its own.

    python benchmarks/memory.py [--width 512 --layers 6 --vocabulary 16000] [--tokens 20000] [verb ...]

Makes a GPT-2 like model with random weights, scans words at random, runs each verb on the index, and prints the peak
beside the bound. Ends with code 1 if a verb takes more.
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
PROGRAM = 750 * MB  # torch, transformers, numba; 300 MB less once loops are compiled and kept
LOOK_UP = 260 * MB  # a process that computes nothing: DuckDB and Arrow
PROMPT = "river stone river"
TEXTS = 100  # with a label each, of a probe


class Sizes:
    """What the bounds are functions of."""

    def __init__(self, given: argparse.Namespace) -> None:
        body = given.layers * 12 * given.width**2
        self.embedding = 4 * given.vocabulary * given.width
        self.weights = 4 * body + self.embedding + 4 * 256 * given.width
        self.memories = given.layers * 4 * given.width
        self.triggers = self.memories * given.top
        self.lists = self.memories * (24 * given.top + 600)
        self.heap = 28 * 2048 * 4 * 4 * given.width  # freed pieces of a batch, which the C library keeps for the next
        self.tokens = given.tokens
        self.logits = 4 * given.vocabulary * given.layers * 8


# docs/scaling.md has the same table in words
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
    "annotate": lambda s: LOOK_UP + 64 * s.triggers,
    "collect": lambda s: LOOK_UP + 64 * s.triggers,
    "show": lambda s: LOOK_UP + 32 * s.memories + 24 * s.tokens,
    "search": lambda s: LOOK_UP + 300 * s.triggers,
    "export": lambda s: LOOK_UP + 64 * s.triggers + 64 * s.tokens,
    "compare": lambda s: LOOK_UP + 300 * s.triggers,
    "check": lambda s: LOOK_UP + 64 * s.triggers + 24 * s.tokens,
}


def make_model(folder: Path, given: argparse.Namespace) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    words = {"<unk>": 0, "river": 1, "stone": 2} | {f"w{number}": number for number in range(3, given.vocabulary)}
    raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>").save_pretrained(folder)
    sizes = {
        "bos_token_id": 0,
        "eos_token_id": 0,
        "n_layer": given.layers,
        "n_embd": given.width,
        "n_head": 8,
        "n_positions": 256,
    }
    GPT2LMHeadModel(GPT2Config(vocab_size=given.vocabulary, **sizes)).save_pretrained(folder)


def make_text(path: Path, given: argparse.Namespace) -> None:
    draw = random.Random(0)
    names = ["river", "stone", *(f"w{number}" for number in range(3, given.vocabulary))]
    lines = [" ".join(draw.choices(names, k=20)) for _ in range(given.tokens // 20)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def make_labels(path: Path) -> None:
    rows = [f'"{("river", "stone")[row % 2]} w{row + 3} river",{row % 2}' for row in range(TEXTS)]
    path.write_text("\n".join(["text,label", *rows]) + "\n", encoding="utf-8")


def peak(command: list[str]) -> int:
    """Bytes; the largest of the process and its children."""
    process = subprocess.Popen([sys.executable, "-m", "memlens", *command], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"memlens {' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}")
    return usage.ru_maxrss * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 512), ("layers", 6), ("vocabulary", 16_000), ("tokens", 20_000), ("top", 25)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("verbs", nargs="*", choices=[*BOUNDS, []], help="all, unless some are named; scan comes first")
    given = parser.parse_args()
    sizes, good = Sizes(given), True
    with TemporaryDirectory() as scratch:
        model, text, index = (str(Path(scratch) / name) for name in ("model", "text.txt", "index"))
        maker = get_context("spawn").Process(target=make_model, args=(Path(model), given))
        maker.start()  # not here: what a process has taken counts for the children that it starts, too
        maker.join()
        make_text(Path(text), given)
        labels, site = Path(scratch) / "labels.csv", Path(scratch) / "site"
        parts = [f"{index}-{part}" for part in (1, 2)]
        make_labels(labels)
        alone = ["--top", str(given.top), "--threads", "1", "--workers", "1"]
        commands = {
            "info": ["info", model],
            "scan": ["scan", model, text, "-o", index, *alone],
            "values": ["values", index, "--threads", "1"],
            "patterns": ["patterns", index],
            "experiment": ["experiment", index, "agreement", "active", "refinement", "--sample", "400"],
            "roles": ["roles", index],
            "trace": ["trace", model, PROMPT],
            "probe": ["probe", model, str(labels)],
            "merge": ["merge", *parts, "-o", f"{index}-merged"],
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
        print(f"{'verb':12s} {'peak MB':>8s} {'bound MB':>9s} {'peak / bound':>13s}")
        for verb, command in commands.items():
            if given.verbs and verb not in (*given.verbs, "scan"):
                continue
            for number, part in enumerate(parts if verb == "merge" else (), 1):
                peak(["scan", model, text, "-o", part, *alone, "--shard", f"{number}/2"])
            taken, bound = peak(command), BOUNDS[verb](sizes)
            good &= taken <= bound
            mark = "" if taken <= bound else "  MORE THAN STATED"
            print(f"{verb:12s} {taken / MB:8.0f} {bound / MB:9.0f} {taken / bound:13.2f}{mark}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
