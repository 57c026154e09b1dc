"""Compares the machine's patterns with labels that readers gave from the triggers alone: precision and recall.

    memlens scan bundled train.jsonl -o INDEX --unit line && memlens values INDEX && memlens patterns INDEX
    python benchmarks/labelled_patterns.py INDEX [--least 8] [--labels FILE] [--verbose]

train.jsonl holds 529 articles of the training text (training/README.md) without the held-out ones, one a record with
its sentences as lines: shuffled by random.Random(17) and taken from the first on, until the next would make more than
3,630,000 characters. A pattern is right if 60% of its prefixes are those of one label of its kind; a label is found if
a pattern of its kind shares 60% of the smaller of both and 40% of all their prefixes. Intervals are Wilson's. Labels
whose memory has other triggers in INDEX say nothing: give the same text. Two things say what the labels are worth: how
much of one reader's labels the other one has, and how many labels a reader sees in memories whose triggers were swapped
for prefixes with the same last tokens.
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
Named = tuple[str, frozenset[int]]  # a description and the trigger ranks it holds for


def is_right(pattern: frozenset[int], labels: Iterable[frozenset[int]]) -> bool:
    return any(len(pattern & label) >= 0.6 * len(pattern) for label in labels)


def is_found(label: frozenset[int], patterns: Iterable[frozenset[int]]) -> bool:
    return any(
        len(label & own) >= 0.6 * min(len(label), len(own)) and len(label & own) >= 0.4 * len(label | own)
        for own in patterns
    )


def compare(patterns: Sequence[Named], labels: Sequence[Named]) -> tuple[list[bool], list[bool]]:
    """Of one memory and kind: which patterns are right, which labels are found."""
    seen, said = [own for _, own in patterns], [own for _, own in labels]
    return [is_right(own, said) for own in seen], [is_found(own, seen) for own in said]


def named(rows: Iterable[Mapping[str, Any]], kind: str, least: int = 0) -> list[Named]:
    found = [(row["description"], frozenset(row["prefixes"])) for row in rows if row["kind"] == kind]
    return [(description, ranks) for description, ranks in found if len(ranks) >= least]


def describe_readers(read: Mapping[str, Any], kind: str, least: int) -> str:
    """How far both readers agree, and what a reader sees where triggers were swapped."""
    first, second, swapped = read["labels"], read["second_reader"], read["swapped"]
    shared = [
        found
        for memory, own in first.items()
        for found in compare(named(second[memory], kind), named(own, kind, least))[1]
    ]
    seen, in_swapped = (sum(len(named(by[one], kind, least)) for one in swapped) for by in (first, swapped))
    return (
        f"{kind:9}readers   {sum(shared)} of {len(shared)} labels of one are the other's; "
        f"in the same {len(swapped)} memories {seen} labels, {in_swapped} with swapped triggers"
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("index", type=Path)
    options.add_argument("--labels", type=Path, default=LABELS)
    options.add_argument("--least", type=int, default=3, help="recall is of labels of so many prefixes or more")
    options.add_argument("--verbose", action="store_true", help="print what is wrong and what was missed")
    given = options.parse_args()
    index, read = Index(given.index), json.loads(given.labels.read_text(encoding="utf-8"))
    for kind in KINDS:
        print(describe_readers(read, kind, given.least))
        right: list[bool] = []
        found: list[bool] = []
        for memory, own in read["labels"].items():
            patterns = named((vars(pattern) for pattern in read_patterns(index, memory) or ()), kind)
            said = named(own, kind, given.least)
            results = compare(patterns, named(own, kind))[0], compare(patterns, said)[1]
            for total, what, results_of, names in (
                (right, "wrong", results[0], patterns), (found, "missed", results[1], said)
            ):  # fmt: skip
                total += results_of
                for (description, ranks), holds in zip(names, results_of, strict=True):
                    if given.verbose and not holds:
                        print(f"{what:7}{memory:9}{kind:9} {description} {sorted(ranks)}")
        for what, of in (("precision", right), ("recall", found)):
            low, high = wilson(sum(of), len(of))
            share = sum(of) / max(len(of), 1)
            print(f"{kind:9}{what:10}{share:.3f} ({sum(of)} of {len(of)}, {low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
