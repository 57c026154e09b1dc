"""Names of sixty memories next to what two readers saw in their triggers.

    memlens scan MODEL TEXT -o INDEX && memlens values INDEX
    python benchmarks/names.py sheet INDEX PREFIX --seed 39        # writes PREFIX-sheet.md: triggers only
    memlens patterns INDEX --states
    python benchmarks/names.py judge INDEX PREFIX --seed 39        # writes PREFIX-judge1.md, PREFIX-judge2.md, ...
    python benchmarks/names.py count INDEX PREFIX --seed 39        # writes PREFIX-names.md

1. `sheet` draws six random memories with at least 25 triggers in each of ten layers, and writes them in random order
   under neutral numbers with their 25 strongest triggers. One or two readers label them independently of each other and
   before any name exists: PREFIX-reader1.json and PREFIX-reader2.json.
2. `judge` shows each reader his own labels next to the names and subjects that memlens found. The answers are
   PREFIX-judge1.json and PREFIX-judge2.json.
3. `count` counts the answers. The name "no clear pattern" is not judged: it counts as right if the reader saw nothing,
   and as unclear otherwise.

A subject that memlens found is a pattern of kind "semantic", or a class of last words that are content words. Precision
is the share of these that the reader judged right, recall the share of the reader's subjects that were found.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from memlens.index.memory import read_patterns, read_summary
from memlens.index.reader import Index
from memlens.memory import MemoryId, Trigger
from memlens.pattern.features import FUNCTION_LISTS
from memlens.pattern.naming import UNCLEAR
from memlens.stats import wilson

LAYERS, EACH, SHOWN = 10, 6, 25
READERS = (1, 2)
_BEFORE, _AFTER = 110, 25  # characters
SHEET = """# What do these prefixes have in common?

Each of the sixty numbers below stands for one unit of a language model. Under it are the 25 prefixes of a text on which
the unit is most active, strongest first. A prefix ends with the token in [[ ]]. The text after || follows the prefix;
the unit has not seen it. ⏎ is a line break.

Work alone, use only this sheet, and label every number in order. Answer in a JSON file:

    {"1": {"label": "ends with \\"of\\" after a number", "subject": null}, "2": {"label": null, "subject": null}, ...}

- **label**: the one or two clearest things that at least about a quarter of the prefixes share, in one short line, as
  you would name the unit for a colleague: how they end (a word, a piece of a word, a kind of word), words that recur,
  what they are about, or what comes next. null if nothing is clear. Do not guess: null is a good answer.
- **subject**: what the prefixes share in meaning, beyond one word that they all end with: a topic (sport, war), a class
  of last words (months, family members, verbs of motion), or the kind of thing that is being said (a comparison, a
  date, the title of a work). null if they share only particular words, only grammar (articles, prepositions, forms of
  be) or nothing.
"""
JUDGE = """# Do the names say what you see?

Your labels of the sheet stand next to what memlens found. Look at the triggers in the sheet again where needed. Answer
in a JSON file with every number below:

    {"1": {"name": "says", "subjects": ["right", "wrong"], "found": true}, ...}

- **name**: "says" if the name says what you see: it states your label or a clear part of it, and nothing false.
  "part" if it is true of several prefixes but misses what you see, or mixes true and false. "wrong" if it does not
  describe these prefixes. Where you saw nothing, judge by the triggers. Left out where there is no name.
- **subjects**: for each subject that memlens found, in order: "right" if these prefixes share it, "wrong" otherwise.
  Left out where there is none.
- **found**: true if one of these subjects, or the name, says the subject of your label. Left out where you gave none.
"""


def sample_memories(index: Index, seed: int) -> list[MemoryId]:
    """Return EACH memories with enough triggers in each of LAYERS layers over the depth, in random order."""
    random = np.random.default_rng(seed)
    query = "SELECT memory FROM {triggers} WHERE layer = $1 AND \"end\" = 'top' GROUP BY memory HAVING count(*) >= $2"
    memories = []
    for place in range(LAYERS):
        layer = index.layers[round(place * (len(index.layers) - 1) / (LAYERS - 1))]
        enough = np.array(sorted(row["memory"] for row in index.sql(query, [layer, SHOWN])))
        memories += [index.names.name(layer, m) for m in random.choice(enough, EACH, replace=False).tolist()]
    return [memories[place] for place in random.permutation(len(memories))]


def write_trigger(number: int, trigger: Trigger) -> str:
    before, token, after = (part.replace("\n", "⏎") for part in (trigger.before, trigger.token, trigger.after))
    return f"{number:2}. {before[-_BEFORE:]}[[{token}]] || {after[:_AFTER]}"


def write_sheet(index: Index, seed: int) -> str:
    lines = [SHEET]
    for number, name in enumerate(sample_memories(index, seed), 1):
        lines += [f"\n## {number}\n"]
        lines += [write_trigger(place, trigger) for place, trigger in enumerate(index.triggers(name)[:SHOWN], 1)]
    return "\n".join(lines) + "\n"


def is_class_of_content(pattern: str) -> bool:
    kind, _, name = pattern.partition(":")
    return kind == "class" or (kind == "list" and name not in (*FUNCTION_LISTS, "a mark", "a closing mark"))


def read_found(index: Index, seed: int) -> Iterator[tuple[int, str, bool, list[str]]]:
    """Yield number, name, whether the name is clear, and the subjects that were found, for each memory."""
    for number, memory in enumerate(sample_memories(index, seed), 1):
        summary, patterns = read_summary(index, memory), read_patterns(index, memory)
        if summary is None or patterns is None:
            raise SystemExit(f"{memory} has no name; run `memlens patterns {index.folder}`")
        subjects = [
            pattern.description
            for pattern in patterns
            if pattern.kind == "semantic" or is_class_of_content(pattern.pattern)
        ]
        yield number, summary.name, not summary.name.startswith(UNCLEAR), subjects


def write_judge(index: Index, labels: dict[str, Any], seed: int) -> str:
    lines = [JUDGE]
    for number, name, is_clear, subjects in read_found(index, seed):
        label = labels[str(number)]
        if not (is_clear or subjects or label["subject"]):
            continue
        lines += [f"\n## {number}\n", f"- your label: {label['label']}", f"- your subject: {label['subject']}"]
        lines += [f"- name: {name}" if is_clear else f"- no name to judge ({name})"]
        lines += [f"- subject {place}: {subject}" for place, subject in enumerate(subjects, 1)]
    return "\n".join(lines) + "\n"


def share(hits: int, total: int) -> str:
    low, high = wilson(hits, total)
    return f"{hits} of {total} ({hits / max(total, 1):.0%}, {low:.0%} to {high:.0%})"


def write_counts(index: Index, labels: list[dict[str, Any]], answers: list[dict[str, Any]], seed: int) -> str:
    """Return the labels, names and answers as a table, and the counts of each reader."""
    found = list(read_found(index, seed))
    memories = sample_memories(index, seed)
    readers = [f"reader {number}" for number, _ in enumerate(labels, 1)]
    lines = [f"| memory | {' | '.join(readers)} | name | judged | subjects | judged |"]
    lines += ["| --- " * (5 + len(readers)) + "|"]
    verdicts: list[list[str]] = [[] for _ in readers]
    right: list[list[str]] = [[] for _ in readers]
    seen: list[list[bool]] = [[] for _ in readers]
    for number, name, is_clear, subjects in found:
        own_labels, own = [read[str(number)] for read in labels], [read.get(str(number), {}) for read in answers]
        for reader, (label, answer) in enumerate(zip(own_labels, own, strict=True)):
            nothing = "says" if label["label"] is None else "unclear"
            verdicts[reader].append(answer["name"] if is_clear else nothing)
            right[reader] += answer["subjects"] if subjects else []
            seen[reader] += [answer["found"]] if label["subject"] else []
        seen_as = ["; subject: ".join(filter(None, (label["label"], label["subject"]))) or "–" for label in own_labels]
        judged = " / ".join(of_reader[-1] for of_reader in verdicts)
        of_subjects = " / ".join(", ".join(answer.get("subjects", ())) or "–" for answer in own)
        cells = [str(memories[number - 1]), *seen_as, name, judged, "; ".join(subjects) or "–", of_subjects]
        lines.append(f"| {' | '.join(cell.replace('|', '¦') for cell in cells)} |")
    lines += ["", "| | " + " | ".join(readers) + " |", "| --- " * (1 + len(readers)) + "|"]
    for verdict in ("says", "part", "wrong", "unclear"):
        counts = (Counter(own)[verdict] for own in verdicts)
        lines.append(f"| {verdict} | " + " | ".join(share(count, len(found)) for count in counts) + " |")
    lines.append("| subjects, precision | " + " | ".join(share(own.count("right"), len(own)) for own in right) + " |")
    lines.append("| subjects, recall | " + " | ".join(share(sum(own), len(own)) for own in seen) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("sheet", "judge", "count"))
    parser.add_argument("index", type=Path)
    parser.add_argument("prefix", help="Beginning of the names of all files.")
    parser.add_argument("--seed", type=int, default=39, help="Seed of the sample. Default: 39.")
    options = parser.parse_args()
    index = Index(options.index)

    def read(kind: str, reader: int) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(Path(f"{options.prefix}-{kind}{reader}.json").read_text(encoding="utf-8"))
        return content

    readers = [reader for reader in READERS if Path(f"{options.prefix}-reader{reader}.json").exists()]

    def write(name: str, text: str) -> None:
        Path(f"{options.prefix}-{name}.md").write_text(text, encoding="utf-8")

    if options.step == "sheet":
        write("sheet", write_sheet(index, options.seed))
    elif options.step == "judge":
        for reader in readers:
            write(f"judge{reader}", write_judge(index, read("reader", reader), options.seed))
    else:
        labels, answers = ([read(kind, reader) for reader in readers] for kind in ("reader", "judge"))
        write("names", write_counts(index, labels, answers, options.seed))


if __name__ == "__main__":
    main()
