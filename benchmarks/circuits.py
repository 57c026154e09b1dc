"""Faithfulness of circuits of public tasks, for three ways to score memories, and relevance against exact silencing.

    python benchmarks/circuits.py MODEL DATA [-o FOLDER] [--tasks simple,nounpp,greater-than,ioi] [--pairs 64]

DATA is a folder with sva_simple_train.json, sva_simple_test.json, sva_nounpp_train.json and sva_nounpp_test.json
(saprmarks/feature-circuits, MIT), greater_than.csv (hannamw/EAP-IG, MIT) and ioi.json
(lab-paper-code/dual_path_attribution, MIT). Pairs are kept if both prompts have the same number of tokens and both
answers are one token. Scores come from the first --pairs pairs, and faithfulness from the first --held-out pairs of the
test file. Greater-than and IOI have no test file: their held-out pairs follow the training pairs.

circuits.csv: for each task and method, faithfulness and complement over sizes, next to random sets with as many
memories per layer. Methods: `integrated` (gradients over inputs, 10 steps), `patching` (attribution patching) and
`relevance` (frozen network). A task that the model cannot do has one row with the reason.
circuits-silencing.csv: for 5 prompts of each task, the correlation between the relevance of 200 memories (the 100 most
relevant and 100 random ones) and the change of the logit difference if each is silenced at all positions.

Tasks and methods that are already in the files are skipped.
"""

import argparse
import csv
import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import memlens
from memlens.circuits.frozen import frozen_pass
from memlens.circuits.task import Pair, TaskCircuit, read_pairs, task_circuit
from memlens.errors import MemlensError
from memlens.models.memory_model import MemoryModel
from memlens.tracer.prompt import read_prompt, read_token

METHODS = ("integrated", "patching", "relevance")
CURVE_COLUMNS = (
    *("task", "method", "training", "held_out", "accuracy", "memories", "share", "faithfulness", "low", "high"),
    *("complement", "random", "smallest", "area", "cpu_minutes", "note"),
)
SILENCING_COLUMNS = ("task", "prompt", "memories", "r", "r_relevant", "r_early", "r_late", "sign")


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


TASKS: dict[str, tuple[Any, str, str | None]] = {
    "nounpp": (read_pairs, "sva_nounpp_train.json", "sva_nounpp_test.json"),
    "simple": (read_pairs, "sva_simple_train.json", "sva_simple_test.json"),
    "ioi": (read_ioi, "ioi.json", None),
    "greater-than": (read_greater_than, "greater_than.csv", None),
}


def select_pairs(model: MemoryModel, pairs: Iterator[Pair], length: int | None = None) -> list[Pair]:
    """Return the distinct pairs with one length (the most frequent one) and single-token, distinct answers."""
    by_length: dict[int, list[Pair]] = {}
    for pair in dict.fromkeys(pairs):
        texts = (pair.clean_prefix, pair.patch_prefix, pair.clean_answer, pair.patch_answer)
        clean, patch, *answers = (model.tokenizer.encode([text])[0].ids for text in texts)
        if len(clean) == len(patch) and [len(ids) for ids in answers] == [1, 1] and answers[0] != answers[1]:
            by_length.setdefault(len(clean), []).append(pair)
    return by_length.get(length, []) if length is not None else max(by_length.values(), key=len, default=[])


def read_task(model: MemoryModel, data: Path, task: str, count: int, held_out: int) -> tuple[list[Pair], list[Pair]]:
    """Return the training and the held-out pairs of a task."""
    read, train_file, test_file = TASKS[task]
    train = select_pairs(model, read(data / train_file))
    if test_file is None:
        return train[:count], train[count : count + held_out]
    length = len(model.tokenizer.encode([train[0].clean_prefix])[0].ids)
    test = [pair for pair in select_pairs(model, read(data / test_file), length) if pair not in train[:count]]
    return train[:count], test[:held_out]


def measure_curve(
    model: MemoryModel, task: str, method: Any, pairs: tuple[list[Pair], list[Pair]], random_sets: int
) -> Iterator[dict[str, Any]]:
    start = time.process_time()
    shared = {"task": task, "method": method, "training": len(pairs[0]), "held_out": len(pairs[1])}
    try:
        result: TaskCircuit = task_circuit(
            model, pairs[0], held_out=pairs[1], method=method, steps=10, random_sets=random_sets
        )
    except MemlensError as error:
        yield shared | {"note": str(error)}
        return
    for point in result.curve:
        yield shared | {
            "accuracy": f"{result.accuracy:.3f}",
            "memories": point.size,
            "share": f"{point.share:.5f}",
            **{name: f"{getattr(point, name):.4f}" for name in ("faithfulness", "low", "high", "complement", "random")},
            "smallest": "" if result.smallest is None else result.smallest.size,
            "area": f"{result.area:.4f}",
            "cpu_minutes": f"{(time.process_time() - start) / 60:.1f}",
        }


def measure_silencing(model: MemoryModel, task: str, pairs: list[Pair], count: int) -> Iterator[dict[str, Any]]:
    """Compare relevance with the change of the metric if a memory is silenced, on the first prompts of a task."""
    sizes = [layer.memories for layer in model.layers]
    starts = np.cumsum([0, *sizes])
    for number, pair in enumerate(pairs[:5]):
        fed = read_prompt(model, pair.clean_prefix).fed()
        answers = [read_token(model, text) for text in (pair.clean_answer, pair.patch_answer)]

        def metric(logits: torch.Tensor, answers: list[int] = answers) -> torch.Tensor:
            return logits[..., answers[0]] - logits[..., answers[1]]

        with frozen_pass(model, fed, metric) as frozen:
            gradients = frozen.gradients([frozen.target])
            parts = [
                (graph.coefficients * gradients.coefficients[layer]).sum(0) for layer, graph in frozen.layers.items()
            ]
        relevance = torch.cat(parts).double().numpy()
        best = np.argsort(-abs(relevance))[: count // 2]
        others = np.setdiff1d(np.arange(len(relevance)), best)
        chosen = [*best, *np.random.default_rng(number).choice(others, count - len(best), replace=False)]
        exact = []
        whole = float(metric(model.lens.state_logits(model.run_body(fed)[0, -1])))
        for first in range(0, len(chosen), 20):
            part = chosen[first : first + 20]
            by_layer: dict[int, list[tuple[int, int]]] = {}
            for row, flat in enumerate(part):
                layer = int(np.searchsorted(starts, flat, "right")) - 1
                by_layer.setdefault(layer, []).append((row, int(flat - starts[layer])))
            with model.edit({layer: partial(silence_rows, places=places) for layer, places in by_layer.items()}):
                states = model.run_body(fed.expand(len(part), -1))[:, -1]
            exact += (whole - metric(model.lens.state_logits(states)).double()).tolist()
        both = np.array([relevance[chosen], exact])
        early = np.array(chosen) < starts[len(sizes) // 2]

        def correlate(rows: Any, both: Any = both) -> str:
            return f"{np.corrcoef(both[:, rows])[0, 1]:.4f}"

        yield {
            "task": task,
            "prompt": pair.clean_prefix,
            "memories": len(chosen),
            "r": correlate(slice(None)),
            "r_relevant": correlate(slice(0, len(best))),
            "r_early": correlate(early),
            "r_late": correlate(~early),
            "sign": f"{np.mean(np.sign(both[0][: len(best)]) == np.sign(both[1][: len(best)])):.3f}",
        }


def silence_rows(m: torch.Tensor, group: Any, places: list[tuple[int, int]]) -> torch.Tensor:
    """Set one memory per row of the batch to 0."""
    m = m.clone()
    for row, number in places:
        if group.start <= number < group.start + group.size:
            m[row, :, number - group.start] = 0
    return m


def finished(path: Path, columns: tuple[str, ...], keys: tuple[str, ...]) -> set[tuple[str, ...]]:
    """Return what a CSV file already contains; create it if it does not exist."""
    if not path.exists():
        path.write_text(",".join(columns) + "\n", encoding="utf-8")
    with path.open(encoding="utf-8", newline="") as handle:
        return {tuple(row[key] for key in keys) for row in csv.DictReader(handle)}


def append(path: Path, columns: tuple[str, ...], rows: list[dict[str, Any]]) -> None:
    with path.open("a", encoding="utf-8", newline="") as handle:
        csv.DictWriter(handle, columns, restval="", lineterminator="\n").writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hub id, folder or file.")
    parser.add_argument("data", type=Path, help="Folder with the files named above.")
    results = Path(__file__).parent / "results"
    parser.add_argument("-o", "--out", type=Path, default=results, help="Folder of the CSV files to write or continue.")
    parser.add_argument("--tasks", default=",".join(TASKS), help="Tasks to measure.")
    parser.add_argument("--methods", default=",".join(METHODS), help="Methods to measure.")
    parser.add_argument("--pairs", type=int, default=64, help="Training pairs per task.")
    parser.add_argument("--held-out", type=int, default=40, help="Held-out pairs per task.")
    parser.add_argument("--random-sets", type=int, default=2, help="Random sets per size.")
    parser.add_argument("--memories", type=int, default=200, help="Memories to silence per prompt.")
    options = parser.parse_args()
    curves, silencing = options.out / "circuits.csv", options.out / "circuits-silencing.csv"
    done = finished(curves, CURVE_COLUMNS, ("task", "method"))
    silenced = finished(silencing, SILENCING_COLUMNS, ("task",))
    model = memlens.load(options.model)
    for task in options.tasks.split(","):
        pairs = read_task(model, options.data, task, options.pairs, options.held_out)
        for method in options.methods.split(","):
            if (task, method) not in done:
                append(curves, CURVE_COLUMNS, list(measure_curve(model, task, method, pairs, options.random_sets)))
                print(task, method, flush=True)
        if (task,) not in silenced and options.memories:
            append(silencing, SILENCING_COLUMNS, list(measure_silencing(model, task, pairs[1], options.memories)))
            print(task, "silencing", flush=True)


if __name__ == "__main__":
    main()
