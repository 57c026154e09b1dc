"""`make demo`: the first commands a newcomer would type, run one after another on a small model and the bundled text.

The model has random weights, so its memories mean nothing; what is shown is the way from a model to its triggers.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from memlens.testing import save_tiny

FOLDER = Path("memlens-demo")


def run(*arguments: str) -> None:
    print(f"\n$ memlens {' '.join(arguments)}\n", flush=True)
    subprocess.run([sys.executable, "-m", "memlens", *arguments], check=True)


def main() -> None:
    model = str(save_tiny(FOLDER / "model", "llama", max_position_embeddings=256))
    index = str(FOLDER / "index")
    run("info", model)
    run("scan", model, "bundled", "-o", index, "--max-tokens", "60000")
    run("show", index, "L1N7", "--top", "5")
    run("search", index, "railway", "--limit", "5")
    print(f"\nThe index is in {index}. Try the same with a model and a text of your own.")


if __name__ == "__main__":
    main()
