"""Precision and recall of automatic patterns against the labels of two readers.

    memlens scan bundled train.jsonl -o INDEX --unit line && memlens values INDEX && memlens patterns INDEX
    python benchmarks/labeled_patterns.py INDEX [--least 8] [--labels FILE] [--verbose]

The readers saw only the triggers, so INDEX must be a scan of the same text. train.jsonl contains 529 articles of the
training text (training/README.md, without the held-out articles), one record per article and one sentence per line:
shuffled with random.Random(17) and taken in order up to 3,630,000 characters.

A pattern is correct if 60% of its prefixes belong to one label of its kind. A label is found if a pattern of its kind
shares at least 60% of the smaller set of prefixes and 40% of their union. Intervals are Wilson intervals. Two numbers
describe the quality of the labels: how many labels of one reader the other reader also gave, and how many labels a
reader gave for memories whose triggers were swapped for prefixes with the same last tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from memlens.index.memory import read_patterns
from memlens.index.reader import Index
from memlens.stats import wilson

LABELS = Path(__file__).parent.parent / "tests" / "pattern" / "data" / "labelled_memories.json"
KINDS = ("shallow", "semantic")
Named = tuple[str, frozenset[int]]  # a description and the ranks of its triggers


def is_correct(pattern: frozenset[int], labels: Iterable[frozenset[int]]) -> bool:
    return any(len(pattern & label) >= 0.6 * len(pattern) for label in labels)


def is_found(label: frozenset[int], patterns: Iterable[frozenset[int]]) -> bool:
    return any(
        len(label & pattern) >= 0.6 * min(len(label), len(pattern))
        and len(label & pattern) >= 0.4 * len(label | pattern)
        for pattern in patterns
    )


def compare(patterns: Sequence[Named], labels: Sequence[Named]) -> tuple[list[bool], list[bool]]:
    """Return which patterns of a memory are correct and which labels are found."""
    pattern_ranks, label_ranks = [ranks for _, ranks in patterns], [ranks for _, ranks in labels]
    correct = [is_correct(ranks, label_ranks) for ranks in pattern_ranks]
    return correct, [is_found(ranks, pattern_ranks) for ranks in label_ranks]


def select(rows: Iterable[Mapping[str, Any]], kind: str, least: int = 0) -> list[Named]:
    pairs = [(row["description"], frozenset(row["prefixes"])) for row in rows if row["kind"] == kind]
    return [(description, ranks) for description, ranks in pairs if len(ranks) >= least]


def describe_readers(read: Mapping[str, Any], kind: str, least: int) -> str:
    """Return one line on the agreement of the readers and on labels for swapped triggers."""
    first, second, swapped = read["labels"], read["second_reader"], read["swapped"]
    shared = [
        is_shared
        for memory, labels in first.items()
        for is_shared in compare(select(second[memory], kind), select(labels, kind, least))[1]
    ]
    real, fake = (sum(len(select(labels[memory], kind, least)) for memory in swapped) for labels in (first, swapped))
    return (
        f"{kind:9}readers   the second reader gave {sum(shared)} of {len(shared)} labels of the first; "
        f"for {len(swapped)} memories, {real} labels with real and {fake} with swapped triggers"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("index", type=Path, help="Index with patterns.")
    parser.add_argument("--labels", type=Path, default=LABELS, help="File with the labels.")
    parser.add_argument("--least", type=int, default=3, help="Smallest number of prefixes of a label, for recall.")
    parser.add_argument("--verbose", action="store_true", help="Print incorrect patterns and missed labels.")
    options = parser.parse_args()
    index, readers = Index(options.index), json.loads(options.labels.read_text(encoding="utf-8"))
    for kind in KINDS:
        print(describe_readers(readers, kind, options.least))
        correct: list[bool] = []
        found: list[bool] = []
        for memory, rows in readers["labels"].items():
            patterns = select((vars(pattern) for pattern in read_patterns(index, memory) or ()), kind)
            labels = select(rows, kind, options.least)
            results = compare(patterns, select(rows, kind))[0], compare(patterns, labels)[1]
            for total, what, results_of, names in (
                (correct, "wrong", results[0], patterns), (found, "missed", results[1], labels)
            ):  # fmt: skip
                total += results_of
                for (description, ranks), holds in zip(names, results_of, strict=True):
                    if options.verbose and not holds:
                        print(f"{what:7}{memory:9}{kind:9} {description} {sorted(ranks)}")
        for what, of in (("precision", correct), ("recall", found)):
            low, high = wilson(sum(of), len(of))
            share = sum(of) / max(len(of), 1)
            print(f"{kind:9}{what:10}{share:.3f} ({sum(of)} of {len(of)}, {low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
