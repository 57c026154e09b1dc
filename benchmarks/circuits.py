"""Faithfulness of circuits of public tasks, for three methods to score memories.

    python benchmarks/circuits.py MODEL DATA [-o FILE] [--tasks simple,nounpp,greater-than,ioi] [--pairs 104]

DATA is a folder with sva_simple_train.json and sva_nounpp_train.json (saprmarks/feature-circuits, MIT),
greater_than.csv (hannamw/EAP-IG, MIT) and ioi.json (lab-paper-code/dual_path_attribution, MIT). Pairs are kept if both
prompts have the same number of tokens and both answers are one token. Methods: `integrated` (10 steps), `patching`
(attribution patching, one step) and `relevance` (frozen network). Results are appended to a CSV file. A task and method
that are already in the file are skipped. A task that the model cannot do has one row that states the reason.
"""

import argparse
import csv
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import memlens
from memlens.circuits.task import Pair, TaskCircuit, read_pairs, task_circuit
from memlens.errors import MemlensError
from memlens.models.memory_model import MemoryModel

METHODS: dict[str, dict[str, Any]] = {
    "integrated": {"steps": 10},
    "patching": {"steps": 1},
    "relevance": {"method": "relevance"},
}
COLUMNS = (
    *("task", "method", "pairs", "held_out", "accuracy", "memories", "share", "faithfulness", "low", "high"),
    *("complement", "random", "smallest", "area", "seconds", "note"),
)


def read_agreement(path: Path) -> Iterator[Pair]:
    yield from read_pairs(path)


def read_greater_than(path: Path) -> Iterator[Pair]:
    """Yield pairs for models that write years digit by digit: the decade after the clean year against the one before.

    This is a variant of the published task, which compares all later years with all earlier ones.
    """
    with path.open(encoding="utf-8", newline="") as handle:
        for row in csv.DictReader(handle):
            decade = int(row["label"]) // 10
            if 1 <= decade <= 8:
                yield Pair(row["clean"], row["corrupted"], str(decade + 1), str(decade - 1))


def read_ioi(path: Path) -> Iterator[Pair]:
    """Yield pairs that differ in the name that is repeated, so that the other name is the answer."""
    for row in json.loads(path.read_text(encoding="utf-8")):
        prompt, answer = row["prompt"], row["answer"]
        names = [word.strip(".,") for word in prompt.split() if word[0].isupper() and word.strip(".,") != answer]
        repeated = next((name for name in names if prompt.count(name) == 2), None)
        if repeated is None or prompt.count(answer) != 1:
            continue
        start, _, end = prompt.rpartition(repeated)
        yield Pair(prompt, f"{start}{answer}{end}", f" {answer}", f" {repeated}")


TASKS = {
    "simple": (read_agreement, "sva_simple_train.json"),
    "nounpp": (read_agreement, "sva_nounpp_train.json"),
    "greater-than": (read_greater_than, "greater_than.csv"),
    "ioi": (read_ioi, "ioi.json"),
}


def select_pairs(model: MemoryModel, pairs: Iterator[Pair], count: int) -> list[Pair]:
    """Return the first distinct pairs with equal lengths (the most frequent one) and single-token, distinct answers."""
    by_length: dict[int, list[Pair]] = {}
    for pair in dict.fromkeys(pairs):
        texts = (pair.clean_prefix, pair.patch_prefix, pair.clean_answer, pair.patch_answer)
        clean, patch, *answers = (model.tokenizer.encode([text])[0].ids for text in texts)
        if len(clean) == len(patch) and [len(ids) for ids in answers] == [1, 1] and answers[0] != answers[1]:
            by_length.setdefault(len(clean), []).append(pair)
    return max(by_length.values(), key=len, default=[])[:count]


def rows_of(task: str, method: str, result: TaskCircuit, seconds: float) -> Iterator[dict[str, Any]]:
    for point in result.curve:
        yield {
            "task": task,
            "method": method,
            "pairs": result.pairs,
            "held_out": result.held_out,
            "accuracy": f"{result.accuracy:.3f}",
            "memories": point.size,
            "share": f"{point.share:.5f}",
            **{name: f"{getattr(point, name):.4f}" for name in ("faithfulness", "low", "high", "complement", "random")},
            "smallest": "" if result.smallest is None else result.smallest.size,
            "area": f"{result.area:.4f}",
            "seconds": f"{seconds:.0f}",
        }


def measure(model: MemoryModel, task: str, method: str, pairs: list[Pair]) -> list[dict[str, Any]]:
    start = time.monotonic()
    try:
        result = task_circuit(model, pairs, random_sets=3, **METHODS[method])
    except MemlensError as error:
        return [{"task": task, "method": method, "pairs": len(pairs), "note": str(error)}]
    return list(rows_of(task, method, result, time.monotonic() - start))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hub id, folder or file.")
    parser.add_argument("data", type=Path, help="Folder with the files named above.")
    default = Path(__file__).parent / "results" / "circuits.csv"
    parser.add_argument("-o", "--out", type=Path, default=default, help="CSV file to write or continue.")
    parser.add_argument("--tasks", default=",".join(TASKS), help="Tasks to measure.")
    parser.add_argument("--methods", default=",".join(METHODS), help="Methods to measure.")
    parser.add_argument("--pairs", type=int, default=104, help="Pairs per task.")
    options = parser.parse_args()
    done: set[tuple[str, str]] = set()
    if options.out.exists():
        with options.out.open(encoding="utf-8", newline="") as handle:
            done = {(row["task"], row["method"]) for row in csv.DictReader(handle)}
    else:
        options.out.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")
    model = memlens.load(options.model)
    for task in options.tasks.split(","):
        read, name = TASKS[task]
        pairs = select_pairs(model, read(options.data / name), options.pairs)
        for method in options.methods.split(","):
            if (task, method) in done:
                continue
            rows = measure(model, task, method, pairs)
            with options.out.open("a", encoding="utf-8", newline="") as handle:
                csv.DictWriter(handle, COLUMNS, restval="", lineterminator="\n").writerows(rows)
            print(task, method, f"{len(rows)} rows")


if __name__ == "__main__":
    main()
