"""Analyze snapshots of a training run with memlens: when memories get patterns, and when their values agree.

    python training/series.py --work DIR --indexes DIR [--steps 0 200 800 1600 3200] [--last] [--tokens 60000] OUT.csv

Exports every snapshot and scans it over the same tokens of the bundled training text. A row contains the shares of dead
memories, of memories with a pattern, of triggers with a pattern, of memories with a semantic pattern, and of values
whose top token follows their first trigger; the mean number of patterns; and the share of memories with mostly the same
triggers as in the last checkpoint (a Jaccard index of at least 0.5). Complete indexes are used again.
"""

import argparse
import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import memlens
from memlens.index.reader import Index

HERE = Path(__file__).parent


def analyze(model: Path, folder: Path, tokens: int) -> Index:
    """Return an index with values, patterns and agreement."""
    index = memlens.scan(model, "bundled:train", out=folder, max_tokens=tokens, threads=1)
    memlens.values(index, threads=1)
    memlens.patterns(index)
    memlens.experiment(index, ["agreement"], threads=1)
    return memlens.open_index(folder)


def trigger_sets(index: Index) -> dict[tuple[int, int], set[tuple[int, int]]]:
    """Return the top triggers of every memory."""
    rows = index.sql("""SELECT layer, memory, sentence, position FROM {triggers} WHERE "end" = 'top'""")
    found: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for row in rows:
        found.setdefault((row["layer"], row["memory"]), set()).add((row["sentence"], row["position"]))
    return found


def same_triggers(index: Index, last: Index) -> float:
    """Return the share of memories with mostly the same triggers as in the last checkpoint."""
    here, there = trigger_sets(index), trigger_sets(last)
    same = sum(2 * len(own & here.get(name, set())) >= len(own | here.get(name, set())) for name, own in there.items())
    return same / len(there)


def row_of(step: int, index: Index) -> dict[str, Any]:
    """Return the row of a snapshot."""
    (names,) = index.sql(
        "SELECT count(*) AS n, count(*) FILTER (patterns > 0) AS some, sum(patterns) AS patterns, "
        "sum(covered) AS covered, sum(triggers) AS triggers FROM {names} WHERE triggers > 0"
    )
    (semantic,) = index.sql("SELECT count(DISTINCT (layer, memory)) AS n FROM {patterns} WHERE kind = 'semantic'")
    memories = index.sql("SELECT count(*) AS n FROM {memories}")[0]["n"]
    agreement = index.table("experiments/agreement").to_pylist()
    weight = sum(row["memories"] for row in agreement)
    return {
        "step": step,
        "dead": round(1 - names["n"] / memories, 4),
        "with a pattern": round(names["some"] / names["n"], 4),
        "patterns per memory": round(names["patterns"] / names["n"], 3),
        "triggers with a pattern": round(names["covered"] / names["triggers"], 4),
        "with a semantic pattern": round(semantic["n"] / names["n"], 4),
        "values agree": round(sum(row["agree"] for row in agreement) / weight, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="table to write")
    parser.add_argument("--work", type=Path, required=True, help="working directory of the training")
    parser.add_argument("--steps", type=int, nargs="*", default=[0, 200, 800, 1600, 3200], help="snapshots to analyze")
    parser.add_argument(
        "--last", action="store_true", help="include the last checkpoint and compare the others with it"
    )
    parser.add_argument("--indexes", type=Path, required=True, help="folder for models and indexes of the snapshots")
    parser.add_argument("--tokens", type=int, default=60_000, help="tokens to scan")
    options = parser.parse_args()
    run = options.work / "run"
    checkpoints = {step: run / "snapshots" / f"step-{step:07d}.pt" for step in options.steps}
    if options.last:
        path = max(run.glob("checkpoint-*.pt"))
        checkpoints[int(path.stem.partition("-")[2])] = path
    indexes = {}
    for step, checkpoint in checkpoints.items():
        folder = options.indexes / str(step)
        if not (folder / "model").is_dir():
            command = [sys.executable, HERE / "export.py", "--work", options.work, "--checkpoint", checkpoint]
            subprocess.run([*map(str, command), str(folder / "model")], check=True)
        indexes[step] = analyze(folder / "model", folder / "index", options.tokens)
    rows = [row_of(step, index) for step, index in sorted(indexes.items())]
    if options.last:
        last = indexes[max(indexes)]
        rows = [
            row | {"same triggers as at the end": round(same_triggers(indexes[row["step"]], last), 4)} for row in rows
        ]
    with options.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
