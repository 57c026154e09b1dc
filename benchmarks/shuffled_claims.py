"""Claims of the paper that appear in shuffled networks, where none should.

    python benchmarks/shuffled_claims.py MODEL WORK [--seeds 101 102 103] [--tokens 200000] [-o FILE]

For each seed, shuffles the entries of every weight matrix (src/memlens/models/shuffle.py), saves the network as a model
in WORK, and analyzes it like a trained model with `memlens demo`. Every claim is then judged by the full rule, with six
further shuffled networks for comparison. These are the networks of the demo for the bundled model, and further shuffles
of the first seed's network for other models. A shuffle of a shuffled network has the same distribution as a shuffle of
the trained one. Writes one CSV row per seed and claim.
"""

import argparse
import csv
import json
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import memlens
from memlens.experiments.experiment import APPEARS, UNTESTED, JudgedClaim, compare_with_shuffled
from memlens.experiments.run import EXPERIMENTS
from memlens.experiments.shuffled import SHIPPED, TOKENS, measure_claims, write_part
from memlens.models.shuffle import shuffled_weights
from memlens.reports.sections import Tables

COLUMNS = ("model", "seed", "claim", "verdict", "yours", "interval", "shuffled")
Rows = list[dict[str, Any]]


def save_shuffled(source: str, seed: int, folder: Path) -> None:
    """Save the shuffled network as a transformers folder."""
    model: Any = memlens.load(source)
    with shuffled_weights(model, seed):
        model.network.save_pretrained(folder)
        model.tokenizer.save(folder)


def measure_again(index: Any, model: Any, networks: Rows) -> Rows:
    """Return the rows of other shuffled networks with the numbers of this network as those of the trained one."""
    with TemporaryDirectory() as folder:
        text = Path(folder) / "text.jsonl"
        write_part(index, text, TOKENS)
        measured = measure_claims(index, model, text, Path(folder) / "part")
    return [
        row | dict(zip(("trained", "trained_low", "trained_high"), measured[row["claim"]], strict=True))
        for row in networks
        if row["claim"] in measured
    ]


def judge(index: Any, networks: Rows) -> list[JudgedClaim]:
    tables, claims = Tables(index), []
    for experiment in EXPERIMENTS.values():
        for judged in experiment.judge_rules(index, tables.rows):
            if judged.judgement is not None:
                rows = [row for row in networks if row["claim"] == judged.claim.slug]
                judgement = compare_with_shuffled(judged.claim, judged.judgement, rows)
                claims.append(JudgedClaim(judged.claim, judged.experiment, judged.figure, judgement))
    return claims


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hub id, folder, file or `bundled`.")
    parser.add_argument("work", type=Path, help="Folder for the shuffled models and their indexes.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[101, 102, 103])
    parser.add_argument("--tokens", type=int, default=200_000, help="Tokens of the bundled text. Default: 200000.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("-o", "--out", type=Path, help="Default: benchmarks/results/shuffled-claims-MODEL.csv.")
    options = parser.parse_args()
    name, rows = Path(options.model).stem, []
    networks: Rows = json.loads(SHIPPED.read_text("utf-8"))["rows"] if name == "bundled" else []
    for seed in options.seeds:
        folder, out = options.work / f"{name}-{seed}", options.work / f"{name}-{seed}-index"
        if not folder.exists():
            save_shuffled(options.model, seed, folder)
        limits = {"max_tokens": options.tokens, "null_tokens": 0 if networks else TOKENS, "threads": options.threads}
        index = memlens.demo(str(folder), out=out, **limits).index
        if networks:
            compared = measure_again(index, memlens.load(folder), networks)
        else:
            compared = networks = index.table("experiments/shuffled").to_pylist()
        claims = judge(index, compared)
        rows += [{"model": name, "seed": seed} | claim.record for claim in claims]
        counts = Counter(claim.judgement.verdict for claim in claims if claim.judgement)
        tested = sum(number for verdict, number in counts.items() if verdict not in UNTESTED)
        print(f"seed {seed}: {counts[APPEARS]} of {tested} claims appear; {dict(counts)}", flush=True)
        path = options.out or Path(__file__).parent / "results" / f"shuffled-claims-{name}.csv"
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
