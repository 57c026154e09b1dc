"""Tokens a second of `memlens scan` on a checkpoint of the paper's kind, beside the authors' own program.

    python benchmarks/adaptive.py [FOLDER] [--text FILE] [--reference-seconds S --reference-tokens N]

The reference's default is the recorded run of the authors' trigger program on the same small model: one thread,
110.37 s of processor time for 598 sentences of 14,195 words. It is compared with processor time, since wall time
depends on what else the machine does. A scan is timed whole, from reading the text to the written index. The reference
is the time of a whole process, so the line "with load" adds loading the model and importing torch; on a short text that
is most of it. The first scan also loads or makes compiled code, so it is shown apart.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

_HERE = Path(__file__).resolve().parent.parent
_FIXTURE = _HERE / "tests" / "golden" / "fixture"


def main() -> None:
    options = _parse()
    import memlens

    began = time.process_time()
    model = memlens.load(options.folder, device="cpu")
    loading = time.process_time() - began
    runs = []
    for _ in range(options.repeat + 1):
        with tempfile.TemporaryDirectory() as folder:
            wall, processor = time.perf_counter(), time.process_time()
            index = memlens.scan(
                model, options.text, out=folder, preset="released", top=20, unit="line", threads=options.threads
            )
            runs.append((time.process_time() - processor, time.perf_counter() - wall))
            tokens = index.manifest.counts.tokens
    first, best = runs[0], min(runs[1:])
    reference = options.reference_tokens / options.reference_seconds
    print(f"model      {model!r}, loaded in {loading:.2f} s")
    print(f"text       {tokens:,} tokens")
    for label, (processor, wall) in (("first scan", first), ("best scan", best)):
        print(
            f"{label:<10} {processor:.3f} s of processor time ({wall:.3f} s wall), {tokens / processor:,.0f} tokens/s, "
            f"{tokens / processor / reference:,.0f} x the reference"
        )
    whole = best[0] + loading
    print(
        f"with load  {whole:.3f} s, {tokens / whole:,.0f} tokens/s, {tokens / whole / reference:,.0f} x the reference"
    )
    print(
        f"reference  {options.reference_seconds:g} s for {options.reference_tokens:,} tokens, {reference:,.0f} tokens/s"
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", nargs="?", type=Path, default=_FIXTURE, help="a folder with model.pt and dict.txt")
    parser.add_argument("--text", type=Path, help="one sentence a line; default: trigger_train.txt in the folder")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--reference-seconds", type=float, default=110.37)
    parser.add_argument("--reference-tokens", type=int, default=14_195)
    options = parser.parse_args()
    options.text = options.text or options.folder / "trigger_train.txt"
    return options


if __name__ == "__main__":
    main()
