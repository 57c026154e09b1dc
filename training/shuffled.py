"""Write the comparison of the bundled model with shuffled networks, which the demo reads instead of computing it.

    memlens demo -o DEMO
    python training/shuffled.py DEMO

Run this again when the model, the text, the demo's settings or the rules for patterns change. It takes some minutes.
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import memlens
from memlens.experiments import shuffled


def main(folder: str) -> None:
    index, model = memlens.open_index(folder), memlens.load("bundled")
    shuffled.SHIPPED.unlink(missing_ok=True)  # otherwise compute() would return its rows
    rows = shuffled.compute(index, model)
    with TemporaryDirectory() as part:
        text = Path(part) / "text.jsonl"
        shuffled.write_part(index, text, shuffled.TOKENS)
        content = {"inputs": shuffled.digest_inputs(index, model, text, seed=0), "rows": rows}
    shuffled.SHIPPED.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
