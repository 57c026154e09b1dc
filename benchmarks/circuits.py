"""Faithfulness of circuits of public tasks by five ways to rank memories, and relevance against exact silencing.

    python benchmarks/circuits.py MODEL DATA [-o FILE.csv] [--tasks nounpp,simple,ioi,greater-than] [--pairs 48]

DATA is a folder with sva_simple_train.json, sva_simple_test.json, sva_nounpp_train.json and sva_nounpp_test.json
(saprmarks/feature-circuits, MIT), greater_than.csv (hannamw/EAP-IG, MIT) and ioi.json
(lab-paper-code/dual_path_attribution, MIT). Pairs are kept if both prompts have the same number of tokens and both
answers are one token. Scores come from --pairs training pairs, and faithfulness from --held-out pairs of the test file.
Greater-than and IOI have no test file: their held-out pairs follow the training pairs.

FILE.csv: for each task and method, faithfulness and complement over sizes, next to random sets with as many memories
per layer. Methods: `integrated` (gradients over inputs, 10 steps), `ablation` (gradients over a mask, 10 steps),
`patching` (attribution patching), `relevance` (frozen network) and `refined` (a mask learned from the integrated
ranking). A task that the model cannot do has one row with the reason.

FILE-silencing.csv: for 5 prompts of each task, the correlation of linear estimates with exact effects of 200 memories,
the 100 with the largest estimates by relevance and 100 random ones. `silence` sets a memory to 0 at all positions,
`silence after first` at all but the first, `mean` sets it to its means over the patch prompts of the training pairs,
and `patch` to its coefficients in the patch prompt of the same pair. Estimates: relevance with `--gate value` and
`--gate half`, and the gradient of the unfrozen network, with attention or norms frozen. `large` is the share of the
squared error of `value` that is due to the 10 memories with the largest coefficients.

Tasks and methods that are already in the files are skipped.
"""

import argparse
import csv
import json
import random
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

import memlens
from memlens.circuits import task
from memlens.circuits.frozen import FreezeNonlinearities, Gate, frozen_pass
from memlens.circuits.task import Pair, TaskCircuit, read_pairs, task_circuit
from memlens.errors import MemlensError
from memlens.models.memory_model import MemoryModel

METHODS = ("integrated", "ablation", "patching", "relevance", "refined")
CURVE_COLUMNS = (
    *("task", "method", "training", "held_out", "accuracy", "memories", "share", "faithfulness", "low", "high"),
    *("complement", "complement_low", "complement_high", "random", "smallest", "area", "cpu_minutes", "note"),
)
ESTIMATES = ("value", "half", "gradient", "attention_frozen", "norms_frozen")
SILENCING_COLUMNS = ("task", "change", "prompt", "memories", *ESTIMATES, "rank_value", "rank_gradient", "large")


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


def select_pairs(model: MemoryModel, pairs: Iterator[Pair]) -> dict[int, list[Pair]]:
    """Return the distinct pairs of equal length with single-token, distinct answers, by length."""
    by_length: dict[int, list[Pair]] = {}
    for pair in dict.fromkeys(pairs):
        texts = (pair.clean_prefix, pair.patch_prefix, pair.clean_answer, pair.patch_answer)
        clean, patch, *answers = (model.tokenizer.encode([text])[0].ids for text in texts)
        if len(clean) == len(patch) and [len(ids) for ids in answers] == [1, 1] and answers[0] != answers[1]:
            by_length.setdefault(len(clean), []).append(pair)
    return by_length


def read_task(model: MemoryModel, data: Path, task: str, count: int, held_out: int) -> tuple[list[Pair], list[Pair]]:
    """Return the training and the held-out pairs of a task, of the most frequent length if it has enough pairs."""
    read, train_file, test_file = TASKS[task]
    by_length = select_pairs(model, read(data / train_file))
    length = max(by_length, key=lambda one: len(by_length[one]))
    if test_file is not None:
        train = by_length[length][:count]
        test = select_pairs(model, read(data / test_file)).get(length, [])
        return train, [pair for pair in test if pair not in train][:held_out]
    pairs = by_length[length]
    if len(pairs) < count + held_out:
        pairs = [pair for one in by_length.values() for pair in one]
        random.Random(0).shuffle(pairs)
    return pairs[:count], pairs[count : count + held_out]


def measure_curve(
    model: MemoryModel, name: str, method: Any, pairs: tuple[list[Pair], list[Pair]], random_sets: int
) -> Iterator[dict[str, Any]]:
    start = time.process_time()
    shared = {"task": name, "method": method, "training": len(pairs[0]), "held_out": len(pairs[1])}
    try:
        result: TaskCircuit = task_circuit(
            model,
            pairs[0],
            held_out=pairs[1],
            method="integrated" if method == "refined" else method,
            refine=method == "refined",
            random_sets=random_sets,
        )
    except MemlensError as error:
        yield shared | {"note": str(error)}
        return
    for point in result.curve:
        yield shared | {
            "accuracy": f"{result.accuracy:.3f}",
            "memories": point.size,
            "share": f"{point.share:.5f}",
            **{column: f"{getattr(point, column):.4f}" for column in CURVE_COLUMNS[7:14]},
            "smallest": "" if result.smallest is None else result.smallest.size,
            "area": f"{result.area:.4f}",
            "cpu_minutes": f"{(time.process_time() - start) / 60:.1f}",
        }


class FreezeSome(FreezeNonlinearities):
    """Freeze only attention weights, or only the scales of norms."""

    def __init__(self, attention: bool) -> None:
        super().__init__()
        self.attention = attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (func in (torch.nn.functional.scaled_dot_product_attention, torch.nn.functional.softmax)) == self.attention:
            return super().__torch_function__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def estimate(model: MemoryModel, batch: Any) -> dict[str, torch.Tensor]:
    """Return the gradient of the metric [pos, memories] by each estimate, at the clean prompt of a batch of one."""
    gradients: dict[str, torch.Tensor] = {}
    target = partial(task._difference, answer=int(batch.answers[0, 0]), other=int(batch.answers[0, 1]))
    gates: tuple[Gate, Gate] = ("value", "half")
    for gate in gates:
        with frozen_pass(model, batch.clean, target, gate=gate) as frozen:
            gradients[gate] = torch.cat(list(frozen.gradients([frozen.target]).coefficients.values()), 1)
    inputs = task._first_inputs(model, batch.clean)
    modes: dict[str, Any] = {
        "gradient": nullcontext(),
        "attention_frozen": FreezeSome(True),
        "norms_frozen": FreezeSome(False),
    }
    for name, mode in modes.items():
        with mode:
            gradients[name] = torch.cat(list(task._gradients(model, batch, inputs).values()), 2)[0]
    return gradients


def coefficients(model: MemoryModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return the coefficients of all layers, [pos, memories]."""
    with model.record(states=False) as recording:
        model.run_body(tokens)
    return torch.cat([recording.coefficients[layer.number][0] for layer in model.layers], 1)


def measure_silencing(
    model: MemoryModel, name: str, pairs: tuple[list[Pair], list[Pair]], count: int
) -> Iterator[dict[str, Any]]:
    """Compare linear estimates with the change of the metric if single memories are changed, on 5 held-out prompts."""
    training = task._batches(model, [task._encode(model, pair, "pair") for pair in pairs[0]])
    means = torch.cat(list(task._mean_coefficients(model, training).values()), 1)
    for pair in pairs[1][:5]:
        (batch,) = task._batches(model, [task._encode(model, pair, "pair")])
        clean, patch = (coefficients(model, tokens) for tokens in (batch.clean, batch.patch))
        gradients = estimate(model, batch)
        mean = means[torch.arange(len(clean)).clamp(max=len(means) - 1)]
        zero = torch.zeros_like(clean)
        after_first = torch.cat([clean[:1], zero[1:]])
        bases = {"silence": zero, "silence after first": after_first, "mean": mean, "patch": patch}
        for change, base in bases.items():
            effects = {name: (one * (clean - base)).sum(0).double().numpy() for name, one in gradients.items()}
            best = np.argsort(-abs(effects["value"]))[: count // 2]
            others = np.setdiff1d(np.arange(clean.shape[1]), best)
            chosen = np.append(best, np.random.default_rng(0).choice(others, count - len(best), replace=False))
            exact = exact_effects(model, batch, chosen, base)
            ranks = {name: spearmanr(effects[name][chosen], exact).statistic for name in ("value", "gradient")}
            errors = (effects["value"][chosen] - exact) ** 2
            largest = np.argsort(-clean.abs().max(0).values.numpy()[chosen])[:10]
            yield {
                "task": name,
                "change": change,
                "prompt": pair.clean_prefix,
                "memories": len(chosen),
                **{name: f"{np.corrcoef(one[chosen], exact)[0, 1]:.3f}" for name, one in effects.items()},
                **{f"rank_{name}": f"{rank:.3f}" for name, rank in ranks.items()},
                "large": f"{errors[largest].sum() / errors.sum():.3f}",
            }


def exact_effects(model: MemoryModel, batch: Any, chosen: Any, base: torch.Tensor) -> Any:
    """Return how much the metric falls if each memory alone has the coefficients `base` [pos, memories]."""
    starts = np.cumsum([0, *(layer.memories for layer in model.layers)])
    whole = float(batch.metric(task._last_logits(model, batch.clean)))
    effects: list[float] = []
    for first in range(0, len(chosen), 40):
        part = chosen[first : first + 40]
        rows: dict[int, list[tuple[int, int]]] = {}
        for row, flat in enumerate(part):
            layer = int(np.searchsorted(starts, flat, "right")) - 1
            rows.setdefault(layer, []).append((row, int(flat)))
        edits = {
            layer: partial(replace_rows, places=places, base=base, start=int(starts[layer]))
            for layer, places in rows.items()
        }
        with model.edit(edits):
            logits = task._last_logits(model, batch.clean.expand(len(part), -1))
        effects += (whole - (logits[:, batch.answers[0, 0]] - logits[:, batch.answers[0, 1]]).double()).tolist()
    return np.array(effects)


def replace_rows(m: torch.Tensor, group: Any, places: list[tuple[int, int]], base: torch.Tensor, start: int) -> Any:
    """Change one memory per row of the batch."""
    m = m.clone()
    for row, flat in places:
        if group.start <= flat - start < group.start + group.size:
            m[row, :, flat - start - group.start] = base[:, flat]
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
    results = Path(__file__).parent / "results" / "circuits.csv"
    parser.add_argument("-o", "--out", type=Path, default=results, help="CSV file to write or continue.")
    parser.add_argument("--tasks", default=",".join(TASKS), help="Tasks to measure.")
    parser.add_argument("--methods", default=",".join(METHODS), help="Methods to measure.")
    parser.add_argument("--pairs", type=int, default=48, help="Training pairs per task.")
    parser.add_argument("--held-out", type=int, default=32, help="Held-out pairs per task.")
    parser.add_argument("--random-sets", type=int, default=1, help="Random sets per size.")
    parser.add_argument("--memories", type=int, default=200, help="Memories to silence per prompt.")
    options = parser.parse_args()
    curves, silencing = options.out, options.out.with_stem(f"{options.out.stem}-silencing")
    done = finished(curves, CURVE_COLUMNS, ("task", "method"))
    silenced = finished(silencing, SILENCING_COLUMNS, ("task",))
    model = memlens.load(options.model)
    for name in options.tasks.split(","):
        pairs = read_task(model, options.data, name, options.pairs, options.held_out)
        for method in filter(None, options.methods.split(",")):
            if (name, method) not in done:
                append(curves, CURVE_COLUMNS, list(measure_curve(model, name, method, pairs, options.random_sets)))
                print(name, method, flush=True)
        if (name,) not in silenced and options.memories:
            append(silencing, SILENCING_COLUMNS, list(measure_silencing(model, name, pairs, options.memories)))
            print(name, "silencing", flush=True)


if __name__ == "__main__":
    main()
