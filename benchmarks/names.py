"""Names of sixty memories next to what readers saw in their triggers.

    memlens scan MODEL TEXT -o INDEX
    python benchmarks/names.py INDEX --sample sample.txt       # before any name exists
    memlens values INDEX && memlens patterns INDEX
    python benchmarks/names.py INDEX --labels a.json b.json

The sample holds six random memories with at least 25 triggers in each of ten layers (SEED), each with its 12 strongest
triggers and without any name. Two readers write independently what they see in each memory, or null:
{"L5N94": "what I see", "L5N95": null}. The comparison prints labels and name of each memory as Markdown, so that a
person can judge whether the name says what the readers saw, and counts the memories with a clear name by the number of
readers who saw something.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

import numpy as np

from memlens.index.memory import read_summary
from memlens.index.reader import Index
from memlens.memory import MemoryId, Trigger

SEED, LAYERS, EACH, LEAST, SHOWN = 39, 10, 6, 25, 12
_BEFORE, _AFTER = 140, 30  # characters
_TASK = """Sixty memories. Each is shown with its 12 strongest triggers. The coefficient belongs to the token in [[ ]],
which ends the prefix. The text after || follows it and is not part of the prefix. Write for every memory what you see
in one short line (how the prefixes end, what they are about, what comes next), or null:
{"L5N94": "what I see", "L5N95": null}.
"""


def sample_memories(index: Index) -> list[MemoryId]:
    """Return EACH memories with enough triggers in each of LAYERS layers, spread over the depth."""
    random = np.random.default_rng(SEED)
    query = "SELECT memory FROM {triggers} WHERE layer = $1 AND \"end\" = 'top' GROUP BY memory HAVING count(*) >= $2"
    memories = []
    for place in range(LAYERS):
        layer = index.layers[round(place * (len(index.layers) - 1) / (LAYERS - 1))]
        enough = np.array(sorted(row["memory"] for row in index.sql(query, [layer, LEAST])))
        memories += [index.names.name(layer, m) for m in sorted(random.choice(enough, EACH, replace=False).tolist())]
    return memories


def write_trigger(number: int, trigger: Trigger) -> str:
    before, token, after = (part.replace("\n", "⏎") for part in (trigger.before, trigger.token, trigger.after))
    return f"{number:2}. {before[-_BEFORE:]}[[{token}]] || {after[:_AFTER]}"


def write_sample(index: Index) -> str:
    lines = [_TASK]
    for name in sample_memories(index):
        lines += [f"\n== {name}"]
        lines += [write_trigger(number, trigger) for number, trigger in enumerate(index.triggers(name)[:SHOWN], 1)]
    return "\n".join(lines) + "\n"


def compare_names(index: Index, labels: list[dict[str, str | None]]) -> str:
    """Return a table of labels and names, with counts of clear names by how many readers found a pattern."""
    head = ["memory", *(f"reader {number}" for number in range(1, len(labels) + 1)), "name", "evidence"]
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    counts: Counter[tuple[int, bool]] = Counter()
    for name in sample_memories(index):
        summary = read_summary(index, name)
        if summary is None:
            raise SystemExit(f"{name} has no name; run `memlens patterns {index.folder}`")
        seen = [own.get(str(name)) for own in labels]
        is_clear = summary.evidence is not None
        counts[sum(label is not None for label in seen), is_clear] += 1
        cells = [str(name), *(label or "–" for label in seen), summary.name]
        lines.append(f"| {' | '.join(cells)} | {f'{summary.evidence:.2f}' if summary.evidence is not None else '–'} |")
    lines.append("")
    for readers in range(len(labels), -1, -1):
        clear, unclear = counts[readers, True], counts[readers, False]
        lines.append(f"- something seen by {readers} readers: {clear} of {clear + unclear} memories have a clear name")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("index", type=Path)
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--sample", type=Path, help="write the sample to this file")
    task.add_argument("--labels", type=Path, nargs="+", help="files of the readers")
    options = parser.parse_args()
    index = Index(options.index)
    if options.sample:
        options.sample.write_text(write_sample(index), encoding="utf-8")
    else:
        labels = [json.loads(path.read_text(encoding="utf-8")) for path in options.labels]
        print(compare_names(index, labels), end="")


if __name__ == "__main__":
    main()
